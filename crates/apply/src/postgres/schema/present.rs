use crate::ApplyError;
use crate::postgres::session::Session;
use farshore_capture::publication::TableName;
use farshore_capture::schema::ObjectId;
use std::collections::{BTreeSet, HashMap, HashSet};

/// What the target has.
#[derive(Debug, Default)]
pub(super) struct Present {
    objects: HashSet<ObjectId>,
    tables: HashMap<TableName, PresentTable>,
    available_extensions: BTreeSet<String>,
}

/// A relation on the target.
#[derive(Clone, Debug)]
pub(super) struct PresentTable {
    /// What it is partitioned by, of a partitioned table.
    pub partition_key: Option<String>,
    /// Its parent, if it is a partition.
    pub partition_of: Option<TableName>,
    /// Its bound there.
    pub bound: Option<String>,
}

impl PresentTable {
    /// Whether it is a partitioned table.
    pub fn is_partitioned(&self) -> bool {
        self.partition_key.is_some()
    }
}

const OBJECTS: &str = "SELECT 'schema', nspname, '' FROM pg_catalog.pg_namespace \
    UNION ALL SELECT 'extension', extname, '' FROM pg_catalog.pg_extension \
    UNION ALL SELECT 'available', name, '' FROM pg_catalog.pg_available_extensions \
    UNION ALL SELECT 'collation', n.nspname, c.collname FROM pg_catalog.pg_collation c \
      JOIN pg_catalog.pg_namespace n ON n.oid = c.collnamespace WHERE n.nspname <> 'pg_catalog' \
    UNION ALL SELECT 'type', n.nspname, t.typname FROM pg_catalog.pg_type t \
      JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace WHERE t.typtype <> 'p' \
        AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast') \
    UNION ALL SELECT 'function', n.nspname, pg_catalog.format('%s(%s)', p.proname, \
        pg_catalog.pg_get_function_identity_arguments(p.oid)) FROM pg_catalog.pg_proc p \
      JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace \
      WHERE n.nspname NOT IN ('pg_catalog', 'information_schema')";

const RELATIONS: &str = "SELECT n.nspname, c.relname, \
      CASE WHEN c.relkind = 'p' THEN pg_catalog.pg_get_partkeydef(c.oid) END, \
      pn.nspname, pc.relname, pg_catalog.pg_get_expr(c.relpartbound, c.oid) \
    FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
    LEFT JOIN pg_catalog.pg_inherits i ON i.inhrelid = c.oid AND c.relispartition \
    LEFT JOIN pg_catalog.pg_class pc ON pc.oid = i.inhparent \
    LEFT JOIN pg_catalog.pg_namespace pn ON pn.oid = pc.relnamespace \
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f', 'S') \
      AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')";

impl Present {
    /// Reads the target's catalogs.
    pub async fn read(session: &mut Session) -> Result<Present, ApplyError> {
        let mut present = Present::default();
        for row in session.query(OBJECTS, &[]).await? {
            let (schema, name) = (
                row.get(1).unwrap_or_default().to_owned(),
                row.get(2).unwrap_or_default().to_owned(),
            );
            let object = match row.get(0) {
                Some("schema") => ObjectId::Schema(schema),
                Some("extension") => ObjectId::Extension(schema),
                Some("collation") => ObjectId::Collation(schema, name),
                Some("type") => ObjectId::Type(schema, name),
                Some("function") => ObjectId::Function(schema, name),
                Some("available") => {
                    present.available_extensions.insert(schema);
                    continue;
                }
                _ => continue,
            };
            present.objects.insert(object);
        }
        for row in session.query(RELATIONS, &[]).await? {
            let name = |column: usize| {
                Some(TableName {
                    schema: row.get(column)?.to_owned(),
                    name: row.get(column + 1)?.to_owned(),
                })
            };
            let Some(table) = name(0) else { continue };
            let text = |column: usize| row.get(column).map(str::to_owned);
            let found =
                PresentTable { partition_key: text(2), partition_of: name(3), bound: text(5) };
            present.tables.insert(table, found);
        }
        Ok(present)
    }

    /// Whether the target has an object of that name.
    pub fn has(&self, object: &ObjectId) -> bool {
        match object {
            ObjectId::Relation(name) => self.tables.contains_key(name),
            other => self.objects.contains(other),
        }
    }

    /// A relation of that name.
    pub fn table(&self, name: &TableName) -> Option<&PresentTable> {
        self.tables.get(name)
    }

    /// Whether the table of that name has a partition with that bound.
    pub fn has_partition(&self, of: &TableName, bound: &str) -> bool {
        let mut partitions =
            self.tables.values().filter(|table| table.partition_of.as_ref() == Some(of));
        partitions.any(|partition| partition.bound.as_deref() == Some(bound))
    }

    /// Of `extensions`, those that the target neither has nor can make.
    pub fn unavailable<'a>(&self, extensions: impl Iterator<Item = &'a str>) -> BTreeSet<String> {
        extensions
            .filter(|name| {
                !self.available_extensions.contains(*name)
                    && !self.has(&ObjectId::Extension((*name).to_owned()))
            })
            .map(str::to_owned)
            .collect()
    }
}

#[cfg(test)]
impl Present {
    /// For tests: these tables.
    pub fn of(tables: impl IntoIterator<Item = (TableName, PresentTable)>) -> Present {
        Present { tables: tables.into_iter().collect(), ..Present::default() }
    }
}
