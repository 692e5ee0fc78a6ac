//! A direct mirror: one site at the far end streams from the principal itself. The same promises.

use crate::bounds::write_segments;
use crate::mirrored::{
    Client, LONG, Mirrored, await_replayed, await_silence, check_durable, client, follower,
    let_commits_wait, report, told,
};
use crate::promotion::check_rows;
use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::port::ReservedPort;
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Link, Site, Verb};
use serde_json::Value;
use std::sync::atomic::Ordering::SeqCst;

const CLIENTS: i32 = 4;

pub struct Direct {
    clients: Vec<Client>,
    pub site: Site,
    pub standby: Cluster,
    pub principal: Cluster,
    /// Between the site and the principal.
    line: Link,
    _listen: ReservedPort,
}

impl Direct {
    pub fn start(major: u32, mode: &str) -> Result<Direct> {
        Direct::start_in(major, mode, Site::named("far")?)
    }

    fn start_in(major: u32, mode: &str, mut site: Site) -> Result<Direct> {
        let mut principal = Cluster::builder(&Installation::find(major)?)
            .setting("wal_level", "replica")
            .setting("wal_keep_size", "512MB")
            .start()?;
        principal.execute_script("CREATE TABLE t (client int, n int, PRIMARY KEY (client, n))")?;
        let listen = ReservedPort::new()?;
        let line = Link::to(principal.port())?;
        let there = format!(":{}/", principal.port());
        let url = principal.url("postgres").replace(&there, &format!(":{}/", line.port()));
        site.add(&format!(
            "[mirror.m]\nprincipal = \"{url}\"\nlisten = \"127.0.0.1:{}\"\nmode = \"{mode}\"\n",
            listen.number()
        ))?;
        let checked = site.verb("check", &[])?;
        ensure!(checked.code == Some(0), "{checked:?}");
        ensure!(checked.stdout.contains("can be streamed from"), "{checked:?}");
        ensure!(checked.stdout.contains("MB are free"), "{checked:?}");
        site.start()?;
        report(&site, "the mirror to receive", |far| far["state"] == "receiving")?;
        let standby = follower(&mut principal, listen.number(), "s1")?;
        report(&site, "the standby to stream", |far| {
            far["standbys"].as_array().is_some_and(|all| all.len() == 1)
        })?;
        if mode != "async" {
            let_commits_wait(&principal)?;
        }
        let clients = (0..CLIENTS).map(|number| client(&principal, number));
        let clients = clients.collect::<Result<_>>()?;
        Ok(Direct { clients, site, standby, principal, line, _listen: listen })
    }

    pub fn returned(&self) -> Vec<i32> {
        self.clients.iter().map(|client| client.returned.load(SeqCst)).collect()
    }

    pub fn await_commits(&self, more: i32) -> Result<()> {
        let before = self.returned();
        wait_until("commits to return", LONG, &[&self.principal.log_path()], || {
            for client in &self.clients {
                ensure!(!client.thread.is_finished(), "a client died");
            }
            let now = self.returned();
            Ok(now.iter().zip(&before).all(|(now, before)| now - before >= more).then_some(()))
        })
    }

    fn await_silence(&self) -> Result<()> {
        await_silence(&self.principal, CLIENTS, || self.returned())
    }

    /// What the site has alone, with the principal out of reach, is all that returned.
    fn check_alone(&mut self) -> Result<()> {
        self.await_silence()?;
        let returned = self.returned();
        let told = told(&self.principal)?;
        self.site.env("FARSHORE_CRASH", "");
        self.site.start()?;
        let durable = check_durable(&self.site, told)?;
        await_replayed(&self.standby, &durable)?;
        check_rows(&self.standby, &returned)
    }

    pub fn finish(self) -> Result<()> {
        for client in self.clients {
            client.stop.store(true, SeqCst);
            client.end()??;
        }
        Ok(())
    }
}

fn crash_points(major: u32, mode: &str, points: &[&str]) -> Result<()> {
    let mut direct = Direct::start(major, mode)?;
    direct.await_commits(20)?;
    for crash in points {
        direct.site.stop()?;
        direct.site.env("FARSHORE_CRASH", crash);
        direct.site.start()?;
        direct.site.await_kill(crash, LONG)?;
        direct.line.cut();
        direct.check_alone().with_context(|| format!("after {crash}"))?;
        direct.line.mend();
        direct.await_commits(5).with_context(|| format!("after {crash}"))?;
    }
    direct.finish()
}

