//! The far end of a seeding: a data directory from the files that come, checked and made durable.

use super::QUEUE_MESSAGES_MAX;
use super::directory::{self, Directory};
use super::message::{FromGiver, FromTaker, SeedAnswer};
use super::writer::Writer;
use farshore_link::{LinkError, Receiver, Sender, Session};
use farshore_model::Lsn;
use std::path::{Path, PathBuf};
use tokio::sync::{mpsc, watch};

/// Why a standby could not be seeded.
#[derive(Debug, thiserror::Error)]
pub enum SeedError {
    /// The link.
    #[error("{0}. Run this again: it goes on from what is there")]
    Link(#[from] LinkError),
    /// The near end says no, or cannot go on.
    #[error("site \"{site}\" does not give it: {why}")]
    Refused {
        /// The near end.
        site: String,
        /// In its words.
        why: String,
    },
    /// What came is not what a near end sends.
    #[error("site \"{site}\" sent {what}; is it of another version?")]
    Protocol {
        /// The peer.
        site: String,
        /// What came.
        what: String,
    },
    /// The disk.
    #[error("cannot {action} {path}: {error}")]
    Io {
        /// Verb phrase.
        action: &'static str,
        /// Of what.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The directory is not to be written to.
    #[error("{path} {what}")]
    Directory {
        /// The data directory.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        what: String,
    },
    /// A file is not what the principal's manifest says.
    #[error(
        "{path} is not as the principal's manifest says: {what}. Run this again: what differs is \
         sent again"
    )]
    Differs {
        /// Relative to the data directory.
        path: String,
        /// How.
        what: String,
    },
    /// The files cannot be used with this spool.
    #[error("{0}")]
    DoesNotFit(String),
}

impl SeedError {
    pub(super) fn io(
        action: &'static str,
        path: &Path,
    ) -> impl FnOnce(std::io::Error) -> SeedError {
        let path = path.to_owned();
        move |error| SeedError::Io { action, path, error }
    }
}

/// How far a seeding is, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// All files together, as the server estimates.
    pub total: u64,
    /// Of them, here.
    pub done: u64,
    /// Of those, what was here already.
    pub same: u64,
    /// What came over the link for them, packed.
    pub packed: u64,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seeded {
    /// Where the log begins that the standby needs.
    pub start: Lsn,
    /// From where on it can be read.
    pub end: Lsn,
    /// Files, each checked against the server's manifest.
    pub files: usize,
    /// Of them and what they took.
    pub progress: Progress,
}

/// What is to be seeded.
#[derive(Clone)]
pub struct Take {
    /// The data directory to be.
    pub pgdata: PathBuf,
    /// It may hold a data directory of the same cluster, which is made into the standby's.
    pub overwrite: bool,
    /// Directories of tablespaces: as on the principal, and here.
    pub tablespaces: Vec<(PathBuf, PathBuf)>,
    /// The cluster whose log the spool holds.
    pub system_id: String,
    /// The spool keeps the log from here on.
    pub kept_from: Lsn,
    /// `primary_conninfo` of the standby; it may hold a password.
    pub conninfo: String,
    /// `primary_slot_name` of the standby.
    pub slot: String,
}

impl Take {
    /// Makes the data directory from what comes on a session that was opened with a
    /// [`SeedRequest`](super::SeedRequest). What is there is left alone until it is known that files
    /// come, and that they fit the spool: `follows` is asked whether the spool has the log of the
    /// timeline that they are of. Interrupted later, it leaves a directory that no server starts on,
    /// and that another run completes.
    ///
    /// # Errors
    /// [`SeedError`].
    pub async fn run(
        &self,
        session: Session,
        follows: impl AsyncFnOnce(u32) -> Result<(), String>,
        progress: &watch::Sender<Progress>,
    ) -> Result<Seeded, SeedError> {
        let site = session.peer_site().to_owned();
        let (mut sender, mut receiver) = session.split();
        let directory = self.tell_what_is_here(&mut sender).await?;
        let begins = self.begin(&site, &mut receiver).await?;
        progress.send_modify(|progress| progress.total = begins.bytes);
        let tablespaces = self.placed(&begins.tablespaces)?;
        follows(begins.timeline).await.map_err(SeedError::DoesNotFit)?;
        let take = self.clone();
        let claim = move || {
            directory.claim(&take.system_id, take.overwrite)?;
            Ok::<_, SeedError>(directory)
        };
        let directory =
            tokio::task::spawn_blocking(claim).await.map_err(|_| died(&self.pgdata))??;
        let writer = Writer::new(directory, tablespaces, progress.clone());
        let (queue, messages) = mpsc::channel(QUEUE_MESSAGES_MAX);
        let writing = tokio::task::spawn_blocking(move || writer.run(messages));
        let received = receive(&site, &mut receiver, queue).await;
        let written = writing.await.map_err(|_| died(&self.pgdata))?;
        // Where no more came, the writer was left with half a file. Where the writer stopped, that
        // was what it closed the queue for, and nothing is wrong with what came.
        let end = received?;
        let written = written?;
        let take = self.clone();
        let finish = move || written.finish(&take.conninfo, &take.slot);
        let files = tokio::task::spawn_blocking(finish).await.map_err(|_| died(&self.pgdata))??;
        let progress = *progress.borrow();
        Ok(Seeded { start: begins.start, end, files, progress })
    }

