//! Child processes that do not outlive the test, and whose end is an event.

use crate::proc_fs;
use crate::wan::Namespace;
use anyhow::{Context, Result};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::sync::LazyLock;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

/// How a child ended and what it cost, its own reaped children included.
#[derive(Debug, Clone, Copy)]
pub struct Ended {
    /// Exit code or signal.
    pub status: ExitStatus,
    /// User and system time.
    pub cpu: Duration,
}

/// A child process in a process group of its own (a Ctrl-C in the terminal does not reach it),
/// which the kernel signals if the test process dies. Dropping it kills and reaps it.
#[derive(Debug)]
pub struct Supervised {
    pid: i32,
    pidfd: OwnedFd,
    ended: Option<Ended>,
    peak_rss_bytes: u64,
    /// The thread that started it lives in there, see [`Spawner`].
    _place: Option<Namespace>,
}

struct Job {
    command: Command,
    orphan_signal: i32,
    reply: SyncSender<io::Result<Child>>,
}

/// Has processes started by one thread. The kernel sends the death signal when the *thread* that
/// forked ends, so that thread must live as long as the processes do.
#[derive(Debug)]
pub(crate) struct Spawner(SyncSender<Job>);

/// What the thread of a [`Spawner`] gets to do.
pub(crate) struct Jobs(Receiver<Job>);

/// Starts what is not to be in a network namespace of its own.
static SPAWNER: LazyLock<Spawner> = LazyLock::new(|| {
    let (spawner, jobs) = Spawner::channel();
    std::thread::spawn(|| jobs.serve());
    spawner
});

impl Spawner {
    /// The two ends.
    pub(crate) fn channel() -> (Spawner, Jobs) {
        let (jobs, inbox) = sync_channel(1);
        (Spawner(jobs), Jobs(inbox))
    }

    fn spawn(&self, command: Command, orphan_signal: i32) -> Result<Child> {
        let program = command.get_program().to_string_lossy().into_owned();
        let (reply, answer) = sync_channel(1);
        self.0
            .send(Job { command, orphan_signal, reply })
            .ok()
            .context("the thread that starts processes is gone")?;
        let child = answer.recv().context("the thread that starts processes is gone")?;
        child.with_context(|| format!("start {program}"))
    }
}

