//! The target: our rights there, its tables, and what subscriptions left there before.

use super::adopted::Adopted;
use super::firing::{self, Sides};
use super::published::Published;
use super::server::Server;
use super::tables::{self, Named, Table};
use super::{Findings, NAME, both, columns, creation, labels, publisher, restored, some_of};
use crate::config::{SiteConfig, Subscription};
use farshore_apply::postgres::follow_ddl::FollowDdl;
use farshore_apply::postgres::session::Session;
use farshore_apply::postgres::target_table::{
    Filled, TargetColumn, TargetTable, check_columns, rows_of_its_own,
};
use farshore_apply::postgres::value_plan::ColumnType;
use farshore_apply::{ApplyError, Initialise, follows_another};
use farshore_capture::publication::TableName;
use farshore_capture::types::TypeCatalog;
use farshore_model::quote_identifier;
use farshore_pg::{Question, Row, text_array};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

/// Tables that are asked about in one statement.
const TABLES_AT_ONCE: usize = 200;

/// How often it is looked whether two connections share a session of the server: a pooler gives the
/// one that was used last.
const POOLER_TRIES: usize = 3;

/// How long a pooler may take for the second of them.
const POOLER_WITHIN: Duration = Duration::from_secs(5);

/// Looks at a subscription's target, on a connection of that name, which is returned if there is
/// one. Without `published` only its server is looked at.
pub async fn check(
    config: (&SiteConfig, &Adopted),
    subscription: &Subscription,
    published: Option<&Published>,
    application_name: &str,
    findings: &mut Findings,
) -> Option<Session> {
    let target = &subscription.spec.target;
    // Asked as the session is set up: a far target's answers take their time.
    let questions = [Server::QUESTION, Question::Extended(SCHEMA, &[])];
    let connected = Session::connect_and_ask(target, application_name, &questions).await;
    let (mut session, answers) = match connected {
        Ok(connected) => connected,
        Err(error) => {
            let remedy = match &error {
                ApplyError::Target { error, .. } => publisher::remedy_for(error, "target"),
                _ => "See the message".to_owned(),
            };
            if error.is_transient() {
                findings.passing_error(error.to_string(), remedy);
            } else {
                findings.error(error.to_string(), remedy);
            }
            return None;
        }
    };
    findings.note(format!(
        "{} answers, version {}",
        target.redacted(),
        session.connection.server_version() / 10_000
    ));
    let looked = look(config, subscription, published, (&mut session, answers), findings).await;
    if let Err(error) = looked {
        findings.cannot_look("target", &error, error.is_transient());
        return None;
    }
    Some(session)
}

/// A pooler that gives a server's session to whoever has a transaction would give ours away, with
/// its settings (no triggers fire, no `search_path`), and the locks that we count on.
async fn check_pooler(
    subscription: &Subscription,
    session: &mut Session,
    findings: &mut Findings,
) -> Result<(), ApplyError> {
    const OWN_PID: &str = "SELECT pg_catalog.pg_backend_pid()";
    let pid_of = |rows: Vec<Row>| rows.first().and_then(|row| row.get(0)).map(str::to_owned);
    if session.is_with_server() {
        return Ok(());
    }
    let other = Session::connect(&subscription.spec.target, NAME);
    // A pool of one session keeps a second client waiting.
    let Ok(other) = tokio::time::timeout(POOLER_WITHIN, other).await else { return Ok(()) };
    let (mut other, mut shared) = (other?, false);
    for _ in 0..POOLER_TRIES {
        let ours = pid_of(session.query(OWN_PID, &[]).await?);
        shared |= ours == pid_of(other.query(OWN_PID, &[]).await?);
    }
    let server = subscription.spec.target.redacted();
    if shared {
        findings.error(
            format!(
                "target {server} is a connection pooler that gives a session of the server to \
                 several clients in turn (pool_mode transaction or statement): they would go on with \
                 settings of ours, such as session_replication_role = replica"
            ),
            "Name the server itself in `target`, or a pool with pool_mode = session",
        );
    } else {
        findings.note(format!("{server} is a connection pooler"));
    }
    Ok(())
}

