//! A mirror between real servers: a standby follows through it, commits wait for it, timelines
//! change under it.

mod running;

use anyhow::{Context, Result, ensure};
use farshore_mirror::receive::Promise;
use farshore_mirror::spool::SlotName;
use farshore_mirror::wal::{Segment, Timeline};
use farshore_model::Lsn;
use farshore_testkit::postgres::{Cluster, Installation, StopMode};
use farshore_testkit::wait::wait_until;
use running::{APPLICATION_NAME, LONG, Mirror, SLOT, flush_position};
use std::path::Path;
use std::process::Command;

fn principal(major: u32) -> Result<Cluster> {
    let cluster = Cluster::builder(&Installation::find(major)?)
        .setting("wal_level", "replica")
        // The files that the spool's are compared with.
        .setting("wal_keep_size", "1GB")
        .setting("hot_standby_feedback", "on")
        .start()?;
    cluster.execute_script("CREATE TABLE t (id int PRIMARY KEY, v text)")?;
    Ok(cluster)
}

fn standby(principal: &mut Cluster, mirror: &Mirror) -> Result<Cluster> {
    let conninfo = mirror.conninfo("s1");
    let settings = [
        ("primary_conninfo", conninfo.as_str()),
        ("primary_slot_name", ""),
        ("wal_retrieve_retry_interval", "100ms"),
        ("wal_receiver_status_interval", "1s"),
    ];
    principal.standby(&settings, &[SLOT])
}

/// Commits one by one, then in bulk over several segments.
fn load(cluster: &Cluster, from: i32) -> Result<()> {
    let mut client = cluster.connect()?;
    for id in from..from + 200 {
        client.execute("INSERT INTO t VALUES ($1, repeat('x', $1 % 500))", &[&id])?;
    }
    client.batch_execute(&format!(
        "INSERT INTO t SELECT g, md5(g::text) || repeat('y', 100) \
         FROM generate_series({}, {}) g",
        from + 1_000,
        from + 150_000
    ))?;
    Ok(())
}

fn checksum(cluster: &Cluster) -> Result<String> {
    let sql = "SELECT count(*) || ' ' || coalesce(md5(string_agg(id || v, ',' ORDER BY id)), '') \
               FROM t";
    Ok(cluster.connect()?.query_one(sql, &[])?.get(0))
}

fn replayed(standby: &Cluster, end: u64) -> Result<()> {
    wait_until("the standby to replay", LONG, &[&standby.log_path()], || {
        Ok((flush_position(standby)? >= end).then_some(()))
    })
}

/// The spool's files are the server's, byte by byte, up to what is durable.
fn compare_files(mirror: &Mirror, server: &Cluster) -> Result<usize> {
    let spool = mirror.spool()?;
    let positions = mirror.positions()?;
    let size = spool.identity().segment;
    let mut compared = 0;
    for segment in spool.segments()? {
        let name = segment.file_name(size);
        if segment.timeline != positions.timeline {
            continue;
        }
        let ours = std::fs::read(mirror.spool_folder().join(&name))?;
        let theirs = std::fs::read(server.data_dir().join("pg_wal").join(&name))
            .with_context(|| format!("the server's {name}"))?;
        let end = positions.durable.bytes_since(size.start(segment.number)).min(size.get());
        ensure!(ours.len() == theirs.len(), "{name} has another size");
        ensure!(ours[..end as usize] == theirs[..end as usize], "{name} differs");
        compared += 1;
    }
    Ok(compared)
}

/// `pg_waldump` reads the spool from its beginning to what is durable.
fn dump(mirror: &Mirror, installation: &Installation) -> Result<()> {
    let program = installation.command("pg_waldump").get_program().to_owned();
    if !Path::new(&program).exists() {
        println!("skipped: PostgreSQL {} has no pg_waldump here", installation.major());
        return Ok(());
    }
    let spool = mirror.spool()?;
    let timeline = mirror.positions()?.timeline;
    let segments = spool.segments()?;
    let first = segments.iter().find(|segment| segment.timeline == timeline);
    let first = first.context("no segment")?;
    let size = spool.identity().segment;
    let output = Command::new(program)
        .arg("--quiet")
        .arg("--path")
        .arg(mirror.spool_folder())
        .arg("--timeline")
        .arg(first.timeline.to_string())
        .arg("--start")
        .arg(size.start(first.number).to_string())
        .arg("--end")
        .arg(mirror.positions()?.durable.to_string())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "pg_waldump: {said}");
    Ok(())
}

