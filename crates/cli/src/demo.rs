use clap::Args;
use std::process::ExitCode;

/// Arguments of `farshore demo`.
#[derive(Args)]
pub struct DemoArguments {}

/// Filled in by the demo's own slice.
pub fn demo(_arguments: &DemoArguments) -> ExitCode {
    ExitCode::FAILURE
}
