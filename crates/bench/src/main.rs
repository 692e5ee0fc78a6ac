//! `farshore-bench`: Farshore beside PostgreSQL's own replication, on the same pair of servers, in
//! the same run, taking turns.
//!
//! Standard output carries one JSON object per measured case and nothing else; what is going on
//! goes to standard error. Every run ends by proving both sides equal.

mod arguments;
mod backlog;
mod case;
mod contest;
mod drain;
mod fanout;
mod latency;
mod line;
mod load;
mod measurement;
mod memory;
mod mirror;
mod mirrored;
mod monitored;
mod page;
mod penalty;
mod progress;
mod scaling;
mod seed;
mod servers;
mod study;
mod text;
mod wan;

use anyhow::{Context, Result};
use arguments::{Arguments, Plan};
use case::Case;
use clap::Parser;
use contest::Bench;
use farshore_testkit::interrupt::{Interrupt, Interrupted};
use farshore_testkit::wan::gain_rights;
use measurement::Measurement;
use progress::say;
use servers::Servers;
use std::io::Write;
use std::process::ExitCode;

/// Exit status for arguments that name nothing that exists, as clap's own.
const EXIT_USAGE: u8 = 2;
/// Exit status after Ctrl-C or SIGTERM, as a shell reports SIGINT.
const EXIT_INTERRUPTED: u8 = 130;

fn main() -> ExitCode {
    let plan = match Arguments::parse().resolve() {
        Ok(plan) => plan,
        Err(error) => {
            eprintln!("farshore-bench: {error:#}");
            return ExitCode::from(EXIT_USAGE);
        }
    };
    match run(&plan) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) if error.is::<Interrupted>() => {
            eprintln!("farshore-bench: interrupted; everything it started is gone");
            ExitCode::from(EXIT_INTERRUPTED)
        }
        Err(error) => {
            eprintln!("farshore-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs every planned case; `false` when one of them failed.
fn run(plan: &Plan) -> Result<bool> {
    if plan.cases.iter().any(|case| {
        matches!(case, Case::Wan(_) | Case::Mirror(_) | Case::Penalty(_) | Case::Seed(_))
    }) {
        // Only a process that has a single thread yet can have them. Where they cannot be had,
        // the cases that need them say so.
        let _ = gain_rights();
    }
    let interrupt = Interrupt::install()?;
    let mut measured = Vec::new();
    let mut report = |mut measurement: Measurement| -> Result<()> {
        wan::compare_ways(&mut measurement, &measured);
        let line = serde_json::to_string(&measurement).context("write a measurement as JSON")?;
        let mut out = std::io::stdout().lock();
        say(&measurement.summary());
        writeln!(out, "{line}").and_then(|()| out.flush()).context("write to standard output")?;
        measured.push(measurement);
        Ok(())
    };
    let binary = contest::binary()?;
    say("touching memory, so that no contender is the first to");
    memory::warm();
    say("starting publisher and subscriber");
    let servers = Servers::start()?;
    let bench = Bench { plan, servers: &servers, binary: &binary, interrupt: &interrupt };
    let mut failed = Vec::new();
    for case in &plan.cases {
        let name = format!("{}/{}", case.scenario(), case.name());
        match case.measure(bench) {
            Ok(lines) => lines.into_iter().try_for_each(&mut report)?,
            Err(error) if error.is::<Interrupted>() => return Err(error),
            Err(error) => {
                say(&format!("{name} failed: {error:#}"));
                failed.push((name, format!("{error:#}")));
            }
        }
    }
    if let Some(folder) = &plan.report_folder {
        page::write(folder, &measured, &failed)?;
        say(&format!("report: {}", folder.join("bench.html").display()));
    }
    for (case, error) in &failed {
        eprintln!("farshore-bench: {case} FAILED: {error}");
    }
    Ok(failed.is_empty())
}
