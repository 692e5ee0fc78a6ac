//! The side that is asked. It does what is wanted within bounds: one session at a time, so long and
//! so much ([`Allowances`]), at the rate that the site may have.

use super::super::packing::Packing;
use super::super::protocol::FromUpstream;
use super::super::serve::{Blocks, Served};
pub(in super::super) use super::allowance::Allowances;
use super::flow::Arriving;
use super::host::{Host, Segments, cpu_time};
use super::protocol::{
    Done, FILLER_BYTES, FromAsked, FromAsker, SAMPLE_BYTES_MAX, SAMPLE_BYTES_MIN, STEP_TIME_MAX,
    Step, TAG_BLOCKS, noise,
};
use super::sample::{Again, of_bytes, of_log};
use bytes::{Bytes, BytesMut};
use farshore_link::{LinkError, Receiver, Sender, Session};
use farshore_store::StoredBlock;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
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

/// How far a step may go.
struct Bounds {
    time: Duration,
    bytes: u64,
}

impl Measured<'_> {
    /// Does what the other side wants until it ends the session.
    pub async fn run(mut self, session: Session) -> Result<(), LinkError> {
        let (mut sender, mut receiver) = session.split();
        sender.send_parts(&FromAsked::Host(self.host.clone()).encode()).await?;
        let noise = noise();
        loop {
            let next = tokio::time::timeout(QUIET_MAX, receiver.next()).await;
            // Who says nothing has forgotten the session; dropping it says so.
            let Ok(next) = next else { return Ok(()) };
            let Some(message) = next? else { return sender.finish().await };
            let done = match FromAsker::decode(message) {
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
                    self.step(step, &mut sender, &mut receiver, &noise).await?
                }
                // What was on its way when a step was refused.
                Ok(FromAsker::Filler(_) | FromAsker::FillerEnds) => continue,
                Err(what) => Err(format!("{what} came; is the site of a newer version?")),
            };
            let answer = done.map_or_else(FromAsked::Refused, FromAsked::Done);
            sender.send_parts(&answer.encode()).await?;
        }
    }

    fn bounds(&self, millis: u64) -> Result<Bounds, String> {
        let mut allowances = self.allowances.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = allowances.left(self.site, Instant::now())?;
        Ok(Bounds { time: Duration::from_millis(millis).min(STEP_TIME_MAX), bytes })
    }

    async fn step(
        &mut self,
        step: Step,
        sender: &mut Sender,
        receiver: &mut Receiver,
        noise: &Bytes,
    ) -> Result<Result<Done, String>, LinkError> {
        let millis = match &step {
            Step::Send { millis }
            | Step::Take { millis }
            | Step::Replay { millis, .. }
            | Step::ReplaySample { millis } => *millis,
        };
        let bounds = match self.bounds(millis) {
            Ok(bounds) => bounds,
            Err(why) => return Ok(Err(why)),
        };
        let blocks = match &step {
            Step::Send { .. } | Step::Take { .. } => Vec::new(),
            Step::ReplaySample { .. } => of_bytes(&self.sample.clone().freeze()),
            Step::Replay { publication, .. } => match self.blocks_of(publication).await {
                Ok(blocks) => blocks,
                Err(why) => return Ok(Err(why)),
            },
        };
        let (began, cpu, segments) = (Instant::now(), cpu_time(), Segments::now());
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
        let mut allowances = self.allowances.lock().unwrap_or_else(PoisonError::into_inner);
        allowances.use_up(self.site, began.elapsed(), done.all_bytes, Instant::now());
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
