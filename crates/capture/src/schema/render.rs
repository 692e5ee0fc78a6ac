//! Definitions → SQL for a target. The one place where the text of DDL is written.

use super::{
    ColumnFill, Constraint, ConstraintKind, Definitions, Index, NameMap, Object, ObjectKind, Table,
    TableColumn,
};
use crate::publication::TableName;
use farshore_model::quote_identifier;
use farshore_pg::quote_literal;
use std::collections::BTreeSet;

/// SQL that creates what is missing on a target, in the order to run it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Schemas, extensions, collations, types, functions and sequences.
    pub objects: Vec<Creation>,
    /// Tables, parents first.
    pub tables: Vec<TablePlan>,
}

/// One object and the statement that creates it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Creation {
    /// Which object: it is created only where there is none of that name.
    pub object: ObjectId,
    /// The statement.
    pub sql: String,
}

/// What an object is known by on the target.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ObjectId {
    /// A schema.
    Schema(String),
    /// An extension.
    Extension(String),
    /// A collation, by schema and name.
    Collation(String, String),
    /// A type, by schema and name.
    Type(String, String),
    /// A function, by schema, and name with argument types.
    Function(String, String),
    /// A sequence or table.
    Relation(TableName),
}

impl std::fmt::Display for ObjectId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let qualified = |schema: &str, name: &str| {
            format!("{}.{}", quote_identifier(schema), quote_identifier(name))
        };
        match self {
            ObjectId::Schema(name) => write!(f, "schema {}", quote_identifier(name)),
            ObjectId::Extension(name) => write!(f, "extension {}", quote_identifier(name)),
            ObjectId::Collation(schema, name) => {
                write!(f, "collation {}", qualified(schema, name))
            }
            ObjectId::Type(schema, name) => write!(f, "type {}", qualified(schema, name)),
            ObjectId::Function(schema, name) => {
                write!(f, "function {}.{name}", quote_identifier(schema))
            }
            ObjectId::Relation(name) => write!(f, "{name}"),
        }
    }
}

/// A table and the statements that create it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TablePlan {
    /// Its name on the publisher.
    pub source: TableName,
    /// Its name on the target.
    pub target: TableName,
    /// The target's name of the partitioned table it is a partition of.
    pub partition_of: Option<TableName>,
    /// The bound that it has there.
    pub bound: Option<String>,
    /// What it is partitioned by itself.
    pub partition_key: Option<String>,
    /// Its columns.
    pub columns: Vec<String>,
    /// `CREATE TABLE` with its keys, then what makes it whole but for `attach`.
    pub create: Vec<String>,
    /// Makes it a partition of its parent.
    pub attach: Option<String>,
    /// What is done when its rows are there.
    pub after: Vec<AfterStatement>,
    /// What it has on the publisher and will not have on the target.
    pub left_out: Vec<String>,
}

/// When a statement is run after the copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Indexes, unique and exclusion constraints of partitions, each before those of its parent.
    PartitionIndexes,
    /// Indexes, unique and exclusion constraints.
    Indexes,
    /// Check constraints, comments, the replica identity.
    Checks,
    /// Foreign keys: when all tables stand at the same point.
    ForeignKeys,
}

/// A statement that is run after the copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfterStatement {
    /// When.
    pub stage: Stage,
    /// What it makes, for messages: `index public.orders_customer`.
    pub object: String,
    /// The statement.
    pub sql: String,
    /// The parent brings it along, if that has it before this table becomes its partition.
    pub from_parent: bool,
}

/// The server that SQL is written for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetServer {
    /// `server_version_num`.
    pub version: u32,
    /// Extensions that it cannot have: they are not created, and defaults that call their
    /// functions are left out.
    pub no_extensions: BTreeSet<String>,
    /// Functions of PostgreSQL that it does not know: defaults that call them are left out.
    pub no_functions: BTreeSet<String>,
    /// Names that primary keys would have ([`Definitions::names_of_keys`]) and that something there
    /// has already, as a table that was renamed on the publisher keeps its own: the server names them.
    pub taken: BTreeSet<TableName>,
}

