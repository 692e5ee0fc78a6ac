//! The last thirty hours, a slot a minute, in one small file for each object.
//!
//! ```text
//! file    1,800 slots of 44 bytes; a minute's slot is minute % 1,800
//! slot    minute u32 · nine values f32 · CRC-32C u32, little-endian
//! ```
//!
//! A value that is not known is NaN. A slot counts if its checksum is right and its minute is one of
//! the last thirty hours and belongs there: what is torn, damaged or old is a gap in a picture, and
//! needs no recovery. Nothing is synced: a crash of the machine may cost some minutes.

use crate::sample::Snapshot;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::OpenOptions;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

/// Minutes that are kept.
pub const MINUTES: u32 = 30 * 60;
const VALUES: usize = 9;
const SLOT_BYTES: usize = 4 + 4 * VALUES + 4;

/// What is kept, by kind of object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// Publications.
    Publication,
    /// Subscriptions.
    Subscription,
    /// Mirrors.
    Mirror,
}

impl Kind {
    /// The kind that a path of the interface names.
    pub fn of_path(segment: &str) -> Option<Kind> {
        match segment {
            "publications" => Some(Kind::Publication),
            "subscriptions" => Some(Kind::Subscription),
            "mirrors" => Some(Kind::Mirror),
            _ => None,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Kind::Publication => "publication",
            Kind::Subscription => "subscription",
            Kind::Mirror => "mirror",
        }
    }

    /// Names of the values; of the first the minute's largest is kept, of the others, which begin
    /// with `mean_`, the mean.
    pub fn fields(self) -> &'static [&'static str] {
        match self {
            Kind::Publication => &[
                "store_bytes",
                "capture_behind_bytes",
                "unacknowledged_bytes",
                "capture_ms",
                "store_ms",
                "link_ms",
                "mean_changes_per_second",
                "mean_wire_bytes_per_second",
                "mean_log_bytes_per_second",
            ],
            Kind::Subscription => &[
                "latency_ms",
                "behind_bytes",
                "tracer_ms",
                "upstream_ms",
                "apply_ms",
                "behind_commands",
                "mean_changes_per_second",
                "mean_transactions_per_second",
            ],
            Kind::Mirror => &[
                "send_queue_bytes",
                "harden_ms",
                "spool_bytes",
                "redo_queue_bytes",
                "mean_log_bytes_per_second",
                "mean_link_bytes_per_second",
            ],
        }
    }
}

type Values = [Option<f64>; VALUES];

/// What a look says of every object.
fn values(snapshot: &Snapshot) -> Vec<(Kind, &str, Values)> {
    let (report, rates) = (&snapshot.report, &snapshot.rates);
    let number = |value: u64| Some(value as f64);
    // Of the downstream site that is furthest behind.
    let link_ms = |publication: &str| {
        let downstreams = report.downstreams.iter().filter(|d| d.publication == publication);
        downstreams.filter_map(|d| d.link_ms).max_by(f64::total_cmp)
    };
    let publications = report.publications.iter().map(|p| {
        let rate = rates.publications.get(&p.name);
        let values = [
            number(p.store_bytes),
            number(p.capture_behind_bytes),
            p.unacknowledged_bytes.map(|bytes| bytes as f64),
            p.capture_ms,
            p.store_ms,
            link_ms(&p.name),
            rate.map(|rate| rate.changes_per_second),
            rate.map(|rate| rate.wire_bytes_per_second),
            rate.map(|rate| rate.log_bytes_per_second),
        ];
        (Kind::Publication, p.name.as_str(), values)
    });
    let subscriptions = report.subscriptions.iter().map(|s| {
        let rate = rates.subscriptions.get(&s.name);
        let values = [
            s.latency_ms,
            number(s.behind_bytes),
            s.tracer_ms,
            s.upstream_ms,
            s.apply_ms,
            s.behind_commands.map(|commands| commands as f64),
            rate.map(|rate| rate.changes_per_second),
            rate.map(|rate| rate.transactions_per_second),
            None,
        ];
        (Kind::Subscription, s.name.as_str(), values)
    });
    let mirrors = report.mirrors.iter().map(|m| {
        let rate = rates.mirrors.get(&m.name);
        let values = [
            number(m.send_queue_bytes),
            m.harden_ms,
            number(m.spool_bytes),
            m.redo_queue_bytes.map(|bytes| bytes as f64),
            rate.map(|rate| rate.log_bytes_per_second),
            rate.map(|rate| rate.link_bytes_per_second),
            None,
            None,
            None,
        ];
        (Kind::Mirror, m.name.as_str(), values)
    });
    publications.chain(subscriptions).chain(mirrors).collect()
}

