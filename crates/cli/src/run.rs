use crate::{load, runtime};
use farshore_node::site::Site;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

/// Buffers from this size on go back to the system as soon as they are freed, in bytes.
const RETURN_BUFFERS_FROM: libc::c_int = 1 << 20;

/// Free bytes at a heap's end that it keeps, in bytes. With the threshold above set, glibc would
/// give back all but 128 KiB: each batch would then be new memory, cleared by the kernel page by
/// page.
const KEEP_AT_HEAP_END: libc::c_int = 8 << 20;

/// Heaps that threads share. glibc makes up to eight per core, each with room of its own that the
/// others cannot use: with many subscriptions that is a fifth of all memory.
const HEAPS: libc::c_int = 2;

/// Without this glibc learns from the first large row to keep all later ones on its heap.
fn keep_memory_small() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt only sets the allocator's parameters, before any thread of ours runs.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, RETURN_BUFFERS_FROM);
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEEP_AT_HEAP_END);
        libc::mallopt(libc::M_ARENA_MAX, HEAPS);
    }
}

/// As many connections and files as the system lets this process have. What it has at first, 1,024
/// mostly, is for programs that use select(2), which takes no more; a hundred subscriptions with
/// several connections each need more.
fn raise_open_files() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls read or write the one structure that is passed, which outlives them. Where
    // they fail, the limit is as it was.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &limit);
        }
    }
}

/// What a node writes holds what the databases hold, so no other user of the machine may read it;
/// the group may where the data folder lets it in, as with PostgreSQL's own.
fn keep_from_others(data_dir: &Path) {
    let mode = std::fs::metadata(data_dir).map_or(0o700, |found| found.permissions().mode());
    // SAFETY: umask takes and gives a number and cannot fail; no other thread of ours runs yet, which
    // would make files in between.
    unsafe {
        let before = libc::umask(0o077);
        libc::umask(before | 0o007 | (!mode & 0o070));
    }
}

/// A defect anywhere ends the node as a power cut would, which it recovers from; a part that died alone
/// would leave the others waiting for it, and whatever it had half changed in memory
/// (docs/decisions/0067).
fn end_on_panic() {
    std::panic::set_hook(Box::new(|panic| {
        let said = format!(
            "ended by a defect in Farshore, please report it: {panic}\n{}\nWhat is durable is whole: \
             start the node again, and it goes on where it stood",
            std::backtrace::Backtrace::force_capture()
        );
        if tracing::enabled!(tracing::Level::ERROR) {
            tracing::error!("{said}");
        } else {
            // Whatever is logged, this is not left out; and who cannot be told is not waited for.
            let _ = writeln!(std::io::stderr(), "{said}");
        }
        std::process::abort();
    }));
}

/// Runs a site until SIGTERM or SIGINT. SIGHUP does nothing, and says so.
pub fn run(site: &Path) -> ExitCode {
    keep_memory_small();
    raise_open_files();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("FARSHORE_LOG")
                .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info")),
        )
        .with_writer(std::io::stderr)
        .with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr()))
        .with_target(false)
        // A terminal that is gone takes no messages; to say so there would be a panic.
        .log_internal_errors(false)
        .init();
    end_on_panic();
    let config = match load(site) {
        Ok(config) => config,
        Err(code) => return code,
    };
    keep_from_others(&config.data_dir);
    let fail = |error: &dyn std::fmt::Display| {
        eprintln!("farshore: {error}");
        ExitCode::FAILURE
    };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    let outcome = runtime.block_on(async {
        // First of all: a signal during recovery asks for the same orderly end.
        let (stop, stopped) = watch::channel(false);
        let mut terminate = signal(SignalKind::terminate()).map_err(|e| e.to_string())?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(|e| e.to_string())?;
        let mut hang_up = signal(SignalKind::hangup()).map_err(|e| e.to_string())?;
        let file = site.to_owned();
        // From `systemctl reload`, or a terminal that was closed: neither means to end it.
        tokio::spawn(async move {
            while hang_up.recv().await.is_some() {
                tracing::warn!(
                    "SIGHUP changes nothing: {} is read at the start. To take changes, restart",
                    file.display()
                );
            }
        });
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::info!("stopping");
            stop.send_replace(true);
            // A second signal does not wait.
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            std::process::exit(1);
        });
        let opened = tokio::task::block_in_place(|| Site::open(config));
        let site = Arc::new(opened.map_err(|e| e.to_string())?);
        site.run(stopped).await.map_err(|e| e.to_string())
    });
    // Blocking reads of the store may still be under way; nothing durable depends on them.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}
