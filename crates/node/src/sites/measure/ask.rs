//! The side that wants to know.

use super::super::protocol::{FromUpstream, Wanted};
use super::flow::{Arriving, Flow};
use super::host::{Host, Segments, cpu_time};
use super::protocol::{
    Done, FILLER_BYTES, FromAsked, FromAsker, SAMPLE_BYTES_MAX, STEP_TIME_MAX, Step, noise,
};
use crate::config::SiteConfig;
use bytes::Bytes;
use farshore_link::{Dialer, Identity, IdentityError, LinkError, LinkOptions, Receiver, Sender};
use farshore_store::StoredBlock;
use farshore_store::packs::{pack, unpack};
use std::time::{Duration, Instant};

/// Between looks at how long a byte waits in a line that is full.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// zstd level of blocks that came in packs, as a store keeps them.
const STORED_LEVEL: i32 = 1;
/// Decompressed bytes of a replay that are kept, to try compression on.
const KEPT_BYTES: usize = 8 << 20;
/// Bytes of a block of a log.
const BLOCK_BYTES: usize = 256 << 10;
/// Blocks of a pack.
const PACK_BLOCKS: usize = 4;

/// Why a line is not measured.
#[derive(Debug, thiserror::Error)]
pub enum MeasureError {
    /// The site file does not have the site, or not enough of this one.
    #[error("{0}")]
    Config(String),
    /// Certificates.
    #[error("{0}")]
    Identity(#[from] IdentityError),
    /// The link.
    #[error("{0}")]
    Link(LinkError),
    /// The other site is of a version without this.
    #[error(
        "site \"{0}\" does not know how to measure: it is of an older version of farshore; update \
         it"
    )]
    Unable(String),
    /// The other site does not do a step.
    #[error("site \"{site}\" does not do it: {why}")]
    Refused {
        /// The other site.
        site: String,
        /// In its words.
        why: String,
    },
    /// What came is not what was asked for.
    #[error("site \"{site}\" sent {what} where it was measured; is it of a newer version?")]
    Protocol {
        /// The other site.
        site: String,
        /// What came.
        what: &'static str,
    },
}

/// An upstream site, to be measured.
#[derive(Debug)]
pub struct Upstream {
    site: String,
    own: String,
    address: String,
    connections: usize,
    identity: Identity,
}

impl Upstream {
    /// The upstream site of that name in a site file. Nothing is connected yet.
    ///
    /// # Errors
    /// When there is none, or this site's certificate cannot be used.
    pub fn of(config: &SiteConfig, site: &str) -> Result<Upstream, MeasureError> {
        let sites = &config.sites;
        let found = sites.upstream(site).zip(sites.identity.as_ref());
        let Some((upstream, files)) = found else {
            return Err(MeasureError::Config(sites.unknown_upstream(site)));
        };
        let identity = Identity::load(files)?;
        if identity.site() != config.name {
            return Err(MeasureError::Config(format!(
                "certificate {} is for site \"{}\", and this is \"{}\". Name its own under [site] \
                 certificate and key (farshore site-cert makes one)",
                files.certificate.display(),
                identity.site(),
                config.name
            )));
        }
        Ok(Upstream {
            site: site.to_owned(),
            own: config.name.clone(),
            address: upstream.address.clone(),
            connections: upstream.connections,
            identity,
        })
    }

    /// This site and the other one, for people.
    pub fn name(&self) -> String {
        format!("{} ⇄ {} at {}", self.own, self.site, self.address)
    }

    /// The other site's name.
    pub fn site(&self) -> &str {
        &self.site
    }

    /// Connections that the site file gives it.
    pub fn connections(&self) -> usize {
        self.connections
    }

    /// Opens a session over so many connections.
    ///
    /// # Errors
    /// When it cannot be opened; [`MeasureError::Unable`] if the other site is too old.
    pub async fn open(&self, connections: usize) -> Result<Measuring, MeasureError> {
        let options = LinkOptions { connections, keepalive: LOOK_EVERY, ..LinkOptions::default() };
        let dialer = Dialer::new(&self.address, &self.site, &self.identity, options)
            .map_err(MeasureError::Link)?;
        let request = serde_json::to_vec(&Wanted::Measure {}).unwrap_or_default();
        let session = dialer.open(&request).await.map_err(not_opened)?;
        let (sender, receiver) = session.split();
        let site = self.site.clone();
        let mut measuring = Measuring { site, sender, receiver, host: Host::default() };
        match measuring.next().await? {
            FromAsked::Host(host) => measuring.host = host,
            _ => return Err(measuring.odd("something else than its name")),
        }
        Ok(measuring)
    }
}

