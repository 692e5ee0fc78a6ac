//! What a target's tables need not be, since not every column of the publisher's is sent.

use super::{ColumnFill, Definitions, Table};
use crate::publication::TableName;
use std::collections::{HashMap, HashSet};

impl Definitions {
    /// The definitions for a target that gets just the columns `sent` of tables. Tables that are
    /// not among them are as they are on the publisher, unless they share columns with one that is:
    /// partitions with what they are partitions of, and tables that inherit.
    ///
    /// Columns that are not sent are marked ([`unsent`](super::TableColumn::unsent)), and generated
    /// columns that are sent are plain: the target computes no value that comes.
    #[must_use]
    pub fn as_sent(mut self, sent: &HashMap<TableName, Vec<String>>) -> Definitions {
        let families = families(&self.tables);
        let mut unsent: HashSet<(usize, String)> = HashSet::new();
        let mut plain: HashSet<(usize, String)> = HashSet::new();
        for (table, family) in self.tables.iter().zip(&families) {
            let Some(sent) = sent.get(&table.name) else { continue };
            for column in &table.columns {
                let is_generated = matches!(column.fill, ColumnFill::Generated { .. });
                let key = (*family, column.name.clone());
                if !sent.contains(&column.name) {
                    unsent.insert(key);
                } else if is_generated {
                    plain.insert(key);
                }
            }
        }
        for (table, family) in self.tables.iter_mut().zip(&families) {
            for column in &mut table.columns {
                let key = (*family, column.name.clone());
                column.unsent = unsent.contains(&key);
                if plain.contains(&key) {
                    column.fill = ColumnFill::None;
                }
            }
            // What is computed from a column that may be empty may be empty too.
            let is_empty = |column: &super::TableColumn| {
                column.unsent && matches!(column.fill, ColumnFill::None)
            };
            let some_are_empty = table.columns.iter().any(is_empty);
            for column in &mut table.columns {
                let is_generated = matches!(column.fill, ColumnFill::Generated { .. });
                column.not_null &= !(is_generated && some_are_empty);
            }
        }
        self
    }
}

