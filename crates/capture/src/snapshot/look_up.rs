use super::{CopyFormat, CopyPlan};
use crate::CaptureError;
use crate::publication::{PublicationSpec, PublishedTable};
use crate::source::{Key, put_for_keys};
use bytes::Bytes;
use farshore_model::{TypeKind, quote_identifier};
use farshore_pg::{Connection, Error};
use farshore_wire::backend::Message;
use farshore_wire::frontend::Format;

/// Keys that are asked for in one round trip.
const KEYS_AT_ONCE: usize = 1_000;

/// And bytes of them, apart from one key that is larger: what a socket takes at once, so that no row
/// has to be read before all keys are sent.
const KEY_BYTES_AT_ONCE: usize = 48 << 10;

/// Rows are handed on together up to this many bytes.
const ROWS_BYTES: usize = 256 << 10;

/// A row that was looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundRow {
    /// Where it stands.
    pub place: RowPlace,
    /// The published columns, in the format of the plan.
    pub values: Vec<Option<Bytes>>,
}

/// Where a row stands on the publisher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RowPlace {
    /// OID of the table, or of the partition that holds the row.
    pub table: u32,
    /// Block in the table's main fork.
    pub block: u32,
    /// Line pointer in the block.
    pub row: u16,
}

impl RowPlace {
    /// Reads `16384 (12,3)`: a table's OID and a row's `ctid`.
    fn parse(text: &[u8]) -> Option<RowPlace> {
        let (table, ctid) = std::str::from_utf8(text).ok()?.split_once(" (")?;
        let (block, row) = ctid.strip_suffix(')')?.split_once(',')?;
        Some(RowPlace {
            table: table.parse().ok()?,
            block: block.parse().ok()?,
            row: row.parse().ok()?,
        })
    }
}

/// The query that finds published rows of a table by their keys.
pub struct LookUpStatement {
    sql: String,
    /// Type OIDs of the key's columns.
    types: Vec<u32>,
    format: Format,
}

impl LookUpStatement {
    /// Prepares to look rows of `table` up.
    ///
    /// # Errors
    /// What is wrong with the key's columns: there must be some, no more than the table has, and
    /// they must be published.
    pub fn new(
        table: &PublishedTable,
        plan: &CopyPlan,
        key_columns: &[String],
    ) -> Result<LookUpStatement, String> {
        if key_columns.is_empty() || key_columns.len() > table.columns.len() {
            return Err(format!("a key of {} columns for {}", key_columns.len(), table.table));
        }
        let mut types = Vec::new();
        let mut terms = Vec::new();
        for name in key_columns {
            let Some(column) = table.columns.iter().find(|column| column.name == *name) else {
                let (name, table) = (quote_identifier(name), &table.table);
                return Err(format!("{name}, which is not a published column of {table}"));
            };
            types.push(column.type_oid);
            let equals = equals(table, column.type_oid);
            terms.push(format!("{} {equals} ${}", quote_identifier(name), types.len()));
        }
        if let Some(filter) = &table.row_filter {
            terms.push(format!("({filter})"));
        }
        // A partitioned table has no rows of its own.
        let only = if table.partitioned { "" } else { "ONLY " };
        // Where the row stands, as a text: that is the same bytes in either format.
        let sql = format!(
            "SELECT concat(tableoid, ' ', ctid), {} FROM {only}{} WHERE {}",
            plan.select_list(table),
            table.table,
            terms.join(" AND ")
        );
        let format = match plan.format {
            CopyFormat::Binary => Format::Binary,
            CopyFormat::Text => Format::Text,
        };
        Ok(LookUpStatement { sql, types, format })
    }

    /// Puts the question for some keys, the first of `left` that are not too many; how many they are.
    fn ask(&self, connection: &mut Connection, left: &[&Key]) -> Result<usize, Error> {
        let mut bytes = 0;
        let fitting = left.iter().take(KEYS_AT_ONCE).take_while(|key| {
            bytes += key.bytes();
            bytes <= KEY_BYTES_AT_ONCE
        });
        let keys = &left[..fitting.count().clamp(1, left.len())];
        put_for_keys(connection, &self.sql, &self.types, keys, self.format)?;
        Ok(keys.len())
    }
}

