//! The site's state once a second, whoever asks, and rates from one look to the next.

use crate::history::{Ended, Recorder};
use crate::report::SiteReport;
use crate::steady::Steady;
use crate::webhook::Watcher;
use crate::{Settings, Source};
use farshore_model::{Lsn, PgTime};
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{Instant, MissedTickBehavior};

/// How often the site is looked at.
const EVERY: Duration = Duration::from_secs(1);
/// Rates are means over so many looks.
const WINDOW: usize = 10;

/// Log that was not captured yet, bytes, of which so much is no backlog: some is always on its way.
const TO_COME_BYTES_MIN: u64 = 1 << 20;
/// Nor is what was captured at one of so many looks: of log that is about other databases, capture
/// is told every two seconds that there is nothing in it.
const TO_COME_LOOKS: usize = 5;

/// The site's state at one moment, and how fast it changes.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Snapshot {
    /// As `farshore status --json` shows it.
    #[serde(flatten)]
    pub report: SiteReport,
    /// When this was, in seconds since 1970.
    pub sampled_at: f64,
    /// Means over the last ten seconds.
    pub rates: Rates,
    /// All of it as text, once somebody has asked: pages are many, and a look is one.
    #[serde(skip)]
    pub(crate) json: OnceLock<String>,
}

impl Snapshot {
    /// As JSON, on one line.
    pub fn to_json(&self) -> &str {
        // Plain values with text as keys: there is nothing that JSON cannot hold.
        self.json.get_or_init(|| serde_json::to_string(self).unwrap_or_default())
    }
}

/// How fast things change, by name.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Rates {
    /// Publications.
    pub publications: BTreeMap<String, PublicationRates>,
    /// Subscriptions.
    pub subscriptions: BTreeMap<String, SubscriptionRates>,
    /// Downstream sites, `site publication`.
    pub downstreams: BTreeMap<String, DownstreamRates>,
    /// Mirrors.
    pub mirrors: BTreeMap<String, MirrorRates>,
}

/// A publication's.
#[derive(Clone, Debug, Default, Serialize)]
pub struct PublicationRates {
    /// Row changes taken from the stream.
    pub changes_per_second: f64,
    /// Bytes taken from the stream, or from the link.
    pub wire_bytes_per_second: f64,
    /// Bytes of the publisher's log that became durable in the store.
    pub log_bytes_per_second: f64,
    /// Bytes that the store wrote, compressed.
    pub stored_bytes_per_second: f64,
}

/// A subscription's.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SubscriptionRates {
    /// Source transactions applied.
    pub transactions_per_second: f64,
    /// Row changes applied.
    pub changes_per_second: f64,
    /// Bytes of the publisher's log applied.
    pub log_bytes_per_second: f64,
    /// Time until nothing is left to apply, of what is stored here and of what waits in the
    /// publisher's log, if all goes on as now; absent while it does not catch up.
    pub drain_seconds: Option<f64>,
}

/// A downstream site's.
#[derive(Clone, Debug, Default, Serialize)]
pub struct DownstreamRates {
    /// Bytes sent, as they crossed.
    pub sent_bytes_per_second: f64,
    /// Time until it has everything if all goes on as now; absent while it does not catch up.
    pub drain_seconds: Option<f64>,
}

/// A mirror's.
#[derive(Clone, Debug, Default, Serialize)]
pub struct MirrorRates {
    /// Bytes of log.
    pub log_bytes_per_second: f64,
    /// Bytes that they took on the link.
    pub link_bytes_per_second: f64,
    /// Time until what is to be sent is at the far end if all goes on as now.
    pub drain_seconds: Option<f64>,
}

/// A number that only grows, but begins anew with each connection.
#[derive(Clone, Copy, Debug, Default)]
struct Counter {
    last: u64,
    total: u64,
}

impl Counter {
    fn note(&mut self, now: u64) -> u64 {
        self.total += now.checked_sub(self.last).unwrap_or(now);
        self.last = now;
        self.total
    }
}

/// What one object came to at the looks of the window, oldest first.
#[derive(Clone, Debug)]
struct Track<const N: usize> {
    counters: [Counter; N],
    begun: bool,
    looks: VecDeque<(Instant, [u64; N], u64)>,
}

impl<const N: usize> Default for Track<N> {
    fn default() -> Self {
        Track { counters: [Counter::default(); N], begun: false, looks: VecDeque::new() }
    }
}

