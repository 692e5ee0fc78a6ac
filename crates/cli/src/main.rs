//! The command line of Farshore: one module per verb.

mod check;
mod commission;
mod demo;
mod fault_points;
mod mirror;
mod output;
mod request;
mod run;
mod schema;
mod site_cert;
mod sparkline;
mod status;
mod tracer;

use clap::{ArgGroup, CommandFactory, Parser, Subcommand};
use farshore_node::control::{BrowseRequest, Request};
use farshore_node::nearest;
use farshore_node::operate::{typed_bound, typed_lsn, typed_table};
use std::path::PathBuf;
use std::process::ExitCode;

/// Carries PostgreSQL databases to far sites.
#[derive(Parser)]
#[command(
    name = "farshore",
    version,
    propagate_version = true,
    arg_required_else_help = true,
    after_help = AFTER_HELP
)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

const AFTER_HELP: &str = "\
Start with:
  farshore check site.toml     what will not work, with the SQL that mends it
  farshore run site.toml       copy, then stream
  farshore status site.toml    how far it is

Exit status: 0 well; 1 something is wrong, and was said; 2 wrong arguments or site file;
3 (status) the node does not run; 4 (status) a warning; 130 (commission, demo) interrupted.";

#[derive(Subcommand)]
enum Verb {
    /// Run what a site file names, until SIGTERM or Ctrl-C
    ///
    /// Ends with 0 after a stop in good order, with 1 when it cannot start, and with 2 when the site
    /// file cannot be used. FARSHORE_LOG sets what is logged (error, warn, info, debug).
    Run {
        /// Site file
        site: PathBuf,
    },
    /// Look for what will not work, before anything starts; changes nothing
    ///
    /// Looks at the site file, its disk, the publishers and the targets. Each finding has a severity
    /// (error: will not work, warning: works with a drawback, note) and a remedy. Ends with 0 when
    /// there is no error, with 1 when there is one, and with 2 when the site file cannot be used.
    Check {
        /// Site file
        site: PathBuf,
        /// Findings as JSON, one object per line: severity, object, what, remedy
        #[arg(long)]
        json: bool,
    },
    /// Show what a running site is doing
    ///
    /// Ends with 0 when all is well, with 1 when an agent has an error or something is critical, with
    /// 2 when the site file cannot be used, with 3 when the node does not run, and with 4 when
    /// something is worth a warning, such as a subscription that is paused.
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
    /// Print the SQL that would create what the targets lack; runs nothing
    ///
    /// First what is run before the copy, then what follows it. Ends with 1 when a server cannot be
    /// asked, and with 2 when the site file cannot be used.
    Schema {
        /// Site file
        site: PathBuf,
        /// Only this subscription
        #[arg(long)]
        subscription: Option<String>,
        /// As JSON, one object per subscription and line: subscription, before, after, left_out,
        /// unknown
        #[arg(long)]
        json: bool,
    },
    /// Halt a subscription until it is resumed; its changes are kept for it
    Pause {
        /// Site file
        site: PathBuf,
        /// Which
        #[arg(long)]
        subscription: String,
    },
    /// Let a paused or stopped agent go on
    #[command(group = ArgGroup::new("agent").required(true).args(["subscription", "publication"]))]
    Resume {
        /// Site file
        site: PathBuf,
        /// Which subscription
        #[arg(long)]
        subscription: Option<String>,
        /// Or which publication's capture
        #[arg(long)]
        publication: Option<String>,
    },
    /// Leave one transaction of the publisher out of a subscription
    Skip {
        /// Site file
        site: PathBuf,
        /// Which subscription
        #[arg(long)]
        subscription: String,
        /// End of the transaction's commit record, as messages and browse show it
        #[arg(long, value_parser = typed_lsn)]
        lsn: String,
    },
    /// Empty one table of a subscription on its target, or all, and copy anew
    Resync {
        /// Site file
        site: PathBuf,
        /// Which subscription
        #[arg(long)]
        subscription: String,
        /// schema.table; without it, all
        #[arg(long, value_parser = typed_table)]
        table: Option<String>,
    },
    /// Compare a subscription's tables with the publisher's, while both are at work
    ///
    /// Both sides are read as of the same transaction, for which the subscription rests a moment;
    /// each hashes its own rows. Ends with 0 when all tables are equal, with 1 when some differ or
    /// could not be compared, and with 2 when the site file cannot be used.
    Validate {
        /// Site file
        site: PathBuf,
        /// Which subscription
        #[arg(long)]
        subscription: String,
        /// schema.table on the publisher; may be given several times; without it, all
        #[arg(long, value_parser = typed_table)]
        table: Vec<String>,
        /// As JSON, one object per table and line
        #[arg(long)]
        json: bool,
    },
    /// Say that a subscription's target was restored from a backup of the publisher
    ///
    /// For subscriptions with initialise = "backup". A physical backup that was promoted tells by
    /// itself where it stands, if the role may read its timeline's history (pg_read_file).
    Initialise {
        /// Site file
        site: PathBuf,
        /// Which subscription
        #[arg(long)]
        subscription: String,
        /// Where the backup stands: of a dump, the consistent point of its snapshot
        #[arg(long, conflicts_with = "copied_from", value_parser = typed_lsn)]
        lsn: Option<String>,
        /// It is a copy (physical, or a dump with the schema farshore) of this subscription's
        /// target, which tells where it stands
        #[arg(long, value_name = "SUBSCRIPTION")]
        copied_from: Option<String>,
    },
    /// Post a tracer token of a publication and tell how long each leg took
    ///
    /// The token is a transaction without changes: it goes through log, store, link and apply. Ends
    /// with 0 when it has arrived everywhere, with 1 when not in time or when it was refused, with 2
    /// when the site file cannot be used, and with 3 when the node does not run.
    Tracer {
        /// Site file
        site: PathBuf,
        /// Publication of this site
        publication: String,
        /// Seconds that it is waited for
        #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=600))]
        wait: u64,
        /// As JSON: milliseconds since COMMIT was sent
        #[arg(long)]
        json: bool,
    },
    /// List the stored changes of a publication
    Browse {
        /// Site file
        site: PathBuf,
        /// Which publication
        #[arg(long)]
        publication: String,
        /// From this transaction on: end of its commit record, or commit time in UTC
        #[arg(long, value_parser = typed_bound)]
        from: Option<String>,
        /// Up to this transaction, itself included
        #[arg(long, value_parser = typed_bound)]
        to: Option<String>,
        /// Changes of this table alone: schema.table
        #[arg(long, value_parser = typed_table)]
        table: Option<String>,
        /// Changes at most; 0 for all
        #[arg(long, default_value_t = 1000)]
        limit: u64,
        /// One JSON object per line
        #[arg(long)]
        json: bool,
        /// Instead of changes, the target transactions that this subscription would make of them
        #[arg(long, value_name = "SUBSCRIPTION", conflicts_with = "table")]
        schedule: Option<String>,
    },
    /// Work on a mirror
    Mirror {
        #[command(subcommand)]
        action: mirror::MirrorAction,
    },
    /// Make certificates that sites know each other by
    SiteCert {
        #[command(subcommand)]
        action: SiteCertAction,
    },
    /// Measure what a disk and a transaction log can take, before depending on them
    Commission {
        #[command(subcommand)]
        action: commission::CommissionAction,
    },
    /// Replicate between two throwaway servers under load, and compare them
    Demo(demo::DemoArguments),
    /// List the crash points of a fault-injection build
    #[command(hide = true)]
    FaultPoints,
}

