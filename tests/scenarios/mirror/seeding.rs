//! A new user's way to a mirror: three commands, and a standby that is the principal, byte by byte.

use crate::mirrored::{LONG, position, report};
use anyhow::{Context, Result, ensure};
use farshore_testkit::port::ReservedPort;
use farshore_testkit::postgres::{Cluster, Installation, StopMode};
use farshore_testkit::skip::{skipped, this_test};
use farshore_testkit::wait::wait_until;
use farshore_tests::{Site, Verb, certificate_lines, issue_certificates};
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

pub struct Pair {
    pub principal: Cluster,
    pub near: Site,
    pub far: Site,
    _certificates: TempDir,
    ports: (ReservedPort, ReservedPort),
}

impl Pair {
    pub fn start(major: u32) -> Result<Pair> {
        Pair::start_at(major, "127.0.0.1", "")
    }

    /// `host` is where standbys may connect, `keys` what else the far end's section says.
    pub fn start_at(major: u32, host: &str, keys: &str) -> Result<Pair> {
        let principal = Cluster::builder(&Installation::find(major)?)
            .setting("wal_level", "replica")
            .setting("wal_keep_size", "512MB")
            .start()?;
        principal.execute_script(
            "CREATE TABLE big AS SELECT g AS id, md5(g::text) || repeat('x', 200) AS v \
             FROM generate_series(1, 60000) g; CREATE TABLE empty (); \
             CREATE UNIQUE INDEX ON big (id)",
        )?;
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
        let mut far = Site::named("far")?;
        far.add_to_site(&certificate_lines(certificates.path(), "far"))?;
        far.add(&format!(
            "[upstream.near]\naddress = \"127.0.0.1:{link}\"\n\
             [mirror.m]\nupstream = \"near\"\nlisten = \"{host}:{listen}\"\n{keys}"
        ))?;
        Ok(Pair { principal, near, far, _certificates: certificates, ports })
    }

    /// Where standbys connect.
    pub fn port(&self) -> u16 {
        self.ports.1.number()
    }

    fn seed(&self, pgdata: &Path, more: &[&str]) -> Result<Verb> {
        let pgdata = pgdata.display().to_string();
        self.far.verb("mirror seed", &[&["m", "--pgdata", &pgdata], more].concat())
    }

    /// Where the server's user may make a data directory.
    pub fn home(&self) -> Result<TempDir> {
        let home = tempfile::Builder::new().prefix("farshore-seeded").tempdir()?;
        own_as(home.path(), &self.principal.data_dir())?;
        Ok(home)
    }

    /// All of what the principal has, in the standby's files and in what can be read there.
    pub fn compare(&mut self, standby: &Cluster) -> Result<()> {
        let principal = &self.principal;
        principal.execute_script(
            "INSERT INTO big SELECT (SELECT least(min(id), 0) FROM big) - g, 'late' \
             FROM generate_series(1, 1000) g",
        )?;
        let sql = "SELECT pg_current_wal_flush_lsn()::text";
        let end: String = principal.connect()?.query_one(sql, &[])?.get(0);
        wait_until("the standby to replay", LONG, &[&standby.log_path()], || {
            let sql = "SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn";
            Ok(standby.connect()?.query_one(sql, &[&end])?.get::<_, bool>(0).then_some(()))
        })?;
        let sql = "SELECT count(*) || ' ' || md5(string_agg(id || v, ',' ORDER BY id)) FROM big";
        let read = |server: &Cluster| -> Result<String> {
            Ok(server.connect()?.query_one(sql, &[])?.get(0))
        };
        ensure!(read(principal)? == read(standby)?, "the tables differ");
        Ok(())
    }
}

/// Gives a path the owner that another has.
pub fn own_as(path: &Path, other: &Path) -> Result<()> {
    let owner = other.metadata()?;
    std::os::unix::fs::chown(path, Some(owner.uid()), Some(owner.gid()))?;
    Ok(())
}

/// Every relation, and its size.
fn relations(server: &Cluster) -> Result<BTreeMap<String, u64>> {
    let sql = "SELECT relname::text, pg_relation_size(oid) FROM pg_class \
               WHERE relkind IN ('r', 'i', 't', 'm', 'S') ORDER BY 1";
    let rows = server.connect()?.query(sql, &[])?;
    Ok(rows.iter().map(|row| (row.get(0), row.get::<_, i64>(1) as u64)).collect())
}

