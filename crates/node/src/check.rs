//! Preflight: what will not work, on which object, and what to do, before anything starts.

use crate::config::{Publication, SiteConfig, Subscription};
use farshore_apply::ApplyError;
use farshore_apply::postgres::session::Session;
use farshore_apply::postgres::statements::{check_columns, target_table};
use farshore_capture::publication::TableName;
use farshore_pg::{Connection, Mode};
use serde::Serialize;

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Fine; said so that the reader knows it was looked at.
    Ok,
    /// Works, with a drawback.
    Warning,
    /// Will not work.
    Error,
}

/// One thing that was looked at.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// How bad.
    pub severity: Severity,
    /// For instance `publication sales`.
    pub object: String,
    /// What was found.
    pub what: String,
    /// What to do about it.
    pub remedy: Option<String>,
}

/// Gathers findings about one object.
struct Findings<'a> {
    all: &'a mut Vec<Finding>,
    object: String,
}

impl Findings<'_> {
    fn ok(&mut self, what: impl Into<String>) {
        self.add(Severity::Ok, what, None);
    }

    fn warning(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Warning, what, Some(remedy.into()));
    }

    fn error(&mut self, what: impl Into<String>, remedy: impl Into<String>) {
        self.add(Severity::Error, what, Some(remedy.into()));
    }

    fn add(&mut self, severity: Severity, what: impl Into<String>, remedy: Option<String>) {
        let object = self.object.clone();
        self.all.push(Finding { severity, object, what: what.into(), remedy });
    }
}

/// Looks at everything the site file names. Changes nothing anywhere.
pub async fn check_site(config: &SiteConfig) -> Vec<Finding> {
    let mut all = Vec::new();
    for publication in &config.publications {
        let object = format!("publication {}", publication.spec.name);
        let mut findings = Findings { all: &mut all, object };
        let started = config.data_dir.join("publications").join(&publication.spec.name).exists();
        let tables = check_publication(publication, started, &mut findings).await;
        for subscription in &config.subscriptions {
            if subscription.publication == publication.spec.name {
                let object = format!("subscription {}", subscription.spec.name);
                let mut findings = Findings { all: &mut all, object };
                check_subscription(subscription, &tables, &mut findings).await;
            }
        }
    }
    all
}

/// A table that will be published, with its columns.
type PublishedColumns = (TableName, Vec<String>);

async fn check_publication(
    publication: &Publication,
    started: bool,
    findings: &mut Findings<'_>,
) -> Vec<PublishedColumns> {
    let spec = &publication.spec;
    let mut sql = match spec.connect(Mode::Sql).await {
        Ok(sql) => sql,
        Err(error) => {
            findings.error(error.to_string(), "Correct `source`, or start that server");
            return Vec::new();
        }
    };
    findings.ok(format!("{} answers, version {}", spec.source.redacted(), sql.server_version()));
    if sql.server_version() < 140_000 {
        findings.error("the publisher is older than PostgreSQL 14", "Upgrade it");
    }
    let may_create = match check_publisher_settings(spec, &mut sql, findings).await {
        Ok(may_create) => may_create,
        Err(error) => {
            findings.error(format!("cannot look at the publisher: {error}"), "See the message");
            false
        }
    };
    match spec.connect(Mode::LogicalReplication).await {
        Ok(connection) => connection.close().await,
        Err(error) => findings.error(
            format!("no replication connection: {error}"),
            "Give the role REPLICATION and a pg_hba.conf line for its database",
        ),
    }
    let expanded = match spec.adopt_publication {
        None => spec.expand_tables(&mut sql).await,
        Some(_) => spec
            .published_tables(&mut sql)
            .await
            .map(|tables| tables.into_iter().map(|table| table.table).collect()),
    };
    let tables: Vec<TableName> = match expanded {
        Ok(tables) => tables,
        Err(error) => {
            findings.error(error.to_string(), "Correct `tables` in the site file");
            return Vec::new();
        }
    };
    findings.ok(format!("{} tables match", tables.len()));
    let before = findings.all.len();
    let columns = match check_tables(spec, &mut sql, &tables, findings).await {
        Ok(columns) => columns,
        Err(error) => {
            findings.error(format!("cannot look at the tables: {error}"), "See the message");
            Vec::new()
        }
    };
    // Missing rights have been named already, table by table.
    let named = findings.all[before..].iter().any(|finding| finding.severity == Severity::Error);
    if !named && may_create {
        for error in spec.try_publication(&mut sql).await {
            findings.error(error.to_string(), "Correct the publication in the site file");
        }
    }
    if let Err(error) = farshore_capture::slot::look_at_slot(spec, &mut sql, started).await {
        findings.error(error.to_string(), "As it says");
    }
    columns
}

