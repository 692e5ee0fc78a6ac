//! The rows of a table as hashes, to be compared with those of a table on another server: sums of
//! them for each of [`PARTS`] parts, and row by row for a few parts.
//!
//! A row's hash is that of its values as texts, in the form that their output functions give them
//! in a session that both servers have set up alike ([`SETTINGS`]). A sum of 64-bit hashes does not
//! depend on the order of rows, and counts duplicates.

use super::SnapshotConnection;
use crate::CaptureError;
use crate::publication::{PublicationSpec, PublishedTable};
use farshore_model::quote_identifier;
use farshore_pg::{Connection, Error, Row, text_array};
use serde::{Deserialize, Serialize};

/// Parts that the rows of a table are put into, by the hashes of their keys.
pub const PARTS: u32 = 1 << 16;

/// Rows that are listed at most.
pub const ROWS_MAX: usize = 100_000;

/// What makes values print alike, beside what every session of ours has; for one transaction. An
/// expression for each column of each small table is not worth compiling.
pub const SETTINGS: &str = "SET LOCAL TimeZone = 'UTC'; SET LOCAL bytea_output = hex; \
    SET LOCAL quote_all_identifiers = off; SET LOCAL jit = off";

/// Columns whose hashes are made of one another: each is a call within a call.
const COLUMNS_AT_ONCE: usize = 50;

/// Characters of a row's key that are told.
const NAME_MAX: usize = 80;

/// Columns that a row is named by which has no key.
const NAMING_COLUMNS: usize = 8;

/// Which rows are hashed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DigestScope {
    /// All, as sums for each part.
    Sums,
    /// Those of these parts, one by one, [`ROWS_MAX`] at most. Of no part: whether the table can be
    /// read, and how this server hashes; one row that is in no table.
    Rows(Vec<u16>),
}

/// How texts are hashed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Hashing {
    /// As the server has them, if its encoding is this one.
    Encoded(String),
    /// As UTF-8, whatever the server's encoding is, at twice the price.
    Utf8,
}

/// The target's type of a column, where the publisher's values print otherwise.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashedAs {
    /// The type without a modifier, as SQL names it; built in.
    pub type_name: String,
    /// Its modifier (`atttypmod`); -1 where it has none.
    pub modifier: i32,
}

/// The rows of one part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartSum {
    /// Which.
    pub part: u32,
    /// How many rows.
    pub rows: u64,
    /// Their hashes, added up: a number of any length.
    pub sum: String,
}

/// A row, or several that are alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HashedRow {
    /// Hash of its key.
    pub key: i64,
    /// Hash of all its values.
    pub hash: i64,
    /// How many such rows there are.
    pub rows: u64,
    /// The beginning of its key, for a person.
    pub name: String,
}

/// Hashes of a table's rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Digest {
    /// Of all, in no order.
    Sums(Vec<PartSum>),
    /// One by one, by key and hash.
    Rows(Vec<HashedRow>),
}

/// The query that hashes rows of a table, on either side.
#[derive(Clone, Debug)]
pub struct DigestQuery {
    /// What stands behind FROM, and WHERE if there is one.
    pub from: String,
    /// The columns as SQL, in an order that is the same on both sides.
    pub values: Vec<String>,
    /// Which of them make the key; none where there is no key.
    pub key: Vec<usize>,
    /// How.
    pub hashing: Hashing,
}

impl DigestQuery {
    /// The query's text.
    pub fn sql(&self, scope: &DigestScope) -> String {
        let DigestQuery { from, values, key, .. } = self;
        let key: Vec<&str> = key.iter().map(|at| values[*at].as_str()).collect();
        let values: Vec<&str> = values.iter().map(String::as_str).collect();
        let hash = self.hash(&values);
        let key_hash = if key.is_empty() { hash.clone() } else { self.hash(&key) };
        let last = PARTS - 1;
        match scope {
            // Grouped by what nothing is known of: else all columns of all rows would be sorted.
            DigestScope::Sums => format!(
                "SELECT part, count(*), sum(hash) FROM (SELECT {key_hash} & {last} AS part, \
                 {hash} AS hash FROM {from} OFFSET 0) AS hashed GROUP BY part"
            ),
            DigestScope::Rows(parts) if parts.is_empty() => format!(
                "SELECT 0, {}, 1, '' WHERE NOT EXISTS (SELECT {hash} FROM {from} LIMIT 0)",
                self.hash(&["'farshore'"])
            ),
            DigestScope::Rows(parts) => {
                let named = if key.is_empty() {
                    &values[..values.len().min(NAMING_COLUMNS)]
                } else {
                    key.as_slice()
                };
                let names: Vec<String> = named
                    .iter()
                    .map(|value| format!("left(concat({value}), {NAME_MAX})"))
                    .collect();
                let name = match names.is_empty() {
                    true => "''".to_owned(),
                    false => format!("left(concat_ws(', ', {}), {NAME_MAX})", names.join(", ")),
                };
                let parts: Vec<String> = parts.iter().map(u16::to_string).collect();
                format!(
                    "SELECT key, hash, count(*), min(name COLLATE \"C\") FROM (SELECT {key_hash} \
                     AS key, {hash} AS hash, {name} AS name FROM {from}) AS hashed \
                     WHERE key & {last} = ANY ('{{{}}}'::bigint[]) \
                     GROUP BY 1, 2 ORDER BY 1, 2 LIMIT {ROWS_MAX}",
                    parts.join(",")
                )
            }
        }
    }

