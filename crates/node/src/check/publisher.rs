//! The publisher: its settings, our rights there, free places, and the slot.

use super::published::{self, Published};
use super::server::Server;
use super::{Finding, Findings, labels, some_of, tables};
use crate::config::Publication;
use farshore_apply::postgres::foreign_keys::ForeignKeys;
use farshore_capture::CaptureError;
use farshore_capture::publication::{PublicationSpec, TableName, Unfit};
use farshore_capture::slot::{self, Begun};
use farshore_capture::types::TypeCatalog;
use farshore_model::quote_identifier;
use farshore_pg::{Connection, Error, Mode};
use std::collections::{BTreeMap, BTreeSet};

/// The SQLSTATE of a question that a lock would keep waiting for longer than it may.
const LOCKED: &str = "55P03";

/// Looks at a publisher, and returns what it would publish if it could be asked, and the connection
/// on which it was. `begun` tells what this site has done with its slot before.
pub async fn check(
    publication: &Publication,
    begun: Begun,
    findings: &mut Findings,
) -> Option<(Published, Connection)> {
    let connected = publication.spec.connect(Mode::Sql).await;
    check_on(connected, publication, begun, Unfit::Refuse, findings).await
}

/// As [`check`], for an agent that is to start: somebody who has a table for himself does not hold
/// up the others. Then what is published is not known here, and the agent finds out by itself. Nor
/// does a table that is gone, or somebody else's by now, hold up those that were carried before:
/// the agent tells of it, as it does when that happens while it runs.
pub async fn check_soon(
    publication: &Publication,
    begun: Begun,
    findings: &mut Findings,
) -> Option<(Published, Connection)> {
    let connected = publication.spec.connect_to_ask().await;
    let unfit = if begun == Begun::Made { Unfit::LeaveOut } else { Unfit::Refuse };
    let (published, mut sql) = check_on(connected, publication, begun, unfit, findings).await?;
    let waits = sql.simple_query("SET lock_timeout = 0").await;
    // The agent makes another connection.
    waits.ok().map(|_| (published, sql))
}

async fn check_on(
    connected: Result<Connection, CaptureError>,
    publication: &Publication,
    begun: Begun,
    unfit: Unfit,
    findings: &mut Findings,
) -> Option<(Published, Connection)> {
    let mut sql = match connected {
        Ok(sql) => sql,
        Err(error) => {
            unreachable_server(&error, findings);
            return None;
        }
    };
    match look(publication, begun, unfit, &mut sql, findings).await {
        Ok(published) => published.map(|published| (published, sql)),
        Err(error) if error.sqlstate() == Some(LOCKED) => {
            findings.note(format!("not looked at to the end: {error}"));
            None
        }
        Err(error) => {
            findings.cannot_look("publisher", &error, error.is_transient());
            None
        }
    }
}

