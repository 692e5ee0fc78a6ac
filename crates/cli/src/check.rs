use crate::{load, output, runtime};
use farshore_node::check::{Severity, check_site};
use std::fmt::Write as _;
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
    let mut out = String::new();
    for finding in &findings {
        if json {
            match serde_json::to_string(finding) {
                Ok(text) => out.extend([text.as_str(), "\n"]),
                Err(error) => eprintln!("farshore: {error}"),
            }
            continue;
        }
        let word = match finding.severity {
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Error => "ERROR",
        };
        let _ = writeln!(out, "{word:8} {}: {}", finding.object, finding.what);
        if let Some(remedy) = &finding.remedy {
            let _ = writeln!(out, "         → {remedy}");
        }
    }
    if !json {
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        let (more, many) = (plural(errors), plural(warnings));
        let _ = writeln!(out, "{errors} error{more}, {warnings} warning{many}");
    }
    let printed = output::print(&out);
    printed.or_failure(if errors > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
