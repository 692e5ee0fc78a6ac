//! A connection to a target, set up for applying.

use crate::ApplyError;
use crate::postgres::progress::TableCopyColumn;
use farshore_pg::{Config, Connection, Mode, Question, Row, quote_literal};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// An answer to each of several questions.
pub type Answers<const N: usize> = [Result<Vec<Row>, ApplyError>; N];

/// A target connection.
pub struct Session {
    /// The connection itself.
    pub connection: Connection,
    server: String,
    /// The target's process at the other end (a pooler tells another one at first).
    pub(super) pid: String,
    /// When it was set up, and with it asked what [`Session::connect_and_ask`] was to ask.
    pub asked_at: Instant,
    /// Whether triggers and foreign keys keep quiet for what we apply.
    pub replica_role: bool,
    /// The schema `farshore` was there, with its tables, when somebody looked: what they hold can be
    /// asked for without another look.
    pub has_seen_schema: bool,
    /// Of the columns of `farshore.table_copy` that were added after the first version, which are
    /// there, as far as that was asked.
    pub(super) keeps: HashMap<TableCopyColumn, bool>,
}

impl Session {
    /// Whether the server itself has answered, and not a pooler before it, which makes up process
    /// numbers.
    pub fn is_with_server(&self) -> bool {
        self.pid == self.connection.backend_pid().to_string()
    }

    /// Connects and sets the session up: no timeouts of the role's own, a server that notices when we
    /// are gone, and, where the role may,
    /// `session_replication_role = replica`, so that triggers and foreign keys do not fire for
    /// rows that have been through them on the publisher.
    pub async fn connect(config: &Config, name: &str) -> Result<Session, ApplyError> {
        Ok(Session::connect_and_ask(config, name, &[]).await?.0)
    }

