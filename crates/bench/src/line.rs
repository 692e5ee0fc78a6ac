//! The emulated line between publisher and subscriber, where they are far from each other.

use anyhow::{Context, Result};
use farshore_testkit::wan::{Namespace, Side, Traffic, Wan, WanConfig};
use serde_json::{Value, json};
use std::time::Duration;

/// Socket limits of both ends, as the kernel has them where nobody has changed them: minimum,
/// beginning, maximum. The machine's own may be others.
const BUFFERS: [(&str, &str); 2] =
    [("ipv4.tcp_rmem", "4096 131072 6291456"), ("ipv4.tcp_wmem", "4096 16384 4194304")];

/// What the line is like while something is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conditions {
    /// Time there and back.
    pub rtt: Duration,
    /// On the wire, each way.
    pub bits_per_second: u64,
}

impl Conditions {
    /// A line of so many milliseconds and Mbit/s.
    pub const fn new(rtt_ms: u64, mbit_per_s: u64) -> Conditions {
        Conditions { rtt: Duration::from_millis(rtt_ms), bits_per_second: mbit_per_s * 1_000_000 }
    }

    /// The same line without its length.
    pub fn at_hand(self) -> Conditions {
        Conditions { rtt: Duration::ZERO, ..self }
    }
}

/// Two networks and the line between them.
#[derive(Debug)]
pub struct Line {
    wan: Wan,
    congestion_control: String,
}

impl Line {
    /// A line that is short and wide until [`Line::set`] says otherwise.
    ///
    /// # Errors
    /// When the kernel does not permit it; says why, and what to do.
    pub fn start() -> Result<Line> {
        Wan::available().map_err(anyhow::Error::msg)?;
        let wan = Wan::start(WanConfig::default())?;
        for place in [wan.near(), wan.far()] {
            for (name, value) in BUFFERS {
                place.sysctl(name, value)?;
            }
            // What one contender's connections have learned is of no use to the other's.
            place.sysctl("ipv4.tcp_no_metrics_save", "1")?;
        }
        let path = "/proc/sys/net/ipv4/tcp_congestion_control";
        let control = wan.far().enter(|| std::fs::read_to_string(path))?;
        let control = control.context("learn the congestion control")?;
        Ok(Line { wan, congestion_control: control.trim().to_owned() })
    }

    /// The network at one end.
    pub fn end(&self, side: Side) -> &Namespace {
        match side {
            Side::Near => self.wan.near(),
            Side::Far => self.wan.far(),
        }
    }

    /// Makes it what it is to be; `None`: short and wide, for what is not measured.
    pub fn set(&self, conditions: Option<Conditions>) {
        self.wan.set_delay(conditions.map_or(Duration::ZERO, |line| line.rtt));
        self.wan.set_rate(conditions.map(|line| line.bits_per_second));
    }

    /// What went over it so far.
    pub fn traffic(&self) -> Traffic {
        self.wan.traffic()
    }

    /// CPU seconds of the emulator so far.
    pub fn cpu_seconds(&self) -> f64 {
        self.wan.cpu().as_secs_f64()
    }

    /// What the figures depend on.
    pub fn settings(&self, conditions: Conditions) -> Vec<(&'static str, Value)> {
        let [(_, rmem), (_, wmem)] = BUFFERS;
        vec![
            ("rtt_ms", json!(conditions.rtt.as_millis() as u64)),
            ("mbit_per_s", json!(conditions.bits_per_second / 1_000_000)),
            ("loss", json!(0)),
            ("queue", json!("100 ms")),
            ("congestion_control", json!(self.congestion_control)),
            ("tcp_rmem", json!(rmem)),
            ("tcp_wmem", json!(wmem)),
        ]
    }
}