fn three_commands(major: u32) -> Result<()> {
    let mut pair = Pair::start(major)?;
    // The two nodes, each on its server, and the standby.
    pair.near.start()?;
    pair.far.start()?;
    let home = pair.home()?;
    let pgdata = home.path().join("data");
    std::fs::create_dir(&pgdata)?;
    own_as(&pgdata, home.path())?;
    let seeded = pair.seed(&pgdata, &[])?;
    ensure!(seeded.code == Some(0), "{seeded:?}{}", pair.near.log_tail());
    println!("{}", seeded.stdout.trim());
    verify_backup(&pair.principal, &pgdata)?;
    let mut standby = pair.principal.adopt(&pgdata)?;
    standby.start()?;
    pair.compare(&standby)?;
    ensure!(relations(&pair.principal)? == relations(&standby)?, "relations differ in size");
    let mirror = report(&pair.far, "the standby's slot", |mirror| {
        mirror["standbys"][0]["slot"] == "standby_m"
    })?;
    ensure!(mirror["state"] == "receiving", "{mirror}");
    compare_wal(&pair, &mirror)?;
    // What a server uses is not written over.
    let refused = pair.seed(&standby.data_dir(), &["--slot", "other", "--overwrite"])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("has a server: process"), "{refused:?}");
    // The data directory of a server that was is: little crosses.
    standby.stop(StopMode::Fast)?;
    let again = pair.seed(&standby.data_dir(), &["--overwrite"])?;
    ensure!(again.code == Some(0), "{again:?}");
    println!("{}", again.stdout.trim());
    let number = |after: &str| -> Result<u64> {
        let before = again.stdout.split(after).next().context("not said")?;
        Ok(before.trim_end().rsplit(' ').next().context("no number")?.parse()?)
    };
    let (here, all) = (number("bytes were here already")?, number("bytes, each checked")?);
    ensure!(here * 2 > all, "{here} of {all} were here: {again:?}");
    standby.configure_again()?;
    standby.start()?;
    pair.compare(&standby)
}

/// A mirror whose standbys may be on other machines: the site shows its own certificate, and what
/// seeds a standby writes down the password that it is asked for.
#[test]
fn a_standby_of_a_mirror_with_a_password_is_seeded_and_streams_by_tls() -> Result<()> {
    let home = tempfile::Builder::new().prefix("farshore-password").tempdir()?;
    let path = home.path().join("password");
    let keys = format!("standby_password = {path:?}\n");
    let mut pair = Pair::start_at(18, "0.0.0.0", &keys)?;
    // Said before anything is made: by check, by seed, and by the node that cannot let anybody in.
    let refused = pair.far.verb("check", &[])?;
    ensure!(refused.code == Some(1) && refused.stdout.contains("standby_password"), "{refused:?}");
    pair.near.start()?;
    pair.far.start()?;
    let said = |mirror: &serde_json::Value| mirror.to_string().contains("standby_password");
    report(&pair.far, "the far end to say what it lacks", said)?;
    std::fs::write(&path, "it's a \\ \"secret\"\n")?;
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600))?;
    let checked = pair.far.verb("check", &[])?;
    ensure!(checked.stdout.contains("can bind it to TLS"), "{checked:?}");
    let home = pair.home()?;
    let pgdata = home.path().join("data");
    std::fs::create_dir(&pgdata)?;
    own_as(&pgdata, home.path())?;
    let seeded = pair.seed(&pgdata, &[])?;
    ensure!(seeded.code == Some(0), "{seeded:?}{}", pair.near.log_tail());
    let mut standby = pair.principal.adopt(&pgdata)?;
    standby.start()?;
    pair.compare(&standby)?;
    let sql = "SELECT conninfo FROM pg_stat_wal_receiver";
    let conninfo: String = standby.connect()?.query_one(sql, &[])?.get(0);
    ensure!(
        conninfo.contains("host=127.0.0.1") && conninfo.contains("password=****"),
        "{conninfo}"
    );
    ensure!(!conninfo.contains("secret"), "{conninfo}");
    ensure!(conninfo.contains("channel_binding=require"), "{conninfo}");
    Ok(())
}

/// PostgreSQL's own tool agrees.
pub fn verify_backup(principal: &Cluster, pgdata: &Path) -> Result<()> {
    let program = principal.installation().command("pg_verifybackup").get_program().to_owned();
    if !Path::new(&program).exists() {
        println!("skipped: no pg_verifybackup here");
        return Ok(());
    }
    let verified = Command::new(program).arg("--no-parse-wal").arg(pgdata).output()?;
    ensure!(verified.status.success(), "{}", String::from_utf8_lossy(&verified.stderr));
    Ok(())
}

