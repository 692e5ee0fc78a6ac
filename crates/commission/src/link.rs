//! What the line between two sites can carry, measured over a real link with the running site at
//! its other end. How to reach that site is the caller's: it gives a [`Line`].

mod drain;
mod sample;
mod verdict;

pub use drain::Drain;
pub use sample::Sample;

use crate::latency::Latencies;
use crate::report::{At, Better, DimensionKind, Fact, Report, Section};
use crate::units::{bytes, figure};
use crate::{Error, Progress, Stop, machine};
use std::time::{Duration, Instant};

/// Names of the sections of a report.
pub(crate) const ROUND_TRIP: &str = "round_trip";
pub(crate) const THROUGHPUT: &str = "throughput";
pub(crate) const REPLAY: &str = "replay";
pub(crate) const COMPRESSION: &str = "compression";
pub(crate) const DRAIN: &str = "drain";
/// Directions, as replication sees them.
const DOWN: &str = "to here";
const UP: &str = "from here";
const IDLE: &str = "idle";
const FULL: &str = "full";
/// Echoes of one figure.
const ECHOES_MAX: u64 = 200;
const ECHOES_MIN: u64 = 10;
/// Time that one way of compressing is tried.
const COMPRESSING: Duration = Duration::from_millis(700);
/// Share of a socket's buffer that holds bytes under way: the rest is the kernel's bookkeeping.
const BUFFER_SHARE: f64 = 0.5;

/// The way to the other site.
#[allow(async_fn_in_trait, reason = "one thread waits for one measurement")]
pub trait Line {
    /// A session over it.
    type Session: Session;
    /// A log's bytes, to try compression on.
    type Log;

    /// Opens one over so many connections.
    async fn open(&self, connections: u32) -> Result<Self::Session, Error>;

    /// Compresses a log's bytes in each way that there is, for about `time` each.
    fn compress(&self, log: &Self::Log, time: Duration) -> Vec<Compressed>;
}

/// An open session with the other site.
#[allow(async_fn_in_trait, reason = "one thread waits for one measurement")]
pub trait Session: Sized {
    /// A log's bytes, to try compression on.
    type Log;

    /// The other machine.
    fn there(&self) -> End;

    /// A few bytes there and back.
    async fn round_trip(&mut self) -> Result<Duration, Error>;

    /// Has the other side fill the line for so long.
    async fn receive(&mut self, time: Duration) -> Result<Filled, Error>;

    /// Fills the line from here for so long.
    async fn send(&mut self, time: Duration) -> Result<Filled, Error>;

    /// Has the other side send `content` as a log crosses, for so long.
    async fn replay(
        &mut self,
        content: &Content,
        time: Duration,
    ) -> Result<(Replayed, Self::Log), Error>;

    /// Ends it in order.
    async fn finish(self) -> Result<(), Error>;
}

/// A machine at one end.
#[derive(Debug, Clone, Default)]
pub struct End {
    /// Version of Farshore.
    pub farshore: String,
    /// Processors.
    pub cores: u32,
    /// Most bytes of a socket's receive buffer, where the kernel tells.
    pub receive_buffer_max: Option<u64>,
    /// Most bytes of a socket's send buffer, where the kernel tells.
    pub send_buffer_max: Option<u64>,
    /// Congestion controls that the kernel has.
    pub congestion_controls: String,
    /// zstd level for what it sends here; 0: as it is stored.
    pub compression: i32,
    /// Bytes per second that it may send here, if that is limited.
    pub bandwidth: Option<u64>,
    /// Publications that it may give.
    pub publications: Vec<String>,
    /// Logs that cross to here at this moment.
    pub following: u32,
}

/// What filling the line came to.
#[derive(Debug, Clone, Copy, Default)]
pub struct Filled {
    /// Bytes per second, once connections had found their speed.
    pub bytes_per_s: f64,
    /// All bytes.
    pub bytes: u64,
    /// TCP segments that the sending machine sent, and those of them that it sent again.
    pub segments: Option<(u64, u64)>,
    /// The middle and the longest of the round trips meanwhile.
    pub round_trip: Option<(Duration, Duration)>,
}