/// One value over the minute that is under way.
#[derive(Clone, Copy, Debug, Default)]
struct Gathered {
    largest: Option<f64>,
    sum: f64,
    count: u32,
}

/// A minute of one object.
type Minute = [Gathered; VALUES];

/// Gathers minutes and writes them.
#[derive(Debug)]
pub(crate) struct Recorder {
    folder: PathBuf,
    minute: u32,
    gathered: BTreeMap<(Kind, String), Minute>,
}

impl Recorder {
    pub fn new(folder: PathBuf) -> Recorder {
        Recorder { folder, minute: 0, gathered: BTreeMap::new() }
    }

    /// Takes a look down; returns the minute that has ended with it, to be written.
    pub fn note(&mut self, snapshot: &Snapshot) -> Option<Ended> {
        let minute = (snapshot.sampled_at / 60.0) as u32;
        let mut ended = None;
        if minute != self.minute {
            let gathered = std::mem::take(&mut self.gathered);
            if !gathered.is_empty() {
                let folder = self.folder.clone();
                ended = Some(Ended { folder, minute: self.minute, gathered });
            }
            self.minute = minute;
        }
        for (kind, name, values) in values(snapshot) {
            let minute = self.gathered.entry((kind, name.to_owned())).or_default();
            for (gathered, value) in minute.iter_mut().zip(values) {
                let Some(value) = value else { continue };
                gathered.largest = Some(gathered.largest.map_or(value, |most| most.max(value)));
                gathered.sum += value;
                gathered.count += 1;
            }
        }
        ended
    }
}

/// A minute that is over.
#[derive(Debug)]
pub(crate) struct Ended {
    folder: PathBuf,
    minute: u32,
    gathered: BTreeMap<(Kind, String), Minute>,
}

impl Ended {
    /// Writes it. Blocks on the disk.
    ///
    /// # Errors
    /// The first of the operating system's, after trying every object.
    pub fn write(&self) -> std::io::Result<()> {
        std::fs::create_dir_all(&self.folder)?;
        let mut result = Ok(());
        for ((kind, name), minute) in &self.gathered {
            let written = write_slot(&path(&self.folder, *kind, name), self.minute, *kind, minute);
            result = result.and(written);
        }
        result
    }
}

/// Names have no characters but `a-z`, `0-9`, `_`, `-`, and `/` in those that are received.
fn path(folder: &Path, kind: Kind, name: &str) -> PathBuf {
    folder.join(format!("{}.{}.ring", kind.word(), name.replace('/', "+")))
}

fn write_slot(path: &Path, minute: u32, kind: Kind, gathered: &Minute) -> std::io::Result<()> {
    let mut slot = [0; SLOT_BYTES];
    slot[..4].copy_from_slice(&minute.to_le_bytes());
    for (at, gathered) in gathered.iter().enumerate() {
        let is_mean = kind.fields().get(at).is_some_and(|field| field.starts_with("mean_"));
        let value = match gathered.count {
            0 => f32::NAN,
            count if is_mean => (gathered.sum / f64::from(count)) as f32,
            _ => gathered.largest.map_or(f32::NAN, |value| value as f32),
        };
        slot[4 + 4 * at..8 + 4 * at].copy_from_slice(&value.to_le_bytes());
    }
    let sum = crc32c::crc32c(&slot[..SLOT_BYTES - 4]);
    slot[SLOT_BYTES - 4..].copy_from_slice(&sum.to_le_bytes());
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    file.write_all_at(&slot, u64::from(minute % MINUTES) * SLOT_BYTES as u64)
}

