//! Which gear is better, and how much log a batch of the far gear should have.
//!
//! Both gears decode the log once. The far one saves the walsender a system call per message, and
//! both sides the waking up; for that it decodes again, with every call, what lies between the
//! slot's restart point and where the batch begins. So it is a matter of how far away that point
//! is, how much log is left, and what the log is made of. All is pure here, and measured in seconds
//! of the publisher's processor: the constants are of one machine, but only what they come to
//! beside each other matters.

/// Small workloads of tests with fault injection meet several batches too.
const UNIT: u64 = if cfg!(feature = "faults") { 16 << 10 } else { 4 << 20 };

/// Log in the first batch, in bytes: a few hundredths of a second of decoding. It tells what the log
/// is made of.
const LOG_FIRST: u64 = UNIT;

/// With less log left, in bytes, no batches are begun: they take two connections and a slot.
const LEFT_MIN: u64 = 2 * UNIT;

/// Most log in a batch, in bytes.
const LOG_MAX: u64 = 64 * UNIT;

/// Bytes of messages that a batch should not be more than: the publisher gathers them, and what is
/// beyond its `work_mem` goes to a temporary file.
const MESSAGE_BYTES_MAX: f64 = (128 << 20) as f64;

/// Bytes of messages per byte of log that a batch is prepared for at least: what comes next may be
/// denser than what came last.
const DENSITY_MIN: f64 = 0.5;

/// Decoding a byte of log once more, in seconds: what was committed before the slot's position is
/// read and passed over.
const AGAIN_BYTE: f64 = 0.45e-9;

/// The same for each message that the log came to.
const AGAIN_MESSAGE: f64 = 0.11e-6;

/// Decoding and giving a message for the first time.
const DECODE_MESSAGE: f64 = 1e-6;

/// The same for each byte of it.
const DECODE_BYTE: f64 = 2e-9;

/// What a message costs more by stream than in a call's answer, on both sides.
const SEND_MESSAGE: f64 = 2.5e-6;

/// The same where a flood of messages gathers at the publisher (`farshore_pg`'s `gather.rs`).
const SEND_MESSAGE_CLOSE: f64 = 1.0e-6;

/// What each byte of it costs more in a call's answer, which is gathered before it is sent.
const GATHER_BYTE: f64 = 1.5e-9;

/// What a call costs besides: questions, snapshots.
const CALL: f64 = if cfg!(feature = "faults") { 0.0 } else { 0.005 };

/// What it costs to leave the stream for batches, and to come back to it.
const SHIFT: f64 = if cfg!(feature = "faults") { 0.0 } else { 0.5 };

/// A call must not take longer than this, in seconds: the publisher keeps a snapshot open for it.
/// (One that is six times slower than these figures can still answer within the call's own limit.)
const CALL_LONG: f64 = 10.0;

/// What a stretch of log came to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Traffic {
    /// Messages per byte of log.
    messages: f64,
    /// Bytes of messages per byte of log.
    bytes: f64,
}

impl Traffic {
    /// Before anything is known: small rows, and no other log.
    pub const ASSUMED: Traffic = Traffic { messages: 1.0 / 160.0, bytes: 0.5 };

    /// What `messages` of together `bytes` bytes out of `log` bytes of log say; nothing if that is
    /// too little to tell.
    pub fn of(log: u64, messages: u64, bytes: u64) -> Option<Traffic> {
        let log = (log >= UNIT).then_some(log as f64)?;
        Some(Traffic { messages: messages as f64 / log, bytes: bytes as f64 / log })
    }

    /// What it costs to decode a byte of log once more, in seconds.
    fn again(self) -> f64 {
        AGAIN_BYTE + self.messages * AGAIN_MESSAGE
    }

    /// What it costs to decode a byte of log for the first time, in seconds.
    fn decode(self) -> f64 {
        AGAIN_BYTE + self.messages * DECODE_MESSAGE + self.bytes * DECODE_BYTE
    }

    /// What a byte of log saves if it comes in a call's answer, in seconds.
    fn saves(self, is_close: bool) -> f64 {
        let send_message = if is_close { SEND_MESSAGE_CLOSE } else { SEND_MESSAGE };
        (self.messages * send_message - self.bytes * GATHER_BYTE).max(0.0)
    }
}

/// Where capture stands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Distance {
    /// Log from the slot's restart point on that is decoded again, in bytes.
    pub again: u64,
    /// Log that is left, in bytes.
    pub left: u64,
    /// The publisher is so close that a flood of messages gathers there.
    pub is_close: bool,
}

/// Log in the next batch, in bytes, after one of `before`; `None` if the stream is better.
pub(super) fn next_batch(traffic: Traffic, distance: Distance, before: Option<u64>) -> Option<u64> {
    plan(traffic, distance, before).map(|(log, _)| log)
}