/// What sending a log came to.
#[derive(Debug, Clone, Copy, Default)]
pub struct Replayed {
    /// Bytes of log per second, decompressed.
    pub log_bytes_per_s: f64,
    /// Bytes per second on the link.
    pub link_bytes_per_s: f64,
    /// All bytes of log, decompressed.
    pub log_bytes: u64,
    /// All bytes on the link.
    pub link_bytes: u64,
    /// Processor time here.
    pub cpu_here: Duration,
    /// Processor time there.
    pub cpu_there: Duration,
}

/// A way to compress, and what it came to.
#[derive(Debug, Clone)]
pub struct Compressed {
    /// For people.
    pub how: String,
    /// Bytes before, by bytes after.
    pub ratio: f64,
    /// Bytes before, per second of one processor.
    pub bytes_per_s: f64,
}

/// What is sent as a log.
#[derive(Debug, Clone)]
pub enum Content {
    /// What the other site has stored of this publication.
    Publication(String),
    /// Rows of tables.
    Sample(Sample),
}

impl Content {
    fn name(&self) -> String {
        match self {
            Content::Publication(name) => format!("log of {name}"),
            Content::Sample(sample) => format!("rows of {}", sample.tables.join(", ")),
        }
    }
}

/// What to measure.
#[derive(Debug, Clone)]
pub struct LinkOptions {
    /// Both sites, for people.
    pub subject: String,
    /// The other site's name.
    pub site: String,
    /// Connections of a session; the last is how many replication has.
    pub connections: Vec<u32>,
    /// Each figure is measured so long each time.
    pub duration: Duration,
    /// How often each figure is measured.
    pub repeats: u32,
    /// Bytes that cross in all, about, at most.
    pub bytes_max: u64,
    /// What is sent as a log; without it, only the line is measured.
    pub content: Option<Content>,
    /// What is known beside the link.
    pub drain: Drain,
}

impl LinkOptions {
    fn check(&self) -> Result<(), Error> {
        let refuse = |what: &str| Err(Error::Refused(what.to_owned()));
        if self.repeats == 0 || self.connections.is_empty() {
            return refuse("nothing would be measured: repeats and connections must be above 0");
        }
        if self.connections.iter().any(|connections| !(1..=16).contains(connections)) {
            return refuse("a link takes 1 to 16 connections");
        }
        self.drain.check()
    }
}

/// Measures the line. Nothing is left behind at either end when this returns, or is dropped.
///
/// # Errors
/// [`Error::Interrupted`] when asked to stop, and what opening a session or a step fails with.
pub async fn measure<L: Line>(
    line: &L,
    options: &LinkOptions,
    stop: &Stop,
    say: Progress<'_>,
) -> Result<Report, Error>
where
    L::Session: Session<Log = L::Log>,
{
    options.check()?;
    let mut report = Report::begin("link", options.subject.clone());
    report.machine = machine::facts();
    report.settings = settings(options);
    let mut figures = Figures::new();
    let there = tokio::select! {
        there = figures.fill(line, options, say) => there?,
        () = stop.requested() => return Err(Error::Interrupted),
    };
    let here = here();
    report.machine.extend(facts_of("here", &here));
    report.machine.extend(facts_of("there", &there));
    report.remarks.append(&mut figures.remarks);
    report.remarks.extend(remarks(&there, options));
    let Figures { round_trip, throughput, replay, compression, .. } = figures;
    report.sections = vec![round_trip, throughput];
    report.sections.extend([replay, compression].into_iter().filter(|s| !s.rows.is_empty()));
    drain::add(&mut report, &options.drain, options.content.as_ref(), (&here, &there));
    report.remark_on_spread();
    report.verdict = verdict::of(&report, options, (&here, &there));
    Ok(report)
}

fn settings(options: &LinkOptions) -> Vec<Fact> {
    let connections: Vec<String> = options.connections.iter().map(u32::to_string).collect();
    let mut facts = vec![
        Fact::new("connections", connections.join(", ")),
        Fact::new("time per figure", format!("{:?}", options.duration)),
        Fact::new("repeats", options.repeats),
        Fact::new("bytes in all at most", bytes(options.bytes_max)),
    ];
    if let Some(content) = &options.content {
        facts.push(Fact::new("sent as a log", content.name()));
    }
    facts.extend(options.drain.facts());
    facts
}

