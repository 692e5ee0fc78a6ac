//! How much log may be written while something is measured, by it and by everybody else.

use super::trying;
use crate::Error;
use crate::units::bytes;
use farshore_model::Lsn;
use farshore_pg::Connection;

/// A limit, from a position on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cap {
    /// Where the log was, in bytes.
    begin: u64,
    bytes_max: u64,
}

impl Cap {
    /// No more than `bytes_max` from `begin` on.
    pub(crate) fn new(begin: u64, bytes_max: u64) -> Cap {
        Cap { begin, bytes_max }
    }

    /// From where the log is now.
    pub(crate) async fn from_now(admin: &mut Connection, bytes_max: u64) -> Result<Cap, Error> {
        Ok(Cap::new(position(admin).await?, bytes_max))
    }

    /// Asks where the log is.
    pub(crate) async fn look(self, admin: &mut Connection) -> Result<(), Error> {
        let position = position(admin).await?;
        self.ensure(position, admin.server())
    }

    /// Ends everything when the log has come too far.
    ///
    /// # Errors
    /// [`Error::Refused`], with what to do.
    pub(crate) fn ensure(self, position: u64, server: &str) -> Result<(), Error> {
        let written = position.saturating_sub(self.begin);
        if written <= self.bytes_max {
            return Ok(());
        }
        Err(Error::Refused(format!(
            "{server}: {} of log were written since this began, by it and by others, and no more \
             than {} may be; ask for less with fewer rows, or allow more with --max-log",
            bytes(written),
            bytes(self.bytes_max)
        )))
    }
}

async fn position(admin: &mut Connection) -> Result<u64, Error> {
    let name = admin.server().to_owned();
    let failed = || trying("see how far the log is", &name);
    let answer = admin.simple_query("SELECT pg_current_wal_insert_lsn()").await;
    let answer = answer.map_err(failed())?;
    let Some(row) = answer.first().and_then(|set| set.rows.first()) else { return Ok(0) };
    Ok(row.parse::<Lsn>(0).map_err(failed())?.0)
}
