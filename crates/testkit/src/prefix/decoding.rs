//! Reads the text that `test_decoding` makes of transactions.

use super::schema::{TABLES, table_index};
use anyhow::{Context, Result, bail, ensure};

/// One value as the text says it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Datum {
    /// Null, or a value's text.
    Value(Option<Box<str>>),
    /// A value stored out of line that the update left as it was.
    Unchanged,
}

/// One change of a table of the prefix schema, by index in [`TABLES`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A new row, all columns.
    Insert {
        /// Index of the table.
        table: usize,
        /// All columns, in order.
        row: Vec<Datum>,
    },
    /// A row's new values; `old_identity` only if the identity changed.
    Update {
        /// Index of the table.
        table: usize,
        /// The identity columns' old values.
        old_identity: Option<Vec<Box<str>>>,
        /// All columns, in order.
        row: Vec<Datum>,
    },
    /// The row with this identity is gone.
    Delete {
        /// Index of the table.
        table: usize,
        /// The identity columns' values.
        identity: Vec<Box<str>>,
    },
    /// The tables are empty.
    Truncate {
        /// Indices of the tables.
        tables: Vec<usize>,
    },
}

/// One committed transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DecodedTransaction {
    /// The publisher's transaction id.
    pub xid: u64,
    /// Changes in order; tables of other schemas are left out.
    pub changes: Vec<Change>,
}

/// Turns the `data` column of `pg_logical_slot_peek_changes` into transactions in commit order.
/// Transactions without changes in schema `prefix` are left out.
///
/// # Errors
/// On anything that is not understood, with the beginning of the line: the oracle never guesses.
pub fn decode<'a>(lines: impl IntoIterator<Item = &'a str>) -> Result<Vec<DecodedTransaction>> {
    let mut transactions = Vec::new();
    let mut open: Option<DecodedTransaction> = None;
    for line in lines {
        let shown = || format!("test_decoding: {}", line.chars().take(200).collect::<String>());
        if let Some(xid) = line.strip_prefix("BEGIN ") {
            ensure!(open.is_none(), "{}: the transaction before has no end", shown());
            let xid = xid.parse().with_context(shown)?;
            open = Some(DecodedTransaction { xid, changes: Vec::new() });
        } else if let Some(xid) = line.strip_prefix("COMMIT ") {
            let done = open.take().with_context(shown)?;
            ensure!(xid.parse() == Ok(done.xid), "{}: began as {}", shown(), done.xid);
            if !done.changes.is_empty() {
                transactions.push(done);
            }
        } else if let Some(rest) = line.strip_prefix("table ") {
            let open = open.as_mut().with_context(shown)?;
            open.changes.extend(change(rest).with_context(shown)?);
        } else if line.starts_with("message: ") {
            // Says nothing about rows.
        } else {
            bail!("{}: unknown kind of line", shown());
        }
    }
    ensure!(open.is_none(), "test_decoding: the last transaction has no end");
    Ok(transactions)
}

/// The text after `table `; `None` for tables of other schemas.
fn change(text: &str) -> Result<Option<Change>> {
    // No name in schema prefix holds a colon; a foreign one that does fails loudly below.
    let (names, rest) = text.split_once(": ").context("no colon after the table")?;
    if let Some(flags) = rest.strip_prefix("TRUNCATE:") {
        ensure!(!flags.trim().is_empty(), "TRUNCATE without flags");
        let ours = names.split(", ").filter_map(|name| name.strip_prefix("prefix."));
        let tables: Vec<usize> = ours.map(index_of).collect::<Result<_>>()?;
        return Ok((!tables.is_empty()).then_some(Change::Truncate { tables }));
    }
    let Some(name) = names.strip_prefix("prefix.") else { return Ok(None) };
    let table = index_of(name)?;
    if let Some(tuple) = rest.strip_prefix("INSERT: ") {
        return Ok(Some(Change::Insert { table, row: whole_row(table, columns(tuple)?)? }));
    }
    if let Some(tuple) = rest.strip_prefix("UPDATE: ") {
        let Some(both) = tuple.strip_prefix("old-key: ") else {
            let row = whole_row(table, columns(tuple)?)?;
            return Ok(Some(Change::Update { table, old_identity: None, row }));
        };
        let mut reader = Reader { rest: both };
        let old = reader.columns_until("new-tuple:")?;
        let row = whole_row(table, columns(reader.rest.trim_start())?)?;
        let old_identity = Some(identity(table, old)?);
        return Ok(Some(Change::Update { table, old_identity, row }));
    }
    if let Some(tuple) = rest.strip_prefix("DELETE: ") {
        return Ok(Some(Change::Delete { table, identity: identity(table, columns(tuple)?)? }));
    }
    bail!("unknown kind of change")
}

