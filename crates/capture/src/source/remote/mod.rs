//! A publisher that another site connects to, asked over channels to that site.
//!
//! One channel is kept for questions, one goes with each snapshot, and one with each session.

mod session;

use super::channel::{Channel, ChannelError, Opener};
use super::frame::{self, Received};
use super::message::{ANSWER_BYTES_MAX, Answer, Request, decode_answer, encode_request};
use super::{
    AddedColumn, Asked, DroppedColumns, GrownTable, Key, OldValue, Snapshot, SnapshotSession,
    Source, Tell,
};
use crate::CaptureError;
use crate::publication::{PublishedTable, TableName};
use crate::schema::{Definitions, SequencePosition};
use crate::timelines::Timelines;
use farshore_model::Lsn;
use farshore_store::BoxFuture;
use session::RemoteSession;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long the other side may take to confirm that something has ended.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(5);

/// So many tables are named that a snapshot need not keep as they are.
const FOLLOWED_MAX: usize = 100_000;

/// The publisher of a publication of another site.
pub struct Remote {
    site: Site,
    /// A channel that nothing is asked on now.
    idle: Mutex<Option<Box<dyn Channel>>>,
}

impl Remote {
    /// A publication at the site called `site`, to which `opener` opens channels.
    pub fn new(site: &str, opener: Arc<dyn Opener>) -> Remote {
        Remote { site: Site { name: site.into(), opener }, idle: Mutex::default() }
    }