async fn look(
    config: (&SiteConfig, &Adopted),
    subscription: &Subscription,
    published: Option<&Published>,
    (session, answers): (&mut Session, Vec<Result<Vec<Row>, ApplyError>>),
    findings: &mut Findings,
) -> Result<(), ApplyError> {
    let mut answers = answers.into_iter();
    let mut next = || answers.next().unwrap_or(Ok(Vec::new()));
    let (server, schema) = (next()?, next());
    let version = session.connection.server_version();
    let server = Server::answered(&server, session.asked_at, version);
    let server = server.map_err(|error| session.error(error))?;
    server.check("target", "target", findings);
    check_pooler(subscription, session, findings).await?;
    // Lanes have a connection more for a moment, to look for locks; tables may be copied beside.
    let needed = (subscription.spec.copy.workers + 1) + (subscription.spec.streams.near + 1);
    server.check_connections("target", needed, findings);
    if let Some(published) = published
        && let Some(publisher) = &published.server
    {
        let names = &subscription.spec.schema.names;
        let onto_itself = published.tables.iter().find(|(name, _)| {
            let target = names.table(name);
            published.tables.iter().any(|(published, _)| *published == target)
        });
        let onto_itself = onto_itself.map(|(name, _)| names.table(name));
        both::check(publisher, &server, onto_itself.as_ref(), findings);
    }
    session.has_seen_schema = check_schema(&server, &schema?, findings);
    // Where a backup is being restored, tables come and go.
    let from_backup = subscription.spec.initialise == Initialise::Backup;
    let names = &subscription.spec.schema.names;
    let on_target: Option<Vec<TableName>> = published
        .map(|published| published.tables.iter().map(|(name, _)| names.table(name)).collect());
    let named = on_target.map(|tables| Named::new(tables.iter()));
    let asked_now = named.as_ref().filter(|_| !from_backup);
    let mut asked = ask_of_tables(subscription, asked_now, session).await?;
    let left = check_progress(subscription, &asked.progress, findings);
    if from_backup && !left.begun {
        findings.note("it waits for its target to be restored from a backup (farshore initialise)");
        if let Some((published, named)) = published.zip(named) {
            // What cannot be read yet is looked at when it is initialised.
            let there = tables::named(&mut session.connection, &named).await.unwrap_or_default();
            restored::check(subscription, published, &there, findings);
            // What was restored by another role may be closed to this one.
            let there: BTreeMap<&TableName, &Table> = there.iter().collect();
            for (name, table) in there {
                if check_schema_of(name, table, &server, findings) {
                    check_rights(name, table, &server, findings);
                }
            }
        }
        return Ok(());
    }
    let Some((published, named)) = published.zip(named) else { return Ok(()) };
    check_claims(config, subscription, published, findings);
    check_circles(config, subscription, published, findings);
    if from_backup {
        let catalogue = tables::named(&mut session.connection, &named).await;
        asked.catalogue = catalogue.map_err(|error| session.error(error));
    }
    check_tables(subscription, published, &server, left, asked, session, findings).await
}

/// What a target says of tables.
struct OfTables {
    /// Answers to [`PROGRESS`]; empty where the schema is not there.
    progress: [Vec<Row>; 3],
    /// Nothing where it was not asked for.
    catalogue: Result<HashMap<TableName, Table>, ApplyError>,
    /// Answer to [`firing::triggers_sql`].
    triggers: Result<Vec<Row>, ApplyError>,
}

