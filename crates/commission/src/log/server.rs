//! What server it is, and whether it should be measured at all.

use super::{Demand, trying};
use crate::Error;
use crate::report::Fact;
use crate::room::Room;
use crate::units::bytes;
use farshore_pg::{Connection, Row};
use std::path::{Path, PathBuf};

/// Settings that the figures depend on.
const SETTINGS: [&str; 17] = [
    "fsync",
    "synchronous_commit",
    "synchronous_standby_names",
    "wal_sync_method",
    "wal_level",
    "wal_buffers",
    "wal_compression",
    "wal_segment_size",
    "wal_writer_delay",
    "full_page_writes",
    "commit_delay",
    "shared_buffers",
    "max_wal_size",
    "checkpoint_timeout",
    "archive_mode",
    "data_checksums",
    "track_wal_io_timing",
];
/// Sessions beside the clients: ours that ask, watch and clean up.
const OWN_SESSIONS: u64 = 3;
/// Sessions that are left to whoever comes.
const SPARE_SESSIONS: u64 = 2;
/// Log that may be kept on a server whose disk cannot be looked at: this much is taken for harmless.
const KEPT_BLINDLY_MAX: u64 = 1 << 30;

/// What a server said of itself.
#[derive(Debug)]
pub struct Server {
    /// Without secrets, for messages.
    name: String,
    /// As 180004.
    pub version: u32,
    version_text: String,
    database: String,
    role: String,
    is_standby: bool,
    is_read_only: bool,
    may_create: bool,
    /// Those that are not kept for administrators.
    free_sessions: u64,
    /// Publications that every table belongs to, also the scratch schema's.
    publications: Vec<String>,
    slots: Vec<String>,
    /// Megabytes that the log may grow to between checkpoints, as bytes.
    max_wal_bytes: u64,
    settings: Vec<Fact>,
    /// Names of standbys that commits wait for.
    pub standbys: String,
    /// Standbys that are connected.
    pub connected: Vec<Standby>,
    /// Where its files are, where it says so.
    data_directory: Option<PathBuf>,
    /// Whether it runs on this machine.
    pub is_local: bool,
    /// Whether it measures how long writes and flushes take.
    pub times_io: bool,
}

/// A standby, as the server tells of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Standby {
    /// Its application_name; absent where the role may not see it.
    pub name: Option<String>,
    /// Commits wait for it.
    pub is_waited_for: bool,
    /// It is the near end of a Farshore mirror, by its name or its slot's.
    pub is_mirror: bool,
}

impl Server {
    /// Asks.
    pub async fn ask(admin: &mut Connection) -> Result<Server, Error> {
        let name = admin.server().to_owned();
        let version = admin.server_version();
        Server::ask_all(admin, name.clone(), version)
            .await
            .map_err(trying("ask about the server", &name))
    }