async fn look(
    publication: &Publication,
    begun: Begun,
    unfit: Unfit,
    sql: &mut Connection,
    findings: &mut Findings,
) -> Result<Option<Published>, Error> {
    let spec = &publication.spec;
    let server = Server::ask(sql).await?;
    findings.note(format!(
        "{} answers, version {}",
        spec.source.redacted(),
        sql.server_version() / 10_000
    ));
    server.check("publisher", "source", findings);
    server.check_connections("publisher", 4, findings);
    let places = check_settings(spec, begun, sql, findings).await?;
    check_replication(spec, &server, findings).await;
    if findings.has_errors() && server.in_recovery {
        return Ok(None);
    }
    let wanted = match published::expand(spec, sql, unfit).await {
        Ok(wanted) => wanted,
        Err(CaptureError::Publisher { error, .. }) if error.sqlstate() == Some(LOCKED) => {
            return Err(error);
        }
        Err(error) => {
            findings.agent_error(&error, error.is_transient());
            return Ok(None);
        }
    };
    let is_named = |table: &TableName| spec.tables.iter().any(|pattern| pattern.matches(table));
    let unnamed: Vec<String> = wanted
        .iter()
        .filter(|(table, _)| !spec.tables.is_empty() && !is_named(table))
        .map(|(table, _)| table.to_string())
        .collect();
    if let (Some(adopted), false) = (&spec.adopt_publication, unnamed.is_empty()) {
        findings.warning(
            format!(
                "publication {} publishes more than `tables` names, and all of it is carried: {}",
                quote_identifier(adopted),
                some_of(&unnamed)
            ),
            "An adopted publication is carried as it is, and `tables` names sequences only: change \
             the publication on the publisher, or leave `tables` out",
        );
    }
    if let Some(missing) = spec.not_published(sql).await? {
        findings.warning(
            missing,
            "If that is not meant: ALTER PUBLICATION … SET (publish = 'insert, update, delete, \
             truncate'), and copy its tables anew",
        );
    }
    let named = tables::Named::new(wanted.iter().map(|(name, _)| name));
    let catalogue = tables::named(sql, &named).await?;
    let mut tables =
        published::check(spec, &server, sql, unfit, wanted, &catalogue, findings).await?;
    match published::leave_out_what_others_stand_for(spec, sql, unfit, &mut tables).await {
        Ok(()) => {}
        Err(CaptureError::Publisher { error, .. }) if error.sqlstate() == Some(LOCKED) => {
            return Err(error);
        }
        Err(error) => {
            findings.agent_error(&error, error.is_transient());
            return Ok(None);
        }
    }
    published::check_leaves(&tables, sql, findings).await?;
    published::check_hashed(&tables, sql, findings).await?;
    if !server.in_recovery
        && let Err(error) = slot::look_at_slot(spec, sql, begun).await
    {
        findings.agent_error(&error, error.is_transient());
    }
    let foreign_keys = ForeignKeys::load(sql).await.ok();
    let columns = || tables.iter().flat_map(|(_, table)| &table.columns);
    let mut catalog = TypeCatalog::default();
    catalog.describe(sql, columns().map(|column| column.type_oid)).await?;
    let types = catalog.closure(columns().map(|column| column.type_oid));
    let labels = labels::read(sql, &types).await?;
    Ok(Some(Published { server: Some(server), tables, types, labels, foreign_keys, places }))
}

fn unreachable_server(error: &CaptureError, findings: &mut Findings) {
    let CaptureError::Publisher { error: cause, .. } = error else {
        findings.agent_error(error, error.is_transient());
        return;
    };
    let remedy = remedy_for(cause, "source");
    if error.is_transient() {
        findings.passing_error(error.to_string(), remedy);
    } else {
        findings.error(error.to_string(), remedy);
    }
}

/// What to do when a server cannot be talked to; `key` is where the site file names it.
pub fn remedy_for(error: &Error, key: &str) -> String {
    let said = error.server_error().map_or("", |said| said.message.as_str());
    match (error.sqlstate(), error) {
        (Some("08P01"), _) if said.contains("startup parameter") => {
            format!("A connection pooler answers there: name the server itself in `{key}`")
        }
        (Some("08P01"), Error::Auth { .. }) => format!(
            "A connection pooler answers there: mend what it is configured with, or correct `{key}`"
        ),
        (Some("28P01"), _) => "To set another: ALTER ROLE … PASSWORD on that server".to_owned(),
        (Some("28000"), _) => format!(
            "Create the role there (or let it log in: ALTER ROLE … LOGIN), or correct `{key}`; or let \
             it in with a line in pg_hba.conf"
        ),
        (Some("3D000"), _) => format!("Create the database, or correct `{key}`"),
        (Some("53300"), _) if said.contains("max_wal_senders") => {
            "Raise max_wal_senders there (with wal_level = replica or logical; a restart), or end \
             another replication connection"
                .to_owned()
        }
        (Some("53300"), _) => {
            "Raise max_connections, or the CONNECTION LIMIT that the role or the \
             database has, or close connections"
                .to_owned()
        }
        // It has been there all the time: nothing to wait for.
        (Some("55000"), _) if error.server_error().is_some_and(|said| said.is_fatal()) => {
            format!(
                "Let the database be connected to (ALTER DATABASE … ALLOW_CONNECTIONS true), or \
                 correct `{key}`"
            )
        }
        (Some("57P03"), _) => "Wait until it has started".to_owned(),
        (Some("42501"), _) => "Grant the role CONNECT on the database".to_owned(),
        (_, Error::Tls { .. }) => {
            format!(
                "Correct sslmode, sslrootcert, sslcert or sslkey in `{key}`, or the server's TLS"
            )
        }
        (_, Error::Auth { .. }) => {
            "Correct the password in PGPASSWORD, ~/.pgpass or the service file, or the server's \
             pg_hba.conf"
                .to_owned()
        }
        (_, _) => format!("Correct `{key}`, or start that server"),
    }
}

