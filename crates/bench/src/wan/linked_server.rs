//! Rows that a statement writes to a foreign table at the far end, one round trip each: what people
//! did, and do, who have no replication. Beside it, the same rows by pull.

use super::{Loaded, WAN};
use crate::backlog::{Rows1k, SCHEMA, STAGING, Tables};
use crate::contest::{Bench, Contest, Ground, Terms};
use crate::measurement::{Headline, Measurement, NATIVE, Run, median, rounded};
use anyhow::{Result, bail};
use farshore_testkit::checksum;
use farshore_testkit::wan::Side;
use postgres::{CancelToken, NoTls};
use serde_json::json;
use std::collections::BTreeMap;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

/// Of drain's `rows-1k`: 10,000 rows.
const SHARE: f64 = 0.01;
/// The name in the output, and of the database at the far end.
const LINKED_SERVER: &str = "linked_server";
/// Between two looks at the statement and for Ctrl-C.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Measures both. The statement is run once: nothing but round trips decides how long it takes.
///
/// # Errors
/// When something fails, or a target is not equal in the end.
pub fn measure(case: &'static str, bench: Bench<'_>, terms: Terms) -> Result<Vec<Measurement>> {
    let name = format!("{WAN}/{case}");
    let rows = || Rows1k::new(bench.plan.scale * SHARE);
    let Contest { farshore, native, mut settings } = Contest::hold(bench, &name, &rows(), terms)?;
    let ground = Ground::new(bench, &format!("{name} linked server"), terms)?;
    let linked = insert(&ground, &Loaded(rows()));
    ground.clear(linked.is_err())?;
    let also = ["wire_mb", "wire_back_mb", "emulator_cpu_s"];
    let headline =
        Headline { scenario: WAN, case, metric: "seconds", other: LINKED_SERVER, also: &also };
    settings.extend([
        ("linked_server", json!("INSERT INTO a foreign table of postgres_fdw SELECT …")),
        ("linked_server_runs", json!(1)),
    ]);
    let mut line = Measurement::of_runs(headline, &farshore, &[linked?], settings);
    let seconds = rounded(median(native.iter().map(|run| run.value("seconds"))));
    line.also.insert("seconds", BTreeMap::from([(NATIVE, seconds)]));
    Ok(vec![line])
}

fn insert(ground: &Ground<'_>, rows: &Loaded<Rows1k>) -> Result<Run> {
    ground.say("preparing");
    ground.create(rows)?;
    let subscriber = ground.subscriber();
    subscriber.execute_script(&format!("CREATE DATABASE {LINKED_SERVER}"))?;
    let schema = format!("CREATE SCHEMA {SCHEMA}; {}", rows.schema());
    subscriber.connect_to(LINKED_SERVER)?.batch_execute(&schema)?;
    let mut source = ground.source()?;
    let (host, port) = (ground.host(Side::Near, Side::Far), subscriber.port());
    source.batch_execute(&format!(
        "CREATE EXTENSION postgres_fdw; \
         CREATE SERVER far FOREIGN DATA WRAPPER postgres_fdw \
         OPTIONS (host '{host}', port '{port}', dbname '{LINKED_SERVER}'); \
         CREATE USER MAPPING FOR postgres SERVER far \
         OPTIONS (user 'postgres', password_required 'false'); \
         IMPORT FOREIGN SCHEMA {SCHEMA} FROM SERVER far INTO {STAGING}"
    ))?;
    ground.set_line();
    ground.say(&format!("inserting {} rows into a foreign table", rows.work().commands));
    let meter = ground.begin_alone()?;
    let cancel = source.cancel_token();
    let statement = format!("INSERT INTO {STAGING}.rows_1k SELECT * FROM {SCHEMA}.rows_1k");
    std::thread::scope(|scope| {
        let working = scope.spawn(|| Ok(source.execute(&statement, &[])?));
        watch(ground, working, &cancel)
    })?;
    let seconds = meter.seconds();
    let mut values = BTreeMap::from([("seconds", seconds)]);
    values.extend(meter.sent(ground));
    let costs = meter.read_alone(ground);
    ground.say(&format!("inserted them in {seconds:.2} s"));
    let tables = [format!("{SCHEMA}.rows_1k")];
    checksum::assert_equal(&ground.source_url(), &subscriber.url(LINKED_SERVER), &tables)?;
    Ok(Run { values, costs })
}

/// Waits for the statement; Ctrl-C ends it.
fn watch(
    ground: &Ground<'_>,
    working: ScopedJoinHandle<'_, Result<u64>>,
    cancel: &CancelToken,
) -> Result<()> {
    while !working.is_finished() {
        if let Err(interrupted) = ground.interrupt().check() {
            // If it has just ended there is nothing to cancel.
            let _ = cancel.cancel_query(NoTls);
            let _ = working.join();
            return Err(interrupted);
        }
        std::thread::park_timeout(LOOK_EVERY);
    }
    match working.join() {
        Ok(done) => done.map(drop),
        Err(_) => bail!("the thread of the statement has panicked"),
    }
}
