//! Clients go on at the standby that takes over, and what they saw before and after, all of it
//! together, must be strictly serializable.

use crate::mirrored::{LONG, Mirrored, report};
use crate::promotion::{check_fork, promote};
use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::serializability::{self, Anomaly, Clients, TABLE, Transaction};
use farshore_testkit::wait::wait_until;
use farshore_tests::Site;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};

const CLIENTS: usize = 6;
const WITHOUT_DRAIN: &str = "mirror-promote-without-drain";

/// Where the far site loses its power: what no fsync has covered is gone.
const POWER_CUTS: [&str; 5] = [
    "spool.before-write",
    "spool.before-fsync",
    "spool.after-fsync",
    "mirror.before-reply",
    "mirror.after-reply",
];

#[derive(Debug, Clone, Copy)]
enum Trouble {
    PrincipalKilled,
    PrincipalRestarted,
    NearKilled,
    FarKilled,
    FarLosesPower,
    BothSitesKilled,
    StandbyKilled,
    LinkCut,
    LineToStandbyCut,
}

impl Trouble {
    const ALL: [Trouble; 9] = [
        Trouble::PrincipalKilled,
        Trouble::PrincipalRestarted,
        Trouble::NearKilled,
        Trouble::FarKilled,
        Trouble::FarLosesPower,
        Trouble::BothSitesKilled,
        Trouble::StandbyKilled,
        Trouble::LinkCut,
        Trouble::LineToStandbyCut,
    ];

    fn strike(self, mirrored: &mut Mirrored, random: &mut StdRng) -> Result<()> {
        match self {
            Trouble::PrincipalKilled => {
                mirrored.principal.kill9()?;
                mirrored.principal.start()
            }
            Trouble::PrincipalRestarted => mirrored.principal.restart(),
            Trouble::NearKilled => {
                mirrored.near.kill9()?;
                mirrored.near.start()
            }
            Trouble::FarKilled => {
                mirrored.far.kill9()?;
                mirrored.far.start()
            }
            Trouble::FarLosesPower => {
                lose_power(mirrored, &POWER_CUTS, random)?;
                mirrored.far.start()
            }
            Trouble::BothSitesKilled => {
                mirrored.far.kill9()?;
                mirrored.near.kill9()?;
                mirrored.near.start()?;
                mirrored.far.start()
            }
            Trouble::StandbyKilled => {
                mirrored.standby.kill9()?;
                mirrored.standby.start()
            }
            Trouble::LinkCut => {
                mirrored.link.cut();
                mirrored.link.mend();
                Ok(())
            }
            Trouble::LineToStandbyCut => {
                mirrored.line.cut();
                mirrored.line.mend();
                Ok(())
            }
        }
    }
}

/// At one of these points, while clients are at work.
fn lose_power(mirrored: &mut Mirrored, points: &[&str], random: &mut StdRng) -> Result<()> {
    let point = points.choose(random).context("no point")?;
    let crash = format!("{point}:{}:cut", random.random_range(1..40));
    mirrored.far.kill9()?;
    mirrored.far.env("FARSHORE_CRASH", &crash);
    mirrored.far.start()?;
    mirrored.far.await_kill(&crash, LONG)?;
    mirrored.far.env("FARSHORE_CRASH", "");
    Ok(())
}

/// Until each client has seen so many more transactions return.
fn await_returned(clients: &Clients, mirrored: &Mirrored, more: u64) -> Result<()> {
    let before = clients.returned()?;
    let logs =
        [&*mirrored.near.log_path(), &mirrored.far.log_path(), &mirrored.principal.log_path()];
    wait_until("transactions to return", LONG, &logs, || {
        let now = clients.returned()?;
        Ok(now.iter().zip(&before).all(|(now, before)| now - before >= more).then_some(()))
    })
}

