//! What a base backup is to be like: the options of `BASE_BACKUP` (PostgreSQL docs: "55.4. Streaming
//! Replication Protocol"), in either of its two grammars.

use std::fmt::Write;

/// The first version whose options stand in parentheses, and that sends everything in one COPY.
pub const ONE_COPY: u32 = 150_000;

/// Options of a base backup that goes to the client who asks for it. Their defaults are the
/// server's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupOptions {
    /// What the server calls it, in its backup label.
    pub label: Option<String>,
    /// Sizes are estimated, and how far it is is said.
    pub progress: bool,
    /// The checkpoint before it is made at once, and not spread.
    pub fast: bool,
    /// The log that it needs comes with it.
    pub wal: bool,
    /// It ends when the log that it needs is archived, where it is.
    pub wait: bool,
    /// At most so many kilobytes per second are read; 32 to 1048576.
    pub max_rate_kb: Option<u32>,
    /// Tablespaces are listed in a file `tablespace_map`, and not linked.
    pub tablespace_map: bool,
    /// Checksums of data pages are verified.
    pub verify_checksums: bool,
    /// `yes`, `no` or `force-encode`: whether a manifest comes behind the files.
    pub manifest: Option<String>,
    /// How the manifest sums files.
    pub manifest_checksums: Option<String>,
    /// How the server compresses archives; from 15 on.
    pub compression: Option<String>,
    /// Details of that.
    pub compression_detail: Option<String>,
}

impl Default for BackupOptions {
    fn default() -> Self {
        BackupOptions {
            label: None,
            progress: false,
            fast: false,
            wal: false,
            wait: true,
            max_rate_kb: None,
            tablespace_map: false,
            verify_checksums: true,
            manifest: None,
            manifest_checksums: None,
            compression: None,
            compression_detail: None,
        }
    }
}

/// Quotes a string as the commands' grammar has it, which knows no backslash escapes.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

impl BackupOptions {
    /// The command, for a server of this version (as `server_version_num`). One before 15 knows no
    /// compression: what is asked of it is left to the server to refuse.
    pub fn command(&self, server_version: u32) -> String {
        let in_parentheses = server_version >= ONE_COPY;
        let mut options: Vec<String> = Vec::new();
        let mut text = |name: &str, value: &Option<String>| {
            options.extend(value.as_ref().map(|value| format!("{name} {}", quote(value))));
        };
        text("LABEL", &self.label);
        text("MANIFEST", &self.manifest);
        text("MANIFEST_CHECKSUMS", &self.manifest_checksums);
        text("COMPRESSION", &self.compression);
        text("COMPRESSION_DETAIL", &self.compression_detail);
        let (fast, no_wait, unverified) = if in_parentheses {
            ("CHECKPOINT 'fast'", "WAIT false", "VERIFY_CHECKSUMS false")
        } else {
            ("FAST", "NOWAIT", "NOVERIFY_CHECKSUMS")
        };
        for (is_set, option) in [
            (self.progress, "PROGRESS"),
            (self.fast, fast),
            (self.wal, "WAL"),
            (!self.wait, no_wait),
            (self.tablespace_map, "TABLESPACE_MAP"),
            (!self.verify_checksums, unverified),
        ] {
            options.extend(is_set.then(|| option.to_owned()));
        }
        options.extend(self.max_rate_kb.map(|rate| format!("MAX_RATE {rate}")));
        let mut command = "BASE_BACKUP".to_owned();
        // Writing to a String never fails.
        let _ = match (options.is_empty(), in_parentheses) {
            (true, _) => Ok(()),
            (false, true) => write!(command, " ({})", options.join(", ")),
            (false, false) => write!(command, " {}", options.join(" ")),
        };
        command
    }
}