/// Why there is no session. Before there was measuring, nodes had these words for every request
/// that they do not know.
fn not_opened(error: LinkError) -> MeasureError {
    match error {
        LinkError::Refused { site, why } if why.starts_with("the request cannot be read") => {
            MeasureError::Unable(site)
        }
        LinkError::Refused { site, why } => MeasureError::Refused { site, why },
        other => MeasureError::Link(other),
    }
}

/// What filling the line came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filled {
    /// What arrived, at whichever side it did.
    pub flow: Flow,
    /// TCP segments of the machine that sent.
    pub segments: Option<Segments>,
    /// The middle and the longest of the round trips seen meanwhile.
    pub round_trip: Option<(Duration, Duration)>,
}

/// What replaying a log came to.
#[derive(Clone, Debug, Default)]
pub struct Replayed {
    /// Bytes on the link.
    pub crossed: Flow,
    /// How many times larger the log is, decompressed, while the flow is steady.
    pub ratio: f64,
    /// All bytes of log, decompressed.
    pub log_bytes: u64,
    /// Processor time here, to decrypt and decompress.
    pub cpu_here: Duration,
    /// Processor time there, to read, compress and encrypt.
    pub cpu_there: Duration,
    /// Some of the log's bytes, to try compression on.
    pub kept: Vec<Bytes>,
}

/// A session that measures.
pub struct Measuring {
    site: String,
    sender: Sender,
    receiver: Receiver,
    host: Host,
}

impl Measuring {
    /// The other machine.
    pub fn host(&self) -> &Host {
        &self.host
    }

    /// Sends a few bytes there and has them back.
    ///
    /// # Errors
    /// When the session fails.
    pub async fn round_trip(&mut self) -> Result<Duration, MeasureError> {
        let began = Instant::now();
        self.say(FromAsker::Echo(Bytes::from_static(b"echo"))).await?;
        match self.next().await? {
            FromAsked::Echo(_) => Ok(began.elapsed()),
            _ => Err(self.odd("something else than an echo")),
        }
    }

    /// Has the other side fill the line for `time`, at most 30 s.
    ///
    /// # Errors
    /// When the session fails, or the other side does not do it.
    pub async fn receive(&mut self, time: Duration) -> Result<Filled, MeasureError> {
        self.say(FromAsker::Step(Step::Send { millis: millis(time) })).await?;
        let mut arriving = Arriving::begin(Instant::now(), time);
        let meter = self.receiver.meter();
        let before = meter.traffic().wire_bytes_received;
        let mut round_trips = RoundTrips::default();
        loop {
            match self.next().await? {
                // Of messages that come over several connections one waits for another: bytes are
                // counted as they come out of them.
                FromAsked::Filler(_) => {
                    let all = meter.traffic().wire_bytes_received - before;
                    arriving.reach(all, Instant::now());
                }
                FromAsked::Done(done) => {
                    let (flow, segments) = (arriving.flow(), done.segments);
                    return Ok(Filled { flow, segments, round_trip: round_trips.told() });
                }
                FromAsked::Refused(why) => return Err(self.refused(why)),
                _ => return Err(self.odd("something else than what fills the line")),
            }
            round_trips.note(meter.traffic().round_trip);
        }
    }

    /// Fills the line from here for `time`, at most 30 s.
    ///
    /// # Errors
    /// As [`Measuring::receive`].
    pub async fn send(&mut self, time: Duration) -> Result<Filled, MeasureError> {
        let time = time.min(STEP_TIME_MAX);
        let noise = noise();
        let before = Segments::now();
        self.say(FromAsker::Step(Step::Take { millis: millis(time) })).await?;
        let meter = self.sender.meter();
        let mut round_trips = RoundTrips::default();
        let began = Instant::now();
        let mut pieces = (0..noise.len() / FILLER_BYTES).cycle();
        while began.elapsed() < time {
            let from = pieces.next().unwrap_or(0) * FILLER_BYTES;
            self.say(FromAsker::Filler(noise.slice(from..from + FILLER_BYTES))).await?;
            round_trips.note(meter.traffic().round_trip);
        }
        self.say(FromAsker::FillerEnds).await?;
        let done = self.done().await?;
        let flow = Flow {
            bytes: done.bytes,
            time: Duration::from_micros(done.micros),
            all_bytes: done.all_bytes,
        };
        let segments = before.zip(Segments::now()).map(|(before, now)| now.since(before));
        Ok(Filled { flow, segments, round_trip: round_trips.told() })
    }