    async fn tell_what_is_here(&self, sender: &mut Sender) -> Result<Directory, SeedError> {
        let (queue, mut messages) = mpsc::channel(QUEUE_MESSAGES_MAX);
        let take = self.clone();
        let looking = tokio::task::spawn_blocking(move || {
            let directory = directory::prepare(&take.pgdata, &take.system_id, take.overwrite)?;
            directory.digests(|has| queue.blocking_send(has).is_ok())?;
            Ok::<_, SeedError>(directory)
        });
        while let Some(has) = messages.recv().await {
            sender.send(has.encode()).await?;
        }
        let directory = looking.await.map_err(|_| died(&self.pgdata))??;
        sender.send(FromTaker::Go.encode()).await?;
        Ok(directory)
    }

    async fn begin(&self, site: &str, receiver: &mut Receiver) -> Result<Begins, SeedError> {
        let protocol = |what: String| SeedError::Protocol { site: site.to_owned(), what };
        let first = receiver.next().await?.ok_or_else(|| protocol("no answer".to_owned()))?;
        let answer = serde_json::from_slice(&first)
            .map_err(|error| protocol(format!("an answer that cannot be read ({error})")))?;
        match answer {
            SeedAnswer::Refused { why } => Err(SeedError::Refused { site: site.to_owned(), why }),
            SeedAnswer::Begins { system_id, .. } if system_id != self.system_id => {
                Err(SeedError::DoesNotFit(format!(
                    "the principal's system identifier is {system_id}, and the spool holds the log \
                     of {}: it is another cluster",
                    self.system_id
                )))
            }
            SeedAnswer::Begins { start, .. } if start < self.kept_from => {
                Err(SeedError::DoesNotFit(format!(
                    "the files need the log from {start} on, and the spool keeps it from {} on. A \
                     principal that is a standby itself gives files as of its last restartpoint: \
                     CHECKPOINT on its primary, then on it, and run this again",
                    self.kept_from
                )))
            }
            SeedAnswer::Begins { start, timeline, bytes, tablespaces, .. } => {
                Ok(Begins { start, timeline, bytes, tablespaces })
            }
        }
    }

    /// Where each tablespace goes here.
    fn placed(&self, tablespaces: &[(u32, String)]) -> Result<Vec<(u32, PathBuf)>, SeedError> {
        let placed = tablespaces.iter().map(|(oid, there)| {
            let mapped = self.tablespaces.iter().find(|(from, _)| from == Path::new(there));
            let here = mapped.map_or_else(|| PathBuf::from(there), |(_, to)| to.clone());
            if here.is_absolute() {
                Ok((*oid, here))
            } else {
                Err(SeedError::Directory {
                    path: here,
                    what: "is no absolute path: PostgreSQL wants one for a tablespace".to_owned(),
                })
            }
        });
        placed.collect()
    }
}

fn died(pgdata: &Path) -> SeedError {
    let error = std::io::Error::other("the thread that does it died");
    SeedError::Io { action: "write to", path: pgdata.to_owned(), error }
}

struct Begins {
    start: Lsn,
    timeline: u32,
    bytes: u64,
    tablespaces: Vec<(u32, String)>,
}

/// Hands on what comes; where the backup ends.
async fn receive(
    site: &str,
    receiver: &mut Receiver,
    queue: mpsc::Sender<FromGiver>,
) -> Result<Lsn, SeedError> {
    let protocol = |what: String| SeedError::Protocol { site: site.to_owned(), what };
    loop {
        let message = receiver.next().await?;
        let message = message.ok_or_else(|| protocol("no more, before the end".to_owned()))?;
        match FromGiver::decode(message).map_err(|what| protocol(what.to_string()))? {
            FromGiver::End { end } => return Ok(end),
            FromGiver::Failed { why } => {
                let why = String::from_utf8_lossy(&why).into_owned();
                return Err(SeedError::Refused { site: site.to_owned(), why });
            }
            message => {
                if queue.send(message).await.is_err() {
                    // The writer has ended, and says why.
                    return Ok(Lsn::ZERO);
                }
            }
        }
    }
}
