use super::{quote_name, quote_string};
use crate::Error;
use crate::connection::Connection;
use crate::query::{ResultSet, Row};
use farshore_model::Lsn;

/// What to do with the snapshot that belongs to a new slot's consistent point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlotSnapshot {
    /// Export it under a name, for `SET TRANSACTION SNAPSHOT` in other sessions. It lives until
    /// this session's next command, or its end.
    Export,
    /// Use it for the transaction that is open on this connection. It must be a fresh one, begun
    /// with `BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY` (newer servers insist on the last
    /// two words).
    Use,
    /// Nothing.
    Nothing,
}

/// How to make a logical slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlotOptions {
    /// It is dropped with the session.
    pub temporary: bool,
    /// What to do with its snapshot.
    pub snapshot: SlotSnapshot,
    /// It is synchronised to standbys, so that it survives a failover. PostgreSQL 17 and later.
    pub failover: bool,
    /// Prepared transactions are decoded when they are prepared.
    pub two_phase: bool,
}

impl Default for SlotOptions {
    /// Permanent, without a snapshot, not synchronised, without two-phase decoding.
    fn default() -> SlotOptions {
        SlotOptions {
            temporary: false,
            snapshot: SlotSnapshot::Nothing,
            failover: false,
            two_phase: false,
        }
    }
}

/// A slot that was just made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreatedSlot {
    /// Its name.
    pub name: String,
    /// Where a stream can start, and what its snapshot shows: all commits before, none after.
    pub consistent_point: Lsn,
    /// The snapshot's name, if it was exported.
    pub snapshot: Option<String>,
}

/// A physical slot, as its server tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PhysicalSlot {
    /// It keeps the log from here on; `None` if it keeps none.
    pub restart: Option<Lsn>,
    /// The timeline of that log.
    pub timeline: Option<u32>,
}

/// What `IDENTIFY_SYSTEM` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdentifySystem {
    /// The cluster's identity, the same for all its standbys.
    pub system_id: String,
    /// The current timeline.
    pub timeline: u32,
    /// Where the log is flushed to now.
    pub xlogpos: Lsn,
    /// The database this connection is for; `None` in physical replication.
    pub dbname: Option<String>,
}

/// The command for `name` on a server of version `server_version`.
fn create_command(name: &str, options: SlotOptions, server_version: u32) -> String {
    let mut sql = format!("CREATE_REPLICATION_SLOT {}", quote_name(name));
    if options.temporary {
        sql.push_str(" TEMPORARY");
    }
    sql.push_str(" LOGICAL pgoutput");
    if server_version < 150_000 {
        sql.push_str(match options.snapshot {
            SlotSnapshot::Export => " EXPORT_SNAPSHOT",
            SlotSnapshot::Use => " USE_SNAPSHOT",
            SlotSnapshot::Nothing => " NOEXPORT_SNAPSHOT",
        });
        if options.two_phase {
            sql.push_str(" TWO_PHASE");
        }
        return sql;
    }
    sql.push_str(match options.snapshot {
        SlotSnapshot::Export => " (SNAPSHOT 'export'",
        SlotSnapshot::Use => " (SNAPSHOT 'use'",
        SlotSnapshot::Nothing => " (SNAPSHOT 'nothing'",
    });
    if options.two_phase {
        sql.push_str(", TWO_PHASE");
    }
    if options.failover {
        sql.push_str(", FAILOVER");
    }
    sql.push(')');
    sql
}

impl Connection {
    /// Makes a logical slot for pgoutput. Waits for the transactions that are open on the server
    /// now, so it can take as long as they do; `cancel_token` ends the wait.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a failover slot before PostgreSQL 17 or a two-phase slot before
    /// 14, and the server's: 42710 if there is a slot of that name, 53400 if
    /// `max_replication_slots` are in use.
    pub async fn create_logical_slot(
        &mut self,
        name: &str,
        options: SlotOptions,
    ) -> Result<CreatedSlot, Error> {
        for (wanted, what, since) in
            [(options.failover, "failover slots", 17), (options.two_phase, "two-phase slots", 14)]
        {
            if wanted && self.server_version() < since * 10_000 {
                let major = self.server_version() / 10_000;
                return Err(Error::Unsupported {
                    server: self.server().to_owned(),
                    reason: format!("PostgreSQL {major} has no {what}; they came with {since}"),
                });
            }
        }
        let sql = create_command(name, options, self.server_version());
        let row = only_row(self.simple_query(&sql).await?, "CREATE_REPLICATION_SLOT")?;
        Ok(CreatedSlot {
            name: required(&row, "slot_name")?.to_owned(),
            consistent_point: lsn(&row, "consistent_point")?,
            snapshot: row.by_name("snapshot_name").map(str::to_owned),
        })
    }

