//! What both sides of a measuring session say: a tag, and JSON or bytes.

use super::host::{Host, Segments};
use bytes::{Buf, BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// One step takes no longer.
pub(super) const STEP_TIME_MAX: Duration = Duration::from_secs(30);
/// Bytes that stand for a log at most, decompressed.
pub(super) const SAMPLE_BYTES_MAX: usize = 16 << 20;
/// Less of a log, decompressed, says nothing about it.
pub(super) const SAMPLE_BYTES_MIN: u64 = 64 << 10;
/// Bytes of a message that only fills the line, and of a piece of a sample.
pub(super) const FILLER_BYTES: usize = 64 << 10;

/// What is to be done next.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Step {
    /// Fill the line for so long.
    Send { millis: u64 },
    /// Count what comes until [`FromAsker::FillerEnds`].
    Take { millis: u64 },
    /// Send blocks of this publication's log, over and over, as its log crosses.
    Replay { publication: String, millis: u64 },
    /// The same of the sample that was handed over.
    ReplaySample { millis: u64 },
}

/// A message of the side that wants to know.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FromAsker {
    /// To be sent back.
    Echo(Bytes),
    /// The next step.
    Step(Step),
    /// The next piece of a sample.
    Sample(Bytes),
    /// To be counted.
    Filler(Bytes),
    /// That was the last to be counted.
    FillerEnds,
}

/// What became of a step, at the side that is asked.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Done {
    /// Bytes counted while the flow was steady, in how long; of [`Step::Take`].
    pub bytes: u64,
    pub micros: u64,
    /// All bytes counted.
    pub all_bytes: u64,
    /// Processor time of the process.
    pub cpu_micros: u64,
    /// TCP segments of the machine's connections.
    pub segments: Option<Segments>,
}

/// A message of the side that is asked.
#[derive(Debug, PartialEq)]
pub(super) enum FromAsked {
    /// Who it is; comes first.
    Host(Host),
    /// What was to be sent back.
    Echo(Bytes),
    /// To be counted.
    Filler(Bytes),
    /// Blocks of a log, as they cross.
    Blocks(Bytes),
    /// The step is over.
    Done(Done),
    /// The step is not taken.
    Refused(String),
}

const TAG_ECHO: u8 = b'E';
const TAG_STEP: u8 = b'S';
const TAG_SAMPLE: u8 = b'P';
const TAG_FILLER: u8 = b'F';
const TAG_FILLER_ENDS: u8 = b'X';
const TAG_HOST: u8 = b'H';
pub(super) const TAG_BLOCKS: u8 = b'B';
const TAG_DONE: u8 = b'D';
const TAG_REFUSED: u8 = b'N';

fn tagged(tag: u8, body: Bytes) -> Vec<Bytes> {
    vec![Bytes::copy_from_slice(&[tag]), body]
}

fn json(tag: u8, value: &impl Serialize) -> Vec<Bytes> {
    let mut out = BytesMut::new();
    // Plain values: they can always be written.
    let text = serde_json::to_vec(value).unwrap_or_default();
    out.put_slice(&text);
    tagged(tag, out.freeze())
}

fn read<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, &'static str> {
    serde_json::from_slice(bytes).map_err(|_| "a message that cannot be read")
}

fn split(mut bytes: Bytes) -> Result<(u8, Bytes), &'static str> {
    if bytes.is_empty() {
        return Err("an empty message");
    }
    let tag = bytes.get_u8();
    Ok((tag, bytes))
}

