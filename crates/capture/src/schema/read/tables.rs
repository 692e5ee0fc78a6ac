//! Tables with their columns, constraints, indexes and comments.

use super::{is, optional, table_name, text};
use crate::schema::{ColumnFill, Constraint, ConstraintKind, Index, Table, TableColumn};
use farshore_pg::{Connection, Error, Row, partition_tree};
use std::collections::{BTreeSet, HashMap, HashSet};

/// Tables of `seeds` with their partitions and listed ancestors, parents first.
pub(super) async fn tables(
    sql: &mut Connection,
    seeds: &str,
    listed: &str,
) -> Result<Vec<Table>, Error> {
    let rows = sql.query(&tables_wanted(), &[Some(seeds), Some(listed)]).await?;
    let mut tables: HashMap<u32, Table> = HashMap::new();
    for row in &rows {
        let oid = row.parse(0)?;
        let table = Table {
            oid,
            name: table_name(row, 1),
            columns: Vec::new(),
            partition_key: optional(row, 3),
            partition_of: None,
            inherits: Vec::new(),
            constraints: Vec::new(),
            indexes: Vec::new(),
            replica_identity: match row.get(4) {
                Some("f") => Some("FULL".to_owned()),
                Some("n") => Some("NOTHING".to_owned()),
                Some("i") => optional(row, 5).map(|index| format!("USING INDEX {index}")),
                _ => None,
            },
            comments: Vec::new(),
        };
        tables.insert(oid, table);
    }
    let oids: Vec<u32> = tables.keys().copied().collect();
    let oids = super::oid_array(&oids);
    add_columns(sql, &oids, &mut tables).await?;
    add_constraints(sql, &oids, &mut tables).await?;
    add_indexes(sql, &oids, &mut tables).await?;
    let comments = "SELECT d.objoid, a.attname, d.description FROM pg_catalog.pg_description d \
        LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = d.objoid AND a.attnum = d.objsubid \
          AND d.objsubid > 0 \
        WHERE d.classoid = 'pg_catalog.pg_class'::regclass AND d.objoid = ANY ($1::text::oid[]) \
        ORDER BY d.objoid, d.objsubid";
    for row in sql.query(comments, &[Some(&oids)]).await? {
        if let Some(table) = tables.get_mut(&row.parse(0)?) {
            table.comments.push((optional(&row, 1), text(&row, 2)));
        }
    }
    let inherited = "SELECT i.inhrelid, i.inhparent, \
          pg_catalog.pg_get_expr(c.relpartbound, c.oid) \
        FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid \
        WHERE i.inhrelid = ANY ($1::text::oid[]) AND i.inhparent = ANY ($1::text::oid[]) \
        ORDER BY i.inhrelid, i.inhseqno";
    let mut parents: HashMap<u32, Vec<u32>> = HashMap::new();
    for row in sql.query(inherited, &[Some(&oids)]).await? {
        let (child, parent): (u32, u32) = (row.parse(0)?, row.parse(1)?);
        let Some(parent_name) = tables.get(&parent).map(|table| table.name.clone()) else {
            continue;
        };
        let Some(table) = tables.get_mut(&child) else { continue };
        match row.get(2) {
            Some(bound) => table.partition_of = Some((parent_name, bound.to_owned())),
            None => table.inherits.push(parent_name),
        }
        parents.entry(child).or_default().push(parent);
    }
    keep_from_others(&mut tables, &parents);
    // A column may be of another table's row type.
    let row_types = "SELECT a.attrelid, t.typrelid FROM pg_catalog.pg_attribute a \
        JOIN pg_catalog.pg_type c ON c.oid = a.atttypid \
        JOIN pg_catalog.pg_type t ON t.oid IN (c.oid, c.typelem) \
        WHERE a.attrelid = ANY ($1::text::oid[]) AND a.attnum > 0 AND NOT a.attisdropped \
          AND t.typrelid = ANY ($1::text::oid[])";
    for row in sql.query(row_types, &[Some(&oids)]).await? {
        parents.entry(row.parse(0)?).or_default().push(row.parse(1)?);
    }
    Ok(parents_first(tables, &parents))
}

