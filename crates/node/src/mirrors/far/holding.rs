//! A spool that a mirror further on streams from takes nothing in while that one's standby is
//! promoted, and never again once it is: what its principal would be told as flushed meanwhile is
//! not on the server that takes over, and its commits would return all the same.

use super::FarAgent;
use crate::agents::lock;
use farshore_mirror::spool::{Closed, Spool};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

/// Who has asked asks again before; should it be gone, so is its promotion, and log is taken in.
const HELD_FOR: Duration = Duration::from_secs(30);
/// Coming to rest takes no longer, but where a disk hangs.
const RESTS_WITHIN: Duration = Duration::from_secs(5);
/// Nor does what had come by then take longer to the disk. Together less than who asks has patience.
const SETTLES_WITHIN: Duration = Duration::from_secs(3);

/// For whom nothing is taken in, and until when.
#[derive(Debug)]
struct Lease {
    whose: String,
    until: Instant,
}

/// What was asked of a far end by mirrors further on.
#[derive(Debug, Default)]
pub(super) struct Holding {
    lease: Mutex<Option<Lease>>,
    let_go: Notify,
    /// Who asks first begins; the others find it begun.
    turn: tokio::sync::Mutex<()>,
}

impl Holding {
    /// Whether it has begun already; then it lasts longer.
    fn lasts(&self, whose: &str) -> bool {
        let mut lease = lock(&self.lease);
        let Some(lease) = lease.as_mut() else { return false };
        *lease = Lease { whose: whose.to_owned(), until: Instant::now() + HELD_FOR };
        true
    }

    fn begin(&self, whose: &str) {
        let until = Instant::now() + HELD_FOR;
        *lock(&self.lease) = Some(Lease { whose: whose.to_owned(), until });
    }

    /// Until nobody has asked for longer.
    async fn ended(&self) {
        loop {
            let Some(until) = lock(&self.lease).as_ref().map(|lease| lease.until) else { return };
            tokio::select! {
                () = sleep_until(until) => {}
                () = self.let_go.notified() => {}
            }
            let mut lease = lock(&self.lease);
            if lease.as_ref().is_none_or(|lease| lease.until <= Instant::now()) {
                // Whoever asks from now on begins anew.
                *lease = None;
                return;
            }
        }
    }

    fn end(&self) {
        *lock(&self.lease) = None;
        self.let_go.notify_one();
    }

    /// For whom nothing is taken in now.
    pub fn whose(&self) -> Option<String> {
        lock(&self.lease).as_ref().map(|lease| lease.whose.clone())
    }
}

impl FarAgent {
    /// Takes nothing in for a while, for a promotion of `whose` standby.
    ///
    /// # Errors
    /// It does not come to rest, for a person.
    pub async fn hold_for(self: &Arc<Self>, whose: &str) -> Result<(), String> {
        let _turn = self.holding.turn.lock().await;
        if !self.is_closed() && !self.holding.lasts(whose) {
            self.begin_to_hold(whose).await?;
        }
        if let Some(spool) = self.far.spool() {
            // What had come by then is part of its end; none of it was acknowledged.
            let _ = timeout(SETTLES_WITHIN, spool.settled()).await;
        }
        Ok(())
    }

    async fn begin_to_hold(self: &Arc<Self>, whose: &str) -> Result<(), String> {
        let (began, beginning) = oneshot::channel();
        let (agent, who) = (self.clone(), whose.to_owned());
        tokio::spawn(async move {
            let resting = timeout(RESTS_WITHIN, agent.intake.hold_within(RESTS_WITHIN)).await;
            let Some(held) = resting.ok().flatten() else { return };
            if began.is_closed() {
                // Who asked has gone; who asks next begins by itself.
                return;
            }
            tracing::warn!(mirror = %agent.name(), "takes in nothing while {who} is promoted");
            agent.holding.begin(&who);
            let _ = began.send(());
            agent.holding.ended().await;
            if agent.is_closed() {
                // Also where it had stopped: its near end is to be told.
                held.go_on();
            } else {
                tracing::warn!(mirror = %agent.name(), "takes log in again: nothing was promoted, or nobody has said so");
            }
        });
        // What was in the way may have been the same, begun for who has gone since.
        if beginning.await.is_ok() || self.is_closed() || self.holding.lasts(whose) {
            return Ok(());
        }
        Err(format!("mirror \"{}\" does not come to rest within {RESTS_WITHIN:?}", self.name()))
    }

    /// Takes log in again, if nothing else is in the way.
    pub fn let_go(&self) {
        self.holding.end();
    }

