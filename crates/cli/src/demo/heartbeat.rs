//! Lag as an application sees it, measured from outside Farshore: a client commits numbered rows
//! on the publisher and notes when COMMIT returned; another looks at the subscriber for the newest
//! number and notes when it was first visible. Both use the same clock.

use super::stage::Servers;
use anyhow::{Context, Result};
use postgres::Client;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two heartbeats.
const BEAT_EVERY: Duration = Duration::from_millis(25);
/// Between two looks at the subscriber; the lag is measured to about this much.
const LOOK_EVERY: Duration = Duration::from_millis(3);
/// A subscriber that shows a heartbeat this young is up to date.
const UP_TO_DATE: Duration = Duration::from_secs(1);

/// What was seen. Index n is heartbeat n.
#[derive(Default)]
struct Seen {
    /// When COMMIT returned.
    committed: Vec<Instant>,
    /// When it was first visible on the subscriber; shorter while there is lag.
    visible: Vec<Instant>,
}

/// Both clients at work. Dropping it ends them.
pub struct Heartbeat {
    seen: Arc<Mutex<Seen>>,
    failure: Arc<Mutex<Option<String>>>,
    stop_beating: Arc<AtomicBool>,
    stop_looking: Arc<AtomicBool>,
    beater: Option<JoinHandle<()>>,
    looker: Option<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn spawn(
    stop: &Arc<AtomicBool>,
    failure: &Arc<Mutex<Option<String>>>,
    every: Duration,
    mut turn: impl FnMut() -> Result<()> + Send + 'static,
) -> JoinHandle<()> {
    let (stop, failure) = (stop.clone(), failure.clone());
    std::thread::spawn(move || {
        // Relaxed: the flag guards no other memory.
        while !stop.load(Ordering::Relaxed) {
            if let Err(error) = turn() {
                lock(&failure).get_or_insert_with(|| format!("{error:#}"));
                return;
            }
            std::thread::park_timeout(every);
        }
    })
}

impl Heartbeat {
    /// Starts both clients.
    pub fn start(servers: &Servers) -> Result<Heartbeat> {
        let (mut publisher, mut subscriber) =
            (servers.publisher.connect()?, servers.subscriber.connect()?);
        let seen = Arc::<Mutex<Seen>>::default();
        let failure = Arc::<Mutex<Option<String>>>::default();
        let (stop_beating, stop_looking) = (Arc::default(), Arc::default());
        let insert = publisher
            .prepare("INSERT INTO shop.heartbeat VALUES ($1, clock_timestamp())")
            .context("prepare heartbeats")?;
        let newest = subscriber.prepare("SELECT max(beat) FROM shop.heartbeat")?;
        let beats = seen.clone();
        let mut beat: i64 = 0;
        let beater = spawn(&stop_beating, &failure, BEAT_EVERY, move || {
            // The other client may see it before it is noted here: that is a lag of 0.
            publisher.execute(&insert, &[&beat]).context("commit a heartbeat")?;
            lock(&beats).committed.push(Instant::now());
            beat += 1;
            Ok(())
        });
        let looks = seen.clone();
        let looker = spawn(&stop_looking, &failure, LOOK_EVERY, move || {
            let newest = look(&mut subscriber, &newest)?;
            let now = Instant::now();
            let mut seen = lock(&looks);
            while (seen.visible.len() as i64) <= newest {
                seen.visible.push(now);
            }
            Ok(())
        });
        Ok(Heartbeat {
            seen,
            failure,
            stop_beating,
            stop_looking,
            beater: Some(beater),
            looker: Some(looker),
        })
    }

    /// Fails if one of the clients has failed.
    pub fn check(&self) -> Result<()> {
        match &*lock(&self.failure) {
            Some(failure) => anyhow::bail!("the heartbeat failed: {failure}"),
            None => Ok(()),
        }
    }

    /// When the subscriber first showed a heartbeat that was committed after `moment` and was
    /// young then.
    pub fn up_to_date_after(&self, moment: Instant) -> Option<Instant> {
        let seen = lock(&self.seen);
        seen.pairs()
            .find(|(committed, visible)| {
                *committed > moment && visible.saturating_duration_since(*committed) < UP_TO_DATE
            })
            .map(|(_, visible)| visible)
    }

    /// Lag now: the age of the oldest heartbeat that the subscriber does not show.
    pub fn lag(&self) -> Duration {
        let seen = lock(&self.seen);
        seen.committed.get(seen.visible.len()).map_or(Duration::ZERO, Instant::elapsed)
    }

    /// Commits no more heartbeats. The last one is the newest transaction on the publisher if all
    /// other load has ended before.
    pub fn stop_beating(&mut self) {
        self.stop_beating.store(true, Ordering::Relaxed);
        if let Some(beater) = self.beater.take() {
            // A client that panicked has said so.
            let _ = beater.join();
        }
    }

    /// Heartbeats committed so far.
    pub fn count(&self) -> u64 {
        lock(&self.seen).committed.len() as u64
    }

    /// Whether the subscriber shows every heartbeat committed so far.
    pub fn all_visible(&self) -> bool {
        let seen = lock(&self.seen);
        seen.visible.len() >= seen.committed.len()
    }

    /// Lags of the heartbeats that were committed and became visible within one of the spans,
    /// sorted.
    pub fn lags(&self, spans: &[(Instant, Instant)]) -> Vec<Duration> {
        let seen = lock(&self.seen);
        let mut lags: Vec<Duration> = seen
            .pairs()
            .filter(|(committed, visible)| {
                spans.iter().any(|(from, to)| committed >= from && visible <= to)
            })
            .map(|(committed, visible)| visible.saturating_duration_since(committed))
            .collect();
        lags.sort_unstable();
        lags
    }
}

impl Seen {
    fn pairs(&self) -> impl Iterator<Item = (Instant, Instant)> + '_ {
        self.committed.iter().copied().zip(self.visible.iter().copied())
    }
}

fn look(subscriber: &mut Client, newest: &postgres::Statement) -> Result<i64> {
    let row = subscriber.query_one(newest, &[]).context("look for heartbeats")?;
    Ok(row.get::<_, Option<i64>>(0).unwrap_or(-1))
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        self.stop_beating();
        self.stop_looking.store(true, Ordering::Relaxed);
        if let Some(looker) = self.looker.take() {
            let _ = looker.join();
        }
    }
}

/// The value that a share of all are within; `sorted` in ascending order.
pub fn quantile(sorted: &[Duration], share: f64) -> Option<Duration> {
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let sorted: Vec<_> = (1..=100).map(Duration::from_millis).collect();
        assert_eq!(quantile(&sorted, 0.5), Some(Duration::from_millis(50)));
        assert_eq!(quantile(&sorted, 0.99), Some(Duration::from_millis(99)));
        assert_eq!(quantile(&sorted, 1.0), Some(Duration::from_millis(100)));
        assert_eq!(quantile(&sorted[..1], 0.5), Some(Duration::from_millis(1)));
        assert_eq!(quantile(&[], 0.5), None);
    }
}
