//! The command line of Farshore: one module per verb.

mod check;
mod demo;
mod fault_points;
mod run;
mod status;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Carries PostgreSQL databases to far sites.
#[derive(Parser)]
#[command(name = "farshore", version, about, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run what a site file names, until SIGTERM or Ctrl-C
    Run {
        /// Site file
        site: PathBuf,
    },
    /// Look for what will not work, before anything starts; changes nothing
    Check {
        /// Site file
        site: PathBuf,
        /// Findings as JSON
        #[arg(long)]
        json: bool,
    },
    /// Show what a running site is doing
    Status {
        /// Site file
        site: PathBuf,
        /// Show again every second
        #[arg(long)]
        watch: bool,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Replicate between two throwaway servers under load, and compare them
    Demo(demo::DemoArguments),
    /// List the crash points of a fault-injection build
    #[command(hide = true)]
    FaultPoints,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match arguments.verb {
        Verb::Run { site } => run::run(&site),
        Verb::Check { site, json } => check::check(&site, json),
        Verb::Status { site, watch, json } => status::status(&site, watch, json),
        Verb::Demo(arguments) => demo::demo(&arguments),
        Verb::FaultPoints => fault_points::fault_points(),
    }
}

/// Exit status for a site file that cannot be used.
const EXIT_CONFIG: u8 = 2;

/// Reads a site file, or says why not.
fn load(site: &std::path::Path) -> Result<farshore_node::config::SiteConfig, ExitCode> {
    farshore_node::config::load(site).map_err(|error| {
        eprintln!("farshore: {error}");
        ExitCode::from(EXIT_CONFIG)
    })
}

/// A runtime for verbs that talk to servers.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
}
