//! Whether triggers and foreign keys of the target fire for replicated rows, and what that means.

use super::tables::Table;
use super::{Findings, some_of};
use farshore_apply::postgres::foreign_keys::{ForeignKey, ForeignKeys};
use farshore_capture::publication::TableName;
use farshore_model::quote_identifier;
use farshore_pg::{Connection, Error, Row};
use std::collections::HashSet;

/// The two sides of the tables that are looked at.
pub struct Sides<'a> {
    /// Published tables.
    pub tables: &'a [(TableName, Table)],
    /// Those that are still to be copied.
    pub to_copy: &'a [TableName],
    /// The publisher's foreign keys, where it could be asked.
    pub publisher_keys: Option<&'a ForeignKeys>,
    /// Role on the target, as SQL names it.
    pub role: &'a str,
}

/// Looks at the target's triggers, rules and foreign keys. `quiet` tells that our sessions may set
/// `session_replication_role`; `firing` is the answer to [`triggers_sql`].
pub async fn check(
    sql: &mut Connection,
    quiet: bool,
    firing: &[Row],
    sides: &Sides<'_>,
    findings: &mut Findings,
) -> Result<(), Error> {
    let triggers = firing_triggers(firing, sides.tables);
    if quiet {
        findings.note(
            "triggers and foreign keys of the target keep quiet for replicated rows \
             (session_replication_role = replica)",
        );
        if !triggers.is_empty() {
            findings.warning(
                format!(
                    "these triggers fire all the same, since they are ENABLE ALWAYS or REPLICA: {}",
                    shown(&triggers)
                ),
                format!("{}, if replicated rows should not meet it", disable(&triggers[0])),
            );
        }
        return Ok(());
    }
    let grant = if sql.server_version() >= 150_000 {
        format!(
            "GRANT SET ON PARAMETER session_replication_role TO {} (as a superuser) keeps them quiet",
            sides.role
        )
    } else {
        "On PostgreSQL 14 only a superuser can keep them quiet".to_owned()
    };
    let keys = ForeignKeys::load(sql).await?;
    let bound = bound_keys(&keys, sides.tables);
    if triggers.is_empty() && bound.is_empty() {
        findings.note(format!(
            "role {} may not set session_replication_role; the tables have no triggers or foreign \
             keys that would fire",
            sides.role
        ));
        return Ok(());
    }
    findings.warning(
        format!(
            "role {} may not set session_replication_role: {} of the target fire for replicated \
             rows, and tables bound by foreign keys are copied parents first",
            sides.role,
            match (triggers.is_empty(), bound.is_empty()) {
                (true, _) => "foreign keys",
                (_, true) => "triggers",
                _ => "triggers and foreign keys",
            }
        ),
        grant.clone(),
    );
    if let Some(first) = triggers.first() {
        findings.warning(
            format!(
                "these triggers of the target fire for rows that have been through the \
                 publisher's triggers already: {}",
                shown(&triggers)
            ),
            format!("{}, and so on; or: {grant}", disable(first)),
        );
    }
    check_keys(&keys, &bound, sides, &grant, findings);
    Ok(())
}

