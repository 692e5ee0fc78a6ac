//! The side that is asked. It does what is wanted within bounds: one session at a time, so long and
//! so much ([`Allowances`]), at the rate that the site may have.

use super::super::crossing::Blocks;
use super::super::packing::Packing;
use super::super::protocol::FromUpstream;
use super::super::serve::Served;
pub(in super::super) use super::allowance::Allowances;
use super::flow::Arriving;
use super::host::{Host, Segments, cpu_time};
use super::protocol::{
    Done, FILLER_BYTES, FromAsked, FromAsker, SAMPLE_BYTES_MAX, SAMPLE_BYTES_MIN, STEP_TIME_MAX,
    Step, TAG_BLOCKS, noise,
};
use super::sample::{Again, of_bytes, of_log};
use bytes::{Bytes, BytesMut};
use farshore_link::{LinkError, Meter, Receiver, Sender, Session};
use farshore_store::StoredBlock;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A session takes no longer.
pub(in super::super) const SESSION_TIME_MAX: Duration = Duration::from_secs(15 * 60);
/// The site that asks says something at least this often.
const QUIET_MAX: Duration = Duration::from_secs(60);

/// One session.
pub(in super::super) struct Measured<'a> {
    /// The site that asks.
    pub site: &'a str,
    /// This machine, and what the site may have.
    pub host: Host,
    /// Where samples come from.
    pub publications: &'a BTreeMap<String, Served>,
    /// What sites have used.
    pub allowances: &'a Mutex<Allowances>,
    /// What the site handed over.
    pub sample: BytesMut,
}

/// What a site asks to be sent back is no more.
const ECHO_BYTES_MAX: usize = 64;

/// Charges a site for its session, however that ends: for its time, and for what crossed.
struct Charge<'a> {
    site: &'a str,
    allowances: &'a Mutex<Allowances>,
    meter: Arc<Meter>,
    at: Instant,
    bytes: u64,
}

impl Charge<'_> {
    /// Charges what came since the last time; why nothing more is allowed, if it is not.
    fn take(&mut self) -> Result<u64, String> {
        let (now, traffic) = (Instant::now(), self.meter.traffic());
        let bytes = traffic.wire_bytes_sent + traffic.wire_bytes_received;
        let mut allowances = self.allowances.lock().unwrap_or_else(PoisonError::into_inner);
        let (time, more) = (now.duration_since(self.at), bytes.saturating_sub(self.bytes));
        allowances.use_up(self.site, time, more, now);
        (self.at, self.bytes) = (now, bytes);
        allowances.left(self.site, now)
    }
}

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        let _ = self.take();
    }
}

/// How far a step may go.
struct Bounds {
    time: Duration,
    bytes: u64,
}

