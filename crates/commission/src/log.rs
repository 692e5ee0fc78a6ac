//! What the write-ahead log of a live PostgreSQL takes: rows in transactions of different sizes, by
//! one client and by many, counted by the server itself.
//!
//! Everything happens in a schema of its own, which is removed at the end, whatever the end is
//! (see `scratch`). The rows come from a table on the server, so that the network carries
//! a short statement for each transaction and is not what is measured.

mod cap;
mod cell;
mod commits_return;
mod counters;
mod prose;
pub(crate) mod scratch;
mod script;
pub(crate) mod server;
mod verdict;

use crate::machine;
use crate::report::{At, Better, DimensionKind, Fact, Report, Section};
use crate::units::{bytes, count};
use crate::{Error, Progress, Stop};
pub(crate) use cap::Cap;
use cell::{Cell, Measured, Place};
use counters::Counters;
use farshore_pg::{CancelToken, Config, Connection, Mode};
use scratch::Scratch;
pub use script::Script;
use server::Server;
pub(crate) use server::Standby;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Name of the section of a report.
pub(crate) const TRANSACTIONS: &str = "transactions";
/// What sessions are called in `pg_stat_activity`.
const APPLICATION: &str = "farshore commission";
/// Characters in a row at most: PostgreSQL takes 1 GB, and the rows to choose from are kept twice.
pub const ROW_SIZE_MAX: u32 = 1 << 20;
/// Most sessions at a time.
pub const CLIENTS_MAX: u32 = 1_000;
/// How long the server's log is watched before anything starts.
const WATCH: Duration = Duration::from_secs(1);
/// A server that writes more than this by itself, in bytes per second, is not idle.
const IDLE_BYTES_PER_S: f64 = 64.0 * 1024.0;
/// How long a server may take to take notice of a cancelled statement.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);

/// What to measure.
#[derive(Debug, Clone)]
pub struct LogOptions {
    /// The server, and the database that the scratch schema goes to.
    pub server: Config,
    /// Rows written for each figure.
    pub rows: u64,
    /// Characters in a row; 1 to [`ROW_SIZE_MAX`].
    pub row_size: u32,
    /// Run this instead of inserting rows; a run of it counts as a row.
    pub script: Option<Script>,
    /// Rows in a transaction.
    pub transaction_rows: Vec<u64>,
    /// Clients at a time; 1 to [`CLIENTS_MAX`].
    pub clients: Vec<u32>,
    /// How often each figure is measured.
    pub repeats: u32,
    /// A figure is measured no longer than this each time; it is then of fewer rows.
    pub time_max: Duration,
    /// Bytes of log written in all, at most.
    pub log_bytes_max: u64,
}

impl LogOptions {
    /// Reads a URL, a conninfo string or `service=NAME`.
    ///
    /// # Errors
    /// [`Error::Refused`]: names what is wrong in it.
    pub fn server(text: &str) -> Result<Config, Error> {
        Config::parse(text).map_err(|error| Error::Refused(error.to_string()))
    }

    /// 100,000 rows of 4,000 characters, in transactions of 1 to 100,000 rows.
    pub fn new(server: Config) -> LogOptions {
        LogOptions {
            server,
            rows: 100_000,
            row_size: 4_000,
            script: None,
            transaction_rows: vec![1, 10, 100, 1_000, 10_000, 100_000],
            clients: vec![1, 16],
            repeats: 3,
            time_max: Duration::from_secs(30),
            log_bytes_max: 32 << 30,
        }
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |what: String| Err(Error::Refused(what));
        if !(1..=ROW_SIZE_MAX).contains(&self.row_size) {
            return refuse(format!("a row can have 1 to {ROW_SIZE_MAX} characters"));
        }
        if let Some(clients) = self.clients.iter().find(|c| !(1..=CLIENTS_MAX).contains(*c)) {
            return refuse(format!("there can be 1 to {CLIENTS_MAX} clients, not {clients}"));
        }
        if self.repeats == 0 || self.time_max.is_zero() || self.transaction_rows.contains(&0) {
            return refuse(
                "nothing would be measured: repeats, seconds and rows must be above 0".to_owned(),
            );
        }
        if self.cells().is_empty() {
            return refuse(format!(
                "{} rows are not enough for any of the transactions and clients: raise --rows",
                self.rows
            ));
        }
        Ok(())
    }

