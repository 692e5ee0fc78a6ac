use crate::{load, runtime};
use farshore_node::schema::{Statement, SubscriptionSchema, outline_site};
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
    for schema in &all {
        if !json {
            print_sql(schema);
            continue;
        }
        match serde_json::to_string(schema) {
            Ok(text) => println!("{text}"),
            Err(error) => eprintln!("farshore: {error}"),
        }
    }
    ExitCode::SUCCESS
}

fn print_sql(schema: &SubscriptionSchema) {
    let SubscriptionSchema { subscription, before, after, left_out } = schema;
    if before.is_empty() && after.is_empty() {
        println!("-- subscription {subscription}: the target lacks nothing");
    }
    for (when, statements) in [("before", before), ("after", after)] {
        if !statements.is_empty() {
            println!("-- subscription {subscription}, {when} the copy");
        }
        for Statement { sql, .. } in statements {
            println!("{sql};");
        }
    }
    for what in left_out {
        println!("-- left out: {what}");
    }
}
