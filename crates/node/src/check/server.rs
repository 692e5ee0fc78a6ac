//! What a server says of itself, asked on either side.

use farshore_model::{PgTime, quote_identifier};
use farshore_pg::{Connection, Error, Question, Row};
use std::time::Instant;

/// Oldest version that is supported, as `server_version_num` writes it.
const VERSION_MIN: u32 = 140_000;
/// First major version that was never tried.
const VERSION_UNTRIED: u32 = 190_000;
/// Clocks that differ by more than this, beyond what the round trip explains, are worth a word.
const CLOCKS_MAX_MICROS: i64 = 1_000_000;

/// What a server says of itself.
pub struct Server {
    /// When it was started, to the microsecond: the same only for the same server, and told to
    /// everyone. (System identifiers are the same on copies.)
    pub started: String,
    /// Database.
    pub database: String,
    /// Role that we are.
    pub role: String,
    /// `server_encoding`.
    pub encoding: String,
    /// A standby.
    pub in_recovery: bool,
    /// `default_transaction_read_only`, of the server, database or role.
    pub read_only: bool,
    /// We may create schemas and publications.
    pub may_create: bool,
    /// Connections that are left for us.
    pub connections_free: i64,
    /// The server's clock minus ours, microseconds; within half a round trip.
    clock_ahead: i64,
    round_trip: i64,
    version: u32,
}

/// What [`Server`] is made from.
const SERVER: &str = "SELECT current_user, current_database(), \
      current_setting('server_encoding'), pg_is_in_recovery(), \
      current_setting('default_transaction_read_only'), \
      has_database_privilege(current_database(), 'CREATE'), \
      least(current_setting('max_connections')::int \
        - current_setting('superuser_reserved_connections')::int \
        - coalesce((SELECT sum(numbackends) FROM pg_stat_database), 0), \
        CASE WHEN r.rolconnlimit >= 0 THEN r.rolconnlimit END), \
      extract(epoch FROM pg_postmaster_start_time()), \
      (extract(epoch FROM clock_timestamp() - '2000-01-01 00:00:00+00') \
        * 1000000)::bigint \
    FROM pg_roles r WHERE r.rolname = current_user";

impl Server {
    /// What is asked.
    pub const QUESTION: Question<'static> = Question::Extended(SERVER, &[]);

    /// What the answer of a server of this version says, which has just come to what was asked then.
    pub fn answered(rows: &[Row], asked: Instant, version: u32) -> Result<Server, Error> {
        let round_trip = i64::try_from(asked.elapsed().as_micros()).unwrap_or(i64::MAX);
        let ours = PgTime::now().0 - round_trip / 2;
        let row = rows.first().ok_or_else(|| Error::Value("no row about our role".to_owned()))?;
        let theirs: i64 = row.parse(8)?;
        let text = |i: usize| row.get(i).unwrap_or_default().to_owned();
        Ok(Server {
            started: text(7),
            database: text(1),
            role: text(0),
            encoding: text(2),
            in_recovery: row.parse_bool(3)?,
            read_only: text(4) == "on",
            may_create: row.parse_bool(5)?,
            connections_free: row.parse(6)?,
            clock_ahead: theirs - ours,
            round_trip,
            version,
        })
    }

    /// Asks.
    pub async fn ask(sql: &mut Connection) -> Result<Server, Error> {
        let asked = Instant::now();
        let mut answers = sql.ask_all(&[Server::QUESTION]).await?;
        let rows = answers.pop().unwrap_or(Ok(Vec::new()))?;
        Server::answered(&rows, asked, sql.server_version())
    }

    /// The role as SQL names it.
    pub fn role_sql(&self) -> String {
        quote_identifier(&self.role)
    }

    /// The database as SQL names it.
    pub fn database_sql(&self) -> String {
        quote_identifier(&self.database)
    }

    /// What holds of publishers and targets alike.
    pub(super) fn check(&self, kind: &str, key: &str, findings: &mut super::Findings) {
        let major = self.version / 10_000;
        if self.version < VERSION_MIN {
            findings.error(
                format!("the {kind} is PostgreSQL {major}; 14 is the oldest that is supported"),
                "Upgrade it",
            );
        } else if self.version >= VERSION_UNTRIED {
            findings.warning(
                format!("the {kind} is PostgreSQL {major}; 18 is the newest that was tested"),
                "Try it on a copy first",
            );
        }
        if self.in_recovery {
            findings.passing_error(
                format!("the {kind} is a standby (it is in recovery)"),
                format!(
                    "Point `{key}` at the primary; with several hosts and \
                     target_session_attrs=read-write in the URL it is found after a failover too"
                ),
            );
        } else if self.read_only {
            findings.passing_error(
                format!("sessions of {} on the {kind} are read-only", self.role_sql()),
                format!(
                    "ALTER ROLE {} IN DATABASE {} SET default_transaction_read_only = off",
                    self.role_sql(),
                    self.database_sql()
                ),
            );
        }
        let ahead = self.clock_ahead;
        if ahead.abs() > CLOCKS_MAX_MICROS.saturating_add(self.round_trip) {
            findings.warning(
                format!(
                    "the {kind}'s clock is {:.1} s {} this machine's: lag is shown wrong by that",
                    ahead.abs() as f64 / 1e6,
                    if ahead > 0 { "ahead of" } else { "behind" }
                ),
                "Let both follow the same NTP servers",
            );
        }
    }

    /// Says so when fewer than `needed` connections are left.
    pub(super) fn check_connections(
        &self,
        kind: &str,
        needed: usize,
        findings: &mut super::Findings,
    ) {
        if self.connections_free < i64::try_from(needed).unwrap_or(i64::MAX) {
            findings.warning(
                format!(
                    "{} connections are left on the {kind}, up to {needed} are used while tables \
                     are copied or a backlog is applied",
                    self.connections_free.max(0)
                ),
                "Raise max_connections (or the role's CONNECTION LIMIT), or lower copy_workers and streams",
            );
        }
    }
}