    /// A bigint, of all these values. NULL is told from an empty text, and where a value ends.
    fn hash(&self, values: &[&str]) -> String {
        let of_some = |values: &[&str]| {
            values.iter().fold("0::bigint".to_owned(), |hash, value| {
                let text = format!("concat({value} IS NULL, {value})");
                let text = match &self.hashing {
                    Hashing::Encoded(_) => text,
                    Hashing::Utf8 => format!("encode(convert_to({text}, 'UTF8'), 'hex')"),
                };
                format!("hashtextextended({text} COLLATE \"C\", {hash})")
            })
        };
        if values.len() <= COLUMNS_AT_ONCE {
            return of_some(values);
        }
        let hashes: Vec<String> = values.chunks(COLUMNS_AT_ONCE).map(of_some).collect();
        format!("hash_array_extended(ARRAY[{}], 0)", hashes.join(", "))
    }

    /// Asks it on a connection, in whose transaction [`SETTINGS`] were set and which goes on where
    /// the server refuses. Dropped early, what runs on the server is ended.
    ///
    /// # Errors
    /// The server's.
    pub async fn ask(
        &self,
        connection: &mut Connection,
        scope: &DigestScope,
    ) -> Result<Digest, Error> {
        let abandoned = connection.cancel_token().unless_done();
        connection.simple_query("SAVEPOINT farshore_digest").await?;
        let rows = connection.query(&self.sql(scope), &[]).await;
        let after = match rows.is_ok() {
            true => "RELEASE SAVEPOINT farshore_digest",
            false => "ROLLBACK TO SAVEPOINT farshore_digest",
        };
        let went_on = connection.simple_query(after).await;
        abandoned.is_done();
        let rows = rows?;
        went_on?;
        let text = |row: &Row, at: usize| row.get(at).unwrap_or_default().to_owned();
        Ok(match scope {
            DigestScope::Sums => {
                let sum = |row: &Row| {
                    Ok(PartSum { part: row.parse(0)?, rows: row.parse(1)?, sum: text(row, 2) })
                };
                Digest::Sums(rows.iter().map(sum).collect::<Result<_, Error>>()?)
            }
            DigestScope::Rows(_) => {
                let hashed = |row: &Row| {
                    let (key, hash, rows) = (row.parse(0)?, row.parse(1)?, row.parse(2)?);
                    Ok(HashedRow { key, hash, rows, name: text(row, 3) })
                };
                Digest::Rows(rows.iter().map(hashed).collect::<Result<_, Error>>()?)
            }
        })
    }
}

/// What is to be hashed of a published table.
#[derive(Clone, Copy, Debug)]
pub struct DigestOf<'a> {
    /// The table.
    pub table: &'a PublishedTable,
    /// As what types the published columns are hashed, if not as they are; of as many columns.
    pub types: &'a [Option<HashedAs>],
    /// The columns that make the key, published ones; none where there is no key.
    pub key_columns: &'a [String],
    /// Which rows.
    pub scope: &'a DigestScope,
    /// How.
    pub hashing: &'a Hashing,
}