/// Whether it pays to leave the stream for batches.
pub(super) fn is_worth_a_shift(traffic: Traffic, mut distance: Distance) -> bool {
    if distance.left < 16 * UNIT {
        return false;
    }
    let (mut before, mut gain) = (None, 0.0);
    while let Some((log, saved)) = plan(traffic, distance, before) {
        gain += saved;
        before = Some(log);
        distance.again = distance.again.saturating_add(log);
        distance.left = distance.left.saturating_sub(log.max(UNIT));
    }
    gain > 2.0 * SHIFT
}

/// The next batch's log, and the seconds that it saves beyond what it costs; `None` if it would not.
fn plan(traffic: Traffic, distance: Distance, before: Option<u64>) -> Option<(u64, f64)> {
    let Distance { again, left, is_close } = distance;
    if before.is_none() && left < LEFT_MIN {
        return None;
    }
    let saves = traffic.saves(is_close);
    let costs = again as f64 * traffic.again() + CALL;
    // The first answer must not take long. Then batches grow: half of what is decoded is new, or
    // more where that alone would make the batch save little.
    let grown = before.map_or(LOG_FIRST, |before| 4 * before).max(again);
    let wanted = (4.0 * costs / saves.max(1e-12)) as u64;
    let log = wanted.max(again).min(grown).clamp(LOG_FIRST, LOG_MAX);
    let fits = (MESSAGE_BYTES_MAX / traffic.bytes.max(DENSITY_MIN)) as u64;
    let time_left = CALL_LONG - again as f64 * traffic.again();
    let in_time = (time_left.max(0.0) / traffic.decode()) as u64;
    let log = log.min(fits).min(in_time);
    // A remainder by itself would decode all this again.
    let log = if left <= log + log / 2 { left } else { log };
    let saved = log as f64 * saves - costs;
    (saved > 0.0).then_some((log, saved))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1 << 20;

    /// So many megabytes, of a publisher that is close.
    fn close(again: u64, left: u64) -> Distance {
        Distance { again: again * MB, left: left * MB, is_close: true }
    }

    fn rows_of(bytes: f64) -> Traffic {
        Traffic { messages: 1.0 / (bytes + 80.0), bytes: bytes / (bytes + 80.0) }
    }

    #[test]
    fn what_is_left_goes_in_few_batches() {
        let (mut at, mut before, mut batches) = (0, None, Vec::new());
        let total = 700 * MB;
        while at < total {
            let distance = Distance { again: at, left: total - at, is_close: true };
            let Some(log) = next_batch(Traffic::ASSUMED, distance, before) else { break };
            batches.push(log);
            (at, before) = (at + log, Some(log));
        }
        assert_eq!(batches.iter().sum::<u64>(), total, "{batches:?}");
        assert!(batches[0] <= 8 * MB && batches.len() <= 8, "{batches:?}");
    }

    #[test]
    fn far_from_the_restart_point_or_near_the_end_the_stream_is_better() {
        let next = |again, left| next_batch(Traffic::ASSUMED, close(again, left), None);
        assert_eq!(next(0, 7), None);
        assert!(next_batch(Traffic::ASSUMED, close(0, 7), Some(MB)).is_some());
        assert!(next(0, 40).is_some());
        assert_eq!(next(1_000, 40), None);
        assert!(next(200, 2_000).is_some());
        assert_eq!(next(1_500, 2_000), None);
        let away = Distance { is_close: false, ..close(1_500, 2_000) };
        assert!(next_batch(Traffic::ASSUMED, away, None).is_some());
        assert_eq!(next(100_000, 100_000), None, "a call would take minutes");
    }

    #[test]
    fn large_messages_and_other_log_are_left_to_the_stream() {
        let far = close(10, 1_000);
        assert!(next_batch(rows_of(100.0), far, None).is_some());
        assert_eq!(next_batch(rows_of(2_000.0), far, None), None);
        let sparse = Traffic { messages: 1e-5, bytes: 1e-3 };
        assert_eq!(next_batch(sparse, far, None), None);
    }

    #[test]
    fn a_batch_is_bounded_in_what_the_publisher_gathers() {
        let far = close(100, 100_000);
        let dense = Traffic { messages: 0.01, bytes: 2.0 };
        assert_eq!(next_batch(dense, far, Some(LOG_MAX)), Some(64 * MB));
    }

    #[test]
    fn a_shift_takes_more_than_a_batch_would() {
        let shift = |again, left| is_worth_a_shift(Traffic::ASSUMED, close(again, left));
        assert!(!shift(0, 40));
        assert!(shift(0, 300));
        assert!(shift(400, 600));
        assert!(!shift(10_000, 600));
    }

    #[test]
    fn little_log_says_nothing() {
        assert_eq!(Traffic::of(UNIT - 1, 10, 100), None);
        assert!(Traffic::of(UNIT, 10, 100).is_some());
    }
}
