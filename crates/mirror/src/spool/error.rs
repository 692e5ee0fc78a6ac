//! What can be wrong with a spool.

use crate::history::HistoryError;
use crate::wal::Timeline;
use farshore_model::Lsn;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why a spool cannot be used, or cannot go on.
#[derive(Clone, Debug, thiserror::Error)]
pub enum SpoolError {
    /// The operating system refused.
    #[error("cannot {action} {path}: {error}")]
    Io {
        /// Verb phrase.
        action: &'static str,
        /// Of what.
        path: PathBuf,
        /// Why.
        error: Arc<std::io::Error>,
    },
    /// An fsync failed: what the kernel has of the file or folder is not to be trusted any more.
    #[error(
        "cannot make {path} durable: {error}. What was not acknowledged is received again after a \
         restart; check the disk first"
    )]
    NotDurable {
        /// The segment, or the folder.
        path: PathBuf,
        /// Why.
        error: Arc<std::io::Error>,
    },
    /// Another process has it open.
    #[error(
        "{path} is in use by process {pid}. Stop that one first, or give this site another data_dir"
    )]
    Locked {
        /// The folder.
        path: PathBuf,
        /// As it noted itself.
        pid: String,
    },
    /// The state file cannot be read.
    #[error(
        "{path} is damaged ({what}). If the mirror may be made anew: stop this node, remove the \
         folder, and start it"
    )]
    State {
        /// The file.
        path: PathBuf,
        /// How.
        what: String,
    },
    /// Files that should be there are not.
    #[error(
        "{path} is missing, although the log goes on behind it: files were removed from the spool. \
         Put it back from a backup, or remove the folder and make the mirror anew"
    )]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// The newest segment is not there any more, or the folder as a whole.
    #[error(
        "{path} was removed while the spool was in use: log that was acknowledged may be nowhere \
         else. Nothing more is taken in. Stop this node; put the files back, or remove what is left \
         of the folder; start it, and seed the standbys anew that lack log then"
    )]
    Removed {
        /// The file, or the folder.
        path: PathBuf,
    },
    /// A segment has another size than the log's segments have.
    #[error(
        "{path} has {found} bytes, and a segment of this log has {expected}. Put it back from a backup, or make the mirror anew"
    )]
    Size {
        /// The segment.
        path: PathBuf,
        /// Its size in bytes.
        found: u64,
        /// What it should be.
        expected: u64,
    },
    /// Log that was durable is not sound.
    #[error(
        "{path} is damaged at {position}: the log was durable up to {durable}. While a standby may \
         need it, nothing is acknowledged behind it. In the newest segment a start receives it again \
         where the principal has it; else stop the node, put the file back (the principal's pg_wal \
         may have it by that name, a standby's, or a backup) and start it, or make the mirror anew"
    )]
    Damaged {
        /// The segment.
        path: PathBuf,
        /// Where: it lies in the record that begins at `sound_to`.
        position: Lsn,
        /// A whole record ends here, and everything before it is sound.
        sound_to: Lsn,
        /// What is known to have been durable.
        durable: Lsn,
    },
    /// A history file that cannot be read.
    #[error("{path}: {error}")]
    History {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        error: HistoryError,
    },
    /// Log that does not follow what is here.
    #[error("log came for {found} on timeline {timeline}, and what is here ends at {expected}")]
    DoesNotFollow {
        /// Of what came.
        timeline: Timeline,
        /// Where it begins.
        found: Lsn,
        /// Where it should.
        expected: Lsn,
    },
    /// The new timeline left the old one before what is here.
    #[error(
        "timeline {timeline} begins at {switch}, and this spool holds timeline {own} up to {durable}: \
         the server that is principal now never had that log. Point the mirror to a principal that \
         has it, or make the mirror anew"
    )]
    Diverged {
        /// The new one.
        timeline: Timeline,
        /// Where it begins.
        switch: Lsn,
        /// What is here.
        own: Timeline,
        /// Up to where.
        durable: Lsn,
    },
    /// Two timelines of one number.
    #[error(
        "another history came for timeline {timeline} than {path} holds: two servers were promoted \
         to a timeline of the same number, and the log here is that of the other one. Point the \
         mirror to the principal that it was made from or a descendant of it, or make the mirror \
         anew: stop this node, remove the folder, and start it"
    )]
    OtherHistory {
        /// Of the one that came.
        timeline: Timeline,
        /// What is here.
        path: PathBuf,
    },
    /// A new timeline whose history says something else, or is not here.
    #[error(
        "timeline {timeline} shall go on at {switch} where timeline {own} ends, and its history \
         here does not say so: the principal has no {}, or another one. Put that file into its \
         pg_wal, or point the mirror to a server that has it",
        crate::wal::history_file_name(*.timeline)
    )]
    NoHistory {
        /// The new one.
        timeline: Timeline,
        /// Where it begins.
        switch: Lsn,
        /// What is here.
        own: Timeline,
    },
    /// The spool is being closed.
    #[error("the spool is being closed")]
    Closing,
    /// A standby was promoted, so nothing more is taken in.
    #[error(
        "a standby of this mirror was promoted, on timeline {timeline} from {end} on or later: what \
         the old principal writes belongs to another history. To mirror the new principal: give it \
         a mirror of its own, or stop this node and remove the folder {folder}"
    )]
    Promoted {
        /// The timeline that was left.
        timeline: Timeline,
        /// Where, at the earliest.
        end: Lsn,
        /// The spool.
        folder: PathBuf,
    },
}

impl SpoolError {
    pub(crate) fn io(
        action: &'static str,
        path: &Path,
    ) -> impl FnOnce(std::io::Error) -> SpoolError {
        let path = path.to_owned();
        move |error| SpoolError::Io { action, path, error: Arc::new(error) }
    }

    /// Whether the same may succeed later: there is no room, no file descriptor or thread is left, the
    /// file system is away or read-only for the time being.
    pub(crate) fn may_pass(&self) -> bool {
        matches!(self, SpoolError::Io { .. })
    }

    /// Whether there is no room left: a state that ends when somebody makes some.
    pub fn is_out_of_room(&self) -> bool {
        use std::io::ErrorKind::{QuotaExceeded, StorageFull};
        matches!(self, SpoolError::Io { error, .. } if matches!(error.kind(), StorageFull | QuotaExceeded))
    }
}