    async fn ask_all(
        admin: &mut Connection,
        name: String,
        version: u32,
    ) -> Result<Server, farshore_pg::Error> {
        let facts = "SELECT current_setting('server_version'), current_database(), current_user, \
             pg_is_in_recovery(), current_setting('default_transaction_read_only') = 'on', \
             has_database_privilege(current_database(), 'CREATE'), \
             current_setting('max_connections')::int8 \
               - current_setting('superuser_reserved_connections')::int8 \
               - coalesce(current_setting('reserved_connections', true)::int8, 0) \
               - (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'), \
             (SELECT setting::int8 FROM pg_settings WHERE name = 'max_wal_size') * 1048576, \
             inet_server_addr() IS NULL OR inet_server_addr() <<= '127.0.0.0/8' \
               OR inet_server_addr() = '::1', \
             pg_has_role('pg_read_all_settings', 'USAGE'), \
             current_setting('track_wal_io_timing') = 'on', \
             current_setting('synchronous_standby_names')";
        let rows = admin.query(facts, &[]).await?;
        let row = rows
            .first()
            .ok_or_else(|| farshore_pg::Error::Value("the answer has no row".to_owned()))?;
        let text = |index: usize| row.get(index).unwrap_or_default().to_owned();
        let mut server = Server {
            name,
            version,
            version_text: text(0),
            database: text(1),
            role: text(2),
            is_standby: row.parse_bool(3)?,
            is_read_only: row.parse_bool(4)?,
            may_create: row.parse_bool(5)?,
            free_sessions: row.parse::<i64>(6)?.max(0).unsigned_abs(),
            max_wal_bytes: row.parse::<i64>(7)?.max(0).unsigned_abs(),
            publications: Vec::new(),
            slots: Vec::new(),
            settings: Vec::new(),
            standbys: text(11),
            connected: Vec::new(),
            data_directory: None,
            is_local: row.parse_bool(8)?,
            times_io: row.parse_bool(10)?,
        };
        if row.parse_bool(9)? {
            let rows = admin.query("SELECT current_setting('data_directory')", &[]).await?;
            server.data_directory = names(&rows).into_iter().next().map(PathBuf::from);
        }
        let sql = "SELECT pubname FROM pg_publication WHERE puballtables ORDER BY 1";
        server.publications = names(&admin.query(sql, &[]).await?);
        let sql = "SELECT slot_name FROM pg_replication_slots ORDER BY 1";
        server.slots = names(&admin.query(sql, &[]).await?);
        let sql = "SELECT r.application_name, r.sync_state IN ('sync', 'quorum'), \
                   r.application_name LIKE 'farshore\\_%' \
                     OR coalesce(s.slot_name LIKE 'farshore\\_mirror\\_%', false) \
                   FROM pg_stat_replication r \
                   LEFT JOIN pg_replication_slots s ON s.active_pid = r.pid \
                   WHERE s.slot_type IS DISTINCT FROM 'logical' ORDER BY 1";
        for row in admin.query(sql, &[]).await? {
            server.connected.push(Standby {
                // Who may not see other sessions sees nothing but that they are there.
                name: row.get(0).map(str::to_owned),
                is_waited_for: row.get(1) == Some("t"),
                is_mirror: row.get(2) == Some("t"),
            });
        }
        let wanted: Vec<String> = SETTINGS.iter().map(|name| format!("'{name}'")).collect();
        let sql = format!(
            "SELECT name, setting, coalesce(unit, '') FROM pg_settings WHERE name IN ({}) ORDER BY name",
            wanted.join(", ")
        );
        for row in admin.query(&sql, &[]).await? {
            let value = |index: usize| row.get(index).unwrap_or_default();
            let shown = match (value(1), value(2)) {
                ("", _) => "(empty)".to_owned(),
                (setting, "8kB") => in_bytes(setting, 8_192),
                (setting, "kB") => in_bytes(setting, 1_024),
                (setting, "MB") => in_bytes(setting, 1 << 20),
                (setting, "B") => in_bytes(setting, 1),
                (setting, unit) => format!("{setting} {unit}").trim_end().to_owned(),
            };
            server.settings.push(Fact::new(value(0), shown));
        }
        Ok(server)
    }