/// Troubles one after another, all kinds before one comes again; then the principal's site is lost,
/// the standby is promoted, and the clients go on there.
fn taken_over(
    major: u32,
    mode: &str,
    defect: Option<&str>,
    troubles: usize,
    power_cuts: &[&str],
) -> Result<Vec<Transaction>> {
    let seed = farshore_testkit::seed();
    println!("FARSHORE_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut mirrored = Mirrored::start_idle(major, mode, defect, Site::named("far")?)?;
    mirrored.principal.execute_script(TABLE)?;
    let clients = Clients::start(&mirrored.principal.url("postgres"), CLIENTS, seed);
    let mut drawn: Vec<Trouble> = Vec::new();
    for number in 0..troubles {
        if drawn.is_empty() {
            drawn.extend(Trouble::ALL);
        }
        let trouble = drawn.swap_remove(random.random_range(0..drawn.len()));
        let context = || format!("trouble {number}, {trouble:?}, with FARSHORE_SEED={seed}");
        await_returned(&clients, &mirrored, random.random_range(1..20)).with_context(context)?;
        trouble.strike(&mut mirrored, &mut random).with_context(context)?;
    }
    await_returned(&clients, &mirrored, 3)?;
    // In mode far-applied commits wait for the standby.
    if mode == "far" {
        mirrored.line.stall();
        await_returned(&clients, &mirrored, 5)?;
    }
    // What a false promise loses is lost there.
    let told = if defect.is_none() && random.random_bool(0.5) {
        let told = mirrored.told()?;
        mirrored.principal.kill9()?;
        mirrored.near.kill9()?;
        told
    } else {
        // The far end goes first, and comes back without what it had not made durable.
        lose_power(&mut mirrored, power_cuts, &mut random)?;
        let told = mirrored.told()?;
        mirrored.principal.kill9()?;
        mirrored.near.kill9()?;
        mirrored.far.start()?;
        told
    };
    if defect != Some(WITHOUT_DRAIN) {
        mirrored.line.cut();
        mirrored.line.mend();
    }
    report(&mirrored.far, "the spool to be open", |mirror| mirror["durable"] != "")?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "FARSHORE_SEED={seed}: {promoted:?}");
    if defect.is_none() {
        check_fork(&mirrored.standby, told).with_context(|| format!("FARSHORE_SEED={seed}"))?;
    }
    clients.go_on_at(&mirrored.standby.url("postgres"));
    await_returned(&clients, &mirrored, 10)?;
    clients.finish()
}

fn check(major: u32, mode: &str, troubles: usize) -> Result<()> {
    let history = taken_over(major, mode, None, troubles, &POWER_CUTS)?;
    let summary = serializability::check(&history)?;
    println!("{major}, {mode}: {summary}");
    ensure!(summary.returned > 100, "too little: {summary}");
    Ok(())
}

/// - `FARSHORE_MIRROR_TROUBLES`: how many (default 10: each kind once, and one more).
fn troubles() -> Result<usize> {
    match std::env::var("FARSHORE_MIRROR_TROUBLES") {
        Ok(text) => text.parse().with_context(|| format!("FARSHORE_MIRROR_TROUBLES={text}")),
        Err(_) => Ok(Trouble::ALL.len() + 1),
    }
}

#[test]
fn what_clients_saw_is_strictly_serializable_in_mode_far() -> Result<()> {
    check(15, "far", troubles()?)
}

#[test]
fn what_clients_saw_is_strictly_serializable_in_mode_far_applied() -> Result<()> {
    check(15, "far-applied", troubles()?)
}

/// With FARSHORE_VERSIONS=all, which `make test-versions` sets and installs them for; else with 18.
#[test]
fn what_clients_saw_is_strictly_serializable_with_other_versions() -> Result<()> {
    if std::env::var("FARSHORE_VERSIONS").as_deref() == Ok("all") {
        return [14, 16, 17, 18].into_iter().try_for_each(|major| check(major, "far", troubles()?));
    }
    check(18, "far", 3)
}

/// What is left is sound: that its end is missing is seen by real time, or by what took its place.
#[test]
fn a_tail_that_a_promotion_loses_is_seen_in_what_clients_saw() -> Result<()> {
    caught(WITHOUT_DRAIN, "spool.before-write")
}

/// When the power goes is drawn, and not every cut is in time to lose something. A reply computed
/// from received bytes is ahead for one fdatasync only: `kills` looks for that one where it shows.
fn caught(defect: &str, power_cut: &str) -> Result<()> {
    for _ in 0..10 {
        let history = match taken_over(15, "far", Some(defect), 0, &[power_cut]) {
            Ok(history) => history,
            // The far end itself may see what is missing, and promotes nobody.
            Err(error) if format!("{error:#}").contains("is damaged at") => continue,
            Err(error) => return Err(error),
        };
        if let Err(violation) = serializability::check(&history) {
            let expected = [Anomaly::Cycle, Anomaly::Disagreement];
            ensure!(expected.contains(&violation.anomaly), "{violation}");
            println!("{defect} caught: {violation}");
            return Ok(());
        }
    }
    bail!("{defect} was not caught")
}

#[test]
fn acknowledging_before_fsync_is_seen_in_what_clients_saw() -> Result<()> {
    caught("spool-durable-before-fsync", "spool.before-write")
}

#[test]
fn a_near_end_that_claims_far_is_seen_in_what_clients_saw() -> Result<()> {
    caught("mirror-near-claims-far", "spool.before-write")
}
