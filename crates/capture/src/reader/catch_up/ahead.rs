//! The connection that batches come on. It fetches what was asked for, one batch after the other,
//! so that the publisher is at the next while this one is handled: it is done with a batch as soon
//! as the last of it has been sent.

use super::{Ended, in_time, refused};
use crate::CaptureError;
use crate::publication::PublicationSpec;
use bytes::Bytes;
use farshore_model::Lsn;
use farshore_pg::Connection;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::JoinHandle;

/// Bytes that have been fetched and not handled, at most, beside a single row that is larger.
const AHEAD_BYTES: usize = 32 << 20;

/// Rows are handed on when they come to this, in bytes, and at the end.
const PIECE_BYTES: usize = 64 << 10;

/// One is handled, one is asked for ahead.
const ASKED_MAX: usize = 2;

/// Rows of COPY's binary format, cut as they came.
pub(super) struct Piece {
    /// In order.
    pub rows: Vec<Bytes>,
    _room: Option<OwnedSemaphorePermit>,
}

enum Fetched {
    Piece(Piece),
    /// The batch is complete: everything up to there.
    End(Lsn),
    /// Nothing more comes.
    Ended(Ended),
}

/// What a batch is asked for by.
struct Question {
    /// A COPY in binary.
    copy: String,
    /// Where it ends. It goes with what comes: what is planned meanwhile may end elsewhere.
    upto: Lsn,
}

/// What comes next of the batches that were asked for.
pub(super) enum Next {
    /// Rows.
    Piece(Piece),
    /// The first of them is complete, and everything up to there has come.
    End(Lsn),
}

/// Fetches batches until it is dropped.
pub(super) struct Ahead {
    asked: mpsc::Sender<Question>,
    fetched: mpsc::Receiver<Fetched>,
    /// Batches that were asked for and have not come to their end.
    on_the_way: usize,
    task: JoinHandle<()>,
}

impl Ahead {
    /// Begins with nothing asked for.
    pub fn start(spec: PublicationSpec, sql: Connection) -> Ahead {
        let (asked, questions) = mpsc::channel(ASKED_MAX);
        let (report, fetched) = mpsc::channel(AHEAD_BYTES / PIECE_BYTES);
        let task = tokio::spawn(fetch_all(spec, sql, questions, report));
        Ahead { asked, fetched, on_the_way: 0, task }
    }

    /// Asks for a batch that ends at `upto`, behind those that were asked for, by a COPY in binary.
    pub async fn ask(&mut self, copy: String, upto: Lsn) {
        self.on_the_way += 1;
        // When the task has ended, what comes says why.
        let _ = self.asked.send(Question { copy, upto }).await;
    }

    /// What comes next of the first batch that has not come to its end.
    pub async fn next(&mut self) -> Result<Next, Ended> {
        match self.fetched.recv().await {
            Some(Fetched::Piece(piece)) => Ok(Next::Piece(piece)),
            Some(Fetched::End(upto)) => {
                self.on_the_way -= 1;
                Ok(Next::End(upto))
            }
            Some(Fetched::Ended(ended)) => Err(ended),
            None => Err(CaptureError::Interrupted("batches come no more".to_owned()).into()),
        }
    }

    /// Whether the publisher may be at work on something.
    pub fn is_at_work(&self) -> bool {
        self.on_the_way > 0
    }

    /// Ends the connection, once what was asked for has come.
    pub async fn close(mut self) {
        let (nothing, _) = mpsc::channel(1);
        self.asked = nothing;
        let _ = (&mut self.task).await;
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn fetch_all(
    spec: PublicationSpec,
    mut sql: Connection,
    mut asked: mpsc::Receiver<Question>,
    report: mpsc::Sender<Fetched>,
) {
    let room = Arc::new(Semaphore::new(AHEAD_BYTES));
    while let Some(question) = asked.recv().await {
        if let Err(ended) = fetch(&spec, &mut sql, &question, &room, &report).await {
            let _ = report.send(Fetched::Ended(ended)).await;
            return;
        }
    }
    sql.close().await;
}

async fn fetch(
    spec: &PublicationSpec,
    sql: &mut Connection,
    question: &Question,
    room: &Arc<Semaphore>,
    report: &mpsc::Sender<Fetched>,
) -> Result<(), Ended> {
    let refused = |error| refused(spec.publisher_error(error));
    let mut copy = in_time(spec, sql.copy_out(&question.copy)).await?.map_err(refused)?;
    let (mut rows, mut bytes) = (Vec::new(), 0);
    loop {
        let came = match copy.next_buffered().map_err(refused)? {
            Some(row) => Some(row),
            None => in_time(spec, copy.next()).await?.map_err(refused)?,
        };
        let is_end = came.is_none();
        if let Some(row) = came {
            bytes += row.len() + size_of::<Bytes>();
            rows.push(row);
        }
        if bytes >= PIECE_BYTES || is_end && !rows.is_empty() {
            // What is larger than all the room waits until all of it is free.
            let wanted = u32::try_from(bytes.min(AHEAD_BYTES)).unwrap_or(u32::MAX);
            let _room = room.clone().acquire_many_owned(wanted).await.ok();
            let piece = Piece { rows: std::mem::take(&mut rows), _room };
            bytes = 0;
            if report.send(Fetched::Piece(piece)).await.is_err() {
                // Nobody waits for it any more.
                return Err(Ended::Cut(Ok(())));
            }
            if wanted as usize == AHEAD_BYTES {
                // The next row may be as large, and is in memory before its size is known.
                drop(room.acquire_many(wanted).await);
            }
        }
        if is_end {
            let _ = report.send(Fetched::End(question.upto)).await;
            return Ok(());
        }
    }
}
