//! The store's log as a sequence of transactions, read one block ahead.

use crate::{ApplyError, Given};
use bytes::Bytes;
use farshore_model::transaction::Header;
use farshore_model::{DictionaryId, Durable, Lsn, Relation};
use farshore_store::{
    Entry, EntryKind, Growth, InMemory, Item, LogReader, LogStore, SpillFollower, SpillId,
    SpillItem, SpillReader, StoreError,
};
use farshore_wire::pgoutput::stored;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// Behind a block that is larger than this the next one is not read ahead.
const LARGE_BYTES: usize = 2 << 20;

/// Payload bytes that are read at once, if they are there.
const READ_AHEAD_BYTES: usize = 256 << 10;

/// Relation definitions read so far.
pub type Definitions = HashMap<DictionaryId, Arc<Relation>>;

/// A transaction, or the fact that there was none up to some position.
pub enum LogItem {
    /// A committed transaction.
    Transaction {
        /// What is known of it.
        header: Header,
        /// Its commands.
        body: Body,
    },
    /// Nothing happened up to here.
    Watermark(Lsn),
    /// The next transaction is the one that the feed was told to halt at.
    Halt(Lsn),
}

/// Where a transaction's commands are.
pub enum Body {
    /// Here.
    Inline(Bytes),
    /// In a spill of the store.
    Spilled(SpillId),
}

type BlockRead = JoinHandle<(Box<dyn LogReader>, Result<Option<Vec<Item>>, StoreError>)>;

/// Reads the log from a position onwards.
pub struct LogFeed {
    store: Arc<dyn LogStore>,
    durable: watch::Receiver<Durable>,
    reading: Option<BlockRead>,
    reader: Option<Box<dyn LogReader>>,
    items: VecDeque<Item>,
    definitions: Definitions,
    after: Lsn,
    halt_at: Option<Lsn>,
    given: Option<Arc<Given>>,
}

impl LogFeed {
    /// Opens the log after `after`.
    pub fn open(store: Arc<dyn LogStore>, after: Lsn) -> Result<LogFeed, StoreError> {
        let durable = store.durable();
        let reader = store.read_from(after)?;
        Ok(LogFeed {
            store,
            durable,
            reading: None,
            reader: Some(reader),
            items: VecDeque::new(),
            definitions: HashMap::new(),
            after,
            halt_at: None,
            given: None,
        })
    }

    /// What is read is for a target: how far it can come is told here.
    pub fn tells(&mut self, given: Arc<Given>) {
        self.given = Some(given);
    }

    /// Ends the sequence before the transaction at `position`.
    pub fn halt_at(&mut self, position: Option<Lsn>) {
        self.halt_at = position;
    }

    /// Definitions that the items returned so far may refer to.
    pub fn definitions(&self) -> &Definitions {
        &self.definitions
    }

    /// The next item, or `None` when everything durable has been returned. Cancel-safe.
    pub async fn next_at_hand(&mut self) -> Result<Option<LogItem>, ApplyError> {
        loop {
            while let Some(item) = self.items.pop_front() {
                if let Some(item) = self.take(item)? {
                    return Ok(Some(item));
                }
            }
            if let Some(reader) = &mut self.reader {
                // Seen before: what becomes durable meanwhile wakes us again.
                self.durable.borrow_and_update();
                match reader.next_in_memory()? {
                    InMemory::Items(items) => {
                        self.items.extend(items);
                        continue;
                    }
                    InMemory::End => return Ok(None),
                    InMemory::Elsewhere => {}
                }
            }
            self.start_reading();
            let Some(reading) = &mut self.reading else {
                return Err(ApplyError::NotYet("the log reader went away".to_owned()));
            };
            let (reader, block) = reading.await.map_err(reader_died)?;
            self.reading = None;
            self.reader = Some(reader);
            match block? {
                None => return Ok(None),
                Some(items) => {
                    // Rows of many megabytes are not read ahead: memory is worth more then.
                    let large = payload_bytes(&items) > LARGE_BYTES;
                    self.items.extend(items);
                    if !large {
                        self.start_reading();
                    }
                }
            }
        }
    }

