//! A dozen tables of mixed types and names, their rows, and changes of every kind to them.

use crate::Pair;
use anyhow::Result;

/// Creates the tables.
pub const SCHEMA: &str = include_str!("../scenarios/end_to_end/schema.sql");
/// Fills them; `FROM_ID` is where keys begin.
pub const ROWS: &str = include_str!("../scenarios/end_to_end/rows.sql");
/// Changes what [`ROWS`] put there.
pub const CHANGES: &str = include_str!("../scenarios/end_to_end/changes.sql");
/// Where all tables are, with those of a [`Pair`].
pub const SCHEMAS: [&str; 3] = ["public", "Odd.Schema", "farshore_marks"];
/// The patterns that publish them.
pub const TABLES: [&str; 2] = ["public.*", "\"Odd.Schema\".*"];

/// A script with its keys from `id` on.
pub fn from_id(script: &str, id: u32) -> String {
    script.replace("FROM_ID", &id.to_string())
}

/// Runs a script on the publisher statement by statement, so that each is a transaction of its own
/// where it does not say BEGIN.
///
/// # Errors
/// The server's message, with the statement.
pub fn run_each(pair: &Pair, script: &str) -> Result<()> {
    let mut client = pair.publisher.connect()?;
    let code: String = script
        .lines()
        .filter(|line| !line.trim_start().starts_with("--"))
        .map(|line| format!("{line}\n"))
        .collect();
    for statement in code.split(";\n") {
        client.batch_execute(statement).map_err(|error| {
            anyhow::anyhow!(
                "{}\n{statement}",
                error.as_db_error().map_or(error.to_string(), ToString::to_string)
            )
        })?;
    }
    Ok(())
}
