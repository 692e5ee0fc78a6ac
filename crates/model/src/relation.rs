use crate::UserType;

/// A published table as one version of its definition, from pgoutput's Relation message
/// (PostgreSQL docs: "55.9. Logical Replication Message Formats").
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Relation {
    /// The relation's OID on the publisher.
    pub oid: u32,
    /// Schema name (`pg_catalog` arrives as the empty string and is kept so).
    pub schema: String,
    /// Table name.
    pub name: String,
    /// `REPLICA IDENTITY` of the table.
    pub identity: ReplicaIdentity,
    /// Published columns, in the order in which tuples carry them.
    pub columns: Vec<Column>,
    /// What the publisher said of those types of its columns that are not PostgreSQL's own, and of
    /// the types that they are made of; sorted by OID. Not part of the message itself.
    pub types: Vec<UserType>,
}

/// A published column.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Column {
    /// Part of the replica identity.
    pub key: bool,
    /// Column name.
    pub name: String,
    /// `atttypid` on the publisher.
    pub type_oid: u32,
    /// `atttypmod` on the publisher, -1 when the type has none.
    pub type_modifier: i32,
}

/// `pg_class.relreplident`: what identifies a row in updates and deletes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReplicaIdentity {
    /// The primary key, if there is one (`d`).
    Default,
    /// Nothing: updates and deletes cannot be published (`n`).
    Nothing,
    /// The whole old row (`f`).
    Full,
    /// The columns of a chosen unique index (`i`).
    Index,
}

impl Relation {
    /// What is known of a user-defined type of its columns.
    pub fn user_type(&self, oid: u32) -> Option<&UserType> {
        self.types.binary_search_by_key(&oid, |known| known.oid).ok().map(|at| &self.types[at])
    }

    /// `schema.name`, each quoted where SQL needs it.
    pub fn qualified_name(&self) -> String {
        let schema = if self.schema.is_empty() { "pg_catalog" } else { &self.schema };
        format!("{}.{}", quote_identifier(schema), quote_identifier(&self.name))
    }
}

/// Quotes an SQL identifier unless it is plainly safe without quotes.
pub fn quote_identifier(name: &str) -> String {
    let plain = name.starts_with(|c: char| c.is_ascii_lowercase() || c == '_')
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
        && !is_keyword(name);
    if plain { name.to_owned() } else { format!("\"{}\"", name.replace('"', "\"\"")) }
}

/// Words that PostgreSQL reserves somewhere (appendix C, "reserved" and "can be function or type").
fn is_keyword(word: &str) -> bool {
    const RESERVED: &[&str] = &[
        "all",
        "analyse",
        "analyze",
        "and",
        "any",
        "array",
        "as",
        "asc",
        "asymmetric",
        "authorization",
        "between",
        "bigint",
        "binary",
        "bit",
        "boolean",
        "both",
        "case",
        "cast",
        "char",
        "character",
        "check",
        "coalesce",
        "collate",
        "collation",
        "column",
        "concurrently",
        "constraint",
        "create",
        "cross",
        "current_catalog",
        "current_date",
        "current_role",
        "current_schema",
        "current_time",
        "current_timestamp",
        "current_user",
        "dec",
        "decimal",
        "default",
        "deferrable",
        "desc",
        "distinct",
        "do",
        "else",
        "end",
        "except",
        "exists",
        "extract",
        "false",
        "fetch",
        "float",
        "for",
        "foreign",
        "freeze",
        "from",
        "full",
        "grant",
        "greatest",
        "group",
        "grouping",
        "having",
        "ilike",
        "in",
        "initially",
        "inner",
        "inout",
        "int",
        "integer",
        "intersect",
        "interval",
        "into",
        "is",
        "isnull",
        "join",
        "lateral",
        "leading",
        "least",
        "left",
        "like",
        "limit",
        "localtime",
        "localtimestamp",
        "national",
        "natural",
        "nchar",
        "none",
        "normalize",
        "not",
        "notnull",
        "null",
        "nullif",
        "numeric",
        "offset",
        "on",
        "only",
        "or",
        "order",
        "out",
        "outer",
        "overlaps",
        "overlay",
        "placing",
        "position",
        "precision",
        "primary",
        "real",
        "references",
        "returning",
        "right",
        "row",
        "select",
        "session_user",
        "setof",
        "similar",
        "smallint",
        "some",
        "substring",
        "symmetric",
        "system_user",
        "table",
        "tablesample",
        "then",
        "time",
        "timestamp",
        "to",
        "trailing",
        "treat",
        "trim",
        "true",
        "union",
        "unique",
        "user",
        "using",
        "values",
        "varchar",
        "variadic",
        "verbose",
        "when",
        "where",
        "window",
        "with",
    ];
    RESERVED.binary_search(&word).is_ok()
}

#[cfg(test)]
mod tests {
    use super::quote_identifier;

    #[test]
    fn identifiers_are_quoted_where_sql_needs_it() {
        for (name, quoted) in [
            ("orders", "orders"),
            ("Orders", "\"Orders\""),
            ("order", "\"order\""),
            ("with", "\"with\""),
            ("a b", "\"a b\""),
            ("a\"b", "\"a\"\"b\""),
            ("1a", "\"1a\""),
            ("", "\"\""),
            ("día", "\"día\""),
        ] {
            assert_eq!(quote_identifier(name), quoted);
        }
    }
}