struct Renderer<'a> {
    definitions: &'a Definitions,
    names: &'a NameMap,
    target: &'a TargetServer,
}

impl Definitions {
    /// What primary keys are called on the target.
    pub fn names_of_keys(&self, names: &NameMap) -> BTreeSet<TableName> {
        let of_table = |table: &Table| {
            let schema = names.table(&table.name).schema;
            let keys = table.constraints.iter().filter(|c| c.kind == ConstraintKind::PrimaryKey);
            let named = keys.map(move |key| (schema.clone(), key.name.clone()));
            named.map(|(schema, name)| TableName { schema, name }).collect::<Vec<TableName>>()
        };
        self.tables.iter().flat_map(of_table).collect()
    }

    /// Functions of PostgreSQL, or types written like one, that defaults call.
    pub fn functions_in_defaults(&self) -> BTreeSet<String> {
        let columns = self.tables.iter().flat_map(|table| &table.columns);
        columns
            .filter_map(|column| match &column.fill {
                ColumnFill::Default { expression, .. } => Some(called(expression)),
                _ => None,
            })
            .flatten()
            .collect()
    }

    /// The SQL that creates all of this on `target` under the names of `names`.
    pub fn plan(&self, names: &NameMap, target: &TargetServer) -> Plan {
        let renderer = Renderer { definitions: self, names, target };
        Plan {
            objects: renderer.objects(),
            tables: self.tables.iter().map(|table| renderer.table(table)).collect(),
        }
    }
}

