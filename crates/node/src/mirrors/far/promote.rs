//! `farshore mirror promote`: the standby of a far end takes over.

use super::FarAgent;
use crate::agents::lock;
use crate::config::mirrors::FarMirror;
use crate::sites::protocol::{AskEnd, Wanted};
use crate::switch::Held;
use farshore_mirror::promote::{Inherited, Plan, Promoted, promote};
use farshore_mirror::relay::end::{EndAnswer, PrincipalsLog, hear_end};
use farshore_mirror::spool::{Spool, SpoolError};
use farshore_model::Lsn;
use farshore_pg::Config;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, oneshot};

/// Taking log in ends between two pieces; only a disk that does not answer holds it up for longer,
/// however short a standby's patience is set.
const RESTS_WITHIN: Duration = Duration::from_secs(10);

/// How a standby is to be promoted, as typed.
pub(crate) struct Takeover<'a> {
    pub standby: Option<&'a str>,
    pub allow_data_loss: bool,
    pub instead_of: Option<&'a str>,
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
        let was_held = AtomicBool::new(false);
        let told = match spool.closed() {
            // Nothing comes in any more, whatever there is.
            Some(_) => Told::unknown(
                Lsn::ZERO,
                Err("an earlier promotion closed the spool, and told of it then".to_owned()),
            ),
            None => self.ask_the_near_end(&spool, &was_held).await,
        };
        let (over, ends) = oneshot::channel::<()>();
        let taking_over = async {
            let taken_over =
                self.take_over(&spool, told, &was_held, standby, wanted, progress).await;
            drop(over);
            taken_over
        };
        let (taken_over, ()) = tokio::join!(taking_over, self.keep_held(&spool, &was_held, ends));
        if was_held.load(Relaxed) && taken_over.is_err() {
            // Should that not arrive, it goes on by itself.
            let _ = self.ask_once(self.hold(false)).await;
        }
        taken_over
    }

    /// A near end that streams from a spool of its own node takes nothing in meanwhile.
    fn hold(&self, hold: bool) -> AskEnd {
        AskEnd { hold: Some(hold), ..AskEnd::of(&self.config.name) }
    }

    /// Asks for that, and notes where it is so: what held on once has to do so until the end.
    async fn ask_to_hold(&self, spool: &Spool, was_held: &AtomicBool) -> Result<EndAnswer, String> {
        let answer = self.ask_once(self.hold(true)).await?;
        was_held.fetch_or(holds_own(&answer, spool), Relaxed);
        Ok(answer)
    }

    /// Asks for it again and again, once it was so. What was asked is waited for at the end: it must
    /// not be heard after what is said then.
    async fn keep_held(
        &self,
        spool: &Spool,
        was_held: &AtomicBool,
        mut ends: oneshot::Receiver<()>,
    ) {
        loop {
            tokio::select! {
                _ = &mut ends => return,
                () = tokio::time::sleep(HOLD_AGAIN) => {}
            }
            if !was_held.load(Relaxed) {
                continue;
            }
            let why = match self.ask_to_hold(spool, was_held).await {
                Ok(answer) if holds_own(&answer, spool) => continue,
                Ok(_) => "its log says why".to_owned(),
                Err(why) => why,
            };
            tracing::warn!(mirror = %self.name(), "the near end does not hold on: {why}");
        }
    }

    async fn take_over(
        &self,
        spool: &Arc<Spool>,
        told: Told,
        was_held: &AtomicBool,
        standby: Config,
        wanted: &Takeover<'_>,
        progress: &mpsc::Sender<String>,
    ) -> Result<String, String> {
        let name = self.name();
        let was_connected = self.far.status().connected;
        let (held, durable, told) =
            self.come_to_rest(spool, (told, was_held), wanted, progress).await?;
        if !wanted.allow_data_loss {
            told.check(name, durable)?;
        }
        let plan = Plan {
            standby,
            listen: self.where_standbys_connect(),
            allow_data_loss: wanted.allow_data_loss,
            instead_of: wanted.instead_of.map(str::to_owned),
            patience: Duration::from_secs(wanted.wait_seconds),
        };
        let told = Mutex::new(told);
        let last_word = || async {
            if !was_held.load(Relaxed) {
                return Ok(());
            }
            self.close_the_near_ends(spool, &told, durable, wanted.allow_data_loss).await
        };
        let promoted = promote(spool, &plan, last_word, progress).await;
        drop(held);
        let promoted = promoted.map_err(|error| error.to_string())?;
        tracing::warn!(
            mirror = %name, timeline = %promoted.timeline, fork = %promoted.fork,
            spool_end = %promoted.spool_end, lost_bytes = promoted.lost_bytes(), "promoted"
        );
        let told = told.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        let mut text = said(name, &promoted, was_connected, (durable, &told));
        if let Some(error) = &promoted.unsaved {
            text.push_str(&format!(". {}", unsaved_close(name, spool.folder(), error)));
        }
        // They are told once this is noted, and go then: nobody needs the spool to take over.
        text.push_str(&self.others().await);
        let noting = spool.clone();
        let _ = tokio::task::spawn_blocking(move || noting.note_promoted()).await;
        Ok(text)
    }

    /// Who streams from the spool still, which gets no more: in words.
    async fn others(&self) -> String {
        // The server that was promoted has left, or leaves now.
        tokio::time::sleep(LEAVES_WITHIN).await;
        let others = self.far.standbys.reports();
        let others =
            others.iter().map(|other| format!("{} ({})", other.application_name, other.peer.ip()));
        still_streaming(&others.collect::<Vec<_>>())
    }

    /// Has everything come that the near end has, and takes in nothing more: nothing is acknowledged
    /// from then on. Where the near end does not wait for that, what it has may grow meanwhile: it
    /// is asked again.
    async fn come_to_rest(
        &self,
        spool: &Spool,
        (mut told, was_held): (Told, &AtomicBool),
        wanted: &Takeover<'_>,
        progress: &mpsc::Sender<String>,
    ) -> Result<(Held<'_>, Lsn, Told), String> {
        let rests_within = Duration::from_secs(wanted.wait_seconds).max(RESTS_WITHIN);
        let mut round = 1;
        loop {
            let has_all = self.fetch_the_rest(spool, &told, wanted.wait_seconds, progress).await;
            let Some(held) = self.intake.hold_within(rests_within).await else {
                return Err(format!(
                    "mirror \"{}\" does not come to rest within {rests_within:?}: the disk of its \
                     spool in {} does not answer, and nobody can tell what it holds. Nothing was \
                     promoted. See to that disk. To give up what only the spool holds: stop the old \
                     principal and this node for good, so that nothing more is acknowledged, and \
                     promote the standby by itself (pg_promote())",
                    self.name(),
                    spool.folder().display()
                ));
            };
            if told.is_there && told.asked == Ok(Mode::Async) {
                // What was taken in before that is on its way to the disk.
                let _ = tokio::time::timeout(rests_within, spool.settled()).await;
                if let Ok(again) = self.ask_to_hold(spool, was_held).await {
                    let again = Told::of(again, told.end, spool);
                    told = Told { goes_on: has_all && again.end > told.end, ..again };
                }
            }
            let durable = spool.positions().borrow().durable;
            let is_done = durable >= told.end || !has_all || wanted.allow_data_loss;
            if is_done || told.asked != Ok(Mode::Async) || round == FETCHES_MAX {
                return Ok((held, durable, told));
            }
            drop(held);
            round += 1;
        }
    }

    /// The near end's own spool, which has held on, takes nothing in from now on, for good: what it
    /// would take in and acknowledge is not on the server that is about to take over. It may have
    /// taken something in since it was asked first, where it was started again or was not heard of
    /// for long. So it is looked once more that nothing of it is missing here, while it holds on;
    /// only then it is closed.
    async fn close_the_near_ends(
        &self,
        spool: &Spool,
        told: &Mutex<Told>,
        durable: Lsn,
        allow_data_loss: bool,
    ) -> Result<(), String> {
        let look = |answer: Result<EndAnswer, String>, is_closed: bool| {
            let answer = answer?;
            if !holds_own(&answer, spool) {
                return Err("it does not do so; its log says why".to_owned());
            }
            let mut told = lock(told);
            let now = Told::of(answer, told.end, spool);
            *told = Told { is_closed, goes_on: now.end > told.end, ..now };
            Ok(())
        };
        let check =
            || if allow_data_loss { Ok(()) } else { lock(told).check(self.name(), durable) };
        match look(self.ask_once(self.hold(true)).await, false) {
            Ok(()) => check()?,
            Err(_) if allow_data_loss => {}
            Err(why) => {
                return Err(format!(
                    "{}. The standby was not promoted. Run this again; a near end that does not \
                     answer at all holds nothing up",
                    self.cannot_be_told(&why)
                ));
            }
        }
        match look(self.ask_once(AskEnd { closed: true, ..self.hold(true) }).await, true) {
            Ok(()) => check(),
            Err(_) if allow_data_loss => Ok(()),
            Err(why) => Err(format!(
                "{}. It was asked to close its spool for good, and may have done so: commits at its \
                 principal that wait for it wait for ever then. The standby was not promoted. Run \
                 this again",
                self.cannot_be_told(&why)
            )),
        }
    }

    fn cannot_be_told(&self, why: &str) -> String {
        format!(
            "the near end of mirror \"{}\", whose node keeps log by itself, has held on so far, and \
             cannot be told now that its principal is not to be answered any more ({why}): commits \
             would go on returning there that are not on the new server",
            self.name()
        )
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
    /// that is acknowledged and may be nowhere else. Whether all has come.
    async fn fetch_the_rest(
        &self,
        spool: &Spool,
        told: &Told,
        wait_seconds: u64,
        progress: &mpsc::Sender<String>,
    ) -> bool {
        let mut positions = spool.positions();
        let mut reached = positions.borrow().durable;
        // What cannot be fetched is not waited for: the near end, or its principal, is gone as well.
        if (!told.is_there && !self.far.status().connected) || reached >= told.end {
            return reached >= told.end;
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
        reached >= told.end
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

    /// One at a time: the near end ends the session before, which may be what is waited for.
    async fn ask_once(&self, ask: AskEnd) -> Result<EndAnswer, String> {
        let _turn = self.asking.lock().await;
        let asked = self.near_side.talk(Wanted::MirrorEnd(ask), hear_end);
        match tokio::time::timeout(ANSWER_WITHIN, asked).await {
            Ok(Ok(answer)) => answer.map_err(|error| error.to_string()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("it does not answer within {ANSWER_WITHIN:?}")),
        }
    }

    async fn ask_the_near_end(&self, spool: &Spool, was_held: &AtomicBool) -> Told {
        let heard = self.far.status().principal_end;
        let ask = || self.ask_to_hold(spool, was_held);
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
        match answer {
            Ok(answer) => Told::of(answer, heard, spool),
            Err(why) => Told::unknown(heard, Err(why)),
        }
    }
}

/// A near end that is there answers within this time.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);
/// One that does not is asked again for so long.
const ASK_FOR: Duration = Duration::from_secs(5);
const ASK_AGAIN: Duration = Duration::from_millis(250);
/// A server that was promoted streams no longer than this.
const LEAVES_WITHIN: Duration = Duration::from_millis(300);
/// How often a near end that holds on is told to do so for longer.
const HOLD_AGAIN: Duration = Duration::from_secs(5);
/// How often what has come to the near end meanwhile is fetched as well.
const FETCHES_MAX: u32 = 3;
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
    /// It has told its principal that everything up to here is in the spool.
    acknowledged: Lsn,
    /// All of that had come before, and more was written since.
    goes_on: bool,
    /// Its principal is a spool there, which takes nothing in any more.
    is_closed: bool,
}

impl Told {
    /// Where only what was `heard` earlier is known.
    fn unknown(heard: Lsn, asked: Result<Mode, String>) -> Told {
        let acknowledged = Lsn::ZERO;
        Told { end: heard, asked, is_there: false, acknowledged, goes_on: false, is_closed: false }
    }

    fn of(answer: EndAnswer, heard: Lsn, spool: &Spool) -> Told {
        // Whatever a flush means there: commits return when they are in the spool that it streams from.
        let is_async = answer.is_async() || answer.holds;
        let mode = if is_async { Mode::Async } else { Mode::Waited };
        let own = spool.identity().system_id.to_string();
        let acknowledged = answer.acknowledged.filter(|of| of.system_id == own);
        let acknowledged = acknowledged.map_or(Lsn::ZERO, |acknowledged| acknowledged.up_to);
        let told = match answer.log {
            PrincipalsLog::EndsAt { system_id, end } if system_id == own => {
                Told { end: end.max(heard), is_there: true, ..Told::unknown(heard, Ok(mode)) }
            }
            PrincipalsLog::EndsAt { system_id, .. } => {
                let why = format!("its principal is another cluster now, {system_id}");
                Told::unknown(heard, Err(why))
            }
            // Of mode async, what its principal told of earlier may be there once more; else no
            // commit returned without this mirror, and there is nothing to be missed.
            PrincipalsLog::Unknown { .. } => Told::unknown(heard, Ok(mode)),
        };
        Told { acknowledged, ..told }
    }

    /// What the near end is to the log up to there.
    fn has(&self) -> &'static str {
        if self.is_there { "has" } else { "had told of" }
    }

    /// Whether commits that returned may be missing here, that could be had.
    fn check(&self, name: &str, durable: Lsn) -> Result<(), String> {
        if durable < self.acknowledged {
            return Err(format!(
                "the near end of mirror \"{name}\" has acknowledged log up to {}, and the spool here \
                 has it up to {durable} only: it was set back to an earlier state, or is a copy, or was \
                 begun anew (a machine that was cloned or restored, say). The last {} bytes of what was \
                 acknowledged, and commits in them that have returned, are not in it. The standby was \
                 not promoted. If there is another spool, promote there; to promote without these \
                 commits: --allow-data-loss",
                self.acknowledged,
                self.acknowledged.bytes_since(durable)
            ));
        }
        if self.asked != Ok(Mode::Async) || durable >= self.end {
            return Ok(());
        }
        let missing = self.end.bytes_since(durable);
        if self.is_closed {
            return Err(format!(
                "the near end of mirror \"{name}\" {} log up to {}, {missing} bytes more than came \
                 here, and commits in them may have returned. The standby was not promoted; but the \
                 node in between is closed for good already: commits at its principal that wait for \
                 it wait for ever, and what it has comes here meanwhile. Run this again. To promote \
                 without these bytes, and the commits in them: --allow-data-loss",
                self.has(),
                self.end
            ));
        }
        let why = if self.goes_on {
            "Its principal is alive and goes on writing: stop it, or keep its clients away, and run \
             this again"
        } else {
            "farshore status says why the log does not come"
        };
        Err(format!(
            "the near end of mirror \"{name}\" {} log up to {}, {missing} bytes more than came here, and \
             commits return there before this site has them: they would be lost. The standby was \
             not promoted, and the mirror goes on. {why}. \
             To promote without these bytes, and the commits in them: --allow-data-loss",
            self.has(),
            self.end
        ))
    }
}