/// Replication slots and walsenders: how many are free on a server, and how many more a publication
/// takes there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Places {
    slots_free: i64,
    senders_free: i64,
    slot: i64,
    sender: i64,
    /// One more of each, while tables are copied.
    copies: i64,
}

impl Places {
    /// What `count` publications of one server, of which this is the sum, lack together. One that
    /// has enough may not leave enough for the others. Copies take turns.
    fn lacking(&self, count: usize) -> Option<(String, String)> {
        let mut missing = Vec::new();
        let mut remedies = Vec::new();
        for (what, setting, free, needed) in [
            ("replication slots", "max_replication_slots", self.slots_free, self.slot),
            ("walsenders", "max_wal_senders", self.senders_free, self.sender),
        ] {
            let needed = needed + self.copies;
            if free < needed {
                missing.push(format!("{} {what} are free, {needed} needed", free.max(0)));
                remedies.push(format!("ALTER SYSTEM SET {setting} to more"));
            }
        }
        if missing.is_empty() {
            return None;
        }
        Some((
            format!("{} for its {count} publications together", missing.join(" and ")),
            format!("{}, and restart that server", remedies.join(" and ")),
        ))
    }
}

/// Looks whether each server has places for all of its publications.
pub fn check_places(all: &[(&Publication, Places, String)]) -> Vec<Finding> {
    let mut servers: BTreeMap<&str, Vec<(&Publication, Places)>> = BTreeMap::new();
    for (publication, places, server) in all {
        servers.entry(server).or_default().push((publication, *places));
    }
    let mut found = Vec::new();
    for publications in servers.values().filter(|publications| publications.len() > 1) {
        let sum = |of: fn(&Places) -> i64| publications.iter().map(|(_, places)| of(places)).sum();
        let least = |of: fn(&Places) -> i64| {
            publications.iter().map(|(_, places)| of(places)).min().unwrap_or_default()
        };
        let together = Places {
            slots_free: least(|places| places.slots_free),
            senders_free: least(|places| places.senders_free),
            slot: sum(|places| places.slot),
            sender: sum(|places| places.sender),
            copies: publications.iter().map(|(_, places)| places.copies).max().unwrap_or_default(),
        };
        // What one of them lacks by itself has been said of it.
        let is_said = publications.iter().any(|(_, places)| places.lacking(1).is_some());
        let Some((what, remedy)) = together.lacking(publications.len()).filter(|_| !is_said) else {
            continue;
        };
        let names: Vec<String> =
            publications.iter().map(|(publication, _)| publication.spec.name.clone()).collect();
        let Some((first, _)) = publications.first() else { continue };
        let mut findings = Findings::about(format!("publisher {}", first.spec.source.redacted()));
        findings.passing_error(format!("{what}: {}", some_of(&names)), remedy);
        found.append(&mut findings.all);
    }
    found
}