    /// Hands over what [`Measuring::replay_sample`] replays; what is too much is left out. Returns
    /// how many bytes were handed over.
    ///
    /// # Errors
    /// When the session fails.
    pub async fn give_sample(&mut self, sample: &Bytes) -> Result<usize, MeasureError> {
        let mut rest = sample.slice(..sample.len().min(SAMPLE_BYTES_MAX));
        let given = rest.len();
        while !rest.is_empty() {
            let piece = rest.split_to(rest.len().min(FILLER_BYTES));
            self.say(FromAsker::Sample(piece)).await?;
        }
        Ok(given)
    }

    /// Has a publication's log sent for `time`, at most 30 s: the beginning of what is stored of
    /// it, over and over, as it crosses when there is much of it.
    ///
    /// # Errors
    /// As [`Measuring::receive`].
    pub async fn replay(
        &mut self,
        publication: &str,
        time: Duration,
    ) -> Result<Replayed, MeasureError> {
        let publication = publication.to_owned();
        self.take_replay(Step::Replay { publication, millis: millis(time) }, time).await
    }

    /// The same of what was handed over.
    ///
    /// # Errors
    /// As [`Measuring::receive`].
    pub async fn replay_sample(&mut self, time: Duration) -> Result<Replayed, MeasureError> {
        self.take_replay(Step::ReplaySample { millis: millis(time) }, time).await
    }

    async fn take_replay(&mut self, step: Step, time: Duration) -> Result<Replayed, MeasureError> {
        let cpu = cpu_time();
        self.say(FromAsker::Step(step)).await?;
        let now = Instant::now();
        let mut crossed = Arriving::begin(now, time);
        let (mut messages, mut log) = (Arriving::begin(now, time), Arriving::begin(now, time));
        let meter = self.receiver.meter();
        let before = meter.traffic().wire_bytes_received;
        let (mut kept, mut kept_bytes) = (Vec::new(), 0);
        loop {
            match self.next().await? {
                FromAsked::Blocks(message) => {
                    let message_bytes = message.len() as u64;
                    let raw = tokio::task::spawn_blocking(move || as_received(message)).await;
                    let raw = raw.map_err(|_| self.odd("blocks that end a thread"))?;
                    let raw = raw.map_err(|what| self.odd(what))?;
                    let now = Instant::now();
                    crossed.reach(meter.traffic().wire_bytes_received - before, now);
                    messages.add(message_bytes, now);
                    log.add(raw.iter().map(|block| u64::from(block.raw_len)).sum(), now);
                    for block in raw {
                        if kept_bytes < KEPT_BYTES && !block.zstd {
                            kept_bytes += block.payload.len();
                            kept.push(block.payload);
                        }
                    }
                }
                FromAsked::Done(done) => {
                    return Ok(Replayed {
                        crossed: crossed.flow(),
                        ratio: log.flow().bytes as f64 / (messages.flow().bytes as f64).max(1.0),
                        log_bytes: log.flow().all_bytes,
                        cpu_here: cpu_time().saturating_sub(cpu),
                        cpu_there: Duration::from_micros(done.cpu_micros),
                        kept,
                    });
                }
                FromAsked::Refused(why) => return Err(self.refused(why)),
                _ => return Err(self.odd("something else than blocks")),
            }
        }
    }

    /// Ends the session.
    ///
    /// # Errors
    /// When it fails before.
    pub async fn finish(self) -> Result<(), MeasureError> {
        let Measuring { sender, mut receiver, .. } = self;
        sender.finish().await.map_err(MeasureError::Link)?;
        // Until the other side has ended it too: it takes one session after the other.
        while receiver.next().await.map_err(MeasureError::Link)?.is_some() {}
        Ok(())
    }

    async fn done(&mut self) -> Result<Done, MeasureError> {
        match self.next().await? {
            FromAsked::Done(done) => Ok(done),
            FromAsked::Refused(why) => Err(self.refused(why)),
            _ => Err(self.odd("something else than an end")),
        }
    }

    async fn say(&mut self, message: FromAsker) -> Result<(), MeasureError> {
        self.sender.send_parts(&message.encode()).await.map_err(MeasureError::Link)
    }

    async fn next(&mut self) -> Result<FromAsked, MeasureError> {
        match self.receiver.next().await.map_err(MeasureError::Link)? {
            Some(message) => FromAsked::decode(message).map_err(|what| self.odd(what)),
            None => Err(self.odd("no more")),
        }
    }

    fn odd(&self, what: &'static str) -> MeasureError {
        MeasureError::Protocol { site: self.site.clone(), what }
    }

    fn refused(&self, why: String) -> MeasureError {
        MeasureError::Refused { site: self.site.clone(), why }
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.min(STEP_TIME_MAX).as_millis()).unwrap_or(u64::MAX)
}