    /// Takes nothing in any more, for good. That cannot be undone: who asks has looked before, while
    /// nothing was taken in, that nothing here is missing there.
    ///
    /// # Errors
    /// Why not, for a person.
    pub async fn close_for(self: &Arc<Self>, whose: &str) -> Result<(), String> {
        self.hold_for(whose).await?;
        let Some(spool) = self.far.spool() else { return Ok(()) };
        if self.is_closed() {
            return Ok(());
        }
        let server = whose.to_owned();
        let closed = tokio::task::spawn_blocking(move || close(&spool, server)).await;
        closed.map_err(|_| "closing the spool died".to_owned())??;
        tracing::warn!(mirror = %self.name(), "takes in nothing any more: {whose} is promoted");
        self.holding.end();
        Ok(())
    }

    /// The spool that standbys get, if there is one.
    pub fn spool(&self) -> Option<Arc<Spool>> {
        self.far.spool()
    }

    /// A standby of it was promoted, here or further on, or is about to be.
    pub fn is_closed(&self) -> bool {
        self.far.spool().is_some_and(|spool| spool.closed().is_some())
    }
}

/// Blocks on the disk.
fn close(spool: &Spool, server: String) -> Result<(), String> {
    let positions = *spool.positions().borrow();
    // Where that cannot be read the note says what is durable: nobody is promoted by it here.
    let end = spool.last_record_end().unwrap_or(positions.durable);
    let closed = Closed { timeline: positions.timeline, end, server };
    spool.close(closed).map_err(|error| error.to_string())?;
    // None of its own standbys is to take over.
    spool.note_promoted();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mirrors::{NearAgent, NearSide};

    /// Its far end, of a direct mirror that receives nothing.
    fn agent(folder: &std::path::Path) -> Arc<FarAgent> {
        let text = format!(
            "[site]\nname = \"s\"\ndata_dir = {folder:?}\n[mirror.m]\n\
             principal = \"postgres://a@127.0.0.1:1/b\"\nlisten = \"127.0.0.1:5433\"\n"
        );
        let site = crate::config::parse(&text, &folder.join("site.toml")).unwrap();
        let near = Arc::new(NearAgent::new(&site.mirrors.near[0], folder));
        let near_side = NearSide::Direct { near, site: "s".to_owned() };
        Arc::new(FarAgent::open(&site.mirrors.far[0], folder, near_side))
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_in_the_way_of_holding_on_may_be_that_it_holds_on() {
        let folder = tempfile::tempdir().unwrap();
        let agent = agent(folder.path());
        let held = agent.intake.hold().await;
        assert!(agent.hold_for("a").await.unwrap_err().contains("does not come to rest"));
        // Who asks goes before it is so: nothing is held for nobody.
        let gone = timeout(Duration::from_secs(1), agent.hold_for("a")).await;
        assert!(gone.is_err());
        drop(held);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(agent.holding.whose(), None);
        // Another one began it in the meantime.
        let held = agent.intake.hold().await;
        let asking = agent.clone();
        let asked = tokio::spawn(async move { asking.hold_for("b").await });
        tokio::time::sleep(Duration::from_secs(1)).await;
        agent.holding.begin("a");
        assert_eq!(asked.await.unwrap(), Ok(()));
        assert_eq!(agent.holding.whose().as_deref(), Some("b"));
        agent.let_go();
        drop(held);
        assert_eq!(agent.hold_for("c").await, Ok(()));
        assert_eq!(agent.hold_for("d").await, Ok(()));
        assert_eq!(agent.holding.whose().as_deref(), Some("d"));
        agent.let_go();
        tokio::time::timeout(Duration::from_secs(1), agent.intake.hold()).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_asks_for_again_ends() {
        let holding = Arc::new(Holding::default());
        assert!(!holding.lasts("a"), "nothing has begun");
        holding.begin("a");
        let ending = holding.clone();
        let ended = tokio::spawn(async move { ending.ended().await });
        tokio::time::sleep(HELD_FOR - Duration::from_secs(1)).await;
        assert!(holding.lasts("b") && !ended.is_finished());
        assert_eq!(holding.whose().as_deref(), Some("b"));
        tokio::time::sleep(HELD_FOR - Duration::from_secs(1)).await;
        assert!(!ended.is_finished());
        tokio::time::sleep(Duration::from_secs(2)).await;
        assert!(ended.is_finished() && holding.whose().is_none() && !holding.lasts("a"));
        holding.begin("a");
        let ending = holding.clone();
        let ended = tokio::spawn(async move { ending.ended().await });
        tokio::task::yield_now().await;
        holding.end();
        tokio::time::timeout(Duration::from_secs(1), ended).await.unwrap().unwrap();
    }
}
