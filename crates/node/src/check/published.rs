//! The tables that are to be published: what we may not read or publish, and what the publisher
//! will refuse once they are published.

use super::labels::Labels;
use super::publisher::{self, Places};
use super::server::Server;
use super::tables::{self, Column, Leaf, Table};
use super::{Findings, some_of};
use farshore_apply::postgres::foreign_keys::ForeignKeys;
use farshore_capture::CaptureError;
use farshore_capture::publication::{
    Article, PublicationSpec, PublishedColumn, PublishedTable, TableName, Unfit,
};
use farshore_model::{UserType, quote_identifier};
use farshore_pg::{Connection, Error};
use std::collections::{BTreeMap, HashMap, HashSet};

/// First version that refuses changes of a table whose replica identity has generated columns which
/// are not published, as `server_version_num` writes it.
const GENERATED_IDENTITY_REFUSED: u32 = 180_000;

/// Partitions of a table that a remedy names one by one.
const ALTERED_SHOWN: usize = 8;

/// What a publisher would publish.
pub struct Published {
    /// The publisher; `None` where another site asks it. Then of its tables no more is known than
    /// their names, and their columns' names and types.
    pub server: Option<Server>,
    /// Tables in name order; their columns are those that are published.
    pub tables: Vec<(TableName, Table)>,
    /// What the columns' types are made of, where those are not PostgreSQL's own; sorted by OID.
    pub types: Vec<UserType>,
    /// Of the enums among them; empty where another site asks the publisher.
    pub labels: Labels,
    /// The publisher's foreign keys, where they could be read.
    pub foreign_keys: Option<ForeignKeys>,
    /// Places that it takes on the publisher's server, where they could be counted.
    pub places: Option<Places>,
}

impl Published {
    /// As another site tells.
    pub fn told(tables: &[PublishedTable]) -> Published {
        let column = |column: &PublishedColumn| Column {
            name: column.name.clone(),
            type_name: String::new(),
            not_null: false,
            has_default: false,
            generated: false,
            virtual_: false,
            type_oid: column.type_oid,
            type_modifier: column.type_modifier,
        };
        let mut types: Vec<UserType> =
            tables.iter().flat_map(|table| &table.types).cloned().collect();
        types.sort_by_key(|known| known.oid);
        types.dedup_by_key(|known| known.oid);
        let mut tables: Vec<(TableName, Table)> = tables
            .iter()
            .map(|published| {
                let table = Table {
                    kind: if published.partitioned { 'p' } else { 'r' },
                    columns: published.columns.iter().map(column).collect(),
                    row_filter: published.row_filter.clone(),
                    ..Table::default()
                };
                (published.table.clone(), table)
            })
            .collect();
        tables.sort_by(|(one, _), (other, _)| one.cmp(other));
        let labels = Labels::new();
        Published { server: None, tables, types, labels, foreign_keys: None, places: None }
    }
}

/// Names of the tables that the site file or the adopted publication names, with row filters, and
/// with published columns where they are known already.
pub async fn expand(
    spec: &PublicationSpec,
    sql: &mut Connection,
    unfit: Unfit,
) -> Result<Vec<(TableName, Article)>, CaptureError> {
    if spec.adopt_publication.is_some() {
        spec.ensure_publication(sql).await?;
        let tables = spec.published_tables(sql).await?;
        return Ok(tables
            .into_iter()
            .map(|table| {
                let columns = table.columns.into_iter().map(|column| column.name).collect();
                (table.table, Article { columns: Some(columns), row_filter: table.row_filter })
            })
            .collect());
    }
    Ok(spec.expand_tables(sql, unfit).await?.into_iter().collect())
}

/// Leaves the tables whose rows come under their own names: not partitions that are published
/// through their root, nor roots that are published leaf by leaf.
pub async fn leave_out_what_others_stand_for(
    spec: &PublicationSpec,
    sql: &mut Connection,
    unfit: Unfit,
    tables: &mut Vec<(TableName, Table)>,
) -> Result<(), CaptureError> {
    if tables.iter().any(|(_, table)| table.kind == 'p') {
        let published: HashSet<TableName> =
            spec.would_publish(sql, unfit).await?.tables.into_iter().collect();
        tables.retain(|(table, _)| published.contains(table));
    }
    Ok(())
}

