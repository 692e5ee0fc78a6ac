//! What durable writes into a folder cost: no database needed.
//!
//! All of it happens in one file that has no name, filled with random bytes first, as PostgreSQL
//! fills its segments before it uses them. When the process ends, however it ends, the file is gone.

mod group_commit;
mod method;
mod payload;
mod scratch_file;
mod stream;
mod sustained;
mod verdict;

use crate::machine::{self, Mount};
use crate::report::{At, Better, DimensionKind, Fact, Report, Section};
use crate::room;
use crate::units::{bytes, count};
use crate::{Error, Progress, Stop};
pub use method::SyncMethod;
use payload::Payload;
use scratch_file::ScratchFile;
use std::path::PathBuf;
use std::time::Duration;

/// Names of the sections of a report.
pub(crate) const WRITES: &str = "writes";
pub(crate) const METHODS: &str = "methods";
pub(crate) const GROUP_COMMIT: &str = "group-commit";
pub(crate) const SUSTAINED: &str = "sustained";

/// The way of writing whose depth is varied.
const OUTSTANDING_METHOD: SyncMethod = SyncMethod::OpenDatasyncDirect;
/// Writes that the methods are compared at: a page of the log, and a larger transaction's.
const METHOD_SIZES: [u32; 2] = [8 << 10, 64 << 10];
/// Largest single write.
pub const WRITE_BYTES_MAX: u32 = 1 << 20;
/// Most writes, or clients, at a time: each is a thread.
pub const OUTSTANDING_MAX: u32 = 1_024;

/// What to measure, and how long.
#[derive(Debug, Clone)]
pub struct DiskOptions {
    /// Where. A folder that this process may write to.
    pub folder: PathBuf,
    /// Size of the file in bytes; writes go round in it.
    pub file_bytes: u64,
    /// Sizes of writes in bytes: multiples of 4,096, at most [`WRITE_BYTES_MAX`].
    pub sizes: Vec<u32>,
    /// How many writes are under way at a time: 1 to [`OUTSTANDING_MAX`].
    pub depths: Vec<u32>,
    /// Ways of writing to compare, one write at a time.
    pub methods: Vec<SyncMethod>,
    /// Clients that commit at a time: 1 to [`OUTSTANDING_MAX`].
    pub clients: Vec<u32>,
    /// How long each figure is measured each time.
    pub duration: Duration,
    /// How often each figure is measured.
    pub repeats: u32,
    /// Write on for this long at the end, to see a cache that fills.
    pub sustained: Option<Duration>,
}

impl DiskOptions {
    /// Everything, within two minutes and 1 GiB.
    pub fn new(folder: impl Into<PathBuf>) -> DiskOptions {
        DiskOptions {
            folder: folder.into(),
            file_bytes: 1 << 30,
            sizes: [4, 8, 16, 64, 256, 1_024].map(|kib| kib << 10).into(),
            depths: vec![1, 4, 16, 64],
            methods: SyncMethod::ALL.into(),
            clients: vec![1, 2, 4, 8, 16, 32, 64],
            duration: Duration::from_millis(500),
            repeats: 3,
            sustained: None,
        }
    }

    fn check(&self) -> Result<(), Error> {
        let refuse = |what: String| Err(Error::Refused(what));
        for size in &self.sizes {
            if *size == 0 || size % 4_096 != 0 || *size > WRITE_BYTES_MAX {
                return refuse(format!(
                    "a write of {size} bytes cannot be measured: multiples of 4096 up to {} can",
                    bytes(WRITE_BYTES_MAX.into())
                ));
            }
        }
        for outstanding in self.depths.iter().chain(&self.clients) {
            if !(1..=OUTSTANDING_MAX).contains(outstanding) {
                return refuse(format!(
                    "{outstanding} at a time cannot be measured: 1 to {OUTSTANDING_MAX} can"
                ));
            }
        }
        if self.repeats == 0 || self.duration.is_zero() {
            return refuse("nothing would be measured: repeats and seconds must be above 0".into());
        }
        let file_bytes_min = u64::from(WRITE_BYTES_MAX) * 16;
        if self.file_bytes < file_bytes_min {
            return refuse(format!(
                "a file of {} is too small to write around in: --size must be {} or more",
                bytes(self.file_bytes),
                bytes(file_bytes_min)
            ));
        }
        Ok(())
    }
}

/// Everything that was varied, in one measurement of a figure.
#[derive(Debug, Clone, Copy)]
enum Cell {
    Outstanding { size: u32, depth: u32 },
    Method { method: SyncMethod, size: u32 },
    GroupCommit { clients: u32 },
}