/// Does with blocks what is done with them on their way to a target: what comes in packs is
/// compressed as a store keeps it, and everything is decompressed to be applied.
fn as_received(message: Bytes) -> Result<Vec<StoredBlock>, &'static str> {
    let blocks = match FromUpstream::decode(message)? {
        FromUpstream::Block(block) => vec![block],
        FromUpstream::Packed(packed) => unpack(packed, STORED_LEVEL)?,
        _ => return Err("something else than blocks"),
    };
    blocks.iter().map(StoredBlock::decompressed).collect()
}

/// Round trips that a session's pings told of.
#[derive(Default)]
struct RoundTrips {
    all: Vec<Duration>,
    last: Option<Duration>,
}

impl RoundTrips {
    /// Takes what the session tells, if it is news. At most 30 s of pings: a few hundred.
    fn note(&mut self, seen: Option<Duration>) {
        // What was there at first is of an idle line.
        if self.last.is_some() && seen != self.last {
            self.all.extend(seen);
        }
        self.last = seen.or(self.last);
    }

    fn told(mut self) -> Option<(Duration, Duration)> {
        self.all.sort_unstable();
        self.all.get(self.all.len() / 2).copied().zip(self.all.last().copied())
    }
}

/// How blocks can be compressed on their way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Each by itself, at this zstd level: as long as the line is not what is waited for.
    Each(i32),
    /// Several together, at this zstd level: when a slow line is full.
    Packs(i32),
}

/// What compression came to.
#[derive(Clone, Copy, Debug, Default)]
pub struct Compressed {
    /// Bytes before.
    pub from: u64,
    /// Bytes after.
    pub to: u64,
    /// Time it took one processor.
    pub time: Duration,
}

/// Compresses a log's bytes as they would be for a link, for `time` or until all are; at least one
/// pack. Keeps a processor at work.
pub fn compress(log: &[Bytes], how: Compression, time: Duration) -> Compressed {
    let blocks = log.iter().flat_map(|bytes| {
        let cuts = (0..bytes.len()).step_by(BLOCK_BYTES);
        cuts.map(|from| bytes.slice(from..bytes.len().min(from + BLOCK_BYTES)))
    });
    let blocks: Vec<StoredBlock> = blocks.map(StoredBlock::chunk).collect();
    let mut done = Compressed::default();
    let began = Instant::now();
    for run in blocks.chunks(PACK_BLOCKS) {
        done.from += run.iter().map(|block| u64::from(block.raw_len)).sum::<u64>();
        done.to += match how {
            Compression::Each(level) => run.iter().map(|block| each(block, level)).sum(),
            Compression::Packs(level) => pack(run, level).map_or(0, |packed| packed.len() as u64),
        };
        if began.elapsed() >= time {
            break;
        }
    }
    done.time = began.elapsed();
    done
}

fn each(block: &StoredBlock, level: i32) -> u64 {
    let mut block = block.clone();
    // What cannot be compressed crosses as it is.
    let _ = block.compress(level);
    block.payload.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_compressed_and_noise_is_not() {
        let text = Bytes::from("a line of a log, and another one; ".repeat(60_000));
        let time = Duration::from_secs(60);
        for how in [Compression::Each(1), Compression::Packs(3)] {
            let done = compress(std::slice::from_ref(&text), how, time);
            assert_eq!(done.from, text.len() as u64);
            assert!(done.to > 0 && done.to * 10 < done.from, "{how:?} {done:?}");
        }
        let noise = noise();
        let done = compress(std::slice::from_ref(&noise), Compression::Each(1), time);
        assert_eq!(done.to, noise.len() as u64);
        let first = compress(&[text], Compression::Packs(3), Duration::ZERO);
        assert_eq!(first.from, (PACK_BLOCKS * BLOCK_BYTES) as u64);
    }

    #[test]
    fn a_site_of_an_older_version_is_told_from_one_that_refuses() {
        let refused = |why: &str| {
            not_opened(LinkError::Refused { site: "up".into(), why: why.into() }).to_string()
        };
        let said = refused("the request cannot be read: is it a newer version?");
        assert!(said.contains("older version of farshore; update it"), "{said}");
        let said = refused("there is no [downstream.t1] in the site file here");
        assert!(said.contains("\"up\" does not do it: there is no [downstream.t1]"), "{said}");
    }

    #[test]
    fn round_trips_of_an_idle_line_do_not_count() {
        let ms = Duration::from_millis;
        let mut round_trips = RoundTrips::default();
        for seen in [None, Some(ms(1)), Some(ms(1)), Some(ms(30)), Some(ms(30)), Some(ms(20))] {
            round_trips.note(seen);
        }
        assert_eq!(round_trips.told(), Some((ms(30), ms(30))));
        assert_eq!(RoundTrips::default().told(), None);
    }
}
