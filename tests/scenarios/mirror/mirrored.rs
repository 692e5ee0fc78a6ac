//! A mirror between two sites, a standby at the far one, and clients whose commits wait for it.

use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::port::ReservedPort;
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::thread::join_within;
use farshore_testkit::wait::wait_until;
use farshore_tests::{Link, Site, certificate_lines, issue_certificates};
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
use std::thread::JoinHandle;
use std::time::Duration;
use tempfile::TempDir;

pub const LONG: Duration = Duration::from_secs(120);
const CLIENTS: i32 = 4;

/// Clients that were seen to wait so often in a row wait for what is not acknowledged.
const SILENT_LOOKS: u32 = 6;

/// Waits until so many clients of `principal` wait for a mirror. What was acknowledged before may
/// still be on its way to them: seen several times without one that `returned`, it is not.
pub fn await_silence(
    principal: &Cluster,
    clients: i32,
    returned: impl Fn() -> Vec<i32>,
) -> Result<()> {
    let (mut before, mut looks) = (Vec::new(), 0);
    wait_until("the clients to wait", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_activity \
                   WHERE wait_event = 'SyncRep' AND application_name = 'client'";
        let waiting: i64 = principal.connect()?.query_one(sql, &[])?.get(0);
        let now = returned();
        let is_still = waiting == i64::from(clients) && now == before;
        looks = if is_still { looks + 1 } else { 0 };
        before = now;
        Ok((looks >= SILENT_LOOKS).then_some(()))
    })
}
pub const SLOT: &str = "farshore_mirror_m";

/// A client that commits one row after another; how many it saw return.
pub struct Client {
    pub returned: Arc<AtomicI32>,
    pub stop: Arc<AtomicBool>,
    pub thread: JoinHandle<Result<()>>,
}

impl Client {
    /// Waits for its end, which may depend on a mirror that is at fault; how it ended.
    pub fn end(self) -> Result<Result<()>> {
        join_within(self.thread, "a client", LONG)
    }
}

pub struct Mirrored {
    clients: Vec<Client>,
    pub near: Site,
    pub far: Site,
    pub standby: Cluster,
    pub principal: Cluster,
    /// Between the far end and the standby.
    pub line: Link,
    /// Between the two sites.
    pub link: Link,
    /// What clients saw return that are gone.
    seen: Vec<i32>,
    _certificates: TempDir,
    _ports: (ReservedPort, ReservedPort),
}

impl Mirrored {
    pub fn start(major: u32, defect: Option<&str>) -> Result<Mirrored> {
        Mirrored::start_in(major, "far", defect, Site::named("far")?)
    }

    pub fn start_in(major: u32, mode: &str, defect: Option<&str>, far: Site) -> Result<Mirrored> {
        let mut mirrored = Mirrored::start_idle(major, mode, defect, far)?;
        mirrored.start_clients()?;
        Ok(mirrored)
    }

    pub fn start_clients(&mut self) -> Result<()> {
        let clients = (0..CLIENTS).map(|number| client(&self.principal, number));
        self.clients = clients.collect::<Result<_>>()?;
        Ok(())
    }

    /// One more standby of the spool. Before clients are at work: the principal is restarted.
    pub fn another_standby(&mut self, name: &str) -> Result<Cluster> {
        self.principal.execute_script("SELECT pg_drop_replication_slot('standby')")?;
        follower(&mut self.principal, self.line.port(), name)
    }

    /// Nobody writes, and commits wait for the mirror, unless it is asynchronous.
    pub fn start_idle(
        major: u32,
        mode: &str,
        defect: Option<&str>,
        mut far: Site,
    ) -> Result<Mirrored> {
        let mut principal = Cluster::builder(&Installation::find(major)?)
            .setting("wal_level", "replica")
            .setting("wal_keep_size", "512MB")
            .start()?;
        principal.execute_script("CREATE TABLE t (client int, n int, PRIMARY KEY (client, n))")?;
        let certificates = tempfile::Builder::new().prefix("farshore-certificates").tempdir()?;
        issue_certificates(certificates.path(), &["near", "far"])?;
        let ports = (ReservedPort::new()?, ReservedPort::new()?);
        let listen = ports.1.number();
        let link = Link::to(ports.0.number())?;
        let mut near = Site::named("near")?;
        near.add_to_site(&format!(
            "listen = \"127.0.0.1:{}\"\n{}",
            ports.0.number(),
            certificate_lines(certificates.path(), "near")
        ))?;
        near.add(&format!(
            "[mirror.m]\nprincipal = \"{}\"\nmode = \"{mode}\"\n[downstream.far]\nmirrors = [\"m\"]\n",
            principal.url("postgres")
        ))?;
        far.add_to_site(&certificate_lines(certificates.path(), "far"))?;
        far.add(&format!(
            "[upstream.near]\naddress = \"127.0.0.1:{}\"\n\
             [mirror.m]\nupstream = \"near\"\nlisten = \"127.0.0.1:{listen}\"\n",
            link.port()
        ))?;
        for site in [&mut near, &mut far] {
            site.env("FARSHORE_DEFECT", defect.unwrap_or_default());
            site.start()?;
        }
        report(&far, "the mirror to receive", |mirror| mirror["state"] == "receiving")?;
        let line = Link::to(listen)?;
        let standby = follower(&mut principal, line.port(), "s1")?;
        report(&far, "the standby to stream", |mirror| {
            mirror["standbys"].as_array().is_some_and(|all| all.len() == 1)
        })?;
        if mode != "async" {
            let_commits_wait(&principal)?;
        }
        let (_certificates, _ports) = (certificates, ports);
        Ok(Mirrored {
            clients: Vec::new(),
            near,
            far,
            standby,
            principal,
            line,
            link,
            seen: Vec::new(),
            _certificates,
            _ports,
        })
    }