/// Asks in one round trip; of tables only where there is something to compare them to.
async fn ask_of_tables(
    subscription: &Subscription,
    tables: Option<&Named>,
    session: &mut Session,
) -> Result<OfTables, ApplyError> {
    let name = [Some(subscription.spec.name.as_str())];
    let triggers = firing::triggers_sql(session.replica_role);
    let tables = tables.map(Named::parameters);
    let of_tables = tables.as_ref().map(tables::questions);
    let of_tables: &[Question<'_>] = of_tables.as_ref().map_or(&[], |questions| questions);
    let mut questions = vec![Question::Simple(&triggers)];
    if session.has_seen_schema {
        questions.extend(PROGRESS.map(|sql| Question::Extended(sql, &name)));
    }
    questions.extend(of_tables);
    let answers = session.connection.ask_all(&questions).await;
    let mut answers = answers.map_err(|error| session.error(error))?;
    let catalogue = match answers.split_off(answers.len() - of_tables.len()) {
        nothing if nothing.is_empty() => Ok(HashMap::new()),
        answers => tables::from_answers(answers).map_err(|error| session.error(error)),
    };
    let mut rows = answers.into_iter().map(|answer| answer.map_err(|error| session.error(error)));
    let mut next = || rows.next().unwrap_or(Ok(Vec::new()));
    Ok(OfTables { triggers: next(), progress: [next()?, next()?, next()?], catalogue })
}

/// Whether there is a schema that progress is kept in, what we may do there, and with its tables.
const SCHEMA: &str = "SELECT has_schema_privilege(n.oid, 'USAGE'), \
      has_schema_privilege(n.oid, 'CREATE'), count(c.oid), \
      coalesce(bool_and(has_table_privilege(c.oid, 'SELECT') \
        AND has_table_privilege(c.oid, 'INSERT') AND has_table_privilege(c.oid, 'UPDATE') \
        AND has_table_privilege(c.oid, 'DELETE')), true) \
    FROM pg_catalog.pg_namespace n \
    LEFT JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relkind = 'r' \
    WHERE n.nspname = 'farshore' GROUP BY n.oid";

/// Looks at the schema that progress is kept in; returns whether its tables can be read.
fn check_schema(server: &Server, rows: &[Row], findings: &mut Findings) -> bool {
    let (role, database) = (server.role_sql(), server.database_sql());
    let Some(row) = rows.first() else {
        if !server.may_create {
            findings.error(
                format!("role {role} may not create the schema farshore, where progress is kept"),
                format!(
                    "GRANT CREATE ON DATABASE {database} TO {role}, or CREATE SCHEMA farshore \
                     AUTHORIZATION {role}"
                ),
            );
        }
        return false;
    };
    let is = |i: usize| row.get(i) == Some("t");
    let has_tables = row.get(2) != Some("0");
    if !is(0) || !is(1) || !is(3) {
        findings.error(
            format!("schema farshore of the target, where progress is kept, belongs to another role than {role}"),
            format!(
                "GRANT USAGE, CREATE ON SCHEMA farshore TO {role}; GRANT SELECT, INSERT, UPDATE, \
                 DELETE ON ALL TABLES IN SCHEMA farshore TO {role}"
            ),
        );
    }
    has_tables && is(0) && is(3)
}

/// What subscriptions have left on the target.
#[derive(Default)]
struct Left {
    /// This one has a progress row.
    begun: bool,
    /// Tables that this one copied or began to copy.
    known: Vec<TableName>,
    /// Tables that others filled, and which ones.
    of_others: HashMap<TableName, String>,
}

/// Of a subscription: its progress row, the tables that it copied or began to copy, and those of
/// others.
const PROGRESS: [&str; 3] = [
    "SELECT publication FROM farshore.subscription WHERE name = $1",
    "SELECT schema_name, table_name FROM farshore.table_copy WHERE subscription = $1",
    "SELECT schema_name, table_name, subscription FROM farshore.table_copy \
     WHERE subscription <> $1",
];

/// Looks at what subscriptions have left on the target: the answers to [`PROGRESS`].
fn check_progress(
    subscription: &Subscription,
    [progress, known, others]: &[Vec<Row>; 3],
    findings: &mut Findings,
) -> Left {
    let text = |row: &Row, i: usize| row.get(i).unwrap_or_default().to_owned();
    let table = |row: &Row| TableName { schema: text(row, 0), name: text(row, 1) };
    let publication = progress.first().map(|row| text(row, 0));
    let begun = publication.is_some();
    if let Some(publication) = publication
        && publication != subscription.spec.publication
    {
        let (name, wanted) = (&subscription.spec.name, &subscription.spec.publication);
        findings.error(
            format!(
                "the target's subscription of that name follows publication \"{publication}\", not \
                 \"{wanted}\""
            ),
            follows_another(name, &publication, wanted),
        );
    }
    Left {
        begun,
        known: known.iter().map(table).collect(),
        of_others: others.iter().map(|row| (table(row), text(row, 2))).collect(),
    }
}

/// Another subscription of this site file that would write the same tables.
fn check_claims(
    (config, adopted): (&SiteConfig, &Adopted),
    subscription: &Subscription,
    published: &Published,
    findings: &mut Findings,
) {
    let target = subscription.spec.target.redacted();
    for other in &config.subscriptions {
        if other.spec.name == subscription.spec.name
            || !other.spec.target.is_same_place(&subscription.spec.target)
        {
            continue;
        }
        let Some(publication) = config.publication(&other.publication) else { continue };
        let shared: Vec<String> = published
            .tables
            .iter()
            .filter(|(table, _)| {
                let (ours, theirs) = (&subscription.spec.schema.names, &other.spec.schema.names);
                adopted.has(&publication.spec, table) && ours.table(table) == theirs.table(table)
            })
            .map(|(table, _)| table.to_string())
            .collect();
        if !shared.is_empty() {
            findings.error(
                format!(
                    "subscription \"{}\" brings the same tables to {target}: {}",
                    other.spec.name,
                    some_of(&shared)
                ),
                "Remove one of the two, or take the tables out of one publication",
            );
        }
    }
}

/// Nothing tells a change that was made at one side from one that came from there: with both
/// directions it would go round for ever.
fn check_circles(
    (config, adopted): (&SiteConfig, &Adopted),
    subscription: &Subscription,
    published: &Published,
    findings: &mut Findings,
) {
    let Some(own) = config.publication(&subscription.publication) else { return };
    for back in &config.subscriptions {
        let Some(publication) = config.publication(&back.publication) else { continue };
        // Of one whose two ends are the same database more is said elsewhere.
        if back.spec.name == subscription.spec.name
            || !publication.spec.source.is_same_place(&subscription.spec.target)
            || !back.spec.target.is_same_place(&own.spec.source)
        {
            continue;
        }
        let goes_round = |table: &TableName| {
            let there = subscription.spec.schema.names.table(table);
            // With a filter on each way they may be different rows.
            if adopted.is_filtered(&own.spec, table)
                && adopted.is_filtered(&publication.spec, &there)
            {
                return false;
            }
            adopted.has(&publication.spec, &there) && back.spec.schema.names.table(&there) == *table
        };
        let round: Vec<String> = published
            .tables
            .iter()
            .filter(|(table, _)| goes_round(table))
            .map(|(table, _)| table.to_string())
            .collect();
        if !round.is_empty() {
            findings.error(
                format!(
                    "subscription \"{}\" brings the same tables back to the publisher: {}. Every \
                     change would go round for ever",
                    back.spec.name,
                    some_of(&round)
                ),
                "Replicate each table in one direction only: remove one of the two, or take the \
                 tables out of one publication",
            );
        }
    }
}

/// Enums of columns on both sides.
async fn check_labels(
    on_target: &[(TableName, Table)],
    published: &Published,
    (catalogue, types): (&HashMap<TableName, Table>, &TypeCatalog),
    session: &mut Session,
    findings: &mut Findings,
) -> Result<(), ApplyError> {
    let mut enums = BTreeSet::new();
    for (name, source) in on_target {
        let Some(table) = catalogue.get(name) else { continue };
        let ours = source.columns.iter();
        let ours = ours.filter(|column| published.labels.contains_key(&column.type_oid));
        enums.extend(ours.filter_map(|ours| {
            let theirs = table.columns.iter().find(|theirs| theirs.name == ours.name)?;
            Some((ours.type_oid, theirs.type_oid))
        }));
    }
    let types = types.closure(enums.iter().map(|(_, theirs)| *theirs));
    let there = labels::read(&mut session.connection, &types).await;
    let there = there.map_err(|error| session.error(error))?;
    labels::check(&enums, &published.labels, (&there, &types), findings);
    Ok(())
}

async fn check_tables(
    subscription: &Subscription,
    published: &Published,
    server: &Server,
    Left { known, of_others, .. }: Left,
    OfTables { catalogue, triggers, .. }: OfTables,
    session: &mut Session,
    findings: &mut Findings,
) -> Result<(), ApplyError> {
    let (catalogue, triggers) = (catalogue?, triggers?);
    let names = &subscription.spec.schema.names;
    let known: Vec<TableName> = known.iter().map(|name| names.table(name)).collect();
    let on_target: Vec<(TableName, Table)> =
        published.tables.iter().map(|(name, table)| (names.table(name), table.clone())).collect();
    if let Some((one, other, target)) = names.collision(published.tables.iter().map(|(n, _)| n)) {
        findings.error(
            format!("tables {one} and {other} would both be {target} on the target"),
            "Give one of them another name in the subscription's mapping",
        );
    }
    let there = on_target.iter().filter_map(|(name, _)| catalogue.get(name));
    let of_columns = there.flat_map(|table| &table.columns).map(|column| column.type_oid);
    let mut types = TypeCatalog::default();
    let described = types.describe(&mut session.connection, of_columns).await;
    described.map_err(|error| session.error(error))?;
    check_labels(&on_target, published, (&catalogue, &types), session, findings).await?;
    let (mut to_be_empty, mut to_be_created) = (Vec::new(), Vec::new());
    for ((publishers, _), (name, source)) in published.tables.iter().zip(&on_target) {
        let both = (publishers, name);
        let Some(table) = catalogue.get(name) else {
            // What was copied and is gone is not made anew.
            if subscription.spec.schema.create_tables && !known.contains(name) {
                to_be_created.push(name);
            } else {
                let filled = if known.contains(name) { Filled::Before } else { Filled::NotYet };
                missing_table(subscription, both, filled, findings);
            }
            continue;
        };
        let copied = known.contains(name);
        let sides = TwoSides { published, source, table, types: &types };
        if check_table(subscription, both, &sides, copied, server, findings) && !copied {
            match of_others.get(name) {
                Some(other) => findings.error(
                    format!("table {name} on the target is filled by subscription \"{other}\""),
                    format!(
                        "Take it out of one of the two; if \"{other}\" is gone for good: DELETE FROM \
                         farshore.subscription WHERE name = {}, and TRUNCATE {name}",
                        farshore_pg::quote_literal(other)
                    ),
                ),
                None => to_be_empty.push((name.clone(), table.kind == 'p')),
            }
        }
    }
    if subscription.spec.sequence_interval.is_some() {
        // Of what another site has, nobody here knows whether there is a sequence to follow.
        let follows = |source: &Table| published.server.is_none() || !source.sequences.is_empty();
        let there = on_target.iter().filter(|(_, source)| follows(source));
        let there = there.filter_map(|(name, _)| catalogue.get(name));
        check_sequences(there, server, findings);
    }
    let via_root = published.tables.iter().any(|(_, table)| table.kind == 'p');
    let own: Vec<&TableName> = on_target.iter().map(|(name, _)| name).collect();
    check_empty(&to_be_empty, &own, via_root, session, findings).await?;
    creation::check(&to_be_created, server, session, findings).await?;
    creation::check_names(names, published.tables.iter().map(|(name, _)| name), findings);
    let policy = &subscription.spec.on_conflict;
    creation::check_policies(policy, published.tables.iter().map(|(name, _)| name), findings);
    let publisher_keys = published.foreign_keys.clone().map(|mut there| {
        for key in &mut there.keys {
            key.child = names.table(&key.child);
            key.parent = names.table(&key.parent);
        }
        there
    });
    let publisher_keys = publisher_keys.as_ref();
    let to_copy: Vec<TableName> = on_target
        .iter()
        .map(|(name, _)| name.clone())
        .filter(|name| !known.contains(name))
        .collect();
    let role = server.role_sql();
    let sides = Sides { tables: &on_target, to_copy: &to_copy, publisher_keys, role: &role };
    let quiet = session.replica_role;
    let looked = firing::check(&mut session.connection, quiet, &triggers, &sides, findings).await;
    looked.map_err(|error| session.error(error))?;
    findings.note(format!("{} tables looked at", published.tables.len()));
    Ok(())
}

/// Sequences of the target that cannot follow the publisher's.
fn check_sequences<'a>(
    tables: impl Iterator<Item = &'a Table>,
    server: &Server,
    findings: &mut Findings,
) {
    let sequences = tables.flat_map(|table| &table.sequences);
    // It only ever moves forward, so it is read first.
    let stuck = sequences.filter(|sequence| !sequence.readable || !sequence.settable);
    let mut stuck: Vec<String> = stuck.map(|sequence| sequence.name.clone()).collect();
    stuck.sort();
    stuck.dedup();
    if stuck.is_empty() {
        return;
    }
    let role = server.role_sql();
    findings.warning(
        format!(
            "role {role} may not set sequences on the target, so they stay behind the publisher's: \
             {}",
            some_of(&stuck)
        ),
        format!("GRANT SELECT, UPDATE ON SEQUENCE {} TO {role}", stuck.join(", ")),
    );
}

