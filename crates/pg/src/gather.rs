//! Leaving a flood of messages to gather, at both ends of the connection.
//!
//! A walsender sends each message by itself. While the receiver's window is open, each becomes a
//! packet: it goes through the whole of both kernels by itself, on the walsender's processor, and
//! that costs several times what the walsender needs to decode it. While the window is closed, what
//! is sent is appended to what waits, and goes in large packets once the window opens. So a close
//! publisher (whose next window is here as soon as it is asked for) gets a small window, and when
//! small messages come in a flood, nothing is read for longer than it takes to close it.

use crate::socket::Socket;
use std::time::Duration;

/// Receive buffer of a small window, as asked of the kernel, which doubles it (socket(7)). The
/// window comes to 40 to 64 KB.
const WINDOW_BUFFER_BYTES: usize = 32 << 10;

/// Largest packet on a connection that may come to have a small window, in bytes. The kernel keeps a
/// window closed until a packet of the largest size fits, and on the loopback interface that would be
/// as large as the window: it would open by the sender's timer only, five times a second.
pub(crate) const SEGMENT_BYTES_MAX: u32 = 16 << 10;

/// Up to this round trip a small window lets 80 MB/s through at least.
const ROUND_TRIP_MAX: Duration = Duration::from_micros(500);

/// So many bytes are read as soon as they are there. The kernel wakes nobody for fewer, if they are
/// not more than half of the buffer.
const ENOUGH_BYTES: usize = WINDOW_BUFFER_BYTES;

/// The same without a small window. More would have the kernel keep a larger buffer.
const ENOUGH_BYTES_WIDE: usize = 128 << 10;

/// For how long messages are left to gather, at least.
const PAUSE: Duration = Duration::from_millis(1);

/// For how long more if they are small and each came by itself. A walsender that sends 20 MB/s needs
/// 2 to 3 ms to close the window.
const PAUSE_MORE: Duration = Duration::from_millis(4);

/// Of less than this nobody closes a window, in bytes per [`PAUSE`].
const FLOOD_BYTES: usize = 8 << 10;

/// Packets that are smaller on average, in bytes, hold a message each.
const SMALL_BYTES: u64 = 512;

/// What the kernel knows of what came on a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived {
    /// Bytes, without headers.
    pub bytes: u64,
    /// Packets that held some, as they were on the wire. Wraps.
    pub packets: u32,
    /// The shortest round trip that was seen.
    pub round_trip: Duration,
}

impl Arrived {
    /// Bytes per packet since `before`; `None` if there was no packet.
    fn packet_bytes(self, before: Arrived) -> Option<u64> {
        let packets = u64::from(self.packets.wrapping_sub(before.packets));
        self.bytes.saturating_sub(before.bytes).checked_div(packets)
    }
}

/// One connection's way to gather.
#[derive(Debug, Default)]
pub(crate) struct Gather {
    /// Whether the connection has a small window; `None` if that was not decided yet.
    small_window: Option<bool>,
}

impl Gather {
    /// Returns when messages have gathered in the socket, or for lack of them after a millisecond.
    /// Cancel-safe.
    pub(crate) async fn wait(&mut self, socket: &Socket) {
        let before = socket.arrived();
        let enough = if self.small_window == Some(true) { ENOUGH_BYTES } else { ENOUGH_BYTES_WIDE };
        let quiet = Quiet::until(socket, enough);
        let _enough_or_not = tokio::time::timeout(PAUSE, quiet.wait()).await;
        if socket.waiting() < FLOOD_BYTES {
            return;
        }
        let (Some(before), Some(after)) = (before, socket.arrived()) else { return };
        // What waited at the sender comes in large packets, and there may be more of it.
        if after.packet_bytes(before).is_none_or(|bytes| bytes >= SMALL_BYTES) {
            return;
        }
        let small_window = *self.small_window.get_or_insert_with(|| {
            after.round_trip <= ROUND_TRIP_MAX && socket.set_receive_buffer(WINDOW_BUFFER_BYTES)
        });
        if small_window {
            tokio::time::sleep(PAUSE_MORE).await;
        }
    }
}

/// While this is there, the kernel wakes nobody for a few bytes.
struct Quiet<'a> {
    socket: &'a Socket,
    enough: usize,
}

impl<'a> Quiet<'a> {
    fn until(socket: &'a Socket, enough: usize) -> Quiet<'a> {
        socket.wake_at(enough);
        Quiet { socket, enough }
    }

    async fn wait(&self) {
        self.socket.wait_for(self.enough).await;
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
    use tokio::io::AsyncReadExt;

    /// Connects to a sender that sends `messages` numbered messages of `length` bytes, each by
    /// itself, and after a while one more.
    async fn sender(messages: u32, length: usize) -> Socket {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            let mut message = vec![0; length];
            for number in 0..=messages {
                if number == messages {
                    // The reader has read all that was sent, and waits.
                    std::thread::sleep(Duration::from_millis(50));
                }
                message[..size_of::<u32>()].copy_from_slice(&number.to_be_bytes());
                stream.write_all(&message).unwrap();
            }
        });
        let connected = connect_tcp(address, Keepalive::default(), Some(SEGMENT_BYTES_MAX)).await;
        Socket::Tcp(connected.unwrap())
    }

    /// Reads numbered messages up to the stream's end, gathering before every read; gives up
    /// gathering after `patience`, if there is one.
    async fn read_all(socket: &mut Socket, length: usize, patience: Option<Duration>) -> u32 {
        let mut gather = Gather::default();
        let (mut bytes, mut expected) = (BytesMut::new(), 0_u32);
        loop {
            match patience {
                None => gather.wait(socket).await,
                Some(patience) => drop(tokio::time::timeout(patience, gather.wait(socket)).await),
            }
            bytes.reserve(64 << 10);
            if socket.read_buf(&mut bytes).await.unwrap() == 0 {
                assert!(bytes.is_empty());
                return expected;
            }
            while bytes.len() >= length {
                assert_eq!(bytes.split_to(length).get_u32(), expected);
                expected += 1;
            }
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_flood_arrives_whole_and_its_last_message_is_heard_of() {
        for (messages, length) in [(100_000, 100), (20_000, 1_100), (20, 1 << 20)] {
            let mut socket = sender(messages, length).await;
            assert_eq!(read_all(&mut socket, length, None).await, messages + 1);
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn gathering_may_be_given_up_at_any_moment() {
        for patience in [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(3)] {
            let mut socket = sender(50_000, 100).await;
            assert_eq!(read_all(&mut socket, 100, Some(patience)).await, 50_001);
        }
    }

    #[test]
    fn packets_are_counted_across_the_counters_end() {
        let arrived = |bytes, packets| Arrived { bytes, packets, round_trip: Duration::ZERO };
        let before = arrived(1_000, u32::MAX - 1);
        assert_eq!(arrived(1_300, 1).packet_bytes(before), Some(100));
        assert_eq!(before.packet_bytes(before), None);
    }
}
