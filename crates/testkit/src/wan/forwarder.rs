//! The thread that carries one direction: takes frames from one device, and hands each to the
//! other when it is due.

use super::frame::{FRAME_BYTES_MAX, Shape, flip_bit};
use super::held::Held;
use super::line::{Conditions, Line, nanos};
use super::{Direction, Flow};
use anyhow::{Context, Result};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Frames taken or handed over before the other gets its turn.
const BATCH: usize = 64;
/// With more frames than this under way, the thread need not wake for each of them.
const STREAM_FRAMES: usize = 8;
/// In a stream the thread sleeps this long after it woke, as network cards do: waking costs more
/// than handing over.
const REST: Duration = Duration::from_micros(500);
/// But no longer than this share of the way.
const RESTS_PER_WAY: u32 = 50;
/// The forwarder stands for hardware, which is not late because the servers are busy.
const NICENESS: libc::c_int = -15;

/// What tests change and read while the direction runs. The thread holds the lock while it takes
/// and hands over frames, so a change holds from the moment its call returns.
#[derive(Debug)]
pub(super) struct State {
    pub(super) conditions: Conditions,
    /// Nothing passes.
    pub(super) is_cut: bool,
    /// How often it was cut: what was under way then is lost, even if the line is whole again.
    pub(super) cuts: u64,
    /// Bits still to be flipped.
    pub(super) flips: u32,
    pub(super) flow: Flow,
    /// CPU time of the thread.
    pub(super) cpu: Duration,
}