/// Settings that capture needs.
async fn check_settings(
    spec: &PublicationSpec,
    begun: Begun,
    sql: &mut Connection,
    findings: &mut Findings,
) -> Result<Option<Places>, Error> {
    let rows = sql
        .query(
            "SELECT current_setting('wal_level'), \
               current_setting('max_replication_slots')::int - \
                 (SELECT count(*) FROM pg_replication_slots), \
               current_setting('max_wal_senders')::int - \
                 (SELECT count(*) FROM pg_stat_get_wal_senders()), \
               current_setting('max_slot_wal_keep_size'), current_setting('wal_keep_size'), \
               coalesce(current_setting('idle_replication_slot_timeout', true), '0'), \
               EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1), \
               EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1 AND active)",
            &[Some(&spec.slot_name())],
        )
        .await?;
    let Some(row) = rows.first() else { return Ok(None) };
    let text = |i: usize| row.get(i).unwrap_or_default();
    if text(0) == "logical" {
        findings.note("wal_level = logical");
    } else {
        findings.error(
            format!("wal_level = {} on the publisher", text(0)),
            "ALTER SYSTEM SET wal_level = logical, and restart that server",
        );
    }
    // While tables are copied, a snapshot needs one of each too.
    let places = Places {
        slots_free: row.parse(1)?,
        senders_free: row.parse(2)?,
        slot: i64::from(!row.parse_bool(6)?),
        sender: i64::from(!row.parse_bool(7)?),
        copies: i64::from(begun == Begun::Not),
    };
    let (free, slots) = (places.slots_free, places.slot + places.copies);
    if free < slots {
        findings.passing_error(
            format!("{} replication slots are free on the publisher, {slots} needed", free.max(0)),
            "ALTER SYSTEM SET max_replication_slots to more and restart that server, or drop \
             slots that nothing uses (SELECT slot_name FROM pg_replication_slots WHERE NOT active)",
        );
    } else if free == slots {
        findings.note("no replication slot is left over: far behind, it catches up more slowly");
    }
    let (free, senders) = (places.senders_free, places.sender + places.copies);
    if free < senders {
        findings.passing_error(
            format!("{} walsenders are free on the publisher, {senders} needed", free.max(0)),
            "ALTER SYSTEM SET max_wal_senders to more, and restart that server",
        );
    }
    if text(3) != "-1" {
        findings.warning(
            format!(
                "max_slot_wal_keep_size = {} (and wal_keep_size = {}): a slot that falls further \
                 behind is invalidated, and everything must be copied anew",
                text(3),
                text(4)
            ),
            "Make it larger than what the publisher writes in the longest time that Farshore may \
             be stopped, or ALTER SYSTEM SET max_slot_wal_keep_size = -1",
        );
    }
    if text(5) != "0" {
        findings.warning(
            format!(
                "idle_replication_slot_timeout = {}: a slot that Farshore does not read for that \
                 long is invalidated, and everything must be copied anew",
                text(5)
            ),
            "Make it longer than Farshore may be stopped, or ALTER SYSTEM SET \
             idle_replication_slot_timeout = 0",
        );
    }
    Ok(Some(places))
}

/// Slots of the publisher's database that a Farshore has made, that nobody reads, and that are not
/// among `known`: where a data_dir was lost, no folder tells of them.
pub async fn check_slots_left(
    spec: &PublicationSpec,
    sql: &mut Connection,
    known: &BTreeSet<String>,
    findings: &mut Findings,
) {
    let left = match sql.query(SLOTS_LEFT, &[]).await {
        Ok(left) => left,
        Err(error) => return findings.cannot_look("publisher", &error, error.is_transient()),
    };
    let left = left.iter().filter_map(|row| row.get(0)).filter(|slot| !known.contains(*slot));
    for slot in left {
        findings.warning(
            format!(
                "slot \"{slot}\" on {} is of no publication in this site file, and nobody reads it \
                 now: it keeps that server's log, without bound",
                spec.source.redacted()
            ),
            format!(
                "If it is another site's, start that; if its site is gone, or has lost its data_dir: \
                 SELECT pg_drop_replication_slot('{slot}')"
            ),
        );
    }
}

