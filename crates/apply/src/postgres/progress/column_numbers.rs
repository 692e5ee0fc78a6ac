//! The numbers that copied columns have in the publisher's catalogue. The log tells columns by name
//! and type alone: one that was dropped and added again, or whose name another one has got, looks like
//! the one that was copied, and rows have another value in it.

use crate::ApplyError;
use crate::postgres::progress::TableCopyColumn;
use crate::postgres::session::Session;
use farshore_capture::publication::{PublishedColumn, PublishedTable, TableName};
use farshore_model::Column;
use farshore_pg::text_array;
use std::collections::BTreeMap;

/// `attnum`, type and modifier of a column.
type Numbered = (i16, u32, i32);

/// Of the columns of a copied table, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ColumnNumbers(BTreeMap<String, Numbered>);

impl ColumnNumbers {
    /// Those of a table as it is now. Columns are left out whose numbers an earlier version does not
    /// say.
    pub fn of(table: &PublishedTable) -> ColumnNumbers {
        let numbered = |column: &PublishedColumn| {
            let number = (column.number?, column.type_oid, column.type_modifier);
            Some((column.name.clone(), number))
        };
        ColumnNumbers(table.columns.iter().filter_map(numbered).collect())
    }

    /// Those of columns as the log has them, from the table as it is now, which has as many in the same
    /// order: their names may be others by now.
    pub(crate) fn in_order(columns: &[Column], now: &PublishedTable) -> ColumnNumbers {
        let numbered = |(column, now): (&Column, &PublishedColumn)| {
            Some((column.name.clone(), (now.number?, column.type_oid, column.type_modifier)))
        };
        ColumnNumbers(columns.iter().zip(&now.columns).filter_map(numbered).collect())
    }

    /// `attnum` of a column, if it is known.
    pub(crate) fn number(&self, column: &str) -> Option<i16> {
        self.0.get(column).map(|(number, ..)| *number)
    }

    /// Whether a column that is noted under this name had the type that `column` has.
    pub(crate) fn has_type(&self, name: &str, column: &Column) -> bool {
        let noted = self.0.get(name).map(|(_, type_oid, modifier)| (*type_oid, *modifier));
        noted == Some((column.type_oid, column.type_modifier))
    }

    /// Gives columns other names; whether any of them is known.
    pub(crate) fn rename(&mut self, renamed: &[(String, String)]) -> bool {
        let taken: Vec<Option<Numbered>> =
            renamed.iter().map(|(old, _)| self.0.remove(old)).collect();
        let known = renamed.iter().zip(taken).filter_map(|((_, new), is)| Some((new, is?)));
        let before = self.0.len();
        self.0.extend(known.map(|(new, is)| (new.clone(), is)));
        self.0.len() > before
    }

    /// Whether none is known.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What [`ColumnNumbers::to_json`] made; nothing of anything else.
    pub(crate) fn from_json(text: &str) -> ColumnNumbers {
        ColumnNumbers(serde_json::from_str(text).unwrap_or_default())
    }

    /// As `farshore.table_copy.column_numbers` has them.
    pub(crate) fn to_json(&self) -> String {
        serde_json::json!(self.0).to_string()
    }

    /// A column that is another one by now, under the name and of the type of one that was copied. One
    /// of another type is seen by its changes.
    pub fn replaced(&self, now: &ColumnNumbers) -> Option<String> {
        let is_another = |(name, (number, type_oid, modifier)): &(&String, &Numbered)| {
            now.0
                .get(*name)
                .is_some_and(|now| now.0 != *number && (now.1, now.2) == (*type_oid, *modifier))
        };
        self.0.iter().find(is_another).map(|(name, _)| name.clone())
    }

    /// Whether one of them is another one in this table.
    pub fn are_replaced_in(&self, table: &PublishedTable) -> bool {
        self.replaced(&ColumnNumbers::of(table)).is_some()
    }