impl Renderer<'_> {
    fn objects(&self) -> Vec<Creation> {
        let extensions = || {
            self.definitions
                .extensions
                .iter()
                .filter(|e| !self.target.no_extensions.contains(&e.name))
        };
        let sequences = || {
            self.definitions.sequences.iter().map(|sequence| {
                let owner = sequence.owner.as_ref().map(|(table, _)| table);
                (self.names.sequence(&sequence.name, owner), sequence)
            })
        };
        let schemas: BTreeSet<String> = extensions()
            .map(|extension| extension.schema.clone())
            .chain(self.definitions.objects.iter().map(|object| object.schema.clone()))
            .chain(sequences().map(|(name, _)| name.schema))
            .chain(self.definitions.tables.iter().map(|t| self.names.table(&t.name).schema))
            .filter(|schema| schema != "pg_catalog")
            .collect();
        let mut creations: Vec<Creation> = schemas
            .into_iter()
            .map(|schema| Creation {
                sql: format!("CREATE SCHEMA {}", quote_identifier(&schema)),
                object: ObjectId::Schema(schema),
            })
            .collect();
        creations.extend(extensions().map(|extension| {
            let name = quote_identifier(&extension.name);
            let schema = quote_identifier(&extension.schema);
            let sql = if extension.schema == "pg_catalog" {
                format!("CREATE EXTENSION {name}")
            } else {
                format!("CREATE EXTENSION {name} WITH SCHEMA {schema}")
            };
            Creation { object: ObjectId::Extension(extension.name.clone()), sql }
        }));
        creations.extend(self.definitions.objects.iter().map(object));
        creations.extend(sequences().map(|(name, sequence)| Creation {
            sql: format!("CREATE SEQUENCE {name} {}", sequence.options),
            object: ObjectId::Relation(name),
        }));
        creations
    }

    fn table(&self, table: &Table) -> TablePlan {
        let target = self.names.table(&table.name);
        let mut left_out = Vec::new();
        let mut lines: Vec<String> =
            table.columns.iter().map(|column| self.column(table, column, &mut left_out)).collect();
        for constraint in table.constraints.iter().filter(|c| is_key(c)) {
            if let Some(column) = self.empty_key_column(table, constraint) {
                left_out.push(format!(
                    "constraint {}, whose column {column} is not published",
                    quote_identifier(&constraint.name)
                ));
                continue;
            }
            let name = TableName { schema: target.schema.clone(), name: constraint.name.clone() };
            let is_primary = constraint.kind == ConstraintKind::PrimaryKey;
            lines.push(match is_primary && self.target.taken.contains(&name) {
                true => self.for_older_targets(&constraint.definition),
                false => self.constraint(constraint, &mut left_out).unwrap_or_default(),
            });
        }
        let mut create = format!("CREATE TABLE {target} (");
        for (number, line) in lines.iter().enumerate() {
            let comma = if number + 1 < lines.len() { "," } else { "\n" };
            create.push_str(&format!("\n  {line}{comma}"));
        }
        create.push(')');
        if !table.inherits.is_empty() {
            let parents: Vec<String> =
                table.inherits.iter().map(|parent| self.names.table(parent).to_string()).collect();
            create.push_str(&format!(" INHERITS ({})", parents.join(", ")));
        }
        if let Some(key) = &table.partition_key {
            create.push_str(&format!(" PARTITION BY {key}"));
        }
        let mut create = vec![create];
        let identifying = table.indexes.iter().filter(|index| index.identifies);
        create.extend(identifying.map(|index| self.index(index, &target)));
        for sequence in &self.definitions.sequences {
            if let Some((owner, column)) = &sequence.owner
                && *owner == table.name
            {
                create.push(format!(
                    "ALTER SEQUENCE {} OWNED BY {target}.{}",
                    self.names.sequence(&sequence.name, Some(owner)),
                    quote_identifier(column)
                ));
            }
        }
        let partition_of = table.partition_of.as_ref().map(|(parent, _)| self.names.table(parent));
        let attach = table.partition_of.as_ref().map(|(parent, bound)| {
            format!("ALTER TABLE {} ATTACH PARTITION {target} {bound}", self.names.table(parent))
        });
        let after = self.after(table, &target, &mut left_out);
        TablePlan {
            source: table.name.clone(),
            target,
            partition_of,
            bound: table.partition_of.as_ref().map(|(_, bound)| bound.clone()),
            partition_key: table.partition_key.clone(),
            columns: table.columns.iter().map(|column| column.name.clone()).collect(),
            create,
            attach,
            after,
            left_out,
        }
    }

    /// Whether nothing on the target fills the column. Its domain may.
    fn is_empty(&self, column: &TableColumn) -> bool {
        let has_value = match &column.fill {
            ColumnFill::None => self.domain_default(&column.type_name),
            ColumnFill::Default { .. } => self.missing_in_default(column).is_empty(),
            ColumnFill::Generated { .. } | ColumnFill::Identity { .. } => true,
        };
        column.unsent && !has_value
    }

    fn domain(&self, type_name: &str) -> Option<(&str, &str)> {
        self.definitions.objects.iter().find_map(|object| match &object.kind {
            ObjectKind::Domain { base, clauses, .. } => {
                let (schema, name) =
                    (quote_identifier(&object.schema), quote_identifier(&object.name));
                (format!("{schema}.{name}") == type_name).then_some((&base[..], &clauses[..]))
            }
            _ => None,
        })
    }

    /// The types from `type_name` down to what is no domain, each with its clauses.
    fn domains(&self, type_name: &str) -> Vec<(&str, &str)> {
        let mut chain = Vec::new();
        let mut next = self.domain(type_name);
        // A domain's chain is finite; the bound is for descriptions that are damaged.
        while let Some((base, clauses)) = next
            && chain.len() <= self.definitions.objects.len()
        {
            chain.push((base, clauses));
            next = self.domain(base);
        }
        chain
    }

    fn domain_default(&self, type_name: &str) -> bool {
        self.domains(type_name).iter().any(|(_, clauses)| clauses.contains(" DEFAULT "))
    }

    /// The type of a column that is to take NULL: below the last domain that takes none.
    fn nullable_type<'b>(&'b self, type_name: &'b str) -> &'b str {
        let chain = self.domains(type_name);
        let strict = chain.iter().rfind(|(_, clauses)| clauses.ends_with(" NOT NULL"));
        strict.map_or(type_name, |(base, _)| base)
    }

    /// A column of a primary key that would be empty in every row.
    fn empty_key_column(&self, table: &Table, constraint: &Constraint) -> Option<String> {
        if constraint.kind != ConstraintKind::PrimaryKey {
            return None;
        }
        let (_, key) = constraint.definition.split_once('(')?;
        let key = key.split_once(") INCLUDE (").map_or(key, |(key, _)| key);
        let key: Vec<&str> = key.trim_end_matches(')').split(", ").collect();
        let empty = table.columns.iter().filter(|column| self.is_empty(column));
        empty.map(|column| quote_identifier(&column.name)).find(|name| key.contains(&&name[..]))
    }

    /// What the target lacks for a column's default.
    fn missing_in_default(&self, column: &TableColumn) -> Vec<String> {
        let ColumnFill::Default { expression, extensions, foreign_functions } = &column.fill else {
            return Vec::new();
        };
        let called = called(expression);
        extensions
            .iter()
            .filter(|extension| self.target.no_extensions.contains(*extension))
            .chain(foreign_functions)
            .chain(called.intersection(&self.target.no_functions))
            .cloned()
            .collect()
    }

    fn column(&self, table: &Table, column: &TableColumn, left_out: &mut Vec<String>) -> String {
        let is_empty = self.is_empty(column);
        let type_name =
            if is_empty { self.nullable_type(&column.type_name) } else { &column.type_name };
        let mut line = format!("{} {type_name}", quote_identifier(&column.name));
        if let Some(collation) = &column.collation {
            line.push_str(&format!(" COLLATE {collation}"));
        }
        match &column.fill {
            ColumnFill::None => {}
            ColumnFill::Default { expression, .. } => {
                let missing = self.missing_in_default(column);
                if missing.is_empty() {
                    line.push_str(&format!(" DEFAULT {}", self.with_mapped_sequences(expression)));
                } else {
                    left_out.push(format!(
                        "the default of column {}, which needs {}",
                        quote_identifier(&column.name),
                        missing.join(", ")
                    ));
                }
            }
            // Before 16 a child may not say it again; it has its parent's.
            ColumnFill::Generated { .. }
                if self.target.version < 160_000 && self.is_generated_above(table, column) => {}
            ColumnFill::Generated { expression, virtual_ } => {
                // Virtual columns came with 18; to a reader a stored one is the same.
                let kept =
                    if *virtual_ && self.target.version >= 180_000 { "VIRTUAL" } else { "STORED" };
                line.push_str(&format!(" GENERATED ALWAYS AS ({expression}) {kept}"));
            }
            ColumnFill::Identity { always, sequence, options } => {
                let word = if *always { "ALWAYS" } else { "BY DEFAULT" };
                let sequence = self.names.sequence(sequence, Some(&table.name));
                line.push_str(&format!(
                    " GENERATED {word} AS IDENTITY (SEQUENCE NAME {sequence} {options})"
                ));
            }
        }
        if column.not_null && !is_empty {
            line.push_str(" NOT NULL");
        }
        line
    }

    /// Whether a table that `table` inherits from generates this column.
    fn is_generated_above(&self, table: &Table, column: &TableColumn) -> bool {
        let is_parent = |other: &&Table| table.inherits.contains(&other.name);
        let parents = self.definitions.tables.iter().filter(is_parent);
        let mut above = parents.flat_map(|parent| &parent.columns);
        above.any(|above| {
            above.name == column.name && matches!(above.fill, ColumnFill::Generated { .. })
        })
    }

    /// An expression that refers to sequences by the names they have on the target.
    fn with_mapped_sequences(&self, expression: &str) -> String {
        let mut mapped = expression.to_owned();
        for sequence in &self.definitions.sequences {
            let owner = sequence.owner.as_ref().map(|(table, _)| table);
            let name = self.names.sequence(&sequence.name, owner);
            if name != sequence.name {
                let reference = format!("{}::regclass", quote_literal(&name.to_string()));
                mapped = mapped.replace(&sequence.reference, &reference);
            }
        }
        mapped
    }

    fn after(
        &self,
        table: &Table,
        target: &TableName,
        left_out: &mut Vec<String>,
    ) -> Vec<AfterStatement> {
        let mut after = Vec::new();
        let indexes = match table.partition_of {
            Some(_) => Stage::PartitionIndexes,
            None => Stage::Indexes,
        };
        let schema = quote_identifier(&target.schema);
        for index in table.indexes.iter().filter(|index| !index.identifies) {
            after.push(AfterStatement {
                stage: indexes,
                object: format!("index {schema}.{}", quote_identifier(&index.name)),
                sql: self.index(index, target),
                from_parent: index.from_parent,
            });
        }
        for constraint in table.constraints.iter().filter(|c| !is_key(c)) {
            let stage = match constraint.kind {
                ConstraintKind::PrimaryKey | ConstraintKind::Unique | ConstraintKind::Exclusion => {
                    indexes
                }
                // A table that inherits is made with its parents, which always bring these along.
                ConstraintKind::Check | ConstraintKind::ForeignKey
                    if constraint.from_parent && table.partition_of.is_none() =>
                {
                    continue;
                }
                ConstraintKind::Check => Stage::Checks,
                ConstraintKind::ForeignKey => Stage::ForeignKeys,
            };
            let Some(line) = self.constraint(constraint, left_out) else { continue };
            after.push(AfterStatement {
                stage,
                object: format!("constraint {} of {target}", quote_identifier(&constraint.name)),
                sql: format!("ALTER TABLE {target} ADD {line}"),
                from_parent: constraint.from_parent,
            });
        }
        for (column, comment) in &table.comments {
            let of = match column {
                None => format!("TABLE {target}"),
                Some(column) => format!("COLUMN {target}.{}", quote_identifier(column)),
            };
            after.push(AfterStatement {
                stage: Stage::Checks,
                object: format!("comment on {of}"),
                sql: format!("COMMENT ON {of} IS {}", quote_literal(comment)),
                from_parent: false,
            });
        }
        if let Some(identity) = &table.replica_identity {
            after.push(AfterStatement {
                stage: Stage::Checks,
                object: format!("replica identity of {target}"),
                sql: format!("ALTER TABLE {target} REPLICA IDENTITY {identity}"),
                from_parent: false,
            });
        }
        after
    }

    fn index(&self, index: &Index, table: &TableName) -> String {
        let unique = if index.unique { "UNIQUE " } else { "" };
        let definition = self.for_older_targets(&index.definition);
        format!("CREATE {unique}INDEX {} ON {table} {definition}", quote_identifier(&index.name))
    }

    /// `CONSTRAINT name …`; none where the target knows no such constraint.
    fn constraint(&self, constraint: &Constraint, left_out: &mut Vec<String>) -> Option<String> {
        let name = quote_identifier(&constraint.name);
        let mut definition = constraint.definition.clone();
        if let Some((table, rest)) = &constraint.references {
            definition.push_str(&format!(" REFERENCES {}{rest}", self.names.table(table)));
        }
        let only_from_18 = definition.ends_with(" NOT ENFORCED")
            || constraint.kind == ConstraintKind::ForeignKey && definition.contains(", PERIOD ");
        if only_from_18 && self.target.version < 180_000 {
            left_out.push(format!("constraint {name}, which the target's version does not know"));
            return None;
        }
        Some(format!("CONSTRAINT {name} {}", self.for_older_targets(&definition)))
    }

    /// Clauses that came with later versions and without which the definition still holds.
    fn for_older_targets(&self, definition: &str) -> String {
        let mut definition = definition.to_owned();
        if self.target.version < 180_000 {
            definition = definition.replace(" WITHOUT OVERLAPS)", ")");
        }
        if self.target.version < 150_000 {
            definition = definition.replace(" NULLS NOT DISTINCT", "");
        }
        definition
    }
}

