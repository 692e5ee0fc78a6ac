//! Who reads a table of the target for long, while what follows needs the table for itself.

use anyhow::{Context, Result, ensure};
use farshore_tests::{Direction, Pair};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

/// Waits until apply waits for a lock that this session holds.
fn await_apply_waits(pair: &mut Pair, holder: &mut postgres::Client) -> Result<()> {
    pair.site.wait_for("apply to wait for a lock", SOON, || {
        // Inside its transaction, where statistics of sessions are looked at once.
        holder.batch_execute("SELECT pg_stat_clear_snapshot()")?;
        let waiting = "SELECT FROM pg_stat_activity WHERE application_name LIKE 'farshore %' \
             AND pg_backend_pid() = ANY (pg_blocking_pids(pid)) LIMIT 1";
        Ok(holder.query_opt(waiting, &[])?.map(drop))
    })
}

/// Whoever came to the table after us waited with us, for as long as the first one read.
#[test]
fn who_comes_to_read_does_not_wait_behind_what_needs_the_table_for_itself() -> Result<()> {
    const TABLES: &str = "CREATE TABLE t (id integer PRIMARY KEY); \
        CREATE TABLE m (id integer PRIMARY KEY) PARTITION BY RANGE (id); \
        CREATE TABLE m1 PARTITION OF m FOR VALUES FROM (0) TO (100); \
        CREATE TABLE m0 PARTITION OF m DEFAULT";
    for (table, change) in [
        ("t", "ALTER TABLE t ADD COLUMN v integer DEFAULT 7; INSERT INTO t VALUES (2, 8)"),
        ("t", "ALTER TABLE t DROP COLUMN v; INSERT INTO t VALUES (3)"),
        ("t", "TRUNCATE t; INSERT INTO t VALUES (5)"),
        (
            "m",
            "CREATE TABLE m2 PARTITION OF m FOR VALUES FROM (100) TO (200); \
             INSERT INTO m VALUES (101)",
        ),
    ] {
        let mut pair = Pair::new(Direction::UP, &["public.*"], TABLES)?;
        pair.site.replace("batches = ", "follow_ddl = \"add-drop\"\nbatches = ")?;
        if change.contains("DROP COLUMN") {
            pair.on_both("ALTER TABLE t ADD COLUMN v integer")?;
        }
        pair.publish("INSERT INTO t VALUES (1); INSERT INTO m VALUES (0)")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;

        let mut holder = pair.subscriber.connect()?;
        let read = format!("SELECT count(*) FROM {table}");
        holder.batch_execute(&format!("SET application_name = 'report'; BEGIN; {read}"))?;
        let pid: i32 = holder.query_one("SELECT pg_backend_pid()", &[])?.get(0);
        pair.publish(change)?;
        await_apply_waits(&mut pair, &mut holder).with_context(|| change.to_owned())?;
        let mut reader = pair.subscriber.connect()?;
        reader.batch_execute("SET statement_timeout = '30s'")?;
        let count: i64 = reader
            .query_one(&read, &[])
            .with_context(|| format!("who reads {table} beside {change}"))?
            .get(0);
        ensure!(count == 1, "{count} rows in {table} before {change}");
        let (state, error) = pair.site.await_trouble("s", "has to wait until nobody else uses")?;
        let names_all = [&format!("process {pid} "), &format!("public.{table}"), "since"]
            .iter()
            .all(|name| error.contains(*name));
        ensure!(state != "stopped" && names_all, "{change}: {state}: {error}");
        ensure!(!error.contains("at odds"), "{change}: {error}");
        pair.site.await_log("has to wait until nobody else uses", SOON)?;
        holder.batch_execute("COMMIT")?;
        pair.assert_equal(&["public"]).with_context(|| change.to_owned())?;
        let log = pair.site.log();
        ensure!(!log.contains(" stopped: ") && !log.contains("row by row"), "{change}: {log}");
    }
    Ok(())
}
