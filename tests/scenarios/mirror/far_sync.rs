//! far-sync: a node near the principal hardens the log and keeps it, and a mirror of its spool
//! carries it on. The principal and all beside it may go: what returned gets to the far site, or
//! its standby is not promoted.

use crate::bounds::write_segments;
use crate::mirrored::{Client, LONG, client, let_commits_wait, position, report};
use crate::seeding::own_as;
use anyhow::{Context, Result, anyhow, ensure};
use farshore_testkit::port::ReservedPort;
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Link, Site, Verb, certificate_lines, issue_certificates};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;
use tempfile::TempDir;

/// The mirror of this name at this site, once it is so.
fn mirror(site: &Site, name: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
    wait_until("the mirror", LONG, &[&site.log_path()], || {
        let status = site.status()?;
        let mirrors = status["mirrors"].as_array().cloned().unwrap_or_default();
        Ok(mirrors.into_iter().find(|mirror| mirror["name"] == name && is_so(mirror)))
    })
}

/// Principal and near end, the node in between, and the far site behind a line.
struct Chain {
    near: Site,
    mid: Site,
    far: Site,
    standby: Cluster,
    principal: Cluster,
    line: Link,
    _certificates: TempDir,
    _ports: [ReservedPort; 4],
}

impl Chain {
    /// `second_hop` are further lines of the second mirror's near end.
    fn start(second_hop: &str) -> Result<Chain> {
        let mut principal = Cluster::builder(&Installation::find(15)?)
            .setting("wal_level", "replica")
            .setting("wal_keep_size", "512MB")
            .start()?;
        principal.execute_script("CREATE TABLE t (client int, n int, PRIMARY KEY (client, n))")?;
        let certificates = tempfile::Builder::new().prefix("farshore-certificates").tempdir()?;
        issue_certificates(certificates.path(), &["near", "mid", "far"])?;
        let ports = [
            ReservedPort::new()?,
            ReservedPort::new()?,
            ReservedPort::new()?,
            ReservedPort::new()?,
        ];
        let [near_link, mid_link, mid_listen, far_listen] =
            [&ports[0], &ports[1], &ports[2], &ports[3]].map(ReservedPort::number);
        let line = Link::to(mid_link)?;
        let (mut near, mut mid, mut far) =
            (Site::named("near")?, Site::named("mid")?, Site::named("far")?);
        near.add_to_site(&format!("listen = \"127.0.0.1:{near_link}\"\n"))?;
        near.add(&format!(
            "[mirror.m]\nprincipal = \"{}\"\nmode = \"far-sync\"\n\
             [downstream.mid]\nmirrors = [\"m\"]\n",
            principal.url("postgres")
        ))?;
        mid.add_to_site(&format!("listen = \"127.0.0.1:{mid_link}\"\n"))?;
        mid.add(&format!(
            "[upstream.near]\naddress = \"127.0.0.1:{near_link}\"\n\
             [mirror.m]\nupstream = \"near\"\nlisten = \"127.0.0.1:{mid_listen}\"\n\
             [mirror.n]\nprincipal = \"postgres://mid@127.0.0.1:{mid_listen}/postgres\"\n\
             mode = \"async\"\n{second_hop}[downstream.far]\nmirrors = [\"n\"]\n"
        ))?;
        far.add(&format!(
            "[upstream.mid]\naddress = \"127.0.0.1:{}\"\n\
             [mirror.n]\nupstream = \"mid\"\nlisten = \"127.0.0.1:{far_listen}\"\n",
            line.port()
        ))?;
        for (name, site) in [("near", &mut near), ("mid", &mut mid), ("far", &mut far)] {
            site.add_to_site(&certificate_lines(certificates.path(), name))?;
            site.start()?;
        }
        mirror(&far, "n", |mirror| mirror["state"] == "receiving")?;
        let conninfo = format!("host=127.0.0.1 port={far_listen} user=s");
        let standby = principal.standby(
            &[
                ("primary_conninfo", conninfo.as_str()),
                ("primary_slot_name", ""),
                ("wal_retrieve_retry_interval", "100ms"),
            ],
            &["farshore_mirror_m"],
        )?;
        let (_certificates, _ports) = (certificates, ports);
        Ok(Chain { near, mid, far, standby, principal, line, _certificates, _ports })
    }

    /// Commits wait for the node in between.
    fn begin_commits(&self) -> Result<Client> {
        let principal = &self.principal;
        let_commits_wait(principal)?;
        let shown = report(&self.near, "the mode", |mirror| mirror["state"] == "streaming")?;
        ensure!(shown["mode"] == "far-sync", "{shown}");
        client(principal, 0)
    }

    /// The principal and its near end are gone for good; what the client saw return.
    fn lose_the_principal(&mut self, client: Client) -> Result<i32> {
        self.principal.kill9()?;
        self.near.kill9()?;
        ensure!(client.thread.join().is_ok_and(|ended| ended.is_err()), "the client did well");
        Ok(client.returned.load(SeqCst))
    }