/// `$1`: tables wanted, `$2`: tables listed by the publication.
fn tables_wanted() -> String {
    let tree = partition_tree("above.oid");
    format!(
        "WITH seed AS (SELECT pg_catalog.unnest($1::text::oid[]) AS oid), \
    listed AS (SELECT pg_catalog.unnest($2::text::oid[]) AS oid), \
    above AS ( \
      SELECT a.relid::oid AS oid FROM seed CROSS JOIN LATERAL ( \
        SELECT x.relid, x.ord, pg_catalog.max(x.ord) \
          FILTER (WHERE x.relid IN (SELECT oid FROM listed)) OVER () AS top \
        FROM pg_catalog.pg_partition_ancestors(seed.oid::regclass) \
          WITH ORDINALITY AS x (relid, ord)) a \
      WHERE a.ord <= a.top \
      UNION SELECT oid FROM seed), \
    wanted AS ( \
      SELECT oid FROM above \
      UNION SELECT p.relid FROM above CROSS JOIN LATERAL {tree} p) \
    SELECT c.oid, n.nspname, c.relname, \
      CASE WHEN c.relkind = 'p' THEN pg_catalog.pg_get_partkeydef(c.oid) END, c.relreplident, \
      (SELECT pg_catalog.quote_ident(ic.relname) FROM pg_catalog.pg_index i \
        JOIN pg_catalog.pg_class ic ON ic.oid = i.indexrelid \
        WHERE i.indrelid = c.oid AND i.indisreplident) \
    FROM wanted w JOIN pg_catalog.pg_class c ON c.oid = w.oid \
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind IN ('r', 'p')"
    )
}

async fn add_columns(
    sql: &mut Connection,
    oids: &str,
    tables: &mut HashMap<u32, Table>,
) -> Result<(), Error> {
    // From 18 on a NOT NULL may be there that not every row keeps to.
    let kept = if sql.server_version() >= 180_000 {
        "AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_constraint k WHERE k.conrelid = a.attrelid \
         AND k.contype = 'n' AND NOT k.convalidated AND a.attnum = ANY (k.conkey))"
    } else {
        ""
    };
    let columns = format!(
        "SELECT a.attrelid, a.attname, pg_catalog.format_type(a.atttypid, a.atttypmod), \
           CASE WHEN a.attcollation <> t.typcollation THEN \
             pg_catalog.quote_ident(cn.nspname) || '.' || pg_catalog.quote_ident(co.collname) END, \
           a.attnotnull {kept}, a.attgenerated, a.attidentity, \
           pg_catalog.pg_get_expr(f.adbin, f.adrelid), f.oid, sn.nspname, sc.relname, \
           pg_catalog.format('START WITH %s INCREMENT BY %s MINVALUE %s MAXVALUE %s CACHE %s%s', \
             s.seqstart, s.seqincrement, s.seqmin, s.seqmax, s.seqcache, \
             CASE WHEN s.seqcycle THEN ' CYCLE' ELSE '' END), r.relispartition \
         FROM pg_catalog.pg_attribute a \
         JOIN pg_catalog.pg_class r ON r.oid = a.attrelid \
         JOIN pg_catalog.pg_type t ON t.oid = a.atttypid \
         LEFT JOIN pg_catalog.pg_collation co ON co.oid = a.attcollation \
         LEFT JOIN pg_catalog.pg_namespace cn ON cn.oid = co.collnamespace \
         LEFT JOIN pg_catalog.pg_attrdef f ON f.adrelid = a.attrelid AND f.adnum = a.attnum \
         LEFT JOIN pg_catalog.pg_depend d ON a.attidentity <> '' AND d.deptype = 'i' \
           AND d.classid = 'pg_catalog.pg_class'::regclass \
           AND d.refclassid = 'pg_catalog.pg_class'::regclass \
           AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum \
         LEFT JOIN pg_catalog.pg_sequence s ON s.seqrelid = d.objid \
         LEFT JOIN pg_catalog.pg_class sc ON sc.oid = s.seqrelid \
         LEFT JOIN pg_catalog.pg_namespace sn ON sn.oid = sc.relnamespace \
         WHERE a.attrelid = ANY ($1::text::oid[]) AND a.attnum > 0 AND NOT a.attisdropped \
         ORDER BY a.attrelid, a.attnum"
    );
    let rows = sql.query(&columns, &[Some(oids)]).await?;
    let needs = needs_of_defaults(sql, oids).await?;
    for row in &rows {
        let column = TableColumn {
            name: text(row, 1),
            type_name: text(row, 2),
            collation: optional(row, 3),
            not_null: is(row, 4),
            fill: fill(row, &needs)?,
            unsent: false,
        };
        if let Some(table) = tables.get_mut(&row.parse(0)?) {
            table.columns.push(column);
        }
    }
    Ok(())
}

