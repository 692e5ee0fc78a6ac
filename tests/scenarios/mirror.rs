//! A mirror between two sites under SIGKILL and power cuts: every commit that a client saw return
//! is on the standby, when the far site is all there is left.

use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::port::ReservedPort;
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Site, SmallDisk, certificate_lines, issue_certificates};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Duration;
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(120);
const CLIENTS: i32 = 4;
const SLOT: &str = "farshore_mirror_m";

/// A client that commits one row after another; how many it saw return.
struct Client {
    returned: Arc<AtomicI32>,
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

struct Mirrored {
    clients: Vec<Client>,
    near: Site,
    far: Site,
    standby: Cluster,
    principal: Cluster,
    _certificates: TempDir,
    _ports: (ReservedPort, ReservedPort),
}

impl Mirrored {
    fn start(major: u32, defect: Option<&str>) -> Result<Mirrored> {
        Mirrored::start_in(major, defect, Site::named("far")?)
    }

    fn start_in(major: u32, defect: Option<&str>, mut far: Site) -> Result<Mirrored> {
        let mut principal = Cluster::builder(&Installation::find(major)?)
            .setting("wal_level", "replica")
            .setting("wal_keep_size", "512MB")
            .start()?;
        principal.execute_script("CREATE TABLE t (client int, n int, PRIMARY KEY (client, n))")?;
        let certificates = tempfile::Builder::new().prefix("farshore-certificates").tempdir()?;
        issue_certificates(certificates.path(), &["near", "far"])?;
        let ports = (ReservedPort::new()?, ReservedPort::new()?);
        let (link, listen) = (ports.0.number(), ports.1.number());
        let mut near = Site::named("near")?;
        near.add_to_site(&format!(
            "listen = \"127.0.0.1:{link}\"\n{}",
            certificate_lines(certificates.path(), "near")
        ))?;
        near.add(&format!(
            "[mirror.m]\nprincipal = \"{}\"\n[downstream.far]\nmirrors = [\"m\"]\n",
            principal.url("postgres")
        ))?;
        far.add_to_site(&certificate_lines(certificates.path(), "far"))?;
        far.add(&format!(
            "[upstream.near]\naddress = \"127.0.0.1:{link}\"\n\
             [mirror.m]\nupstream = \"near\"\nlisten = \"127.0.0.1:{listen}\"\n"
        ))?;
        for site in [&mut near, &mut far] {
            site.env("FARSHORE_DEFECT", defect.unwrap_or_default());
            site.start()?;
        }
        report(&far, "the mirror to receive", |mirror| mirror["state"] == "receiving")?;
        let conninfo = format!("host=127.0.0.1 port={listen} user=s application_name=s1");
        let standby = principal.standby(
            &[
                ("primary_conninfo", conninfo.as_str()),
                ("primary_slot_name", ""),
                ("wal_retrieve_retry_interval", "100ms"),
            ],
            &[SLOT],
        )?;
        report(&far, "the standby to stream", |mirror| {
            mirror["standbys"].as_array().is_some_and(|all| all.len() == 1)
        })?;
        principal.execute_script("ALTER SYSTEM SET synchronous_standby_names = 'farshore_m'")?;
        principal.execute_script("SELECT pg_reload_conf()")?;
        wait_until("the mirror to count", LONG, &[], || {
            let sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
            Ok((principal.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
        })?;
        let clients =
            (0..CLIENTS).map(|number| client(&principal, number)).collect::<Result<_>>()?;
        let (_certificates, _ports) = (certificates, ports);
        Ok(Mirrored { clients, near, far, standby, principal, _certificates, _ports })
    }

    fn returned(&self) -> Vec<i32> {
        self.clients.iter().map(|client| client.returned.load(SeqCst)).collect()
    }

    /// Waits until every client has seen this many more commits return.
    fn await_commits(&self, more: i32) -> Result<()> {
        let before = self.returned();
        wait_until("commits to return", LONG, &[&self.principal.log_path()], || {
            for client in &self.clients {
                ensure!(!client.thread.is_finished(), "a client died");
            }
            let now = self.returned();
            Ok(now.iter().zip(&before).all(|(now, before)| now - before >= more).then_some(()))
        })
    }

    /// Waits until every client waits for the mirror: what it saw return before is counted.
    fn await_silence(&self) -> Result<()> {
        wait_until("the clients to wait", LONG, &[], || {
            let sql = "SELECT count(*) FROM pg_stat_activity \
                       WHERE wait_event = 'SyncRep' AND application_name = 'client'";
            let waiting: i64 = self.principal.connect()?.query_one(sql, &[])?.get(0);
            Ok((waiting == i64::from(CLIENTS)).then_some(()))
        })
    }

    /// The far site is ended at a crash point, and the near one with it. Then the far one alone
    /// must have what returned.
    fn lose_all_but_the_far_end(&mut self, crash: &str) -> Result<()> {
        self.far.stop()?;
        self.far.env("FARSHORE_CRASH", crash);
        self.far.start()?;
        let code = self.far.await_exit(LONG);
        ensure!(code.is_err(), "not killed at {crash}: {code:?}");
        self.near.kill9()?;
        self.await_silence()?;
        let returned = self.returned();
        let told = self.told()?;
        self.far.env("FARSHORE_CRASH", "");
        self.far.start()?;
        self.check_spool(told).with_context(|| format!("after {crash}"))?;
        self.check_standby(&returned).with_context(|| format!("after {crash}"))?;
        self.near.start()?;
        self.await_commits(5).with_context(|| format!("after {crash}"))
    }

    /// What the principal was told last as flushed: where its slot stands.
    fn told(&self) -> Result<i64> {
        let sql = "SELECT (restart_lsn - '0/0')::bigint FROM pg_replication_slots \
                   WHERE slot_name = $1";
        Ok(self.principal.connect()?.query_one(sql, &[&SLOT])?.get(0))
    }

    /// The spool has what the principal was told, whatever the standby has got.
    fn check_spool(&self, told: i64) -> Result<()> {
        const PAGE_BYTES: i64 = 8_192;
        let found = report(&self.far, "the far end", |mirror| mirror["durable"] != "")?;
        let durable = found["durable"].as_str().unwrap_or_default();
        let sql = "SELECT ($1::text::pg_lsn - '0/0')::bigint";
        let durable: i64 = self.standby.connect()?.query_one(sql, &[&durable])?.get(0);
        // A server may flush up to a page's end, within a record; that record is no commit yet.
        let whole = if told % PAGE_BYTES == 0 { told - PAGE_BYTES } else { told };
        ensure!(
            durable >= whole,
            "LOST: the principal was told {told}, the spool ends at {durable}"
        );
        Ok(())
    }

    /// What returned is on the standby, once that has replayed what the spool holds.
    fn check_standby(&self, returned: &[i32]) -> Result<()> {
        let durable = report(&self.far, "the far end", |mirror| mirror["durable"] != "")?;
        let durable = durable["durable"].as_str().unwrap_or_default().to_owned();
        let logs = [&*self.standby.log_path()];
        wait_until("the standby to replay", LONG, &logs, || {
            let mut standby = self.standby.connect()?;
            // Asked first: what has been replayed by then can be seen afterwards.
            let sql = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn";
            let has_all: bool = standby.query_one(sql, &[&durable])?.get(0);
            for (client, returned) in returned.iter().enumerate() {
                let sql = "SELECT count(*) FROM t WHERE client = $1 AND n <= $2";
                let there: i64 = standby.query_one(sql, &[&(client as i32), returned])?.get(0);
                if there == i64::from(*returned) {
                    continue;
                }
                if !has_all {
                    return Ok(None);
                }
                bail!("LOST: client {client} saw {returned} commits return, {there} are there");
            }
            Ok(Some(()))
        })
    }

    fn finish(self) -> Result<()> {
        let Mirrored { clients, .. } = self;
        for client in clients {
            client.stop.store(true, SeqCst);
            client.thread.join().map_err(|_| anyhow::anyhow!("a client died"))??;
        }
        Ok(())
    }
}

fn client(principal: &Cluster, number: i32) -> Result<Client> {
    let mut connection = principal.connect()?;
    connection.batch_execute("SET application_name = 'client'")?;
    let (returned, stop) = (Arc::new(AtomicI32::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, stopped) = (returned.clone(), stop.clone());
    let thread = std::thread::spawn(move || {
        let insert = connection.prepare("INSERT INTO t VALUES ($1, $2)")?;
        let mut n = 0;
        while !stopped.load(SeqCst) {
            n += 1;
            connection.execute(&insert, &[&number, &n])?;
            count.store(n, SeqCst);
        }
        Ok(())
    });
    Ok(Client { returned, stop, thread })
}

/// A site's mirror as `status --json` shows it, once it is so.
fn report(site: &Site, what: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
    wait_until(what, LONG, &[], || {
        let verb = site.verb("status", &["--json"])?;
        let status: Value = serde_json::from_str(&verb.stdout).unwrap_or_default();
        let mirror = status["mirrors"][0].clone();
        Ok((mirror.is_object() && is_so(&mirror)).then_some(mirror))
    })
    .with_context(|| site.log_tail())
}

fn crash_points(major: u32) -> Result<()> {
    let mut mirrored = Mirrored::start(major, None)?;
    mirrored.await_commits(20)?;
    for crash in [
        "spool.before-write:40",
        "spool.before-write:41:cut",
        "spool.before-fsync:40:cut",
        "spool.after-fsync:40:cut",
        "mirror.before-reply:30:cut",
        "mirror.after-reply:30:cut",
        "mirror.before-serve:20:cut",
    ] {
        mirrored.lose_all_but_the_far_end(crash)?;
    }
    // The near end, at its own points: it keeps nothing, so there is nothing to look for.
    for crash in [
        "mirror.before-send:30",
        "mirror.after-send:30",
        "mirror.before-acknowledge:20",
        "mirror.after-acknowledge:20",
    ] {
        mirrored.near.stop()?;
        mirrored.near.env("FARSHORE_CRASH", crash);
        mirrored.near.start()?;
        let code = mirrored.near.await_exit(LONG);
        ensure!(code.is_err(), "not killed at {crash}: {code:?}");
        mirrored.near.env("FARSHORE_CRASH", "");
        mirrored.near.start()?;
        mirrored.await_commits(5).with_context(|| format!("after {crash}"))?;
    }
    let mirror = report(&mirrored.near, "the near end", |mirror| mirror["ratio"].is_number())?;
    println!("near: {mirror}");
    let mirror = report(&mirrored.far, "the far end", |mirror| mirror["harden_ms"].is_number())?;
    println!("far: {mirror}");
    mirrored.finish()
}

#[test]
fn no_acknowledged_commit_is_lost_at_any_crash_point_with_15() -> Result<()> {
    crash_points(15)
}

#[test]
fn no_acknowledged_commit_is_lost_at_any_crash_point_with_18() -> Result<()> {
    crash_points(18)
}

/// - `FARSHORE_MIRROR_KILLS`: how many (default 12).
#[test]
fn no_acknowledged_commit_is_lost_under_random_kills() -> Result<()> {
    let kills = match std::env::var("FARSHORE_MIRROR_KILLS") {
        Ok(text) => text.parse().with_context(|| format!("FARSHORE_MIRROR_KILLS={text}"))?,
        Err(_) => 12,
    };
    let seed = farshore_testkit::seed();
    println!("FARSHORE_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let mut mirrored = Mirrored::start(15, None)?;
    for kill in 0..kills {
        mirrored.await_commits(random.random_range(1..40))?;
        let victim = random.random_range(0..4);
        let context = || format!("kill {kill} of {victim} with FARSHORE_SEED={seed}");
        match victim {
            0 => {
                mirrored.near.kill9()?;
                mirrored.near.start()?;
            }
            1 => {
                mirrored.far.kill9()?;
                mirrored.far.start()?;
            }
            2 => {
                mirrored.standby.kill9()?;
                mirrored.standby.start()?;
            }
            _ => {
                // Both: what returned is at the far site alone.
                mirrored.far.kill9()?;
                mirrored.near.kill9()?;
                mirrored.await_silence()?;
                let (returned, told) = (mirrored.returned(), mirrored.told()?);
                mirrored.far.start()?;
                mirrored.check_spool(told).with_context(context)?;
                mirrored.check_standby(&returned).with_context(context)?;
                mirrored.near.start()?;
            }
        }
        mirrored.await_commits(3).with_context(context)?;
    }
    mirrored.await_commits(1)?;
    let returned = mirrored.returned();
    mirrored.check_standby(&returned)?;
    mirrored.finish()
}

/// The far end's disk is full: commits wait, nothing is lost, and it goes on once there is room.
#[test]
fn a_full_disk_holds_commits_up_and_loses_none() -> Result<()> {
    let far = Site::named("far")?;
    let Some(disk) = SmallDisk::mount(&far.directory().join("data"), 256)? else { return Ok(()) };
    let mirrored = Mirrored::start_in(15, None, far)?;
    mirrored.await_commits(20)?;
    disk.fill()?;
    // More than what is there of segments can take.
    let mut bulk = mirrored.principal.connect()?;
    let loading = std::thread::spawn(move || {
        bulk.batch_execute(
            "CREATE TABLE bulk AS SELECT g, repeat(md5(g::text), 10) AS v \
             FROM generate_series(1, 200000) g",
        )
    });
    let full =
        report(&mirrored.far, "the disk to be full", |mirror| mirror["state"] == "out of room")?;
    let said = full["error"].as_str().unwrap_or_default();
    ensure!(said.contains("cannot write") && said.contains("No space left"), "{said}");
    mirrored.await_silence()?;
    let returned = mirrored.returned();
    mirrored.check_standby(&returned)?;
    disk.free()?;
    mirrored.await_commits(10)?;
    loading.join().map_err(|_| anyhow::anyhow!("the load died"))??;
    report(&mirrored.far, "all to be well", |mirror| mirror["state"] == "receiving")?;
    mirrored.check_standby(&mirrored.returned())?;
    mirrored.finish()
    // The disk goes after what works on it.
}

/// A false promise must be seen through.
fn caught(defect: &str, points: &[&str]) -> Result<()> {
    let mut mirrored = Mirrored::start(15, Some(defect))?;
    for round in 0..8 {
        for point in points {
            let crash = format!("{point}:{}:cut", 30 + 7 * round);
            match mirrored.lose_all_but_the_far_end(&crash) {
                Ok(()) => {}
                Err(error) => {
                    let text = format!("{error:#}");
                    ensure!(text.contains("LOST: "), "{text}");
                    println!("{defect} caught: {text}");
                    return Ok(());
                }
            }
        }
    }
    bail!("{defect} was not caught")
}

#[test]
fn acknowledging_before_fsync_is_caught() -> Result<()> {
    caught("spool-durable-before-fsync", &["spool.before-write"])
}

#[test]
fn acknowledging_at_the_near_end_while_claiming_far_is_caught() -> Result<()> {
    caught("mirror-near-claims-far", &["spool.before-write", "mirror.before-reply"])
}

#[test]
fn a_reply_computed_from_received_bytes_is_caught() -> Result<()> {
    caught(
        "mirror-reply-from-received",
        &["spool.before-fsync", "mirror.after-reply", "mirror.before-reply"],
    )
}
