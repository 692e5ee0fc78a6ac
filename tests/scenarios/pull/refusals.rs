//! Peers that get nothing, and what they and the operator are told.

use anyhow::{Context, Result, ensure};
use farshore_tests::{
    DATABASE, Direction, Pair, Site, UPSTREAM, Upstream, certificate_lines, issue_certificates,
};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const SCHEMA: &str = "CREATE TABLE t (id bigint PRIMARY KEY, v text)";

/// Each wrong thing is told where it is noticed; the right one runs after it.
#[test]
fn sites_get_what_they_are_granted_and_others_nothing() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], SCHEMA)?;
    pair.add_publication("secret", &[], "")?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.replace(", \"secret\"", "")?;
    upstream.site.start()?;
    let folder = upstream.certificates.path().to_owned();
    let good = certificate_lines(&folder, "t1");

    let elsewhere = tempfile::tempdir()?;
    issue_certificates(elsewhere.path(), &["t1"])?;
    issue_certificates(&folder, &["stranger"])?;
    let foreign = certificate_lines(elsewhere.path(), "t1");
    // The upstream site's authority is trusted, and the site's own certificate is of another one.
    let foreign = foreign.replace(
        &elsewhere.path().join("ca.crt").display().to_string(),
        &folder.join("ca.crt").display().to_string(),
    );
    let cases: [(&str, &str, &str, &str, &str); 3] = [
        (
            "ungranted",
            "\"up/p\"",
            "\"up/secret\"",
            "is not granted to site \"t1\"",
            "is not granted to site \"t1\"",
        ),
        (
            "nothing of that name",
            "\"up/p\"",
            "\"up/none\"",
            "is not granted to site \"t1\"",
            "is not granted to site \"t1\"",
        ),
        ("another authority", &good, &foreign, "refused our certificate", "refused"),
    ];
    for (what, right, wrong, there, here) in cases {
        pair.site.replace(right, wrong)?;
        if wrong == foreign {
            let check = pair.site.verb("check", &[])?;
            let doubt = "other sites will refuse its certificate";
            ensure!(check.stdout.contains(doubt), "{check:?}");
        }
        pair.site.start()?;
        let seen = pair.site.await_log(there, SOON).with_context(|| what.to_owned())?;
        ensure!(seen.contains("up"), "{what}: {seen}");
        upstream.site.await_log(here, SOON).with_context(|| what.to_owned())?;
        pair.site.stop()?;
        pair.site.replace(wrong, right)?;
    }

    // A site that nobody here knows, with a certificate that is good.
    pair.site.replace("name = \"t1\"", "name = \"stranger\"")?;
    let stranger = certificate_lines(&folder, "stranger");
    pair.site.replace(&good, &stranger)?;
    pair.site.start()?;
    pair.site.await_log("no [downstream.stranger]", SOON)?;
    pair.site.stop()?;
    pair.site.replace("name = \"stranger\"", "name = \"t1\"")?;

    // A certificate of another site than this one says it is.
    pair.site.start()?;
    let code = pair.site.await_exit(SOON)?;
    ensure!(code == 1 && pair.site.log().contains("\"stranger\""), "{}", pair.site.log());
    pair.site.replace(&stranger, &good)?;

    // Whatever else knocks.
    for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0x16, 3, 1, 0, 5, 1, 2, 3, 4, 5], &[0; 4096]] {
        let mut knock = TcpStream::connect(("127.0.0.1", upstream.port()))?;
        knock.set_read_timeout(Some(SOON))?;
        knock.write_all(bytes)?;
        let mut rest = Vec::new();
        let _ = knock.read_to_end(&mut rest);
    }
    check_looks_at_targets(&mut pair)?;
    pair.site.start()?;
    pair.publish("INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) AS i")?;
    pair.assert_equal(&["public"])?;
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(0) && check.stdout.contains("site \"up\" gives it"), "{check:?}");
    Ok(())
}