    /// Makes a physical slot that keeps the log from now on (`RESERVE_WAL`).
    ///
    /// # Errors
    /// The server's: 42710 if there is a slot of that name, 53400 if `max_replication_slots` are in
    /// use.
    pub async fn create_physical_slot(&mut self, name: &str) -> Result<(), Error> {
        let sql = physical_slot_command(name, self.server_version());
        self.simple_query(&sql).await?;
        Ok(())
    }

    /// A physical slot; `None` if there is none of that name. PostgreSQL 15 and later.
    ///
    /// # Errors
    /// The server's: 42601 if it knows no such question.
    pub async fn read_physical_slot(&mut self, name: &str) -> Result<Option<PhysicalSlot>, Error> {
        let sql = format!("READ_REPLICATION_SLOT {}", quote_name(name));
        let row = only_row(self.simple_query(&sql).await?, "READ_REPLICATION_SLOT")?;
        if row.by_name("slot_type").is_none() {
            return Ok(None);
        }
        let restart = row.by_name("restart_lsn").map(|_| lsn(&row, "restart_lsn")).transpose()?;
        let timeline = row.by_name("restart_tli").and_then(|timeline| timeline.parse().ok());
        Ok(Some(PhysicalSlot { restart, timeline }))
    }

    /// How a timeline came about: the text of its history file, as `pg_wal` has it.
    ///
    /// # Errors
    /// The server's: 58P01 if it has no such file. Timeline 1 never has one.
    pub async fn timeline_history(&mut self, timeline: u32) -> Result<String, Error> {
        let sql = format!("TIMELINE_HISTORY {timeline}");
        let row = only_row(self.simple_query(&sql).await?, "TIMELINE_HISTORY")?;
        required(&row, "content").map(str::to_owned)
    }

    /// Drops a slot; with `wait`, waits until whoever uses it has let go.
    ///
    /// # Errors
    /// The server's: 42704 if there is no such slot, 55006 if it is in use and `wait` is not set.
    pub async fn drop_slot(&mut self, name: &str, wait: bool) -> Result<(), Error> {
        let wait = if wait { " WAIT" } else { "" };
        let sql = format!("DROP_REPLICATION_SLOT {}{wait}", quote_name(name));
        self.simple_query(&sql).await?;
        Ok(())
    }

    /// Asks who the server is and where its log is.
    ///
    /// # Errors
    /// The server's.
    pub async fn identify_system(&mut self) -> Result<IdentifySystem, Error> {
        let row = only_row(self.simple_query("IDENTIFY_SYSTEM").await?, "IDENTIFY_SYSTEM")?;
        Ok(IdentifySystem {
            system_id: required(&row, "systemid")?.to_owned(),
            timeline: required(&row, "timeline")?
                .parse()
                .map_err(|_| Error::Value("the timeline is not a number".into()))?,
            xlogpos: lsn(&row, "xlogpos")?,
            dbname: row.by_name("dbname").map(str::to_owned),
        })
    }

    /// `START_REPLICATION … LOGICAL` with pgoutput's options, values as they are (this quotes
    /// them): `proto_version`, `publication_names`, `streaming`, …
    pub(super) fn logical_command(
        slot: &str,
        start: Lsn,
        options: &[(&str, &str)],
    ) -> Result<String, Error> {
        let mut sql = format!("START_REPLICATION SLOT {} LOGICAL {start}", quote_name(slot));
        let options = options
            .iter()
            .map(|(name, value)| Ok(format!("{} {}", quote_name(name), quote_string(value)?)))
            .collect::<Result<Vec<_>, Error>>()?;
        if !options.is_empty() {
            sql.push_str(&format!(" ({})", options.join(", ")));
        }
        Ok(sql)
    }

