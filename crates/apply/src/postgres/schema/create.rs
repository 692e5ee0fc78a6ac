use super::SchemaSettings;
use super::name_taken;
use super::outline::{AsItsParent, Outline, Step};
use super::present::Present;
use crate::ApplyError;
use crate::error::passes_by_itself;
use crate::postgres::in_use::{BOUNDED, UNBOUNDED};
use crate::postgres::session::Session;
use farshore_capture::publication::TableName;
use farshore_capture::schema::{Definitions, Stage, TargetServer};
use farshore_fault as fault;
use farshore_pg::{quote_literal, text_array};
use std::collections::{BTreeSet, HashSet};

/// Held while tables are made, so that two subscriptions do not make the same at once.
const LOCK: &str = "SELECT pg_advisory_lock(hashtextextended('farshore tables', 0))";
const UNLOCK: &str = "SELECT pg_advisory_unlock(hashtextextended('farshore tables', 0))";

/// A bound would overlap another partition's, or does not go with it (hash partitions).
const OVERLAPS: &str = "42P17";
/// A partition's columns are others than its parent's (datatype mismatch).
const DIFFERS: &str = "42804";
/// The default partition has rows that would belong there.
const IN_DEFAULT_PARTITION: &str = "23514";

/// What would be done on the target to take `published` tables (by the publisher's names), of
/// which `copied` have their rows there. Changes nothing.
pub async fn outline_of(
    session: &mut Session,
    settings: &SchemaSettings,
    definitions: &Definitions,
    published: &HashSet<TableName>,
    copied: &HashSet<TableName>,
) -> Result<Outline, ApplyError> {
    let present = Present::read(session).await?;
    let extensions = definitions.extensions.iter().map(|extension| extension.name.as_str());
    let target = TargetServer {
        version: session.connection.server_version(),
        no_extensions: present.unavailable(extensions),
        no_functions: unknown_functions(session, &definitions.functions_in_defaults()).await?,
        taken: taken(session, &definitions.names_of_keys(&settings.names)).await?,
    };
    let plan = definitions.plan(&settings.names, &target);
    let mut outline = Outline::new(plan, &present, published, copied);
    outline.unavailable = target.no_extensions.into_iter().collect();
    Ok(outline)
}

/// Those of these names that something in their schema has.
async fn taken(
    session: &mut Session,
    names: &BTreeSet<TableName>,
) -> Result<BTreeSet<TableName>, ApplyError> {
    let schemas = text_array(names.iter().map(|name| name.schema.as_str()));
    let list = text_array(names.iter().map(|name| name.name.as_str()));
    let rows = session
        .query(
            "SELECT wanted.schema, wanted.name \
             FROM unnest($1::text::text[], $2::text::text[]) AS wanted (schema, name) \
             JOIN pg_catalog.pg_namespace n ON n.nspname = wanted.schema \
             JOIN pg_catalog.pg_class c ON c.relnamespace = n.oid AND c.relname = wanted.name",
            &[Some(&schemas), Some(&list)],
        )
        .await?;
    let name = |row: &farshore_pg::Row| {
        let (schema, name) = (row.get(0)?.to_owned(), row.get(1)?.to_owned());
        Some(TableName { schema, name })
    };
    Ok(rows.iter().filter_map(name).collect())
}

/// Of names that are plain identifiers, those that the target has no function and no type for.
async fn unknown_functions(
    session: &mut Session,
    names: &BTreeSet<String>,
) -> Result<BTreeSet<String>, ApplyError> {
    let list: Vec<&str> = names.iter().map(String::as_str).collect();
    let rows = session
        .query(
            "SELECT u.name FROM pg_catalog.unnest($1::text::text[]) u (name) WHERE NOT EXISTS ( \
               SELECT 1 FROM pg_catalog.pg_proc p WHERE p.proname = u.name \
               AND p.pronamespace = 'pg_catalog'::regnamespace) \
             AND pg_catalog.to_regtype(u.name) IS NULL",
            &[Some(&format!("{{{}}}", list.join(",")))],
        )
        .await?;
    Ok(rows.iter().filter_map(|row| row.get(0)).map(str::to_owned).collect())
}

