//! Follows the node's own status, over a kill: what a run had counted is kept when the next run
//! begins to count from nothing.

use farshore_node::control;
use farshore_node::report::{PublicationReport, SiteReport, SubscriptionReport};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two questions.
const ASK_EVERY: Duration = Duration::from_millis(50);

/// Counts over all runs of the node.
#[derive(Clone, Copy, Default)]
pub struct Totals {
    /// Source transactions that the subscription applied from the stream.
    pub transactions: u64,
    /// Row changes of those.
    pub changes: u64,
    /// Target transactions.
    pub target_commits: u64,
    /// Bytes of replication messages from the publisher.
    pub wire_bytes: u64,
    /// Payload bytes appended to the store.
    pub payload_bytes: u64,
    /// Bytes those took on disk.
    pub stored_bytes: u64,
}

/// What the initial copy came to.
#[derive(Clone, Default)]
pub struct Copied {
    /// Rows copied, of all tables.
    pub rows: u64,
    /// Bytes copied.
    pub bytes: u64,
    /// Tables copied.
    pub tables: usize,
    /// When the node first said that it copies.
    pub began: Option<Instant>,
    /// When it first said that it no longer does.
    pub ended: Option<Instant>,
}

/// Everything known.
#[derive(Clone, Default)]
pub struct Known {
    /// The newest report, if the node answered lately.
    pub report: Option<SiteReport>,
    /// When the subscription first said that it streams.
    pub streaming: Option<Instant>,
    /// The initial copy.
    pub copied: Copied,
    /// When the node gave its newest answer.
    pub asked: Option<Instant>,
    /// Of runs before the current one.
    earlier: Totals,
    current: Totals,
    pid: u32,
}

/// Asks the node again and again. Dropping it stops that.
pub struct Watch {
    known: Arc<Mutex<Known>>,
    stop: Arc<AtomicBool>,
    asker: Option<JoinHandle<()>>,
}

impl Watch {
    /// Begins to ask the node that runs, or will run, on `data_dir`.
    pub fn start(data_dir: PathBuf) -> std::io::Result<Watch> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let known = Arc::<Mutex<Known>>::default();
        let stop = Arc::<AtomicBool>::default();
        let (notes, stopped) = (known.clone(), stop.clone());
        let asker = std::thread::spawn(move || {
            // Relaxed: the flag guards no other memory.
            while !stopped.load(Ordering::Relaxed) {
                // A node that was just killed or is starting does not answer: ask again.
                let report = runtime.block_on(control::status(&data_dir)).ok().flatten();
                notes.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).note(report);
                std::thread::park_timeout(ASK_EVERY);
            }
        });
        Ok(Watch { known, stop, asker: Some(asker) })
    }

    /// What is known now.
    pub fn known(&self) -> Known {
        self.known.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(asker) = self.asker.take() {
            // An asker that panicked has said so.
            let _ = asker.join();
        }
    }
}

impl Known {
    fn note(&mut self, report: Option<SiteReport>) {
        if let Some(report) = &report {
            self.note_report(report);
        }
        self.report = report;
    }

    fn note_report(&mut self, report: &SiteReport) {
        self.asked = Some(Instant::now());
        if report.pid != self.pid {
            self.pid = report.pid;
            self.earlier = self.totals();
            self.current = Totals::default();
        }
        if let Some(p) = report.publications.first() {
            self.current.wire_bytes = self.current.wire_bytes.max(p.wire_bytes);
            self.current.payload_bytes = p.payload_bytes;
            self.current.stored_bytes = p.stored_bytes;
        }
        let Some(s) = report.subscriptions.first() else { return };
        self.current.transactions = s.transactions;
        self.current.changes = self.current.changes.max(s.changes);
        self.current.target_commits = s.target_commits;
        let now = Instant::now();
        if s.state == "copying" {
            self.copied.began.get_or_insert(now);
        }
        let rows: u64 = s.copies.iter().map(|copy| copy.rows).sum();
        if rows >= self.copied.rows && !s.copies.is_empty() {
            self.copied.rows = rows;
            self.copied.bytes = s.copies.iter().map(|copy| copy.bytes).sum();
            self.copied.tables = s.copies.len();
        }
        if matches!(s.state.as_str(), "catching-up" | "streaming") {
            self.copied.ended.get_or_insert(now);
        }
        if s.state == "streaming" {
            self.streaming.get_or_insert(now);
        }
    }

    /// Counts over all runs.
    pub fn totals(&self) -> Totals {
        let (a, b) = (&self.earlier, &self.current);
        Totals {
            transactions: a.transactions + b.transactions,
            changes: a.changes + b.changes,
            target_commits: a.target_commits + b.target_commits,
            wire_bytes: a.wire_bytes + b.wire_bytes,
            payload_bytes: a.payload_bytes + b.payload_bytes,
            stored_bytes: a.stored_bytes + b.stored_bytes,
        }
    }

    /// The publication, as last reported.
    pub fn publication(&self) -> Option<&PublicationReport> {
        self.report.as_ref()?.publications.first()
    }

    /// The subscription, as last reported.
    pub fn subscription(&self) -> Option<&SubscriptionReport> {
        self.report.as_ref()?.subscriptions.first()
    }

    /// Why an agent has stopped for good, if one has.
    pub fn stopped(&self) -> Option<String> {
        let publication = self.publication().map(|p| (&p.state, &p.error));
        let subscription = self.subscription().map(|s| (&s.state, &s.error));
        let (_, error) =
            publication.into_iter().chain(subscription).find(|(state, _)| *state == "stopped")?;
        Some(error.clone().unwrap_or_else(|| "no reason given".to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(pid: u32, state: &str, transactions: u64, wire_bytes: u64) -> SiteReport {
        SiteReport {
            pid,
            publications: vec![PublicationReport { wire_bytes, ..Default::default() }],
            subscriptions: vec![SubscriptionReport {
                state: state.to_owned(),
                transactions,
                error: (state == "stopped").then(|| "because".to_owned()),
                ..Default::default()
            }],
            ..Default::default()
        }
    }

    #[test]
    fn counts_go_on_over_a_kill_and_a_stop_is_noticed() {
        let mut known = Known::default();
        known.note(None);
        known.note(Some(report(7, "copying", 0, 10)));
        assert!(known.copied.began.is_some() && known.copied.ended.is_none());
        known.note(Some(report(7, "streaming", 100, 50)));
        known.note(None);
        known.note(Some(report(8, "streaming", 5, 20)));
        known.note(Some(report(8, "streaming", 9, 30)));
        assert_eq!((known.totals().transactions, known.totals().wire_bytes), (109, 80));
        assert!(known.streaming.is_some());
        assert_eq!(known.stopped(), None);
        known.note(Some(report(8, "stopped", 9, 30)));
        assert_eq!(known.stopped().as_deref(), Some("because"));
    }
}
