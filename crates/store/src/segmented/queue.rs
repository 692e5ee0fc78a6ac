//! What waits for the writer: batches, bounded by bytes, and requests to roll.

use super::segment::lock;
use crate::{Batch, StoreError, StoredBlock};
use farshore_model::{DictionaryId, Lsn};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Entries on their way to disk.
#[derive(Debug)]
pub(crate) struct Queued {
    pub content: Queueable,
    /// Given back when the entries have been written and their memory freed.
    pub permit: OwnedSemaphorePermit,
}

/// What can be on its way to disk.
#[derive(Debug)]
pub(crate) enum Queueable {
    /// Entries that are made into blocks here.
    Batch(Batch),
    /// A block of entries of another store, and every definition that it may refer to.
    Stored(StoredBlock, Arc<[DictionaryId]>),
}

impl Queueable {
    /// Positions of the first and the last entry.
    fn span(&self) -> Option<(Lsn, Lsn)> {
        match self {
            Queueable::Batch(batch) => {
                let ends = batch.entries.first().zip(batch.entries.last());
                ends.map(|(first, last)| (first.position, last.position))
            }
            Queueable::Stored(block, _) => Some((block.first, block.last)),
        }
    }

    /// Payload bytes in memory.
    pub fn len(&self) -> usize {
        match self {
            Queueable::Batch(batch) => batch.payload.len(),
            Queueable::Stored(block, _) => block.payload.len(),
        }
    }
}

#[derive(Debug)]
struct State {
    batches: VecDeque<Queued>,
    /// Position of the last entry accepted.
    accepted_end: Lsn,
    /// No more batches; what is queued is still written.
    closing: bool,
    /// The writer has ended; nothing will be written any more.
    ended: bool,
    rolls_wanted: u64,
    rolls_done: u64,
    /// Set while the writer waits for room on the disk: with what.
    waiting_for_room: Option<String>,
}

/// How often a writer that waits for room on the disk tries again.
const TRY_AGAIN_EVERY: Duration = Duration::from_millis(500);

/// Bound on bytes: `permits`. Producers wait for it asynchronously, in order; the writer waits on
/// `work`; those who asked for a roll wait on `rolled`.
#[derive(Debug)]
pub(crate) struct Queue {
    state: Mutex<State>,
    work: Condvar,
    rolled: Condvar,
    permits: Arc<Semaphore>,
    permits_max: u32,
}

/// What the writer does next.
#[derive(Debug)]
pub(crate) struct Work {
    pub batches: VecDeque<Queued>,
    /// Roll afterwards and report this number as done.
    pub roll: Option<u64>,
    /// Nothing will follow.
    pub last: bool,
}

impl Queue {
    pub fn new(bytes_max: usize, end: Lsn) -> Queue {
        let permits_max = u32::try_from(bytes_max.max(1)).unwrap_or(u32::MAX);
        let permits_max = permits_max.min(Semaphore::MAX_PERMITS as u32);
        Queue {
            state: Mutex::new(State {
                batches: VecDeque::new(),
                accepted_end: end,
                closing: false,
                ended: false,
                rolls_wanted: 0,
                rolls_done: 0,
                waiting_for_room: None,
            }),
            work: Condvar::new(),
            rolled: Condvar::new(),
            permits: Arc::new(Semaphore::new(permits_max as usize)),
            permits_max,
        }
    }

    /// Waits for room; a batch larger than the bound waits for an empty queue. `None` once the
    /// writer has ended.
    pub async fn room_for(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let wanted = u32::try_from(bytes).unwrap_or(u32::MAX).min(self.permits_max);
        self.permits.clone().acquire_many_owned(wanted).await.ok()
    }

    /// Hands a batch over. `Ok(false)` once the writer has ended.
    pub fn push(&self, queued: Queued) -> Result<bool, StoreError> {
        let Some((first, last)) = queued.content.span() else { return Ok(true) };
        let mut state = lock(&self.state);
        if state.ended || state.closing {
            return Ok(false);
        }
        if first <= state.accepted_end {
            return Err(StoreError::OutOfOrder { position: first, end: state.accepted_end });
        }
        if let Queueable::Stored(block, _) = &queued.content
            && block.after != state.accepted_end
        {
            return Err(StoreError::Hole { after: block.after, end: state.accepted_end });
        }
        state.accepted_end = last;
        state.batches.push_back(queued);
        drop(state);
        self.work.notify_one();
        Ok(true)
    }

    /// Position of the last entry accepted.
    pub fn accepted_end(&self) -> Lsn {
        lock(&self.state).accepted_end
    }

    /// Waits for work. Called by the writer alone.
    pub fn take(&self) -> Work {
        let mut state = lock(&self.state);
        loop {
            let roll = (state.rolls_wanted > state.rolls_done).then_some(state.rolls_wanted);
            if !state.batches.is_empty() || roll.is_some() || state.closing {
                let batches = std::mem::take(&mut state.batches);
                return Work { batches, roll, last: state.closing };
            }
            state = self.work.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// Asks the writer to begin a new segment and waits until it has, has ended, or cannot for want
    /// of room: whoever asks may be about to make some.
    pub fn roll(&self) {
        let mut state = lock(&self.state);
        if state.ended || state.closing || state.waiting_for_room.is_some() {
            return;
        }
        state.rolls_wanted += 1;
        let wanted = state.rolls_wanted;
        self.work.notify_one();
        while state.rolls_done < wanted && !state.ended && state.waiting_for_room.is_none() {
            state = self.rolled.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// The disk is full, or refuses for another reason that may pass: waits a moment. False when the store is being closed, and the writer must
    /// give up. Called by the writer alone.
    pub fn wait_for_room(&self, refused: &StoreError) -> bool {
        let mut state = lock(&self.state);
        if state.waiting_for_room.is_none() {
            tracing::error!("the log takes no more: {refused}");
            state.waiting_for_room = Some(refused.to_string());
            self.rolled.notify_all();
        }
        if !state.closing {
            let waited = self.work.wait_timeout(state, TRY_AGAIN_EVERY);
            state = waited.unwrap_or_else(|e| e.into_inner()).0;
        }
        !state.closing
    }

    /// What the writer waits for room with, if it does.
    pub fn waiting_for_room(&self) -> Option<String> {
        lock(&self.state).waiting_for_room.clone()
    }

    /// There was room.
    pub fn found_room(&self) {
        if lock(&self.state).waiting_for_room.take().is_some() {
            tracing::info!("the disk takes what it had no room for, or refused: the log goes on");
        }
    }

    /// Reports a roll as done.
    pub fn rolled(&self, number: u64) {
        lock(&self.state).rolls_done = number;
        self.rolled.notify_all();
    }

    /// Lets the writer write what is queued and end.
    pub fn close(&self) {
        lock(&self.state).closing = true;
        self.work.notify_all();
    }

    /// The writer has ended: nobody may wait for it any more.
    pub fn ended(&self) {
        let dropped = {
            let mut state = lock(&self.state);
            state.ended = true;
            std::mem::take(&mut state.batches)
        };
        self.permits.close();
        self.rolled.notify_all();
        drop(dropped);
    }
}
