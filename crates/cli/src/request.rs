//! Requests to the node that runs, or done here when none does.

use crate::{load, output, runtime};
use farshore_node::control::{Asked, Request, WHO_MAY_ASK, ask, cannot_ask};
use farshore_node::operate::without_node;
use std::io::{ErrorKind, Write as _};
use std::path::Path;
use std::process::ExitCode;

/// Sends a request and prints the answer: a listing on standard output, and the outcome on standard
/// output too, or on standard error when there may be a listing.
pub fn request(site: &Path, request: &Request) -> ExitCode {
    let config = match load(site) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("cannot start: {error}")),
    };
    let mut out = std::io::BufWriter::new(std::io::stdout());
    let mut unprinted: Option<std::io::Error> = None;
    let outcome = runtime.block_on(async {
        let mut print = |line: &str| {
            let mut printed = writeln!(out, "{line}");
            if !matches!(request, Request::Browse(_)) {
                // Progress, to be seen as it comes.
                printed = printed.and_then(|()| out.flush());
            }
            if let Err(error) = &printed {
                // What is asked for ends with this.
                unprinted = Some(std::io::Error::new(error.kind(), error.to_string()));
            }
            printed
        };
        match ask(&config.data_dir, request, &mut print).await {
            Ok(Asked::Done(text)) => Ok(text),
            Ok(Asked::Refused(why)) => Err(why),
            Ok(Asked::NotRunning) => without_node(&config, request, &mut print).await,
            Err(error) => Err(cannot_ask(&config.data_dir, &error, WHO_MAY_ASK)),
        }
    });
    match (unprinted, out.flush()) {
        // Whoever reads our output has seen enough.
        (Some(error), _) if error.kind() == ErrorKind::BrokenPipe => return ExitCode::SUCCESS,
        (None, Err(error)) if error.kind() == ErrorKind::BrokenPipe => {}
        (None, Ok(())) => {}
        (Some(error), _) | (None, Err(error)) => return fail(&format!("cannot print: {error}")),
    }
    match outcome {
        Ok(text)
            if matches!(request, Request::Browse(_) | Request::Validate { json: true, .. }) =>
        {
            eprintln!("{text}");
            ExitCode::SUCCESS
        }
        Ok(text) => output::print(&format!("{text}\n")).or_failure(ExitCode::SUCCESS),
        Err(why) => fail(&why),
    }
}

pub fn fail(why: &str) -> ExitCode {
    eprintln!("farshore: {why}");
    ExitCode::FAILURE
}