impl SnapshotConnection {
    /// Hashes of published rows as they are in the snapshot; `None` where they were to be hashed in
    /// an encoding that is not this server's.
    ///
    /// # Errors
    /// A key column that is not published; the publisher's.
    pub async fn digest(
        &mut self,
        spec: &PublicationSpec,
        wanted: DigestOf<'_>,
    ) -> Result<Option<Digest>, CaptureError> {
        let DigestOf { table, types, key_columns, scope, hashing } = wanted;
        let mut key = Vec::new();
        for name in key_columns {
            let Some(at) = table.columns.iter().position(|column| column.name == *name) else {
                return Err(CaptureError::Setup(format!(
                    "{}, which is not a published column of {}",
                    quote_identifier(name),
                    table.table
                )));
            };
            key.push(at);
        }
        if let Hashing::Encoded(encoding) = hashing
            && self.connection.parameter("server_encoding") != Some(encoding)
        {
            return Ok(None);
        }
        let failed = |error| spec.publisher_error(error);
        let declared = declared(&mut self.connection, types).await.map_err(failed)?;
        let only = if table.partitioned { "" } else { "ONLY " };
        let filter = table.row_filter.iter().map(|filter| format!(" WHERE ({filter})"));
        let query = DigestQuery {
            from: format!("{only}{}{}", table.table, filter.collect::<String>()),
            values: values(table, &declared),
            key,
            hashing: hashing.clone(),
        };
        self.connection.simple_query(SETTINGS).await.map_err(failed)?;
        query.ask(&mut self.connection, scope).await.map(Some).map_err(failed)
    }
}

/// The types with their modifiers, as SQL names them.
async fn declared(
    connection: &mut Connection,
    types: &[Option<HashedAs>],
) -> Result<Vec<Option<String>>, Error> {
    if types.iter().all(Option::is_none) {
        return Ok(vec![None; types.len()]);
    }
    let name =
        |hashed: &Option<HashedAs>| hashed.as_ref().map_or("", |to| &to.type_name).to_owned();
    let modifier = |hashed: &Option<HashedAs>| hashed.as_ref().map_or(-1, |to| to.modifier);
    let names: Vec<String> = types.iter().map(name).collect();
    let modifiers: Vec<String> = types.iter().map(|to| modifier(to).to_string()).collect();
    let asked = connection
        .query(
            "SELECT pg_catalog.format_type(pg_catalog.to_regtype(nullif(name, '')), modifier) \
             FROM unnest($1::text::text[], $2::text::int[]) \
             WITH ORDINALITY AS t (name, modifier, n) ORDER BY n",
            &[
                Some(&text_array(names.iter().map(String::as_str))),
                Some(&text_array(modifiers.iter().map(String::as_str))),
            ],
        )
        .await?;
    Ok(asked.iter().map(|row| row.get(0).map(str::to_owned)).collect())
}

/// The published columns, as the types that they are hashed as.
fn values(table: &PublishedTable, declared: &[Option<String>]) -> Vec<String> {
    let columns = table.columns.iter().enumerate();
    columns
        .map(|(number, column)| {
            let name = quote_identifier(&column.name);
            match declared.get(number).and_then(Option::as_ref) {
                None => name,
                Some(to) => format!("{name}::{to}"),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(columns: usize, key: &[usize]) -> DigestQuery {
        DigestQuery {
            from: "ONLY t".into(),
            values: (0..columns).map(|column| format!("c{column}")).collect(),
            key: key.to_vec(),
            hashing: Hashing::Encoded("UTF8".into()),
        }
    }

    #[test]
    fn rows_are_put_into_parts_by_their_key() {
        assert_eq!(
            query(2, &[1]).sql(&DigestScope::Sums),
            "SELECT part, count(*), sum(hash) FROM (SELECT \
             hashtextextended(concat(c1 IS NULL, c1) COLLATE \"C\", 0::bigint) & 65535 AS part, \
             hashtextextended(concat(c1 IS NULL, c1) COLLATE \"C\", \
             hashtextextended(concat(c0 IS NULL, c0) COLLATE \"C\", 0::bigint)) AS hash \
             FROM ONLY t OFFSET 0) AS hashed GROUP BY part"
        );
    }

    #[test]
    fn calls_within_calls_are_bounded() {
        for (columns, chunks) in [(1, 1), (50, 1), (51, 2), (1600, 32)] {
            let sql = query(columns, &[]).sql(&DigestScope::Rows(vec![]));
            // One for the constant.
            assert_eq!(sql.matches("0::bigint").count(), 1 + chunks, "{columns}");
        }
        // A table without columns has rows, too.
        assert!(query(0, &[]).sql(&DigestScope::Sums).contains("0::bigint AS hash"));
        assert!(query(0, &[]).sql(&DigestScope::Rows(vec![1])).contains("'' AS name"));
    }
}
