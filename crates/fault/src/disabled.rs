/// Does nothing in this build.
#[inline(always)]
pub fn point(_name: &'static str) {}

/// Always false in this build.
#[inline(always)]
pub fn defect(_name: &'static str) -> bool {
    false
}

/// Nothing is asked of this build.
///
/// # Errors
/// Never.
#[inline(always)]
pub fn check() -> Result<(), String> {
    Ok(())
}

/// Always empty in this build.
pub fn points_passed() -> Vec<(&'static str, u64)> {
    Vec::new()
}

/// Knows which bytes of which files no fsync has covered: nothing, in this build.
pub mod unsynced {
    use std::path::Path;

    /// A file whose length at its last fsync is remembered: not in this build.
    #[derive(Debug, Default)]
    pub struct Tracked;

    impl Tracked {
        /// Starts tracking; `synced_len` bytes are durable already.
        #[inline(always)]
        pub fn new(_path: &Path, _synced_len: u64) -> Tracked {
            Tracked
        }

        /// The same of a file with something in it that is going to be overwritten.
        #[inline(always)]
        pub fn overwriting(_path: &Path, _synced_len: u64) -> Tracked {
            Tracked
        }

        /// The first `len` bytes are durable now.
        #[inline(always)]
        pub fn synced(&self, _len: u64) {}
    }
}
