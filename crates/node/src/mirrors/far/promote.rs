//! `farshore mirror promote`: the standby of a far end takes over.

use super::FarAgent;
use crate::config::mirrors::FarMirror;
use crate::sites::protocol::{AskEnd, Wanted};
use farshore_mirror::promote::{Inherited, Plan, Promoted, promote};
use farshore_mirror::relay::end::{EndAnswer, PrincipalsLog, hear_end};
use farshore_mirror::spool::Spool;
use farshore_model::Lsn;
use farshore_pg::Config;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Taking log in ends between two pieces; only a disk that does not answer holds it up for longer,
/// however short a standby's patience is set.
const RESTS_WITHIN: Duration = Duration::from_secs(10);

/// How a standby is to be promoted, as typed.
pub(crate) struct Takeover<'a> {
    pub standby: Option<&'a str>,
    pub allow_data_loss: bool,
    pub wait_seconds: u64,
}

impl FarAgent {
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Promotes a standby that has everything that the spool holds. Nothing is taken in meanwhile,
    /// and never again once the standby was told.
    ///
    /// # Errors
    /// Why not, for a person.
    pub async fn promote(
        &self,
        wanted: &Takeover<'_>,
        progress: &mpsc::Sender<String>,
    ) -> Result<String, String> {
        let name = self.name();
        let standby = match wanted.standby {
            Some(text) => Config::parse(text).map_err(|error| format!("--standby: {error}"))?,
            None => self.config.standby.clone().ok_or_else(|| {
                format!(
                    "no standby is known: set standby = \"postgres://…\" under [mirror.{name}], or \
                     name one with --standby"
                )
            })?,
        };
        let spool = self.far.spool().ok_or_else(|| match self.report().error {
            Some(why) if !self.is_usable => format!(
                "the spool of mirror \"{name}\" cannot be used, so nobody can tell whether a \
                     standby has all that it acknowledged: {why}"
            ),
            _ => format!("mirror \"{name}\" has received no log yet: there is nothing to promote"),
        })?;
        let was_connected = self.far.status().connected;
        let told = match spool.closed() {
            // Nothing comes in any more, whatever there is.
            Some(_) => Told::unknown(
                Lsn::ZERO,
                Err("an earlier promotion closed the spool, and told of it then".to_owned()),
            ),
            None => self.fetch_the_rest(&spool, wanted.wait_seconds, progress).await,
        };
        // Nothing is acknowledged from here on.
        let rests_within = Duration::from_secs(wanted.wait_seconds).max(RESTS_WITHIN);
        let Some(held) = self.intake.hold_within(rests_within).await else {
            return Err(format!(
                "mirror \"{name}\" does not come to rest within {rests_within:?}: the disk of its \
                 spool in {} does not answer, and nobody can tell what it holds. Nothing was \
                 promoted. See to that disk. To give up what only the spool holds: stop the old \
                 principal and this node for good, so that nothing more is acknowledged, and \
                 promote the standby by itself (pg_promote())",
                spool.folder().display()
            ));
        };
        let durable = spool.positions().borrow().durable;
        if !wanted.allow_data_loss {
            told.check(name, durable)?;
        }
        let plan = Plan {
            standby,
            listen: self.where_standbys_connect(),
            allow_data_loss: wanted.allow_data_loss,
            patience: Duration::from_secs(wanted.wait_seconds),
        };
        let promoted = promote(&spool, &plan, progress).await;
        drop(held);
        let promoted = promoted.map_err(|error| error.to_string())?;
        tracing::warn!(
            mirror = %name, timeline = %promoted.timeline, fork = %promoted.fork,
            spool_end = %promoted.spool_end, lost_bytes = promoted.lost_bytes(), "promoted"
        );
        Ok(said(name, &promoted, was_connected, (durable, &told)))
    }

    /// Where, and with what, for messages.
    fn where_standbys_connect(&self) -> String {
        let FarMirror { listen, access, .. } = &self.config;
        let place = match listen.parse::<SocketAddr>() {
            Ok(every) if every.ip().is_unspecified() => {
                format!("port {} of this machine", every.port())
            }
            Ok(_) | Err(_) => listen.clone(),
        };
        match &access.password {
            Some(file) => format!("{place}, with the password in {}", file.display()),
            None => place,
        }
    }