    /// `START_REPLICATION … PHYSICAL`.
    pub(super) fn physical_command(
        slot: Option<&str>,
        start: Lsn,
        timeline: Option<u32>,
    ) -> String {
        let slot = slot.map_or(String::new(), |slot| format!(" SLOT {}", quote_name(slot)));
        let timeline = timeline.map_or(String::new(), |timeline| format!(" TIMELINE {timeline}"));
        format!("START_REPLICATION{slot} PHYSICAL {start}{timeline}")
    }
}

/// The command for a physical slot on a server of version `server_version`.
fn physical_slot_command(name: &str, server_version: u32) -> String {
    let reserve = if server_version < 150_000 { "RESERVE_WAL" } else { "(RESERVE_WAL)" };
    format!("CREATE_REPLICATION_SLOT {} PHYSICAL {reserve}", quote_name(name))
}

fn only_row(mut results: Vec<ResultSet>, command: &str) -> Result<Row, Error> {
    results
        .pop()
        .and_then(|mut result| result.rows.pop())
        .ok_or_else(|| Error::Value(format!("{command} returned no row")))
}

pub(super) fn required<'a>(row: &'a Row, column: &str) -> Result<&'a str, Error> {
    row.by_name(column).ok_or_else(|| Error::Value(format!("there is no {column}")))
}

pub(super) fn lsn(row: &Row, column: &str) -> Result<Lsn, Error> {
    required(row, column)?.parse().map_err(|e| Error::Value(format!("{column}: {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_made_in_each_versions_syntax() {
        let options = SlotOptions {
            snapshot: SlotSnapshot::Export,
            two_phase: true,
            ..SlotOptions::default()
        };
        assert_eq!(
            create_command("s", options, 140_005),
            "CREATE_REPLICATION_SLOT \"s\" LOGICAL pgoutput EXPORT_SNAPSHOT TWO_PHASE"
        );
        assert_eq!(
            create_command("s", options, 150_000),
            "CREATE_REPLICATION_SLOT \"s\" LOGICAL pgoutput (SNAPSHOT 'export', TWO_PHASE)"
        );
        let options = SlotOptions { failover: true, ..SlotOptions::default() };
        assert_eq!(
            create_command("s", options, 170_000),
            "CREATE_REPLICATION_SLOT \"s\" LOGICAL pgoutput (SNAPSHOT 'nothing', FAILOVER)"
        );
        let options = SlotOptions { temporary: true, ..SlotOptions::default() };
        assert_eq!(
            create_command("s", options, 140_005),
            "CREATE_REPLICATION_SLOT \"s\" TEMPORARY LOGICAL pgoutput NOEXPORT_SNAPSHOT"
        );
    }

    #[test]
    fn physical_slots_are_made_in_each_versions_syntax() {
        assert_eq!(
            physical_slot_command("s", 140_005),
            "CREATE_REPLICATION_SLOT \"s\" PHYSICAL RESERVE_WAL"
        );
        assert_eq!(
            physical_slot_command("s", 150_000),
            "CREATE_REPLICATION_SLOT \"s\" PHYSICAL (RESERVE_WAL)"
        );
    }

    #[test]
    fn streams_are_started_with_everything_quoted() {
        assert_eq!(
            Connection::logical_command(
                "s",
                Lsn(0x16_B374_D848),
                &[("proto_version", "1"), ("publication_names", "\"it's\"")]
            )
            .unwrap(),
            "START_REPLICATION SLOT \"s\" LOGICAL 16/B374D848 \
             (\"proto_version\" '1', \"publication_names\" '\"it''s\"')"
        );
        assert_eq!(
            Connection::physical_command(Some("s"), Lsn(1), Some(3)),
            "START_REPLICATION SLOT \"s\" PHYSICAL 0/1 TIMELINE 3"
        );
        assert_eq!(
            Connection::physical_command(None, Lsn(1), None),
            "START_REPLICATION PHYSICAL 0/1"
        );
    }
}