fn a_standby_follows(major: u32) -> Result<()> {
    let mut principal = principal(major)?;
    let mirror = Mirror::start(&principal.url("postgres"), Promise::Far)?;
    mirror.spool()?;
    load(&principal, 0)?;
    let standby = standby(&mut principal, &mirror)?;
    load(&principal, 200_000)?;
    let end = flush_position(&principal)?;
    mirror.caught_up(&principal)?;
    replayed(&standby, end)?;
    ensure!(checksum(&principal)? == checksum(&standby)?, "the standby has other rows");
    let compared = compare_files(&mirror, &principal)?;
    ensure!(compared >= 3, "only {compared} segments");
    dump(&mirror, principal.installation())?;
    let reports = mirror.far.standbys.reports();
    ensure!(reports.len() == 1 && reports[0].application_name == "s1", "{reports:?}");
    // What the standby has replayed comes back to the principal.
    wait_until("the principal to hear of it", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE application_name = $1 \
                   AND state = 'streaming' AND replay_lsn >= $2::text::pg_lsn";
        let end = Lsn(end).to_string();
        let heard: i64 = principal.connect()?.query_one(sql, &[&APPLICATION_NAME, &end])?.get(0);
        Ok((heard == 1).then_some(()))
    })?;
    let status = *mirror.near.status();
    println!(
        "PostgreSQL {major}: {compared} segments compared, {} bytes of log sent as {} ({:.1}:1)",
        status.log_bytes,
        status.packed_bytes,
        status.log_bytes as f64 / status.packed_bytes as f64
    );
    ensure!(status.packed_bytes < status.log_bytes, "nothing was compressed");
    Ok(())
}

#[test]
fn a_standby_of_15_follows_through_a_mirror() -> Result<()> {
    a_standby_follows(15)
}

#[test]
fn a_standby_of_18_follows_through_a_mirror() -> Result<()> {
    a_standby_follows(18)
}