    /// Lets come what the near end has by now: where it streams from a node that keeps log alone,
    /// that is acknowledged and may be nowhere else.
    async fn fetch_the_rest(
        &self,
        spool: &Spool,
        wait_seconds: u64,
        progress: &mpsc::Sender<String>,
    ) -> Told {
        let told = self.ask_the_near_end(spool).await;
        let mut positions = spool.positions();
        let mut reached = positions.borrow().durable;
        // What cannot be fetched is not waited for: the near end, or its principal, is gone as well.
        if (!told.is_there && !self.far.status().connected) || reached >= told.end {
            return told;
        }
        let _ = progress.try_send(format!(
            "the near end has log up to {}, {} bytes beyond the spool: fetching it",
            told.end,
            told.end.bytes_since(reached)
        ));
        let within = Duration::from_secs(wait_seconds);
        while reached < told.end {
            let moved = positions.wait_for(|now| now.durable > reached);
            match tokio::time::timeout(within, moved).await {
                Ok(Ok(now)) => reached = now.durable,
                Ok(Err(_)) | Err(_) => break,
            }
        }
        told
    }

    /// Tells the near end now and then that nothing more is taken in here: it may have been started
    /// again, and its principal keeps log for this mirror.
    pub(super) async fn tell_closed(&self) {
        let closed = AskEnd { closed: true, ..AskEnd::of(&self.config.name) };
        loop {
            if let Err(why) = self.ask_once(closed.clone()).await {
                tracing::debug!(
                    mirror = %self.name(),
                    "the near end could not be told of the promotion: {why}"
                );
            }
            tokio::time::sleep(TELL_CLOSED_EVERY).await;
        }
    }

    async fn ask_once(&self, ask: AskEnd) -> Result<EndAnswer, String> {
        let asked = self.near_side.talk(Wanted::MirrorEnd(ask), hear_end);
        match tokio::time::timeout(ANSWER_WITHIN, asked).await {
            Ok(Ok(answer)) => answer.map_err(|error| error.to_string()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("it does not answer within {ANSWER_WITHIN:?}")),
        }
    }

    async fn ask_the_near_end(&self, spool: &Spool) -> Told {
        let heard = self.far.status().principal_end;
        let ask = || self.ask_once(AskEnd::of(&self.config.name));
        let begun = Instant::now();
        let mut answer = ask().await;
        // A node that is being started again is there soon, and so is the server beside it.
        let soon_known = |answer: &Result<EndAnswer, String>| match answer {
            Ok(answer) => answer.is_async() && matches!(answer.log, PrincipalsLog::Unknown { .. }),
            Err(_) => true,
        };
        while soon_known(&answer) && begun.elapsed() < ASK_FOR {
            tokio::time::sleep(ASK_AGAIN).await;
            answer = ask().await;
        }
        let answer = match answer {
            Ok(answer) => answer,
            Err(why) => return Told::unknown(heard, Err(why)),
        };
        let mode = if answer.is_async() { Mode::Async } else { Mode::Waited };
        let own = spool.identity().system_id.to_string();
        match answer.log {
            PrincipalsLog::EndsAt { system_id, end } if system_id == own => {
                Told { end: end.max(heard), asked: Ok(mode), is_there: true }
            }
            PrincipalsLog::EndsAt { system_id, .. } => {
                let why = format!("its principal is another cluster now, {system_id}");
                Told::unknown(heard, Err(why))
            }
            // Of mode async, what its principal told of earlier may be there once more; else no
            // commit returned without this mirror, and there is nothing to be missed.
            PrincipalsLog::Unknown { .. } => Told::unknown(heard, Ok(mode)),
        }
    }
}

/// A near end that is there answers within this time.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// One that does not is asked again for so long.
const ASK_FOR: Duration = Duration::from_secs(5);
const ASK_AGAIN: Duration = Duration::from_millis(250);
/// How often a near end is told of a promotion.
const TELL_CLOSED_EVERY: Duration = Duration::from_secs(15);

/// Whether commits wait for a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// They do, if the principal is told to.
    Waited,
    /// They return without it.
    Async,
}

/// What is known of the near end's log.
struct Told {
    /// It ends here, or later.
    end: Lsn,
    /// What the near end said when it was asked now, or why it could not be.
    asked: Result<Mode, String>,
    /// Its principal was asked, and has that log now.
    is_there: bool,
}

impl Told {
    /// Where only what was `heard` earlier is known.
    fn unknown(heard: Lsn, asked: Result<Mode, String>) -> Told {
        Told { end: heard, asked, is_there: false }
    }