const POINTS: [&str; 10] = [
    "spool.before-write:40",
    "spool.before-write:41:cut",
    "spool.before-fsync:40:cut",
    "spool.after-fsync:40:cut",
    "mirror.before-send:30:cut",
    "mirror.before-reply:30:cut",
    "mirror.after-reply:30:cut",
    "mirror.before-acknowledge:20:cut",
    "mirror.after-acknowledge:20:cut",
    "mirror.before-serve:20:cut",
];

#[test]
fn a_direct_mirror_loses_no_acknowledged_commit_at_any_crash_point_with_15() -> Result<()> {
    crash_points(15, "far", &POINTS)
}

#[test]
fn a_direct_mirror_loses_no_acknowledged_commit_at_any_crash_point_with_18() -> Result<()> {
    crash_points(18, "far", &POINTS)
}

#[test]
fn a_direct_mirror_tells_what_standbys_have_replayed() -> Result<()> {
    crash_points(
        15,
        "far-applied",
        &["spool.before-fsync:40:cut", "mirror.after-acknowledge:20:cut"],
    )
}

/// A false promise must be seen through here, too.
#[test]
fn a_direct_mirror_that_acknowledges_before_fsync_is_caught() -> Result<()> {
    let mut direct = Direct::start(15, "far")?;
    direct.site.env("FARSHORE_DEFECT", "spool-durable-before-fsync");
    for round in 0..8 {
        direct.site.stop()?;
        let crash = format!("spool.before-write:{}:cut", 30 + 7 * round);
        direct.site.env("FARSHORE_CRASH", &crash);
        direct.site.start()?;
        direct.site.await_kill(&crash, LONG)?;
        direct.line.cut();
        if let Err(error) = direct.check_alone() {
            let text = format!("{error:#}");
            ensure!(text.contains("LOST: "), "{text}");
            println!("caught: {text}");
            return Ok(());
        }
        direct.line.mend();
        direct.await_commits(5)?;
    }
    bail!("it was not caught")
}

/// The line goes and comes back; the principal is restarted; the site too.
#[test]
fn a_direct_mirror_goes_on_after_interruptions() -> Result<()> {
    let mut direct = Direct::start(15, "far")?;
    direct.await_commits(20)?;
    direct.line.cut();
    direct.await_silence()?;
    let far = report(&direct.site, "the far end to try again", |far| far["state"] == "retrying")?;
    let why = far["error"].as_str().unwrap_or_default();
    ensure!(why.contains("principal") && !why.contains("site"), "{far}");
    direct.line.mend();
    direct.await_commits(10)?;
    direct.site.kill9()?;
    direct.site.start()?;
    direct.await_commits(10)?;
    // Halted as a whole, and with what the two ends say to each other half-way.
    direct.site.restart()?;
    direct.await_commits(10)?;
    let far = report(&direct.site, "the far end", |far| far["state"] == "receiving")?;
    ensure!(far["direct"] == true && far["site"].is_null() && far["mode"] == "far", "{far}");
    let status: Value = serde_json::from_str(&direct.site.verb("status", &["--json"])?.stdout)?;
    ensure!(status["mirrors"].as_array().is_some_and(|all| all.len() == 1), "{status}");
    let shown = direct.site.verb("status", &[])?;
    ensure!(shown.stdout.contains("mirror m ← its principal, direct: receiving"), "{shown:?}");
    let returned = direct.returned();
    wait_until("the standby to have all", LONG, &[], || {
        Ok(check_rows(&direct.standby, &returned).is_ok().then_some(()))
    })?;
    direct.finish()
}

