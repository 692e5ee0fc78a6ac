//! Where batches are not tried for a while, because one was refused. Pure.

use crate::log_backoff::LogBackoff;
use farshore_capture::publication::TableName;
use farshore_model::Lsn;
use std::collections::HashMap;

/// Bytes of the publisher's log after a refused batch in which its table is not batched.
const SPAN_BYTES: u64 = 4 << 20;
const DOUBLINGS_MAX: u32 = 10;

/// Tables whose changes are applied row by row.
#[derive(Clone, Debug, Default)]
pub struct RowByRow {
    tables: HashMap<TableName, LogBackoff>,
}

impl RowByRow {
    /// A batch that ended at `position` was refused because of changes of `table`. Up to there, at
    /// least, they are applied row by row from now on.
    pub fn note(&mut self, table: &TableName, position: Lsn) {
        let span = self.tables.entry(table.clone()).or_default();
        span.note(position, SPAN_BYTES, DOUBLINGS_MAX);
    }

    /// Up to which position changes of `table` are applied row by row.
    pub fn until(&self, table: &TableName) -> Lsn {
        self.tables.get(table).map_or(Lsn::ZERO, LogBackoff::until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_covers_itself_and_reaches_further() {
        let table = |name: &str| TableName { schema: "s".into(), name: name.into() };
        let mut row_by_row = RowByRow::default();
        let (a, b) = (table("a"), table("b"));
        assert_eq!(row_by_row.until(&a), Lsn::ZERO);
        row_by_row.note(&a, Lsn(100));
        let first = row_by_row.until(&a).0 - 100;
        row_by_row.note(&a, Lsn(first + 200));
        assert!(row_by_row.until(&a).0 - (first + 200) > first);
        assert_eq!(row_by_row.until(&b), Lsn::ZERO);
    }
}