/// Measures a disk. Blocks the calling thread; takes, beside filling the file, about as long as
/// there are figures times repeats times duration.
///
/// # Errors
/// [`Error::Refused`] before anything is written when there is too little room; [`Error::Interrupted`]
/// within one write's time of being asked to stop; and what the file system refuses altogether. A
/// method that it refuses is a remark in the report.
pub fn measure(options: &DiskOptions, stop: &Stop, say: Progress<'_>) -> Result<Report, Error> {
    options.check()?;
    let folder = std::path::absolute(&options.folder)
        .map_err(Error::file("find", options.folder.as_path()))?;
    let mut report = Report::begin("disk", folder.display().to_string());
    ensure_room(&folder, options.file_bytes)?;
    report.machine = machine::facts();
    if let Some(mount) = Mount::of(&folder) {
        report.machine.extend(mount.facts());
        if mount.is_memory() {
            report.remarks.push(format!(
                "{} keeps files in memory: nothing here outlives a power cut, and the figures are \
                 those of memory",
                mount.kind
            ));
        }
    }
    report.settings = settings(options);

    let payload = Payload::new();
    say(&format!("filling a file of {} without a name", bytes(options.file_bytes)));
    let file = ScratchFile::create(&folder, options.file_bytes, &payload, stop)?;
    let usable: Vec<SyncMethod> = SyncMethod::ALL
        .into_iter()
        .filter(|method| match file.open(*method) {
            Ok(_) => true,
            Err(error) => {
                let what = format!("{method} was left out: the file system refuses it ({error})");
                say(&what);
                report.remarks.push(what);
                false
            }
        })
        .collect();

    let mut sections = empty_sections(&usable);
    let cells = cells(options, &usable);
    for round in 1..=options.repeats {
        for (at, cell) in cells.iter().enumerate() {
            stop.check()?;
            say(&format!(
                "round {round} of {}, {} of {}: {}",
                options.repeats,
                at + 1,
                cells.len(),
                describe(*cell)
            ));
            measure_cell(*cell, &file, &payload, options, stop, &mut sections)?;
        }
    }
    let Sections { writes, methods, group_commit } = sections;
    report.sections = vec![writes, methods, group_commit];
    report.sections.retain(|section| !section.rows.is_empty());
    if let Some(duration) = options.sustained {
        let method = usable.first().copied().unwrap_or(SyncMethod::Fdatasync);
        let (section, remark) = sustained::measure(&file, method, &payload, duration, stop, say)?;
        report.sections.push(section);
        report.remarks.push(remark);
    }
    report.remark_on_spread();
    report.verdict = verdict::of(&report);
    Ok(report)
}

fn settings(options: &DiskOptions) -> Vec<Fact> {
    vec![
        Fact::new("file", bytes(options.file_bytes)),
        Fact::new("time per figure", format!("{:?}", options.duration)),
        Fact::new("repeats", options.repeats),
    ]
}

struct Sections {
    writes: Section,
    methods: Section,
    group_commit: Section,
}

fn empty_sections(usable: &[SyncMethod]) -> Sections {
    use Better::{Higher, Lower, Neither};
    let method = usable.first().copied().unwrap_or(OUTSTANDING_METHOD);
    let latencies =
        [("p50_us", "p50 µs", Lower), ("p99_us", "p99 µs", Lower), ("max_us", "max µs", Lower)];
    let with = |first: &[(&'static str, &'static str, Better)]| -> Vec<_> {
        first.iter().copied().chain(latencies).collect()
    };
    let mut writes = Section::new(
        WRITES,
        "Durable writes by size and number under way",
        &format!("Sequential writes, each durable before it counts ({method})."),
        &[("size", DimensionKind::Bytes), ("outstanding", DimensionKind::Count)],
        &with(&[("mb_per_s", "MB/s", Higher), ("writes_per_s", "writes/s", Higher)]),
    );
    writes.chart("MB/s by number of writes under way", "mb_per_s", 1, Some(0), true);
    writes.chart("Latency p99 in µs by number of writes under way", "p99_us", 1, Some(0), true);
    let mut methods = Section::new(
        METHODS,
        "Ways to make a write durable",
        "One write after the other, as one session that commits. The names are those of PostgreSQL's \
         wal_sync_method; O_DIRECT goes past the kernel's cache.",
        &[("method", DimensionKind::Word), ("size", DimensionKind::Bytes)],
        &with(&[("writes_per_s", "writes/s", Higher)]),
    );
    methods.charts.clear();
    let mut group_commit = Section::new(
        GROUP_COMMIT,
        "Group commit",
        "Clients add a record of 512 bytes each and wait until it is durable; one of them writes \
         and flushes (fdatasync) for all that wait, as PostgreSQL's backends do.",
        &[("clients", DimensionKind::Count)],
        &with(&[
            ("commits_per_s", "commits/s", Higher),
            ("flushes_per_s", "flushes/s", Neither),
            ("commits_per_flush", "commits/flush", Neither),
        ]),
    );
    group_commit.chart("Commits/s by clients", "commits_per_s", 0, None, true);
    group_commit.chart("Commit latency p99 in µs by clients", "p99_us", 0, None, true);
    Sections { writes, methods, group_commit }
}