impl FromAsker {
    /// The message in parts, one after the other.
    pub fn encode(&self) -> Vec<Bytes> {
        match self {
            FromAsker::Echo(bytes) => tagged(TAG_ECHO, bytes.clone()),
            FromAsker::Step(step) => json(TAG_STEP, step),
            FromAsker::Sample(bytes) => tagged(TAG_SAMPLE, bytes.clone()),
            FromAsker::Filler(bytes) => tagged(TAG_FILLER, bytes.clone()),
            FromAsker::FillerEnds => tagged(TAG_FILLER_ENDS, Bytes::new()),
        }
    }

    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with bytes that are none.
    pub fn decode(bytes: Bytes) -> Result<FromAsker, &'static str> {
        let (tag, body) = split(bytes)?;
        match tag {
            TAG_ECHO => Ok(FromAsker::Echo(body)),
            TAG_STEP => read(&body).map(FromAsker::Step),
            TAG_SAMPLE => Ok(FromAsker::Sample(body)),
            TAG_FILLER => Ok(FromAsker::Filler(body)),
            TAG_FILLER_ENDS if body.is_empty() => Ok(FromAsker::FillerEnds),
            _ => Err("a message of an unknown kind"),
        }
    }
}

impl FromAsked {
    /// The message in parts, one after the other.
    pub fn encode(&self) -> Vec<Bytes> {
        match self {
            FromAsked::Host(host) => json(TAG_HOST, host),
            FromAsked::Echo(bytes) => tagged(TAG_ECHO, bytes.clone()),
            FromAsked::Filler(bytes) => tagged(TAG_FILLER, bytes.clone()),
            FromAsked::Blocks(bytes) => tagged(TAG_BLOCKS, bytes.clone()),
            FromAsked::Done(done) => json(TAG_DONE, done),
            FromAsked::Refused(why) => json(TAG_REFUSED, why),
        }
    }

    /// Reads a message.
    ///
    /// # Errors
    /// What is wrong with bytes that are none.
    pub fn decode(bytes: Bytes) -> Result<FromAsked, &'static str> {
        let (tag, body) = split(bytes)?;
        match tag {
            TAG_HOST => read(&body).map(FromAsked::Host),
            TAG_ECHO => Ok(FromAsked::Echo(body)),
            TAG_FILLER => Ok(FromAsked::Filler(body)),
            TAG_BLOCKS => Ok(FromAsked::Blocks(body)),
            TAG_DONE => read(&body).map(FromAsked::Done),
            TAG_REFUSED => read(&body).map(FromAsked::Refused),
            _ => Err("a message of an unknown kind"),
        }
    }
}

/// Bytes that nothing on the way can shrink; 1 MiB of them to cut messages from.
pub(super) fn noise() -> Bytes {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut out = BytesMut::with_capacity(1 << 20);
    while out.len() < 1 << 20 {
        // xorshift64: no pattern that a compressor knows, and cheap.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.put_u64_le(state);
    }
    out.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip_and_others_are_refused() {
        let bytes = || Bytes::from_static(b"some");
        for message in [
            FromAsker::Echo(bytes()),
            FromAsker::Step(Step::Send { millis: 7 }),
            FromAsker::Step(Step::Replay { publication: "sales".into(), millis: 7 }),
            FromAsker::Sample(bytes()),
            FromAsker::Filler(bytes()),
            FromAsker::FillerEnds,
        ] {
            let encoded = Bytes::from(message.encode().concat());
            assert_eq!(FromAsker::decode(encoded), Ok(message));
        }
        for message in [
            FromAsked::Host(Host::here()),
            FromAsked::Echo(bytes()),
            FromAsked::Filler(bytes()),
            FromAsked::Blocks(bytes()),
            FromAsked::Done(Done { bytes: 1, ..Done::default() }),
            FromAsked::Refused("because".into()),
        ] {
            let encoded = Bytes::from(message.encode().concat());
            assert_eq!(FromAsked::decode(encoded), Ok(message));
        }
        for wrong in [&b""[..], b"?", b"S{}", b"Xx", b"Snonsense"] {
            assert!(FromAsker::decode(Bytes::from_static(wrong)).is_err(), "{wrong:?}");
        }
        for wrong in [&b""[..], b"?", b"H7", b"D", b"N7"] {
            assert!(FromAsked::decode(Bytes::from_static(wrong)).is_err(), "{wrong:?}");
        }
        assert_eq!(noise().len(), 1 << 20);
    }
}