/// Whether the log comes from a spool beside the near end that holds on, and is that of `spool`.
fn holds_own(answer: &EndAnswer, spool: &Spool) -> bool {
    let own = spool.identity().system_id.to_string();
    answer.holds
        && matches!(&answer.log, PrincipalsLog::EndsAt { system_id, .. } if *system_id == own)
}

/// Of a spool that was closed, and whose folder does not tell.
pub(super) fn unsaved_close(name: &str, folder: &Path, error: &SpoolError) -> String {
    format!(
        "The promotion could not be noted ({error}): nothing is taken in as long as this node runs, and \
         a restart would know nothing of it, take in what an old principal writes, and acknowledge \
         that. Before one, remove the folder {}, or take [mirror.{name}] out of the site file",
        folder.display()
    )
}

fn still_streaming(others: &[String]) -> String {
    if others.is_empty() {
        return String::new();
    }
    format!(
        ". This mirror has no more log for who else streams from it, and tells them so: {}. Point their \
         primary_conninfo (of another mirror, its principal) to the new server, with a \
         primary_slot_name that it has, or none; or seed them anew",
        others.join(", ")
    )
}

/// `durable` is what came here at the last.
fn said(
    name: &str,
    promoted: &Promoted,
    was_connected: bool,
    (durable, told): (Lsn, &Told),
) -> String {
    let Promoted { timeline, fork, spool_end, was_already, inherited, unsaved: _ } = promoted;
    let was = if *was_already { "had been promoted already" } else { "is promoted" };
    let mut text =
        format!("the standby of mirror \"{name}\" {was}: timeline {timeline} begins at {fork}");
    let set_back = told.acknowledged.bytes_since(durable.max(*fork));
    match promoted.lost_bytes() {
        0 if set_back > 0 => {}
        0 => text.push_str(&format!(
            ", at or past {spool_end}, where the log in the spool ends: nothing that this mirror \
             acknowledged is lost"
        )),
        lost => text.push_str(&format!(
            ". LOST: {lost} bytes of log up to {spool_end}, which the spool holds, and the commits \
             in them"
        )),
    }
    if set_back > 0 {
        text.push_str(&format!(
            ". LOST: {set_back} bytes of log up to {}, which the near end has acknowledged and the \
             spool has not, and the commits in them",
            told.acknowledged
        ));
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
    let mut lives = |what: &str| {
        text.push_str(&format!(
            ". The near end was still connected: if the old principal lives, stop it, or keep its \
             clients away. {what}"
        ));
    };
    match (&told.asked, told.is_there || was_connected) {
        _ if told.is_closed => lives(
            "The node in between takes nothing in any more: commits at the old principal that wait \
             for it wait for ever",
        ),
        (Ok(Mode::Async), true) => lives(
            "Commits there go on returning, as they do not wait for this mirror, and those from now on \
             are not on the new server",
        ),
        _ if was_connected => lives("Commits that wait for this mirror there wait for ever"),
        _ => {}
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_mirror::wal::Timeline;

    fn told(end: u64, asked: Result<Mode, String>) -> Told {
        Told { is_there: true, ..Told::unknown(Lsn(end), asked) }
    }

    #[test]
    fn only_what_was_acknowledged_elsewhere_and_can_be_had_is_refused_to_be_given_up() {
        let refused = told(150, Ok(Mode::Async)).check("m", Lsn(100)).unwrap_err();
        assert!(refused.contains("50 bytes more than came here"), "{refused}");
        assert!(refused.contains("--allow-data-loss"), "{refused}");
        let goes_on = Told { goes_on: true, ..told(150, Ok(Mode::Async)) };
        assert!(goes_on.check("m", Lsn(100)).unwrap_err().contains("goes on writing"));
        let closed = Told { is_closed: true, ..told(150, Ok(Mode::Async)) };
        let refused = closed.check("m", Lsn(100)).unwrap_err();
        assert!(refused.contains("closed for good") && !refused.contains("goes on"), "{refused}");
        let set_back = Told { acknowledged: Lsn(120), ..told(150, Ok(Mode::Waited)) };
        let refused = set_back.check("m", Lsn(100)).unwrap_err();
        assert!(refused.contains("was set back") && refused.contains("last 20 bytes"), "{refused}");
        assert_eq!(set_back.check("m", Lsn(120)), Ok(()));
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
            unsaved: None,
        };
        let said = |told| said("m", &promoted, false, (Lsn(100), &told));
        // The rest of a record that never ended is no loss.
        assert!(!said(told(100, Ok(Mode::Async))).contains("LOST"));
        assert!(said(told(150, Ok(Mode::Async))).contains("LOST: 50 bytes of log"));
        assert!(!said(told(150, Ok(Mode::Waited))).contains("LOST"));
        // It lives, and does not wait.
        assert!(said(told(100, Ok(Mode::Async))).contains("go on returning"));
        assert!(!said(told(100, Ok(Mode::Waited))).contains("still connected"));
        let set_back = said(Told { acknowledged: Lsn(120), ..told(150, Ok(Mode::Waited)) });
        assert!(set_back.contains("LOST: 20 bytes") && !set_back.contains("nothing"), "{set_back}");
        let closed = Told { is_closed: true, ..told(100, Ok(Mode::Async)) };
        let closed = said(closed);
        assert!(
            closed.contains("for it wait for ever") && !closed.contains("returning"),
            "{closed}"
        );
        let unknown = said(told(150, Err("gone".to_owned())));
        assert!(unknown.contains("could not be asked what it has (gone)"), "{unknown}");
        assert!(unknown.contains("50 bytes more than came here"), "{unknown}");
    }
}