/// Whether the target lacks one of `tables` (by the publisher's names).
pub(crate) async fn lacks_tables(
    session: &mut Session,
    settings: &SchemaSettings,
    tables: &HashSet<TableName>,
) -> Result<bool, ApplyError> {
    let present = Present::read(session).await?;
    Ok(tables.iter().any(|table| present.table(&settings.names.table(table)).is_none()))
}

/// Makes what is missing. Each step is one transaction, and a table comes with the record of what
/// is to follow its copy.
pub(crate) async fn create_missing(
    session: &mut Session,
    subscription: &str,
    settings: &SchemaSettings,
    definitions: &Definitions,
    published: &HashSet<TableName>,
    copied: &HashSet<TableName>,
) -> Result<(), ApplyError> {
    session.simple(LOCK).await?;
    let outline = outline_of(session, settings, definitions, published, copied).await?;
    if !outline.steps.is_empty() {
        session.simple("SET check_function_bodies = off").await?;
    }
    let mut without: HashSet<&TableName> = HashSet::new();
    for step in &outline.steps {
        let has_no_parent = step.partition_of.as_ref().is_some_and(|of| without.contains(of));
        if has_no_parent || !run_step(session, subscription, step, &outline.unavailable).await? {
            without.extend(&step.table);
            continue;
        }
        tracing::info!(%subscription, "created {}", step.object);
        for what in &step.left_out {
            tracing::warn!(%subscription, "{} is created without {what}", step.object);
        }
    }
    session.simple(UNLOCK).await
}

/// Returns whether the target has room for it.
async fn run_step(
    session: &mut Session,
    subscription: &str,
    step: &Step,
    unavailable: &[String],
) -> Result<bool, ApplyError> {
    if let Err(error) =
        session.connection.simple_query(&script(subscription, step, &step.sql)).await
    {
        if step.gives_way && matches!(error.sqlstate(), Some(OVERLAPS | IN_DEFAULT_PARTITION)) {
            session.simple("ROLLBACK").await?;
            tracing::warn!(
                %subscription,
                "{} is not created on the target, where other partitions take its rows: {error}",
                step.object
            );
            return Ok(false);
        }
        let as_its_parent =
            step.as_its_parent.as_ref().filter(|_| error.sqlstate() == Some(DIFFERS));
        let Some(as_its_parent) = as_its_parent else {
            return Err(refused(session, subscription, step, unavailable, error).await);
        };
        session.simple("ROLLBACK").await?;
        make_as_its_parent(session, subscription, step, as_its_parent, unavailable).await?;
    }
    fault::point("snapshot.before-state");
    session.simple("COMMIT").await?;
    fault::point("snapshot.after-state");
    Ok(true)
}

/// In one go: the target may be far, and there may be thousands of tables.
fn script(subscription: &str, step: &Step, sql: &[String]) -> String {
    // A partition is made while nobody uses its parent; nothing else is there to be waited for.
    let mut script = format!("BEGIN; {BOUNDED}; {}; {UNBOUNDED}", sql.join("; "));
    if let Some(table) = &step.table {
        for after in &step.after {
            script.push_str(&format!(
                "; INSERT INTO farshore.after_copy \
                 (subscription, schema_name, table_name, stage, object, statement) \
                 VALUES ({}, {}, {}, {}, {}, {})",
                quote_literal(subscription),
                quote_literal(&table.schema),
                quote_literal(&table.name),
                stage_number(after.stage),
                quote_literal(&after.object),
                quote_literal(&after.sql)
            ));
        }
    }
    script
}

