//! One figure's work: so many clients, transactions of so many rows.

use super::cap::Cap;
use super::counters::Counters;
use super::scratch::Scratch;
use super::server::Server;
use super::{AtWork, LogOptions, connect, trying};
use crate::Error;
use crate::latency::Latencies;
use farshore_pg::{Config, Connection};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

/// How often the server is asked what the clients wait for, and how much log there is.
const WATCH_EVERY: Duration = Duration::from_millis(50);
/// How long a server may take to end sessions that have said goodbye.
const GONE_TIMEOUT: Duration = Duration::from_secs(10);
/// SQL of one message at most, when a script is run many times in a transaction.
const SQL_BYTES_MAX: usize = 256 << 10;

/// What is varied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    /// Rows in a transaction, or runs of the script.
    pub transaction_rows: u64,
    /// Clients at a time.
    pub clients: u32,
}

/// Where it is measured.
#[derive(Clone, Copy)]
pub struct Place<'a> {
    pub options: &'a LogOptions,
    pub config: &'a Config,
    pub server: &'a Server,
    pub scratch: &'a Scratch,
    pub at_work: &'a AtWork,
    /// Counters before the first figure.
    pub begin: &'a Counters,
}

/// What came of it.
#[derive(Debug)]
pub struct Measured {
    /// Rows that were written.
    pub rows: u64,
    /// Transactions that were committed.
    pub transactions: u64,
    /// From the first transaction's start to the last one's commit.
    pub elapsed: Duration,
    /// Of each COMMIT: from sending it to the server's word that it is durable.
    pub latencies: Latencies,
    /// What the server counted meanwhile.
    pub spent: Counters,
    /// Share of the clients' time (0 to 1) in which they waited for the log.
    pub waiting: f64,
}

/// What one client does.
#[derive(Debug)]
struct Work {
    /// Prepared as `go`, or drawn from a script.
    script: Option<super::Script>,
    transaction_rows: u64,
    /// Rows that nobody has taken yet.
    left: AtomicU64,
    time_max: Duration,
}

#[derive(Debug)]
struct Done {
    rows: u64,
    begin: Instant,
    end: Instant,
    latencies: Latencies,
}

/// Measures a figure once.
pub async fn measure(
    cell: Cell,
    place: Place<'_>,
    admin: &mut Connection,
) -> Result<Measured, Error> {
    let Place { options, config, server, scratch, at_work, .. } = place;
    let name = admin.server().to_owned();
    if options.script.is_none() {
        scratch.empty(admin).await?;
    }
    let mut clients = Vec::new();
    for _ in 0..cell.clients {
        let mut client = connect(config).await?;
        at_work.add(&client);
        if options.script.is_none() {
            let sql = scratch.prepare();
            client.simple_query(&sql).await.map_err(trying("prepare a statement", &name))?;
        }
        clients.push(client);
    }
    let before = Counters::settled(admin, server).await?;

    let pids: Vec<i32> = clients.iter().map(Connection::backend_pid).collect();
    let work = Arc::new(Work {
        script: options.script.clone(),
        transaction_rows: cell.transaction_rows,
        left: AtomicU64::new(options.rows),
        time_max: options.time_max,
    });
    let barrier = Arc::new(Barrier::new(clients.len()));
    let mut tasks = JoinSet::new();
    for client in clients {
        let (work, barrier) = (Arc::clone(&work), Arc::clone(&barrier));
        tasks.spawn(async move {
            barrier.wait().await;
            run(client, &work).await
        });
    }
    let mut done: Vec<Done> = Vec::new();
    let mut watch = Watch::default();
    let mut tick = tokio::time::interval(WATCH_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            joined = tasks.join_next() => match joined {
                None => break,
                Some(Ok(result)) => done.push(result.map_err(trying("write rows", &name))?),
                Some(Err(failed)) => std::panic::resume_unwind(failed.into_panic()),
            },
            _ = tick.tick() => watch.look(admin, &pids, place).await?,
        }
    }
    await_gone(admin, &pids).await?;
    let spent = Counters::settled(admin, server).await?.since(before);

    let mut latencies = Latencies::new();
    done.iter().for_each(|client| latencies.merge(&client.latencies));
    let begin = done.iter().map(|client| client.begin).min();
    let end = done.iter().map(|client| client.end).max();
    Ok(Measured {
        rows: done.iter().map(|client| client.rows).sum(),
        transactions: latencies.count(),
        elapsed: begin.zip(end).map_or(Duration::ZERO, |(begin, end)| end - begin),
        latencies,
        spent,
        waiting: watch.share(),
    })
}