fn index_of(name: &str) -> Result<usize> {
    table_index(name).with_context(|| format!("table prefix.{name} is not of the workload"))
}

fn whole_row(table: usize, columns: Vec<(&str, Datum)>) -> Result<Vec<Datum>> {
    let expected = TABLES[table].columns;
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    ensure!(names == expected, "columns {names:?}, expected {expected:?}");
    Ok(columns.into_iter().map(|(_, datum)| datum).collect())
}

/// Of the identity's values, or of a whole old row.
fn identity(table: usize, mut columns: Vec<(&str, Datum)>) -> Result<Vec<Box<str>>> {
    let spec = &TABLES[table];
    if columns.iter().map(|(name, _)| *name).eq(spec.columns.iter().copied()) {
        let is_wanted = |name| spec.identity.iter().any(|index| spec.columns[*index] == name);
        columns.retain(|(name, _)| is_wanted(*name));
    }
    let expected: Vec<&str> = spec.identity.iter().map(|index| spec.columns[*index]).collect();
    let names: Vec<&str> = columns.iter().map(|(name, _)| *name).collect();
    ensure!(!expected.is_empty() && names == expected, "identity {names:?}, expected {expected:?}");
    let value = |(name, datum): (&str, Datum)| match datum {
        Datum::Value(Some(text)) => Ok(text),
        Datum::Value(None) | Datum::Unchanged => bail!("identity column {name} has no value"),
    };
    columns.into_iter().map(value).collect()
}

fn columns(text: &str) -> Result<Vec<(&str, Datum)>> {
    let mut reader = Reader { rest: text };
    let columns = reader.columns_until("")?;
    ensure!(reader.rest.is_empty(), "text after the last column");
    Ok(columns)
}

/// Reads `name[type]:value name[type]:value …`.
struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    /// Reads columns up to a word that ends them, which is taken too; "" for the end of the text.
    fn columns_until(&mut self, end: &str) -> Result<Vec<(&'a str, Datum)>> {
        let mut columns = Vec::new();
        loop {
            self.rest = self.rest.trim_start_matches(' ');
            if end.is_empty() && self.rest.is_empty() {
                return Ok(columns);
            }
            if !end.is_empty()
                && let Some(rest) = self.rest.strip_prefix(end)
            {
                self.rest = rest;
                return Ok(columns);
            }
            columns.push(self.column()?);
        }
    }

    fn column(&mut self) -> Result<(&'a str, Datum)> {
        let (name, rest) = self.rest.split_once('[').context("no type after a column")?;
        let (_type, rest) = rest.split_once("]:").context("no value after a type")?;
        if let Some(quoted) = rest.strip_prefix('\'') {
            let (value, rest) = unquote(quoted)?;
            self.rest = rest;
            return Ok((name, Datum::Value(Some(value))));
        }
        let (word, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        self.rest = rest;
        Ok((
            name,
            match word {
                "null" => Datum::Value(None),
                "unchanged-toast-datum" => Datum::Unchanged,
                "" => bail!("column {name} has no value"),
                number => Datum::Value(Some(number.into())),
            },
        ))
    }
}