    /// These, and those of `now` that are not known; `None` where that adds nothing. One that has another
    /// number now stays as it was until the stream has seen that.
    pub(super) fn with(&self, now: &ColumnNumbers) -> Option<ColumnNumbers> {
        let mut all = self.clone();
        for (name, number) in &now.0 {
            if self.number(name).is_none_or(|known| known == number.0) {
                all.0.insert(name.clone(), *number);
            }
        }
        (all != *self).then_some(all)
    }
}

impl Session {
    /// Forgets those of columns that the stream has seen go, in its open transaction: one of that name
    /// is followed as a new one.
    pub(crate) async fn forget_column_numbers(
        &mut self,
        name: &str,
        table: &TableName,
        gone: &[&str],
    ) -> Result<(), ApplyError> {
        if gone.is_empty() || !self.keeps(TableCopyColumn::ColumnNumbers).await? {
            return Ok(());
        }
        let gone = text_array(gone.iter().copied());
        self.execute(
            "UPDATE farshore.table_copy SET column_numbers = column_numbers - $4::text::text[] \
             WHERE subscription = $1 AND schema_name = $2 AND table_name = $3",
            &[Some(name), Some(&table.schema), Some(&table.name), Some(&gone)],
        )
        .await
        .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(columns: &[(&str, i16, u32)]) -> ColumnNumbers {
        let numbered =
            |(name, number, of): &(&str, i16, u32)| (name.to_string(), (*number, *of, -1));
        ColumnNumbers(columns.iter().map(numbered).collect())
    }

    #[test]
    fn what_has_the_name_and_type_of_a_copied_column_and_is_another_is_seen() {
        let copied = numbers(&[("id", 1, 20), ("a", 2, 25), ("b\"", 3, 25)]);
        let replaced = |now: &[(&str, i16, u32)]| copied.replaced(&numbers(now));
        assert_eq!(replaced(&[("id", 1, 20), ("a", 2, 25), ("b\"", 3, 25), ("c", 4, 25)]), None);
        assert_eq!(replaced(&[("id", 1, 20), ("b\"", 3, 25)]), None, "dropped");
        assert_eq!(replaced(&[("id", 1, 20), ("c", 2, 25)]), None, "renamed");
        assert_eq!(replaced(&[("id", 1, 20), ("a", 2, 20)]), None, "another type");
        assert_eq!(replaced(&[("id", 1, 20), ("a", 4, 20)]), None, "another type is seen");
        assert_eq!(replaced(&[("id", 1, 20), ("a", 4, 25)]).as_deref(), Some("a"));
        assert_eq!(replaced(&[("id", 1, 20), ("a", 3, 25)]).as_deref(), Some("a"), "got its name");
        assert_eq!(replaced(&[]), None, "an earlier version does not say");
        assert_eq!(ColumnNumbers::from_json(&copied.to_json()), copied);
        assert_eq!(ColumnNumbers::from_json("[]"), numbers(&[]));
    }

    #[test]
    fn what_was_noted_stays_until_the_stream_sees_it_go() {
        let copied = numbers(&[("id", 1, 20), ("a", 2, 25)]);
        assert_eq!(copied.with(&numbers(&[("id", 1, 20)])), None);
        let grown = copied.with(&numbers(&[("id", 1, 20), ("b", 3, 25)]));
        let all = numbers(&[("id", 1, 20), ("a", 2, 25), ("b", 3, 25)]);
        assert_eq!(grown.as_ref(), Some(&all));
        assert_eq!(all.replaced(&numbers(&[("id", 1, 20), ("a", 4, 25)])).as_deref(), Some("a"));
        // Of another type by now, and another column's name.
        let now = numbers(&[("id", 1, 23), ("a", 3, 23), ("b", 2, 25)]);
        assert_eq!(copied.with(&now), Some(numbers(&[("id", 1, 23), ("a", 2, 25), ("b", 2, 25)])));
    }
}
