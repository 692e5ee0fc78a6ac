//! Positions of sequences on the publisher.

use super::read::{is, oid_array, table_name, text};
use crate::publication::{PublicationSpec, TableName};
use farshore_pg::{Connection, Error};
use serde::{Deserialize, Serialize};

/// A sequence that belongs to what is published, and where it stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SequencePosition {
    /// Schema and name.
    pub name: TableName,
    /// A published column that takes its values, if any: table and column name.
    pub column: Option<(TableName, String)>,
    /// The table that owns it, if any; none where another site runs a version that does not tell.
    #[serde(default)]
    pub owner: Option<TableName>,
    /// `AS type START … INCREMENT …` as SQL.
    pub options: String,
    /// Whether the role may read it.
    pub readable: bool,
    /// The role, as SQL; empty where another site runs a version that does not tell.
    #[serde(default)]
    pub role: String,
    /// The value it gave last; none if it was never used.
    pub last_value: Option<i64>,
}

/// Reads the sequences that `tables` (OIDs) own or use, and, where the publication takes whole
/// schemas, all of those schemas.
pub(crate) async fn read_positions(
    spec: &PublicationSpec,
    sql: &mut Connection,
    tables: &[u32],
) -> Result<Vec<SequencePosition>, Error> {
    // Schemas in publications came with 15.
    let schemas = if sql.server_version() >= 150_000 {
        "SELECT s.pnnspid FROM pg_catalog.pg_publication p \
         JOIN pg_catalog.pg_publication_namespace s ON s.pnpubid = p.oid WHERE p.pubname = $2 UNION"
    } else {
        ""
    };
    let query = format!(
        "WITH linked AS ( \
           SELECT d.objid AS oid, d.refobjid AS tbl, d.refobjsubid AS col \
           FROM pg_catalog.pg_depend d WHERE d.classid = 'pg_catalog.pg_class'::regclass \
             AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.deptype IN ('a', 'i') \
             AND d.refobjsubid > 0 AND d.refobjid = ANY ($1::text::oid[]) \
           UNION ALL SELECT d.refobjid, f.adrelid, f.adnum FROM pg_catalog.pg_depend d \
           JOIN pg_catalog.pg_attrdef f ON f.oid = d.objid \
           WHERE d.classid = 'pg_catalog.pg_attrdef'::regclass \
             AND d.refclassid = 'pg_catalog.pg_class'::regclass \
             AND f.adrelid = ANY ($1::text::oid[])), \
         whole AS ({schemas} SELECT n.oid FROM pg_catalog.pg_namespace n \
           WHERE n.nspname = ANY ($3::text::text[]) OR (n.nspname !~ '^pg_' \
             AND n.nspname NOT IN ('information_schema', 'farshore') AND ($4 = 'all' OR EXISTS ( \
               SELECT 1 FROM pg_catalog.pg_publication WHERE pubname = $2 AND puballtables)))) \
         SELECT n.nspname, c.relname, tn.nspname, t.relname, a.attname, \
           pg_catalog.format('AS %s START WITH %s INCREMENT BY %s MINVALUE %s MAXVALUE %s \
             CACHE %s%s', s.seqtypid::regtype, s.seqstart, s.seqincrement, s.seqmin, s.seqmax, \
             s.seqcache, CASE WHEN s.seqcycle THEN ' CYCLE' ELSE '' END), r.readable, \
           CASE WHEN r.readable THEN pg_catalog.pg_sequence_last_value(c.oid) END, \
           pg_catalog.quote_ident(current_user), o.schema_name, o.table_name \
         FROM pg_catalog.pg_sequence s JOIN pg_catalog.pg_class c ON c.oid = s.seqrelid \
         JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
         CROSS JOIN LATERAL (SELECT pg_catalog.has_sequence_privilege(c.oid, 'USAGE, SELECT') \
           AS readable) r \
         LEFT JOIN LATERAL (SELECT tbl, col FROM linked WHERE linked.oid = c.oid LIMIT 1) l ON true \
         LEFT JOIN pg_catalog.pg_class t ON t.oid = l.tbl \
         LEFT JOIN pg_catalog.pg_namespace tn ON tn.oid = t.relnamespace \
         LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = l.tbl AND a.attnum = l.col \
         LEFT JOIN LATERAL (SELECT dn.nspname AS schema_name, dc.relname AS table_name \
           FROM pg_catalog.pg_depend d JOIN pg_catalog.pg_class dc ON dc.oid = d.refobjid \
           JOIN pg_catalog.pg_namespace dn ON dn.oid = dc.relnamespace \
           WHERE d.objid = c.oid AND d.classid = 'pg_catalog.pg_class'::regclass \
             AND d.refclassid = 'pg_catalog.pg_class'::regclass AND d.deptype IN ('a', 'i') \
             AND d.refobjsubid > 0 LIMIT 1) o ON true \
         WHERE c.relpersistence = 'p' AND (l.tbl IS NOT NULL OR (n.oid IN (SELECT * FROM whole) \
           AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend d WHERE d.objid = c.oid \
             AND d.classid = 'pg_catalog.pg_class'::regclass AND d.deptype IN ('e', 'i', 'a')))) \
         ORDER BY 1, 2"
    );
    let all = spec.tables.iter().any(|pattern| pattern.schema.is_none());
    let named: Vec<String> = spec
        .tables
        .iter()
        .filter(|pattern| pattern.name.is_none())
        .filter_map(|pattern| pattern.schema.as_deref())
        .map(|schema| format!("\"{}\"", schema.replace('\\', "\\\\").replace('"', "\\\"")))
        .collect();
    let (tables, named) = (oid_array(tables), format!("{{{}}}", named.join(",")));
    let publication = spec.publication_name();
    let parameters = [
        Some(tables.as_str()),
        Some(publication.as_str()),
        Some(named.as_str()),
        Some(if all { "all" } else { "named" }),
    ];
    let rows = sql.query(&query, &parameters).await?;
    rows.iter()
        .map(|row| {
            Ok(SequencePosition {
                name: table_name(row, 0),
                column: row.get(4).map(|column| (table_name(row, 2), column.to_owned())),
                owner: row.get(10).map(|_| table_name(row, 9)),
                options: text(row, 5),
                readable: is(row, 6),
                role: text(row, 8),
                last_value: match row.get(7) {
                    Some(_) => Some(row.parse(7)?),
                    None => None,
                },
            })
        })
        .collect()
}
