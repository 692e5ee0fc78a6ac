use crate::{load, runtime};
use farshore_node::check::{Severity, check_site};
use std::path::Path;
use std::process::ExitCode;

/// Prints findings; fails if one of them is an error.
pub fn check(site: &Path, json: bool) -> ExitCode {
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
    let findings = runtime.block_on(check_site(&config));
    if json {
        match serde_json::to_string_pretty(&findings) {
            Ok(text) => println!("{text}"),
            Err(error) => eprintln!("farshore: {error}"),
        }
    } else {
        for finding in &findings {
            let word = match finding.severity {
                Severity::Ok => "ok",
                Severity::Warning => "warning",
                Severity::Error => "ERROR",
            };
            println!("{word:8} {}: {}", finding.object, finding.what);
            if let Some(remedy) = &finding.remedy {
                println!("         → {remedy}");
            }
        }
    }
    if findings.iter().any(|finding| finding.severity == Severity::Error) {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}