/// What `pg_waldump` reads in the spool is what it reads at the principal.
fn compare_wal(pair: &Pair, mirror: &serde_json::Value) -> Result<()> {
    let program = pair.principal.installation().command("pg_waldump").get_program().to_owned();
    if !Path::new(&program).exists() {
        println!("skipped: no pg_waldump here");
        return Ok(());
    }
    let spool = pair.far.directory().join("data/mirrors/m");
    let mut segments: Vec<String> = std::fs::read_dir(&spool)?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.len() == 24)
        .collect();
    segments.sort();
    let first = segments.first().context("no segment")?;
    let low = u64::from_str_radix(first.get(16..).context("a name")?, 16)? << 24;
    let start =
        format!("{:X}/{low:X}", u64::from_str_radix(first.get(8..16).context("a name")?, 16)?);
    let end = mirror["durable"].as_str().context("no position")?;
    let dump = |path: &Path| -> Result<Vec<u8>> {
        let output = Command::new(&program)
            .args(["--timeline", "1", "--start", &start, "--end", end, "--path"])
            .arg(path)
            .output()?;
        ensure!(!output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(output.stdout)
    };
    let theirs = dump(&pair.principal.data_dir().join("pg_wal"))?;
    ensure!(dump(&spool)? == theirs, "pg_waldump reads something else in the spool");
    println!("{} records are the same", theirs.iter().filter(|byte| **byte == b'\n').count());
    Ok(())
}

#[test]
fn a_mirror_in_three_commands_with_15() -> Result<()> {
    three_commands(15)
}

#[test]
fn a_mirror_in_three_commands_with_18() -> Result<()> {
    three_commands(18)
}

/// With FARSHORE_VERSIONS=all, which `make test-versions` sets and installs them for.
#[test]
fn a_mirror_in_three_commands_with_14_16_and_17() -> Result<()> {
    if std::env::var("FARSHORE_VERSIONS").as_deref() != Ok("all") {
        skipped(&this_test(), "FARSHORE_VERSIONS is not \"all\" (make test-versions)");
        return Ok(());
    }
    [14, 16, 17].into_iter().try_for_each(three_commands)
}

/// What the principal's commits wait for is not what a promoted standby's wait for, and where they
/// would wait that is said.
#[test]
fn a_seeded_standby_waits_for_nobody_once_it_is_promoted() -> Result<()> {
    let mut pair = Pair::start(15)?;
    pair.near.start()?;
    pair.far.start()?;
    report(&pair.far, "the mirror to receive", |mirror| mirror["state"] == "receiving")?;
    let set = |server: &Cluster, names: &str| -> Result<()> {
        let sql = format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'");
        server.execute_script(&sql)?;
        server.execute_script("SELECT pg_reload_conf()")?;
        wait_until("the setting", LONG, &[], || {
            let shown = server.connect()?.query_one("SHOW synchronous_standby_names", &[])?;
            Ok((shown.get::<_, &str>(0) == names).then_some(()))
        })
    };
    set(&pair.principal, "farshore_m")?;
    let home = pair.home()?;
    let pgdata = home.path().join("data");
    let seeded = pair.seed(&pgdata, &[])?;
    ensure!(seeded.code == Some(0), "{seeded:?}{}", pair.near.log_tail());
    own_all(&pgdata, home.path())?;
    let mut standby = pair.principal.adopt(&pgdata)?;
    standby.start()?;
    pair.compare(&standby)?;
    let shown = standby.connect()?.query_one("SHOW synchronous_standby_names", &[])?;
    ensure!(shown.get::<_, &str>(0).is_empty(), "it has the principal's");
    // A standby that was made otherwise has it.
    set(&standby, "farshore_m")?;
    pair.principal.stop(StopMode::Immediate)?;
    let promoted =
        pair.far.verb("mirror promote", &["m", "--standby", &standby.url("postgres")])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    let said = "synchronous_standby_names is \"farshore_m\": commits there wait";
    ensure!(promoted.stdout.contains(said), "{promoted:?}");
    set(&standby, "")?;
    standby.execute_script("INSERT INTO big VALUES (0, 'own')")
}

