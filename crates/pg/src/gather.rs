//! Leaving a flood of messages to gather, at both ends of the connection.
//!
//! A walsender sends each message by itself. While the receive window is open, each becomes a
//! segment: it goes through the whole of both kernels by itself, on the walsender's processor, and
//! that costs several times what the walsender needs to decode it. While the window is closed, what
//! is sent is appended to what waits in the sender's buffer, and goes in full segments once the
//! window opens. So a close publisher (whose next window is here as soon as it is asked for) gets a
//! small window, and when messages of up to 2 KB come in a flood, nothing is read for longer than it
//! takes to fill it. `docs/decisions/0049-a-flood-gathers-at-the-sender.md` has the figures.

use crate::short_timer::ShortTimer;
use crate::socket::{Arrived, Socket, UnixSocket};
use std::time::Duration;
use tokio::time::Instant;

/// Receive buffer of a small window, as asked of the kernel, which doubles it (socket(7)). By
/// kernel and interface the window comes to 20 to 64 KB.
const WINDOW_BUFFER_BYTES: usize = 32 << 10;

/// Largest MSS on a connection that may come to have a small window, in bytes. Against silly windows
/// the kernel opens none before a full segment fits. On the loopback interface that would be as large
/// as the small window, which was then opened by the sender's persist timer only, five times a
/// second.
pub(crate) const SEGMENT_BYTES_MAX: u32 = 16 << 10;

/// Up to this round trip a small window lets 40 MB/s through at least, which is enough for small
/// messages.
const ROUND_TRIP_MAX: Duration = Duration::from_micros(500);

/// The same for 200 MB/s, which is enough for any that are worth gathering.
const ROUND_TRIP_MAX_LARGER: Duration = Duration::from_micros(100);

/// So many bytes are read as soon as they are there. It has to be less than any small window.
const ENOUGH_BYTES: usize = WINDOW_BUFFER_BYTES / 2;

/// The same without a small window. More would have the kernel keep a larger buffer.
const ENOUGH_BYTES_WIDE: usize = 128 << 10;

/// For how long messages are left to gather before anything is known of them, at most.
const PAUSE: Duration = Duration::from_millis(1);

/// For how long more if each came by itself, at most. A walsender that sends
/// 20 MB/s needs 2 to 3 ms to fill the window.
const PAUSE_MORE: Duration = Duration::from_millis(4);

/// That pause ends earlier when, at the speed of before, so many bytes have come: a sender's buffer
/// may hold no more.
const GATHERED_BYTES: f64 = (160 << 10) as f64;

/// A stream of less than this never fills a window, in bytes per [`PAUSE`].
const FLOOD_BYTES: usize = 8 << 10;

/// Segments that are smaller on average, in bytes, hold a small message each.
const SMALL_BYTES: u64 = 512;

/// Segments that are smaller on average, in bytes, hold a message or two that is worth gathering;
/// if they are not half full already, which those of an Ethernet are.
const LARGER_BYTES: u64 = 2 << 10;

/// Fewer segments say nothing.
const SEGMENTS_MIN: u64 = 16;

/// For how long messages are left to gather on a Unix socket, which is full with some 90 of 1 KB, or
/// 280 small ones (the sender's buffer counts what the kernel keeps beside each, and only the sender
/// could ask for more): a walsender on a quick processor needs as long for so many.
const PAUSE_UNIX: Duration = Duration::from_micros(200);

/// One connection's way to gather.
#[derive(Debug, Default)]
pub(crate) struct Gather {
    /// Whether the connection has a small window; `None` if none was asked for yet.
    small_window: Option<bool>,
    /// For a Unix socket.
    timer: Option<ShortTimer>,
}

impl Gather {
    /// Returns when messages have gathered in the socket: after a millisecond or less, or after five
    /// in a flood of messages that each came by itself. Cancel-safe.
    pub(crate) async fn wait(&mut self, socket: &mut Socket) {
        if let Socket::Unix(socket) = socket {
            return self.wait_unwatched(socket).await;
        }
        let (began, before) = (Instant::now(), socket.arrived());
        let small = self.small_window == Some(true);
        // To the end: while it is there, nobody is woken for each segment.
        let quiet = Quiet::new(socket, if small { ENOUGH_BYTES } else { ENOUGH_BYTES_WIDE });
        quiet.until_enough(PAUSE).await;
        if socket.unread_bytes() < FLOOD_BYTES {
            return;
        }
        let (Some(before), Some(after)) = (before, socket.arrived()) else { return };
        // What had gathered at the sender comes in full segments, and there may be more of it.
        let Some((bytes, round_trip_max)) = single_messages(before, after) else { return };
        if after.round_trip > round_trip_max || after.segment_max > SEGMENT_BYTES_MAX {
            return;
        }
        let set_small = || socket.set_receive_buffer(WINDOW_BUFFER_BYTES);
        if *self.small_window.get_or_insert_with(set_small) {
            let until_gathered = began.elapsed().mul_f64(GATHERED_BYTES / bytes as f64);
            tokio::time::sleep(until_gathered.min(PAUSE_MORE)).await;
        }
    }