#[derive(Subcommand)]
enum SiteCertAction {
    /// Make a certificate and key for each site, and a private authority if there is none yet
    Issue {
        /// Folder of the authority; certificates and keys go there too
        #[arg(long)]
        dir: PathBuf,
        /// Days that they are valid
        #[arg(long, default_value_t = 825)]
        days: u32,
        /// Site names, as under [site] name
        #[arg(required = true)]
        sites: Vec<String>,
    },
    /// Take sites' certificates back: all that were issued for them until now
    Revoke {
        /// Folder of the authority; revoked.crl is written there
        #[arg(long)]
        dir: PathBuf,
        /// Site names
        #[arg(required = true)]
        sites: Vec<String>,
    },
}

fn main() -> ExitCode {
    if let Err(error) = farshore_node::fault::check() {
        eprintln!("farshore: {error}");
        return ExitCode::from(EXIT_CONFIG);
    }
    let arguments = Arguments::try_parse().unwrap_or_else(|error| suggest_verb(error).exit());
    match arguments.verb {
        Verb::Run { site } => run::run(&site),
        Verb::Check { site, json } => check::check(&site, json),
        Verb::Status { site, watch, json } => status::status(&site, watch, json),
        Verb::Schema { site, subscription, json } => {
            schema::schema(&site, subscription.as_deref(), json)
        }
        Verb::Pause { site, subscription } => {
            request::request(&site, &Request::Pause { subscription })
        }
        Verb::Resume { site, subscription, publication } => {
            request::request(&site, &Request::Resume { subscription, publication })
        }
        Verb::Skip { site, subscription, lsn } => {
            request::request(&site, &Request::Skip { subscription, lsn })
        }
        Verb::Resync { site, subscription, table } => {
            request::request(&site, &Request::Resync { subscription, table })
        }
        Verb::Validate { site, subscription, table: tables, json } => {
            request::request(&site, &Request::Validate { subscription, tables, json })
        }
        Verb::Initialise { site, subscription, lsn, copied_from } => {
            request::request(&site, &Request::Initialise { subscription, lsn, copied_from })
        }
        Verb::Browse { site, publication, from, to, table, limit, json, schedule } => {
            let wanted = BrowseRequest { publication, from, to, table, limit, json, schedule };
            request::request(&site, &Request::Browse(wanted))
        }
        Verb::Tracer { site, publication, wait, json } => {
            tracer::tracer(&site, &publication, wait, json)
        }
        Verb::Mirror { action } => mirror::mirror(action),
        Verb::SiteCert { action } => site_cert::site_cert(&action),
        Verb::Commission { action } => commission::commission(action),
        Verb::Demo(arguments) => demo::demo(&arguments),
        Verb::FaultPoints => fault_points::fault_points(),
    }
}

/// Names the verb that was probably meant: clap sees fewer, and sometimes several.
fn suggest_verb(mut error: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    let Some(ContextValue::String(typed)) = error.get(ContextKind::InvalidSubcommand) else {
        return error;
    };
    let command = Arguments::command();
    let verbs = command.get_subcommands().filter(|verb| !verb.is_hide_set());
    if let Some(near) = nearest(typed, verbs.map(clap::Command::get_name)) {
        let near = ContextValue::Strings(vec![near.to_owned()]);
        error.insert(ContextKind::SuggestedSubcommand, near);
    }
    error
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