/// Rows that come for keys, asked for many keys at a time: a round trip each would be long on a slow
/// line. Rows are read only as they are taken. Dropped early, what is asked next on the connection
/// takes in the rest first.
pub struct LookingUp<'a> {
    spec: &'a PublicationSpec,
    connection: &'a mut Connection,
    statement: LookUpStatement,
    left: &'a [&'a Key],
    /// Answers to what was asked last are still to come.
    under_way: bool,
    /// The first of them that was an error.
    failed: Option<Error>,
}

impl<'a> LookingUp<'a> {
    pub(super) fn new(
        spec: &'a PublicationSpec,
        connection: &'a mut Connection,
        statement: LookUpStatement,
        keys: &'a [&'a Key],
    ) -> LookingUp<'a> {
        LookingUp { spec, connection, statement, left: keys, under_way: false, failed: None }
    }

    /// The next rows that have one of the keys: some hundred kilobytes at most, apart from one row
    /// that is larger. There may be none; `None` is the end. Cancel-safe.
    ///
    /// # Errors
    /// The publisher's; the session takes other questions then.
    pub async fn next(&mut self) -> Result<Option<Vec<FoundRow>>, CaptureError> {
        let spec = self.spec;
        let rows = self.answers().await.map_err(|error| spec.publisher_error(error))?;
        let found = |row: Vec<Option<Bytes>>| {
            let mut values = row.into_iter();
            let place = values.next().flatten().as_deref().and_then(RowPlace::parse);
            let place = place.ok_or_else(|| {
                CaptureError::Protocol("a row does not say where it stands".to_owned())
            })?;
            Ok(FoundRow { place, values: values.collect() })
        };
        rows.map(|rows| rows.into_iter().map(found).collect()).transpose()
    }

    async fn answers(&mut self) -> Result<Option<Vec<Vec<Option<Bytes>>>>, Error> {
        if !self.under_way {
            if self.left.is_empty() {
                return Ok(None);
            }
            self.connection.begin_pipeline().await?;
            let asked = self.statement.ask(self.connection, self.left);
            if asked.is_err() {
                self.connection.end_pipeline();
            }
            self.left = &self.left[asked?..];
            self.under_way = true;
        }
        let (mut rows, mut bytes) = (Vec::new(), 0);
        while bytes < ROWS_BYTES {
            // Nothing that was read is in hand while we wait.
            let message = if rows.is_empty() {
                self.connection.receive().await?
            } else {
                match self.connection.try_receive()? {
                    Some(message) => message,
                    None => break,
                }
            };
            match message {
                Message::DataRow(row) => {
                    let storage = row.storage();
                    bytes += storage.len();
                    let values = row.values().map(|v| v.map(|v| storage.slice_ref(v)));
                    rows.push(values.collect());
                }
                Message::ErrorResponse(error) => {
                    self.failed.get_or_insert(Error::Server(error));
                }
                Message::ReadyForQuery(_) => {
                    self.connection.end_pipeline();
                    self.under_way = false;
                    if let Some(error) = self.failed.take() {
                        self.left = &[];
                        return Err(error);
                    }
                    break;
                }
                Message::ParseComplete | Message::BindComplete | Message::CommandComplete(_) => {}
                other => return Err(Error::Protocol(format!("unexpected {other:?}"))),
            }
        }
        Ok(Some(rows))
    }
}

/// The equality operator of a type on the publisher, where our `search_path` is empty.
fn equals(table: &PublishedTable, mut oid: u32) -> String {
    let known = |oid: u32| table.types.iter().find(|known| known.oid == oid);
    // A domain's chain is finite; the bound is for descriptions that are damaged.
    for _ in 0..=table.types.len() {
        match known(oid).map(|known| &known.kind) {
            Some(TypeKind::Domain { base, .. }) => oid = *base,
            _ => break,
        }
    }
    match known(oid) {
        Some(known) if known.kind == TypeKind::Base => {
            format!("OPERATOR({}.=)", quote_identifier(&known.schema))
        }
        Some(_) | None => "=".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read() {
        let place = |block, row| Some(RowPlace { table: 16384, block, row });
        assert_eq!(RowPlace::parse(b"16384 (12,3)"), place(12, 3));
        assert_eq!(RowPlace::parse(b"16384 (4294967294,1)"), place(4_294_967_294, 1));
        for damaged in ["16384", "", "16384 (1)", "(1,2)", "16384 (1,2", "1 (-1,2)", "é (1,2)"] {
            assert_eq!(RowPlace::parse(damaged.as_bytes()), None, "{damaged}");
        }
    }
}