    async fn wait_unwatched(&mut self, socket: &mut UnixSocket) {
        socket.leave_alone();
        if self.timer.is_none() {
            self.timer = ShortTimer::new().ok();
        }
        let slept = match &self.timer {
            Some(timer) => timer.sleep(PAUSE_UNIX).await.is_ok(),
            None => false,
        };
        if !slept {
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Whether the peer is so close that a small window holds nothing up.
pub(crate) fn is_close(socket: &Socket) -> bool {
    socket.arrived().is_some_and(|arrived| arrived.round_trip <= ROUND_TRIP_MAX)
}

/// Returns after `patience`, or once so many bytes are here, or as many as the socket takes; meanwhile
/// nobody is woken. At once where the kernel does not do that: a socket that fills up meanwhile would
/// hold the peer up. Cancel-safe.
pub(crate) async fn wait_for(bytes: usize, socket: &Socket, patience: Duration) {
    let mut quiet = Quiet::new(socket, bytes);
    if let Some(kept) = quiet.enough {
        // A window that fills up has the kernel wake us earlier.
        quiet.enough = Some(if kept < bytes { kept / 2 } else { bytes });
        quiet.until_enough(patience).await;
    }
}

/// If what came from one look to the next came message by message: how many bytes, and up to which
/// round trip a small window is enough for such messages.
fn single_messages(before: Arrived, after: Arrived) -> Option<(u64, Duration)> {
    let segments = u64::from(after.segments.wrapping_sub(before.segments));
    let bytes = after.bytes.saturating_sub(before.bytes);
    if bytes == 0 || segments < SEGMENTS_MIN {
        return None;
    }
    let mean = bytes / segments;
    if mean < SMALL_BYTES {
        Some((bytes, ROUND_TRIP_MAX))
    } else if mean < LARGER_BYTES.min(u64::from(after.segment_max / 2)) {
        Some((bytes, ROUND_TRIP_MAX_LARGER))
    } else {
        None
    }
}

/// While this is there, the kernel wakes nobody for fewer bytes than are enough.
struct Quiet<'a> {
    socket: &'a Socket,
    /// `None` where the kernel does not do that: then nobody may wait for it.
    enough: Option<usize>,
}

impl<'a> Quiet<'a> {
    fn new(socket: &'a Socket, enough: usize) -> Quiet<'a> {
        Quiet { socket, enough: socket.wake_at(enough) }
    }

    async fn until_enough(&self, patience: Duration) {
        match self.enough {
            Some(enough) => {
                let until_unread = self.socket.until_unread(enough);
                let _in_time_or_not = tokio::time::timeout(patience, until_unread).await;
            }
            None => tokio::time::sleep(patience).await,
        }
    }
}

impl Drop for Quiet<'_> {
    fn drop(&mut self) {
        self.socket.wake_at(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Keepalive;
    use crate::socket::connect_tcp;
    use bytes::{Buf, BytesMut};
    use std::io::Write;
    use std::sync::mpsc::{self, Receiver};
    use tokio::io::AsyncReadExt;

    /// Sends `messages` numbered messages of `length` bytes, each by itself, and one more when it is
    /// told that they have been read.
    fn send(mut stream: impl Write, messages: u32, length: usize, until_all_read: &Receiver<()>) {
        let mut message = vec![0; length];
        for number in 0..=messages {
            if number == messages {
                until_all_read.recv().unwrap();
            }
            message[..size_of::<u32>()].copy_from_slice(&number.to_be_bytes());
            stream.write_all(&message).unwrap();
        }
    }

    /// Connects to such a sender.
    async fn sender(messages: u32, length: usize) -> (Socket, mpsc::Sender<()>) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (all_read, until_all_read) = mpsc::channel();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            send(stream, messages, length, &until_all_read);
        });
        let connected = connect_tcp(address, Keepalive::default(), Some(SEGMENT_BYTES_MAX)).await;
        (Socket::Tcp(connected.unwrap()), all_read)
    }

    /// The same on a Unix socket.
    async fn sender_by_unix(messages: u32, length: usize) -> (Socket, mpsc::Sender<()>) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let (all_read, until_all_read) = mpsc::channel();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            send(stream, messages, length, &until_all_read);
        });
        (Socket::Unix(UnixSocket::connect(&path).await.unwrap()), all_read)
    }

    /// Reads such messages up to the stream's end, gathering before every read; gives up gathering
    /// after `patience`, if there is one. The last comes while it gathers, or after.
    async fn read_all(
        sender: (Socket, mpsc::Sender<()>),
        (messages, length): (u32, usize),
        patience: Option<Duration>,
    ) {
        let mut gather = Gather::default();
        let wait = async |socket: &mut Socket| match patience {
            None => gather.wait(socket).await,
            Some(patience) => drop(tokio::time::timeout(patience, gather.wait(socket)).await),
        };
        read_after(wait, sender, (messages, length)).await;
    }

    /// Reads such messages up to the stream's end, and waits before every read.
    async fn read_after(
        mut wait: impl AsyncFnMut(&mut Socket),
        (mut socket, all_read): (Socket, mpsc::Sender<()>),
        (messages, length): (u32, usize),
    ) {
        let (mut bytes, mut expected) = (BytesMut::new(), 0_u32);
        loop {
            wait(&mut socket).await;
            bytes.reserve(64 << 10);
            if socket.read_buf(&mut bytes).await.unwrap() == 0 {
                assert!(bytes.is_empty());
                assert_eq!(expected, messages + 1);
                return;
            }
            while bytes.len() >= length {
                assert_eq!(bytes.split_to(length).get_u32(), expected);
                expected += 1;
                if expected == messages {
                    all_read.send(()).unwrap();
                }
            }
        }
    }

    /// A wake-up that is lost shows as a reader that waits for ever.
    async fn in_time(work: impl Future<Output = ()>) {
        let ended = tokio::time::timeout(Duration::from_secs(60), work).await;
        ended.expect("what had come was never heard of");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_flood_arrives_whole_and_its_last_message_is_heard_of() {
        for (messages, length) in [(100_000, 100), (20_000, 1_100), (20, 1 << 20)] {
            let by_tcp = sender(messages, length).await;
            in_time(read_all(by_tcp, (messages, length), None)).await;
            let by_unix = sender_by_unix(messages, length).await;
            in_time(read_all(by_unix, (messages, length), None)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn gathering_may_be_given_up_at_any_moment() {
        for patience in [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(3)] {
            let (by_tcp, by_unix) = (sender(50_000, 100).await, sender_by_unix(50_000, 100).await);
            in_time(read_all(by_tcp, (50_000, 100), Some(patience))).await;
            in_time(read_all(by_unix, (50_000, 100), Some(patience))).await;
        }
    }

    /// Also where the socket never has room for so many.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_left_in_the_socket_for_a_while_is_heard_of() {
        let wait = async |socket: &mut Socket| {
            wait_for(256 << 10, socket, Duration::from_millis(20)).await;
        };
        for (messages, length) in [(20_000, 1_100), (40, 1 << 20)] {
            for small in [false, true] {
                let (socket, all_read) = sender(messages, length).await;
                assert!(!small || socket.set_receive_buffer(WINDOW_BUFFER_BYTES));
                in_time(read_after(wait, (socket, all_read), (messages, length))).await;
            }
        }
    }

    #[test]
    fn single_messages_are_told_by_enough_segments() {
        let arrived = |bytes, segments| Arrived {
            bytes,
            segments,
            round_trip: Duration::ZERO,
            segment_max: SEGMENT_BYTES_MAX,
        };
        // The counter wraps.
        let before = arrived(1_000, u32::MAX);
        let told = |bytes, segments| single_messages(before, arrived(bytes, segments));
        assert_eq!(told(11_000, 99), Some((10_000, ROUND_TRIP_MAX)));
        assert_eq!(told(101_000, 99), Some((100_000, ROUND_TRIP_MAX_LARGER)));
        assert_eq!(told(301_000, 99), None);
        let ethernet = Arrived { segment_max: 1_448, ..arrived(101_000, 99) };
        assert_eq!(single_messages(before, ethernet), None, "those are full");
        assert_eq!(told(1_100, 1), None);
        assert_eq!(single_messages(before, before), None);
    }
}