    /// Combinations in which every client has at least one transaction.
    fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for clients in &self.clients {
            for rows in &self.transaction_rows {
                if rows.saturating_mul(u64::from(*clients)) <= self.rows {
                    cells.push(Cell { transaction_rows: *rows, clients: *clients });
                }
            }
        }
        cells
    }

    fn demand(&self) -> Demand {
        Demand {
            clients: self.clients.iter().copied().max().unwrap_or(1),
            planned_bytes: self.script.is_none().then(|| self.planned_bytes()),
            table_bytes: self.table_bytes(),
            log_bytes_max: self.log_bytes_max,
        }
    }

    /// Combinations that [`LogOptions::cells`] leaves out, in words; `None` if there are none.
    fn left_out(&self) -> Option<String> {
        let left_out: Vec<String> = self
            .clients
            .iter()
            .flat_map(|clients| self.transaction_rows.iter().map(move |rows| (*clients, *rows)))
            .filter(|(clients, rows)| rows.saturating_mul(u64::from(*clients)) > self.rows)
            .map(|(clients, rows)| format!("{} × {}", count(clients.into()), count(rows)))
            .collect();
        (!left_out.is_empty()).then(|| {
            format!(
                "left out, because not every client would have had a transaction (clients × rows): {}; \
                 more --rows would include them",
                left_out.join(", ")
            )
        })
    }

    /// Bytes of log that all of it writes, about: a row, its header, and a little for the pages'.
    fn planned_bytes(&self) -> u64 {
        let row = u64::from(self.row_size) + 100;
        let cells = self.cells().len() as u64;
        self.rows.saturating_mul(row).saturating_mul(cells * u64::from(self.repeats))
    }

    /// Bytes that the table takes while it is largest, about: pages are not filled to the end.
    fn table_bytes(&self) -> u64 {
        self.rows.saturating_mul(u64::from(self.row_size) + 100).saturating_mul(5) / 4
    }
}

/// What a measurement asks of a server, for [`Server::ensure_fit`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Demand {
    /// Sessions at a time.
    pub clients: u32,
    /// Bytes of log that all of it writes, about; `None`: nobody knows, a user's script does it.
    pub planned_bytes: Option<u64>,
    /// Bytes that its tables take at most, about.
    pub table_bytes: u64,
    /// Bytes of log that may be written in all.
    pub log_bytes_max: u64,
}

/// Sessions that may be at work, to be cancelled when everything is to end.
#[derive(Debug, Clone, Default)]
pub(crate) struct AtWork(Arc<Mutex<Vec<CancelToken>>>);

impl AtWork {
    pub(crate) fn add(&self, connection: &Connection) {
        let mut tokens = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        tokens.push(connection.cancel_token());
    }

    fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Asks the server to end what they do, so that locks are released at once.
    async fn cancel(&self) {
        let tokens = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let mut asking = tokio::task::JoinSet::new();
        for token in tokens {
            // One that has ended, or cannot be reached, holds no lock for long.
            asking.spawn(async move {
                let _ = tokio::time::timeout(CANCEL_TIMEOUT, token.cancel()).await;
            });
        }
        asking.join_all().await;
    }
}