impl<const N: usize> Track<N> {
    /// Takes counts and a backlog down. What was counted before the first look is no rate.
    fn note(&mut self, at: Instant, counts: [u64; N], backlog: u64) {
        if !std::mem::replace(&mut self.begun, true) {
            self.counters = counts.map(|count| Counter { last: count, total: 0 });
        }
        let mut totals = [0; N];
        for ((total, counter), count) in totals.iter_mut().zip(&mut self.counters).zip(counts) {
            *total = counter.note(count);
        }
        self.looks.push_back((at, totals, backlog));
        if self.looks.len() > WINDOW + 1 {
            self.looks.pop_front();
        }
    }

    fn per_second(&self) -> [f64; N] {
        let (Some(first), Some(last)) = (self.looks.front(), self.looks.back()) else {
            return [0.0; N];
        };
        let seconds = last.0.duration_since(first.0).as_secs_f64();
        if seconds <= 0.0 {
            return [0.0; N];
        }
        let mut rates = [0.0; N];
        for (rate, (last, first)) in rates.iter_mut().zip(last.1.iter().zip(first.1)) {
            *rate = (last - first) as f64 / seconds;
        }
        rates
    }

    /// Seconds until the backlog is gone, if it shrinks as over the window.
    fn drain_seconds(&self) -> Option<f64> {
        let (first, last) = (self.looks.front()?, self.looks.back()?);
        if last.2 == 0 {
            return Some(0.0);
        }
        let seconds = last.0.duration_since(first.0).as_secs_f64();
        let shrunk = first.2.checked_sub(last.2).filter(|bytes| *bytes > 0)? as f64;
        (seconds > 0.0).then(|| last.2 as f64 * seconds / shrunk)
    }
}

/// The tracks of all objects of one kind; those that are gone are forgotten.
type Tracks<const N: usize> = BTreeMap<String, Track<N>>;

fn note<const N: usize, R>(
    tracks: &mut Tracks<N>,
    at: Instant,
    objects: impl Iterator<Item = (String, [u64; N], u64)>,
    rates: impl Fn([f64; N], Option<f64>) -> R,
) -> BTreeMap<String, R> {
    let mut found = BTreeMap::new();
    for (name, counts, backlog) in objects {
        let track = tracks.entry(name.clone()).or_default();
        track.note(at, counts, backlog);
        found.insert(name, rates(track.per_second(), track.drain_seconds()));
    }
    tracks.retain(|name, _| found.contains_key(name));
    found
}

/// Positions as numbers: bytes of log.
fn position(text: &str) -> u64 {
    text.parse::<Lsn>().map_or(0, |lsn| lsn.0)
}

#[derive(Debug, Default)]
struct Looks {
    /// Bytes that capture lacked at the last looks.
    to_come: BTreeMap<String, VecDeque<u64>>,
    publications: Tracks<4>,
    subscriptions: Tracks<3>,
    downstreams: Tracks<1>,
    mirrors: Tracks<2>,
}

impl Looks {
    fn rates(&mut self, at: Instant, report: &SiteReport) -> Rates {
        let publications = report.publications.iter().map(|p| {
            let counts = [p.changes, p.wire_bytes, position(&p.durable), p.stored_bytes];
            (p.name.clone(), counts, 0)
        });
        self.to_come.retain(|name, _| report.publications.iter().any(|p| p.name == *name));
        for publication in &report.publications {
            let looks = self.to_come.entry(publication.name.clone()).or_default();
            looks.push_back(publication.capture_behind_bytes + publication.store_behind_bytes);
            if looks.len() > TO_COME_LOOKS {
                looks.pop_front();
            }
        }
        let to_come = |publication: &str| {
            let looks = self.to_come.get(publication);
            let least = looks.and_then(|looks| looks.iter().min()).copied().unwrap_or_default();
            // The least says whether there is a backlog; how much of it is left is what is lacked
            // now, which the drain is foretold from.
            let now = looks.and_then(VecDeque::back).copied().unwrap_or_default();
            if least <= TO_COME_BYTES_MIN { 0 } else { now - TO_COME_BYTES_MIN }
        };
        let subscriptions = report.subscriptions.iter().map(|s| {
            let counts = [s.transactions, s.changes, position(&s.applied)];
            (s.name.clone(), counts, s.behind_bytes + to_come(&s.publication))
        });
        let downstreams = report.downstreams.iter().map(|d| {
            let behind = d.behind_bytes + to_come(&d.publication);
            (format!("{} {}", d.site, d.publication), [d.sent_bytes], behind)
        });
        let mirrors = report
            .mirrors
            .iter()
            .map(|m| (m.name.clone(), [m.log_bytes, m.link_bytes], m.send_queue_bytes));
        Rates {
            publications: note(&mut self.publications, at, publications, |[a, b, c, d], _| {
                PublicationRates {
                    changes_per_second: a,
                    wire_bytes_per_second: b,
                    log_bytes_per_second: c,
                    stored_bytes_per_second: d,
                }
            }),
            subscriptions: note(&mut self.subscriptions, at, subscriptions, |[a, b, c], drain| {
                SubscriptionRates {
                    transactions_per_second: a,
                    changes_per_second: b,
                    log_bytes_per_second: c,
                    drain_seconds: drain,
                }
            }),
            downstreams: note(&mut self.downstreams, at, downstreams, |[a], drain| {
                DownstreamRates { sent_bytes_per_second: a, drain_seconds: drain }
            }),
            mirrors: note(&mut self.mirrors, at, mirrors, |[a, b], drain| MirrorRates {
                log_bytes_per_second: a,
                link_bytes_per_second: b,
                drain_seconds: drain,
            }),
        }
    }
}