/// A commit returns when the far end has hardened it, and not while it is away.
fn commits_wait(major: u32) -> Result<()> {
    let principal = principal(major)?;
    let mut mirror = Mirror::start(&principal.url("postgres"), Promise::Far)?;
    mirror.caught_up(&principal)?;
    count_synchronously(&principal)?;
    let mut client = principal.connect()?;
    for id in 0..100 {
        let mut transaction = client.transaction()?;
        transaction.execute("INSERT INTO t VALUES ($1, 'sync')", &[&id])?;
        // Its commit record comes after this.
        let sql = "SELECT pg_current_wal_insert_lsn()::text";
        let inserted: String = transaction.query_one(sql, &[])?.get(0);
        transaction.commit()?;
        let durable = mirror.positions()?.durable;
        let inserted: farshore_model::Lsn =
            inserted.parse().map_err(|error| anyhow::anyhow!("{error}"))?;
        ensure!(durable > inserted, "{id} returned, and {durable} is durable, not {inserted}");
    }
    // While the far end is away, a commit waits.
    mirror.disconnect_far();
    let before = mirror.block_on(mirror.spool()?.settled())?.durable;
    let committing = std::thread::spawn(move || {
        client.execute("INSERT INTO t VALUES (1000, 'waits')", &[]).map(|_| client)
    });
    wait_until("the commit to wait", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        Ok((principal.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })?;
    ensure!(mirror.positions()?.durable == before && !committing.is_finished());
    mirror.connect_far();
    let committed = committing.join().map_err(|_| anyhow::anyhow!("the client died"))?;
    let _client = committed?;
    ensure!(mirror.positions()?.durable > before, "it returned and is not durable");
    Ok(())
}

#[test]
fn commits_wait_for_the_far_end_with_15() -> Result<()> {
    commits_wait(15)
}

#[test]
fn commits_wait_for_the_far_end_with_18() -> Result<()> {
    commits_wait(18)
}

fn count_synchronously(principal: &Cluster) -> Result<()> {
    principal.execute_script(&format!(
        "ALTER SYSTEM SET synchronous_standby_names = '{APPLICATION_NAME}'"
    ))?;
    principal.execute_script("SELECT pg_reload_conf()")?;
    wait_until("the mirror to count", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
        Ok((principal.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })
}

/// In mode `far-applied` a commit returns when it can be seen on the standby; and what queries
/// there need comes back to the principal.
fn commits_wait_for_replay(major: u32) -> Result<()> {
    let mut principal = principal(major)?;
    let mirror = Mirror::start(&principal.url("postgres"), Promise::FarApplied)?;
    mirror.spool()?;
    let standby = standby(&mut principal, &mirror)?;
    count_synchronously(&principal)?;
    let mut client = principal.connect()?;
    for id in 0..30 {
        client.execute("INSERT INTO t VALUES ($1, 'seen')", &[&id])?;
        let seen: i64 =
            standby.connect()?.query_one("SELECT count(*) FROM t WHERE id = $1", &[&id])?.get(0);
        ensure!(seen == 1, "commit {id} returned and cannot be seen");
    }
    standby.execute_script("SELECT pg_wal_replay_pause()")?;
    wait_until("replay to pause", LONG, &[], || {
        let sql = "SELECT pg_get_wal_replay_pause_state() = 'paused'";
        Ok(standby.connect()?.query_one(sql, &[])?.get::<_, bool>(0).then_some(()))
    })?;
    let committing =
        std::thread::spawn(move || client.execute("INSERT INTO t VALUES (1000, 'waits')", &[]));
    wait_until("the commit to wait", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        Ok((principal.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })?;
    // It is hardened at the far end, and that is not enough.
    mirror.caught_up(&principal)?;
    ensure!(!committing.is_finished(), "it returned before it was replayed");
    standby.execute_script("SELECT pg_wal_replay_resume()")?;
    committing.join().map_err(|_| anyhow::anyhow!("the client died"))??;
    let xmin = |is_there: bool| {
        wait_until("the feedback to come back", LONG, &[], || {
            let sql = "SELECT xmin IS NOT NULL FROM pg_replication_slots WHERE slot_name = $1";
            let found: bool = principal.connect()?.query_one(sql, &[&SLOT])?.get(0);
            Ok((found == is_there).then_some(()))
        })
    };
    xmin(true)?;
    // One that leaves may come back, and its needs stay for a minute; one that says so has none.
    standby.execute_script("ALTER SYSTEM SET hot_standby_feedback = off")?;
    standby.execute_script("SELECT pg_reload_conf()")?;
    xmin(false)
}

#[test]
fn commits_wait_for_replay_with_15() -> Result<()> {
    commits_wait_for_replay(15)
}

#[test]
fn commits_wait_for_replay_with_18() -> Result<()> {
    commits_wait_for_replay(18)
}

/// Who asks for what is not there is told so, with PostgreSQL's own codes.
#[test]
fn what_is_not_there_is_said() -> Result<()> {
    use farshore_pg::{Config, Connection, Error, Mode};
    let principal = principal(15)?;
    let mut mirror = Mirror::start(&principal.url("postgres"), Promise::Far)?;
    let begin = mirror.positions()?.durable;
    load(&principal, 0)?;
    mirror.caught_up(&principal)?;
    let forgotten = mirror.spool()?.forget(Lsn::MAX, 0)?;
    ensure!(forgotten >= 1, "nothing was forgotten");
    let config = Config::parse(&format!("postgres://s@127.0.0.1:{}/postgres", mirror.port))?;
    let ask = |slot: Option<&'static str>, start, timeline| -> Result<String> {
        let asked = mirror.block_on(async {
            let connection = Connection::connect(&config, Mode::PhysicalReplication).await?;
            let mut stream = connection.start_physical_replication(slot, start, timeline).await?;
            loop {
                stream.next().await?;
            }
        });
        let asked: Result<(), Error> = asked;
        let error = asked.expect_err("it was given");
        error.sqlstate().map(str::to_owned).with_context(|| error.to_string())
    };
    ensure!(ask(None, begin, None)? == "58P01");
    // A slot keeps no log that is there for a client that asks for log that is not.
    let late = SlotName::new("late").context("a name")?;
    ensure!(mirror.spool()?.create_slot(&late, None)?, "there was one");
    ensure!(ask(Some("late"), begin, None)? == "58P01");
    ensure!(mirror.spool()?.kept_for_slots().is_none(), "{:?}", mirror.spool()?.slot(&late));
    ensure!(ask(None, Lsn(u64::MAX >> 1), None)? == "XX000");
    ensure!(ask(None, begin, Some(7))? == "XX000");
    ensure!(ask(Some("nobody"), begin, None)? == "42704");
    let sql = mirror.block_on(Connection::connect(&config, Mode::Sql));
    let error = sql.expect_err("it is no database");
    ensure!(error.sqlstate() == Some("0A000"), "{error}");
    // The principal has dropped what the far end still needed: that is said, at both ends.
    mirror.disconnect_far();
    principal.execute_script("ALTER SYSTEM SET wal_keep_size = 0")?;
    principal.execute_script("ALTER SYSTEM SET max_slot_wal_keep_size = '16MB'")?;
    principal.execute_script("SELECT pg_reload_conf()")?;
    load(&principal, 200_000)?;
    load(&principal, 400_000)?;
    wait_until("the slot to be lost", LONG, &[], || {
        principal.execute_script("CHECKPOINT")?;
        let sql = "SELECT wal_status = 'lost' FROM pg_replication_slots WHERE slot_name = $1";
        Ok(principal.connect()?.query_one(sql, &[&SLOT])?.get::<_, bool>(0).then_some(()))
    })?;
    mirror.connect_far();
    let told = wait_until("the far end to be told", LONG, &[], || Ok(mirror.said()));
    let said = told?;
    ensure!(said.contains("max_slot_wal_keep_size was exceeded"), "{said}");
    println!("{said}");
    Ok(())
}

fn let_commits_wait(principal: &Cluster) -> Result<()> {
    let sql = format!("ALTER SYSTEM SET synchronous_standby_names = '{APPLICATION_NAME}'");
    principal.execute_script(&sql)?;
    principal.execute_script("SELECT pg_reload_conf()")?;
    wait_until("the mirror to count", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'";
        Ok((principal.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })
}

/// Where the mirror's slot stands: what the principal was told last as flushed.
fn told(principal: &Cluster) -> Result<u64> {
    let sql = "SELECT (restart_lsn - '0/0')::int8 FROM pg_replication_slots WHERE slot_name = $1";
    let told: i64 = principal.connect()?.query_one(sql, &[&SLOT])?.get(0);
    Ok(told.unsigned_abs())
}

/// The slot is kept, and the spool with what was acknowledged is gone: nothing is acknowledged while
/// no standby can use the next one.
#[test]
fn a_spool_that_is_lost_is_not_acknowledged_before_a_standby_can_use_the_next() -> Result<()> {
    let mut principal = principal(15)?;
    let mut mirror = Mirror::start(&principal.url("postgres"), Promise::Far)?;
    mirror.spool()?;
    let mut standby = standby(&mut principal, &mirror)?;
    mirror.caught_up(&principal)?;
    let_commits_wait(&principal)?;
    load(&principal, 0)?;
    ensure!(mirror.near.held().is_none(), "a first spool was taken for a second");
    let commit = |id: i32| {
        let mut client = principal.connect()?;
        Ok::<_, anyhow::Error>(std::thread::spawn(move || {
            client.execute("INSERT INTO t VALUES ($1, '')", &[&id])
        }))
    };
    // One that has come further than where the next begins goes on, and so do commits.
    replayed(&standby, flush_position(&principal)?)?;
    standby.stop(StopMode::Fast)?;
    mirror.lose_spool()?;
    wait_until("commits to be held", LONG, &[], || Ok(mirror.near.held()))?;
    standby.start()?;
    let committing = commit(1_000_001)?;
    committing.join().map_err(|_| anyhow::anyhow!("the client died"))??;
    ensure!(mirror.near.held().is_none(), "{:?}", mirror.near.held());
    // One that is further back cannot.
    standby.stop(StopMode::Fast)?;
    load(&principal, 200_000)?;
    mirror.caught_up(&principal)?;
    let end = flush_position(&principal)?;
    wait_until(
        "it to be acknowledged",
        LONG,
        &[],
        || Ok((told(&principal)? >= end).then_some(())),
    )?;
    mirror.lose_spool()?;
    let held = wait_until("commits to be held", LONG, &[], || Ok(mirror.near.held()))?;
    println!("{held}");
    let committing = commit(1_000_002)?;
    wait_until("the commit to wait", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        Ok((principal.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 1).then_some(()))
    })?;
    let end = Lsn(flush_position(&principal)?).to_string();
    wait_until("the principal to hear that it is there", LONG, &[], || {
        // What is flushed there is told with this.
        let sql = "SELECT count(*) FROM pg_stat_replication WHERE application_name = $1 \
                   AND write_lsn >= $2::text::pg_lsn";
        let heard: i64 = principal.connect()?.query_one(sql, &[&APPLICATION_NAME, &end])?.get(0);
        Ok((heard == 1).then_some(()))
    })?;
    standby.start()?;
    wait_until("the standby to ask in vain", LONG, &[], || {
        Ok(mirror.far.standbys.refused_lately())
    })?;
    ensure!(!committing.is_finished(), "it returned, and no standby can ever have it");
    ensure!(mirror.near.held().is_some(), "nothing is held any more");
    // On an operator's word.
    mirror.near.let_commits_return().context("nothing was held")?;
    committing.join().map_err(|_| anyhow::anyhow!("the client died"))??;
    Ok(())
}

/// A server that was set back has no use for a slot: it is asked again, and the slot would keep its
/// log meanwhile, or for ever.
#[test]
fn a_server_that_is_behind_keeps_no_new_slot() -> Result<()> {
    let mut principal = principal(15)?;
    let backup = principal.back_up()?;
    let mut mirror = Mirror::start(&principal.url("postgres"), Promise::Far)?;
    load(&principal, 0)?;
    mirror.caught_up(&principal)?;
    mirror.disconnect_far();
    principal.restore(&backup)?;
    mirror.connect_far();
    let said = wait_until("the far end to be told", LONG, &[], || Ok(mirror.said_that_passes()))?;
    ensure!(said.contains("its log ends at"), "{said}");
    wait_until("the slot to be dropped again", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1";
        let slots: i64 = principal.connect()?.query_one(sql, &[&SLOT])?.get(0);
        Ok((slots == 0).then_some(()))
    })
}

/// The server that is mirrored is promoted: the mirror and its standby go over to its timeline.
fn timelines_change(major: u32) -> Result<()> {
    let mut first = principal(major)?;
    let mut second = first.standby(&[], &[])?;
    let mirror = Mirror::start(&second.url("postgres"), Promise::Far)?;
    mirror.spool()?;
    // It follows the second server through the mirror, over the switch.
    let third = standby(&mut second, &mirror)?;
    load(&first, 0)?;
    replayed(&third, flush_position(&first)?)?;
    let size = mirror.spool()?.identity().segment;
    let early = SlotName::new("early").context("a name")?;
    let restart = size.floor(mirror.positions()?.durable);
    ensure!(mirror.spool()?.create_slot(&early, Some(restart))?, "there was one");
    second.execute_script("SELECT pg_promote()")?;
    load(&second, 300_000)?;
    mirror.caught_up(&second)?;
    let positions = mirror.positions()?;
    ensure!(positions.timeline == Timeline(2), "{positions:?}");
    ensure!(compare_files(&mirror, &second)? >= 1);
    replayed(&third, flush_position(&second)?)?;
    ensure!(checksum(&second)? == checksum(&third)?, "the standby has other rows");
    log_goes_by_its_own_timeline(&mirror)?;
    dump(&mirror, second.installation())
}

/// The beginning of a record, and where it begins, that the first server writes when the second one
/// and the mirror have all of its log and get no more.
fn begin_of_record(
    first: &Cluster,
    second: &Cluster,
    mirror: &mut Mirror,
) -> Result<(Lsn, Vec<u8>)> {
    let end = flush_position(first)?;
    replayed(second, end)?;
    mirror.caught_up(second)?;
    let durable = mirror.positions()?.durable;
    ensure!(durable.0 == end, "the spool ends at {durable}, and more is written");
    mirror.disconnect_far();
    second.execute_script("ALTER SYSTEM SET primary_conninfo = ''")?;
    second.execute_script("SELECT pg_reload_conf()")?;
    wait_until("the second server to receive nothing", LONG, &[], || {
        let sql = "SELECT count(*) FROM pg_stat_wal_receiver";
        Ok((second.connect()?.query_one(sql, &[])?.get::<_, i64>(0) == 0).then_some(()))
    })?;
    first.execute_script("SELECT pg_logical_emit_message(true, 'x', repeat('y', 100000))")?;
    let size = mirror.spool()?.identity().segment;
    let segment = Segment { timeline: Timeline(1), number: size.number(durable) };
    let log = std::fs::read(first.data_dir().join("pg_wal").join(segment.file_name(size)))?;
    let at = durable.bytes_since(size.floor(durable)) as usize;
    Ok((durable, log.get(at..at + 5_000).context("it goes over")?.to_vec()))
}

/// The old principal crashed in the middle of a record, of which the mirror has the beginning, and a
/// standby of its own that has nothing of it takes over.
#[test]
fn a_record_that_was_never_finished_does_not_stand_in_the_way() -> Result<()> {
    let mut first = principal(15)?;
    let second = first.standby(&[], &[])?;
    let mut mirror = Mirror::start(&second.url("postgres"), Promise::Far)?;
    mirror.spool()?;
    first.execute_script("ALTER SYSTEM SET autovacuum = off")?;
    first.execute_script("SELECT pg_reload_conf()")?;
    load(&first, 0)?;
    // It writes log when nobody else does.
    let sql = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'background writer'";
    let writer: i32 = first.connect()?.query_one(sql, &[])?.get(0);
    let signal = |name: &str| -> Result<()> {
        let sent = Command::new("kill").args([name, &writer.to_string()]).status()?;
        ensure!(sent.success(), "kill {name} {writer}");
        Ok(())
    };
    signal("-STOP")?;
    let begun = begin_of_record(&first, &second, &mut mirror);
    signal("-CONT")?;
    let (durable, begun) = begun?;
    first.kill9()?;
    let spool = mirror.spool()?;
    let torn = mirror.block_on(async {
        spool.append(Timeline(1), durable, &[begun.into()]).await?;
        spool.settled().await
    })?;
    ensure!(torn.durable.0 == durable.0 + 5_000, "{torn:?}");
    ensure!(spool.last_record_end()? == durable, "{}", spool.last_record_end()?);
    second.execute_script("SELECT pg_promote()")?;
    mirror.connect_far();
    load(&second, 300_000)?;
    mirror.caught_up(&second)?;
    let positions = mirror.positions()?;
    ensure!(positions.timeline == Timeline(2), "{positions:?}: {:?}", mirror.said());
    ensure!(compare_files(&mirror, &second)? >= 1);
    dump(&mirror, second.installation())
}

/// Who asks for log under the names of a timeline gets none that is another's.
fn log_goes_by_its_own_timeline(mirror: &Mirror) -> Result<()> {
    use farshore_pg::{Config, Connection, Mode};
    let history = mirror.spool()?.history(Timeline(2))?;
    let begins = history.begins(Timeline(2), Timeline(2)).context("it has no beginning")?;
    let config = Config::parse(&format!("postgres://s@127.0.0.1:{}/postgres", mirror.port))?;
    let connect = || Connection::connect(&config, Mode::PhysicalReplication);
    let slot = mirror.block_on(async { connect().await?.read_physical_slot("early").await })?;
    let slot = slot.context("no slot")?;
    ensure!(slot.timeline == Some(1), "{slot:?}, and timeline 2 begins at {begins}");
    let restart = slot.restart.context("it keeps nothing")?;
    let ask = |start, timeline| {
        mirror.block_on(async {
            let connection = connect().await?;
            let mut stream = connection.start_physical_replication(None, start, timeline).await?;
            stream.next().await.map(drop)
        })
    };
    ask(restart, Some(1))?;
    let first = mirror.spool()?.identity().segment.floor(begins);
    ask(first, Some(2))?;
    let error = ask(Lsn(first.0 - 1), Some(2)).expect_err("it was given");
    ensure!(error.sqlstate() == Some("58P01"), "{error}");
    Ok(())
}

#[test]
fn timelines_change_upstream_with_15() -> Result<()> {
    timelines_change(15)
}

#[test]
fn timelines_change_upstream_with_18() -> Result<()> {
    timelines_change(18)
}

/// PostgreSQL's own receiver takes the log from a mirror, by a slot of the mirror.
#[test]
fn pg_receivewal_receives_from_a_mirror() -> Result<()> {
    let principal = principal(15)?;
    let mirror = Mirror::start(&principal.url("postgres"), Promise::Async)?;
    load(&principal, 0)?;
    mirror.caught_up(&principal)?;
    let into = tempfile::tempdir()?;
    let program = principal.installation().command("pg_receivewal").get_program().to_owned();
    let run = |more: &[&str]| -> Result<()> {
        let mut command = Command::new(&program);
        command.arg("-D").arg(into.path()).args(["-h", "127.0.0.1", "-U", "anyone", "-p"]);
        command.arg(mirror.port.to_string()).args(["--slot", "archive", "--no-loop"]).args(more);
        let output = command.env("PGCONNECT_TIMEOUT", "60").output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "pg_receivewal {more:?}: {said}");
        Ok(())
    };
    run(&["--create-slot"])?;
    ensure!(run(&["--create-slot"]).is_err(), "it was made twice");
    // Such a slot keeps the log from its first use on.
    let receive = || -> Result<Lsn> {
        mirror.caught_up(&principal)?;
        let durable = mirror.positions()?.durable;
        run(&["--synchronous", "--endpos", &durable.to_string()])?;
        Ok(durable)
    };
    receive()?;
    load(&principal, 200_000)?;
    let durable = receive()?;
    let size = mirror.spool()?.identity().segment;
    let mut compared = 0;
    for entry in std::fs::read_dir(into.path())? {
        let name = entry?.file_name().into_string().unwrap_or_default();
        let whole = name.trim_end_matches(".partial");
        let theirs = std::fs::read(into.path().join(&name))?;
        let ours = std::fs::read(mirror.spool_folder().join(whole))?;
        let segment = farshore_mirror::wal::Segment::parse(whole, size).context("a name")?;
        let end = durable.bytes_since(size.start(segment.number)).min(size.get()) as usize;
        ensure!(theirs[..end] == ours[..end], "{name} differs");
        compared += 1;
    }
    ensure!(compared >= 2, "{compared} files, up to {durable}");
    run(&["--drop-slot"])?;
    ensure!(run(&["--drop-slot"]).is_err(), "it was there twice");
    Ok(())
}

