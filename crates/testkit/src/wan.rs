//! A long line between two networks, without a kernel that can emulate one.
//!
//! [`Wan::start`] makes two network namespaces, near and far, and joins them by a TUN device in
//! each. A thread per direction carries what one device gives to the other, and makes it wait:
//!
//! ```text
//! sender → queue (drops what does not fit) → line (a rate; loses) → way (half the round trip) → receiver
//! ```
//!
//! ```no_run
//! use farshore_testkit::wan::{Wan, WanConfig};
//! use std::time::Duration;
//! # fn main() -> anyhow::Result<()> {
//! if let Err(reason) = Wan::available() {
//!     println!("skipped: across_the_line: {reason}");
//!     return Ok(());
//! }
//! let wan = Wan::start(WanConfig {
//!     rtt: Duration::from_millis(77),
//!     bits_per_second: Some(1_000_000_000),
//!     ..WanConfig::default()
//! })?;
//! wan.far().command("ping").args(["-c1", &wan.near_address().to_string()]).status()?;
//! wan.cut();
//! # Ok(()) }
//! ```
//!
//! # What is true of the line
//!
//! - Nothing arrives before its time, and no direction is faster than its rate. Things arrive late
//!   by what waking a thread takes: about 0.1 ms, more on a busy machine. In a stream the threads
//!   wake every 0.5 ms at most, or every fiftieth of the way if that is less, so that a packet may
//!   be late by twice that each way.
//! - Rates and counters are of bytes on the wire: IP packets of at most 1,500 bytes, headers
//!   included, frames of a link layer not. A TCP stream gets 1448/1500 of the rate.
//! - TCP hands over super-segments of up to 64 KiB where it can, and they travel as one, which
//!   keeps the emulator cheap; they count as the packets that a real line would have carried. On
//!   slow lines and in small queues they are cut so that no piece takes more than 1 ms, and where
//!   packets of one are lost, the others arrive.
//! - A loss is drawn for every packet of at most one MTU; the seed decides. It is lost behind the
//!   queue, so that its time on the line is spent.
//! - Nothing overtakes: jitter delays what is behind as well.
//! - TCP is this machine's: congestion control, buffers and all `net.ipv4` settings are copied
//!   when a namespace is made.
//!
//! # Rights
//!
//! It takes root, or a user namespace of one's own. Without them [`Wan::available`] says so.
//! `/dev/net/tun` must be open to the user, as it is on most machines. The kernel lets only
//! processes with a single thread change their user namespace, so tests cannot do it themselves:
//! `unshare --user --map-current-user --keep-caps cargo test`.

mod device;
mod forwarder;
mod frame;
mod held;
mod line;
mod namespace;

pub use line::Queue;
pub use namespace::{Namespace, gain_rights};

use anyhow::{Context, Result, ensure};
use forwarder::Lane;
use line::Conditions;
use std::fmt;
use std::net::Ipv4Addr;
use std::sync::OnceLock;
use std::time::Duration;

const NEAR_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const FAR_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
/// The addresses of both ends, as `pg_hba.conf` and routes write them.
pub const NETWORK: &str = "10.77.0.0/30";

/// An end of the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Where the publisher usually is.
    Near,
    /// Where the subscriber usually is.
    Far,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Near => "near",
            Side::Far => "far",
        })
    }
}

/// A way across the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// What near sends.
    NearToFar,
    /// What far sends.
    FarToNear,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Direction::NearToFar => "near→far",
            Direction::FarToNear => "far→near",
        })
    }
}

/// What the line is like, in both directions.
#[derive(Debug, Clone, Copy)]
pub struct WanConfig {
    /// Time there and back, without time in queues and on the line. Default: none.
    pub rtt: Duration,
    /// At most this much is added to each way by chance, evenly distributed. Default: none.
    pub jitter: Duration,
    /// Bits on the wire, at least 1. Default: no limit, and so never a queue.
    pub bits_per_second: Option<u64>,
    /// What may wait in front of the line. Default: 100 ms at the rate.
    pub queue: Queue,
    /// Probability that a packet is lost; 0 to 1. Default: 0.
    pub loss: f64,
    /// Decides which packets are lost. Default: 0.
    pub seed: u64,
}

impl Default for WanConfig {
    fn default() -> WanConfig {
        WanConfig {
            rtt: Duration::ZERO,
            jitter: Duration::ZERO,
            bits_per_second: None,
            queue: Queue::default(),
            loss: 0.0,
            seed: 0,
        }
    }
}

/// What went one way since the start. A packet has at most one MTU: a super-segment counts as
/// many.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Flow {
    /// Packets that went onto the line, whatever became of them.
    pub packets: u64,
    /// Their bytes, IP headers included.
    pub bytes: u64,
    /// Those of them that were lost on the line.
    pub lost: u64,
    /// Packets that found the queue full. They never went onto the line.
    pub dropped: u64,
    /// Packets that a cut swallowed: under way when it came, or sent while it lasted.
    pub cut: u64,
    /// Bits that were flipped on request.
    pub flipped_bits: u64,
}

/// Both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// What near sent.
    pub near_to_far: Flow,
    /// What far sent.
    pub far_to_near: Flow,
}

/// Two networks and the line between them. Dropping it ends the line and its devices; a namespace
/// lives on while a process or a clone of its [`Namespace`] is left, with loopback only.
#[derive(Debug)]
pub struct Wan {
    // The lanes hold the devices: they go first.
    near_to_far: Lane,
    far_to_near: Lane,
    near: Namespace,
    far: Namespace,
}

