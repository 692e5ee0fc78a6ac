//! A load that goes on while both contenders take turns at following it, and what it is measured
//! by: markers ([`beats`]) between its transactions, which come by the clock ([`pace`]).

mod beats;
mod legs;
mod pace;

pub use beats::PER_SECOND as MARKERS_PER_SECOND;
pub use pace::Load;

use crate::backlog::Tables;
use crate::contest::{Contestant, DRAIN_MAX, Farshore, Ground, Native, prove_equal};
use crate::measurement::Run;
use anyhow::Result;
use beats::{Beats, Sightings};
use farshore_testkit::wait::watch_until;
use postgres::Client;
use std::collections::BTreeMap;
use std::time::Instant;

/// A load that reaches less than this share of its rate is said to have fallen behind.
const PACE_KEPT: f64 = 0.98;

/// Transactions that a load is made of; it goes on from phase to phase.
pub trait Source: Tables {
    /// One client of the publisher.
    type Session: Session;

    /// Clients.
    fn sessions(&self) -> usize;

    /// A client's part; give its rows back with [`Source::set`].
    ///
    /// # Errors
    /// When the publisher refuses.
    fn session(&self, number: usize, client: Client, seed: u64) -> Result<Self::Session>;

    /// Takes note of what a client has come to.
    fn set(&mut self, session: &Self::Session);

    /// The number of the newest marker.
    fn last_beat(&self) -> i64;

    /// Takes note of the newest marker.
    fn set_beat(&mut self, number: i64);

    /// The number of the next marker, which is to be committed now.
    fn next_beat(&mut self) -> i64 {
        self.set_beat(self.last_beat() + 1);
        self.last_beat()
    }
}

/// One client of the publisher.
pub trait Session: Send {
    /// Commits the next transaction.
    ///
    /// # Errors
    /// When the publisher refuses.
    fn commit(&mut self) -> Result<()>;

    /// Transactions so far.
    fn committed(&self) -> u64;
}

/// DDL of the markers' table.
pub fn schema() -> String {
    beats::schema()
}

/// The markers' row as it is before replication begins.
pub fn preload() -> String {
    beats::preload()
}

/// What both came to.
pub struct Turn {
    /// Farshore.
    pub farshore: Run,
    /// Native replication.
    pub native: Run,
}

/// A phase of the load for each contender, and the proof that both end equal.
///
/// # Errors
/// When something fails, or a target is not equal in the end.
pub fn take_turn<S: Source>(
    ground: &Ground<'_>,
    mut source: S,
    load: Load,
    farshore_first: bool,
) -> Result<Turn> {
    ground.say("preparing");
    ground.create(&source)?;
    let mut native = Native::prepare(ground)?;
    let mut farshore = Farshore::prepare(ground, &source)?;
    ground.even_out()?;
    ground.set_line();
    let turn = if farshore_first {
        let farshore = phase(ground, &mut farshore, &mut source, load)?;
        Turn { farshore, native: phase(ground, &mut native, &mut source, load)? }
    } else {
        let native = phase(ground, &mut native, &mut source, load)?;
        Turn { native, farshore: phase(ground, &mut farshore, &mut source, load)? }
    };
    // Whoever was first has the other's phase still before it, and the end of the load may have
    // come after the last marker.
    let mut publisher = ground.source()?;
    Beats::of(&mut publisher)?.commit(source.next_beat())?;
    let both: [&mut dyn Contestant; 2] = [&mut native, &mut farshore];
    for contestant in both {
        contestant.start()?;
        await_beat(ground, contestant, source.last_beat())?;
        contestant.stop()?;
    }
    prove_equal(ground)?;
    Ok(turn)
}

/// The load with one contender at work.
fn phase<S: Source>(
    ground: &Ground<'_>,
    contestant: &mut dyn Contestant,
    source: &mut S,
    load: Load,
) -> Result<Run> {
    let name = contestant.contender().name();
    ground.await_idle_slots()?;
    contestant.start()?;
    await_beat(ground, contestant, source.last_beat())?;
    let meter = ground.begin(contestant)?;
    ground.say(&format!("{name}: {:.0} transactions per second", load.per_second));
    let (beats, seen, committed) = pace::run(ground, contestant, source, load)?;
    let (costs, sent) = (meter.read(ground, contestant)?, meter.sent(ground));
    contestant.stop()?;

    let latencies = seen.sightings.latencies_ms(&beats, load.warm_up);
    let quantile = |share| beats::quantile(&latencies, share);
    let mean = latencies.iter().sum::<f64>() / latencies.len().max(1) as f64;
    let per_second = committed as f64 / (load.warm_up + load.seconds);
    ground.say(&format!(
        "{name}: mean {mean:.1} ms, p50 {:.1} ms, p99 {:.1} ms, max {:.1} ms at {per_second:.0} \
         per second",
        quantile(0.5),
        quantile(0.99),
        quantile(1.0)
    ));
    if per_second < PACE_KEPT * load.per_second {
        ground.say("the publisher could not commit as many as it was asked to");
    }
    let mut values = BTreeMap::from([
        ("mean_ms", mean),
        ("p50_ms", quantile(0.5)),
        ("p99_ms", quantile(0.99)),
        ("max_ms", quantile(1.0)),
        // Less than was asked for if the publisher could not commit more.
        ("committed_per_s", per_second),
    ]);
    values.extend(sent);
    values.extend(seen.legs.summary(&beats, load.warm_up));
    Ok(Run { values, costs })
}

/// Waits until a contender's target shows a marker, or a later one.
fn await_beat(ground: &Ground<'_>, contestant: &mut dyn Contestant, number: i64) -> Result<()> {
    let mut target = Sightings::connect(ground, contestant.contender())?;
    let log = contestant.log();
    watch_until("everything so far to be visible", DRAIN_MAX, &[&log], || {
        ground.interrupt().check()?;
        if target.newest()? >= number {
            return Ok(Some(()));
        }
        contestant.check().map(|()| None)
    })
}

/// Transactions per second that native replication applies when all are there already: those that
/// `commit` commits and counts.
///
/// # Errors
/// When something fails.
pub fn drain_natively<S: Source>(
    ground: &Ground<'_>,
    source: &mut S,
    commit: impl FnOnce(&mut S) -> Result<u64>,
) -> Result<f64> {
    ground.say("preparing");
    ground.create(source)?;
    let mut native = Native::prepare(ground)?;
    ground.even_out()?;
    let mut publisher = ground.source()?;
    // From the first marker to the last: the worker's start does not count.
    Beats::of(&mut publisher)?.commit(source.next_beat())?;
    let first = source.last_beat();
    let transactions = commit(source)?;
    Beats::of(&mut publisher)?.commit(source.next_beat())?;
    ground.await_idle_slots()?;
    ground.begin(&mut native)?;
    native.start()?;
    await_beat(ground, &mut native, first)?;
    let begin = Instant::now();
    await_beat(ground, &mut native, source.last_beat())?;
    let ceiling = transactions as f64 / begin.elapsed().as_secs_f64();
    native.stop()?;
    ground.say(&format!("native applies {ceiling:.0} transactions per second at most"));
    Ok(ceiling)
}
