//! Clients that append to lists and read them, on one server after another.

use super::{Moment, Operation, Outcome, Transaction};
use crate::thread::join_within;
use anyhow::{Context, Result, ensure};
use postgres::{Client, IsolationLevel, NoTls};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The table of lists. Every version of a row is of one page's size at most: keys change before.
pub const TABLE: &str = "CREATE TABLE lists (key bigint PRIMARY KEY, elements bigint[] NOT NULL)";

/// Lists that are appended to at a time.
const LISTS_AT_ONCE: i64 = 4;
/// After so many commits one of them is left and another one begun.
const COMMITS_PER_LIST: i64 = 40;
/// Lists that are read, behind those that are appended to.
const LISTS_BEHIND: i64 = 6;
/// Until a server is asked again that did not answer.
const ASK_AGAIN: Duration = Duration::from_millis(10);
/// Until a client has ended its transaction, when it is told to.
const END_MAX: Duration = Duration::from_secs(120);

/// Clients at work, each one transaction after another.
///
/// Every transaction appends, also one that reads: PostgreSQL lets a transaction that only reads
/// return without waiting for a standby, so what it saw may be lost with the server, by design.
#[derive(Debug)]
pub struct Clients {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<Result<Vec<Transaction>>>>,
}

#[derive(Debug)]
struct Shared {
    begun: Instant,
    /// Where to connect, and a number that grows with each change of it.
    server: Mutex<(String, u64)>,
    stop: AtomicBool,
    /// Of each client.
    returned: Vec<AtomicU64>,
    commits: AtomicI64,
    elements: AtomicI64,
}

impl Clients {
    /// Starts `count` clients on a server that has [`TABLE`].
    pub fn start(url: &str, count: usize, seed: u64) -> Clients {
        let shared = Arc::new(Shared {
            begun: Instant::now(),
            server: Mutex::new((url.to_owned(), 0)),
            stop: AtomicBool::new(false),
            returned: (0..count).map(|_| AtomicU64::new(0)).collect(),
            commits: AtomicI64::new(0),
            elements: AtomicI64::new(0),
        });
        let threads = (0..count)
            .map(|number| {
                let shared = shared.clone();
                let random = StdRng::seed_from_u64(seed.wrapping_add(number as u64));
                std::thread::spawn(move || shared.run(number, random))
            })
            .collect();
        Clients { shared, threads }
    }

    /// Each client goes on at this server once its connection is broken, and not before.
    pub fn go_on_at(&self, url: &str) {
        let mut server = self.shared.server();
        *server = (url.to_owned(), server.1 + 1);
    }

    /// Of each client, how many transactions it saw return.
    ///
    /// # Errors
    /// When a client has ended.
    pub fn returned(&self) -> Result<Vec<u64>> {
        ensure!(!self.threads.iter().any(JoinHandle::is_finished), "a client has ended");
        Ok(self.shared.returned.iter().map(|count| count.load(SeqCst)).collect())
    }

    /// Ends the clients, which must be able to: none of them may be waiting for ever. Reads all
    /// lists on the server where they were last, and returns everything that happened.
    ///
    /// # Errors
    /// What no client expects of a server, when one of them waits for minutes, and when the lists
    /// cannot be read.
    pub fn finish(self) -> Result<Vec<Transaction>> {
        self.shared.stop.store(true, SeqCst);
        let mut history = Vec::new();
        for thread in self.threads {
            history.extend(join_within(thread, "a client", END_MAX)??);
        }
        let url = self.shared.server().0.clone();
        let mut client = Client::connect(&url, NoTls).context("connect to read all lists")?;
        let invoked = self.shared.now();
        let rows = client.query("SELECT key, elements FROM lists", &[])?;
        let found = |key| rows.iter().find(|row| row.get::<_, i64>(0) == key);
        // Also those that are not there: their loss would not be seen otherwise.
        let operations = (0..=self.shared.newest_list())
            .map(|key| {
                let elements = found(key).map(|row| row.get(1)).unwrap_or_default();
                Operation::Read { key, elements }
            })
            .collect();
        let outcome = Outcome::Returned(self.shared.now());
        let client = self.shared.returned.len();
        history.push(Transaction { client, invoked, outcome, operations });
        Ok(history)
    }
}