/// The near end dies in the middle; another run goes on, and no server starts in between.
#[test]
fn a_seeding_that_was_broken_off_goes_on() -> Result<()> {
    let mut pair = Pair::start(15)?;
    pair.near.start()?;
    pair.far.start()?;
    let home = pair.home()?;
    let pgdata = home.path().join("data");
    // As root, both runs give what they make to who owns the directory.
    std::fs::create_dir(&pgdata)?;
    own_as(&pgdata, home.path())?;
    if home.path().metadata()?.uid() == std::fs::metadata("/proc/self")?.uid() {
        println!("skipped: whose the files are, since the tests run as the server's user");
    }
    report(&pair.far, "the mirror to receive", |mirror| mirror["state"] == "receiving")?;
    let checked = pair.far.verb("check", &[])?;
    ensure!(checked.stdout.contains("site \"near\" has its near end"), "{checked:?}");
    pair.near.stop()?;
    let checked = pair.far.verb("check", &[])?;
    ensure!(checked.code == Some(1) && checked.stdout.contains("cannot connect"), "{checked:?}");
    let crash = "seed.before-file:400";
    pair.near.env("FARSHORE_CRASH", crash);
    pair.near.start()?;
    report(&pair.far, "the mirror to receive", |mirror| mirror["state"] == "receiving")?;
    let broken = pair.seed(&pgdata, &[])?;
    ensure!(broken.code == Some(1) && broken.stderr.contains("Run this again"), "{broken:?}");
    ensure!(!broken.stderr.contains("manifest"), "the link was cut: {broken:?}");
    pair.near.await_kill(crash, LONG)?;
    ensure!(!pgdata.join("global/pg_control").exists(), "a server could start");
    pair.near.env("FARSHORE_CRASH", "");
    pair.near.start()?;
    // Bytes that go bad meanwhile are noticed: what differs is sent again.
    let mut damaged = std::fs::read(pgdata.join("PG_VERSION")).unwrap_or_default();
    damaged.push(b'x');
    std::fs::write(pgdata.join("PG_VERSION"), damaged)?;
    report(&pair.far, "the mirror to receive", |mirror| mirror["state"] == "receiving")?;
    let seeded = pair.seed(&pgdata, &[])?;
    ensure!(seeded.code == Some(0), "{seeded:?}");
    println!("{}", seeded.stdout.trim());
    ensure!(!seeded.stdout.contains(" 0 bytes were here already"), "{seeded:?}");
    verify_backup(&pair.principal, &pgdata)?;
    let mut standby = pair.principal.adopt(&pgdata)?;
    standby.start()?;
    pair.compare(&standby)?;
    // Somebody's directory is left alone.
    let somebodys = home.path().join("home");
    std::fs::create_dir(&somebodys)?;
    std::fs::write(somebodys.join("file"), "x")?;
    let refused = pair.seed(&somebodys, &["--slot", "other"])?;
    ensure!(refused.stderr.contains("is not empty"), "{refused:?}");
    let taken = pair.seed(&home.path().join("more"), &[])?;
    ensure!(taken.stderr.contains("a standby streams by the slot"), "{taken:?}");
    Ok(())
}

/// A data directory that a server could start on is not given up before it is known that files come,
/// and that they fit what the spool holds.
#[test]
fn a_directory_is_not_written_over_for_files_that_cannot_be_used() -> Result<()> {
    let mut pair = Pair::start(15)?;
    pair.near.start()?;
    pair.far.start()?;
    let home = pair.home()?;
    let pgdata = home.path().join("data");
    std::fs::create_dir(&pgdata)?;
    own_as(&pgdata, home.path())?;
    let seeded = pair.seed(&pgdata, &[])?;
    ensure!(seeded.code == Some(0), "{seeded:?}");
    let mut standby = pair.principal.adopt(&pgdata)?;
    standby.start()?;
    pair.compare(&standby)?;
    standby.stop(StopMode::Fast)?;
    let pgdata = standby.data_dir();
    let control = pgdata.join("global/pg_control");
    let before = std::fs::read(&control)?;

    // Nobody gives them.
    pair.principal.stop(StopMode::Fast)?;
    let refused = pair.seed(&pgdata, &["--overwrite"])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(std::fs::read(&control)? == before, "a standby was destroyed: {refused:?}");

    // They are those of a server that has left the timeline before what the spool holds.
    pair.principal.start()?;
    pair.principal.execute_script("INSERT INTO big VALUES (-1000000, 'the standby lacks it')")?;
    let sql = "SELECT pg_current_wal_flush_lsn()::text";
    let end: String = pair.principal.connect()?.query_one(sql, &[])?.get(0);
    report(&pair.far, "the spool to have it", |mirror| {
        mirror["durable"]
            .as_str()
            .is_some_and(|durable| position(durable).ok() >= position(&end).ok())
    })?;
    pair.far.stop()?;
    pair.near.stop()?;
    pair.principal.stop(StopMode::Fast)?;
    standby.start()?;
    standby.execute_script("SELECT pg_promote()")?;
    pair.near.replace(&pair.principal.url("postgres"), &standby.url("postgres"))?;
    pair.near.start()?;
    pair.far.start()?;
    let control = pair.principal.data_dir().join("global/pg_control");
    let before = std::fs::read(&control)?;
    let refused = pair.seed(&pair.principal.data_dir(), &["--overwrite"])?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.stderr.contains("is on timeline 2"), "{refused:?}");
    ensure!(std::fs::read(&control)? == before, "the server with all the log was destroyed");
    pair.principal.start()
}

fn own_all(path: &Path, other: &Path) -> Result<()> {
    own_as(path, other)?;
    if path.is_dir() && !path.is_symlink() {
        for entry in std::fs::read_dir(path)? {
            own_all(&entry?.path(), other)?;
        }
    }
    Ok(())
}
