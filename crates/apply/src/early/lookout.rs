//! Whether a transaction that is applied early is in anybody's way, asked on a connection of its
//! own.

use crate::ApplyError;
use crate::postgres::lanes::LaneSettings;
use crate::postgres::session::Session;
use farshore_pg::{Connection, Mode};
use std::time::Duration;

/// How often it is asked.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// How long the end of the transaction is waited for.
const END_WITHIN: Duration = Duration::from_secs(5);

/// A session of the target: its process, and since when, because process ids come again.
pub(super) struct Backend {
    pid: String,
    since: String,
}

impl Backend {
    /// The one at the other end of `session`.
    pub async fn of(session: &mut Session) -> Result<Backend, ApplyError> {
        let sql = "SELECT pid, extract(epoch FROM backend_start) \
                   FROM pg_catalog.pg_stat_activity WHERE pid = pg_catalog.pg_backend_pid()";
        let rows = session.query(sql, &[]).await?;
        let text = |column| rows.first().and_then(|row| row.get(column)).map(str::to_owned);
        match (text(0), text(1)) {
            (Some(pid), Some(since)) => Ok(Backend { pid, since }),
            _ => Err(ApplyError::NotYet("the target does not show its own session".to_owned())),
        }
    }
}

/// A connection that looks out for others.
pub(super) struct Lookout {
    connection: Connection,
}

impl Lookout {
    /// Connects.
    pub async fn connect(settings: &LaneSettings) -> Result<Lookout, String> {
        let application = format!("farshore {} looks for locks", settings.subscription);
        let target = settings.target.clone().with_application_name(&application);
        let connection = Connection::connect(&target, Mode::Sql).await;
        Ok(Lookout { connection: connection.map_err(|error| error.to_string())? })
    }

    /// That it sees what it is to look out for: of several servers, connections may reach another.
    pub async fn sees(&mut self, backend: &Backend) -> Result<(), String> {
        let sql = "SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_activity WHERE \
                   pid = $1::text::int AND extract(epoch FROM backend_start)::text = $2)";
        let session = [Some(backend.pid.as_str()), Some(&backend.since)];
        match self.connection.query(sql, &session).await {
            Ok(rows) if rows.first().and_then(|row| row.get(0)) == Some("t") => Ok(()),
            Ok(_) => Err("nobody can look out for who waits for it".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Waits until somebody waits for a lock of `backend`, or until nobody can be asked; says why
    /// it is to end.
    pub async fn until_in_the_way(&mut self, backend: &Backend) -> String {
        let sql = "SELECT EXISTS (SELECT FROM pg_catalog.pg_locks WHERE NOT granted \
                   AND $1::text::int = ANY (pg_catalog.pg_blocking_pids(pid)))";
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            match self.connection.query(sql, &[Some(&backend.pid)]).await {
                Ok(rows) if rows.first().and_then(|row| row.get(0)) == Some("f") => {}
                Ok(_) => return "another session waits for a lock of it".to_owned(),
                Err(error) => return error.to_string(),
            }
        }
    }

    /// Ends the session and waits until it is gone. If that fails it ends by itself, once it notices
    /// that its client is gone.
    pub async fn end(mut self, backend: &Backend) {
        let sql = "SELECT pg_catalog.pg_terminate_backend(pid, $3::text::int) \
                   FROM pg_catalog.pg_stat_activity \
                   WHERE pid = $1::text::int AND extract(epoch FROM backend_start)::text = $2";
        let within = END_WITHIN.as_millis().to_string();
        let arguments = [Some(backend.pid.as_str()), Some(&backend.since), Some(&within)];
        let ended = async {
            match self.connection.query(sql, &arguments).await {
                Ok(_) => self.connection.close().await,
                Err(error) => tracing::debug!(%error, "an early transaction was not ended"),
            }
        };
        if tokio::time::timeout(2 * END_WITHIN, ended).await.is_err() {
            tracing::debug!("an early transaction was not ended in time");
        }
    }

    /// Closes the connection.
    pub async fn close(self) {
        self.connection.close().await;
    }
}