/// Looks at a site once a second.
pub struct Sampler {
    source: Arc<dyn Source>,
    snapshots: watch::Sender<Arc<Snapshot>>,
    looks: Looks,
    steady: Steady,
    recorder: Option<Recorder>,
    /// The disk refused the last minute of history.
    complained: bool,
    /// The minute of history that is being written.
    writing: Option<JoinHandle<std::io::Result<()>>>,
    watcher: Option<Watcher>,
}

impl Sampler {
    /// Nothing was looked at yet. To be called on a runtime.
    pub fn new(
        source: Arc<dyn Source>,
        settings: &Settings,
    ) -> (Sampler, watch::Receiver<Arc<Snapshot>>) {
        let (snapshots, looks) = watch::channel(Arc::default());
        let sampler = Sampler {
            source,
            snapshots,
            looks: Looks::default(),
            steady: Steady::default(),
            recorder: settings.history.clone().map(Recorder::new),
            writing: None,
            complained: false,
            watcher: settings
                .webhook
                .clone()
                .map(|webhook| Watcher::start(webhook, settings.history.clone())),
        };
        (sampler, looks)
    }

    /// Looks again and again, until it is dropped.
    pub async fn run(mut self) {
        let mut every = tokio::time::interval(EVERY);
        every.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            every.tick().await;
            let source = self.source.clone();
            // It may wait for a lock; those who replicate need the runtime's threads.
            let Ok(report) = spawn_blocking(move || source.report()).await else {
                tracing::error!("the monitor could not look at the site");
                continue;
            };
            let ended = self.take(Instant::now(), report);
            // A disk that hangs costs history too, and no look.
            if self.writing.as_ref().is_none_or(JoinHandle::is_finished) {
                self.note_written().await;
                self.writing = ended.map(|ended| spawn_blocking(move || ended.write()));
            }
        }
    }

    /// A disk that refuses costs history, and nothing else.
    async fn note_written(&mut self) {
        let Some(written) = self.writing.take() else { return };
        match written.await {
            Ok(Ok(())) => self.complained = false,
            Ok(Err(error)) => {
                if !std::mem::replace(&mut self.complained, true) {
                    tracing::warn!("the monitor's history has gaps from here on: {error}");
                }
            }
            Err(error) => tracing::error!(%error, "the monitor's history was not written"),
        }
    }

    fn take(&mut self, at: Instant, mut report: SiteReport) -> Option<Ended> {
        self.steady.settle(&mut report);
        let rates = self.looks.rates(at, &report);
        let sampled_at = PgTime::now().unix_seconds();
        if let Some(watcher) = &mut self.watcher {
            watcher.look(&report, sampled_at);
        }
        let snapshot = Snapshot { report, sampled_at, rates, json: OnceLock::new() };
        let ended = self.recorder.as_mut().and_then(|recorder| recorder.note(&snapshot));
        self.snapshots.send_replace(Arc::new(snapshot));
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::SubscriptionReport;

    fn look(looks: &mut Looks, at: Instant, changes: u64, behind: u64) -> SubscriptionRates {
        let subscription = SubscriptionReport {
            name: "s".to_owned(),
            changes,
            behind_bytes: behind,
            applied: "0/10".to_owned(),
            ..SubscriptionReport::default()
        };
        let report = SiteReport { subscriptions: vec![subscription], ..SiteReport::default() };
        looks.rates(at, &report).subscriptions.remove("s").unwrap()
    }

    struct Quiet;

    impl Source for Quiet {
        fn report(&self) -> SiteReport {
            let subscription =
                SubscriptionReport { name: "s".to_owned(), ..SubscriptionReport::default() };
            SiteReport { subscriptions: vec![subscription], ..SiteReport::default() }
        }

        fn tell(&self, _: crate::Question) -> crate::Outcome {
            Box::pin(async { Err("no".to_owned()) })
        }

        fn act(&self, _: crate::Action) -> crate::Outcome {
            Box::pin(async { Err("no".to_owned()) })
        }
    }

    #[tokio::test]
    async fn a_full_disk_costs_history_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let history = folder.path().join("monitor");
        std::fs::create_dir(&history).unwrap();
        let file = history.join("subscription.s.ring");
        std::os::unix::fs::symlink("/dev/full", &file).unwrap();
        let settings = Settings {
            address: ([127, 0, 0, 1], 0).into(),
            token: None,
            tls: None,
            history: Some(history),
            webhook: None,
        };
        let source = Arc::new(Quiet);
        let (mut sampler, looks) = Sampler::new(source.clone(), &settings);
        let minute = async |sampler: &mut Sampler, at: f64| {
            let snapshot =
                Snapshot { report: source.report(), sampled_at: at * 60.0, ..Snapshot::default() };
            let ended = sampler.recorder.as_mut().and_then(|recorder| recorder.note(&snapshot));
            if let Some(ended) = ended {
                sampler.writing = Some(spawn_blocking(move || ended.write()));
                sampler.note_written().await;
            }
            sampler.take(Instant::now(), source.report());
        };
        minute(&mut sampler, 1.0).await;
        minute(&mut sampler, 2.0).await;
        assert!(sampler.complained, "a full disk refuses what is written");
        assert_eq!(looks.borrow().report.subscriptions.len(), 1);
        // There is room again.
        std::fs::remove_file(&file).unwrap();
        minute(&mut sampler, 3.0).await;
        minute(&mut sampler, 4.0).await;
        assert!(!sampler.complained && file.is_file());
    }

    #[test]
    fn what_waits_in_the_publishers_log_takes_time_too() {
        use crate::report::PublicationReport;
        let (mut looks, begin) = (Looks::default(), Instant::now());
        let mut drain = None;
        // Capture is what holds things up: apply has nothing to do.
        for second in 0..=5 {
            let publication = PublicationReport {
                name: "p".to_owned(),
                capture_behind_bytes: TO_COME_BYTES_MIN + (50 - 5 * second) * 1_000_000,
                ..PublicationReport::default()
            };
            let subscription = SubscriptionReport {
                name: "s".to_owned(),
                publication: "p".to_owned(),
                ..SubscriptionReport::default()
            };
            let report = SiteReport {
                publications: vec![publication],
                subscriptions: vec![subscription],
                ..SiteReport::default()
            };
            let rates = looks.rates(begin + Duration::from_secs(second), &report);
            drain = rates.subscriptions["s"].drain_seconds;
        }
        assert_eq!(drain, Some(5.0));
    }

    #[test]
    fn rates_survive_a_counter_that_begins_anew() {
        let (mut looks, begin) = (Looks::default(), Instant::now());
        let at = |second| begin + Duration::from_secs(second);
        assert_eq!(look(&mut looks, at(0), 1_000_000, 0).changes_per_second, 0.0);
        assert_eq!(look(&mut looks, at(1), 1_000_500, 0).changes_per_second, 500.0);
        // Another connection, on which 100 came.
        assert_eq!(look(&mut looks, at(2), 100, 0).changes_per_second, 300.0);
    }

    #[test]
    fn the_window_moves_and_a_backlog_that_grows_has_no_end() {
        let (mut looks, begin) = (Looks::default(), Instant::now());
        let at = |second| begin + Duration::from_secs(second);
        for second in 0..=20 {
            let rates = look(&mut looks, at(second), second * second, 1_000 - second * 10);
            if second == 20 {
                // From 100 at second 10 to 400.
                assert_eq!(rates.changes_per_second, 30.0);
                assert_eq!(rates.drain_seconds, Some(80.0));
            }
        }
        assert_eq!(look(&mut looks, at(21), 500, 5_000).drain_seconds, None);
        assert_eq!(look(&mut looks, at(22), 500, 0).drain_seconds, Some(0.0));
    }
}