impl Jobs {
    /// Starts processes from the calling thread until the [`Spawner`] is dropped.
    pub(crate) fn serve(self) {
        for mut job in self.0 {
            let child = spawn_here(&mut job.command, job.orphan_signal);
            // The asker waits for the answer; if its thread died the child must not linger.
            if let Err(unheard) = job.reply.send(child)
                && let Ok(mut child) = unheard.0
            {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

fn spawn_here(command: &mut Command, orphan_signal: i32) -> io::Result<Child> {
    // SAFETY: getpid has no preconditions.
    let parent = unsafe { libc::getpid() };
    // SAFETY: the closure runs between fork and exec and makes two system calls that are
    // async-signal-safe; it neither allocates nor locks. It runs after the change of user, which
    // would clear the death signal.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, orphan_signal) != 0 {
                return Err(io::Error::last_os_error());
            }
            // The parent may have died before the call above.
            if libc::getppid() != parent {
                return Err(io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
    command.process_group(0).spawn()
}

impl Supervised {
    /// Starts `command`. If this process dies first, the child gets `orphan_signal`.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn spawn(command: Command, orphan_signal: i32) -> Result<Supervised> {
        Supervised::spawn_in(None, command, orphan_signal)
    }

    /// As [`Supervised::spawn`], in a network namespace, which lives at least as long as the
    /// child.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn spawn_in(
        place: Option<&Namespace>,
        command: Command,
        orphan_signal: i32,
    ) -> Result<Supervised> {
        let spawner = place.map_or(&*SPAWNER, Namespace::spawner);
        let child = spawner.spawn(command, orphan_signal)?;
        let pid = child.id() as i32;
        // The handle is given up without a wait: this type alone reaps the child.
        drop(child);
        Ok(Supervised {
            pid,
            pidfd: open_pidfd(pid)?,
            ended: None,
            peak_rss_bytes: 0,
            _place: place.cloned(),
        })
    }

    /// Process id. It is not reused before the end was noticed by a wait.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The largest resident size the process had when it was last looked at: by this call, by a
    /// signal or by a wait. In bytes. (What the kernel tells of an ended process is no use: it
    /// counts the test's own memory, of which the child was a copy before it became itself.)
    pub fn peak_rss_bytes(&mut self) -> u64 {
        if self.ended.is_none() {
            let now = proc_fs::peak_rss_bytes(self.pid).unwrap_or(0);
            self.peak_rss_bytes = self.peak_rss_bytes.max(now);
        }
        self.peak_rss_bytes
    }

    /// Sends a signal; a child that has ended is left alone.
    pub fn signal(&mut self, signal: i32) {
        if self.ended.is_none() {
            self.peak_rss_bytes();
            // SAFETY: kill has no memory preconditions, and the pid is our unreaped child's.
            unsafe { libc::kill(self.pid, signal) };
        }
    }

    /// How the child ended, if it has ended.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn try_wait(&mut self) -> Result<Option<Ended>> {
        self.wait(Duration::ZERO)
    }

    /// Waits for the end of the child for at most `timeout`; `None` when it still runs.
    ///
    /// # Errors
    /// When the kernel refuses to tell.
    pub fn wait(&mut self, timeout: Duration) -> Result<Option<Ended>> {
        self.peak_rss_bytes();
        if self.ended.is_none() && wait_pidfd(&self.pidfd, timeout)? {
            self.ended = Some(self.reap()?);
        }
        Ok(self.ended)
    }

    fn reap(&self) -> Result<Ended> {
        let mut status = 0;
        let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
        // SAFETY: both pointers are to live locals of the right types.
        let reaped = unsafe { libc::wait4(self.pid, &mut status, 0, usage.as_mut_ptr()) };
        if reaped != self.pid {
            return Err(io::Error::last_os_error()).with_context(|| format!("reap {}", self.pid));
        }
        // SAFETY: rusage is plain integers, for which all-zero bytes are valid; wait4 filled it.
        let usage = unsafe { usage.assume_init() };
        let duration =
            |t: libc::timeval| Duration::new(t.tv_sec as u64, (t.tv_usec as u32) * 1_000);
        Ok(Ended {
            status: ExitStatus::from_raw(status),
            cpu: duration(usage.ru_utime) + duration(usage.ru_stime),
        })
    }
}

impl Drop for Supervised {
    fn drop(&mut self) {
        self.signal(libc::SIGKILL);
        let _ = self.wait(Duration::from_secs(10));
    }
}

/// Opens a handle on a process that stays valid whatever becomes of its id.
///
/// # Errors
/// When there is no such process.
pub fn open_pidfd(pid: i32) -> Result<OwnedFd> {
    // SAFETY: pidfd_open takes two integers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error()).with_context(|| format!("watch process {pid}"));
    }
    // SAFETY: the kernel just gave this descriptor to us alone.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Waits until the process behind `pidfd` has ended (reaped or not); `false` on timeout.
///
/// # Errors
/// When polling fails for another reason than an interruption.
pub fn wait_pidfd(pidfd: &OwnedFd, timeout: Duration) -> Result<bool> {
    let deadline = Instant::now() + timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        // Rounded up, so that a wait does not end early and then spin.
        let millis = left.as_micros().div_ceil(1_000).min(i32::MAX as u128) as i32;
        let mut poll = libc::pollfd { fd: pidfd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one live pollfd, and its count is 1.
        match unsafe { libc::poll(&mut poll, 1, millis) } {
            0 if millis == 0 || Instant::now() >= deadline => return Ok(false),
            0 => {}
            1.. => return Ok(true),
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error).context("poll a process handle");
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_seen_with_status_and_cost() {
        let mut command = Command::new("sh");
        command.args(["-c", "exit 7"]);
        let mut child = Supervised::spawn(command, libc::SIGKILL).unwrap();
        let ended = child.wait(Duration::from_secs(10)).unwrap().unwrap();
        assert_eq!(ended.status.code(), Some(7));
    }

    #[test]
    fn a_running_child_times_out_and_dies_by_signal_even_if_the_asking_thread_ended() {
        let mut child = std::thread::spawn(|| {
            let mut command = Command::new("sleep");
            command.arg("1000");
            Supervised::spawn(command, libc::SIGKILL).unwrap()
        })
        .join()
        .unwrap();
        assert!(child.wait(Duration::from_millis(20)).unwrap().is_none());
        assert!(child.peak_rss_bytes() > 0);
        child.signal(libc::SIGTERM);
        let ended = child.wait(Duration::from_secs(10)).unwrap().unwrap();
        assert_eq!(ended.status.signal(), Some(libc::SIGTERM));
    }

    #[test]
    fn an_unknown_program_is_named() {
        let error = Supervised::spawn(Command::new("/no/such/program"), libc::SIGKILL).unwrap_err();
        assert!(format!("{error:#}").contains("/no/such/program"));
    }
}
