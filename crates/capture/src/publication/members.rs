//! What belongs to the publication on the publisher: tables by OID, their definitions, sequences.

use super::{PublicationSpec, PublishedTable, TableName, ToPublish, Unfit};
use crate::CaptureError;
use crate::schema::{Definitions, SequencePosition, read_definitions, read_positions};
use farshore_pg::{Connection, Row};
use std::collections::HashMap;

/// What a publication would publish.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// OIDs of the tables that changes would be published as.
    pub oids: Vec<u32>,
    /// Their names.
    pub tables: Vec<TableName>,
    /// OIDs of the tables that the publication would name.
    pub listed: Vec<u32>,
    /// Columns that would be published, by table; all but generated ones where it is not there.
    pub columns: HashMap<TableName, Vec<String>>,
}

/// The columns that are published, by table.
pub fn columns_sent(published: &[PublishedTable]) -> HashMap<TableName, Vec<String>> {
    let columns = |table: &PublishedTable| {
        let names = table.columns.iter().map(|column| column.name.clone());
        (table.table.clone(), names.collect())
    };
    published.iter().map(columns).collect()
}

impl PublicationSpec {
    /// OIDs of the tables that the publication names, by themselves or with their schema or all:
    /// partitions of a named table are not among them, nor is what no publication publishes: temporary
    /// and unlogged tables, and the server's own (those below 16384).
    pub async fn listed_tables(&self, sql: &mut Connection) -> Result<Vec<u32>, CaptureError> {
        // Schemas in publications came with 15.
        let schemas = if sql.server_version() >= 150_000 {
            "UNION SELECT c.oid FROM pg_publication p \
             JOIN pg_publication_namespace s ON s.pnpubid = p.oid \
             JOIN pg_class c ON c.relnamespace = s.pnnspid \
             WHERE p.pubname = $1 AND c.relkind IN ('r', 'p')"
        } else {
            ""
        };
        let text = format!(
            "SELECT l.oid FROM ( \
               SELECT r.prrelid FROM pg_publication p \
               JOIN pg_publication_rel r ON r.prpubid = p.oid WHERE p.pubname = $1 \
               UNION SELECT c.oid FROM pg_publication p CROSS JOIN pg_class c \
               WHERE p.pubname = $1 AND p.puballtables AND c.relkind IN ('r', 'p') {schemas}) \
               AS l (oid) \
             JOIN pg_class c ON c.oid = l.oid JOIN pg_namespace n ON n.oid = c.relnamespace \
             WHERE n.nspname <> 'farshore' AND c.oid >= 16384 AND c.relpersistence = 'p'"
        );
        let rows = sql
            .query(&text, &[Some(&self.publication_name())])
            .await
            .map_err(|error| self.publisher_error(error))?;
        rows.iter().map(|row| row.parse(0).map_err(|error| self.publisher_error(error))).collect()
    }