impl Wan {
    /// Whether a line can be had here; else why not, in words for a skipped test. Asked of the
    /// kernel once per process.
    ///
    /// # Errors
    /// The reason.
    pub fn available() -> Result<(), String> {
        static ANSWER: OnceLock<Result<(), String>> = OnceLock::new();
        let ask = || match Namespace::create(Side::Near, NEAR_ADDRESS) {
            Ok(_) => Ok(()),
            Err(error) => Err(format!("no emulated line here: {error:#}")),
        };
        ANSWER.get_or_init(ask).clone()
    }

    /// Makes both networks and joins them.
    ///
    /// # Errors
    /// When a value is out of bounds, or the kernel does not permit it (see [`Wan::available`]).
    pub fn start(config: WanConfig) -> Result<Wan> {
        let WanConfig { rtt, jitter, bits_per_second, queue, loss, seed } = config;
        ensure!((0.0..=1.0).contains(&loss), "a probability of loss is from 0 to 1, not {loss}");
        ensure!(bits_per_second != Some(0), "a rate is at least 1 bit/s; cut() stops everything");
        let (near, near_tun) =
            Namespace::create(Side::Near, NEAR_ADDRESS).context("make the near network")?;
        let (far, far_tun) =
            Namespace::create(Side::Far, FAR_ADDRESS).context("make the far network")?;
        let lane = |direction, from, to| {
            let delay = way(rtt, direction);
            let conditions = Conditions { delay, jitter, bits_per_second, queue, loss };
            Lane::start(direction, from, to, conditions, seed)
        };
        Ok(Wan {
            near_to_far: lane(Direction::NearToFar, near_tun.try_clone()?, far_tun.try_clone()?)?,
            far_to_near: lane(Direction::FarToNear, far_tun, near_tun)?,
            near,
            far,
        })
    }

    /// The near network.
    pub fn near(&self) -> &Namespace {
        &self.near
    }

    /// The far network.
    pub fn far(&self) -> &Namespace {
        &self.far
    }

    /// Near's address on the line.
    pub fn near_address(&self) -> Ipv4Addr {
        self.near.address()
    }

    /// Far's address on the line.
    pub fn far_address(&self) -> Ipv4Addr {
        self.far.address()
    }

    /// What went over the line so far.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            near_to_far: self.near_to_far.state().flow,
            far_to_near: self.far_to_near.state().flow,
        }
    }

    /// CPU time of the emulator so far. The kernel's work for what arrives is in it, as far as
    /// the kernel does it at once: TCP's receiving side, up to waking the receiver.
    pub fn cpu(&self) -> Duration {
        self.near_to_far.state().cpu + self.far_to_near.state().cpu
    }

    /// Swallows everything in both directions, what is under way included, and tells nobody: no
    /// reset, no unreachable host. Nothing arrives any more when this returns.
    pub fn cut(&self) {
        self.cut_direction(Direction::NearToFar);
        self.cut_direction(Direction::FarToNear);
    }

    /// As [`Wan::cut`], in one direction.
    pub fn cut_direction(&self, direction: Direction) {
        let mut state = self.lane(direction).state();
        state.is_cut = true;
        state.cuts += 1;
    }

    /// Ends a cut, in both directions.
    pub fn restore(&self) {
        for lane in self.lanes() {
            lane.state().is_cut = false;
        }
    }

    /// Changes the rate, for what comes from now on; `None`: no limit.
    ///
    /// # Panics
    /// When the rate is 0.
    pub fn set_rate(&self, bits_per_second: Option<u64>) {
        assert_ne!(bits_per_second, Some(0), "a rate is at least 1 bit/s; cut() stops everything");
        for lane in self.lanes() {
            lane.state().conditions.bits_per_second = bits_per_second;
        }
    }

    /// Changes the time there and back, for what comes from now on.
    pub fn set_delay(&self, rtt: Duration) {
        for direction in [Direction::NearToFar, Direction::FarToNear] {
            self.lane(direction).state().conditions.delay = way(rtt, direction);
        }
    }

    /// Changes the probability that a packet is lost.
    ///
    /// # Panics
    /// When it is not from 0 to 1.
    pub fn set_loss(&self, loss: f64) {
        assert!((0.0..=1.0).contains(&loss), "a probability of loss is from 0 to 1, not {loss}");
        for lane in self.lanes() {
            lane.state().conditions.loss = loss;
        }
    }

    /// Flips one bit of the next TCP payload that arrives this way, and mends TCP's checksum, as
    /// if a device on the way had damaged the data in its memory. Each call is good for one bit.
    /// (In a packet that was sent twice, the receiver may not look at it.)
    pub fn flip_next_bit(&self, direction: Direction) {
        self.lane(direction).state().flips += 1;
    }

    fn lane(&self, direction: Direction) -> &Lane {
        match direction {
            Direction::NearToFar => &self.near_to_far,
            Direction::FarToNear => &self.far_to_near,
        }
    }

    fn lanes(&self) -> [&Lane; 2] {
        [&self.near_to_far, &self.far_to_near]
    }
}

/// One direction's share of the time there and back: half, and to the nanosecond both together.
fn way(rtt: Duration, direction: Direction) -> Duration {
    let half = rtt / 2;
    match direction {
        Direction::NearToFar => half,
        Direction::FarToNear => rtt - half,
    }
}