/// What [`check_slots_left`] asks. While somebody takes batches, from a copy of a slot, which slot is
/// not read cannot be told. On a standby slots are the primary's, and one that is lost keeps
/// nothing.
const SLOTS_LEFT: &str = "SELECT slot_name FROM pg_catalog.pg_replication_slots \
     WHERE slot_type = 'logical' AND plugin = 'pgoutput' AND NOT temporary AND NOT active \
     AND database = pg_catalog.current_database() AND slot_name LIKE 'farshore\\_%' \
     AND wal_status IS DISTINCT FROM 'lost' AND NOT pg_catalog.pg_is_in_recovery() \
     AND NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots AS batches WHERE batches.temporary \
       AND batches.slot_name LIKE 'farshore\\_batches\\_%' \
       AND batches.database = pg_catalog.current_database()) ORDER BY 1";

/// Whether the role may read the log: only a try tells, since services have ways of their own
/// beside the attribute REPLICATION.
async fn check_replication(spec: &PublicationSpec, server: &Server, findings: &mut Findings) {
    let error = match spec.connect(Mode::LogicalReplication).await {
        Ok(connection) => return connection.close().await,
        Err(error) => error,
    };
    let CaptureError::Publisher { error: cause, .. } = &error else { return };
    match cause.sqlstate() {
        // Said already, or about to be over.
        Some("53300") => {}
        Some("42501") => findings.error(
            format!("role {} may not replicate: {cause}", server.role_sql()),
            format!(
                "ALTER ROLE {0} REPLICATION (on Amazon RDS: GRANT rds_replication TO {0})",
                server.role_sql()
            ),
        ),
        Some("28000") => findings.error(
            format!("no replication connection: {cause}"),
            format!(
                "Let role {} into database {} with a line in pg_hba.conf (a line for database \
                 \"replication\" is not the one)",
                server.role_sql(),
                server.database_sql()
            ),
        ),
        _ if error.is_transient() => {
            findings
                .passing_error(format!("no replication connection: {cause}"), "See the message");
        }
        _ => findings.error(format!("no replication connection: {cause}"), "See the message"),
    }
}

/// Whether the publication has to be made or changed, and whether we may.
pub async fn check_publication_rights(
    spec: &PublicationSpec,
    server: &Server,
    sql: &mut Connection,
    findings: &mut Findings,
) -> Result<bool, Error> {
    let name = spec.publication_name();
    let quoted = quote_identifier(&name);
    let rows = sql
        .query(
            "SELECT pg_has_role(pubowner, 'USAGE'), pg_get_userbyid(pubowner) \
             FROM pg_publication WHERE pubname = $1",
            &[Some(&name)],
        )
        .await?;
    match rows.first() {
        None if server.may_create => Ok(true),
        None => {
            findings.error(
                format!(
                    "role {} may not create publication {quoted} in database {}",
                    server.role_sql(),
                    server.database_sql()
                ),
                format!(
                    "GRANT CREATE ON DATABASE {} TO {}; or let the tables' owner CREATE \
                     PUBLICATION, and set adopt_publication to its name",
                    server.database_sql(),
                    server.role_sql()
                ),
            );
            Ok(false)
        }
        Some(row) if row.parse_bool(0)? => Ok(true),
        Some(row) => {
            let owner = row.get(1).unwrap_or_default();
            findings.error(
                format!(
                    "publication {quoted} exists, publishes something else than the site file \
                     says, and belongs to {}",
                    quote_identifier(owner)
                ),
                format!(
                    "ALTER PUBLICATION {quoted} OWNER TO {}; or set adopt_publication = \"{name}\" \
                     to use it as it is",
                    server.role_sql()
                ),
            );
            Ok(false)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Places;

    #[test]
    fn places_are_counted_for_all_publications_of_a_server() {
        let one = Places { slots_free: 2, senders_free: 10, slot: 1, sender: 1, copies: 1 };
        assert_eq!(one.lacking(1), None);
        let (what, remedy) = Places { slot: 2, sender: 2, ..one }.lacking(2).unwrap();
        assert_eq!(what, "2 replication slots are free, 3 needed for its 2 publications together");
        assert_eq!(
            remedy,
            "ALTER SYSTEM SET max_replication_slots to more, and restart that server"
        );
        let begun = Places { slot: 0, sender: 0, copies: 0, slots_free: 0, senders_free: 0 };
        assert_eq!(begun.lacking(2), None);
    }
}
