//! Transactions by the clock: each has its time, and one that is late is committed at once. Who
//! commits never waits for who replicates.

use super::beats::{self, Beat, Beats, Sightings};
use super::legs::Legs;
use super::{Session, Source};
use crate::contest::{Contestant, DRAIN_MAX, Ground};
use anyhow::{Context, Result, bail};
use farshore_testkit::interrupt::Interrupt;
use farshore_testkit::wait::log_tail;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

/// Between two looks at the target: what latencies are measured to. Both contenders pay for the
/// looks alike.
const LOOK_EVERY: Duration = Duration::from_micros(500);
/// After the load's end, before somebody asks the contender what is wrong.
const PATIENCE: Duration = Duration::from_secs(2);

/// How much and how long.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Transactions per second, markers included.
    pub per_second: f64,
    /// Seconds that do not count.
    pub warm_up: f64,
    /// Seconds that do.
    pub seconds: f64,
    /// Farshore is asked now and then how far each leg is. That costs a little.
    pub watches_legs: bool,
}

/// What was seen of the contender.
pub struct Seen {
    /// By a reader of its target.
    pub sightings: Sightings,
    /// Of its legs.
    pub legs: Legs,
}

impl Load {
    fn duration(self) -> Duration {
        Duration::from_secs_f64(self.warm_up + self.seconds)
    }
}

/// What all threads look at.
struct Shared<'a> {
    start: Barrier,
    /// Somebody has failed: all end.
    over: AtomicBool,
    /// The last marker's number, once it is known.
    last_beat: AtomicI64,
    interrupt: &'a Interrupt,
}

/// More than any marker's number.
const UNKNOWN: i64 = i64::MAX;

/// How a thread ends when another one has failed.
#[derive(Debug)]
struct GivenUp;

impl std::fmt::Display for GivenUp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the load was given up")
    }
}

impl std::error::Error for GivenUp {}

impl Shared<'_> {
    fn check(&self) -> Result<()> {
        self.interrupt.check()?;
        // Only a request to end: no other memory depends on it.
        if self.over.load(Ordering::Relaxed) { Err(GivenUp.into()) } else { Ok(()) }
    }

    /// Runs a thread's work; its failure ends the others.
    fn guard<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let done = work();
        if done.is_err() {
            self.over.store(true, Ordering::Relaxed);
        }
        done
    }
}

/// Calls `act` at a steady rate until the time is over; `phase` from 0 to 1 moves it between the
/// beats of others.
fn at_rate(
    shared: &Shared<'_>,
    per_second: f64,
    phase: f64,
    duration: Duration,
    mut act: impl FnMut() -> Result<()>,
) -> Result<()> {
    shared.start.wait();
    let begin = Instant::now();
    for number in 0_u64.. {
        let due = Duration::from_secs_f64((number as f64 + phase) / per_second);
        // Who has fallen behind ends in time nevertheless.
        if due.max(begin.elapsed()) >= duration {
            break;
        }
        let early = due.saturating_sub(begin.elapsed());
        if !early.is_zero() {
            // The pace of the load; nobody waits for it.
            std::thread::sleep(early);
        }
        shared.check()?;
        act()?;
    }
    Ok(())
}