/// Spool, slot and standby go on when a mirror's log takes the other way.
#[test]
fn a_mirror_becomes_direct_and_goes_back_to_its_link() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(20)?;
    let linked = "upstream = \"near\"\n";
    let direct = format!("principal = \"{}\"\n", mirrored.principal.url("postgres"));
    for (from, to) in [(linked, direct.as_str()), (direct.as_str(), linked)] {
        mirrored.near.stop()?;
        mirrored.far.stop()?;
        mirrored.await_silence()?;
        let returned = mirrored.returned();
        mirrored.far.replace(from, to)?;
        mirrored.far.start()?;
        if to == linked {
            mirrored.near.start()?;
        }
        mirrored.await_commits(20)?;
        wait_until("the standby to have all", LONG, &[], || {
            Ok(check_rows(&mirrored.standby, &returned).is_ok().then_some(()))
        })?;
        if to == direct {
            // It is there, and nobody comes.
            mirrored.near.start()?;
            report(&mirrored.near, "the near end", |near| near["state"] == "waiting")?;
            mirrored.await_commits(5)?;
        }
    }
    mirrored.finish()
}

/// A standby is seeded through it, and another takes over when the principal is lost.
#[test]
fn a_direct_mirror_seeds_and_promotes() -> Result<()> {
    let mut direct = Direct::start(15, "far")?;
    direct.await_commits(20)?;
    let home = tempfile::Builder::new().prefix("farshore-seeded").tempdir()?;
    let pgdata = home.path().join("pgdata").display().to_string();
    let seeded = direct.site.verb("mirror seed", &["m", "--pgdata", &pgdata])?;
    ensure!(seeded.code == Some(0), "{seeded:?}");
    ensure!(seeded.stdout.contains("is a standby of mirror \"m\""), "{seeded:?}");
    ensure!(home.path().join("pgdata/standby.signal").exists(), "{seeded:?}");
    direct.await_commits(20)?;
    direct.principal.kill9()?;
    let mut returned = Vec::new();
    for client in direct.clients.drain(..) {
        let count = client.returned.clone();
        ensure!(client.end()?.is_err(), "a client stopped before its server did");
        returned.push(count.load(SeqCst));
    }
    let url = direct.standby.url("postgres");
    let promoted: Verb = direct.site.verb("mirror promote", &["m", "--standby", &url])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    ensure!(promoted.stdout.contains("is promoted"), "{promoted:?}");
    check_rows(&direct.standby, &returned)?;
    direct.standby.execute_script("INSERT INTO t VALUES (99, 1)")?;
    report(&direct.site, "the mirror to be promoted", |far| far["state"] == "promoted")?;
    // The old principal comes back, and keeps log for nobody.
    direct.principal.start()?;
    let told = report(&direct.site, "what is kept to be told", |far| far["error"].is_string())?;
    let said = told["error"].as_str().unwrap_or_default();
    let drop = "SELECT pg_drop_replication_slot('farshore_mirror_m')";
    ensure!(said.contains(drop) && !said.contains("[downstream"), "{told}");
    ensure!(told["health"] == "warning", "{told}");
    direct.principal.execute_script(drop)?;
    report(&direct.site, "nothing to be kept any more", |far| far["error"].is_null())?;
    Ok(())
}

/// What the principal keeps for a site that takes nothing in is bounded, as for any mirror.
#[test]
fn a_direct_mirror_that_is_too_far_behind_is_dropped_and_resumed() -> Result<()> {
    let mut site = Site::named("far")?;
    let Some(disk) = site.small_disk("data", 256)? else { return Ok(()) };
    let mut direct = Direct::start_in(15, "far", site)?;
    let bounds = "mode = \"far\"\nspool_size = \"64MB\"\ndrop_behind = \"256MB\"\n";
    direct.site.replace("mode = \"far\"\n", bounds)?;
    direct.site.restart()?;
    direct.await_commits(5)?;
    disk.fill()?;
    write_segments(&direct.principal, 20)?;
    report(&direct.site, "the mirror to be dropped", |far| {
        far["error"].as_str().is_some_and(|error| error.contains("farshore mirror resume"))
            && far["state"] == "dropped"
    })?;
    let checked = direct.site.verb("status", &[])?;
    ensure!(checked.stdout.contains("critical   dropped"), "{checked:?}");
    disk.free()?;
    let resumed = direct.site.verb("mirror resume", &["m"])?;
    ensure!(resumed.code == Some(0) && resumed.stdout.contains("goes on"), "{resumed:?}");
    direct.await_commits(5)?;
    direct.finish()
}