/// The rule for a published table that the target does not have; `both` are its names, the publisher's
/// first.
fn missing_table(
    subscription: &Subscription,
    both: (&TableName, &TableName),
    filled: Filled,
    findings: &mut Findings,
) {
    let nothing = [].into_iter();
    if let Err(error) = check_columns(&subscription.spec.name, both, nothing, None, filled) {
        findings.agent_error(&error, false);
    }
}

/// A table on the publisher and on the target.
struct TwoSides<'a> {
    published: &'a Published,
    source: &'a Table,
    table: &'a Table,
    /// The target's, as far as its tables need them.
    types: &'a TypeCatalog,
}

/// Whether rows of a table can be written; `both` are its names, the publisher's first.
fn check_table(
    subscription: &Subscription,
    both: (&TableName, &TableName),
    sides: &TwoSides<'_>,
    copied: bool,
    server: &Server,
    findings: &mut Findings,
) -> bool {
    let TwoSides { published, source, table, types } = *sides;
    let (role, (_, name)) = (server.role_sql(), both);
    if !check_schema_of(name, table, server, findings) {
        return false;
    }
    if let Some(kind) = table.not_a_table() {
        findings.error(
            format!("{name} on the target is {kind}, and a table is needed"),
            "Rename it, and create a table of that name",
        );
        return false;
    }
    // What a copied table lacks is added when its first change comes.
    let follows = copied && subscription.spec.follow_ddl != FollowDdl::Stop;
    let is_there = |name: &str| table.columns.iter().any(|column| column.name == name);
    let names = source.columns.iter().map(|column| column.name.as_str());
    let names = names.filter(|name| !follows || is_there(name));
    let known = TargetTable {
        partitioned: table.kind == 'p',
        columns: table
            .columns
            .iter()
            .map(|column| TargetColumn {
                name: column.name.clone(),
                type_oid: column.type_oid,
                type_modifier: column.type_modifier,
                declared_type: column.type_name.clone(),
                generated: column.generated,
                virtual_: column.virtual_,
                ..TargetColumn::default()
            })
            .collect(),
        types: types.closure(table.columns.iter().map(|column| column.type_oid)),
        ..TargetTable::default()
    };
    let filled = if copied { Filled::Before } else { Filled::NotYet };
    if let Err(error) = check_columns(&subscription.spec.name, both, names, Some(&known), filled) {
        findings.agent_error(&error, false);
        return false;
    }
    let mut refused = Vec::new();
    for column in source.columns.iter().filter(|column| is_there(&column.name)) {
        let (oid, modifier) = (column.type_oid, column.type_modifier);
        let publisher = ColumnType { oid, modifier, types: &published.types };
        let Err(misfit) = known.plan(&column.name, publisher) else { continue };
        refused.push(column.name.as_str());
        let error = misfit.error(&subscription.spec.name, both);
        // Of a copied table, what the log has may be of another type still, which does fit: the
        // subscription stops when a change comes that does not.
        if copied {
            findings.agent_warning(&error);
        } else {
            findings.agent_error(&error, false);
        }
    }
    if published.server.is_some() {
        columns::check(name, source, table, copied, &refused, findings);
    } else {
        columns::check_unfilled(name, source, table, copied, findings);
    }
    if !refused.is_empty() && !copied {
        return false;
    }
    if table.row_security {
        findings.error(
            format!("row-level security of {name} on the target holds for role {role}"),
            format!(
                "ALTER ROLE {role} BYPASSRLS (as a superuser), or ALTER TABLE {name} OWNER TO \
                 {role}, NO FORCE ROW LEVEL SECURITY"
            ),
        );
        return false;
    }
    if table.persistence == 'u' {
        findings.warning(
            format!("{name} on the target is unlogged: a crash there empties it, and changes of rows that are gone stop the subscription"),
            format!("ALTER TABLE {name} SET LOGGED"),
        );
    }
    check_rights(name, table, server, findings)
}

