use crate::{load, output, runtime};
use farshore_node::schema::{Statement, SubscriptionSchema, outline_site};
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

/// Prints the SQL that would be run on the targets; as JSON one object per subscription and line.
pub fn schema(site: &Path, subscription: Option<&str>, json: bool) -> ExitCode {
    let config = match load(site) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("farshore: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let all = match runtime.block_on(outline_site(&config, subscription)) {
        Ok(all) => all,
        Err(error) => {
            eprintln!("farshore: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut out = String::new();
    for schema in &all {
        if !json {
            write_sql(&mut out, schema);
            continue;
        }
        match serde_json::to_string(schema) {
            Ok(text) => out.extend([text.as_str(), "\n"]),
            Err(error) => eprintln!("farshore: {error}"),
        }
    }
    output::print(&out).or_failure(ExitCode::SUCCESS)
}

fn write_sql(out: &mut String, schema: &SubscriptionSchema) {
    let SubscriptionSchema { subscription, before, after, left_out, unknown } = schema;
    if let Some(why) = unknown {
        let _ = writeln!(out, "-- subscription {subscription}: {why}");
        return;
    }
    if before.is_empty() && after.is_empty() {
        let _ = writeln!(out, "-- subscription {subscription}: the target lacks nothing");
    }
    for (when, statements) in [("before", before), ("after", after)] {
        if !statements.is_empty() {
            let _ = writeln!(out, "-- subscription {subscription}, {when} the copy");
        }
        for Statement { sql, .. } in statements {
            let _ = writeln!(out, "{sql};");
        }
    }
    for what in left_out {
        let _ = writeln!(out, "-- left out: {what}");
    }
}