/// Measures a server's log. Its scratch schema is gone when this returns.
///
/// # Errors
/// [`Error::Refused`] before anything is written when it should not be done there (a standby, no
/// right to make a schema, too little room, rows that would be replicated elsewhere);
/// [`Error::Interrupted`] when asked to stop; and the server's. Dropping the future leaves the
/// removal of the schema to the server.
pub async fn measure(
    options: &LogOptions,
    stop: &Stop,
    say: Progress<'_>,
) -> Result<Report, Error> {
    options.check()?;
    let demand = options.demand();
    let mut report = on_a_server(&options.server, demand, &[None], stop, say, async |stage| {
        let mut report = begin_report("log", stage, options.log_bytes_max);
        report.settings = settings(options);
        report.remarks.extend(options.left_out());
        fill(options, stage, &mut report, say).await?;
        Ok(report)
    })
    .await?;
    report.remark_on_spread();
    report.verdict = verdict::of(&report);
    Ok(report)
}

/// Where a measurement takes place.
pub(crate) struct Stage<'a> {
    /// How to connect more sessions.
    pub config: &'a Config,
    /// A session that asks, makes tables and empties them.
    pub admin: &'a mut Connection,
    /// The schema to do it in.
    pub scratch: &'a mut Scratch,
    /// What the server said of itself.
    pub server: &'a Server,
    /// Sessions to be cancelled at the end.
    pub at_work: &'a AtWork,
}

