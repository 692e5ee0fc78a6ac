//! A copied table whose changes come under another name.
//!
//! A table that is renamed on the publisher, and changed before it gets its name back, has lost those
//! changes here: what has a name that is not copied is passed over, and what has one that is copied
//! goes to that table. Its OID tells. The loss is noted where the definition is kept that the copy
//! follows, which gets the other name: the copy is not gone on with under its own name
//! ([`crate::postgres::follow_ddl`]), and a name that never comes back holds nothing up.

use super::Writer;
use crate::ApplyError;
use crate::postgres::noted_definition::{note_definition, published_name};
use crate::postgres::progress::TableProgress;
use farshore_capture::publication::TableName;
use farshore_model::{Lsn, Relation};
use std::collections::HashMap;

/// Copied tables.
#[derive(Clone, Debug, Default)]
pub struct CopiedTables {
    /// The consistent points of their copies.
    pub(super) points: HashMap<TableName, Lsn>,
    /// By the publisher's OIDs. More than one where a table was copied under one name, and then under
    /// another; none that is noted to have lost changes.
    by_oid: HashMap<u32, Vec<TableName>>,
}

impl CopiedTables {
    /// These.
    pub fn of(tables: &[TableProgress]) -> CopiedTables {
        let mut copied = CopiedTables::default();
        for table in tables {
            copied.points.insert(table.table.clone(), table.copied_at);
            if let (Some(oid), None) = (table.oid, &table.renamed) {
                copied.by_oid.entry(oid).or_default().push(table.table.clone());
            }
        }
        copied
    }

    /// A table that has this name is known by its OID from now on.
    pub(super) fn know(&mut self, table: &TableName, oid: u32) {
        let known = self.by_oid.entry(oid).or_default();
        if !known.contains(table) {
            known.push(table.clone());
        }
    }

    /// Other names under which this table was copied, each with the copy's point.
    pub(super) fn other_names(&self, table: &TableName, oid: u32) -> Vec<(TableName, Lsn)> {
        let known = self.by_oid.get(&oid).filter(|_| oid != 0);
        let others = known.into_iter().flatten().filter(|known| *known != table);
        others.filter_map(|known| Some((known.clone(), *self.points.get(known)?))).collect()
    }

    fn forget(&mut self, table: &TableName, oid: u32) {
        if let Some(known) = self.by_oid.get_mut(&oid) {
            known.retain(|known| known != table);
        }
    }
}

impl Writer {
    /// Notes, in the open group, that a copied table lacks a change which came under another name.
    pub(super) async fn note_renamed(
        &mut self,
        copied: &TableName,
        relation: &Relation,
    ) -> Result<(), ApplyError> {
        // Behind what came for it before, and before whatever comes under its name.
        self.send_batches().await?;
        self.be_alone().await?;
        self.ensure_begun().await?;
        let subscription = self.subscription.clone();
        let names = (copied, &self.target_names.table(copied));
        note_definition(self.session().await?, &subscription, names, relation).await?;
        self.copied.forget(copied, relation.oid);
        self.ahead.forget();
        self.superseded.extend(self.versions.remove(copied));
        self.renamed.push((copied.clone(), published_name(relation)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::progress::{ColumnNumbers, EnumLabels};

    #[test]
    fn a_table_is_known_by_its_oid_under_each_name_that_it_was_copied_by() {
        let name = |name: &str| TableName { schema: "public".to_owned(), name: name.to_owned() };
        let table = |of: &str, oid, renamed: Option<&str>| TableProgress {
            table: name(of),
            copied: true,
            copied_at: Lsn(7),
            membership: 1,
            attached: None,
            column_numbers: ColumnNumbers::default(),
            enum_labels: EnumLabels::default(),
            oid,
            renamed: renamed.map(name),
            asked_for: false,
        };
        let mut copied = CopiedTables::of(&[
            table("a", Some(16_384), None),
            table("b", Some(16_385), Some("c")),
            table("d", None, None),
        ]);
        assert_eq!(copied.other_names(&name("x"), 16_384), [(name("a"), Lsn(7))]);
        assert_eq!(copied.other_names(&name("a"), 16_384), []);
        assert_eq!(copied.other_names(&name("x"), 16_385), [], "that is noted already");
        copied.know(&name("d"), 16_386);
        copied.know(&name("d"), 16_386);
        copied.know(&name("e"), 0);
        assert_eq!(copied.other_names(&name("x"), 16_386), [(name("d"), Lsn(7))]);
        assert_eq!(copied.other_names(&name("x"), 0), [], "not known");
        copied.forget(&name("a"), 16_384);
        assert_eq!(copied.other_names(&name("x"), 16_384), []);
    }
}
