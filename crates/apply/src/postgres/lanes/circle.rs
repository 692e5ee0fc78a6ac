//! Groups that wait for each other in a way that the target cannot see.

use super::{LOOK_EVERY, Lanes};
use crate::postgres::pipeline::PipelineError;
use farshore_pg::{Connection, Mode};

/// What looks at an earlier group that is waited for have found, one after the other.
#[derive(Debug, Default)]
pub(super) struct HeldUp {
    /// It waits for a later one.
    by_ours: u32,
    /// It waits for anybody, or nobody could be asked.
    at_all: u32,
}

/// Locks of a moment look like a circle too; those are gone at the next look.
const LOOKS_AT_A_CIRCLE: u32 = 2;
/// A circle may close where no server can see it: in another subscription that commits in order
/// too, or in an application.
const LOOKS_AT_ANY_LOCK: u32 = 5;

impl Lanes {
    /// An earlier group that waits for a lock of a later one would wait forever: the later one
    /// waits for it, and the target cannot know.
    pub(super) async fn check_for_a_circle(&mut self) -> Result<(), PipelineError> {
        let Some(first) = self.closing.front() else { return Ok(()) };
        let pid = |lane: usize| self.pids.get(lane).map_or("", String::as_str);
        // What is behind it on the same connection holds no locks.
        let mut later: Vec<&str> = self.closing.iter().skip(1).map(|c| pid(c.lane)).collect();
        if self.open.begun {
            later.push(pid(self.current));
        }
        later.retain(|pid_of_later| *pid_of_later != pid(first.lane));
        if later.is_empty() {
            return Ok(());
        }
        match self.blockers(pid(first.lane), &later).await {
            Some(Blockers { any: false, .. }) => self.held_up = HeldUp::default(),
            Some(Blockers { ours, .. }) => {
                self.held_up.at_all += 1;
                self.held_up.by_ours = if ours { self.held_up.by_ours + 1 } else { 0 };
            }
            None => self.held_up.at_all += 1,
        }
        let HeldUp { by_ours, at_all } = self.held_up;
        if by_ours >= LOOKS_AT_A_CIRCLE || at_all >= LOOKS_AT_ANY_LOCK {
            let what = "an earlier group waits for a lock".to_owned();
            return Err(PipelineError::Met(what));
        }
        Ok(())
    }

    /// Who keeps process `first` waiting; `None` if that could not be found out. Asked on a
    /// connection of its own.
    async fn blockers(&self, first: &str, later: &[&str]) -> Option<Blockers> {
        let waiting = "WITH RECURSIVE w (pid) AS ( \
             SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids($1::text::int)) UNION \
             SELECT pg_catalog.unnest(pg_catalog.pg_blocking_pids(w.pid)) FROM w) \
             SELECT pg_catalog.count(*), pg_catalog.count(*) \
               FILTER (WHERE pid::text = ANY ($2::text::text[])) FROM w";
        let later = format!("{{{}}}", later.join(","));
        let application = format!("farshore {} looks for locks", self.settings.subscription);
        let target = self.settings.target.clone().with_application_name(&application);
        let asked = async {
            let mut connection = Connection::connect(&target, Mode::Sql).await.ok()?;
            let found = connection.query(waiting, &[Some(first), Some(&later)]).await.ok();
            connection.close().await;
            let row = found?.into_iter().next()?;
            let is_some = |column| row.get(column).is_some_and(|count| count != "0");
            Some(Blockers { any: is_some(0), ours: is_some(1) })
        };
        tokio::time::timeout(LOOK_EVERY, asked).await.ok().flatten()
    }
}

/// Who keeps a process waiting.
struct Blockers {
    any: bool,
    /// Later groups are among them, or behind them.
    ours: bool,
}
