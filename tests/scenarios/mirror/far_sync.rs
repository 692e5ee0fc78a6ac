//! far-sync: a node near the principal hardens the log and keeps it, and a mirror of its spool
//! carries it on. The principal and all beside it may go: what returned gets to the far site.

use crate::mirrored::{LONG, client, position, report};
use anyhow::{Context, Result, ensure};
use farshore_testkit::port::ReservedPort;
use farshore_testkit::postgres::{Cluster, Installation};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Link, Site, certificate_lines, issue_certificates};
use serde_json::Value;
use std::sync::atomic::Ordering::SeqCst;

/// The mirror of this name at this site, once it is so.
fn mirror(site: &Site, name: &str, is_so: impl Fn(&Value) -> bool) -> Result<Value> {
    wait_until("the mirror", LONG, &[&site.log_path()], || {
        let status = site.status()?;
        let mirrors = status["mirrors"].as_array().cloned().unwrap_or_default();
        Ok(mirrors.into_iter().find(|mirror| mirror["name"] == name && is_so(mirror)))
    })
}

#[test]
fn what_a_nearby_node_hardened_gets_to_the_far_site() -> Result<()> {
    let mut principal = Cluster::builder(&Installation::find(15)?)
        .setting("wal_level", "replica")
        .setting("wal_keep_size", "512MB")
        .start()?;
    principal.execute_script("CREATE TABLE t (client int, n int, PRIMARY KEY (client, n))")?;
    let certificates = tempfile::Builder::new().prefix("farshore-certificates").tempdir()?;
    issue_certificates(certificates.path(), &["near", "mid", "far"])?;
    let ports =
        [ReservedPort::new()?, ReservedPort::new()?, ReservedPort::new()?, ReservedPort::new()?];
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
         mode = \"async\"\n[downstream.far]\nmirrors = [\"n\"]\n"
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
    principal.execute_script("ALTER SYSTEM SET synchronous_standby_names = 'farshore_m'")?;
    principal.execute_script("SELECT pg_reload_conf()")?;
    wait_until("the mirror to count", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
        Ok((principal.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })?;
    let shown = report(&near, "the mode", |mirror| mirror["state"] == "streaming")?;
    ensure!(shown["mode"] == "far-sync", "{shown}");
    let client = client(&principal, 0)?;
    let await_commits = |more: i32| {
        let before = client.returned.load(SeqCst);
        wait_until("commits to return", LONG, &[], || {
            ensure!(!client.thread.is_finished(), "the client died");
            Ok((client.returned.load(SeqCst) - before >= more).then_some(()))
        })
    };
    await_commits(20)?;
    // The far site is out of reach, and commits go on; then all beside the principal is gone.
    line.stall();
    await_commits(20)?;
    principal.kill9()?;
    near.kill9()?;
    ensure!(client.thread.join().is_ok_and(|ended| ended.is_err()), "the client did well");
    let returned = client.returned.load(SeqCst);
    mid.kill9()?;
    mid.start()?;
    line.cut();
    line.mend();
    let hardened = mirror(&mid, "m", |mirror| mirror["durable"] != "")?;
    let hardened = position(hardened["durable"].as_str().context("no position")?)?;
    mirror(&far, "n", |mirror| {
        let durable = mirror["durable"].as_str().unwrap_or_default();
        position(durable).is_ok_and(|durable| durable >= hardened)
    })?;
    let url = standby.url("postgres");
    let promoted = far.verb("mirror promote", &["n", "--standby", &url])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    println!("{}", promoted.stdout.trim());
    let sql = "SELECT count(*) FROM t WHERE n <= $1";
    let there: i64 = standby.connect()?.query_one(sql, &[&returned])?.get(0);
    ensure!(there == i64::from(returned), "LOST: {returned} commits returned, {there} are there");
    Ok(())
}