async fn check_publisher_settings(
    spec: &farshore_capture::publication::PublicationSpec,
    sql: &mut Connection,
    findings: &mut Findings<'_>,
) -> Result<bool, farshore_pg::Error> {
    let rows = sql
        .query(
            "SELECT current_setting('wal_level'), \
               current_setting('max_replication_slots')::int - \
                 (SELECT count(*) FROM pg_replication_slots), \
               current_setting('max_wal_senders')::int - \
                 (SELECT count(*) FROM pg_stat_get_wal_senders()), \
               r.rolsuper OR r.rolreplication, \
               has_database_privilege(current_database(), 'CREATE'), \
               current_setting('max_slot_wal_keep_size'), \
               EXISTS (SELECT 1 FROM pg_replication_slots WHERE slot_name = $1) \
             FROM pg_roles r WHERE r.rolname = current_user",
            &[Some(&spec.slot_name())],
        )
        .await?;
    let Some(row) = rows.first() else { return Ok(false) };
    let text = |i: usize| row.get(i).unwrap_or_default();
    let number = |i: usize| text(i).parse::<i64>().unwrap_or(0);
    if text(0) == "logical" {
        findings.ok("wal_level = logical");
    } else {
        findings.error(
            format!("wal_level = {}", text(0)),
            "ALTER SYSTEM SET wal_level = logical, and restart the publisher",
        );
    }
    let slot_present = text(6) == "t";
    // A copy needs one more, for its snapshot.
    let slots_needed = if slot_present { 1 } else { 2 };
    if number(1) < slots_needed {
        findings.error(
            format!("{} replication slots are free, {slots_needed} are needed", number(1)),
            "Raise max_replication_slots, or drop slots that nothing uses",
        );
    }
    if number(2) < 2 {
        findings.error(
            format!("{} walsenders are free, 2 are needed", number(2)),
            "Raise max_wal_senders",
        );
    }
    if text(3) != "t" {
        findings.error("the role lacks REPLICATION", "ALTER ROLE … REPLICATION");
    }
    if spec.adopt_publication.is_none() && text(4) != "t" {
        findings.error(
            "the role may not create a publication in this database",
            "GRANT CREATE ON DATABASE … TO …, or make the publication yourself and set \
             adopt_publication",
        );
    }
    if text(5) != "-1" {
        findings.warning(
            format!("max_slot_wal_keep_size = {}: the publisher may invalidate the slot", text(5)),
            "Make it larger than the log of the longest time Farshore may be stopped",
        );
    }
    Ok(spec.adopt_publication.is_some() || text(4) == "t")
}

async fn check_tables(
    spec: &farshore_capture::publication::PublicationSpec,
    sql: &mut Connection,
    tables: &[TableName],
    findings: &mut Findings<'_>,
) -> Result<Vec<PublishedColumns>, farshore_pg::Error> {
    let mut columns = Vec::new();
    for table in tables {
        let rows = sql
            .query(
                "SELECT CASE c.relreplident WHEN 'd' THEN EXISTS (SELECT 1 FROM pg_index i \
                     WHERE i.indrelid = c.oid AND i.indisprimary) WHEN 'n' THEN false \
                     ELSE true END, \
                   c.relreplident, has_table_privilege(c.oid, 'SELECT'), \
                   pg_has_role(c.relowner, 'USAGE'), \
                   coalesce((SELECT string_agg(a.attname, chr(1) ORDER BY a.attnum) \
                     FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 \
                     AND NOT a.attisdropped AND a.attgenerated = ''), '') \
                 , has_schema_privilege(n.oid, 'USAGE') \
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE n.nspname = $1 AND c.relname = $2",
                &[Some(&table.schema), Some(&table.name)],
            )
            .await?;
        let Some(row) = rows.first() else { continue };
        if row.get(5) != Some("t") {
            let schema = farshore_model::quote_identifier(&table.schema);
            findings.error(
                format!("the role may not look into schema {schema}, where {table} is"),
                format!("GRANT USAGE ON SCHEMA {schema} TO …"),
            );
            continue;
        }
        if row.get(0) != Some("t") {
            findings.warning(
                format!("table {table} has no primary key or replica identity"),
                format!(
                    "Inserts flow; the publisher will refuse updates and deletes of it. Add a \
                     primary key, or ALTER TABLE {table} REPLICA IDENTITY FULL"
                ),
            );
        }
        if row.get(2) != Some("t") {
            findings.error(
                format!("the role may not read {table}"),
                format!("GRANT SELECT ON {table} TO … (for the initial copy)"),
            );
        }
        if row.get(3) != Some("t") && spec.adopt_publication.is_none() {
            findings.error(
                format!("the role does not own {table}, so it cannot publish it"),
                "Make the role a member of the owner, or make the publication as the owner and set \
                 adopt_publication",
            );
        }
        let names = row.get(4).unwrap_or_default().split('\u{1}');
        let article = spec.articles.get(table).and_then(|article| article.columns.as_ref());
        let published = names
            .filter(|name| !name.is_empty())
            .filter(|name| article.is_none_or(|columns| columns.iter().any(|c| c == name)));
        columns.push((table.clone(), published.map(str::to_owned).collect()));
    }
    Ok(columns)
}