/// Does `work` on a server that is fit for it, in a scratch schema that is gone afterwards; gives it
/// up when asked to stop. Commits at each of `levels` (of `synchronous_commit`; `None`: the
/// session's own) return there, or nothing is done.
pub(crate) async fn on_a_server<T>(
    server: &Config,
    demand: Demand,
    levels: &[Option<&str>],
    stop: &Stop,
    say: Progress<'_>,
    work: impl AsyncFnOnce(&mut Stage<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let config = server.clone().with_application_name(APPLICATION);
    let at_work = AtWork::default();
    let begun = tokio::select! {
        begun = begin(&config, demand, &at_work, say) => begun,
        () = stop.requested() => Err(Error::Interrupted),
    };
    let (mut admin, server, mut scratch) = match begun {
        Ok(begun) => begun,
        Err(error) => {
            // Nothing of ours is there yet; who removes what is old may wait for a lock.
            at_work.cancel().await;
            return Err(error);
        }
    };
    let outcome = {
        let work = async {
            scratch.make(&mut admin).await?;
            let mut stage = Stage {
                config: &config,
                admin: &mut admin,
                scratch: &mut scratch,
                server: &server,
                at_work: &at_work,
            };
            commits_return::ensure(&mut stage, levels, say).await?;
            work(&mut stage).await
        };
        tokio::select! {
            outcome = work => outcome,
            () = stop.requested() => Err(Error::Interrupted),
        }
    };
    at_work.cancel().await;
    let removed = scratch.remove(&mut admin).await;
    admin.close().await;
    let outcome = outcome?;
    removed?;
    Ok(outcome)
}

/// The session that asks, what the server is, and a schema that is still to be made.
async fn begin(
    config: &Config,
    demand: Demand,
    at_work: &AtWork,
    say: Progress<'_>,
) -> Result<(Connection, Server, Scratch), Error> {
    let mut admin = connect(config).await?;
    at_work.add(&admin);
    let server = Server::ask(&mut admin).await?;
    server.ensure_fit(demand)?;
    keep_house(&mut admin).await?;
    let scratch = Scratch::begin(config, &mut admin, say).await?;
    at_work.clear();
    Ok((admin, server, scratch))
}

/// Makes commits of a session that makes and removes things, and measures nothing, wait for no
/// standby: where that is not there, neither would return.
pub(crate) async fn keep_house(connection: &mut Connection) -> Result<(), Error> {
    let server = connection.server().to_owned();
    let sql =
        "SET synchronous_commit = local; SET default_transaction_isolation = 'read committed'";
    connection.simple_query(sql).await.map_err(trying("set up a session", &server))?;
    Ok(())
}

/// A report with what is known before anything is measured.
pub(crate) fn begin_report(kind: &str, stage: &Stage<'_>, log_bytes_max: u64) -> Report {
    let mut report = Report::begin(kind, stage.config.redacted());
    report.machine = stage.server.facts();
    if stage.server.is_local {
        report.machine.extend(machine::facts());
    }
    report.remarks = stage.server.remarks(log_bytes_max);
    report
}

/// Connects a session without time limits.
pub(crate) async fn connect(config: &Config) -> Result<Connection, Error> {
    let failed =
        |source| Error::Server { what: "open a session", server: config.redacted(), source };
    let mut connection = Connection::connect(config, Mode::Sql).await.map_err(failed)?;
    let sql = farshore_pg::no_timeouts(connection.server_version());
    connection.simple_query(&sql).await.map_err(failed)?;
    Ok(connection)
}

/// For `map_err`: what was tried on a server.
pub(crate) fn trying(what: &'static str, server: &str) -> impl FnOnce(farshore_pg::Error) -> Error {
    let server = server.to_owned();
    move |source| Error::Server { what, server, source }
}

async fn fill(
    options: &LogOptions,
    stage: &mut Stage<'_>,
    report: &mut Report,
    say: Progress<'_>,
) -> Result<(), Error> {
    let Stage { config, admin, scratch, server, at_work } = stage;
    let idle = watch_idle(admin, server).await?;
    if idle > IDLE_BYTES_PER_S {
        report.remarks.push(format!(
            "the server is in use: it wrote {} of log per second by itself; all figures contain what \
             others did meanwhile",
            bytes(idle as u64)
        ));
    }
    if options.script.is_none() {
        say("making rows to choose from");
        scratch.fill(admin, options.row_size).await?;
    }
    let begin = Counters::read(admin, server).await?;
    let cells = options.cells();
    let mut section = empty_section(options, server);
    for round in 1..=options.repeats {
        for (number, cell) in cells.iter().enumerate() {
            say(&format!(
                "round {round} of {}, {} of {}: transactions of {} rows, {} clients",
                options.repeats,
                number + 1,
                cells.len(),
                count(cell.transaction_rows),
                count(cell.clients.into())
            ));
            let place = Place { options, config, server, scratch, at_work, begin: &begin };
            let measured = cell::measure(*cell, place, admin).await?;
            at_work.clear();
            add(&mut section, *cell, &measured);
        }
    }
    report.sections.push(section);
    Ok(())
}

/// Bytes of log per second that the server writes while nothing is asked of it here.
async fn watch_idle(admin: &mut Connection, server: &Server) -> Result<f64, Error> {
    let before = Counters::read(admin, server).await?;
    let begin = std::time::Instant::now();
    tokio::time::sleep(WATCH).await;
    let after = Counters::read(admin, server).await?;
    Ok(after.position.saturating_sub(before.position) as f64 / begin.elapsed().as_secs_f64())
}

fn settings(options: &LogOptions) -> Vec<Fact> {
    let work = match &options.script {
        Some(script) => format!("{} runs of {}", count(options.rows), script.name()),
        None => format!("{} rows of {} characters", count(options.rows), options.row_size),
    };
    vec![
        Fact::new("work per figure", work),
        Fact::new("time per figure at most", format!("{:?}", options.time_max)),
        Fact::new("repeats", options.repeats),
    ]
}

fn empty_section(options: &LogOptions, server: &Server) -> Section {
    use Better::{Higher, Lower, Neither};
    let mut metrics = vec![
        ("mb_per_s", "log MB/s", Higher),
        ("rows_per_s", "rows/s", Higher),
        ("commits_per_s", "commits/s", Higher),
        ("ios_per_row", "I/Os/row", Lower),
        ("ios_per_transaction", "I/Os/transaction", Neither),
        ("bytes_per_io", "bytes/I/O", Higher),
        ("p50_us", "commit p50 µs", Lower),
        ("p99_us", "p99 µs", Lower),
        ("max_us", "max µs", Lower),
        ("waiting_percent", "waiting %", Lower),
        ("seconds", "seconds", Neither),
        ("rows", "rows", Neither),
        ("commits", "commits", Neither),
        ("log_mb", "log MB", Neither),
        ("ios", "log I/Os", Neither),
        ("flushes", "flushes", Neither),
        ("buffers_full", "buffers full", Lower),
    ];
    if server.times_io {
        metrics.push(("write_ms", "write ms", Neither));
        metrics.push(("flush_ms", "flush ms", Neither));
    }
    let what = match &options.script {
        Some(script) => format!("runs of {}", script.name()),
        None => format!("rows of {} characters", options.row_size),
    };
    let mut section = Section::new(
        TRANSACTIONS,
        "The log by size of transaction",
        &format!(
            "Each transaction writes {what}. I/Os and flushes of the log are those that the server \
             counted; bytes are how far the log moved. Waiting is the share of the clients' time in \
             which they waited for the log. Buffers are full when a session has to write pages of the log \
             itself to make room."
        ),
        &[("clients", DimensionKind::Count), ("rows/transaction", DimensionKind::Count)],
        &metrics,
    );
    section.chart("Log MB/s by rows per transaction", "mb_per_s", 1, Some(0), false);
    section.chart("Commit latency p99 in µs by rows per transaction", "p99_us", 1, Some(0), true);
    section.chart("I/Os per row by rows per transaction", "ios_per_row", 1, Some(0), true);
    section.chart("Bytes per I/O by rows per transaction", "bytes_per_io", 1, Some(0), true);
    section
}

fn add(section: &mut Section, cell: Cell, measured: &Measured) {
    let Measured { rows, transactions, elapsed, latencies, spent, waiting } = measured;
    let seconds = elapsed.as_secs_f64();
    let (rows, transactions) = (*rows as f64, *transactions as f64);
    let moved = spent.position as f64;
    let ios = spent.writes as f64;
    let mut figures = vec![
        ("mb_per_s", moved / 1e6 / seconds),
        ("rows_per_s", rows / seconds),
        ("commits_per_s", transactions / seconds),
        ("seconds", seconds),
        ("rows", rows),
        ("commits", transactions),
        ("log_mb", moved / 1e6),
        ("ios", ios),
        ("ios_per_row", ios / rows.max(1.0)),
        ("ios_per_transaction", ios / transactions.max(1.0)),
        ("bytes_per_io", moved / ios.max(1.0)),
        ("flushes", spent.flushes as f64),
        ("buffers_full", spent.buffers_full as f64),
        ("waiting_percent", waiting * 100.0),
        ("p50_us", latencies.quantile_us(0.5)),
        ("p99_us", latencies.quantile_us(0.99)),
        ("max_us", latencies.max_us()),
    ];
    if section.metrics.iter().any(|metric| metric.name == "write_ms") {
        figures.push(("write_ms", spent.write_ms));
        figures.push(("flush_ms", spent.flush_ms));
    }
    section.add(&[At::Number(cell.clients.into()), At::Number(cell.transaction_rows)], &figures);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_gives_every_client_a_transaction_is_planned() {
        let config = Config::parse("postgres://somebody@nowhere/db").unwrap();
        let options = LogOptions::new(config);
        options.check().unwrap();
        let many = options.cells().into_iter().filter(|cell| cell.clients == 16);
        let many: Vec<u64> = many.map(|cell| cell.transaction_rows).collect();
        assert_eq!(many, [1, 10, 100, 1_000]);
        assert_eq!(options.planned_bytes(), 100_000 * 4_100 * 10 * 3);
        for (wish, said) in [
            (LogOptions { row_size: 0, ..options.clone() }, "1 to 1048576 characters"),
            (LogOptions { clients: vec![0], ..options.clone() }, "1 to 1000 clients"),
            (LogOptions { repeats: 0, ..options.clone() }, "above 0"),
            (LogOptions { rows: 0, ..options.clone() }, "raise --rows"),
        ] {
            let error = wish.check().unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
        let huge = LogOptions { rows: u64::MAX, ..options };
        assert_eq!(huge.planned_bytes(), u64::MAX);
        huge.table_bytes();
    }
}