    /// Refuses where it would do harm, or cannot work.
    ///
    /// # Errors
    /// [`Error::Refused`], with what to do.
    pub fn ensure_fit(&self, demand: Demand) -> Result<(), Error> {
        let refuse = |what: String| Err(Error::Refused(format!("{}: {what}", self.name)));
        if self.version < 140_000 {
            return refuse(format!(
                "PostgreSQL {} does not count what it writes to its log; 14 and later do",
                self.version_text
            ));
        }
        if self.is_standby {
            return refuse(
                "it is a standby, and writes no log of its own; name its primary".to_owned(),
            );
        }
        if self.is_read_only {
            return refuse(
                "default_transaction_read_only is on for this role or database: it is not to be \
                 written to. Use another role or database, or set it off"
                    .to_owned(),
            );
        }
        if !self.may_create {
            return refuse(format!(
                "role {role} may not make a schema in database {database}; as its owner: GRANT CREATE \
                 ON DATABASE {database} TO {role}",
                role = farshore_pg::quote_identifier(&self.role),
                database = farshore_pg::quote_identifier(&self.database)
            ));
        }
        if let (Some(publication), Some(_)) = (self.publications.first(), demand.planned_bytes) {
            return refuse(format!(
                "publication {publication} publishes all tables of database {}, also those that this \
                 would make, and its subscribers do not have them; name another database of the same \
                 server",
                self.database
            ));
        }
        // The first of our own is there already.
        let sessions = u64::from(demand.clients) + OWN_SESSIONS - 1;
        if sessions + SPARE_SESSIONS > self.free_sessions {
            return refuse(format!(
                "{sessions} more sessions are needed and {SPARE_SESSIONS} must stay free for others, but \
                 max_connections leaves {} beside those that are reserved \
                 (superuser_reserved_connections, reserved_connections); ask for fewer with \
                 --clients where there is more than one, end sessions, or raise max_connections",
                self.free_sessions
            ));
        }
        self.ensure_room(demand)
    }

    fn ensure_room(&self, demand: Demand) -> Result<(), Error> {
        let refuse = |what: String| Err(Error::Refused(format!("{}: {what}", self.name)));
        // What a script writes nobody knows before; the cap on the log holds all the same.
        let Some(planned) = demand.planned_bytes else { return Ok(()) };
        if planned > demand.log_bytes_max {
            return refuse(format!(
                "about {} of log would be written in all, and no more than {} may be; ask for less \
                 with --rows, --row-size or --repeats, or allow more with --max-log",
                bytes(planned),
                bytes(demand.log_bytes_max)
            ));
        }
        let kept = self.kept_bytes(planned);
        match self.rooms() {
            Some((data, log)) => {
                let (data, log) = (data?, log?);
                let wanted = demand.table_bytes.saturating_add(kept);
                // Where both are on one file system it has to take both.
                for (room, what) in [(data, "its data"), (log, "its log")] {
                    if !room.may_take(wanted) {
                        return refuse(format!(
                            "the disk of {what} has {} free, about {} are needed and {} must stay \
                             free; ask for less with --rows or --row-size",
                            bytes(room.free),
                            bytes(wanted),
                            bytes(room.must_stay_free())
                        ));
                    }
                }
                Ok(())
            }
            None => match self.who_keeps_log() {
                Some(keeper) if kept > KEPT_BLINDLY_MAX => refuse(format!(
                    "{keeper} may keep all of about {} of log that would be written, and the free \
                     space of the server's disk cannot be seen from here; ask for less than {} with \
                     --rows, or run it on the server's machine with a role that may read \
                     data_directory (pg_read_all_settings)",
                    bytes(planned),
                    bytes(KEPT_BLINDLY_MAX)
                )),
                Some(_) | None => Ok(()),
            },
        }
    }

    /// Whatever may keep log beyond the next checkpoints: slots, and an archive that takes none.
    fn who_keeps_log(&self) -> Option<String> {
        let is_archived =
            self.settings.iter().any(|s| s.name == "archive_mode" && s.value != "off");
        let slots = (!self.slots.is_empty()).then(|| format!("slot {}", self.slots.join(", ")));
        let archive =
            is_archived.then(|| "an archive (archive_mode) that fails or falls behind".to_owned());
        let keepers: Vec<String> = slots.into_iter().chain(archive).collect();
        (!keepers.is_empty()).then(|| keepers.join(", or "))
    }

    /// Bytes of log that may lie there at once.
    fn kept_bytes(&self, planned: u64) -> u64 {
        if self.who_keeps_log().is_some() {
            planned
        } else {
            planned.min(self.max_wal_bytes.saturating_mul(2))
        }
    }

    /// Free space of its data and of its log, where they can be looked at from here.
    fn rooms(&self) -> Option<(Result<Room, Error>, Result<Room, Error>)> {
        let data = self.data_directory.as_deref().filter(|_| self.is_local)?;
        let log = data.join("pg_wal");
        let can_be_seen = |path: &Path| path.is_dir();
        (can_be_seen(data) && can_be_seen(&log)).then(|| (Room::of(data), Room::of(&log)))
    }