/// What a default calls: extensions, and functions that cannot be created elsewhere.
type Needs = HashMap<u32, (BTreeSet<String>, BTreeSet<String>)>;

fn fill(row: &Row, needs: &Needs) -> Result<ColumnFill, Error> {
    let expression = row.get(7).map(str::to_owned);
    let generated = row.get(5).unwrap_or_default();
    Ok(match (expression, row.get(6).unwrap_or_default()) {
        (Some(expression), _) if !generated.is_empty() => {
            ColumnFill::Generated { expression, virtual_: generated == "v" }
        }
        (Some(expression), _) => {
            let (extensions, foreign) = needs.get(&row.parse(8)?).cloned().unwrap_or_default();
            ColumnFill::Default {
                expression,
                extensions: extensions.into_iter().collect(),
                foreign_functions: foreign.into_iter().collect(),
            }
        }
        // A partition has its identity from its parent.
        (None, identity @ ("a" | "d")) if !is(row, 12) && row.get(10).is_some() => {
            ColumnFill::Identity {
                always: identity == "a",
                sequence: table_name(row, 9),
                options: text(row, 11),
            }
        }
        (None, _) => ColumnFill::None,
    })
}

async fn needs_of_defaults(sql: &mut Connection, oids: &str) -> Result<Needs, Error> {
    let rows = sql
        .query(
            "SELECT f.oid, e.extname, p.oid::regprocedure, l.lanname IN ('sql', 'plpgsql') \
             FROM pg_catalog.pg_attrdef f \
             JOIN pg_catalog.pg_depend d ON d.objid = f.oid \
               AND d.classid = 'pg_catalog.pg_attrdef'::regclass \
               AND d.refclassid = 'pg_catalog.pg_proc'::regclass \
             JOIN pg_catalog.pg_proc p ON p.oid = d.refobjid \
             JOIN pg_catalog.pg_language l ON l.oid = p.prolang \
             LEFT JOIN pg_catalog.pg_depend x ON x.objid = p.oid AND x.deptype = 'e' \
               AND x.classid = 'pg_catalog.pg_proc'::regclass \
             LEFT JOIN pg_catalog.pg_extension e ON e.oid = x.refobjid \
             WHERE f.adrelid = ANY ($1::text::oid[])",
            &[Some(oids)],
        )
        .await?;
    let mut needs = Needs::new();
    for row in &rows {
        let entry = needs.entry(row.parse(0)?).or_default();
        match row.get(1) {
            Some(extension) => drop(entry.0.insert(extension.to_owned())),
            None if !is(row, 3) => drop(entry.1.insert(text(row, 2))),
            None => {}
        }
    }
    Ok(needs)
}

/// Checks and foreign keys that no parent among the tables brings along are the table's own.
fn keep_from_others(tables: &mut HashMap<u32, Table>, parents: &HashMap<u32, Vec<u32>>) {
    let is_check = |constraint: &&Constraint| constraint.kind == ConstraintKind::Check;
    let checks: HashMap<u32, HashSet<String>> = tables
        .iter()
        .map(|(oid, table)| {
            let names = table.constraints.iter().filter(is_check).map(|check| check.name.clone());
            (*oid, names.collect())
        })
        .collect();
    for (oid, table) in tables {
        let parents = parents.get(oid).map_or(&[][..], Vec::as_slice);
        let has_check = |name: &String| {
            parents.iter().any(|p| checks.get(p).is_some_and(|checks| checks.contains(name)))
        };
        for constraint in &mut table.constraints {
            constraint.from_parent &= match constraint.kind {
                ConstraintKind::Check => has_check(&constraint.name),
                ConstraintKind::ForeignKey => table.partition_of.is_some(),
                _ => true,
            };
        }
    }
}