/// What is kept of one object.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct History {
    /// Seconds between points.
    pub every_seconds: u32,
    /// What the values of a point are, after its time.
    pub fields: Vec<&'static str>,
    /// In seconds since 1970 when the minute began, then the values; oldest first. Minutes that are
    /// not known are left out.
    pub points: Vec<Vec<Option<f64>>>,
}

/// Reads what is kept of an object, up to the minute of `now` (seconds since 1970). Blocks on the
/// disk. What cannot be read is left out.
pub(crate) fn read(folder: &Path, kind: Kind, name: &str, now: f64) -> History {
    let (fields, newest) = (kind.fields(), (now / 60.0) as u32);
    let mut bytes = Vec::new();
    if let Ok(file) = std::fs::File::open(path(folder, kind, name)) {
        let most = u64::from(MINUTES) * SLOT_BYTES as u64;
        // What was read before an error counts.
        let _ = file.take(most).read_to_end(&mut bytes);
    }
    let slots = bytes.chunks_exact(SLOT_BYTES).enumerate();
    let mut points: Vec<(u32, Vec<Option<f64>>)> = slots
        .filter_map(|(at, slot)| {
            let word = |at: usize| slot[at..at + 4].try_into().map(u32::from_le_bytes);
            let (minute, sum) = (word(0).ok()?, word(SLOT_BYTES - 4).ok()?);
            let belongs = minute % MINUTES == at as u32
                && newest.checked_sub(minute).is_some_and(|age| age < MINUTES);
            if !belongs || crc32c::crc32c(&slot[..SLOT_BYTES - 4]) != sum {
                return None;
            }
            let values = (0..fields.len()).map(|field| {
                let bits = word(4 + 4 * field).unwrap_or(u32::MAX);
                Some(f64::from(f32::from_bits(bits))).filter(|value| value.is_finite())
            });
            let time = std::iter::once(Some(f64::from(minute) * 60.0));
            Some((minute, time.chain(values).collect()))
        })
        .collect();
    points.sort_by_key(|(minute, _)| *minute);
    let points = points.into_iter().map(|(_, point)| point).collect();
    History { every_seconds: 60, fields: fields.to_vec(), points }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{SiteReport, SubscriptionReport};

    const BEGIN: u32 = 29_000_000;

    fn look(minute: u32, second: u32, latency: Option<f64>, behind: u64) -> Snapshot {
        let subscription = SubscriptionReport {
            name: "dublin/s".to_owned(),
            latency_ms: latency,
            behind_bytes: behind,
            ..SubscriptionReport::default()
        };
        let report = SiteReport { subscriptions: vec![subscription], ..SiteReport::default() };
        let sampled_at = f64::from(minute) * 60.0 + f64::from(second);
        Snapshot { report, sampled_at, ..Snapshot::default() }
    }

    fn kept(folder: &Path, minute: u32) -> Vec<Vec<Option<f64>>> {
        read(folder, Kind::Subscription, "dublin/s", f64::from(minute) * 60.0).points
    }

    fn record(recorder: &mut Recorder, minute: u32, latency: Option<f64>, behind: u64) {
        for second in [0, 30] {
            let now = look(minute, second, latency.map(|ms| ms + f64::from(second)), behind);
            if let Some(ended) = recorder.note(&now) {
                ended.write().unwrap();
            }
        }
    }

    #[test]
    fn minutes_are_kept_for_thirty_hours_and_across_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = Recorder::new(folder.path().join("monitor"));
        for nth in 0..MINUTES + 100 {
            record(&mut recorder, BEGIN + nth, (nth % 2 == 1).then_some(5.0), u64::from(nth));
        }
        // The last minute is not over when the node ends.
        let mut recorder = Recorder::new(folder.path().join("monitor"));
        let last = BEGIN + MINUTES + 100;
        record(&mut recorder, last, Some(1.0), 7);
        record(&mut recorder, last + 1, Some(1.0), 7);
        let folder = folder.path().join("monitor");
        let points = kept(&folder, last);
        // All thirty hours but the minute that was cut off.
        assert_eq!(points.len() as u32, MINUTES - 1);
        assert!(points.windows(2).all(|pair| pair[0][0] < pair[1][0]));
        let newest = points.last().unwrap();
        assert_eq!(newest[..3], [Some(f64::from(last) * 60.0), Some(31.0), Some(7.0)]);
        assert_eq!(points[points.len() - 2][1], None, "what is not known is no zero");
        let size: u64 =
            std::fs::read_dir(&folder).unwrap().map(|f| f.unwrap().metadata().unwrap().len()).sum();
        assert_eq!(size, u64::from(MINUTES) * SLOT_BYTES as u64);
        assert_eq!(kept(&folder, last + MINUTES).len(), 0, "what is old is not shown");
    }

    #[test]
    fn the_legs_are_kept() {
        use crate::report::{DownstreamReport, PublicationReport};
        let folder = tempfile::tempdir().unwrap();
        let downstream = |site: &str, publication: &str, link_ms| DownstreamReport {
            site: site.to_owned(),
            publication: publication.to_owned(),
            link_ms,
            ..DownstreamReport::default()
        };
        let report = SiteReport {
            publications: vec![PublicationReport {
                name: "p".to_owned(),
                capture_ms: Some(2.0),
                store_ms: Some(3.0),
                ..PublicationReport::default()
            }],
            subscriptions: vec![SubscriptionReport {
                name: "s".to_owned(),
                upstream_ms: Some(5.0),
                apply_ms: Some(7.0),
                behind_commands: Some(11),
                ..SubscriptionReport::default()
            }],
            downstreams: vec![
                downstream("b", "p", Some(40.0)),
                downstream("c", "p", None),
                downstream("d", "p", Some(90.0)),
                downstream("d", "other", Some(500.0)),
            ],
            ..SiteReport::default()
        };
        let mut recorder = Recorder::new(folder.path().to_owned());
        for minute in [BEGIN, BEGIN + 1] {
            let sampled_at = f64::from(minute) * 60.0;
            let now = Snapshot { report: report.clone(), sampled_at, ..Snapshot::default() };
            if let Some(ended) = recorder.note(&now) {
                ended.write().unwrap();
            }
        }
        let value = |kind, name: &str, field: &str| {
            let history = read(folder.path(), kind, name, f64::from(BEGIN) * 60.0);
            let at = history.fields.iter().position(|found| *found == field).unwrap();
            history.points[0][1 + at]
        };
        for (field, expected) in [("capture_ms", 2.0), ("store_ms", 3.0), ("link_ms", 90.0)] {
            assert_eq!(value(Kind::Publication, "p", field), Some(expected), "{field}");
        }
        let kept = [("upstream_ms", 5.0), ("apply_ms", 7.0), ("behind_commands", 11.0)];
        for (field, expected) in kept {
            assert_eq!(value(Kind::Subscription, "s", field), Some(expected), "{field}");
        }
        for kind in [Kind::Publication, Kind::Subscription, Kind::Mirror] {
            assert!(kind.fields().len() <= VALUES);
        }
    }

    #[test]
    fn damage_costs_the_minutes_that_it_hits() {
        let folder = tempfile::tempdir().unwrap();
        let mut recorder = Recorder::new(folder.path().to_owned());
        for nth in 0..=100 {
            record(&mut recorder, BEGIN + nth, Some(5.0), 1);
        }
        let file = path(folder.path(), Kind::Subscription, "dublin/s");
        let mut bytes = std::fs::read(&file).unwrap();
        let at = |minute: u32| (minute % MINUTES) as usize * SLOT_BYTES;
        bytes[at(BEGIN + 50) + 9] ^= 1;
        let (one, other) = (at(BEGIN + 60), at(BEGIN + 61));
        bytes.copy_within(one..one + SLOT_BYTES, other);
        std::fs::write(&file, &bytes).unwrap();
        assert_eq!(kept(folder.path(), BEGIN + 100).len(), 98);
        std::fs::write(&file, &bytes[..at(BEGIN + 20) + 5]).unwrap();
        assert!(kept(folder.path(), BEGIN + 100).len() < 100);
        std::fs::write(&file, "no history at all").unwrap();
        assert!(kept(folder.path(), BEGIN + 100).is_empty());
        record(&mut recorder, BEGIN + 101, Some(5.0), 1);
        assert_eq!(kept(folder.path(), BEGIN + 101).len(), 1, "it begins anew by itself");
    }
}
