//! Ctrl-C and SIGTERM end a long run in order, so that servers and folders go away.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Set by a signal, never reset.
#[derive(Debug, Clone)]
pub struct Interrupt(Arc<AtomicBool>);

/// The error that unwinds what was going on.
#[derive(Debug)]
pub struct Interrupted;

impl std::fmt::Display for Interrupted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("interrupted")
    }
}

impl std::error::Error for Interrupted {}

impl Interrupt {
    /// Takes over the signals that ask a program to end.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn install() -> Result<Interrupt> {
        // One flag, no order with other memory: whoever sees it only stops.
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, flag.clone()).context("handle signals")?;
        }
        Ok(Interrupt(flag))
    }

    /// Ends the caller if a signal has come.
    ///
    /// # Errors
    /// [`Interrupted`].
    pub fn check(&self) -> Result<()> {
        if self.0.load(Ordering::Relaxed) { Err(Interrupted.into()) } else { Ok(()) }
    }
}