/// Takes rows and commits them until there are none left, or the time is over; then says goodbye.
async fn run(mut client: Connection, work: &Work) -> Result<Done, farshore_pg::Error> {
    let begin = Instant::now();
    let mut done = Done { rows: 0, begin, end: begin, latencies: Latencies::new() };
    loop {
        // Who takes which rows: nothing else depends on the order.
        let take = |left: u64| (left > 0).then(|| left.saturating_sub(work.transaction_rows));
        let Ok(left) = work.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) else {
            break;
        };
        let rows = left.min(work.transaction_rows);
        match &work.script {
            None => {
                let sql = format!("BEGIN; EXECUTE go({rows}, {left})");
                client.simple_query(&sql).await?;
            }
            Some(script) => {
                let mut sql = "BEGIN;".to_owned();
                for _ in 0..rows {
                    script.draw(&mut sql);
                    if sql.len() >= SQL_BYTES_MAX {
                        client.simple_query(&sql).await?;
                        sql.clear();
                    }
                }
                client.simple_query(&sql).await?;
            }
        }
        let commit = Instant::now();
        client.simple_query("COMMIT").await?;
        let end = Instant::now();
        done.latencies.record(end - commit);
        done.rows += rows;
        done.end = end;
        if end - begin >= work.time_max {
            break;
        }
    }
    client.close().await;
    Ok(done)
}

/// What clients were seen waiting for.
#[derive(Debug, Default)]
struct Watch {
    waiting: u64,
    looked: u64,
}

impl Watch {
    /// Looks once, and ends everything when too much log was written.
    async fn look(
        &mut self,
        admin: &mut Connection,
        pids: &[i32],
        place: Place<'_>,
    ) -> Result<(), Error> {
        // Names of waits have changed their spelling with 17, but not their letters.
        let sql = format!(
            "SELECT count(*) FILTER (WHERE lower(wait_event) IN ('walwrite', 'walsync', 'walbufmapping', \
               'walinitwrite', 'walinitsync', 'walwritelock', 'syncrep')), count(*), \
               pg_current_wal_insert_lsn() \
             FROM pg_stat_activity WHERE pid = ANY ('{{{}}}'::int4[])",
            pids.iter().map(i32::to_string).collect::<Vec<_>>().join(",")
        );
        let name = admin.server().to_owned();
        let failed = || trying("see what clients wait for", &name);
        let answer = admin.simple_query(&sql).await.map_err(failed())?;
        let Some(row) = answer.first().and_then(|set| set.rows.first()) else { return Ok(()) };
        self.waiting += row.parse::<u64>(0).map_err(failed())?;
        self.looked += row.parse::<u64>(1).map_err(failed())?;
        let position = row.parse::<farshore_model::Lsn>(2).map_err(failed())?.0;
        Cap::new(place.begin.position, place.options.log_bytes_max).ensure(position, &name)
    }

    fn share(&self) -> f64 {
        self.waiting as f64 / self.looked.max(1) as f64
    }
}

