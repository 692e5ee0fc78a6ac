//! Rows of the user's own tables, to stand for a log.

use crate::Error;
use crate::log::{connect, trying};
use farshore_pg::{Config, Connection, Row};
use std::time::Duration;

/// Bytes of a sample.
const BYTES: usize = 4 << 20;
/// Tables that it is of: the largest.
const TABLES: usize = 8;
/// Rows that are fetched at a time.
const FETCHED: usize = 50;
/// Of larger rows only the beginning is taken.
const ROW_CHARACTERS: usize = 64 << 10;
/// Reading it takes no longer.
const TIME_MAX: Duration = Duration::from_secs(30);

/// Rows of tables, as text: what a log holds of them, about, without its headers.
#[derive(Debug, Clone)]
pub struct Sample {
    /// The tables.
    pub tables: Vec<String>,
    /// Rows.
    pub rows: u64,
    /// Their bytes.
    pub bytes: Vec<u8>,
}

impl Sample {
    /// Reads rows of the largest tables that the role may read: of each as much as it has of all
    /// of them, about 4 MiB together, within 30 s. Reads only.
    ///
    /// # Errors
    /// When the server cannot be asked, takes too long, or has no rows that can be read.
    pub async fn read(server: &Config) -> Result<Sample, Error> {
        let mut connection = connect(server).await?;
        let name = connection.server().to_owned();
        let reading = tokio::time::timeout(TIME_MAX, take(&mut connection));
        let sample = match reading.await {
            Ok(sample) => sample.map_err(trying("read rows", &name))?,
            Err(_) => {
                return Err(Error::Refused(format!(
                    "{name}: reading a sample of rows took longer than {} s; give another server, \
                     or a publication's log with --publication",
                    TIME_MAX.as_secs()
                )));
            }
        };
        connection.close().await;
        if sample.bytes.is_empty() {
            return Err(Error::Refused(format!(
                "{name}: there are no rows that the role may read, and so no sample of them"
            )));
        }
        Ok(sample)
    }

    /// Bytes of a row, on average.
    pub fn row_bytes(&self) -> Option<u64> {
        (self.bytes.len() as u64).checked_div(self.rows)
    }
}

async fn take(connection: &mut Connection) -> Result<Sample, farshore_pg::Error> {
    connection.simple_query("BEGIN TRANSACTION READ ONLY").await?;
    let largest = format!(
        "SELECT c.oid::regclass::text, greatest(pg_relation_size(c.oid), 1) \
         FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE c.relkind = 'r' AND c.relpersistence = 'p' AND n.nspname !~ '^pg_' \
           AND n.nspname NOT IN ('information_schema', 'farshore') \
           AND pg_relation_size(c.oid) > 0 AND has_table_privilege(c.oid, 'SELECT') \
         ORDER BY 2 DESC, 1 LIMIT {TABLES}"
    );
    let found: Vec<Row> = connection.query(&largest, &[]).await?;
    let mut sample = Sample { tables: Vec::new(), rows: 0, bytes: Vec::new() };
    let sizes: Vec<u64> = found.iter().map(|row| row.parse::<u64>(1)).collect::<Result<_, _>>()?;
    let all: u64 = sizes.iter().sum();
    for (row, size) in found.iter().zip(&sizes) {
        let table = row.get(0).unwrap_or_default();
        // Each gets as much of it as it has of all tables.
        let share = (BYTES as u128 * u128::from(*size) / u128::from(all.max(1))) as usize;
        let end = sample.bytes.len() + share;
        let before = sample.rows;
        let cursor = format!(
            "DECLARE sample NO SCROLL CURSOR FOR \
             SELECT left(t::text, {ROW_CHARACTERS}) FROM ONLY {table} AS t"
        );
        connection.simple_query(&cursor).await?;
        while sample.bytes.len() < end {
            let sets = connection.simple_query(&format!("FETCH {FETCHED} FROM sample")).await?;
            let rows = sets.first().map(|set| set.rows.as_slice()).unwrap_or_default();
            for text in rows.iter().filter_map(|row| row.get(0)) {
                sample.bytes.extend_from_slice(text.as_bytes());
                sample.rows += 1;
            }
            if rows.len() < FETCHED {
                break;
            }
        }
        connection.simple_query("CLOSE sample").await?;
        if sample.rows > before {
            sample.tables.push(table.to_owned());
        }
    }
    connection.simple_query("COMMIT").await?;
    Ok(sample)
}
