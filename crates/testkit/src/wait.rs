//! Bounded waiting for a condition that no event announces.

use anyhow::{Result, bail};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::time::{Duration, Instant};

/// How many lines of each log a timeout message shows.
const LOG_LINES: usize = 15;

/// The longest pause between two looks at what will not be long, or is timed.
const CLOSE: Duration = Duration::from_millis(10);
/// And at what has been waited for longer than `PATIENT_AFTER`: a look may cost a connection or a
/// process, and takes its time from what is waited for.
const PATIENT: Duration = Duration::from_millis(50);
const PATIENT_AFTER: Duration = Duration::from_millis(300);
/// What takes seconds is looked at less often still: that makes a wait longer by a twentieth at most.
const PATIENT_SHARE: u32 = 20;
const MOST_PATIENT: Duration = Duration::from_millis(250);

/// Asks `probe` every 1 to 10 ms until it gives a value, after 0.3 s every 50 ms and from there on ever
/// more rarely, up to every 250 ms, for at most `timeout`.
///
/// # Errors
/// What `probe` returns as an error ends the wait at once. On timeout the error names `what`, and
/// shows the last lines of each file in `logs`.
pub fn wait_until<T>(
    what: &str,
    timeout: Duration,
    logs: &[&Path],
    probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    wait(what, timeout, logs, true, probe)
}

/// As [`wait_until`], and never less often than every 10 ms: for what is timed, or is there for a
/// moment.
///
/// # Errors
/// As [`wait_until`].
pub fn watch_until<T>(
    what: &str,
    timeout: Duration,
    logs: &[&Path],
    probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    wait(what, timeout, logs, false, probe)
}

fn wait<T>(
    what: &str,
    timeout: Duration,
    logs: &[&Path],
    is_patient: bool,
    mut probe: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let begin = Instant::now();
    let mut pause = Duration::from_millis(1);
    loop {
        if let Some(value) = probe()? {
            return Ok(value);
        }
        let waited = begin.elapsed();
        if waited >= timeout {
            let tails: String = logs.iter().map(|path| log_tail(path, LOG_LINES)).collect();
            bail!("timed out after {timeout:?} waiting for {what}{tails}");
        }
        std::thread::park_timeout(pause);
        pause = next_pause(pause, waited, is_patient);
    }
}

fn next_pause(pause: Duration, waited: Duration, is_patient: bool) -> Duration {
    let longest = match is_patient && waited >= PATIENT_AFTER {
        true => (waited / PATIENT_SHARE).clamp(PATIENT, MOST_PATIENT),
        false => CLOSE,
    };
    (pause * 3 / 2).min(longest)
}

/// The last `lines` lines of a log file, under a heading that names the file. Never fails: what
/// cannot be read is said in the text.
pub fn log_tail(path: &Path, lines: usize) -> String {
    const TAIL_BYTES_MAX: u64 = 32 * 1024;
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(TAIL_BYTES_MAX)))?;
        let mut bytes = Vec::new();
        file.take(TAIL_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    match read() {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let all: Vec<&str> = text.lines().collect();
            let last = all[all.len().saturating_sub(lines)..].join("\n  ");
            format!("\n-- last lines of {}:\n  {last}", path.display())
        }
        Err(error) => format!("\n-- {} cannot be read: {error}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_become_rarer_for_who_is_patient() {
        let pauses = |is_patient| {
            let (mut waited, mut pause) = (Duration::ZERO, Duration::from_millis(1));
            let mut pauses = Vec::new();
            while waited < Duration::from_secs(1) {
                pauses.push(pause);
                waited += pause;
                pause = next_pause(pause, waited, is_patient);
            }
            pauses
        };
        let (close, patient) = (pauses(false), pauses(true));
        assert_eq!(close[..30], patient[..30], "the first 0.3 s are the same");
        assert_eq!(close.last(), Some(&CLOSE));
        assert_eq!(patient.last(), Some(&PATIENT));
        assert!(patient.len() < 60 && close.len() > 100, "{} {}", patient.len(), close.len());
        let after = |seconds| next_pause(PATIENT * 9, Duration::from_secs(seconds), true);
        assert_eq!([after(2), after(60)], [2 * PATIENT, MOST_PATIENT]);
    }

    #[test]
    fn gives_the_value_and_on_timeout_the_log() {
        let mut left = 3;
        let got = wait_until("countdown", Duration::from_secs(5), &[], || {
            left -= 1;
            Ok((left == 0).then_some("done"))
        });
        assert_eq!(got.unwrap(), "done");

        let log = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(log.path(), "first\nlast words\n").unwrap();
        let error = wait_until::<()>("never", Duration::from_millis(5), &[log.path()], || Ok(None))
            .unwrap_err()
            .to_string();
        assert!(error.contains("waiting for never") && error.contains("last words"), "{error}");
    }
}