    fn promote(&self, more: &[&str]) -> Result<Verb> {
        let url = self.standby.url("postgres");
        self.far.verb("mirror promote", &[&["n", "--standby", &url], more].concat())
    }

    /// What returned is on the server that was promoted.
    fn check(&self, returned: i32) -> Result<()> {
        let sql = "SELECT count(*) FROM t WHERE n <= $1";
        let there: i64 = self.standby.connect()?.query_one(sql, &[&returned])?.get(0);
        ensure!(
            there == i64::from(returned),
            "LOST: {returned} commits returned, {there} are there"
        );
        Ok(())
    }
}

fn await_commits(client: &Client, more: i32) -> Result<()> {
    let before = client.returned.load(SeqCst);
    wait_until("commits to return", LONG, &[], || {
        ensure!(!client.thread.is_finished(), "the client died");
        Ok((client.returned.load(SeqCst) - before >= more).then_some(()))
    })
}

#[test]
fn what_a_nearby_node_hardened_gets_to_the_far_site() -> Result<()> {
    let mut chain = Chain::start("")?;
    let client = chain.begin_commits()?;
    await_commits(&client, 20)?;
    // The far site is out of reach, and commits go on; then all beside the principal is gone.
    chain.line.stall();
    await_commits(&client, 20)?;
    let returned = chain.lose_the_principal(client)?;
    chain.mid.kill9()?;
    chain.mid.start()?;
    chain.line.cut();
    chain.line.mend();
    let hardened = mirror(&chain.mid, "m", |mirror| mirror["durable"] != "")?;
    let hardened = position(hardened["durable"].as_str().context("no position")?)?;
    let promoted = chain.promote(&[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    println!("{}", promoted.stdout.trim());
    let shown = mirror(&chain.far, "n", |mirror| mirror["state"] == "promoted")?;
    let durable = position(shown["durable"].as_str().context("no position")?)?;
    ensure!(durable >= hardened, "promoted at {durable}, the node in between has {hardened}");
    chain.check(returned)
}

/// The node in between has no files: the far site's standby gets the principal's, through both hops.
#[test]
fn a_standby_at_the_end_of_a_chain_is_seeded() -> Result<()> {
    let mut chain = Chain::start("")?;
    // A node in between gives the files to who shows a password.
    let path = chain.mid.directory().join("password");
    std::fs::write(&path, "secret")?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    chain.mid.replace(
        "upstream = \"near\"\n",
        "upstream = \"near\"\nstandby_password = \"password\"\n",
    )?;
    chain.mid.replace("postgres://mid@", "postgres://mid:secret@")?;
    chain.mid.restart()?;
    mirror(&chain.far, "n", |mirror| mirror["state"] == "receiving")?;
    let home = tempfile::Builder::new().prefix("farshore-seeded").tempdir()?;
    own_as(home.path(), &chain.principal.data_dir())?;
    let data = home.path().join("data");
    std::fs::create_dir(&data)?;
    own_as(&data, home.path())?;
    let seeded = chain.far.verb("mirror seed", &["n", "--pgdata", &data.display().to_string()])?;
    ensure!(seeded.code == Some(0), "{seeded:?}");
    println!("{}", seeded.stdout.trim());
    let mut standby = chain.principal.adopt(&data)?;
    standby.start()?;
    chain.principal.execute_script("INSERT INTO t VALUES (77, 1)")?;
    wait_until("the standby to replay", LONG, &[&standby.log_path()], || {
        let sql = "SELECT count(*) FROM t WHERE client = 77";
        Ok((standby.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })
}

/// The second hop is dropped for being too far behind, so the node in between has log that the far
/// site lacks: no promotion gives that up by mistake, and once the mirror goes on nothing is lost.
#[test]
fn log_that_a_nearby_node_has_is_not_given_up_by_mistake() -> Result<()> {
    let mut chain = Chain::start("drop_behind = \"256MB\"\n")?;
    let client = chain.begin_commits()?;
    await_commits(&client, 20)?;
    let slot = mirror(&chain.mid, "m", |mirror| mirror["slots"][0]["in_use"] == true)?;
    ensure!(slot["slots"][0]["name"] == "farshore_mirror_n", "{slot}");
    chain.far.stop()?;
    await_commits(&client, 20)?;
    write_segments(&chain.principal, 20)?;
    let dropped = mirror(&chain.mid, "n", |mirror| mirror["state"] == "dropped")?;
    ensure!(dropped["health"] == "critical", "{dropped}");
    mirror(&chain.mid, "m", |mirror| mirror["slots"].as_array().is_some_and(Vec::is_empty))?;
    await_commits(&client, 20)?;
    let returned = chain.lose_the_principal(client)?;
    chain.far.start()?;
    mirror(&chain.far, "n", |mirror| mirror["state"] == "retrying")?;
    let refused = chain.promote(&["--wait", "1"])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("bytes more than came here"), "{refused:?}");
    println!("{}", refused.stderr.trim());
    let sql = "SELECT pg_is_in_recovery()";
    let is_standby: bool = chain.standby.connect()?.query_one(sql, &[])?.get(0);
    ensure!(is_standby, "it was promoted");
    let resumed = chain.mid.verb("mirror resume", &["n"])?;
    ensure!(resumed.code == Some(0), "{resumed:?}");
    let promoted = chain.promote(&[])?;
    ensure!(promoted.code == Some(0) && !promoted.stdout.contains("LOST"), "{promoted:?}");
    println!("{}", promoted.stdout.trim());
    chain.check(returned)
}

/// A node in between that cannot be asked holds nothing up, and is named.
#[test]
fn a_nearby_node_that_is_gone_as_well_is_said() -> Result<()> {
    let mut chain = Chain::start("")?;
    let client = chain.begin_commits()?;
    await_commits(&client, 20)?;
    chain.line.cut();
    await_commits(&client, 20)?;
    chain.lose_the_principal(client)?;
    let promoted = chain.promote(&["--wait", "1"])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    ensure!(promoted.stdout.contains("could not be asked what it has"), "{promoted:?}");
    println!("{}", promoted.stdout.trim());
    Ok(())
}

/// The principal lives while the far site's standby is promoted: what returns there is on the new
/// server, since nothing more does once that is decided; and where nothing is promoted, all goes on.
#[test]
fn nothing_returns_that_the_far_site_will_not_have() -> Result<()> {
    let mut chain = Chain::start("")?;
    let client = chain.begin_commits()?;
    await_commits(&client, 20)?;
    let url = chain.principal.url("postgres");
    let refused = chain.far.verb("mirror promote", &["n", "--standby", &url])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("is not in recovery"), "{refused:?}");
    await_commits(&client, 20)?;
    let promoted = chain.promote(&[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    ensure!(!promoted.stdout.contains("LOST"), "{promoted:?}");
    ensure!(promoted.stdout.contains("The node in between takes nothing in"), "{promoted:?}");
    println!("{}", promoted.stdout.trim());
    mirror(&chain.mid, "m", |mirror| mirror["state"] == "promoted")?;
    let says = |text: &'static str| {
        move |mirror: &Value| mirror["error"].as_str().is_some_and(|error| error.contains(text))
    };
    mirror(&chain.mid, "n", says("farshore mirror drop-slot SITE.toml m farshore_mirror_n"))?;
    mirror(&chain.near, "m", says("has promoted the standby of this mirror"))?;
    // Neither does the node in between take it up again when it starts.
    chain.mid.restart()?;
    mirror(&chain.mid, "m", |mirror| mirror["state"] == "promoted")?;
    wait_until("the client to wait", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        let waiting: i64 = chain.principal.connect()?.query_one(sql, &[])?.get(0);
        Ok((waiting > 0).then_some(()))
    })?;
    let returned = chain.lose_the_principal(client)?;
    chain.check(returned)
}

/// The node in between is started again, unheard, while a promotion waits for the standby: it knows
/// nothing of that, and takes log in that the far site lacks. Nothing is promoted then, and nothing
/// closed: commits go on returning.
#[test]
fn a_nearby_node_that_was_started_again_is_not_closed_in_vain() -> Result<()> {
    let mut chain = Chain::start("")?;
    let client = chain.begin_commits()?;
    await_commits(&client, 20)?;
    let conninfo = "SELECT current_setting('primary_conninfo')";
    let conninfo: String = chain.standby.connect()?.query_one(conninfo, &[])?.get(0);
    let follow = |standby: &Cluster, conninfo: &str| {
        standby.execute_script(&format!("ALTER SYSTEM SET primary_conninfo = '{conninfo}'"))?;
        standby.execute_script("SELECT pg_reload_conf()")
    };
    follow(&chain.standby, "host=127.0.0.1 port=1")?;
    await_commits(&client, 20)?;
    let Chain { mid, far, standby, line, .. } = &mut chain;
    let url = standby.url("postgres");
    let refused = std::thread::scope(|scope| {
        let (far, wanted) = (&*far, ["n", "--wait", "90", "--standby", url.as_str()]);
        let promoting = scope.spawn(move || far.verb("mirror promote", &wanted));
        let holds = |mirror: &Value| {
            mirror["error"].as_str().is_some_and(|error| error.contains("nothing is taken in"))
        };
        mirror(mid, "m", holds)?;
        // The far site comes to rest, and waits for the standby.
        std::thread::sleep(Duration::from_secs(2));
        line.stall();
        mid.kill9()?;
        mid.start()?;
        await_commits(&client, 20)?;
        line.cut();
        line.mend();
        follow(standby, &conninfo)?;
        promoting.join().map_err(|_| anyhow!("promoting died"))?
    })?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("bytes more than came here"), "{refused:?}");
    ensure!(refused.stderr.contains("and the mirror goes on"), "{refused:?}");
    println!("{}", refused.stderr.trim());
    mirror(&chain.mid, "m", |mirror| mirror["state"] == "receiving")?;
    await_commits(&client, 20)?;
    let promoted = chain.promote(&[])?;
    ensure!(promoted.code == Some(0) && !promoted.stdout.contains("LOST"), "{promoted:?}");
    println!("{}", promoted.stdout.trim());
    let returned = chain.lose_the_principal(client)?;
    chain.check(returned)
}