    /// Asks on the channel that is kept, or on a new one. A dropped future drops its channel, so
    /// that no later question gets this one's answer.
    async fn ask(&self, request: &Request) -> Result<Answer, CaptureError> {
        let kept = lock(&self.idle).take();
        if let Some(mut channel) = kept {
            // It may have ended since; nothing that is asked here changes anything.
            match exchange(channel.as_mut(), request, &[]).await {
                Ok(answer) => {
                    *lock(&self.idle) = Some(channel);
                    return Ok(answer);
                }
                Err(error) => tracing::debug!(site = %self.site.name, %error, "asked again"),
            }
        }
        let mut channel = self.site.open().await?;
        let answer = exchange(channel.as_mut(), request, &[]).await;
        let answer = answer.map_err(|error| self.site.error(error))?;
        *lock(&self.idle) = Some(channel);
        Ok(answer)
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote").field("site", &self.site.name).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Sends a request and waits for what it gives first.
async fn exchange(
    channel: &mut dyn Channel,
    request: &Request,
    keys: &[&Key],
) -> Result<Answer, ChannelError> {
    let message = encode_request(request, keys).map_err(ChannelError::permanent)?;
    frame::send(channel, &message).await?;
    match frame::receive(channel, ANSWER_BYTES_MAX).await? {
        Received::Message(answer) => decode_answer(&answer).map_err(ChannelError::permanent),
        Received::Data(_) => Err(ChannelError::permanent("data came instead of an answer")),
        Received::End => Err(ended()),
    }
}

fn ended() -> ChannelError {
    ChannelError::away("it ended the channel")
}

/// The other site.
#[derive(Clone)]
struct Site {
    name: Arc<str>,
    opener: Arc<dyn Opener>,
}

impl Site {
    async fn open(&self) -> Result<Box<dyn Channel>, CaptureError> {
        self.opener.open().await.map_err(|error| self.error(error))
    }

    fn error(&self, error: ChannelError) -> CaptureError {
        let ChannelError { message, transient } = error;
        CaptureError::Remote { site: self.name.to_string(), message, transient }
    }

    /// What an answer means that is not the one hoped for.
    fn failed(&self, answer: Answer) -> CaptureError {
        let site = self.name.to_string();
        match answer {
            Answer::Failed { message, transient } => {
                CaptureError::Remote { site, message, transient }
            }
            // Without what is in it: that can be large.
            _other => {
                let message = "it answered something else than what was asked".to_owned();
                CaptureError::Remote { site, message, transient: false }
            }
        }
    }

    /// Ends what a channel stands for, and waits until that is so, if not for long.
    async fn close(&self, mut channel: Box<dyn Channel>) {
        let closed = exchange(channel.as_mut(), &Request::Close, &[]);
        if !matches!(tokio::time::timeout(GOODBYE_TIMEOUT, closed).await, Ok(Ok(Answer::Done))) {
            tracing::debug!(site = %self.name, "it did not say goodbye");
        }
    }
}

impl Source for Remote {
    fn server(&self) -> String {
        format!("site {}", self.site.name)
    }

    fn published_tables(&self) -> Asked<'_, Vec<PublishedTable>> {
        Box::pin(async move {
            match self.ask(&Request::PublishedTables).await? {
                Answer::Tables(tables) => Ok(tables),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn partitioned_tables(&self) -> Asked<'_, Vec<u32>> {
        Box::pin(async move {
            match self.ask(&Request::PartitionedTables).await? {
                Answer::Oids(tables) => Ok(tables),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn partitions(&self) -> Asked<'_, Option<(Vec<PublishedTable>, Definitions)>> {
        Box::pin(async move {
            match self.ask(&Request::Partitions).await? {
                Answer::Partitions(partitions) => Ok(partitions),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn definitions<'a>(&'a self, tables: &'a [u32]) -> Asked<'a, Definitions> {
        Box::pin(async move {
            match self.ask(&Request::Definitions { tables: tables.to_vec() }).await? {
                Answer::Definitions(definitions) => Ok(definitions),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn sequences(&self) -> Asked<'_, Vec<SequencePosition>> {
        Box::pin(async move {
            match self.ask(&Request::Sequences).await? {
                Answer::Sequences(positions) => Ok(positions),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn timelines(&self) -> Asked<'_, Timelines> {
        Box::pin(async move {
            match self.ask(&Request::Timelines).await? {
                Answer::Timelines(timelines) => Ok(timelines),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn dropped_columns<'a>(
        &'a self,
        table: &'a TableName,
        gone: &'a [String],
    ) -> Asked<'a, DroppedColumns> {
        Box::pin(async move {
            let request = Request::DroppedColumns { table: table.clone(), gone: gone.to_vec() };
            match self.ask(&request).await? {
                Answer::Dropped(dropped) => Ok(dropped),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn old_values<'a>(
        &'a self,
        table: &'a GrownTable,
        columns: &'a [AddedColumn],
    ) -> Asked<'a, Vec<OldValue>> {
        Box::pin(async move {
            let GrownTable { table, oid, copied_from, columns: now } = table.clone();
            let columns_now = now;
            let request = Request::OldValues {
                table,
                columns: columns.to_vec(),
                oid,
                copied_from,
                columns_now,
            };
            match self.ask(&request).await? {
                Answer::OldValues(values) if values.len() == columns.len() => Ok(values),
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn export_telling<'a>(
        &'a self,
        reader: &'a str,
        followed: &'a [u32],
        _tell: &'a Tell<'a>,
    ) -> Asked<'a, Box<dyn Snapshot>> {
        Box::pin(async move {
            let mut channel = self.site.open().await?;
            // A request has its bounds; what is left out is kept as it is like all others.
            let followed = followed.iter().copied().take(FOLLOWED_MAX).collect();
            let request = Request::Export { reader: reader.to_owned(), followed };
            let answer = exchange(channel.as_mut(), &request, &[]).await;
            match answer.map_err(|error| self.site.error(error))? {
                Answer::Exported { consistent_point, snapshot } => {
                    let (site, point) = (self.site.clone(), Lsn(consistent_point));
                    let channel = Mutex::new(channel);
                    let snapshot = RemoteSnapshot { site, point, id: snapshot, channel };
                    Ok(Box::new(snapshot) as Box<dyn Snapshot>)
                }
                other => Err(self.site.failed(other)),
            }
        })
    }
}

struct RemoteSnapshot {
    site: Site,
    point: Lsn,
    id: String,
    /// Keeps the snapshot; nothing is asked on it. (A mutex makes it shareable.)
    channel: Mutex<Box<dyn Channel>>,
}

impl Snapshot for RemoteSnapshot {
    fn consistent_point(&self) -> Lsn {
        self.point
    }

    fn open(&self) -> Asked<'_, Box<dyn SnapshotSession>> {
        Box::pin(async move {
            let mut channel = self.site.open().await?;
            let request = Request::Open { snapshot: self.id.clone() };
            let answer = exchange(channel.as_mut(), &request, &[]).await;
            match answer.map_err(|error| self.site.error(error))? {
                Answer::Done => {
                    let session = RemoteSession::new(self.site.clone(), channel);
                    Ok(Box::new(session) as Box<dyn SnapshotSession>)
                }
                other => Err(self.site.failed(other)),
            }
        })
    }

    fn close(self: Box<Self>) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            let Self { site, channel, .. } = *self;
            let channel = channel.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
            site.close(channel).await;
        })
    }
}