    pub fn returned(&self) -> Vec<i32> {
        self.clients.iter().map(|client| client.returned.load(SeqCst)).collect()
    }

    /// Waits until every client has seen this many more commits return.
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

    /// Waits until every client waits for the mirror: what it saw return before is counted.
    pub fn await_silence(&self) -> Result<()> {
        await_silence(&self.principal, CLIENTS, || self.returned())
    }

    /// The far site is ended at a crash point, and the near one with it. Then the far one alone
    /// must have what returned.
    pub fn lose_all_but_the_far_end(&mut self, crash: &str) -> Result<()> {
        self.far.stop()?;
        self.far.env("FARSHORE_CRASH", crash);
        self.far.start()?;
        self.far.await_kill(crash, LONG)?;
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

    pub fn told(&self) -> Result<i64> {
        told(&self.principal)
    }

    pub fn check_spool(&self, told: i64) -> Result<()> {
        check_durable(&self.far, told).map(drop)
    }

    /// What returned is on the standby, once that has replayed what the spool holds.
    pub fn check_standby(&self, returned: &[i32]) -> Result<()> {
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

    /// The principal dies for good; what every client saw return.
    pub fn lose_the_principal(&mut self) -> Result<Vec<i32>> {
        self.principal.kill9()?;
        self.clients_end()
    }

    /// Their server has gone; what every client saw return.
    pub fn clients_end(&mut self) -> Result<Vec<i32>> {
        for client in self.clients.drain(..) {
            let returned = client.returned.clone();
            ensure!(client.end()?.is_err(), "a client stopped before its server did");
            self.seen.push(returned.load(SeqCst));
        }
        Ok(self.seen.clone())
    }

    pub fn finish(self) -> Result<()> {
        let Mirrored { clients, .. } = self;
        for client in clients {
            client.stop.store(true, SeqCst);
            client.end()??;
        }
        Ok(())
    }
}

/// What the principal was told last as flushed: where its slot stands.
pub fn told(principal: &Cluster) -> Result<i64> {
    let sql = "SELECT (restart_lsn - '0/0')::bigint FROM pg_replication_slots \
               WHERE slot_name = $1";
    Ok(principal.connect()?.query_one(sql, &[&SLOT])?.get(0))
}

/// The spool has what the principal was told, whatever the standby has got. Where it ends.
pub fn check_durable(far: &Site, told: i64) -> Result<String> {
    const PAGE_BYTES: i64 = 8_192;
    let found = report(far, "the far end", |mirror| mirror["durable"] != "")?;
    let durable = found["durable"].as_str().unwrap_or_default();
    let there = position(durable)?;
    // A server may flush up to a page's end, within a record; that record is no commit yet.
    let whole = if told % PAGE_BYTES == 0 { told - PAGE_BYTES } else { told };
    ensure!(there >= whole, "LOST: the principal was told {told}, the spool ends at {there}");
    Ok(durable.to_owned())
}

pub fn await_replayed(standby: &Cluster, end: &str) -> Result<()> {
    wait_until("the standby to replay", LONG, &[&standby.log_path()], || {
        let sql = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn";
        let has_all: bool = standby.connect()?.query_one(sql, &[&end])?.get(0);
        Ok(has_all.then_some(()))
    })
}

/// Commits wait for the mirror from now on.
pub fn let_commits_wait(principal: &Cluster) -> Result<()> {
    principal.execute_script("ALTER SYSTEM SET synchronous_standby_names = 'farshore_m'")?;
    principal.execute_script("SELECT pg_reload_conf()")?;
    wait_until("the mirror to count", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
        Ok((principal.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })
}

/// A position as a number.
pub fn position(text: &str) -> Result<i64> {
    let (high, low) = text.split_once('/').with_context(|| format!("no position: {text}"))?;
    Ok((i64::from_str_radix(high, 16)? << 32) + i64::from_str_radix(low, 16)?)
}

/// A standby that streams from what listens on this port.
pub fn follower(principal: &mut Cluster, port: u16, name: &str) -> Result<Cluster> {
    let conninfo = format!("host=127.0.0.1 port={port} user=s application_name={name}");
    let settings = [
        ("primary_conninfo", conninfo.as_str()),
        ("primary_slot_name", ""),
        ("wal_retrieve_retry_interval", "100ms"),
    ];
    principal.standby(&settings, &[SLOT])
}

pub fn client(principal: &Cluster, number: i32) -> Result<Client> {
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
pub fn report(site: &Site, what: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
    wait_until(what, LONG, &[], || {
        let verb = site.verb("status", &["--json"])?;
        let status: Value = serde_json::from_str(&verb.stdout).unwrap_or_default();
        let mirror = status["mirrors"][0].clone();
        Ok((mirror.is_object() && is_so(&mirror)).then_some(mirror))
    })
    .with_context(|| site.log_tail())
}