impl Shared {
    fn server(&self) -> MutexGuard<'_, (String, u64)> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Moment {
        self.begun.elapsed().as_micros() as Moment
    }

    fn oldest_list(&self) -> i64 {
        self.commits.load(SeqCst) / COMMITS_PER_LIST
    }

    /// At the most, whatever was drawn so far.
    fn newest_list(&self) -> i64 {
        self.oldest_list() + LISTS_AT_ONCE
    }

    fn run(&self, number: usize, mut random: StdRng) -> Result<Vec<Transaction>> {
        let mut history = Vec::new();
        while !self.stop.load(SeqCst) {
            let url = self.server().0.clone();
            let Some(mut connection) = connect(&url) else {
                std::thread::park_timeout(ASK_AGAIN);
                continue;
            };
            while !self.stop.load(SeqCst) && !connection.is_closed() {
                let transaction = self.transact(number, &mut connection, &mut random)?;
                if matches!(transaction.outcome, Outcome::Returned(_)) {
                    self.commits.fetch_add(1, SeqCst);
                    self.returned[number].fetch_add(1, SeqCst);
                }
                history.push(transaction);
            }
        }
        Ok(history)
    }

    /// Reads a list, appends to a list, reads that one, and commits.
    fn transact(
        &self,
        client: usize,
        connection: &mut Client,
        random: &mut StdRng,
    ) -> Result<Transaction> {
        let oldest = self.oldest_list();
        let appended = oldest + random.random_range(0..LISTS_AT_ONCE);
        let read = (oldest + random.random_range(-LISTS_BEHIND..LISTS_AT_ONCE)).max(0);
        let element = self.elements.fetch_add(1, SeqCst);
        let invoked = self.now();
        let mut operations = Vec::new();
        let mut work = || -> Result<(), postgres::Error> {
            let mut transaction = connection
                .build_transaction()
                .isolation_level(IsolationLevel::Serializable)
                .start()?;
            let sql = "SELECT elements FROM lists WHERE key = $1";
            let row = transaction.query_opt(sql, &[&read])?;
            let elements = row.map(|row| row.get(0)).unwrap_or_default();
            operations.push(Operation::Read { key: read, elements });
            let sql = "INSERT INTO lists VALUES ($1, ARRAY[$2::bigint]) ON CONFLICT (key) DO UPDATE \
                       SET elements = lists.elements || $2::bigint RETURNING elements";
            let row = transaction.query_one(sql, &[&appended, &element])?;
            operations.push(Operation::Append { key: appended, element });
            operations.push(Operation::Read { key: appended, elements: row.get(0) });
            transaction.commit()
        };
        let worked = work();
        let asked_to_commit = operations.len() == 3;
        let outcome = match worked {
            Ok(()) => Outcome::Returned(self.now()),
            // 40: serialization failure, deadlock. 57: the server goes. No code: it has gone.
            Err(error) => match error.code().map(|code| &code.code()[..2]) {
                Some("40") => Outcome::Aborted,
                Some("57") | None if asked_to_commit => Outcome::Unknown,
                Some("57") | None => Outcome::Aborted,
                Some(_) => return Err(error).context("what no client expects"),
            },
        };
        Ok(Transaction { client, invoked, outcome, operations })
    }
}

/// `None` while the server takes no connections. Few rows would be read in sequence, which is a
/// conflict with every writer.
fn connect(url: &str) -> Option<Client> {
    let mut client = Client::connect(url, NoTls).ok()?;
    client.batch_execute("SET enable_seqscan = off").ok()?;
    Some(client)
}