    /// OIDs of the partitioned tables that the publication names.
    pub async fn partitioned_tables(&self, sql: &mut Connection) -> Result<Vec<u32>, CaptureError> {
        let listed: Vec<String> =
            self.listed_tables(sql).await?.iter().map(u32::to_string).collect();
        let rows = sql
            .query(
                "SELECT oid FROM pg_class WHERE relkind = 'p' AND oid = ANY ($1::text::oid[])",
                &[Some(&format!("{{{}}}", listed.join(",")))],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        rows.iter().map(|row| row.parse(0).map_err(|error| self.publisher_error(error))).collect()
    }

    /// Whether the publication publishes changes of partitions as their root's.
    pub(super) async fn is_via_root(&self, sql: &mut Connection) -> Result<bool, CaptureError> {
        let rows = sql
            .query(
                "SELECT pubviaroot FROM pg_publication WHERE pubname = $1",
                &[Some(&self.publication_name())],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        Ok(rows.first().and_then(|row| row.get(0)) == Some("t"))
    }

    /// A text that is another one when tables join or leave the publication, a partition is attached
    /// or detached, a table's columns are added, dropped or renamed, or labels of enums are.
    pub async fn membership_signature(&self, sql: &mut Connection) -> Result<String, CaptureError> {
        let mut tables = self.listed_tables(sql).await?;
        tables.sort_unstable();
        let oids: Vec<String> = tables.iter().map(u32::to_string).collect();
        let oids = format!("{{{}}}", oids.join(","));
        let rows = sql
            .query(
                // Not md5: a server in FIPS mode has none.
                "SELECT encode(sha256(convert_to(concat( \
                   (SELECT string_agg(concat(r.oid, ' ', r.prrelid), ',' ORDER BY r.oid) \
                    FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid \
                    WHERE p.pubname = $1), ';', \
                   (SELECT string_agg(concat(i.inhrelid, ' ', i.inhparent, ' ', i.xmin), ',' \
                      ORDER BY i.inhrelid) \
                    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid \
                    WHERE c.relispartition AND c.relkind IN ('r', 'p') \
                      AND c.relpersistence <> 't'), ';', \
                   (SELECT sum(hashtextextended(concat(a.attrelid, ' ', a.attnum, ' ', a.attname), 0)) \
                    FROM pg_attribute a WHERE a.attrelid = ANY ($2::text::oid[]) \
                      AND a.attnum > 0 AND NOT a.attisdropped), ';', \
                   (SELECT sum(hashtextextended(concat(e.oid, ' ', e.enumlabel), 0)) \
                    FROM pg_enum e)), 'UTF8')), 'hex')",
                &[Some(&self.publication_name()), Some(&oids)],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        let signature = rows.first().and_then(|row| row.get(0)).unwrap_or_default();
        Ok(format!("{signature} {tables:?}"))
    }

    /// The sequences that belong to what is published, and where they stand.
    pub async fn sequences(
        &self,
        sql: &mut Connection,
    ) -> Result<Vec<SequencePosition>, CaptureError> {
        let mut tables = self.listed_tables(sql).await?;
        let published = self.published_tables(sql).await?;
        tables.extend(published.iter().map(|table| table.oid));
        read_positions(self, sql, &tables).await.map_err(|error| self.publisher_error(error))
    }

    /// Definitions of `tables` with what they need, in `sql`'s snapshot.
    pub async fn definitions(
        &self,
        sql: &mut Connection,
        tables: &[u32],
    ) -> Result<Definitions, CaptureError> {
        let listed = self.listed_tables(sql).await?;
        self.definitions_of(sql, tables, &listed).await
    }

    /// As [`PublicationSpec::definitions`], where the publication would name the tables `listed`.
    pub async fn definitions_of(
        &self,
        sql: &mut Connection,
        tables: &[u32],
        listed: &[u32],
    ) -> Result<Definitions, CaptureError> {
        read_definitions(sql, tables, listed).await.map_err(|error| self.publisher_error(error))
    }

    /// What the publication would publish once it is as configured. Changes nothing.
    pub async fn would_publish(
        &self,
        sql: &mut Connection,
        unfit: Unfit,
    ) -> Result<Wanted, CaptureError> {
        if self.is_as_configured(sql, unfit).await? {
            let published = self.published_tables(sql).await?;
            return Ok(Wanted {
                oids: published.iter().map(|table| table.oid).collect(),
                columns: columns_sent(&published),
                tables: published.into_iter().map(|table| table.table).collect(),
                listed: self.listed_tables(sql).await?,
            });
        }
        let chosen = self.expand_tables(sql, unfit).await?;
        let rows = sql
            .query(
                "SELECT c.oid, n.nspname, c.relname, c.relkind = 'p', rn.nspname, r.relname \
                 FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
                 LEFT JOIN pg_class r ON c.relispartition AND r.oid = pg_partition_root(c.oid) \
                 LEFT JOIN pg_namespace rn ON rn.oid = r.relnamespace \
                 WHERE c.relkind IN ('r', 'p')",
                &[],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        let mut wanted = Wanted::default();
        for row in &rows {
            let name = |column: usize| {
                Some(TableName {
                    schema: row.get(column)?.to_owned(),
                    name: row.get(column + 1)?.to_owned(),
                })
            };
            let Some(table) = name(1).filter(|table| chosen.contains_key(table)) else { continue };
            let oid = row.parse(0).map_err(|error| self.publisher_error(error))?;
            wanted.listed.push(oid);
            let through_another = if self.via_partition_root {
                name(4).is_some_and(|root| chosen.contains_key(&root))
            } else {
                row.get(3) == Some("t")
            };
            if !through_another {
                wanted.oids.push(oid);
                let article = chosen.get(&table);
                if let Some(columns) = article.and_then(|article| article.columns.clone()) {
                    wanted.columns.insert(table.clone(), columns);
                }
                wanted.tables.push(table);
            }
        }
        Ok(wanted)
    }

    /// Articles that PostgreSQL would do without: of partitions whose rows come under the name of a
    /// table that they are partitions of, which has its own; and that table.
    pub(super) async fn articles_without_effect(
        &self,
        chosen: &ToPublish,
        sql: &mut Connection,
    ) -> Result<Vec<(TableName, TableName)>, CaptureError> {
        if !self.via_partition_root || self.articles.is_empty() {
            return Ok(Vec::new());
        }
        let rows = sql
            .query(
                "SELECT n.nspname, c.relname, an.nspname, a.relname FROM pg_class c \
                 JOIN pg_namespace n ON n.oid = c.relnamespace \
                 CROSS JOIN LATERAL pg_partition_ancestors(c.oid) AS above \
                 JOIN pg_class a ON a.oid = above.relid AND a.oid <> c.oid \
                 JOIN pg_namespace an ON an.oid = a.relnamespace \
                 WHERE c.relispartition AND c.relkind IN ('r', 'p') ORDER BY 1, 2, 3, 4",
                &[],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        let name = |row: &Row, at: usize| TableName {
            schema: row.get(at).unwrap_or_default().to_owned(),
            name: row.get(at + 1).unwrap_or_default().to_owned(),
        };
        let mut found: Vec<(TableName, TableName)> =
            rows.iter().map(|row| (name(row, 0), name(row, 2))).collect();
        found.retain(|(table, above)| {
            self.articles.contains_key(table) && chosen.contains_key(above)
        });
        found.dedup_by(|(table, _), (before, _)| table == before);
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::PublicationSpec;
    use farshore_pg::{Config, Mode};
    use farshore_testkit::postgres::{Cluster, Installation};
    use std::collections::BTreeMap;
    use tokio::runtime::Runtime;

    #[test]
    fn what_is_never_published_neither_joins_nor_leaves_and_columns_are_seen() {
        for major in [15, 18] {
            let installation = Installation::find(major).unwrap();
            let cluster =
                Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap();
            cluster
                .execute_script(
                    "CREATE SCHEMA s; CREATE TABLE s.t (i integer PRIMARY KEY); \
                     CREATE TYPE s.e AS ENUM ('x', 'y'); \
                     CREATE TABLE s.root (i integer PRIMARY KEY) PARTITION BY RANGE (i); \
                     CREATE TABLE s.leaf PARTITION OF s.root FOR VALUES FROM (0) TO (9); \
                     CREATE PUBLICATION of_all FOR ALL TABLES; \
                     CREATE PUBLICATION of_schema FOR TABLES IN SCHEMA s",
                )
                .unwrap();
            for adopted in ["of_all", "of_schema"] {
                let spec = PublicationSpec {
                    name: "p".to_owned(),
                    source: Config::parse(&cluster.url("postgres")).unwrap(),
                    tables: Vec::new(),
                    articles: BTreeMap::new(),
                    via_partition_root: false,
                    adopt_publication: Some(adopted.to_owned()),
                    adopt_slot: None,
                };
                Runtime::new().unwrap().block_on(async {
                    let mut sql = spec.connect(Mode::Sql).await.unwrap();
                    assert_eq!(spec.listed_tables(&mut sql).await.unwrap().len(), 3, "{adopted}");
                    let signature = spec.membership_signature(&mut sql).await.unwrap();
                    let unpublished = "CREATE TEMPORARY TABLE of_a_session (i integer); \
                        CREATE TEMPORARY TABLE parted (i integer) PARTITION BY RANGE (i); \
                        CREATE TEMPORARY TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (9); \
                        DROP TABLE IF EXISTS s.unlogged; CREATE UNLOGGED TABLE s.unlogged (i integer)";
                    sql.simple_query(unpublished).await.unwrap();
                    let now = spec.membership_signature(&mut sql).await.unwrap();
                    assert_eq!(now, signature, "{adopted}");
                    sql.simple_query("ALTER TABLE s.unlogged SET LOGGED").await.unwrap();
                    let now = spec.membership_signature(&mut sql).await.unwrap();
                    assert_ne!(now, signature, "{adopted}");
                    let mut before = now;
                    for (altered, seen) in [
                        ("ALTER TABLE s.t ADD a integer", true),
                        ("ALTER TABLE s.t RENAME a TO b", true),
                        ("ALTER TABLE s.t DROP b, ADD b integer", true),
                        ("ANALYZE s.t", false),
                        ("VACUUM FULL s.t", false),
                        ("ALTER TABLE s.t ALTER b SET DEFAULT 1, ALTER b SET STATISTICS 9", false),
                        ("ALTER TABLE s.t DROP b", true),
                        ("ALTER TYPE s.e RENAME VALUE 'x' TO 'z'", true),
                        ("ALTER TYPE s.e RENAME VALUE 'z' TO 'x'", true),
                    ] {
                        sql.simple_query(altered).await.unwrap();
                        let now = spec.membership_signature(&mut sql).await.unwrap();
                        assert_eq!(now != before, seen, "{altered}");
                        before = now;
                    }
                    sql.simple_query("DROP TABLE s.unlogged").await.unwrap();
                });
            }
        }
    }
}