/// Whether a table's schema may be looked into.
fn check_schema_of(
    name: &TableName,
    table: &Table,
    server: &Server,
    findings: &mut Findings,
) -> bool {
    let role = server.role_sql();
    if table.schema_usable {
        return true;
    }
    let schema = quote_identifier(&name.schema);
    findings.error(
        format!("role {role} may not look into schema {schema} of the target, where {name} is"),
        format!("GRANT USAGE ON SCHEMA {schema} TO {role}"),
    );
    false
}

/// Whether rows of a table may be written.
fn check_rights(name: &TableName, table: &Table, server: &Server, findings: &mut Findings) -> bool {
    let role = server.role_sql();
    // Without TRUNCATE only a TRUNCATE on the publisher fails.
    let (needed, only_truncate): (Vec<&str>, _) =
        (table.rights_missing.clone(), table.rights_missing == ["TRUNCATE"]);
    if needed.is_empty() {
        return true;
    }
    let what = format!("role {role} lacks {} on {name} of the target", needed.join(", "));
    let grant = format!("GRANT {} ON {name} TO {role}", needed.join(", "));
    if only_truncate {
        findings.warning(format!("{what}: a TRUNCATE on the publisher will stop it"), grant);
        true
    } else {
        findings.error(what, grant);
        false
    }
}

