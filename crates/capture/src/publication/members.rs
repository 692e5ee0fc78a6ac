//! What belongs to the publication on the publisher: tables by OID, their definitions, sequences.

use super::PublicationSpec;
use crate::CaptureError;
use crate::schema::{Definitions, SequencePosition, read_definitions, read_positions};
use farshore_pg::Connection;

impl PublicationSpec {
    /// OIDs of the tables that the publication names, by themselves or with their schema or all:
    /// partitions of a named table are not among them.
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
            "SELECT r.prrelid FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid \
             WHERE p.pubname = $1 \
             UNION SELECT c.oid FROM pg_publication p CROSS JOIN pg_class c \
             WHERE p.pubname = $1 AND p.puballtables AND c.relkind IN ('r', 'p') {schemas}"
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

    /// A text that is another one when tables join or leave the publication, or a partition is
    /// attached or detached.
    pub async fn membership_signature(&self, sql: &mut Connection) -> Result<String, CaptureError> {
        let mut tables = self.listed_tables(sql).await?;
        tables.sort_unstable();
        let rows = sql
            .query(
                "SELECT md5(concat( \
                   (SELECT string_agg(concat(r.oid, ' ', r.prrelid), ',' ORDER BY r.oid) \
                    FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid \
                    WHERE p.pubname = $1), ';', \
                   (SELECT string_agg(concat(i.inhrelid, ' ', i.inhparent), ',' ORDER BY i.inhrelid) \
                    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid \
                    WHERE c.relispartition AND c.relkind IN ('r', 'p'))))",
                &[Some(&self.publication_name())],
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
        read_definitions(sql, tables, &listed).await.map_err(|error| self.publisher_error(error))
    }
}