    /// What it is, for a report.
    pub fn facts(&self) -> Vec<Fact> {
        let mut facts = vec![Fact::new("PostgreSQL", &self.version_text)];
        facts.extend(self.settings.iter().cloned());
        facts
    }

    /// What has to be known about the figures.
    pub fn remarks(&self, log_bytes_max: u64) -> Vec<String> {
        let setting = |name: &str| {
            self.settings.iter().find(|s| s.name == name).map(|s| s.value.as_str()).unwrap_or("")
        };
        let mut remarks = Vec::new();
        if setting("fsync") == "off" {
            remarks
                .push("fsync is off: nothing here is durable, and commits wait for nothing".into());
        }
        if !matches!(setting("synchronous_commit"), "on" | "local") {
            remarks.push(format!(
                "synchronous_commit is {}: a commit does not wait for just the flush here",
                setting("synchronous_commit")
            ));
        }
        if matches!(setting("wal_sync_method"), "open_sync" | "open_datasync") {
            remarks.push(format!(
                "wal_sync_method is {}: every write is a flush, and flushes are not counted apart",
                setting("wal_sync_method")
            ));
        }
        if !self.times_io {
            remarks.push(
                "track_wal_io_timing is off: with it the server also tells how long its writes and \
                 flushes took"
                    .into(),
            );
        }
        if self.rooms().is_none() {
            remarks.push(format!(
                "the free space of the server's disk cannot be seen from here; it ends after {} of log",
                bytes(log_bytes_max)
            ));
        }
        remarks
    }
}

fn in_bytes(setting: &str, unit: u64) -> String {
    match setting.parse::<u64>() {
        Ok(number) => bytes(number.saturating_mul(unit)),
        // -1 and the like have a meaning of their own.
        Err(_) => setting.to_owned(),
    }
}

fn names(rows: &[Row]) -> Vec<String> {
    rows.iter().filter_map(|row| row.get(0)).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1 << 30;

    /// A server whose disk cannot be seen.
    fn server(slots: &[&str], archive_mode: &str) -> Server {
        Server {
            name: "server s".to_owned(),
            version: 180_000,
            version_text: "18.0".to_owned(),
            database: "d".to_owned(),
            role: "r".to_owned(),
            is_standby: false,
            is_read_only: false,
            may_create: true,
            free_sessions: 90,
            publications: Vec::new(),
            slots: slots.iter().map(|slot| (*slot).to_owned()).collect(),
            max_wal_bytes: GB,
            settings: vec![Fact::new("archive_mode", archive_mode)],
            standbys: String::new(),
            connected: Vec::new(),
            data_directory: None,
            is_local: false,
            times_io: true,
        }
    }

    #[test]
    fn whatever_keeps_log_counts_where_the_disk_cannot_be_seen() {
        let demand = |planned| Demand {
            clients: 1,
            planned_bytes: Some(planned),
            table_bytes: 0,
            log_bytes_max: 32 * GB,
        };
        for (slots, archive_mode, keepers) in [
            (&["a", "b"][..], "off", &["slot a, b"][..]),
            (&[], "on", &["archive_mode"]),
            (&[], "always", &["archive_mode"]),
            (&["a"], "on", &["slot a", "archive_mode"]),
        ] {
            let server = server(slots, archive_mode);
            assert!(server.ensure_fit(demand(GB)).is_ok(), "{slots:?} {archive_mode}");
            let Err(Error::Refused(why)) = server.ensure_fit(demand(2 * GB)) else {
                panic!("not refused: {slots:?} {archive_mode}")
            };
            assert!(keepers.iter().all(|keeper| why.contains(keeper)), "{why}");
        }
        // Checkpoints remove it.
        assert!(server(&[], "off").ensure_fit(demand(30 * GB)).is_ok());
    }
}