/// A number for each table, the same where tables share columns. Parents come before their children.
fn families(tables: &[Table]) -> Vec<usize> {
    let mut of: HashMap<&TableName, usize> = HashMap::new();
    for (number, table) in tables.iter().enumerate() {
        let mut family = number;
        let parents = table.partition_of.iter().map(|(parent, _)| parent).chain(&table.inherits);
        for parent in parents {
            let Some(theirs) = of.get(parent).copied() else { continue };
            for other in of.values_mut().filter(|other| **other == family) {
                *other = theirs;
            }
            family = theirs;
        }
        of.insert(&table.name, family);
    }
    tables.iter().map(|table| of[&table.name]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::{Constraint, ConstraintKind, NameMap, Object, ObjectKind, TargetServer};
    use super::*;
    use crate::schema::TableColumn;

    fn name(name: &str) -> TableName {
        TableName { schema: "s".into(), name: name.into() }
    }

    fn column(name: &str, type_name: &str, fill: ColumnFill) -> TableColumn {
        let (name, type_name) = (name.to_owned(), type_name.to_owned());
        TableColumn { name, type_name, collation: None, not_null: true, fill, unsent: false }
    }

    fn default() -> ColumnFill {
        let (extensions, foreign_functions) = (vec![], vec![]);
        ColumnFill::Default { expression: "1".into(), extensions, foreign_functions }
    }

    fn generated() -> ColumnFill {
        ColumnFill::Generated { expression: "a + 1".into(), virtual_: false }
    }

    fn table(of: &str, parent: Option<&str>) -> Table {
        Table {
            oid: 1,
            name: name(of),
            columns: vec![
                column("a", "integer", ColumnFill::None),
                column("b", "integer", ColumnFill::None),
                column("c", "integer", default()),
                column("d", "s.strict", ColumnFill::None),
                column("g", "integer", generated()),
            ],
            partition_key: None,
            partition_of: parent.map(|parent| (name(parent), "DEFAULT".into())),
            inherits: vec![],
            constraints: vec![],
            indexes: vec![],
            replica_identity: None,
            comments: vec![],
        }
    }

    fn definitions(tables: Vec<Table>) -> Definitions {
        let domain = |name: &str, base: &str, clauses: &str| Object {
            schema: "s".into(),
            name: name.into(),
            kind: ObjectKind::Domain { base: base.into(), clauses: clauses.into(), checks: vec![] },
        };
        let objects = vec![
            domain("within", "integer", " NOT NULL"),
            domain("strict", "s.within", ""),
            domain("filled", "integer", " DEFAULT 1 NOT NULL"),
        ];
        Definitions { objects, tables, ..Definitions::default() }
    }

    fn created(definitions: Definitions, sent: &[(&str, &[&str])]) -> Vec<String> {
        let sent = sent.iter().map(|(table, columns)| {
            (name(table), columns.iter().map(|column| (*column).to_owned()).collect())
        });
        let sent = definitions.as_sent(&sent.collect());
        let target = TargetServer { version: 180_000, ..TargetServer::default() };
        let plan = sent.plan(&NameMap::default(), &target);
        plan.tables.into_iter().map(|table| table.create[0].clone()).collect()
    }

    const WHOLE: &str = "\n  a integer NOT NULL,\n  b integer NOT NULL,\n  \
        c integer DEFAULT 1 NOT NULL,\n  d s.strict NOT NULL,\n  \
        g integer GENERATED ALWAYS AS (a + 1) STORED NOT NULL\n)";
    const PART: &str = "\n  a integer NOT NULL,\n  b integer,\n  \
        c integer DEFAULT 1 NOT NULL,\n  d integer,\n  \
        g integer GENERATED ALWAYS AS (a + 1) STORED\n)";

    #[test]
    fn columns_that_do_not_come_may_be_empty() {
        let one = || definitions(vec![table("t", None)]);
        let create = |rest: &str| [format!("CREATE TABLE s.t ({rest}")];
        assert_eq!(created(one(), &[]), create(WHOLE));
        assert_eq!(created(one(), &[("t", &["a", "b", "c", "d"])]), create(WHOLE));
        assert_eq!(created(one(), &[("t", &["a"])]), create(PART));
        let plain = WHOLE.replace(" GENERATED ALWAYS AS (a + 1) STORED", "");
        assert_eq!(created(one(), &[("t", &["a", "b", "c", "d", "g"])]), create(&plain));
        let mut filled = one();
        filled.tables[0].columns[3].type_name = "s.filled".into();
        let kept = PART.replace("d integer", "d s.filled NOT NULL");
        assert_eq!(created(filled, &[("t", &["a"])]), create(&kept));
    }

    #[test]
    fn partitions_are_like_what_they_are_partitions_of() {
        let all = || definitions(vec![table("root", None), table("leaf", Some("root"))]);
        let both = |rest: &str| {
            [format!("CREATE TABLE s.root ({rest}"), format!("CREATE TABLE s.leaf ({rest}")]
        };
        assert_eq!(created(all(), &[("root", &["a"])]), both(PART));
        assert_eq!(created(all(), &[("leaf", &["a"])]), both(PART));
    }

    #[test]
    fn a_key_of_columns_that_do_not_come_is_left_out() {
        let key = |definition: &str| Constraint {
            name: "t_pkey".into(),
            kind: ConstraintKind::PrimaryKey,
            definition: definition.into(),
            references: None,
            from_parent: false,
            identifies: false,
        };
        for (definition, is_kept) in [
            ("PRIMARY KEY (a)", true),
            ("PRIMARY KEY (a, c)", true),
            ("PRIMARY KEY (a, b)", false),
            ("PRIMARY KEY (b)", false),
            ("PRIMARY KEY (a) INCLUDE (b)", true),
        ] {
            let mut one = definitions(vec![table("t", None)]);
            one.tables[0].constraints.push(key(definition));
            let create = created(one, &[("t", &["a"])]);
            assert_eq!(create[0].contains("PRIMARY KEY"), is_kept, "{definition}");
        }
    }
}