/// Of tables that are published through their root: partitions whose changes come with fewer old
/// values than the root's replica identity promises. PostgreSQL hands `REPLICA IDENTITY` down to no
/// partition, and it is the partition's that is logged.
pub async fn check_leaves(
    tables: &[(TableName, Table)],
    sql: &mut Connection,
    findings: &mut Findings,
) -> Result<(), Error> {
    let roots: HashMap<&TableName, &Table> =
        tables.iter().filter(|(_, table)| table.kind == 'p').map(|(n, t)| (n, t)).collect();
    if roots.is_empty() {
        return Ok(());
    }
    let leaves = tables::leaves(sql, &tables::Named::new(roots.keys().copied())).await?;
    let mut lacking: BTreeMap<&TableName, Vec<&TableName>> = BTreeMap::new();
    for leaf in &leaves {
        if roots.get(&leaf.root).is_some_and(|root| lacks_identity(leaf, root)) {
            lacking.entry(&leaf.root).or_default().push(&leaf.name);
        }
    }
    for (root, leaves) in lacking {
        let names: Vec<String> = leaves.iter().map(|leaf| leaf.to_string()).collect();
        let mut alter: Vec<String> = leaves
            .iter()
            .take(ALTERED_SHOWN)
            .map(|leaf| format!("ALTER TABLE {leaf} REPLICA IDENTITY FULL"))
            .collect();
        if leaves.len() > alter.len() {
            alter.push("and so on".to_owned());
        }
        findings.warning(
            format!(
                "partitions of {root}, which is published through it, have another replica identity \
                 (PostgreSQL does not hand it down): their changes come without old values by which \
                 rows are to be found, and may stop a subscription: {}",
                some_of(&names)
            ),
            alter.join("; "),
        );
    }
    Ok(())
}

/// Of partitions that are published by themselves: those whose namesakes elsewhere refuse some of
/// their rows.
pub async fn check_hashed(
    tables: &[(TableName, Table)],
    sql: &mut Connection,
    findings: &mut Findings,
) -> Result<(), Error> {
    let named = tables::Named::new(tables.iter().map(|(name, _)| name));
    for (root, column) in tables::hashed_by_enum(sql, &named).await? {
        findings.warning(
            format!(
                "{root} is partitioned by hash of column {}, which is of an enum, and its partitions \
                 are published by themselves. PostgreSQL hashes a value of an enum by its OID, which \
                 is another one on another server: a partition of the target refuses rows of its \
                 namesake, and that stops a subscription",
                quote_identifier(&column)
            ),
            "Publish them through their root (publish_via_partition_root = true), or make tables on \
             the target that are no partitions by hash",
        );
    }
    Ok(())
}

/// Whether changes of a partition come without old values that its root's identity has.
fn lacks_identity(leaf: &Leaf, root: &Table) -> bool {
    match (leaf.identity, root.identity) {
        ('f', _) => false,
        (_, 'f') => true,
        // Where the root has none, that is said of it.
        (_, _) => !root.key.iter().all(|column| leaf.key.contains(column)),
    }
}