/// Makes a partition whose parent has other columns here than on the publisher: one that was dropped
/// there and left here, columns of the target's own, wider types.
async fn make_as_its_parent(
    session: &mut Session,
    subscription: &str,
    step: &Step,
    as_its_parent: &AsItsParent,
    unavailable: &[String],
) -> Result<(), ApplyError> {
    let parent = step.partition_of.as_ref().map(TableName::to_string).unwrap_or_default();
    // Added for the partition alone they would come to its parent without the values that its other
    // rows have.
    let lacking = "SELECT string_agg(pg_catalog.quote_ident(name), ', ') \
         FROM pg_catalog.unnest($1::text::text[]) AS c (name) WHERE NOT EXISTS ( \
           SELECT FROM pg_catalog.pg_attribute WHERE attrelid = pg_catalog.to_regclass($2) \
           AND attname = name AND attnum > 0 AND NOT attisdropped)";
    let columns = text_array(as_its_parent.columns.iter().map(String::as_str));
    let lacking = session.query(lacking, &[Some(&columns), Some(&parent)]).await?;
    if let Some(lacking) = lacking.first().and_then(|row| row.get(0)) {
        return Err(ApplyError::Setup(format!(
            "subscription \"{subscription}\": cannot create {} on the target, where {parent} lacks \
             {lacking}. Add that as the publisher did, with its DEFAULT for the rows that are there \
             (ALTER TABLE {parent} ADD COLUMN …), and go on (farshore resume)",
            step.object
        )));
    }
    // The index that tells its rows apart may have come along under its name.
    let (unique, unless_there) = ("CREATE UNIQUE INDEX", "CREATE UNIQUE INDEX IF NOT EXISTS");
    let indexes = step.sql.iter().filter(|sql| sql.starts_with(unique));
    let mut sql = vec![as_its_parent.sql.clone()];
    sql.extend(indexes.map(|index| index.replacen(unique, unless_there, 1)));
    if let Err(error) = session.connection.simple_query(&script(subscription, step, &sql)).await {
        return Err(refused(session, subscription, step, unavailable, error).await);
    }
    tracing::info!(
        %subscription,
        "{} gets the columns of {parent} on the target, which are others than on the publisher",
        step.object
    );
    Ok(())
}

/// A stage as it stands in `farshore.after_copy`.
pub(super) fn stage_number(stage: Stage) -> u8 {
    match stage {
        Stage::PartitionIndexes => 1,
        Stage::Indexes => 2,
        Stage::Checks => 3,
        Stage::ForeignKeys => 4,
    }
}

async fn refused(
    session: &mut Session,
    subscription: &str,
    step: &Step,
    unavailable: &[String],
    error: farshore_pg::Error,
) -> ApplyError {
    if let (Some(parent), Some("55P03")) = (&step.partition_of, error.sqlstate()) {
        let (what, tables) = (format!("making {}", step.object), std::slice::from_ref(parent));
        let error = session.in_use_or(error, subscription, &what, tables).await;
        // Others may make tables meanwhile.
        return match session.simple(UNLOCK).await {
            Ok(()) => error,
            Err(error) => error,
        };
    }
    let passes = error.server_error().is_none_or(passes_by_itself);
    if passes {
        return session.error(error);
    }
    let message = error.to_string();
    let taken = match error.sqlstate() {
        Some(name_taken::TAKEN) => match name_taken::remedy(session, step, &error).await {
            Ok(taken) => taken,
            Err(error) => return error,
        },
        Some(_) | None => None,
    };
    let remedy = match error.sqlstate() {
        _ if taken.is_some() => taken.unwrap_or_default(),
        Some("42501") => {
            "Grant the role what the message says (CREATE on the database makes schemas and \
             extensions, CREATE on a schema makes tables in it)"
                .to_owned()
        }
        _ if !unavailable.is_empty() => {
            format!("The target has no extension {}: install it there", unavailable.join(", "))
        }
        _ => "Create it there by hand as the target can have it".to_owned(),
    };
    ApplyError::Setup(format!(
        "subscription \"{subscription}\": cannot create {} on the target: {}. {remedy}, or set \
         create_tables = false, and start this node again. The SQL was: {}",
        step.object,
        message.trim_end_matches('.'),
        step.sql.join("; ")
    ))
}