fn check_keys(
    keys: &ForeignKeys,
    bound: &[&ForeignKey],
    sides: &Sides<'_>,
    grant: &str,
    findings: &mut Findings,
) {
    if let Err(in_the_way) = keys.copy_order(sides.to_copy) {
        let names: Vec<String> = in_the_way.iter().map(|key| key.on_table()).collect();
        let remedies: Vec<String> = in_the_way.iter().map(|key| key.make_deferrable()).collect();
        findings.error(
            format!(
                "tables that refer to each other in a circle cannot be copied while their foreign \
                 keys are checked at once: {}",
                some_of(&names)
            ),
            format!("{}; or: {grant}", remedies.join("; ")),
        );
    }
    for key in bound {
        let table = sides.tables.iter().find(|(name, _)| *name == key.child);
        let key_column = table.is_some_and(|(_, table)| {
            table.identity == 'f' || key.columns.iter().any(|column| table.key.contains(column))
        });
        let changes_identity =
            key_column && (key.acts_on_update() || matches!(key.on_delete, 'n' | 'd'));
        let drop = format!("ALTER TABLE {} DROP CONSTRAINT {}", key.child, key.quoted_name());
        let same_on_publisher = sides.publisher_keys.is_none_or(|there| {
            there.keys.iter().any(|other| {
                (&other.child, &other.parent, other.on_delete, other.on_update)
                    == (&key.child, &key.parent, key.on_delete, key.on_update)
            })
        });
        if (key.acts_on_delete() || key.acts_on_update()) && !same_on_publisher {
            findings.error(
                format!(
                    "foreign key {} of the target deletes or changes rows by itself, and the \
                     publisher has none that does the same: the two sides would differ",
                    key.on_table()
                ),
                format!("{drop}; or: {grant}"),
            );
        } else if changes_identity {
            findings.error(
                format!(
                    "foreign key {} of the target changes columns by which replicated changes \
                     find their row",
                    key.on_table()
                ),
                format!("{drop}; or: {grant}"),
            );
        } else if key.child == key.parent && !key.deferrable && !key.acts_on_delete() {
            findings.warning(
                format!(
                    "foreign key {} of the target refers to its own table and is checked row by \
                     row: what deletes or inserts parents and children in one statement is tried \
                     in bulk, and stops the subscription where batches = \"never\"",
                    key.on_table()
                ),
                format!("{}; or: {grant}", key.make_deferrable()),
            );
        }
    }
}

/// Keys that refer from or to one of the tables.
fn bound_keys<'a>(keys: &'a ForeignKeys, tables: &[(TableName, Table)]) -> Vec<&'a ForeignKey> {
    let names: HashSet<&TableName> = tables.iter().map(|(name, _)| name).collect();
    let refer: HashSet<(&TableName, &str)> = names
        .iter()
        .flat_map(|name| keys.of_child(name))
        .map(|key| (&key.child, key.name.as_str()))
        .collect();
    keys.keys
        .iter()
        .filter(|key| {
            names.contains(&key.parent) || refer.contains(&(&key.child, key.name.as_str()))
        })
        .collect()
}

/// A trigger or rule, and its table.
type Trigger = (TableName, &'static str, String);

fn shown(triggers: &[Trigger]) -> String {
    let names: Vec<String> = triggers
        .iter()
        .map(|(table, _, name)| format!("{} on {table}", quote_identifier(name)))
        .collect();
    some_of(&names)
}

fn disable((table, kind, name): &Trigger) -> String {
    format!("ALTER TABLE {table} DISABLE {kind} {}", quote_identifier(name))
}

/// Asks for users' triggers and rules that fire for what our sessions write.
pub fn triggers_sql(quiet: bool) -> String {
    let enabled = if quiet { "'A', 'R'" } else { "'A', 'O'" };
    format!(
        "SELECT n.nspname, c.relname, 'TRIGGER', t.tgname FROM pg_catalog.pg_trigger t \
         JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid \
         JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE NOT t.tgisinternal AND t.tgenabled IN ({enabled}) \
         UNION ALL \
         SELECT n.nspname, c.relname, 'RULE', r.rulename FROM pg_catalog.pg_rewrite r \
         JOIN pg_catalog.pg_class c ON c.oid = r.ev_class \
         JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         WHERE c.relkind IN ('r', 'p') AND r.ev_type <> '1' \
         AND r.ev_enabled IN ({enabled}) ORDER BY 1, 2, 4"
    )
}

/// Those of them that are on these tables.
fn firing_triggers(rows: &[Row], tables: &[(TableName, Table)]) -> Vec<Trigger> {
    let text = |row: &Row, i: usize| row.get(i).unwrap_or_default().to_owned();
    rows.iter()
        .map(|row| {
            let kind = if row.get(2) == Some("RULE") { "RULE" } else { "TRIGGER" };
            (TableName { schema: text(row, 0), name: text(row, 1) }, kind, text(row, 3))
        })
        .filter(|(table, _, _)| tables.iter().any(|(name, _)| name == table))
        .collect()
}