/// Looks at every table.
pub async fn check(
    spec: &PublicationSpec,
    server: &Server,
    sql: &mut Connection,
    unfit: Unfit,
    wanted: Vec<(TableName, Article)>,
    catalogue: &HashMap<TableName, Table>,
    findings: &mut Findings,
) -> Result<Vec<(TableName, Table)>, Error> {
    findings.note(format!("{} tables match", wanted.len()));
    not_published(spec, &wanted, sql, findings).await?;
    match spec.without_tables(sql).await {
        Ok(without) => {
            for pattern in without {
                findings.warning(
                    format!("no table on the publisher matches \"{pattern}\" as yet"),
                    "Those that are made there join by themselves; if others were meant, correct \
                     `tables` in the site file",
                );
            }
        }
        Err(error) => findings.agent_error(&error, error.is_transient()),
    }
    // A publication that is as configured already needs no rights on its tables but to read them.
    let as_wanted = match spec.is_as_configured(sql, unfit).await {
        Ok(as_wanted) => as_wanted,
        Err(error) => {
            findings.agent_error(&error, error.is_transient());
            true
        }
    };
    let may_change =
        as_wanted || publisher::check_publication_rights(spec, server, sql, findings).await?;
    let mut tables = Vec::new();
    let mut all_named = true;
    for (name, Article { columns, row_filter }) in wanted {
        let Some(table) = catalogue.get(&name) else { continue };
        let before = findings.all.len();
        if !table.schema_usable {
            let schema = quote_identifier(&name.schema);
            findings.error(
                format!(
                    "role {} may not look into schema {schema}, where {name} is",
                    server.role_sql()
                ),
                format!("GRANT USAGE ON SCHEMA {schema} TO {}", server.role_sql()),
            );
            all_named = false;
            continue;
        }
        // Where others are left out, what is somebody else's is here because it is published.
        let is_published = as_wanted || unfit == Unfit::LeaveOut && !table.owned;
        check_table(&name, table, server, is_published, findings);
        all_named &= findings.all.len() == before;
        let mut table = Table { row_filter, ..table.clone() };
        check_identity(&name, &table, columns.as_deref(), findings);
        let listed = columns.as_deref().unwrap_or_default();
        check_generated_identity(&name, &table, listed, sql.server_version(), findings);
        table.columns.retain(|column| {
            columns.as_ref().map_or(!column.generated, |listed| listed.contains(&column.name))
        });
        tables.push((name, table));
    }
    check_sequences(&tables, server, findings);
    let mut not_sent = Vec::new();
    if !as_wanted && may_change && all_named {
        // Filters and column lists: only the server itself can tell.
        let tried = spec.try_articles(sql, unfit).await;
        for error in tried.refused {
            findings.agent_error(&error, error.is_transient());
        }
        for (name, columns) in tried.filtered_by {
            findings.warning(
                format!(
                    "the filter of {name} asks for {}, which its replica identity has not: the \
                     publisher will refuse every UPDATE and DELETE of it",
                    some_of(&columns)
                ),
                format!(
                    "ALTER TABLE {name} REPLICA IDENTITY FULL, or filter by columns of its key"
                ),
            );
        }
        not_sent = tried.not_sent;
    }
    if as_wanted {
        match spec.not_sent(sql).await {
            Ok(found) => not_sent = found,
            Err(error) => findings.agent_error(&error, error.is_transient()),
        }
    }
    for (name, columns) in not_sent {
        findings.warning(
                format!(
                    "an UPDATE of its key may bring a row of {name} within its filter, and the \
                     publisher does not send large values then (some 2 KB and more) that the UPDATE \
                     leaves as they were, of {}: such a row stops the subscription",
                    some_of(&columns)
                ),
                format!(
                    "ALTER TABLE {name} REPLICA IDENTITY FULL (all partitions, too; not with a list \
                     of columns), or publish it without the filter"
                ),
            );
    }
    Ok(tables)
}

/// Values of sequences are not in the log: they are read.
fn check_sequences(tables: &[(TableName, Table)], server: &Server, findings: &mut Findings) {
    let sequences = tables.iter().flat_map(|(_, table)| &table.sequences);
    let hidden = sequences.filter(|sequence| !sequence.readable);
    let mut hidden: Vec<String> = hidden.map(|sequence| sequence.name.clone()).collect();
    hidden.sort();
    hidden.dedup();
    if hidden.is_empty() {
        return;
    }
    let role = server.role_sql();
    findings.warning(
        format!(
            "role {role} may not read sequences of published tables, so they stay behind on the \
             targets: {}",
            some_of(&hidden)
        ),
        format!("GRANT SELECT ON SEQUENCE {} TO {role}", hidden.join(", ")),
    );
}

fn check_table(
    name: &TableName,
    table: &Table,
    server: &Server,
    as_wanted: bool,
    findings: &mut Findings,
) {
    let role = server.role_sql();
    if !table.may_select {
        findings.error(
            format!("role {role} may not read {name}, as the initial copy has to"),
            format!("GRANT SELECT ON {name} TO {role}"),
        );
    }
    if !table.owned && !as_wanted {
        let owner = quote_identifier(&table.owner);
        let membership = match table.owner_is_superuser {
            // Nobody should get a superuser's rights for a table's sake.
            true => {
                format!("ALTER TABLE {name} OWNER TO {role}, or to a role that {role} is one of")
            }
            false => format!("GRANT {owner} TO {role}"),
        };
        findings.error(
            format!("role {role} does not own {name}, so it cannot publish it"),
            format!(
                "{membership}; or let {owner} CREATE PUBLICATION, and set adopt_publication to its \
                 name"
            ),
        );
    }
    if table.row_security {
        findings.error(
            format!(
                "row-level security hides rows of {name} from role {role}: the copy would lack them"
            ),
            format!("ALTER ROLE {role} BYPASSRLS (as a superuser)"),
        );
    }
}

