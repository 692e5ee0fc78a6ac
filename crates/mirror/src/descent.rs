//! Whether a principal goes on from the log that a far end holds.

use crate::error::MirrorError;
use crate::history::History;
use crate::relay::message::{Have, Tail};
use crate::wal::{SegmentBytes, Timeline};
use farshore_model::Lsn;
use farshore_pg::Connection;
use farshore_pg::replication::{ReplicationStream, StreamMessage};
use std::time::Duration;

/// Looked at before log is asked for: the server's own words for it are those of any wrong position.
/// A server on an older timeline may get there yet, if it is a standby itself, and is asked.
///
/// # Errors
/// [`MirrorError::LeftBefore`] or [`MirrorError::WrongPrincipal`] if the server never had what the far
/// end holds; and what the server says when it is asked.
pub(crate) async fn check(
    connection: &mut Connection,
    timeline: Timeline,
    have: &Have,
    segment: SegmentBytes,
) -> Result<(), MirrorError> {
    let own = Timeline(have.timeline);
    if timeline <= own {
        return Ok(());
    }
    let server = connection.server().to_owned();
    let wrong = |what: String| MirrorError::WrongPrincipal { server: server.clone(), what };
    let text = match connection.timeline_history(timeline.0).await {
        Ok(text) => text,
        // It has lost the file: what it can give is seen when it is asked for it.
        Err(error) if error.sqlstate() == Some("58P01") => return Ok(()),
        Err(error) => return Err(error.into()),
    };
    let history = History::parse(timeline, &text)
        .map_err(|error| wrong(format!("its history of timeline {timeline}: {error}")))?;
    let held = (own, have.durable);
    let Some(what) = departure(&history, timeline, held, segment) else { return Ok(()) };
    Err(match history.left(timeline, own) {
        Some((at, _)) => MirrorError::LeftBefore { server, at, what },
        None => wrong(what),
    })
}

/// How a server on `timeline` parted from log on `own` up to `durable`; `None` if it comes from it.
fn departure(
    history: &History,
    timeline: Timeline,
    (own, durable): (Timeline, Lsn),
    segment: SegmentBytes,
) -> Option<String> {
    // A far end that starts again gives up the part of a record that never ended, and no segment. One of
    // this version does so by itself where that is enough.
    let restart = "If the old principal crashed, restart the far site's node first: the part of a \
                   record that never ended does not count then. Else ";
    let (how, restart) = match history.left(timeline, own) {
        Some((left_at, _)) if left_at >= durable => return None,
        Some((left_at, _)) if left_at >= segment.floor(durable) => {
            (format!("it left timeline {own} at {left_at}"), restart)
        }
        Some((left_at, _)) => (
            format!("it left timeline {own} at {left_at}"),
            "It goes over the end of a segment, so the spool keeps it also when the far site's node \
             is restarted, be it only the part of a record that never ended when the old principal \
             crashed, with which nothing was acknowledged (pg_waldump on the spool's folder tells). \
             Either ",
        ),
        None => {
            (format!("it is on timeline {timeline}, which does not come from {own}"), "Either ")
        }
    };
    Some(format!(
        "{how}, and the mirror's spool holds that one up to {durable}: this server never had that \
         log, and commits in it may have been acknowledged. {restart}promote the mirror's standby instead (farshore mirror promote), or point the mirror to a principal that has it; or give those \
         commits up: stop the far site's node, remove the mirror's spool there, start, and make \
         the standbys anew"
    ))
}

/// How long a principal has to send more of the log that it must have.
const COMPARED_WITHIN: Duration = Duration::from_secs(10);

/// Looks whether a stream that begins with `tail` has it as the far end does, and moves it on to
/// `start`, where the far end's log ends; with what has come of the log behind that. Nothing is
/// answered to the principal before. Positions and histories alone do not tell a server that was set
/// back from the one that it was, nor two that left one timeline at the same position.
///
/// # Errors
/// [`MirrorError::WrongPrincipal`] if it has other log there, [`MirrorError::Behind`] if it has none
/// yet; the stream's.
pub(crate) async fn compare(
    stream: &mut ReplicationStream,
    timeline: Timeline,
    tail: &Tail,
    start: Lsn,
) -> Result<Option<StreamMessage>, MirrorError> {
    let server = stream.server().to_owned();
    let wrong = |what: String| MirrorError::WrongPrincipal { server: server.clone(), what };
    let mut until = tokio::time::Instant::now() + COMPARED_WITHIN;
    let (mut at, mut crc, mut rest) = (tail.start, 0, None);
    while at < start {
        let Ok(message) = tokio::time::timeout_at(until, stream.next()).await else {
            let what = format!(
                "it does not give the log that the far end's spool has already, up to {start}: it is \
                 not there yet, was set back, or is another server than before. Nothing is \
                 acknowledged meanwhile"
            );
            return Err(MirrorError::Behind { server, what });
        };
        let Some(message) = message? else { return Err(MirrorError::Ended { server }) };
        let StreamMessage::XLogData { wal_start, wal_end, send_time, data } = message else {
            continue;
        };
        if wal_start != at {
            return Err(wrong(format!("log came for {wal_start}, and {at} was asked for")));
        }
        let compared = tail.end.bytes_since(at).min(data.len() as u64);
        crc = crc32c::crc32c_append(crc, &data[..compared as usize]);
        at = Lsn(at.0 + data.len() as u64);
        until = tokio::time::Instant::now() + COMPARED_WITHIN;
        if at > start {
            let data = data.slice(start.bytes_since(wal_start) as usize..);
            rest = Some(StreamMessage::XLogData { wal_start: start, wal_end, send_time, data });
        }
    }
    if crc != tail.crc32c {
        return Err(wrong(format!(
            "its log of timeline {timeline} before {} is not what the mirror's spool holds there: it \
             was set back and has written other log since, or it is another server that left the \
             same timeline. Commits in the spool may have been acknowledged. Promote the mirror's \
             standby instead (farshore mirror promote), or point the mirror to a principal that has \
             them; or give those commits up: stop the far site's node, remove the mirror's spool \
             there, start, and make the standbys anew",
            tail.end
        )));
    }
    Ok(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_left_too_early_or_comes_from_elsewhere_is_told_apart() {
        let history = History::parse(Timeline(3), "1\t0/3000148\tx\n2\t0/5000000\tx\n").unwrap();
        let segment = SegmentBytes::new(16 << 20).unwrap();
        let departure =
            |own, durable| departure(&history, Timeline(3), (Timeline(own), durable), segment);
        assert_eq!(departure(1, Lsn(0x300_0148)), None);
        assert_eq!(departure(2, Lsn(0x400_0000)), None);
        let early = departure(1, Lsn(0x300_0149)).unwrap();
        assert!(early.starts_with("it left timeline 1 at 0/3000148"), "{early}");
        assert!(early.contains("restart the far site's node first"), "{early}");
        // What a restart keeps, it does not help against.
        let over = departure(1, Lsn(0x400_0010)).unwrap();
        assert!(over.starts_with("it left timeline 1 at 0/3000148"), "{over}");
        assert!(over.contains("over the end of a segment") && !over.contains("first:"), "{over}");
        let elsewhere = departure(4, Lsn(0x300_0000)).unwrap();
        assert!(elsewhere.contains("does not come from 4"), "{elsewhere}");
    }
}
