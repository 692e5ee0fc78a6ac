use crate::publication::TableName;
use std::collections::BTreeMap;

/// What the publisher's tables are called on the target. Without an entry: the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameMap {
    /// Exact tables; these go before schemas.
    pub tables: BTreeMap<TableName, TableName>,
    /// Schemas.
    pub schemas: BTreeMap<String, String>,
}

impl NameMap {
    /// The target's name of a table.
    pub fn table(&self, name: &TableName) -> TableName {
        match (self.tables.get(name), self.schemas.get(&name.schema)) {
            (Some(mapped), _) => mapped.clone(),
            (None, Some(schema)) => TableName { schema: schema.clone(), name: name.name.clone() },
            (None, None) => name.clone(),
        }
    }

    /// The target's name of a sequence: it stays beside the table that owns it, as PostgreSQL
    /// demands.
    pub fn sequence(&self, name: &TableName, owner: Option<&TableName>) -> TableName {
        match owner {
            Some(owner) => TableName { schema: self.table(owner).schema, name: name.name.clone() },
            None => self.table(name),
        }
    }

    /// Two of `tables` that would be one on the target.
    pub fn collision<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a TableName>,
    ) -> Option<(&'a TableName, &'a TableName, TableName)> {
        let mut taken = BTreeMap::new();
        for table in tables {
            let mapped = self.table(table);
            if let Some(other) = taken.insert(mapped.clone(), table)
                && other != table
            {
                return Some((other, table, mapped));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(schema: &str, name: &str) -> TableName {
        TableName { schema: schema.into(), name: name.into() }
    }

    #[test]
    fn exact_tables_go_before_schemas() {
        let map = NameMap {
            tables: BTreeMap::from([(name("public", "orders"), name("archive", "orders_copy"))]),
            schemas: BTreeMap::from([("public".to_owned(), "mirror".to_owned())]),
        };
        assert_eq!(map.table(&name("public", "orders")), name("archive", "orders_copy"));
        assert_eq!(map.table(&name("public", "lines")), name("mirror", "lines"));
        assert_eq!(map.table(&name("audit", "log")), name("audit", "log"));
        let sequence = name("public", "orders_id_seq");
        let owner = name("public", "orders");
        assert_eq!(map.sequence(&sequence, Some(&owner)), name("archive", "orders_id_seq"));
        assert_eq!(map.sequence(&sequence, None), name("mirror", "orders_id_seq"));
        let (lines, same) = (name("public", "lines"), name("mirror", "lines"));
        assert!(map.collision([&lines, &owner]).is_none());
        assert!(map.collision([&lines, &same]).is_some());
    }
}