/// Returns when the server has ended these sessions: by then they have told what they did.
async fn await_gone(admin: &mut Connection, pids: &[i32]) -> Result<(), Error> {
    let list = pids.iter().map(i32::to_string).collect::<Vec<_>>().join(",");
    let sql =
        format!("SELECT count(*) FROM pg_stat_activity WHERE pid = ANY ('{{{list}}}'::int4[])");
    let name = admin.server().to_owned();
    let begin = Instant::now();
    loop {
        let failed = trying("see which sessions are left", &name);
        let answer = admin.simple_query(&sql).await.map_err(failed)?;
        let row = answer.first().and_then(|set| set.rows.first());
        if row.is_none_or(|row| row.get(0) == Some("0")) || begin.elapsed() > GONE_TIMEOUT {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_testkit::postgres::{Cluster, Installation};

    /// What the server itself says, read by another client than ours: end of the log, bytes of
    /// records, writes.
    fn server_says(client: &mut postgres::Client, major: u32) -> [u64; 3] {
        let writes = if major >= 18 {
            "SELECT sum(writes) FROM pg_stat_io WHERE object = 'wal' AND context = 'normal'"
        } else {
            "SELECT wal_write FROM pg_stat_wal"
        };
        let sql = format!(
            "SELECT (pg_current_wal_insert_lsn() - '0/0')::int8, \
             (SELECT wal_bytes FROM pg_stat_wal)::int8, ({writes})::int8"
        );
        let row = client.query_one(sql.as_str(), &[]).unwrap();
        [0, 1, 2].map(|index| row.get::<_, i64>(index) as u64)
    }

    fn near(value: u64, other: u64, share: f64) -> bool {
        value.abs_diff(other) as f64 <= other as f64 * share
    }

    async fn figures_are_the_servers(major: u32) {
        let cluster = Cluster::builder(&Installation::find(major).unwrap()).start().unwrap();
        let config = Config::parse(&cluster.url("postgres")).unwrap();
        let options = LogOptions { rows: 2_000, ..LogOptions::new(config.clone()) };
        let mut admin = connect(&config).await.unwrap();
        let server = Server::ask(&mut admin).await.unwrap();
        let mut scratch = Scratch::begin(&config, &mut admin, &|_| {}).await.unwrap();
        scratch.make(&mut admin).await.unwrap();
        scratch.fill(&mut admin, options.row_size).await.unwrap();
        let begin = Counters::settled(&mut admin, &server).await.unwrap();
        let at_work = AtWork::default();
        let place = Place {
            options: &options,
            config: &config,
            server: &server,
            scratch: &scratch,
            at_work: &at_work,
            begin: &begin,
        };
        let mut measured = Vec::new();
        for (transaction_rows, clients) in [(1, 1), (10, 4), (1_000, 1)] {
            let ask = || {
                let url = cluster.url("postgres");
                tokio::task::block_in_place(|| {
                    let mut client = postgres::Client::connect(&url, postgres::NoTls).unwrap();
                    server_says(&mut client, major)
                })
            };
            let before = ask();
            let cell = Cell { transaction_rows, clients };
            let result = measure(cell, place, &mut admin).await.unwrap();
            let after = ask();
            let [position, records, writes] = [0, 1, 2].map(|index| after[index] - before[index]);
            let spent = result.spent;
            assert_eq!(result.rows, 2_000);
            assert_eq!(result.transactions, 2_000 / transaction_rows);
            assert!(near(spent.position, position, 0.01), "{major}: {spent:?}, {position}");
            assert!(near(spent.record_bytes, position, 0.01), "{major}: {spent:?}, {position}");
            assert!(near(spent.record_bytes, records, 0.01), "{major}: {spent:?}, {records}");
            let few = 3;
            assert!(
                near(spent.writes, writes, 0.05) || spent.writes.abs_diff(writes) <= few,
                "{major}: {spent:?}, {writes}"
            );
            // 4,000 characters a row, not shrunk.
            assert!(spent.position > 2_000 * 4_000 && spent.position < 2_000 * 4_300, "{spent:?}");
            if (transaction_rows, clients) == (1, 1) {
                // A session alone writes at each of its commits, or the writer did just before.
                assert!(near(spent.writes, 2_000, 0.1), "{major}: {spent:?}");
            }
            measured.push(result);
        }
        // More rows per transaction: fewer and larger I/Os.
        let [single, _, large] = &measured[..] else { panic!("{measured:?}") };
        assert!(large.spent.writes * 4 < single.spent.writes, "{measured:?}");
        scratch.remove(&mut admin).await.unwrap();
        let left = tokio::task::block_in_place(|| {
            let sql = "SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'farshore%'";
            cluster.connect().unwrap().query_one(sql, &[]).unwrap().get::<_, i64>(0)
        });
        assert_eq!(left, 0);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn figures_are_the_servers_on_15() {
        figures_are_the_servers(15).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn figures_are_the_servers_on_18() {
        figures_are_the_servers(18).await;
    }
}