/// One direction that runs. Dropping it ends its thread.
#[derive(Debug)]
pub(super) struct Lane {
    state: Arc<Mutex<State>>,
    // The thread sees the other end hang up.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl Lane {
    pub(super) fn start(
        direction: Direction,
        from: File,
        to: File,
        conditions: Conditions,
        seed: u64,
    ) -> Result<Lane> {
        let state = Arc::new(Mutex::new(State {
            conditions,
            is_cut: false,
            cuts: 0,
            flips: 0,
            flow: Flow::default(),
            cpu: Duration::ZERO,
        }));
        let (stop, stopped) = UnixStream::pair().context("make a pair of sockets")?;
        // Each direction has chances of its own.
        let seed = seed.wrapping_mul(4).wrapping_add(2 * direction as u64);
        let forwarder = Forwarder {
            from,
            to,
            stopped,
            state: state.clone(),
            clock: Instant::now(),
            line: Line::default(),
            held: Held::new(),
            cuts_seen: 0,
            losses: StdRng::seed_from_u64(seed),
            other_chances: StdRng::seed_from_u64(seed + 1),
            uncut: vec![0; FRAME_BYTES_MAX],
            fates: Vec::new(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("wan-{direction}"))
            .spawn(move || forwarder.run())
            .context("start a thread")?;
        Ok(Lane { state, stop: Some(stop), thread: Some(thread) })
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Forwarder {
    from: File,
    to: File,
    stopped: UnixStream,
    state: Arc<Mutex<State>>,
    /// All times are counted from here.
    clock: Instant,
    line: Line,
    held: Held,
    cuts_seen: u64,
    /// Drawn from once per packet and for nothing else, so that a seed loses the same packets
    /// whatever else chance decides.
    losses: StdRng,
    other_chances: StdRng,
    /// A super-segment whose pieces go different ways.
    uncut: Vec<u8>,
    /// Which packets of a frame are lost.
    fates: Vec<bool>,
}

enum Event {
    Stopped,
    /// Frames are to be taken, or a frame is due, or both.
    Work {
        is_readable: bool,
    },
}

impl Forwarder {
    fn run(mut self) {
        be_punctual();
        if let Err(error) = self.carry() {
            eprintln!("the emulated line is dead: {error:#}");
        }
    }

    fn carry(&mut self) -> Result<()> {
        let shared = self.state.clone();
        while let Event::Work { is_readable } = self.wait()? {
            let woken = Instant::now();
            let mut state = shared.lock().unwrap_or_else(PoisonError::into_inner);
            if self.cuts_seen != state.cuts {
                self.cuts_seen = state.cuts;
                state.flow.cut += self.held.clear();
            }
            if is_readable {
                self.take(&mut state)?;
            }
            self.hand_over(&mut state);
            state.cpu = cpu_of_this_thread();
            let rest = REST.min(state.conditions.delay / RESTS_PER_WAY);
            drop(state);
            if self.held.len() > STREAM_FRAMES {
                std::thread::sleep(rest.saturating_sub(woken.elapsed()));
            }
        }
        Ok(())
    }

    fn now(&self) -> u64 {
        nanos(self.clock.elapsed())
    }

    /// Sleeps until there is something to do.
    fn wait(&self) -> Result<Event> {
        let poll = |fd: &dyn AsRawFd| libc::pollfd {
            fd: fd.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let mut polls = [poll(&self.from), poll(&self.stopped)];
        let timeout = self.held.due().map(|due| {
            let left = Duration::from_nanos(due.saturating_sub(self.now()));
            libc::timespec {
                tv_sec: left.as_secs() as libc::time_t,
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        let timeout = timeout.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the array is alive and of the length given; the timeout is null or a live local;
        // a null mask leaves signals as they are.
        let count = unsafe {
            libc::ppoll(polls.as_mut_ptr(), polls.len() as libc::nfds_t, timeout, std::ptr::null())
        };
        if count < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error).context("poll the TUN device");
            }
            return Ok(Event::Work { is_readable: false });
        }
        let [from, stopped] = polls;
        if stopped.revents != 0 {
            return Ok(Event::Stopped);
        }
        Ok(Event::Work { is_readable: from.revents != 0 })
    }

    fn take(&mut self, state: &mut State) -> Result<()> {
        for _ in 0..BATCH {
            let room = self.held.room();
            let len = match self.from.read(room) {
                Ok(len) => len,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error).context("read from the TUN device"),
            };
            let shape = Shape::of(&room[..len]);
            let packets = shape.packets();
            if state.is_cut {
                state.flow.cut += packets as u64;
            } else if self.held.is_full() {
                state.flow.dropped += packets as u64;
            } else {
                self.send(len, shape, state);
            }
        }
        Ok(())
    }

    /// Sends the frame that lies in the room, whole or in pieces.
    fn send(&mut self, len: usize, shape: Shape, state: &mut State) {
        let packets = shape.packets();
        let together = state.conditions.packets_together();
        self.fates.clear();
        for _ in 0..packets {
            let loss = state.conditions.loss;
            self.fates.push(loss > 0.0 && self.losses.random_bool(loss));
        }
        let is_whole = packets <= together && self.fates.iter().all(|fate| *fate == self.fates[0]);
        if is_whole {
            let is_lost = self.fates[0];
            if let Some(due) = self.admit(&shape, &(0..packets), is_lost, state)
                && !is_lost
            {
                self.held.push(len, due, packets);
            }
            return;
        }
        self.uncut[..len].copy_from_slice(&self.held.room()[..len]);
        let mut from = 0;
        while from < packets {
            let is_lost = self.fates[from];
            let fates = self.fates[from..].iter().take(together);
            let to = from + fates.take_while(|fate| **fate == is_lost).count();
            let piece = from..to;
            if let Some(due) = self.admit(&shape, &piece, is_lost, state)
                && !is_lost
            {
                let len = shape.cut_out(&self.uncut[..len], &piece, self.held.room());
                self.held.push(len, due, piece.len());
            }
            from = to;
        }
    }

    /// When these packets of a frame arrive; `None` when the queue has no room for them. What is
    /// lost is lost behind the queue, so it takes its time on the line.
    fn admit(
        &mut self,
        shape: &Shape,
        packets: &Range<usize>,
        is_lost: bool,
        state: &mut State,
    ) -> Option<u64> {
        let jitter = match nanos(state.conditions.jitter) {
            0 => 0,
            most => self.other_chances.random_range(0..=most),
        };
        let (bytes, count) = (shape.wire_bytes(packets), packets.len() as u64);
        let due = self.line.admit(self.now(), bytes, &state.conditions, jitter);
        if due.is_none() {
            state.flow.dropped += count;
            return None;
        }
        state.flow.packets += count;
        state.flow.bytes += bytes;
        state.flow.lost += if is_lost { count } else { 0 };
        due
    }

    /// Hands over what is due.
    fn hand_over(&mut self, state: &mut State) {
        for _ in 0..BATCH {
            if self.held.due().is_none_or(|due| due > self.now()) {
                break;
            }
            let Some((frame, packets)) = self.held.first() else { break };
            if state.flips > 0 && flip_bit(frame, &mut self.other_chances) {
                state.flips -= 1;
                state.flow.flipped_bits += 1;
            }
            // Refused by a device that was brought down, or for want of memory: lost, as TCP sees
            // it.
            if (&self.to).write(frame).is_err() {
                state.flow.lost += packets as u64;
            }
            self.held.pop();
        }
    }
}

/// Wakes the calling thread when it asked to be woken, if the process may. Without the right to
/// it, frames are late by what the machine's load makes them late.
fn be_punctual() {
    // The default lets the kernel wake a thread 50 µs late.
    const SLACK_NS: libc::c_ulong = 1;
    // SAFETY: this option takes an integer and concerns the calling thread.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, SLACK_NS) };
    // SAFETY: setpriority takes integers; on Linux, 0 names the calling thread alone.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICENESS) };
}

fn cpu_of_this_thread() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live local; the clock exists since Linux 2.6.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