    /// What the near end is to the log up to there.
    fn has(&self) -> &'static str {
        if self.is_there { "has" } else { "had told of" }
    }

    /// Whether commits that returned may be missing here, that could be had.
    fn check(&self, name: &str, durable: Lsn) -> Result<(), String> {
        if self.asked != Ok(Mode::Async) || durable >= self.end {
            return Ok(());
        }
        Err(format!(
            "the near end of mirror \"{name}\" {} log up to {}, {} bytes more than came here, and \
             commits return there before this site has them: they would be lost. The standby was \
             not promoted, and the mirror goes on. farshore status says why the log does not come. \
             To promote without these bytes, and the commits in them: --allow-data-loss",
            self.has(),
            self.end,
            self.end.bytes_since(durable)
        ))
    }
}

/// `durable` is what came here at the last.
fn said(
    name: &str,
    promoted: &Promoted,
    was_connected: bool,
    (durable, told): (Lsn, &Told),
) -> String {
    let Promoted { timeline, fork, spool_end, was_already, inherited } = promoted;
    let was = if *was_already { "had been promoted already" } else { "is promoted" };
    let mut text =
        format!("the standby of mirror \"{name}\" {was}: timeline {timeline} begins at {fork}");
    match promoted.lost_bytes() {
        0 => text.push_str(&format!(
            ", at or past {spool_end}, where the log in the spool ends: nothing that this mirror \
             acknowledged is lost"
        )),
        lost => text.push_str(&format!(
            ". LOST: {lost} bytes of log up to {spool_end}, which the spool holds, and the commits \
             in them"
        )),
    }
    let not_here = told.end.bytes_since(durable.max(*fork));
    match &told.asked {
        Ok(Mode::Waited) if not_here == 0 => {}
        // A commit that waits for the mirror there was not promised to anybody.
        Ok(Mode::Waited) => text.push_str(&format!(
            ". {not_here} bytes of log up to {} did not come: commits in them that returned without \
             waiting for this mirror, if there are any, are lost",
            told.end
        )),
        Ok(Mode::Async) if not_here == 0 => {}
        Ok(Mode::Async) => text.push_str(&format!(
            ". LOST: {not_here} bytes of log up to {} that the near end {}, and the commits in them",
            told.end,
            told.has()
        )),
        Err(why) => {
            text.push_str(&format!(
                ". The near end could not be asked what it has ({why}): commits that did not wait \
                 for this mirror, of mode async and behind a node that keeps log alone, are lost \
                 where they did not come"
            ));
            if not_here > 0 {
                text.push_str(&format!(
                    "; it had told of log up to {}, {not_here} bytes more than came here",
                    told.end
                ));
            }
        }
    }
    for word in inherited.iter().flat_map(Inherited::words) {
        text.push_str(&format!(". {word}"));
    }
    if was_connected {
        text.push_str(
            ". The near end was still connected: if the old principal lives, stop it, or keep its \
             clients away. Commits that wait for this mirror there wait for ever",
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_mirror::wal::Timeline;

    fn told(end: u64, asked: Result<Mode, String>) -> Told {
        Told { end: Lsn(end), asked, is_there: true }
    }

    #[test]
    fn only_what_was_acknowledged_elsewhere_and_can_be_had_is_refused_to_be_given_up() {
        let refused = told(150, Ok(Mode::Async)).check("m", Lsn(100)).unwrap_err();
        assert!(refused.contains("50 bytes more than came here"), "{refused}");
        assert!(refused.contains("--allow-data-loss"), "{refused}");
        for (told, durable) in [
            (told(150, Ok(Mode::Async)), 150),
            (told(150, Ok(Mode::Waited)), 100),
            (told(150, Err("gone".to_owned())), 100),
        ] {
            assert_eq!(told.check("m", Lsn(durable)), Ok(()));
        }
    }

    #[test]
    fn what_is_lost_and_what_cannot_be_known_is_said() {
        let promoted = Promoted {
            timeline: Timeline(2),
            fork: Lsn(96),
            spool_end: Lsn(96),
            was_already: false,
            inherited: None,
        };
        let said = |told| said("m", &promoted, false, (Lsn(100), &told));
        // The rest of a record that never ended is no loss.
        assert!(!said(told(100, Ok(Mode::Async))).contains("LOST"));
        assert!(said(told(150, Ok(Mode::Async))).contains("LOST: 50 bytes of log"));
        assert!(!said(told(150, Ok(Mode::Waited))).contains("LOST"));
        let unknown = said(told(150, Err("gone".to_owned())));
        assert!(unknown.contains("could not be asked what it has (gone)"), "{unknown}");
        assert!(unknown.contains("50 bytes more than came here"), "{unknown}");
    }
}