async fn check_subscription(
    subscription: &Subscription,
    tables: &[PublishedColumns],
    findings: &mut Findings<'_>,
) {
    let name = &subscription.spec.name;
    let mut session = match Session::connect(&subscription.spec.target, "farshore check").await {
        Ok(session) => session,
        Err(error) => {
            findings.error(error.to_string(), "Correct `target`, or start that server");
            return;
        }
    };
    let server = subscription.spec.target.redacted();
    findings.ok(format!("{server} answers, version {}", session.connection.server_version()));
    if !session.replica_role {
        findings.warning(
            "the role may not set session_replication_role: triggers and foreign keys on the \
             target fire for replicated rows",
            "On 15 or later: GRANT SET ON PARAMETER session_replication_role TO the role",
        );
    }
    let looked = async {
        let rows = session
            .query(
                "SELECT has_database_privilege(current_database(), 'CREATE'), \
                   to_regnamespace('farshore') IS NOT NULL, pg_is_in_recovery()",
                &[],
            )
            .await?;
        if let Some(row) = rows.first() {
            if row.get(0) != Some("t") && row.get(1) != Some("t") {
                findings.error(
                    "the role may not create the schema farshore, where progress is kept",
                    "GRANT CREATE ON DATABASE … TO …, or CREATE SCHEMA farshore AUTHORIZATION …",
                );
            }
            if row.get(2) == Some("t") {
                findings.error("the target is a standby", "Point `target` at a primary");
            }
        }
        let known = check_progress(subscription, &mut session, findings).await?;
        for (table, columns) in tables {
            check_target_table(name, &mut session, table, columns, &known, findings).await?;
        }
        Ok::<(), ApplyError>(())
    };
    let outcome = looked.await;
    if let Err(error) = outcome {
        findings.error(format!("cannot look at the target: {error}"), "See the message");
    } else {
        findings.ok(format!("{} tables looked at", tables.len()));
    }
}

/// Looks at what a subscription of this name has left on the target; returns the tables it copied
/// or began to copy.
async fn check_progress(
    subscription: &Subscription,
    session: &mut Session,
    findings: &mut Findings<'_>,
) -> Result<Vec<TableName>, ApplyError> {
    let present = session.query("SELECT to_regclass('farshore.range_copy')", &[]).await;
    // A schema that we may not look into is found elsewhere.
    let Ok(present) = present else { return Ok(Vec::new()) };
    if present.first().and_then(|row| row.get(0)).is_none() {
        return Ok(Vec::new());
    }
    let name = &subscription.spec.name;
    if let Some(progress) = session.load_progress(name).await?
        && progress.publication != subscription.spec.publication
    {
        findings.error(
            format!(
                "the target's subscription of that name follows publication \"{}\", not \"{}\"",
                progress.publication, subscription.spec.publication
            ),
            "Rename one of the two",
        );
    }
    let tables = session.load_tables(name).await?;
    Ok(tables.into_iter().map(|table| table.table).collect())
}

async fn check_target_table(
    subscription: &str,
    session: &mut Session,
    table: &TableName,
    columns: &[String],
    known: &[TableName],
    findings: &mut Findings<'_>,
) -> Result<(), ApplyError> {
    let rights = session
        .query(
            "SELECT has_schema_privilege(n.oid, 'USAGE'), \
               has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT') \
               AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE') \
             FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname = $1 AND c.relname = $2",
            &[Some(&table.schema), Some(&table.name)],
        )
        .await?;
    if rights.first().is_some_and(|row| row.get(0) != Some("t")) {
        let schema = farshore_model::quote_identifier(&table.schema);
        findings.error(
            format!("the role may not look into schema {schema} on the target, where {table} is"),
            format!("GRANT USAGE ON SCHEMA {schema} TO …"),
        );
        return Ok(());
    }
    let target = target_table(session, table).await?;
    let names = columns.iter().map(String::as_str);
    if let Err(error) = check_columns(subscription, table, names, target.as_ref()) {
        findings.error(error.to_string(), "As it says");
        return Ok(());
    }
    if rights.first().and_then(|row| row.get(1)) != Some("t") {
        findings.error(
            format!("the role may not write {table} on the target"),
            format!("GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON {table} TO …"),
        );
        return Ok(());
    }
    if !known.contains(table) {
        let filled = session.query(&format!("SELECT 1 FROM {table} LIMIT 1"), &[]).await?;
        if !filled.is_empty() {
            findings.error(
                format!("table {table} on the target has rows already, and it is to be copied"),
                format!("Empty it (TRUNCATE {table}), or take it out of the publication"),
            );
        }
    }
    Ok(())
}