/// Text after an opening quote: the value, and what follows the closing quote.
fn unquote(text: &str) -> Result<(Box<str>, &str)> {
    let mut value = String::new();
    let mut rest = text;
    loop {
        let at = rest.find('\'').context("a quoted value has no end")?;
        value.push_str(&rest[..at]);
        rest = &rest[at + 1..];
        match rest.strip_prefix('\'') {
            Some(after) => {
                value.push('\'');
                rest = after;
            }
            None => return Ok((value.into(), rest)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Datum {
        Datum::Value(Some(text.into()))
    }

    fn table(name: &str) -> usize {
        table_index(name).unwrap()
    }

    #[test]
    fn every_kind_of_line_is_read() {
        let transactions = decode([
            "BEGIN 7",
            "table prefix.list: INSERT: id[integer]:1 items[text]:'it''s id[integer]:2 '''",
            "table prefix.seat: UPDATE: id[integer]:-4 holder[integer]:null",
            "table prefix.document: UPDATE: old-key: id[bigint]:5 new-tuple: id[bigint]:6 \
             revision[bigint]:2 body[text]:unchanged-toast-datum",
            "table prefix.badge: UPDATE: old-key: code[text]:'a new-tuple: b' new-tuple: \
             id[bigint]:1 code[text]:'c' note[text]:''",
            "table other.seat: DELETE: (no-tuple-data)",
            "table prefix.order_lines: DELETE: order_id[bigint]:1 line_no[integer]:2",
            "table prefix.scratch, other.x, prefix.trail: TRUNCATE: (no-flags)",
            "message: transactional: 1 prefix: x, sz: 1 content:y",
            "COMMIT 7",
            "BEGIN 8",
            "table other.seat: INSERT: id[integer]:1",
            "COMMIT 8",
        ])
        .unwrap();
        let changes = vec![
            Change::Insert {
                table: table("list"),
                row: vec![value("1"), value("it's id[integer]:2 '")],
            },
            Change::Update {
                table: table("seat"),
                old_identity: None,
                row: vec![value("-4"), Datum::Value(None)],
            },
            Change::Update {
                table: table("document"),
                old_identity: Some(vec!["5".into()]),
                row: vec![value("6"), value("2"), Datum::Unchanged],
            },
            Change::Update {
                table: table("badge"),
                old_identity: Some(vec!["a new-tuple: b".into()]),
                row: vec![value("1"), value("c"), value("")],
            },
            Change::Delete { table: table("order_lines"), identity: vec!["1".into(), "2".into()] },
            Change::Truncate { tables: vec![table("scratch"), table("trail")] },
        ];
        assert_eq!(transactions, [DecodedTransaction { xid: 7, changes }]);
    }

    #[test]
    fn what_is_not_understood_is_an_error() {
        for lines in [
            &["BEGIN 1"][..],
            &["COMMIT 1"],
            &["BEGIN 1", "COMMIT 2"],
            &["BEGIN 1", "BEGIN 2"],
            &["BEGIN x"],
            &["something"],
            &["table prefix.list: INSERT: id[integer]:1 items[text]:'a'"],
            &["BEGIN 1", "table prefix.list: INSERT: id[integer]:1"],
            &["BEGIN 1", "table prefix.list: INSERT: id[integer]:1 items[text]:'a"],
            &["BEGIN 1", "table prefix.list: MERGE: id[integer]:1"],
            &["BEGIN 1", "table prefix.unknown: INSERT: id[integer]:1"],
            &["BEGIN 1", "table prefix.list: DELETE: (no-tuple-data)"],
            &["BEGIN 1", "table prefix.trail: DELETE: txid[bigint]:1"],
        ] {
            assert!(decode(lines.iter().copied()).is_err(), "{lines:?}");
        }
    }
}
