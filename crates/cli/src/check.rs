use crate::{load, runtime};
use farshore_node::check::{Severity, check_site};
use std::path::Path;
use std::process::ExitCode;

/// Prints findings, as JSON one object per line; fails if one of them is an error.
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
    let count = |severity| findings.iter().filter(|f| f.severity == severity).count();
    let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
    for finding in &findings {
        if json {
            match serde_json::to_string(finding) {
                Ok(text) => println!("{text}"),
                Err(error) => eprintln!("farshore: {error}"),
            }
            continue;
        }
        let word = match finding.severity {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "ERROR",
        };
        println!("{word:8} {}: {}", finding.object, finding.what);
        if let Some(remedy) = &finding.remedy {
            println!("         → {remedy}");
        }
    }
    if !json {
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        println!("{errors} error{}, {warnings} warning{}", plural(errors), plural(warnings));
    }
    if errors > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