/// Runs the load until its time is over and its last marker is visible in the contender's target.
/// Returns the markers, what was seen of them, and the number of transactions.
///
/// # Errors
/// When a server refuses, or the contender gives up.
pub fn run<S: Source>(
    ground: &Ground<'_>,
    contestant: &mut dyn Contestant,
    traffic: &mut S,
    load: Load,
) -> Result<(Vec<Beat>, Seen, u64)> {
    let count = traffic.sessions();
    let status = contestant.status().filter(|_| load.watches_legs);
    let shared = Shared {
        start: Barrier::new(count + 2),
        over: AtomicBool::new(false),
        last_beat: AtomicI64::new(UNKNOWN),
        interrupt: ground.interrupt(),
    };
    let shared = &shared;
    let mut sessions = Vec::with_capacity(count);
    for number in 0..count {
        // Other text in every phase.
        let seed = ground.seed().wrapping_add(1_000 + traffic.last_beat() as u64);
        sessions.push(traffic.session(number, ground.source()?, seed)?);
    }
    let mut source = ground.source()?;
    // Nothing may fail between here and the barrier that all threads meet at.
    let mut beats = Beats::of(&mut source)?;
    let mut sightings = Sightings::connect(ground, contestant.contender())?;
    let first_beat = traffic.last_beat() + 1;
    let per_session = (load.per_second - beats::PER_SECOND).max(1.0) / count as f64;

    let watched_to_the_end = AtomicBool::new(false);
    let over = &watched_to_the_end;
    let (sessions, beats, legs) =
        std::thread::scope(|scope| -> Result<(Vec<S::Session>, Vec<Beat>, Legs)> {
            let working: Vec<ScopedJoinHandle<'_, Result<S::Session>>> = sessions
                .into_iter()
                .enumerate()
                .map(|(number, mut session)| {
                    let phase = number as f64 / count as f64;
                    scope.spawn(move || {
                        shared.guard(|| {
                            at_rate(shared, per_session, phase, load.duration(), || {
                                session.commit()
                            })?;
                            Ok(session)
                        })
                    })
                })
                .collect();
            let beating =
                scope.spawn(|| shared.guard(|| beat(shared, &mut beats, first_beat, load)));
            let asking = status.map(|status| scope.spawn(move || Legs::watch(&status, over)));
            let watched = shared.guard(|| watch(shared, contestant, &mut sightings));
            let (mut done, mut failures) = (Vec::with_capacity(count), Vec::new());
            for session in working {
                match join(session) {
                    Ok(session) => done.push(session),
                    Err(error) => failures.push(error),
                }
            }
            let beats = join(beating).unwrap_or_else(|error| {
                failures.push(error);
                Vec::new()
            });
            over.store(true, Ordering::Relaxed);
            let legs = asking.map_or_else(|| Ok(Legs::default()), join).unwrap_or_else(|error| {
                failures.push(error);
                Legs::default()
            });
            failures.extend(watched.err());
            // Who gave up tells only that another one had a reason.
            failures.sort_by_key(|error| error.is::<GivenUp>());
            match failures.into_iter().next() {
                Some(error) => Err(error),
                None => Ok((done, beats, legs)),
            }
        })?;
    let committed = sessions.iter().map(Session::committed).sum::<u64>() + beats.len() as u64;
    sessions.iter().for_each(|session| traffic.set(session));
    if let Some(last) = beats.last() {
        traffic.set_beat(last.number);
    }
    Ok((beats, Seen { sightings, legs }, committed))
}

fn join<T>(handle: ScopedJoinHandle<'_, Result<T>>) -> Result<T> {
    handle.join().unwrap_or_else(|_| bail!("a thread of the load has panicked"))
}

/// Commits markers until the load's time is over.
fn beat(
    shared: &Shared<'_>,
    committer: &mut Beats<'_>,
    first: i64,
    load: Load,
) -> Result<Vec<Beat>> {
    let mut beats = Vec::new();
    at_rate(shared, beats::PER_SECOND, 0.0, load.duration(), || {
        beats.push(committer.commit(first + beats.len() as i64)?);
        Ok(())
    })?;
    let last = beats.last().context("the load was too short for a marker")?;
    shared.last_beat.store(last.number, Ordering::Relaxed);
    Ok(beats)
}

/// Looks at the target until the last marker is there.
fn watch(
    shared: &Shared<'_>,
    contestant: &mut dyn Contestant,
    sightings: &mut Sightings,
) -> Result<()> {
    shared.start.wait();
    let mut ended = None;
    loop {
        let newest = sightings.look()?;
        let last = shared.last_beat.load(Ordering::Relaxed);
        if newest >= last {
            return Ok(());
        }
        shared.check()?;
        if last != UNKNOWN {
            let waited = ended.get_or_insert_with(Instant::now).elapsed();
            // Asking a contender takes longer than a look, so nobody asks as long as latencies
            // are what they should be.
            if waited > PATIENCE {
                contestant.check()?;
            }
            if waited > DRAIN_MAX {
                bail!("the last marker did not arrive{}", log_tail(&contestant.log(), 25));
            }
        }
        std::thread::park_timeout(LOOK_EVERY);
    }
}