/// A temporary slot ends with its session, and a slot that is streamed by cannot be dropped.
#[test]
fn slots_are_held_by_sessions() -> Result<()> {
    use farshore_mirror::spool::SlotName;
    use farshore_pg::{Config, Connection, Mode};
    let principal = principal(15)?;
    let mirror = Mirror::start(&principal.url("postgres"), Promise::Far)?;
    let spool = mirror.spool()?;
    let begin = mirror.positions()?.durable;
    let config = Config::parse(&format!("postgres://s@127.0.0.1:{}/postgres", mirror.port))?;
    let connect = || mirror.block_on(Connection::connect(&config, Mode::PhysicalReplication));
    let mut session = connect()?;
    let sql = "CREATE_REPLICATION_SLOT \"short\" TEMPORARY PHYSICAL RESERVE_WAL";
    mirror.block_on(session.simple_query(sql))?;
    let short = SlotName::new("short").context("a name")?;
    ensure!(spool.slot(&short).flatten().is_some(), "{:?}", spool.slot(&short));
    drop(session);
    wait_until("the temporary slot to end", LONG, &[], || {
        Ok(spool.slot(&short).is_none().then_some(()))
    })?;
    let mut session = connect()?;
    mirror.block_on(session.create_physical_slot("long"))?;
    let streaming =
        mirror.block_on(session.start_physical_replication(Some("long"), begin, None))?;
    let mut other = connect()?;
    let drop_it = "DROP_REPLICATION_SLOT \"long\"";
    let error = mirror.block_on(other.simple_query(drop_it)).expect_err("it is in use");
    ensure!(error.sqlstate() == Some("55006"), "{error}");
    drop(streaming);
    wait_until("the stream to end", LONG, &[], || {
        Ok(mirror.far.standbys.reports().is_empty().then_some(()))
    })?;
    mirror.block_on(other.simple_query(drop_it))?;
    let long = SlotName::new("long").context("a name")?;
    ensure!(spool.slot(&long).is_none());
    Ok(())
}