/// Without those that stand for one partition each of the table that a foreign key refers to.
async fn add_constraints(
    sql: &mut Connection,
    oids: &str,
    tables: &mut HashMap<u32, Table>,
) -> Result<(), Error> {
    let rows = sql
        .query(
            "SELECT k.conrelid, k.conname, k.contype, pg_catalog.pg_get_constraintdef(k.oid), \
               fn.nspname, fc.relname, \
               k.conparentid <> 0 OR (k.coninhcount > 0 AND NOT k.conislocal), \
               coalesce(i.indisreplident, false), \
               CASE WHEN k.contype = 'f' THEN \
                 pg_catalog.format(' REFERENCES %I.%I', fn.nspname, fc.relname) END \
             FROM pg_catalog.pg_constraint k \
             LEFT JOIN pg_catalog.pg_class fc ON fc.oid = k.confrelid \
             LEFT JOIN pg_catalog.pg_namespace fn ON fn.oid = fc.relnamespace \
             LEFT JOIN pg_catalog.pg_index i ON i.indexrelid = k.conindid \
               AND i.indrelid = k.conrelid \
             WHERE k.conrelid = ANY ($1::text::oid[]) AND k.contype IN ('p', 'u', 'c', 'x', 'f') \
               AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_constraint whole \
                 WHERE whole.oid = k.conparentid AND whole.conrelid = k.conrelid) \
             ORDER BY k.conrelid, k.contype <> 'p', k.conname",
            &[Some(oids)],
        )
        .await?;
    for row in &rows {
        let kind = match row.get(2) {
            Some("p") => ConstraintKind::PrimaryKey,
            Some("u") => ConstraintKind::Unique,
            Some("x") => ConstraintKind::Exclusion,
            Some("f") => ConstraintKind::ForeignKey,
            _ => ConstraintKind::Check,
        };
        let (mut definition, mut references) = (text(row, 3), None);
        if kind == ConstraintKind::ForeignKey
            && let Some((before, after)) = definition.split_once(row.get(8).unwrap_or_default())
        {
            references = Some((table_name(row, 4), after.to_owned()));
            definition = before.to_owned();
        }
        let constraint = Constraint {
            name: text(row, 1),
            kind,
            definition,
            references,
            from_parent: is(row, 6),
            identifies: is(row, 7),
        };
        if let Some(table) = tables.get_mut(&row.parse(0)?) {
            table.constraints.push(constraint);
        }
    }
    Ok(())
}

async fn add_indexes(
    sql: &mut Connection,
    oids: &str,
    tables: &mut HashMap<u32, Table>,
) -> Result<(), Error> {
    let rows = sql
        .query(
            "SELECT i.indrelid, c.relname, pg_catalog.pg_get_indexdef(i.indexrelid), \
               EXISTS (SELECT 1 FROM pg_catalog.pg_inherits h WHERE h.inhrelid = i.indexrelid), \
               i.indisreplident, i.indisunique, pg_catalog.format('%I.%I ', n.nspname, t.relname) \
             FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid \
             JOIN pg_catalog.pg_class t ON t.oid = i.indrelid \
             JOIN pg_catalog.pg_namespace n ON n.oid = t.relnamespace \
             WHERE i.indrelid = ANY ($1::text::oid[]) AND (i.indisvalid OR c.relkind = 'I') \
               AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_constraint k \
                 WHERE k.conindid = i.indexrelid AND k.conrelid = i.indrelid \
                 AND k.contype IN ('p', 'u', 'x')) \
             ORDER BY i.indrelid, c.relname",
            &[Some(oids)],
        )
        .await?;
    for row in &rows {
        let Some((_, definition)) =
            row.get(2).and_then(|whole| whole.split_once(row.get(6).unwrap_or_default()))
        else {
            continue;
        };
        let index = Index {
            name: text(row, 1),
            unique: is(row, 5),
            definition: definition.to_owned(),
            from_parent: is(row, 3),
            identifies: is(row, 4),
        };
        if let Some(table) = tables.get_mut(&row.parse(0)?) {
            table.indexes.push(index);
        }
    }
    Ok(())
}

/// Every table after its parents; otherwise by name.
fn parents_first(mut tables: HashMap<u32, Table>, parents: &HashMap<u32, Vec<u32>>) -> Vec<Table> {
    let mut left: Vec<u32> = tables.keys().copied().collect();
    left.sort_by(|a, b| tables[a].name.cmp(&tables[b].name));
    let mut ordered = Vec::new();
    while !left.is_empty() {
        let waits = |oid: &u32| {
            parents.get(oid).is_some_and(|parents| parents.iter().any(|p| left.contains(p)))
        };
        let (waiting, ready): (Vec<u32>, Vec<u32>) = left.iter().copied().partition(waits);
        // PostgreSQL makes no cycles here.
        if ready.is_empty() {
            break;
        }
        ordered.extend(ready.iter().filter_map(|oid| tables.remove(oid)));
        left = waiting;
    }
    ordered
}
