use crate::output;
use std::process::ExitCode;

/// One crash point per line; test builds only.
pub fn fault_points() -> ExitCode {
    if !cfg!(feature = "faults") {
        eprintln!("farshore: this build has no crash points");
        return ExitCode::FAILURE;
    }
    let points = farshore_node::fault::POINTS.iter().map(|point| format!("{point}\n"));
    output::print(&points.collect::<String>()).or_failure(ExitCode::SUCCESS)
}