/// What the publisher itself will refuse once the table is published.
fn check_identity(
    name: &TableName,
    table: &Table,
    columns: Option<&[String]>,
    findings: &mut Findings,
) {
    if !table.has_identity() {
        let why = match table.identity {
            'n' => "has REPLICA IDENTITY NOTHING",
            'i' => "has lost the index that its REPLICA IDENTITY names",
            _ if table.primary_key => "has only a deferrable primary key, which is no identity",
            _ => "has no primary key or other replica identity",
        };
        findings.warning(
            format!(
                "table {name} {why}: inserts flow, but the publisher will refuse every UPDATE \
                 and DELETE of it"
            ),
            match (table.identity, table.primary_key) {
                ('n' | 'i', true) => format!(
                    "ALTER TABLE {name} REPLICA IDENTITY DEFAULT (its primary key, if that is not \
                     deferrable), or ALTER TABLE {name} REPLICA IDENTITY FULL"
                ),
                (_, true) => format!(
                    "Make the primary key anew, NOT DEFERRABLE, or ALTER TABLE {name} REPLICA \
                     IDENTITY FULL"
                ),
                (_, false) => format!(
                    "ALTER TABLE {name} ADD PRIMARY KEY (…), or ALTER TABLE {name} REPLICA IDENTITY \
                     FULL"
                ),
            },
        );
    }
    let Some(columns) = columns else { return };
    let all = table.columns.iter().map(|column| &column.name);
    let left_out: Vec<String> = if table.identity == 'f' {
        all.filter(|column| !columns.contains(column)).cloned().collect()
    } else {
        table.key.iter().filter(|column| !columns.contains(column)).cloned().collect()
    };
    if !left_out.is_empty() {
        findings.warning(
            format!(
                "the column list of {name} leaves out {} of its replica identity: the publisher \
                 will refuse every UPDATE and DELETE of it",
                some_of(&left_out)
            ),
            "Add them to `columns` in the site file",
        );
    }
}

/// Generated columns are not published, and a row may not be told apart without them.
fn check_generated_identity(
    name: &TableName,
    table: &Table,
    listed: &[String],
    version: u32,
    findings: &mut Findings,
) {
    let is_key = |column: &String| {
        (table.identity == 'f' || table.key.contains(column)) && !listed.contains(column)
    };
    let generated = table.columns.iter().filter(|column| column.generated);
    let generated: Vec<String> =
        generated.map(|column| &column.name).filter(|name| is_key(name)).cloned().collect();
    if generated.is_empty() {
        return;
    }
    let generated = some_of(&generated);
    if version >= GENERATED_IDENTITY_REFUSED {
        findings.warning(
            format!(
                "the replica identity of {name} has generated columns ({generated}), which are not \
                 published: the publisher will refuse every UPDATE and DELETE of it"
            ),
            format!("ALTER TABLE {name} REPLICA IDENTITY USING INDEX one of other columns"),
        );
    } else if table.identity != 'f' {
        findings.error(
            format!(
                "the replica identity of {name} has generated columns ({generated}), which the \
                 publisher does not send: its rows could not be told apart"
            ),
            format!(
                "ALTER TABLE {name} REPLICA IDENTITY FULL, or USING INDEX one of other columns"
            ),
        );
    }
}

/// What patterns pass over, so that nobody waits for it.
async fn not_published(
    spec: &PublicationSpec,
    wanted: &[(TableName, Article)],
    sql: &mut Connection,
    findings: &mut Findings,
) -> Result<(), Error> {
    let matches = |name: &TableName| spec.tables.iter().any(|pattern| pattern.matches(name));
    let wanted: HashSet<&TableName> = wanted.iter().map(|(name, _)| name).collect();
    let mut unlogged = Vec::new();
    let mut others = Vec::new();
    for (name, not_a_table) in tables::not_published(sql).await? {
        if !matches(&name) || wanted.contains(&name) {
            continue;
        }
        let which = if not_a_table.is_some() { &mut others } else { &mut unlogged };
        which.push(name.to_string());
    }
    unlogged.sort();
    others.sort();
    if let Some(first) = unlogged.first() {
        findings.warning(
            format!("unlogged tables are not published: {}", some_of(&unlogged)),
            format!("ALTER TABLE {first} SET LOGGED, if its rows are wanted"),
        );
    }
    if !others.is_empty() {
        findings.note(format!("views and foreign tables are not published: {}", some_of(&others)));
    }
    Ok(())
}
