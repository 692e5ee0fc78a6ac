//! A network namespace that lives as long as someone holds it.

use super::{Side, device};
use crate::child::{Spawner, Supervised};
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::JoinHandle;

const NO_RIGHT: &str = "run as root, or in a user namespace of one's own: \
    unshare --user --map-current-user --keep-caps COMMAND";

/// One end of a [`Wan`](super::Wan): a network of its own with a loopback device and the line.
/// Clones are the same namespace. It has no name in the file system: it is gone with the last
/// clone and the last process in it, also after a SIGKILL.
///
/// A process or a thread in the namespace reaches the other end by address and itself over
/// 127.0.0.1, and nothing else by IP. Unix sockets in the file system reach across, abstract ones
/// do not. Settings of TCP (`net.ipv4.*`) begin as this machine's; see [`Namespace::sysctl`].
#[derive(Debug, Clone)]
pub struct Namespace(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    side: Side,
    address: Ipv4Addr,
    handle: Arc<File>,
    spawner: Option<Spawner>,
    thread: Option<JoinHandle<()>>,
}

impl Namespace {
    /// A fresh namespace and the descriptor of its device. The thread that made it stays in it,
    /// and starts processes there.
    pub(super) fn create(side: Side, address: Ipv4Addr) -> Result<(Namespace, File)> {
        let (reply, made) = sync_channel(1);
        let (spawner, jobs) = Spawner::channel();
        let thread = std::thread::Builder::new()
            .name(format!("wan-{side}"))
            .spawn(move || {
                let result = make(address);
                let is_made = result.is_ok();
                // The asker waits for the answer.
                let _ = reply.send(result);
                if is_made {
                    jobs.serve();
                }
            })
            .context("start a thread")?;
        let (handle, tun) = made.recv().context("the thread of the namespace died")??;
        let inner = Inner {
            side,
            address,
            handle: Arc::new(handle),
            spawner: Some(spawner),
            thread: Some(thread),
        };
        Ok((Namespace(Arc::new(inner)), tun))
    }

    /// Which end it is.
    pub fn side(&self) -> Side {
        self.0.side
    }

    /// The address of this end on the line.
    pub fn address(&self) -> Ipv4Addr {
        self.0.address
    }

    /// Whether both are the same namespace.
    pub fn is_same(&self, other: &Namespace) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A path by which other processes can enter it (`nsenter --net=PATH`) while this process
    /// holds it.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/fd/{}", std::process::id(), self.0.handle.as_raw_fd()))
    }

    /// A command that will run in the namespace. It must not change its user, because the user
    /// changes before the namespace does. Commands that do (all of
    /// [`Installation`](crate::postgres::Installation)'s) are started by [`Namespace::spawn`], or
    /// by [`Namespace::enter`]: what a thread in the namespace starts is in it.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        let handle = self.0.handle.clone();
        // SAFETY: the closure runs between fork and exec and makes one system call that is
        // async-signal-safe; it neither allocates nor locks. The descriptor is open: the closure
        // owns it.
        unsafe { command.pre_exec(move || join(handle.as_raw_fd())) };
        command
    }

    /// Starts a command in the namespace, as [`Supervised::spawn`] does outside.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn spawn(&self, command: Command, orphan_signal: i32) -> Result<Supervised> {
        Supervised::spawn_in(Some(self), command, orphan_signal)
    }

    /// Runs `work` on a thread in the namespace and waits for it. Sockets that it makes stay in
    /// the namespace, whoever uses them later.
    ///
    /// # Errors
    /// When the thread cannot enter.
    ///
    /// # Panics
    /// When `work` does.
    pub fn enter<T: Send>(&self, work: impl FnOnce() -> T + Send) -> Result<T> {
        let fd = self.0.handle.as_raw_fd();
        std::thread::scope(|scope| {
            let thread = scope.spawn(move || join(fd).map(|()| work()));
            match thread.join() {
                Ok(done) => done.context("enter a network namespace"),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        })
    }

    /// Sets a kernel parameter of the namespace: `sysctl("ipv4.tcp_congestion_control", "cubic")`
    /// is for what `sysctl` calls `net.ipv4.tcp_congestion_control`.
    ///
    /// # Errors
    /// When there is no such parameter in a namespace, or it refuses the value.
    pub fn sysctl(&self, name: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/net/{}", name.replace('.', "/"));
        let written = self.enter(|| std::fs::write(&path, value))?;
        written.with_context(|| format!("set net.{name} to {value}"))
    }

    /// Starts processes in the namespace.
    pub(crate) fn spawner(&self) -> &Spawner {
        self.0.spawner.as_ref().expect("only drop takes it")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Without a sender the thread ends. It holds the namespace, so it is waited for.
        self.spawner = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Moves the calling thread into a namespace of its own.
fn make(address: Ipv4Addr) -> Result<(File, File)> {
    // SAFETY: unshare takes flags; the new network is this thread's alone.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        let error = io::Error::last_os_error();
        if error.kind() == io::ErrorKind::PermissionDenied {
            bail!("making a network namespace is not permitted; {NO_RIGHT}");
        }
        return Err(error).context("make a network namespace");
    }
    let handle = File::open("/proc/thread-self/ns/net").context("hold the network namespace")?;
    Ok((handle, device::create(address)?))
}

/// Moves the calling thread into the network namespace behind a descriptor.
fn join(namespace: RawFd) -> io::Result<()> {
    // SAFETY: setns takes two integers; a descriptor of another kind is an error.
    if unsafe { libc::setns(namespace, libc::CLONE_NEWNET) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Gives a process that may not make network namespaces a user namespace in which it may, under
/// the user that it has. Does nothing for a process that may. Whatever the process starts
/// afterwards is in the user namespace too, without those rights.
///
/// # Errors
/// When the kernel does not permit it, or the process has more than one thread.
pub fn gain_rights() -> Result<()> {
    if has_rights() {
        return Ok(());
    }
    // SAFETY: these two have no preconditions.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    // SAFETY: unshare takes flags; the kernel refuses a process with several threads.
    if unsafe { libc::unshare(libc::CLONE_NEWUSER) } != 0 {
        return Err(io::Error::last_os_error()).context("make a user namespace");
    }
    // The kernel lets groups be mapped only where they cannot be given up.
    for (file, text) in [
        ("setgroups", "deny".to_owned()),
        ("uid_map", format!("{user} {user} 1")),
        ("gid_map", format!("{group} {group} 1")),
    ] {
        std::fs::write(format!("/proc/self/{file}"), text)
            .with_context(|| format!("write the user namespace's {file}"))?;
    }
    Ok(())
}

/// Whether the process may make network namespaces and devices in them.
fn has_rights() -> bool {
    // From linux/capability.h.
    const NET_ADMIN: u64 = 1 << 12;
    const SYS_ADMIN: u64 = 1 << 21;
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    effective.is_some_and(|rights| rights & NET_ADMIN != 0 && rights & SYS_ADMIN != 0)
}
