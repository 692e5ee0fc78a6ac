//! The guide's GRANT statements.

use anyhow::{Context, Result};
use farshore_testkit::process::workspace_root;

/// Schemas that the pairs here publish.
const SCHEMAS: [&str; 2] = ["public", "farshore_marks"];

/// The SQL block of the guide that begins with this comment, in our database, and what it says of
/// schema `public` once for each of ours.
pub fn sql(title: &str) -> Result<String> {
    let guide = std::fs::read_to_string(workspace_root().join("docs/guide.md"))?;
    let start = guide.find(&format!("```sql\n-- {title}\n"));
    let block = &guide[start.with_context(|| format!("no SQL \"{title}\" in the guide"))? + 7..];
    let end = block.find("```").context("the block does not end")?;
    let block = block[..end].replace("DATABASE sales", "DATABASE postgres");
    let mut sql = String::new();
    for line in block.lines() {
        let schemas = if line.contains("SCHEMA public") { &SCHEMAS[..] } else { &SCHEMAS[..1] };
        for schema in schemas {
            sql.push_str(&line.replace("SCHEMA public", &format!("SCHEMA {schema}")));
            sql.push('\n');
        }
    }
    Ok(sql)
}
