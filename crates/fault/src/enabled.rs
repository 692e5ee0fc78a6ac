use crate::{DEFECTS, POINTS};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

#[derive(Debug)]
struct Crash {
    point: String,
    nth: u64,
    cut: bool,
    panic: bool,
    passed: AtomicU64,
}

impl Crash {
    fn parse(text: &str) -> Result<Crash, String> {
        let mut parts = text.split(':');
        let point = parts.next().unwrap_or_default().to_owned();
        if !POINTS.contains(&point.as_str()) {
            return Err(format!("FARSHORE_CRASH: no crash point \"{point}\""));
        }
        let mut crash =
            Crash { point, nth: 1, cut: false, panic: false, passed: AtomicU64::new(0) };
        for part in parts {
            match part {
                "cut" => crash.cut = true,
                "panic" => crash.panic = true,
                nth => match nth.parse() {
                    Ok(nth) if nth > 0 => crash.nth = nth,
                    _ => {
                        return Err(format!(
                            "FARSHORE_CRASH: \"{text}\" is not point[:nth][:cut|:panic]"
                        ));
                    }
                },
            }
        }
        Ok(crash)
    }
}

fn listed_defect(name: String) -> Result<String, String> {
    if DEFECTS.contains(&name.as_str()) {
        return Ok(name);
    }
    Err(format!("FARSHORE_DEFECT: no defect \"{name}\""))
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|text| !text.is_empty())
}

fn crash() -> &'static Result<Option<Crash>, String> {
    static CRASH: OnceLock<Result<Option<Crash>, String>> = OnceLock::new();
    CRASH.get_or_init(|| variable("FARSHORE_CRASH").map(|text| Crash::parse(&text)).transpose())
}

fn defect_on() -> &'static Result<Option<String>, String> {
    static DEFECT: OnceLock<Result<Option<String>, String>> = OnceLock::new();
    DEFECT.get_or_init(|| variable("FARSHORE_DEFECT").map(listed_defect).transpose())
}

/// Whether both variables can be understood; to be asked before anything else, since a process that
/// dies of them later looks like one that a fault has ended.
///
/// # Errors
/// What is wrong with them.
pub fn check() -> Result<(), String> {
    crash().as_ref().map_err(String::clone)?;
    defect_on().as_ref().map(drop).map_err(String::clone)
}

static PASSED: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// Ends the process by SIGKILL here, or panics, if `FARSHORE_CRASH` says so.
pub fn point(name: &'static str) {
    {
        let mut passed = PASSED.lock().unwrap_or_else(|e| e.into_inner());
        let count = passed.entry(name).or_default();
        *count += 1;
        assert!(*count > 1 || POINTS.contains(&name), "unlisted crash point {name}");
    }
    let crash = crash().as_ref().unwrap_or_else(|error| panic!("{error}"));
    let Some(crash) = crash else { return };
    if crash.point != name || crash.passed.fetch_add(1, Ordering::SeqCst) + 1 != crash.nth {
        return;
    }
    assert!(!crash.panic, "fault: a panic at {name}");
    if crash.cut {
        unsynced::cut_power();
    }
    eprintln!("fault: SIGKILL at {name} (passage {})", crash.nth);
    // SAFETY: kill and getpid have no memory preconditions.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    loop {
        std::thread::park();
    }
}

/// Whether the named defect is switched on.
pub fn defect(name: &'static str) -> bool {
    assert!(DEFECTS.contains(&name), "unlisted defect {name}");
    let on = defect_on().as_ref().unwrap_or_else(|error| panic!("{error}"));
    on.as_deref() == Some(name)
}

/// How often each crash point was passed so far in this process.
pub fn points_passed() -> Vec<(&'static str, u64)> {
    let passed = PASSED.lock().unwrap_or_else(|e| e.into_inner());
    passed.iter().map(|(name, count)| (*name, *count)).collect()
}

/// Knows which bytes of which files no fsync has covered, so that a power cut can be played.
pub mod unsynced {
    use std::collections::HashMap;
    use std::os::unix::fs::FileExt;
    use std::path::{Path, PathBuf};
    use std::sync::{LazyLock, Mutex, MutexGuard};

    static FILES: LazyLock<Mutex<HashMap<PathBuf, Durable>>> = LazyLock::new(Mutex::default);

    /// What a power cut leaves of a file.
    #[derive(Default)]
    struct Durable {
        synced_len: u64,
        /// What stood in the file before it was written to, where that was anything.
        before: Vec<u8>,
    }

    fn files() -> MutexGuard<'static, HashMap<PathBuf, Durable>> {
        FILES.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A file whose durable length is remembered until it is dropped.
    #[derive(Debug)]
    pub struct Tracked(PathBuf);

    impl Tracked {
        /// Starts tracking; `synced_len` bytes are durable already.
        pub fn new(path: &Path, synced_len: u64) -> Tracked {
            files().insert(path.to_owned(), Durable { synced_len, before: Vec::new() });
            Tracked(path.to_owned())
        }

        /// The same of a file with something in it that is going to be overwritten, and that a
        /// power cut brings back.
        pub fn overwriting(path: &Path, synced_len: u64) -> Tracked {
            let before = std::fs::read(path).unwrap_or_default();
            files().insert(path.to_owned(), Durable { synced_len, before });
            Tracked(path.to_owned())
        }

        /// The first `len` bytes are durable now.
        pub fn synced(&self, len: u64) {
            files().entry(self.0.clone()).or_default().synced_len = len;
        }
    }

    impl Drop for Tracked {
        fn drop(&mut self) {
            files().remove(&self.0);
        }
    }

    /// Takes from every tracked file what no fsync covered. The lock stays held: nothing can be
    /// declared synced between the cut and the end of the process.
    pub(super) fn cut_power() {
        let files = files();
        for (path, Durable { synced_len, before }) in files.iter() {
            let Ok(file) = std::fs::OpenOptions::new().write(true).open(path) else { continue };
            let Ok(meta) = file.metadata() else { continue };
            if meta.len() > *synced_len {
                // A preallocated file keeps its length: what was not synced reads as zeros.
                let len = meta.len();
                let before = before.get(*synced_len as usize..).unwrap_or_default();
                let _ = file
                    .set_len(*synced_len)
                    .and_then(|()| file.write_all_at(before, *synced_len))
                    .and_then(|()| file.set_len(len));
            }
        }
        std::mem::forget(files);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_variables_may_say() {
        let crash = Crash::parse("spool.before-write:40:cut").unwrap();
        assert_eq!((crash.point.as_str(), crash.nth, crash.cut), ("spool.before-write", 40, true));
        assert!(Crash::parse("spool.before-write:panic").unwrap().panic);
        for wrong in ["", "spool.before", "spool.before-write:x", "spool.before-write:0"] {
            assert!(Crash::parse(wrong).is_err(), "{wrong}");
        }
        assert!(listed_defect("mirror-trusts-positions".to_owned()).is_ok());
        assert!(listed_defect("mirror-trusts".to_owned()).unwrap_err().contains("mirror-trusts"));
        assert_eq!(check(), Ok(()));
    }
}