/// What would stop the first copy is said before it: the upstream site tells what is published.
fn check_looks_at_targets(pair: &mut Pair) -> Result<()> {
    let mends = [
        ("DROP TABLE t", "not on the target", "CREATE TABLE t (id bigint PRIMARY KEY, v text)"),
        ("ALTER TABLE t DROP v", "no writable column v", "ALTER TABLE t ADD v text"),
        ("ALTER TABLE t ADD w text NOT NULL", "have no default: w", "ALTER TABLE t DROP w"),
        ("INSERT INTO t VALUES (1, 'own')", "has rows already", "TRUNCATE t"),
        (
            "CREATE TRIGGER a BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION \
             suppress_redundant_updates_trigger(); ALTER TABLE t ENABLE ALWAYS TRIGGER a",
            "a on public.t",
            "DROP TRIGGER a ON t",
        ),
    ];
    for (spoil, said, mend) in mends {
        pair.subscriber.execute_script(spoil)?;
        let check = pair.site.verb("check", &[])?;
        ensure!(check.stdout.contains(said), "{spoil}: {check:?}");
        pair.subscriber.execute_script(mend)?;
    }
    Ok(())
}

#[test]
fn a_site_whose_upstream_was_replaced_stops_and_says_so() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], SCHEMA)?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.publish("INSERT INTO t VALUES (1, 'a')")?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    upstream.site.stop()?;
    std::fs::remove_dir_all(upstream.site.directory().join("data"))?;
    pair.drop_slot()?;
    upstream.site.start()?;
    pair.site.start()?;
    let line = pair.site.await_log(" stopped: ", SOON)?;
    ensure!(line.contains("has another log than the site that it comes from"), "{line}");
    let (state, _) = pair.site.await_trouble(&format!("{UPSTREAM}/p"), "another log")?;
    ensure!(state == "stopped", "{state}");
    Ok(())
}

/// It is not to be emptied under who fills it.
#[test]
fn a_table_that_another_subscription_fills_is_refused_as_such() -> Result<()> {
    let schema = "CREATE TABLE t (id integer PRIMARY KEY, v text)";
    let mut pair = Pair::new(Direction::UP, &["public.*"], schema)?;
    let mut upstream = Upstream::split(&mut pair)?;
    let target = pair.subscriber.url(DATABASE);
    let local = format!("[subscription.local]\npublication = \"p\"\ntarget = \"{target}\"\n");
    upstream.site.add(&local)?;
    pair.publish("INSERT INTO t VALUES (1, 'there')")?;
    upstream.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.site.start()?;
    let (state, error) = pair.site.await_trouble("s", "is filled by subscription \"local\"")?;
    ensure!(state == "stopped" && !error.contains("TRUNCATE"), "{state}: {error}");
    pair.publish("INSERT INTO t VALUES (2, 'after')")?;
    upstream.site.wait_for("the other one to go on", SOON, || {
        Ok((pair.subscriber_says("SELECT count(*) FROM t")? == "2").then_some(()))
    })
}

