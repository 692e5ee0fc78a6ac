//! Two replicas that the principal would take for one: a commit that one of them lets return is not
//! at the other.

use crate::mirrored::{LONG, Mirrored, SLOT, report};
use crate::promotion::{check_rows, promote};
use anyhow::{Result, bail, ensure};
use farshore_testkit::port::ReservedPort;
use farshore_testkit::postgres::Cluster;
use farshore_testkit::wait::wait_until;
use farshore_tests::{Site, certificate_lines, issue_certificates};
use std::os::unix::fs::PermissionsExt;
use tempfile::TempDir;

/// `pg_receivewal`, which tells the principal at once what it has; ended when this is dropped.
struct Receiver(std::process::Child, TempDir);

impl Drop for Receiver {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn receive(principal: &Cluster, name: &str, slot: Option<&str>) -> Result<Receiver> {
    let folder = tempfile::tempdir()?;
    // It runs as the server's user.
    std::fs::set_permissions(folder.path(), PermissionsExt::from_mode(0o777))?;
    let source =
        format!("host=127.0.0.1 port={} user=postgres application_name={name}", principal.port());
    let log = std::fs::File::create(folder.path().join("log"))?;
    let child = principal
        .installation()
        .command("pg_receivewal")
        .args(["--synchronous", "--no-loop", "--dbname", &source, "--directory"])
        .arg(folder.path())
        .args(slot.iter().flat_map(|slot| ["--slot", slot]))
        .stderr(log)
        .spawn()?;
    Ok(Receiver(child, folder))
}

/// A second one that the principal would take for the mirror does not come by: the slot is in use;
/// and beside one that has another slot, the mirror promises nothing.
#[test]
fn two_replicas_with_one_name_do_not_both_count() -> Result<()> {
    let mut mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(5)?;
    let mut thief = receive(&mirrored.principal, "farshore_m", Some(SLOT))?;
    let log = thief.1.path().join("log");
    wait_until("the slot's thief to be refused", LONG, &[&log], || Ok(thief.0.try_wait()?))?;
    let said = std::fs::read_to_string(&log)?;
    ensure!(said.contains("is active for PID"), "{said}");
    mirrored.await_commits(5)?;
    mirrored.near.kill9()?;
    mirrored.await_silence()?;
    let namesake = receive(&mirrored.principal, "FARSHORE_M", None)?;
    wait_until("the namesake to stream", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming' \
                   AND application_name = 'FARSHORE_M'";
        Ok((mirrored.principal.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })?;
    mirrored.near.start()?;
    let found = report(&mirrored.far, "the namesake to be seen", |mirror| {
        mirror["error"].as_str().is_some_and(|error| error.contains("takes the two for one"))
    })?;
    ensure!(found["state"] == "retrying", "{found}");
    drop(namesake);
    report(&mirrored.far, "the mirror to go on", |mirror| mirror["state"] == "receiving")?;
    mirrored.await_commits(5)?;
    // One that comes while log flows: it goes on, and that the name promises nothing is said.
    let namesake = receive(&mirrored.principal, "Farshore_M", None)?;
    let near = report(&mirrored.near, "the later namesake to be seen", |mirror| {
        mirror["error"].as_str().is_some_and(|error| error.contains("takes the two for one"))
    })?;
    ensure!(near["state"] == "streaming", "{near}");
    drop(namesake);
    report(&mirrored.near, "the namesake to be gone", |mirror| mirror["error"].is_null())?;
    mirrored.await_commits(5)?;
    mirrored.finish()
}

/// A second mirror of the same principal, between two other sites, that has the first one's name.
struct Twin {
    near: Site,
    far: Site,
    _certificates: TempDir,
    _ports: [ReservedPort; 2],
}

impl Twin {
    fn start(mirrored: &Mirrored, defect: &str) -> Result<Twin> {
        let certificates = tempfile::Builder::new().prefix("farshore-certificates").tempdir()?;
        issue_certificates(certificates.path(), &["near2", "far2"])?;
        let ports = [ReservedPort::new()?, ReservedPort::new()?];
        let [link, listen] = [&ports[0], &ports[1]].map(ReservedPort::number);
        let (mut near, mut far) = (Site::named("near2")?, Site::named("far2")?);
        near.add_to_site(&format!("listen = \"127.0.0.1:{link}\"\n"))?;
        near.add(&format!(
            "[mirror.n]\nprincipal = \"{}\"\napplication_name = \"Farshore_M\"\n\
             [downstream.far2]\nmirrors = [\"n\"]\n",
            mirrored.principal.url("postgres")
        ))?;
        far.add(&format!(
            "[upstream.near2]\naddress = \"127.0.0.1:{link}\"\n\
             [mirror.n]\nupstream = \"near2\"\nlisten = \"127.0.0.1:{listen}\"\n"
        ))?;
        for (name, site) in [("near2", &mut near), ("far2", &mut far)] {
            site.add_to_site(&certificate_lines(certificates.path(), name))?;
            site.env("FARSHORE_DEFECT", defect);
            site.start()?;
        }
        Ok(Twin { near, far, _certificates: certificates, _ports: ports })
    }
}

/// No site sees the other's file; the principal is where they meet.
#[test]
fn a_second_mirror_with_the_name_of_the_first_is_refused_from_another_site() -> Result<()> {
    let mirrored = Mirrored::start(15, None)?;
    mirrored.await_commits(5)?;
    let twin = Twin::start(&mirrored, "")?;
    for site in [&twin.far, &twin.near] {
        let refused = report(site, "the twin to be refused", |mirror| {
            mirror["error"].as_str().is_some_and(|error| error.contains("takes the two for one"))
        })?;
        println!("{}", refused["error"]);
    }
    // It tells the principal of nothing, and what was there first goes on.
    let told = || -> Result<String> {
        let sql = "SELECT restart_lsn::text FROM pg_replication_slots \
                   WHERE slot_name = 'farshore_mirror_n'";
        Ok(mirrored.principal.connect()?.query_one(sql, &[])?.get(0))
    };
    let before = told()?;
    mirrored.await_commits(20)?;
    ensure!(told()? == before, "the twin has acknowledged");
    let first = report(&mirrored.far, "the first to go on", |m| m["state"] == "receiving")?;
    ensure!(first["error"].is_null(), "{first}");
    mirrored.check_standby(&mirrored.returned())?;
    mirrored.finish()
}

/// With one name for both, a commit returns when either has it.
#[test]
fn two_mirrors_with_one_application_name_are_caught() -> Result<()> {
    let defect = "mirror-misses-namesakes";
    let mut mirrored = Mirrored::start(15, Some(defect))?;
    mirrored.await_commits(5)?;
    let twin = Twin::start(&mirrored, defect)?;
    report(&twin.far, "the twin to receive", |mirror| mirror["state"] == "receiving")?;
    // Commits that waited when its spool began are not in it, and it keeps them from returning.
    wait_until("the twin to tell what it has", LONG, &[&twin.near.log_path()], || {
        let sql = "SELECT count(*) FROM pg_stat_replication \
                   WHERE application_name = 'Farshore_M' AND flush_lsn IS NOT NULL";
        Ok((mirrored.principal.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })?;
    // The first one is away, and commits should wait for it.
    mirrored.near.kill9()?;
    mirrored.await_commits(10)?;
    let returned = mirrored.lose_the_principal()?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    match check_rows(&mirrored.standby, &returned) {
        Ok(()) => bail!("not caught"),
        Err(error) => {
            ensure!(format!("{error:#}").contains("LOST: "), "{error:#}");
            println!("caught: {error:#}");
            Ok(())
        }
    }
}