    /// [`Session::connect`], and the answers to these questions, without a round trip more.
    pub async fn connect_and_ask(
        config: &Config,
        name: &str,
        questions: &[Question<'_>],
    ) -> Result<(Session, Vec<Result<Vec<Row>, ApplyError>>), ApplyError> {
        let server = config.redacted();
        let config = config.clone().with_application_name(name);
        let connection = Connection::connect(&config, Mode::Sql)
            .await
            .map_err(|error| ApplyError::Target { server: server.clone(), error })?;
        let version = connection.server_version();
        let mut session = Session {
            connection,
            server,
            pid: String::new(),
            asked_at: Instant::now(),
            replica_role: false,
            has_seen_schema: false,
            keeps: HashMap::new(),
        };
        // What the database or the role sets is for others: we read what comes (bytea as hexadecimal
        // digits), and a text must mean here what it means on the publisher (money, NULL in arrays).
        // And whether somebody has altered a table is seen by no snapshot of before.
        // Dates, intervals and floats are seen to when a connection is made; what has a time zone
        // says it.
        let settings = format!(
            "{}; SET synchronous_commit = on; SET row_security = off; \
             SET search_path = ''; SET xmloption = content; SET lc_monetary = 'C'; \
             SET bytea_output = hex; SET array_nulls = on; \
             SET default_transaction_isolation = 'read committed'; SELECT pg_catalog.pg_backend_pid()",
            farshore_pg::no_timeouts(version)
        );
        let role = Question::Simple("SET session_replication_role = replica");
        // What waits for a lock notices that we are gone, and lets go of its own. Servers before
        // PostgreSQL 14, and some operating systems, cannot.
        let notices = Question::Simple("SET client_connection_check_interval = '2s'");
        // Where we may not set it, it may have been set for the role.
        let role_now =
            Question::Simple("SELECT pg_catalog.current_setting('session_replication_role')");
        let mut asked = vec![Question::Simple(&settings), role, role_now, notices];
        asked.extend(questions);
        let mut answers = session.ask_all(&asked).await?.into_iter();
        let mut next = || answers.next().unwrap_or(Ok(Vec::new()));
        let pid = next()?;
        session.pid = pid.first().and_then(|row| row.get(0)).unwrap_or_default().to_owned();
        match next() {
            Ok(_) => {}
            Err(ApplyError::Target { error, .. }) if error.sqlstate() == Some("42501") => {}
            Err(error) => return Err(error),
        }
        let role_now = next()?;
        session.replica_role = role_now.first().and_then(|row| row.get(0)) == Some("replica");
        Ok((session, answers.skip(1).collect()))
    }

    /// Asks several questions in one round trip; see [`Connection::ask_all`].
    pub async fn ask<const N: usize>(
        &mut self,
        questions: [Question<'_>; N],
    ) -> Result<Answers<N>, ApplyError> {
        self.ask_all(&questions).await?.try_into().map_err(|_| self.not_to_each())
    }

    /// The answers to questions that were sent, and whose answers are what comes next.
    pub(super) async fn answers<const N: usize>(&mut self) -> Result<Answers<N>, ApplyError> {
        let answers = self.connection.answers(N).await;
        let answers = answers.map_err(|error| self.error(error))?.into_iter();
        let answers = answers.map(|answer| answer.map_err(|error| self.error(error)));
        answers.collect::<Vec<_>>().try_into().map_err(|_| self.not_to_each())
    }

    fn not_to_each(&self) -> ApplyError {
        self.error(farshore_pg::Error::Protocol("not an answer to each question".to_owned()))
    }

    async fn ask_all(
        &mut self,
        questions: &[Question<'_>],
    ) -> Result<Vec<Result<Vec<Row>, ApplyError>>, ApplyError> {
        let answers = self.connection.ask_all(questions).await;
        let answers = answers.map_err(|error| self.error(error))?.into_iter();
        Ok(answers.map(|answer| answer.map_err(|error| self.error(error))).collect())
    }

    /// Takes the lock that makes this the only agent of `subscription` in this database, and waits
    /// until no lane of an earlier agent can commit any more. For both it waits for connections of
    /// an agent that died, up to `wait`.
    pub async fn lock_subscription(
        &mut self,
        subscription: &str,
        wait: Duration,
    ) -> Result<(), ApplyError> {
        let locked = self.simple(&lock_sql(subscription, wait)).await;
        match locked {
            Ok(()) => Ok(()),
            Err(error) => Err(self.locked_by(subscription, error).await),
        }
    }

    /// Takes a subscription's lock until this session ends, if neither an agent of that name nor
    /// one of its connections is at work.
    pub(crate) async fn try_lock(&mut self, subscription: &str) -> Result<bool, ApplyError> {
        let (key, lane) = (subscription_lock_key(subscription), lane_lock_key(subscription));
        let sql = format!("SELECT pg_try_advisory_lock({key}) AND pg_try_advisory_lock({lane})");
        let rows = self.query(&sql, &[]).await?;
        Ok(rows.first().and_then(|row| row.get(0)) == Some("t"))
    }

    /// Why [`lock_sql`] failed.
    pub(super) async fn locked_by(&mut self, subscription: &str, error: ApplyError) -> ApplyError {
        match &error {
            ApplyError::Target { error, .. } if error.sqlstate() == Some("55P03") => {}
            _ => return error,
        }
        // A lock of the session that was granted stays granted.
        let sql = format!("SELECT pg_try_advisory_lock({})", subscription_lock_key(subscription));
        let ours = match self.query(&sql, &[]).await {
            Ok(rows) => rows.first().and_then(|row| row.get(0)) == Some("t"),
            Err(error) => return error,
        };
        ApplyError::NotYet(if ours {
            format!(
                "subscription \"{subscription}\": a connection \"farshore {subscription}\" of an \
                 agent that ended is still at work in {}. It is waited for; see pg_stat_activity \
                 there for what it waits for",
                self.server
            )
        } else {
            format!(
                "subscription \"{subscription}\": another agent of that name is at work in {}. \
                 Stop it, or rename one of the two",
                self.server
            )
        })
    }

    /// Marks this connection as one that copies ranges, for as long as it lives.
    pub async fn join_copy(&mut self, subscription: &str) -> Result<(), ApplyError> {
        let key = copy_lock_key(subscription);
        self.simple(&format!("SELECT pg_advisory_lock_shared({key})")).await
    }

    /// Waits until no connection of an earlier agent is still committing a range.
    pub async fn wait_for_copiers(&mut self, subscription: &str) -> Result<(), ApplyError> {
        let key = copy_lock_key(subscription);
        self.simple(&format!("SELECT pg_advisory_lock({key}); SELECT pg_advisory_unlock({key})"))
            .await
    }

    /// Runs a query with text parameters.
    pub async fn query(
        &mut self,
        sql: &str,
        parameters: &[Option<&str>],
    ) -> Result<Vec<Row>, ApplyError> {
        self.connection.query(sql, parameters).await.map_err(|error| self.error(error))
    }

    /// Runs a statement with text parameters; returns the rows it touched.
    pub async fn execute(
        &mut self,
        sql: &str,
        parameters: &[Option<&str>],
    ) -> Result<u64, ApplyError> {
        self.connection.execute(sql, parameters).await.map_err(|error| self.error(error))
    }

    /// Runs statements without parameters or results.
    pub async fn simple(&mut self, sql: &str) -> Result<(), ApplyError> {
        self.connection.simple_query(sql).await.map(drop).map_err(|error| self.error(error))
    }

    /// Whether we own all of these tables, named as in SQL.
    pub async fn owns(&mut self, tables: &[String]) -> Result<bool, ApplyError> {
        for table in tables {
            let rows = self
                .query(
                    "SELECT pg_catalog.pg_has_role(relowner, 'USAGE') FROM pg_catalog.pg_class \
                     WHERE oid = pg_catalog.to_regclass($1)",
                    &[Some(table)],
                )
                .await?;
            if rows.first().and_then(|row| row.get(0)) != Some("t") {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Names the server in an error.
    pub fn error(&self, error: farshore_pg::Error) -> ApplyError {
        ApplyError::Target { server: self.server.clone(), error }
    }
}

/// What connections that write a subscription's changes are called on its target.
pub fn application_name(subscription: &str) -> String {
    format!("farshore {subscription}")
}

/// Takes a subscription's lock and waits for the lanes of an earlier agent: see
/// [`Session::lock_subscription`].
pub(super) fn lock_sql(subscription: &str, wait: Duration) -> String {
    let (key, lane) = (subscription_lock_key(subscription), lane_lock_key(subscription));
    let wait = wait.as_millis();
    format!(
        "SET lock_timeout = {wait}; SELECT pg_advisory_lock({key}); SELECT pg_advisory_lock({lane}); \
         SELECT pg_advisory_unlock({lane}); SET lock_timeout = 0"
    )
}

/// Marks a connection as one of the subscription's lanes, for as long as it lives. Not true when
/// somebody waits for the lanes to end.
pub(super) fn join_lanes_sql(subscription: &str) -> String {
    format!("SELECT pg_try_advisory_lock_shared({})", lane_lock_key(subscription))
}

fn subscription_lock_key(subscription: &str) -> String {
    let name = quote_literal(&format!("farshore subscription {subscription}"));
    format!("hashtextextended({name}, 0)")
}

fn lane_lock_key(subscription: &str) -> String {
    let name = quote_literal(&format!("farshore lane {subscription}"));
    format!("hashtextextended({name}, 0)")
}

fn copy_lock_key(subscription: &str) -> String {
    let name = quote_literal(&format!("farshore copy {subscription}"));
    format!("hashtextextended({name}, 0)")
}