/// This end.
fn here() -> End {
    let last = |path: &str| {
        let text = std::fs::read_to_string(path).ok()?;
        text.split_ascii_whitespace().last()?.parse().ok()
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let controls = "/proc/sys/net/ipv4/tcp_available_congestion_control";
    End {
        farshore: env!("CARGO_PKG_VERSION").to_owned(),
        cores: u32::try_from(cores).unwrap_or(u32::MAX),
        receive_buffer_max: last("/proc/sys/net/ipv4/tcp_rmem"),
        send_buffer_max: last("/proc/sys/net/ipv4/tcp_wmem"),
        congestion_controls: std::fs::read_to_string(controls).unwrap_or_default(),
        ..End::default()
    }
}

fn facts_of(place: &str, end: &End) -> Vec<Fact> {
    let size = |size: Option<u64>| size.map_or("unknown".to_owned(), bytes);
    let named = |what: &str| format!("{what} {place}");
    let mut facts = vec![
        Fact::new(&named("tcp_rmem, largest,"), size(end.receive_buffer_max)),
        Fact::new(&named("tcp_wmem, largest,"), size(end.send_buffer_max)),
        Fact::new(&named("congestion controls"), end.congestion_controls.trim()),
    ];
    if place == "there" {
        facts.push(Fact::new("processors there", end.cores));
        facts.push(Fact::new("Farshore there", &end.farshore));
        let level = match end.compression {
            0 => "as it is stored".to_owned(),
            level => format!("zstd {level}"),
        };
        facts.push(Fact::new("compression of what comes from there", level));
        if let Some(rate) = end.bandwidth {
            facts.push(Fact::new("bandwidth granted there", format!("{}/s", bytes(rate))));
        }
    }
    facts
}

fn remarks(there: &End, options: &LinkOptions) -> Vec<String> {
    let mut remarks = vec![
        "loss is what TCP sent again, as the kernel of the sending machine counts it over all of \
         its connections (in its network namespace); packets that were lost on the way cannot be \
         seen otherwise"
            .to_owned(),
    ];
    if there.following > 0 {
        remarks.push(format!(
            "replication went on meanwhile ({} log{} to here): it took its share of the line, and \
             processor times hold its work",
            there.following,
            if there.following == 1 { "" } else { "s" }
        ));
    }
    if let Some(rate) = there.bandwidth {
        remarks.push(format!(
            "site {} may send {}/s to here ([downstream] bandwidth there): figures of what comes \
             from there are of that, not of the line",
            options.site,
            bytes(rate)
        ));
    }
    if options.content.is_none() {
        remarks.push(
            "no log was sent: name one with --publication, or rows with --sample, to learn what \
             compression gives and what the processors at both ends can do"
                .to_owned(),
        );
    }
    remarks
}

/// Everything measured so far.
struct Figures {
    round_trip: Section,
    throughput: Section,
    replay: Section,
    compression: Section,
    /// Bytes that have crossed.
    crossed: u64,
    remarks: Vec<String>,
}

impl Figures {
    fn new() -> Figures {
        use Better::{Higher, Lower, Neither};
        let round_trip = Section::new(
            ROUND_TRIP,
            "There and back",
            "A few bytes through a session of one connection, encryption and both programs \
             included. Jitter is how much one round trip usually differs from the one before. Of a \
             full line it is the wait behind what fills it, with the most connections.",
            &[("line", DimensionKind::Word)],
            &[
                ("p50_ms", "p50 ms", Lower),
                ("min_ms", "min ms", Lower),
                ("p99_ms", "p99 ms", Lower),
                ("max_ms", "max ms", Lower),
                ("jitter_ms", "jitter ms", Lower),
            ],
        );
        let mut throughput = Section::new(
            THROUGHPUT,
            "What the line carries",
            "Bytes that cannot be compressed, once connections have found their speed: the first \
             third of each time does not count. Sent again is the share of the sending machine's \
             TCP segments.",
            &[("direction", DimensionKind::Word), ("connections", DimensionKind::Count)],
            &[
                ("mb_per_s", "MB/s", Higher),
                ("resent_percent", "sent again %", Lower),
                ("full_ms", "round trip when full, ms", Lower),
                ("moved_mb", "MB moved", Neither),
            ],
        );
        throughput.chart("MB/s by connections", "mb_per_s", 1, Some(0), false);
        let replay = Section::new(
            REPLAY,
            "A log, sent as it crosses",
            "The other site reads, compresses and encrypts as it does when there is much to send; \
             this one decrypts and decompresses. Nothing is stored or applied. Processor time is \
             of the whole process.",
            &[("content", DimensionKind::Word)],
            &[
                ("log_mb_per_s", "log MB/s", Higher),
                ("link_mb_per_s", "link MB/s", Neither),
                ("ratio", "times smaller", Higher),
                ("cpu_there_s_per_gb", "CPU s/GB there", Lower),
                ("cpu_here_s_per_gb", "CPU s/GB here", Lower),
                ("log_mb", "log MB", Neither),
            ],
        );
        let compression = Section::new(
            COMPRESSION,
            "What compression gives",
            "The same log, compressed here by one processor. A line that is full has blocks packed \
             together. By the line is what would cross it at the rate measured above if processors \
             were fast enough.",
            &[("how", DimensionKind::Word)],
            &[
                ("ratio", "times smaller", Higher),
                ("cpu_mb_per_s", "log MB/s of a processor", Higher),
                ("line_mb_per_s", "log MB/s by the line", Higher),
            ],
        );
        Figures { round_trip, throughput, replay, compression, crossed: 0, remarks: Vec::new() }
    }

    async fn fill<L: Line>(
        &mut self,
        line: &L,
        options: &LinkOptions,
        say: Progress<'_>,
    ) -> Result<End, Error>
    where
        L::Session: Session<Log = L::Log>,
    {
        let mut there = End::default();
        let usual = options.connections.last().copied().unwrap_or(1);
        for round in 1..=options.repeats {
            let mut log = None;
            say(&format!("round {round} of {}: round trips", options.repeats));
            let mut session = line.open(1).await?;
            self.echoes(&mut session, options.duration).await?;
            session.finish().await?;
            for connections in &options.connections {
                let mut session = line.open(*connections).await?;
                there = session.there();
                let what = format!(
                    "round {round} of {}: {connections} connection{}",
                    options.repeats,
                    if *connections == 1 { "" } else { "s" }
                );
                for direction in [DOWN, UP] {
                    let Some(time) = self.time_left(options) else { break };
                    say(&format!("{what}, {direction}"));
                    let filled = match direction {
                        DOWN => session.receive(time).await?,
                        _ => session.send(time).await?,
                    };
                    self.add_filled(direction, *connections, &filled, *connections == usual);
                }
                if *connections == usual
                    && let Some(content) = &options.content
                    && let Some(time) = self.time_left(options)
                {
                    say(&format!("{what}, a log"));
                    let (replayed, seen) = session.replay(content, time).await?;
                    self.add_replayed(content, &replayed);
                    log = Some(seen);
                }
                session.finish().await?;
            }
            if let Some(log) = log {
                say(&format!("round {round} of {}: compression", options.repeats));
                self.add_compressed(line.compress(&log, COMPRESSING));
            }
        }
        Ok(there)
    }

    /// How long a step may take; `None` when enough has crossed.
    fn time_left(&mut self, options: &LinkOptions) -> Option<Duration> {
        let left = options.bytes_max.saturating_sub(self.crossed);
        let fastest = self.throughput.rows.iter().filter_map(|row| row.median("mb_per_s"));
        let fastest = fastest.fold(0.0, f64::max) * 1e6;
        if left == 0 {
            let remark = format!(
                "{} have crossed, and no more were to (--max-bytes): some figures were taken fewer \
                 times than the others, or not at all",
                bytes(self.crossed)
            );
            if !self.remarks.contains(&remark) {
                self.remarks.push(remark);
            }
            return None;
        }
        let time = if fastest > 0.0 { left as f64 / fastest } else { f64::INFINITY };
        Some(options.duration.min(Duration::try_from_secs_f64(time).unwrap_or(Duration::MAX)))
    }

    async fn echoes(
        &mut self,
        session: &mut impl Session,
        duration: Duration,
    ) -> Result<(), Error> {
        let mut latencies = Latencies::new();
        let (mut changes, mut before, mut min) = (Duration::ZERO, None, Duration::MAX);
        let began = Instant::now();
        while latencies.count() < ECHOES_MIN
            || (latencies.count() < ECHOES_MAX && began.elapsed() < duration)
        {
            let took = session.round_trip().await?;
            latencies.record(took);
            changes += before.map_or(Duration::ZERO, |before: Duration| before.abs_diff(took));
            before = Some(took);
            min = min.min(took);
        }
        let jitter = changes.as_secs_f64() * 1e3 / (latencies.count() - 1) as f64;
        self.round_trip.add(
            &[At::Word(IDLE.to_owned())],
            &[
                ("p50_ms", latencies.quantile_us(0.5) / 1e3),
                ("min_ms", min.as_secs_f64() * 1e3),
                ("p99_ms", latencies.quantile_us(0.99) / 1e3),
                ("max_ms", latencies.max_us() / 1e3),
                ("jitter_ms", jitter),
            ],
        );
        Ok(())
    }

    fn add_filled(&mut self, direction: &str, connections: u32, filled: &Filled, usual: bool) {
        self.crossed += filled.bytes;
        let mut figures =
            vec![("mb_per_s", filled.bytes_per_s / 1e6), ("moved_mb", filled.bytes as f64 / 1e6)];
        if let Some((sent, resent)) = filled.segments {
            figures.push(("resent_percent", resent as f64 * 100.0 / (sent as f64).max(1.0)));
        }
        if let Some((middle, longest)) = filled.round_trip {
            let (middle, longest) = (middle.as_secs_f64() * 1e3, longest.as_secs_f64() * 1e3);
            figures.push(("full_ms", middle));
            if usual {
                let what = format!("{FULL}, {direction}");
                self.round_trip.add(&[At::Word(what)], &[("p50_ms", middle), ("max_ms", longest)]);
            }
        }
        let at = [At::Word(direction.to_owned()), At::Number(connections.into())];
        self.throughput.add(&at, &figures);
    }

    fn add_replayed(&mut self, content: &Content, replayed: &Replayed) {
        self.crossed += replayed.link_bytes;
        let per_gb = |cpu: Duration| cpu.as_secs_f64() * 1e9 / (replayed.log_bytes as f64).max(1.0);
        self.replay.add(
            &[At::Word(content.name())],
            &[
                ("log_mb_per_s", replayed.log_bytes_per_s / 1e6),
                ("link_mb_per_s", replayed.link_bytes_per_s / 1e6),
                (
                    "ratio",
                    replayed.log_bytes_per_s / replayed.link_bytes_per_s.max(f64::MIN_POSITIVE),
                ),
                ("cpu_there_s_per_gb", per_gb(replayed.cpu_there)),
                ("cpu_here_s_per_gb", per_gb(replayed.cpu_here)),
                ("log_mb", replayed.log_bytes as f64 / 1e6),
            ],
        );
    }

    fn add_compressed(&mut self, tried: Vec<Compressed>) {
        let usual = self.throughput.rows.iter().filter(|row| row.at[0] == At::Word(DOWN.into()));
        let line = usual.filter_map(|row| row.median("mb_per_s")).fold(0.0, f64::max);
        for Compressed { how, ratio, bytes_per_s } in tried {
            self.compression.add(
                &[At::Word(how)],
                &[
                    ("ratio", ratio),
                    ("cpu_mb_per_s", bytes_per_s / 1e6),
                    ("line_mb_per_s", ratio * line),
                ],
            );
        }
    }
}

/// MB/s that one connection carries at most, for the buffers that its ends may have; `None` where
/// the kernel does not tell, or there is no round trip to speak of.
pub(crate) fn socket_limit(from: &End, to: &End, round_trip_ms: f64) -> Option<f64> {
    let buffer = from.send_buffer_max?.min(to.receive_buffer_max?) as f64 * BUFFER_SHARE;
    (round_trip_ms > 0.0).then_some(buffer / 1e3 / round_trip_ms)
}

/// A rate for a sentence.
pub(crate) fn rate(mb_per_s: f64) -> String {
    format!("{} MB/s", figure(mb_per_s))
}

#[cfg(test)]
mod tests;