/// Keys that rows are found by: these are there before the copy.
fn is_key(constraint: &Constraint) -> bool {
    constraint.kind == ConstraintKind::PrimaryKey || constraint.identifies
}

/// Names before a parenthesis in an expression as PostgreSQL prints it with an empty search_path:
/// those without a schema are PostgreSQL's own. (Keywords that take a parenthesis are printed in
/// capitals.)
fn called(expression: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut quote = None;
    let (mut word, mut qualified) = (String::new(), false);
    for c in expression.chars() {
        match quote {
            Some(open) => {
                if c == open {
                    quote = None;
                }
                continue;
            }
            None if c == '\'' || c == '"' => quote = Some(c),
            None if c == '_' || c.is_ascii_lowercase() || c.is_ascii_digit() => {
                word.push(c);
                continue;
            }
            // As in `character varying(20)`.
            None if c == '(' && !qualified && word != "varying" && !word.is_empty() => {
                names.insert(word.clone());
            }
            None => {}
        }
        qualified = c == '.' || c == '"';
        word.clear();
    }
    names.retain(|name| !name.starts_with(|c: char| c.is_ascii_digit()));
    names
}

fn object(object: &Object) -> Creation {
    let name = object.qualified_name();
    let (schema, bare) = (object.schema.clone(), object.name.clone());
    let (id, sql) = match &object.kind {
        ObjectKind::Collation { options } => {
            (ObjectId::Collation(schema, bare), format!("CREATE COLLATION {name} ({options})"))
        }
        ObjectKind::Function { definition } => {
            (ObjectId::Function(schema, bare), definition.clone())
        }
        ObjectKind::Enum { labels } => {
            let labels: Vec<String> = labels.iter().map(|label| quote_literal(label)).collect();
            let sql = format!("CREATE TYPE {name} AS ENUM ({})", labels.join(", "));
            (ObjectId::Type(schema, bare), sql)
        }
        ObjectKind::Domain { base, clauses, checks } => {
            let mut sql = format!("CREATE DOMAIN {name} AS {base}{clauses}");
            for (check, definition) in checks {
                sql.push_str(&format!(" CONSTRAINT {} {definition}", quote_identifier(check)));
            }
            (ObjectId::Type(schema, bare), sql)
        }
        ObjectKind::Composite { attributes } => {
            let attributes: Vec<String> = attributes
                .iter()
                .map(|(attribute, type_name, collation)| {
                    let collation =
                        collation.as_ref().map(|c| format!(" COLLATE {c}")).unwrap_or_default();
                    format!("{} {type_name}{collation}", quote_identifier(attribute))
                })
                .collect();
            let sql = format!("CREATE TYPE {name} AS ({})", attributes.join(", "));
            (ObjectId::Type(schema, bare), sql)
        }
        ObjectKind::Range { options, multirange } => {
            let mut options = options.clone();
            options.extend(multirange.as_ref().map(|multirange| {
                format!(
                    "MULTIRANGE_TYPE_NAME = {}.{}",
                    quote_identifier(&object.schema),
                    quote_identifier(multirange)
                )
            }));
            let sql = format!("CREATE TYPE {name} AS RANGE ({})", options.join(", "));
            (ObjectId::Type(schema, bare), sql)
        }
    };
    Creation { object: id, sql }
}

#[cfg(test)]
mod tests {
    use super::called;

    #[test]
    fn functions_of_postgresql_are_found_in_expressions() {
        for (expression, names) in [
            ("uuidv7()", vec!["uuidv7"]),
            ("nextval('public.f(x)'::regclass)", vec!["nextval"]),
            ("COALESCE(lower('it''s g('::text), public.own(now()))", vec!["lower", "now"]),
            ("('x'::character varying(20))::numeric(3,1)", vec!["numeric"]),
            ("\"Odd\".f(1) + \"x y\"(2)", vec![]),
            ("(-1)", vec![]),
        ] {
            assert_eq!(called(expression).into_iter().collect::<Vec<_>>(), names, "{expression}");
        }
    }
}
