//! The tables of the prefix workload, the same on both sides.

use anyhow::Result;
use postgres::Client;

/// A table of schema `prefix`. All columns are of type int, bigint or text, whose text form is
/// the same in every output.
#[derive(Debug)]
pub struct TableSpec {
    /// Name without schema.
    pub name: &'static str,
    /// All columns in order.
    pub columns: &'static [&'static str],
    /// Indices of the columns of the replica identity; empty for a table that has none, into
    /// which rows are only inserted.
    pub identity: &'static [usize],
    /// What stands between the parentheses of CREATE TABLE.
    definition: &'static str,
    /// Statements after it.
    more: &'static str,
}

/// The tables, in the order in which a state lists them.
pub const TABLES: &[TableSpec] = &[
    // One row per transaction, pruned by its writer: tells prefixes apart and names transactions.
    TableSpec {
        name: "ledger",
        columns: &["txid", "writer"],
        identity: &[0],
        definition: "txid bigint PRIMARY KEY, writer int NOT NULL",
        more: "",
    },
    // The same without any key: a transaction applied twice shows as a second row.
    TableSpec {
        name: "trail",
        columns: &["txid", "writer"],
        identity: &[],
        definition: "txid bigint NOT NULL, writer int NOT NULL",
        more: "",
    },
    // Hot rows: every writer increments the same few.
    TableSpec {
        name: "counter",
        columns: &["id", "n"],
        identity: &[0],
        definition: "id int PRIMARY KEY, n bigint NOT NULL",
        more: "",
    },
    // Append to a list: the order of transactions is in the value.
    TableSpec {
        name: "list",
        columns: &["id", "items"],
        identity: &[0],
        definition: "id int PRIMARY KEY, items text NOT NULL",
        more: "",
    },
    // Transfers keep the sum. The log has whole old rows.
    TableSpec {
        name: "account",
        columns: &["id", "balance"],
        identity: &[0],
        definition: "id int PRIMARY KEY, balance bigint NOT NULL",
        more: "ALTER TABLE prefix.account REPLICA IDENTITY FULL;",
    },
    // Values of a unique column change places.
    TableSpec {
        name: "seat",
        columns: &["id", "holder"],
        identity: &[0],
        definition: "id int PRIMARY KEY, holder int UNIQUE",
        more: "",
    },
    TableSpec {
        name: "orders",
        columns: &["id", "customer", "total", "status"],
        identity: &[0],
        definition: "id bigint PRIMARY KEY, customer int NOT NULL, total bigint NOT NULL, status text",
        more: "",
    },
    TableSpec {
        name: "order_lines",
        columns: &["order_id", "line_no", "sku", "quantity"],
        identity: &[0, 1],
        definition: "order_id bigint REFERENCES prefix.orders, line_no int, sku text NOT NULL, \
                     quantity int NOT NULL, PRIMARY KEY (order_id, line_no)",
        more: "",
    },
    // The primary key itself is updated.
    TableSpec {
        name: "moving",
        columns: &["id", "owner", "payload"],
        identity: &[0],
        definition: "id bigint PRIMARY KEY, owner int NOT NULL, payload text",
        more: "CREATE INDEX moving_owner ON prefix.moving (owner, id);",
    },
    // The identity is a unique index that is not the primary key.
    TableSpec {
        name: "badge",
        columns: &["id", "code", "note"],
        identity: &[1],
        definition: "id bigint PRIMARY KEY, code text NOT NULL, note text",
        more: "CREATE UNIQUE INDEX badge_code ON prefix.badge (code); \
               ALTER TABLE prefix.badge REPLICA IDENTITY USING INDEX badge_code;",
    },
    TableSpec {
        name: "event",
        columns: &["id", "kind", "detail"],
        identity: &[0],
        definition: "id bigint PRIMARY KEY, kind int NOT NULL, detail text",
        more: "",
    },
    // Truncated and filled again in one transaction.
    TableSpec {
        name: "scratch",
        columns: &["id", "value"],
        identity: &[0],
        definition: "id bigint PRIMARY KEY, value text",
        more: "",
    },
    // Values out of line, updates that leave them alone.
    TableSpec {
        name: "document",
        columns: &["id", "revision", "body"],
        identity: &[0],
        definition: "id bigint PRIMARY KEY, revision bigint NOT NULL, body text",
        more: "ALTER TABLE prefix.document ALTER body SET STORAGE EXTERNAL;",
    },
    // Transactions larger than the decoding memory: streamed before they commit.
    TableSpec {
        name: "bulk",
        columns: &["id", "batch", "value"],
        identity: &[0],
        definition: "id bigint PRIMARY KEY, batch bigint NOT NULL, value text",
        more: "CREATE INDEX bulk_batch ON prefix.bulk (batch);",
    },
];

/// Creates schema and empty tables; the same on publisher and subscriber.
///
/// # Errors
/// The server's message.
pub fn create_tables(client: &mut Client) -> Result<()> {
    let mut script = String::from("CREATE SCHEMA prefix;");
    for table in TABLES {
        let TableSpec { name, definition, more, .. } = table;
        script.push_str(&format!("CREATE TABLE prefix.{name} ({definition}); {more}\n"));
    }
    client.batch_execute(&script)?;
    Ok(())
}

/// Qualified names of all tables.
pub fn table_names() -> Vec<String> {
    TABLES.iter().map(|table| format!("prefix.{}", table.name)).collect()
}

/// The index of a table in [`TABLES`].
pub(super) fn table_index(name: &str) -> Option<usize> {
    TABLES.iter().position(|table| table.name == name)
}