impl Measured<'_> {
    /// Does what the other side wants until it ends the session.
    pub async fn run(mut self, session: Session) -> Result<(), LinkError> {
        let (mut sender, mut receiver) = session.split();
        let mut charge = Charge {
            site: self.site,
            allowances: self.allowances,
            meter: receiver.meter(),
            at: Instant::now(),
            bytes: 0,
        };
        sender.send_parts(&FromAsked::Host(self.host.clone()).encode()).await?;
        let noise = noise();
        loop {
            let next = tokio::time::timeout(QUIET_MAX, receiver.next()).await;
            // Who says nothing has forgotten the session; dropping it says so.
            let Ok(next) = next else { return Ok(()) };
            let Some(message) = next? else { return sender.finish().await };
            let bytes_left = match charge.take() {
                Ok(left) => left,
                Err(why) => {
                    sender.send_parts(&FromAsked::Refused(why).encode()).await?;
                    return sender.finish().await;
                }
            };
            let done = match FromAsker::decode(message) {
                Ok(FromAsker::Echo(bytes)) if bytes.len() > ECHO_BYTES_MAX => {
                    Err(format!("an echo has at most {ECHO_BYTES_MAX} bytes"))
                }
                Ok(FromAsker::Echo(bytes)) => {
                    sender.send_parts(&FromAsked::Echo(bytes).encode()).await?;
                    continue;
                }
                Ok(FromAsker::Sample(piece)) => {
                    if self.sample.len() + piece.len() > SAMPLE_BYTES_MAX {
                        Err(format!("a sample has at most {} MB", SAMPLE_BYTES_MAX >> 20))
                    } else {
                        self.sample.extend_from_slice(&piece);
                        continue;
                    }
                }
                Ok(FromAsker::Step(step)) => {
                    self.step(step, bytes_left, (&mut sender, &mut receiver), &noise).await?
                }
                // What was on its way when a step was refused.
                Ok(FromAsker::Filler(_) | FromAsker::FillerEnds) => continue,
                Err(what) => Err(format!("{what} came; is the site of a newer version?")),
            };
            let answer = done.map_or_else(FromAsked::Refused, FromAsked::Done);
            sender.send_parts(&answer.encode()).await?;
        }
    }

    async fn step(
        &mut self,
        step: Step,
        bytes_left: u64,
        (sender, receiver): (&mut Sender, &mut Receiver),
        noise: &Bytes,
    ) -> Result<Result<Done, String>, LinkError> {
        let millis = match &step {
            Step::Send { millis }
            | Step::Take { millis }
            | Step::Replay { millis, .. }
            | Step::ReplaySample { millis } => *millis,
        };
        let time = Duration::from_millis(millis).min(STEP_TIME_MAX);
        let bounds = Bounds { time, bytes: bytes_left };
        let blocks = match &step {
            Step::Send { .. } | Step::Take { .. } => Vec::new(),
            Step::ReplaySample { .. } => of_bytes(&self.sample.clone().freeze()),
            Step::Replay { publication, .. } => match self.blocks_of(publication).await {
                Ok(blocks) => blocks,
                Err(why) => return Ok(Err(why)),
            },
        };
        let (cpu, segments) = (cpu_time(), Segments::now());
        let mut done = match step {
            Step::Send { .. } => send(sender, noise, &bounds).await?,
            Step::Take { .. } => match take(receiver, &bounds).await? {
                Ok(done) => done,
                Err(why) => return Ok(Err(why)),
            },
            Step::Replay { .. } | Step::ReplaySample { .. } => {
                if blocks.is_empty() {
                    return Ok(Err("there is nothing to be sent as a sample".to_owned()));
                }
                match replay(sender, blocks, self.host.compression, &bounds).await? {
                    Ok(done) => done,
                    Err(why) => return Ok(Err(why)),
                }
            }
        };
        done.cpu_micros = micros(cpu_time().saturating_sub(cpu));
        done.segments = segments.zip(Segments::now()).map(|(before, now)| now.since(before));
        Ok(Ok(done))
    }

    async fn blocks_of(&self, publication: &str) -> Result<Vec<StoredBlock>, String> {
        let granted = self.host.publications.iter().any(|name| name == publication);
        let Some(served) = self.publications.get(publication).filter(|_| granted) else {
            return Err(format!(
                "publication \"{publication}\" is not granted to site \"{}\"",
                self.site
            ));
        };
        let store = served.store.clone();
        let read = tokio::task::spawn_blocking(move || of_log(&store)).await;
        let blocks = read
            .map_err(|_| "its log could not be read".to_owned())?
            .map_err(|error| error.to_string())?;
        let bytes: u64 = blocks.iter().map(|block| u64::from(block.raw_len)).sum();
        if bytes < SAMPLE_BYTES_MIN {
            return Err(format!(
                "the log of publication \"{publication}\" holds only {bytes} bytes now (what was \
                 applied everywhere is dropped), too few to stand for it; measure when more was \
                 published, or give rows of the tables with --sample"
            ));
        }
        Ok(blocks)
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Fills the line.
async fn send(sender: &mut Sender, noise: &Bytes, bounds: &Bounds) -> Result<Done, LinkError> {
    let began = Instant::now();
    let mut all_bytes = 0;
    let mut pieces = (0..noise.len() / FILLER_BYTES).cycle();
    while began.elapsed() < bounds.time && all_bytes < bounds.bytes {
        let from = pieces.next().unwrap_or(0) * FILLER_BYTES;
        let filler = FromAsked::Filler(noise.slice(from..from + FILLER_BYTES));
        sender.send_parts(&filler.encode()).await?;
        all_bytes += FILLER_BYTES as u64;
    }
    Ok(Done { all_bytes, ..Done::default() })
}

/// Counts what comes.
async fn take(receiver: &mut Receiver, bounds: &Bounds) -> Result<Result<Done, String>, LinkError> {
    let mut arriving = Arriving::begin(Instant::now(), bounds.time);
    // What was handed over before the end may still be on its way.
    let patience = bounds.time + QUIET_MAX;
    let meter = receiver.meter();
    let before = meter.traffic().wire_bytes_received;
    let counting = async {
        loop {
            match receiver.next().await?.map(FromAsker::decode) {
                Some(Ok(FromAsker::Filler(_))) => {
                    let all = meter.traffic().wire_bytes_received - before;
                    arriving.reach(all, Instant::now());
                    if arriving.flow().all_bytes > bounds.bytes {
                        return Ok(Err("more came than is allowed within an hour".to_owned()));
                    }
                }
                Some(Ok(FromAsker::FillerEnds)) => return Ok(Ok(())),
                _ => return Ok(Err("something else came where the line was filled".to_owned())),
            }
        }
    };
    match tokio::time::timeout(patience, counting).await {
        Ok(Ok(Ok(()))) => {}
        Ok(Ok(Err(why))) => return Ok(Err(why)),
        Ok(Err(error)) => return Err(error),
        Err(_) => return Ok(Err("the line was filled for too long".to_owned())),
    }
    let flow = arriving.flow();
    let (bytes, micros) = (flow.bytes, micros(flow.time));
    Ok(Ok(Done { bytes, micros, all_bytes: flow.all_bytes, ..Done::default() }))
}

/// Sends blocks over and over, as the log they are from crosses.
async fn replay(
    sender: &mut Sender,
    blocks: Vec<StoredBlock>,
    compression: i32,
    bounds: &Bounds,
) -> Result<Result<Done, String>, LinkError> {
    let began = Instant::now();
    let mut packing = Packing::new(compression, true, began);
    let mut blocks = Blocks::new(Box::new(Again::new(blocks)));
    let mut all_bytes = 0;
    while began.elapsed() < bounds.time && all_bytes < bounds.bytes {
        let crossing = match blocks.next(&packing).await {
            Ok(Some(crossing)) => crossing,
            Ok(None) => break,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let raw_bytes = crossing.raw_bytes();
        let message = crossing.message(FromUpstream::Block, FromUpstream::Packed);
        let mut parts = vec![Bytes::from_static(&[TAG_BLOCKS])];
        parts.extend(message.encode());
        all_bytes += parts.iter().map(|part| part.len() as u64).sum::<u64>();
        let asked = Instant::now();
        sender.send_parts(&parts).await?;
        let now = Instant::now();
        packing.sent(raw_bytes, now.duration_since(asked), now);
    }
    Ok(Ok(Done { all_bytes, ..Done::default() }))
}