    /// Waits until more is durable than [`LogFeed::next_at_hand`] has looked at. Cancel-safe.
    /// Never returns once the store has stopped taking writes.
    pub async fn wait_for_more(&mut self) {
        if self.durable.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    fn start_reading(&mut self) {
        if let Some(mut reader) = self.reader.take() {
            // Seen before the read begins: what becomes durable during it wakes us again.
            self.durable.borrow_and_update();
            self.reading = Some(tokio::task::spawn_blocking(move || {
                let block = read_ahead(reader.as_mut());
                (reader, block)
            }));
        }
    }

    fn take(&mut self, item: Item) -> Result<Option<LogItem>, ApplyError> {
        let Entry { position, kind, payload, .. } = match item {
            Item::Definition(id, bytes) => {
                define(&mut self.definitions, id, &bytes, self.after)?;
                return Ok(None);
            }
            Item::Entry(entry) => entry,
        };
        if position <= self.after {
            return Ok(None);
        }
        if self.halt_at == Some(position) {
            return Ok(Some(LogItem::Halt(position)));
        }
        self.after = position;
        if let Some(given) = &self.given {
            given.reaches(position);
        }
        let stored = |what: String| ApplyError::Stored { position, what };
        let body = |payload: &Bytes| -> Result<(Header, Bytes), ApplyError> {
            let (header, body) = Header::decode(payload).map_err(|e| stored(e.to_string()))?;
            Ok((header, payload.slice_ref(body)))
        };
        Ok(Some(match kind {
            EntryKind::Watermark => LogItem::Watermark(position),
            EntryKind::Transaction => {
                let (header, body) = body(&payload)?;
                LogItem::Transaction { header, body: Body::Inline(body) }
            }
            EntryKind::Spilled(spill) => {
                let (header, _) = body(&payload)?;
                LogItem::Transaction { header, body: Body::Spilled(spill) }
            }
        }))
    }

    /// Opens a spilled transaction's commands.
    pub fn open_spill(&self, spill: SpillId) -> Result<SpillFeed, StoreError> {
        Ok(SpillFeed { reader: Some(self.store.open_spill(spill)?), reading: None })
    }

    /// The next chunk of a spill, its definitions added to ours. Memory: one block ahead.
    pub async fn next_chunk(
        &mut self,
        spill: &mut SpillFeed,
        position: Lsn,
    ) -> Result<Option<Vec<Bytes>>, ApplyError> {
        spill.start_reading();
        let Some(reading) = &mut spill.reading else { return Ok(None) };
        let (reader, block) = reading.await.map_err(reader_died)?;
        spill.reading = None;
        let Some(items) = block? else { return Ok(None) };
        spill.reader = Some(reader);
        let chunks = chunks_of(items, &mut self.definitions, position)?;
        if chunks.iter().map(Bytes::len).sum::<usize>() <= LARGE_BYTES {
            spill.start_reading();
        }
        Ok(Some(chunks))
    }
}

/// Reads blocks until there is about [`READ_AHEAD_BYTES`], or no more: handing a block from thread
/// to thread costs more than reading a small one.
fn read_ahead(reader: &mut dyn LogReader) -> Result<Option<Vec<Item>>, StoreError> {
    let Some(mut items) = reader.next_block()? else { return Ok(None) };
    let mut bytes = payload_bytes(&items);
    while bytes < READ_AHEAD_BYTES {
        let Some(more) = reader.next_block()? else { break };
        bytes += payload_bytes(&more);
        items.extend(more);
    }
    Ok(Some(items))
}

fn payload_bytes(items: &[Item]) -> usize {
    items
        .iter()
        .map(|item| match item {
            Item::Definition(_, bytes) => bytes.len(),
            Item::Entry(entry) => entry.payload.len(),
        })
        .sum()
}

type ChunkRead = JoinHandle<(Box<dyn SpillReader>, Result<Option<Vec<SpillItem>>, StoreError>)>;

/// A spilled transaction being read, one block ahead.
pub struct SpillFeed {
    reader: Option<Box<dyn SpillReader>>,
    reading: Option<ChunkRead>,
}

impl SpillFeed {
    fn start_reading(&mut self) {
        if let Some(mut reader) = self.reader.take() {
            self.reading = Some(tokio::task::spawn_blocking(move || {
                let block = reader.next_block();
                (reader, block)
            }));
        }
    }
}

/// A transaction's commands, read while they arrive.
pub struct SpillFollowFeed {
    growth: watch::Receiver<Growth>,
    follower: Option<Box<dyn SpillFollower>>,
}

impl SpillFollowFeed {
    /// From its beginning.
    pub fn new(follower: Box<dyn SpillFollower>) -> SpillFollowFeed {
        SpillFollowFeed { growth: follower.growth(), follower: Some(follower) }
    }

    /// How far it has come.
    pub fn growth(&self) -> watch::Receiver<Growth> {
        self.growth.clone()
    }

    /// Whether an entry that names its number means this spill. See [`SpillFollower`].
    pub fn has_the_number(&self) -> bool {
        self.follower.as_ref().is_some_and(|follower| follower.has_the_number())
    }

    /// The next chunk of what was there at `growth`, its definitions added to `definitions`; `None`
    /// when that has been read.
    pub async fn next_chunks(
        &mut self,
        growth: Growth,
        position: Lsn,
        definitions: &mut Definitions,
    ) -> Result<Option<Vec<Bytes>>, ApplyError> {
        let Some(mut follower) = self.follower.take() else { return Ok(None) };
        let reading = tokio::task::spawn_blocking(move || {
            let block = follower.next_block(growth);
            (follower, block)
        });
        let (follower, block) = reading.await.map_err(reader_died)?;
        self.follower = Some(follower);
        let Some(items) = block? else { return Ok(None) };
        chunks_of(items, definitions, position).map(Some)
    }
}

/// The commands among `items`; what is defined there becomes known.
fn chunks_of(
    items: Vec<SpillItem>,
    definitions: &mut Definitions,
    position: Lsn,
) -> Result<Vec<Bytes>, ApplyError> {
    let mut chunks = Vec::new();
    for item in items {
        match item {
            SpillItem::Definition(id, bytes) => define(definitions, id, &bytes, position)?,
            SpillItem::Chunk(bytes) => chunks.push(bytes),
        }
    }
    Ok(chunks)
}

fn define(
    definitions: &mut Definitions,
    id: DictionaryId,
    bytes: &[u8],
    near: Lsn,
) -> Result<(), ApplyError> {
    if definitions.contains_key(&id) {
        return Ok(());
    }
    let relation = stored::decode_definition(bytes).map_err(|error| ApplyError::Stored {
        position: near,
        what: format!("definition {} does not parse: {error}", id.0),
    })?;
    definitions.insert(id, Arc::new(relation));
    Ok(())
}

fn reader_died(error: tokio::task::JoinError) -> ApplyError {
    ApplyError::NotYet(format!("the log reader's thread ended: {error}"))
}
