//! What the published tables are on the publisher, so that a target without them can have them.
//!
//! ```text
//! read    the publisher's catalogs → [`Definitions`]
//! published   [`Definitions`] for a target that gets some of the columns
//! render  [`Definitions`] → [`Plan`]: SQL for a target of some version, under mapped names
//! names   what a table is called on the target
//! sequences   where sequences stand
//! ```
//!
//! Everything here is as PostgreSQL's own functions print it (`format_type`, `pg_get_expr`,
//! `pg_get_constraintdef`, …) with an empty `search_path`, so that every name is qualified.

mod names;
mod published;
mod read;
mod render;
mod sequences;

pub use names::NameMap;
pub use read::read_definitions;
pub use render::{AfterStatement, Creation, ObjectId, Plan, Stage, TablePlan, TargetServer};
pub use sequences::SequencePosition;
pub(crate) use sequences::read_positions;

use crate::publication::TableName;
use serde::{Deserialize, Serialize};

/// Tables, and all that they need to be created.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definitions {
    /// Extensions whose types, functions or operator classes are used.
    pub extensions: Vec<Extension>,
    /// Collations, types and functions, each after what it needs itself.
    pub objects: Vec<Object>,
    /// Sequences that defaults use or columns own; not those of identity columns.
    pub sequences: Vec<Sequence>,
    /// Tables, parents before their children and partitions.
    pub tables: Vec<Table>,
}

/// An extension and the schema its objects are in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extension {
    /// Name.
    pub name: String,
    /// Schema.
    pub schema: String,
}

/// Something that columns, defaults or constraints refer to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// Schema.
    pub schema: String,
    /// Name; for a function with its argument types.
    pub name: String,
    /// What it is.
    pub kind: ObjectKind,
}

/// What an [`Object`] is, with the SQL pieces that make it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ObjectKind {
    /// `CREATE COLLATION … (options)`.
    Collation {
        /// Options as SQL.
        options: String,
    },
    /// `CREATE TYPE … AS ENUM`.
    Enum {
        /// Labels in their order.
        labels: Vec<String>,
    },
    /// `CREATE DOMAIN`.
    Domain {
        /// The type under it, as SQL.
        base: String,
        /// `COLLATE`, `DEFAULT` and `NOT NULL` clauses as SQL.
        clauses: String,
        /// Name and definition of each check.
        checks: Vec<(String, String)>,
    },
    /// `CREATE TYPE … AS (…)`.
    Composite {
        /// Name, type as SQL, collation as SQL.
        attributes: Vec<(String, String, Option<String>)>,
    },
    /// `CREATE TYPE … AS RANGE`.
    Range {
        /// Options as SQL.
        options: Vec<String>,
        /// The multirange type's name.
        multirange: Option<String>,
    },
    /// `CREATE FUNCTION`, whole.
    Function {
        /// As `pg_get_functiondef` prints it.
        definition: String,
    },
}

/// A sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sequence {
    /// Schema and name.
    pub name: TableName,
    /// The column that owns it, if any: table and column name.
    pub owner: Option<(TableName, String)>,
    /// `AS type START … INCREMENT …` as SQL.
    pub options: String,
    /// How an expression refers to it: `'schema.name'::regclass`.
    pub reference: String,
}

/// A table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Table {
    /// OID on the publisher.
    pub oid: u32,
    /// Schema and name.
    pub name: TableName,
    /// Columns in order.
    pub columns: Vec<TableColumn>,
    /// Partition key as SQL, of a partitioned table.
    pub partition_key: Option<String>,
    /// Parent and bound as SQL, of a partition whose parent is among the tables.
    pub partition_of: Option<(TableName, String)>,
    /// Parents by plain inheritance that are among the tables.
    pub inherits: Vec<TableName>,
    /// Constraints: keys, checks, exclusions, foreign keys.
    pub constraints: Vec<Constraint>,
    /// Indexes that no constraint stands for.
    pub indexes: Vec<Index>,
    /// `REPLICA IDENTITY` clause, unless it is the default.
    pub replica_identity: Option<String>,
    /// Comments on the table (no column) and on its columns.
    pub comments: Vec<(Option<String>, String)>,
}

/// A column.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableColumn {
    /// Name.
    pub name: String,
    /// Type as SQL.
    pub type_name: String,
    /// Collation as SQL, unless it is the type's own.
    pub collation: Option<String>,
    /// `NOT NULL`, and every row is known to keep to it.
    pub not_null: bool,
    /// How it gets a value that nobody gives.
    pub fill: ColumnFill,
    /// The publisher keeps its values to itself: on a target nobody gives any. Not of the publisher,
    /// but made of what it publishes ([`Definitions::as_sent`]).
    #[serde(skip)]
    pub unsent: bool,
}

/// How a column gets a value that nobody gives.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ColumnFill {
    /// NULL.
    #[default]
    None,
    /// An expression.
    Default {
        /// As SQL.
        expression: String,
        /// The extensions it calls functions of.
        extensions: Vec<String>,
        /// Functions it calls that cannot be created elsewhere (in C, or an unknown language).
        foreign_functions: Vec<String>,
    },
    /// `GENERATED ALWAYS AS (…)`.
    Generated {
        /// As SQL.
        expression: String,
        /// Computed when read (PostgreSQL 18) instead of stored.
        virtual_: bool,
    },
    /// `GENERATED … AS IDENTITY`.
    Identity {
        /// `GENERATED ALWAYS`; else `BY DEFAULT`.
        always: bool,
        /// The sequence behind it.
        sequence: TableName,
        /// Its options as SQL.
        options: String,
    },
}

/// What a constraint is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ConstraintKind {
    /// `PRIMARY KEY`.
    PrimaryKey,
    /// `UNIQUE`.
    Unique,
    /// `CHECK`.
    Check,
    /// `EXCLUDE`.
    Exclusion,
    /// `FOREIGN KEY`.
    ForeignKey,
}

/// A constraint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Constraint {
    /// Name.
    pub name: String,
    /// What it is.
    pub kind: ConstraintKind,
    /// As `pg_get_constraintdef` prints it; of a foreign key, what stands before `REFERENCES`.
    pub definition: String,
    /// The table a foreign key refers to, and what stands after its name.
    pub references: Option<(TableName, String)>,
    /// It is there because the parent has it; of a check or a foreign key, a parent that is among
    /// the tables.
    pub from_parent: bool,
    /// Its index is the replica identity.
    pub identifies: bool,
}

/// An index that no constraint stands for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Index {
    /// Name.
    pub name: String,
    /// `UNIQUE`.
    pub unique: bool,
    /// What `pg_get_indexdef` prints after the table's name: `USING …`.
    pub definition: String,
    /// It is there because the parent has it.
    pub from_parent: bool,
    /// It is the replica identity.
    pub identifies: bool,
}
