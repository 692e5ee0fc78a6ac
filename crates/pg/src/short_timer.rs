use std::io;
#[cfg(target_os = "linux")]
use std::os::fd::OwnedFd;
use std::time::Duration;
#[cfg(target_os = "linux")]
use tokio::io::unix::AsyncFd;

/// A clock for pauses of less than a millisecond, which is the least that the runtime's knows
/// (`timerfd_create(2)`).
#[derive(Debug)]
pub(crate) struct ShortTimer(#[cfg(target_os = "linux")] AsyncFd<OwnedFd>);

#[cfg(target_os = "linux")]
impl ShortTimer {
    /// # Errors
    /// When the process has no descriptor left for it.
    pub(crate) fn new() -> io::Result<ShortTimer> {
        use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let interest = tokio::io::Interest::READABLE;
        // SAFETY: an `OwnedFd` is open, and the same, until it is dropped, which only the `AsyncFd`
        // does that owns it.
        let timer = unsafe { AsyncFd::register_with_interest(timer, interest) };
        Ok(ShortTimer(timer.map_err(io::Error::from)?))
    }

    /// Returns after `pause`, which is not zero. Cancel-safe: a pause that was given up is forgotten
    /// when the next one begins.
    pub(crate) async fn sleep(&self, pause: Duration) -> io::Result<()> {
        use rustix::time::{Itimerspec, TimerfdTimerFlags, Timespec, timerfd_settime};
        let at = Itimerspec {
            it_interval: Timespec { tv_sec: 0, tv_nsec: 0 },
            it_value: Timespec::try_from(pause).map_err(io::Error::other)?,
        };
        timerfd_settime(self.0.get_ref(), TimerfdTimerFlags::empty(), &at)?;
        loop {
            let mut expirations = [0; size_of::<u64>()];
            let mut ready = self.0.readable().await?;
            if let Ok(read) =
                ready.try_io(|timer| Ok(rustix::io::read(timer.get_ref(), &mut expirations)?))
            {
                return read.map(drop);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
impl ShortTimer {
    pub(crate) fn new() -> io::Result<ShortTimer> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(crate) async fn sleep(&self, pause: Duration) -> io::Result<()> {
        tokio::time::sleep(pause).await;
        Ok(())
    }
}