/// A machine that was copied runs beside the one that it is a copy of: each would end the other's
/// sessions, several times a second.
#[test]
fn of_two_nodes_with_one_sites_certificate_one_gets_the_log_and_both_are_told() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], SCHEMA)?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.publish("INSERT INTO t VALUES (1, 'a')")?;
    pair.assert_equal(&["public"])?;
    pair.subscriber.connect()?.batch_execute("CREATE DATABASE elsewhere")?;
    let mut target = pair.subscriber.connect_to("elsewhere")?;
    target.batch_execute(SCHEMA)?;
    let mut second = Site::named("t1")?;
    second.add_to_site(&certificate_lines(upstream.certificates.path(), "t1"))?;
    second.add(&format!(
        "[upstream.{UPSTREAM}]\naddress = \"127.0.0.1:{}\"\n\
         [subscription.second]\npublication = \"{UPSTREAM}/p\"\ntarget = \"{}\"\n",
        upstream.link.port(),
        pair.subscriber.url("elsewhere")
    ))?;
    second.start()?;
    let publication = format!("{UPSTREAM}/p");
    let (state, _) = pair.site.await_trouble(&publication, "two nodes run as site \"t1\"")?;
    ensure!(state == "retrying", "{state}");
    let here = "two nodes run as site \"t1\": the one at 127.0.0.1 has its place";
    upstream.site.await_log(here, SOON)?;
    let status = upstream.site.status()?;
    let told = status["downstreams"][0]["error"].as_str().unwrap_or_default();
    ensure!(told.contains(here) && status["downstreams"][0]["connected"] == true, "{status}");
    // The one that has the place goes on undisturbed, whatever the other one asks.
    let connections = || upstream.site.log().matches("downstream site connected").count();
    let before = connections();
    for id in 2..6 {
        pair.publish(&format!("INSERT INTO t VALUES ({id}, 'b')"))?;
        second.wait_for("the row to arrive", SOON, || {
            let count: i64 = target.query_one("SELECT count(*) FROM t", &[])?.get(0);
            Ok((count == id).then_some(()))
        })?;
        pair.site.verb("resume", &["--publication", &publication])?;
    }
    ensure!(connections() == before, "{}", upstream.site.log());
    second.stop()?;
    pair.assert_equal(&["public"])?;
    farshore_testkit::wait::wait_until("it to be forgotten", SOON, &[], || {
        Ok(upstream.site.status()?["downstreams"][0]["error"].is_null().then_some(()))
    })
}

/// A site that is revoked loses its session, and one whose certificate is renewed goes on, while the
/// nodes run.
#[test]
fn certificates_are_replaced_while_nodes_run() -> Result<()> {
    let mut pair = Pair::new(Direction::UP, &["public.*"], SCHEMA)?;
    let mut upstream = Upstream::split(&mut pair)?;
    upstream.site.start()?;
    pair.site.start()?;
    pair.publish("INSERT INTO t VALUES (1, 'a')")?;
    pair.assert_equal(&["public"])?;
    let folder = upstream.certificates.path().to_owned();
    let site_cert = |arguments: &[&str]| -> Result<()> {
        let made = pair.site.command().arg("site-cert").args(arguments).output()?;
        ensure!(made.status.success(), "{made:?}");
        Ok(())
    };
    let dir = folder.display().to_string();
    site_cert(&["revoke", "--dir", &dir, "t1"])?;
    let list = upstream.site.directory().join("revoked.crl");
    std::fs::copy(folder.join("revoked.crl"), &list)?;
    let line = pair.site.await_log("refused our certificate", SOON)?;
    ensure!(line.contains("revoked"), "{line}");
    farshore_testkit::wait::wait_until("the revoked site to be away", SOON, &[], || {
        let status = upstream.site.status()?;
        Ok((status["downstreams"][0]["connected"] == false).then_some(()))
    })?;
    // Whatever it had open: the log, and the way to ask the publisher.
    farshore_testkit::wait::wait_until("its sessions to end", SOON, &[], || {
        let log = upstream.site.log();
        Ok((log.matches("it is to be let in anew").count() >= 2).then_some(()))
    })?;
    // Another one, under the same name.
    for old in ["t1.crt", "t1.key"] {
        std::fs::remove_file(folder.join(old))?;
    }
    site_cert(&["issue", "--dir", &dir, "t1"])?;
    pair.site.await_log("certificates were replaced", SOON)?;
    pair.publish("INSERT INTO t VALUES (2, 'b')")?;
    // The site may have stopped asking at the refusal.
    let _ = pair.site.verb("resume", &["--publication", "up/p"])?;
    let mut target = pair.subscriber.connect()?;
    farshore_testkit::wait::wait_until("the row to arrive", SOON, &[], || {
        Ok(target.query_opt("SELECT FROM t WHERE id = 2", &[])?.map(drop))
    })
}
