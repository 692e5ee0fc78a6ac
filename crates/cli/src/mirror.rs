//! Verbs on one mirror.

use crate::request::{fail, request};
use crate::{load, output, runtime};
use clap::Subcommand;
use farshore_node::SeedProgress;
use farshore_node::control::Request;
use farshore_node::seed::{SeedOptions, seed};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// How often it is said how far a seeding is.
const SAY_EVERY: Duration = Duration::from_secs(2);

#[derive(Subcommand)]
pub enum MirrorAction {
    /// Make the data directory of a new standby, from the principal's files over the link
    ///
    /// Run it as root on a directory that the user owns whom the standby runs as, or as that user if
    /// it may read the site file and the node's folder. The node here must run: it keeps the log
    /// that the standby needs. Every file is checked against the principal's backup manifest. What
    /// was interrupted is run again, and only what differs is sent again; no server starts on a
    /// directory that is not complete.
    Seed {
        /// Site file
        site: PathBuf,
        /// Which mirror
        mirror: String,
        /// The data directory to be: empty, or of a run that was interrupted; others with --overwrite
        #[arg(long, value_name = "DIR")]
        pgdata: PathBuf,
        /// The standby's slot in the spool [default: standby_MIRROR]
        #[arg(long)]
        slot: Option<String>,
        /// Read at most so many kilobytes per second from the principal
        #[arg(long, value_name = "KB", value_parser = clap::value_parser!(u32).range(32..=1_048_576))]
        max_rate: Option<u32>,
        /// Write over a data directory of the same cluster, an old principal's for instance
        #[arg(long)]
        overwrite: bool,
        /// Put a tablespace elsewhere: its directory on the principal, and the one here
        #[arg(long, value_name = "OLD=NEW", value_parser = tablespace)]
        tablespace: Vec<(PathBuf, PathBuf)>,
    },
    /// Let a mirror go on that was dropped for being too far behind, or whose far end has stopped
    ///
    /// At the site of the near end where the mirror was dropped; at the site of the far end where that
    /// was refused, as `farshore status` there says, and shall ask again at once.
    Resume {
        /// Site file
        site: PathBuf,
        /// Which mirror
        mirror: String,
    },
    /// Drop the slot of a standby, or of a seeding, that was given up: the spool keeps log for it
    ///
    /// At the site of the far end. `farshore status` lists the slots and what they keep. One that a
    /// standby streams by is not dropped.
    DropSlot {
        /// Site file
        site: PathBuf,
        /// Which mirror
        mirror: String,
        /// Which slot
        slot: String,
    },
    /// Make the mirror's standby a server of its own, once it has all that the spool holds
    ///
    /// Takes in no more log from then on, waits until the standby has every record that is durable
    /// in the spool, promotes it, and looks where its timeline begins. A standby that lacks
    /// something is not promoted, nor one that cannot replay what it has. Stop the old principal
    /// first if it still runs.
    Promote {
        /// Site file
        site: PathBuf,
        /// Which mirror
        mirror: String,
        /// The standby, as postgres://…; by default what standby = "…" of the mirror says
        #[arg(long)]
        standby: Option<String>,
        /// Promote it also without what it lacks, and say how much that is
        ///
        /// Also where the spool's disk takes no note of it, and where nobody can tell why the
        /// standby's replay is paused.
        #[arg(long)]
        allow_data_loss: bool,
        /// The standby that was to be promoted before, as the error names it, and never will be
        ///
        /// All checks are made as ever. Make sure that it never becomes a primary: two would be.
        #[arg(long, value_name = "SERVER")]
        instead_of: Option<String>,
        /// Give up after so many seconds in which nothing more came to the standby
        #[arg(long, value_name = "SECONDS", default_value_t = 30)]
        wait: u64,
    },
}

fn tablespace(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let (old, new) = text.split_once('=').ok_or("expected OLD=NEW")?;
    Ok((old.into(), new.into()))
}

/// Does it.
pub fn mirror(action: MirrorAction) -> ExitCode {
    match action {
        MirrorAction::Seed {
            site,
            mirror,
            pgdata,
            slot,
            max_rate,
            overwrite,
            tablespace: tablespaces,
        } => {
            let pgdata = std::path::absolute(&pgdata).unwrap_or(pgdata);
            let max_rate_kb = max_rate;
            let options = SeedOptions { mirror, pgdata, slot, max_rate_kb, overwrite, tablespaces };
            seeding(&site, &options)
        }
        MirrorAction::Resume { site, mirror } => request(&site, &Request::ResumeMirror { mirror }),
        MirrorAction::DropSlot { site, mirror, slot } => {
            request(&site, &Request::DropSlot { mirror, slot })
        }
        MirrorAction::Promote { site, mirror, standby, allow_data_loss, instead_of, wait } => {
            let wait_seconds = wait;
            let wanted =
                Request::Promote { mirror, standby, allow_data_loss, instead_of, wait_seconds };
            request(&site, &wanted)
        }
    }
}

fn seeding(site: &Path, options: &SeedOptions) -> ExitCode {
    let config = match load(site) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&format!("cannot start: {error}")),
    };
    let (progress, told) = watch::channel(SeedProgress::default());
    let outcome = runtime.block_on(async {
        let mut work = std::pin::pin!(seed(&config, options, &progress));
        let begun = Instant::now();
        let mut every = tokio::time::interval(SAY_EVERY);
        loop {
            tokio::select! {
                outcome = &mut work => return outcome,
                _ = every.tick() => {
                    let now = *told.borrow();
                    if now.total > 0 {
                        eprintln!("{}", line(&now, begun.elapsed()));
                    }
                }
            }
        }
    });
    match outcome {
        Ok(text) => output::print(&format!("{text}\n")).or_failure(ExitCode::SUCCESS),
        Err(why) => fail(&why),
    }
}

fn line(progress: &SeedProgress, elapsed: Duration) -> String {
    let megabytes = |bytes: u64| bytes as f64 / 1e6;
    // The total is the server's estimate, of a cluster that changes meanwhile.
    let percent = (100 * progress.done / progress.total.max(1)).min(100);
    let rate = progress.done as f64 / elapsed.as_secs_f64().max(0.001);
    let left = progress.total.saturating_sub(progress.done) as f64 / rate.max(1.0);
    format!(
        "{percent:3} % {:.1} of {:.1} MB, {:.1} MB on the link, {:.1} MB/s, {left:.0} s left",
        megabytes(progress.done),
        megabytes(progress.total),
        megabytes(progress.packed),
        rate / 1e6
    )
}