/// The initial copy fills empty tables only. What is still a partition on the target may be one that
/// was detached from a table that is published with all of its partitions (`via_root`): rows may come
/// for it through that one, and it is detached behind them before it is to be empty. Nor are its rows
/// those of the one above it; a partitioned table has all others of its partitions. `own` are all that
/// are published by themselves.
async fn check_empty(
    tables: &[(TableName, bool)],
    own: &[&TableName],
    via_root: bool,
    session: &mut Session,
    findings: &mut Findings,
) -> Result<(), ApplyError> {
    let own: Vec<String> = own.iter().map(|table| table.to_string()).collect();
    let own = farshore_pg::quote_literal(&text_array(own.iter().map(String::as_str)));
    for some in tables.chunks(TABLES_AT_ONCE) {
        let asked: Vec<String> = some
            .iter()
            .enumerate()
            .map(|(n, (table, is_partitioned))| {
                let rows = if *is_partitioned && via_root {
                    let name = farshore_pg::quote_literal(&table.to_string());
                    format!(
                        "{table} WHERE tableoid NOT IN (SELECT tree.relid \
                         FROM pg_catalog.unnest({own}::text[]) AS own (name) \
                         CROSS JOIN LATERAL pg_catalog.pg_partition_tree( \
                           pg_catalog.to_regclass(own.name)) AS tree \
                         WHERE pg_catalog.to_regclass(own.name) NOT IN \
                           (SELECT above.relid FROM pg_catalog.pg_partition_ancestors( \
                             {name}::pg_catalog.regclass) AS above))"
                    )
                } else {
                    rows_of_its_own(table, *is_partitioned)
                };
                let unless = if via_root {
                    let name = farshore_pg::quote_literal(&table.to_string());
                    format!(
                        " AND NOT (SELECT relispartition FROM pg_catalog.pg_class \
                         WHERE oid = {name}::pg_catalog.regclass)"
                    )
                } else {
                    String::new()
                };
                format!("SELECT {n} WHERE EXISTS (SELECT FROM {rows}){unless}")
            })
            .collect();
        for row in session.query(&asked.join(" UNION ALL "), &[]).await? {
            let number: usize = row.parse(0).map_err(|error| session.error(error))?;
            let Some((name, _)) = some.get(number) else { continue };
            findings.error(
                format!(
                    "table {name} on the target has rows already, and it is to be copied (it is \
                     new here, or it left the publication or changed its filter or columns)"
                ),
                format!(
                    "Empty it (TRUNCATE {name}) or take it out of the publication, and go on \
                     (farshore resume)"
                ),
            );
        }
    }
    Ok(())
}