fn cells(options: &DiskOptions, usable: &[SyncMethod]) -> Vec<Cell> {
    let mut cells = Vec::new();
    for size in &options.sizes {
        for depth in &options.depths {
            cells.push(Cell::Outstanding { size: *size, depth: *depth });
        }
    }
    for method in usable.iter().filter(|method| options.methods.contains(method)) {
        cells.extend(METHOD_SIZES.map(|size| Cell::Method { method: *method, size }));
    }
    cells.extend(options.clients.iter().map(|clients| Cell::GroupCommit { clients: *clients }));
    cells
}

fn describe(cell: Cell) -> String {
    match cell {
        Cell::Outstanding { size, depth } => {
            format!("writes of {}, {depth} under way", bytes(size.into()))
        }
        Cell::Method { method, size } => format!("{method}, writes of {}", bytes(size.into())),
        Cell::GroupCommit { clients } => format!("group commit, {} clients", count(clients.into())),
    }
}

fn measure_cell(
    cell: Cell,
    file: &ScratchFile,
    payload: &Payload,
    options: &DiskOptions,
    stop: &Stop,
    sections: &mut Sections,
) -> Result<(), Error> {
    match cell {
        Cell::Outstanding { size, depth } => {
            let method = match file.open(OUTSTANDING_METHOD) {
                Ok(_) => OUTSTANDING_METHOD,
                // Said in a remark already, and in the section's own words.
                Err(_) => first_usable(file),
            };
            let run = stream::Run { method, size, depth, duration: options.duration };
            let measured = stream::write(file, run, payload, stop)?;
            let seconds = measured.elapsed.as_secs_f64();
            let writes = measured.latencies.count() as f64;
            sections.writes.add(
                &[At::Number(size.into()), At::Number(depth.into())],
                &[
                    ("mb_per_s", writes * f64::from(size) / 1e6 / seconds),
                    ("writes_per_s", writes / seconds),
                    ("p50_us", measured.latencies.quantile_us(0.5)),
                    ("p99_us", measured.latencies.quantile_us(0.99)),
                    ("max_us", measured.latencies.max_us()),
                ],
            );
        }
        Cell::Method { method, size } => {
            let run = stream::Run { method, size, depth: 1, duration: options.duration };
            let measured = stream::write(file, run, payload, stop)?;
            sections.methods.add(
                &[At::Word(method.to_string()), At::Number(size.into())],
                &[
                    (
                        "writes_per_s",
                        measured.latencies.count() as f64 / measured.elapsed.as_secs_f64(),
                    ),
                    ("p50_us", measured.latencies.quantile_us(0.5)),
                    ("p99_us", measured.latencies.quantile_us(0.99)),
                    ("max_us", measured.latencies.max_us()),
                ],
            );
        }
        Cell::GroupCommit { clients } => {
            let measured = group_commit::commit(file, clients, options.duration, payload, stop)?;
            let seconds = measured.elapsed.as_secs_f64();
            let commits = measured.latencies.count() as f64;
            sections.group_commit.add(
                &[At::Number(clients.into())],
                &[
                    ("commits_per_s", commits / seconds),
                    ("flushes_per_s", measured.flushes as f64 / seconds),
                    ("commits_per_flush", commits / measured.flushes.max(1) as f64),
                    ("p50_us", measured.latencies.quantile_us(0.5)),
                    ("p99_us", measured.latencies.quantile_us(0.99)),
                    ("max_us", measured.latencies.max_us()),
                ],
            );
        }
    }
    Ok(())
}

fn first_usable(file: &ScratchFile) -> SyncMethod {
    SyncMethod::ALL
        .into_iter()
        .find(|method| file.open(*method).is_ok())
        .unwrap_or(SyncMethod::Fdatasync)
}

/// Refuses to take the last room of a file system.
fn ensure_room(folder: &std::path::Path, wanted: u64) -> Result<(), Error> {
    let metadata = std::fs::metadata(folder).map_err(Error::file("look at", folder))?;
    if !metadata.is_dir() {
        return Err(Error::Refused(format!(
            "{} is no folder: name the folder whose disk is to be measured",
            folder.display()
        )));
    }
    room::ensure(folder, wanted, "the file", "free some, or ask for a smaller file with --size")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_wishes_are_answered_with_possible_ones() {
        let sound = DiskOptions::new("/tmp");
        sound.check().unwrap();
        for (wish, said) in [
            (DiskOptions { sizes: vec![5_000], ..sound.clone() }, "multiples of 4096"),
            (DiskOptions { sizes: vec![2 << 20], ..sound.clone() }, "1 MiB"),
            (DiskOptions { depths: vec![0], ..sound.clone() }, "1 to 1024"),
            (DiskOptions { clients: vec![5_000], ..sound.clone() }, "1 to 1024"),
            (DiskOptions { repeats: 0, ..sound.clone() }, "above 0"),
            (DiskOptions { file_bytes: 4_096, ..sound.clone() }, "16 MiB or more"),
        ] {
            let error = wish.check().unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }
}
