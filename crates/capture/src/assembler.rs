//! From pgoutput messages to batches and spills. No network and no clock: messages in, calls on the
//! store out.
//!
//! A transaction that arrives whole is gathered in the batch under construction. One that arrives
//! in pieces before its commit (`streaming = 'on'`) is held here while it is small; one that
//! outgrows its bound goes to a spill and enters the log as one small entry when it commits. So
//! memory is bounded by the batch size, the bounds below and the largest single row.

use crate::CaptureError;
use crate::tracer::{self, Tracer};
use crate::types::TypeCatalog;
use farshore_fault as fault;
use farshore_model::transaction::{HEADER_LEN_MIN, Header, SUBTRANSACTION_MARK, push_command};
use farshore_model::{DictionaryId, Lsn, PgTime, Xid};
use farshore_store::{Batch, EntryKind, EntryMeta, LogStore, SpillWriter};
use farshore_wire::pgoutput::{self, Context, DecodeError, Message, stored};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

/// A transaction whose body grows past this goes to a spill, in bytes.
pub const SPILL_BYTES: usize = 4 << 20;

/// How many bytes of a streamed transaction are gathered before its spill is written to.
const CHUNK_BYTES: usize = 256 << 10;

/// A streamed transaction is held in memory up to this size, in bytes: a spill costs two fsyncs,
/// and a publisher with a small `logical_decoding_work_mem` streams everything. Fault-injection
/// builds spill early, so that small workloads meet both ways.
const HELD_BYTES_EACH: usize = if cfg!(feature = "faults") { 32 << 10 } else { 1 << 20 };

/// All streamed transactions together are held in memory up to this size, in bytes.
const HELD_BYTES_ALL: usize = 16 << 20;

/// Bytes that are set aside for a batch before anything of it is there, at most.
const RESERVED_MAX: usize = 512 << 10;

/// Builds batches from the messages of one replication connection.
pub struct Assembler {
    store: Arc<dyn LogStore>,
    context: Context,
    /// Position of the last entry handed out; what is not after it is a repetition.
    last_position: Lsn,
    batch: Batch,
    batch_definitions: BTreeSet<DictionaryId>,
    relations: HashMap<u32, Told>,
    types: TypeCatalog,
    /// Relation messages so far: which of two definitions is the newer.
    told: u64,
    open: Option<OpenTransaction>,
    streams: HashMap<Xid, StreamedTransaction>,
    current_stream: Option<Xid>,
    /// Bytes held of streams other than the current one.
    held_elsewhere: usize,
    changes_assembled: u64,
    /// What was committed since it was last asked.
    committed: Committed,
    /// Whose tracer tokens are kept.
    slot: String,
    /// Tokens that were not taken yet.
    tracers: VecDeque<Tracer>,
}

/// Transactions among the entries built.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Their commands.
    pub commands: u64,
    /// Position and commit time of the newest.
    pub newest: Option<(Lsn, PgTime)>,
}

/// A transaction between Begin and Commit.
struct OpenTransaction {
    xid: Xid,
    commit_lsn: Lsn,
    commit_time: PgTime,
    commands: u64,
    /// The tracer token that it is.
    tracer: Option<u64>,
    /// Where its payload starts in the batch.
    payload_start: usize,
    spill: Option<Box<dyn SpillWriter>>,
}

/// As many sub-transactions of a streamed transaction are remembered one by one.
const WRITERS_MAX: usize = 1 << 16;

/// A transaction that is being streamed before its commit.
struct StreamedTransaction {
    /// Commands that are not in the spill yet, and what they refer to.
    held: Vec<u8>,
    held_definitions: BTreeSet<DictionaryId>,
    /// Once it has outgrown memory.
    spill: Option<Box<dyn SpillWriter>>,
    commands: u64,
    /// Sub-transaction that the last written command belongs to.
    subtransaction: Xid,
    /// What wrote commands and has not rolled back: the transaction itself alone if it has, or its
    /// sub-transactions. Of more than [`WRITERS_MAX`] something is taken to be left.
    writers: BTreeSet<Xid>,
    aborted: BTreeSet<Xid>,
    /// Relations as this transaction was told of them; the rest of the session learns of them
    /// when it commits, as pgoutput does.
    relations: HashMap<u32, Told>,
}

/// A relation as the publisher described it.
#[derive(Clone, Copy)]
struct Told {
    definition: DictionaryId,
    /// Which Relation message of the connection it was.
    message: u64,
}

impl Assembler {
    /// Starts with a new replication connection. Entries at or before `last_position` are in the
    /// store already.
    pub fn new(store: Arc<dyn LogStore>, context: Context, last_position: Lsn) -> Assembler {
        Assembler {
            store,
            context: Context { in_stream: false, ..context },
            last_position,
            batch: Batch::default(),
            batch_definitions: BTreeSet::new(),
            relations: HashMap::new(),
            types: TypeCatalog::default(),
            told: 0,
            open: None,
            streams: HashMap::new(),
            current_stream: None,
            held_elsewhere: 0,
            changes_assembled: 0,
            committed: Committed::default(),
            slot: String::new(),
            tracers: VecDeque::new(),
        }
    }

    /// Keeps the tracer tokens of this slot: each is an entry of its own, without changes.
    pub fn keep_tracers(&mut self, slot: String) {
        self.slot = slot;
    }

    /// Tokens that are among the entries built so far, each once.
    pub fn take_tracers(&mut self) -> VecDeque<Tracer> {
        std::mem::take(&mut self.tracers)
    }

    /// Transactions among the entries built since this was asked last.
    pub fn take_committed(&mut self) -> Committed {
        std::mem::take(&mut self.committed)
    }

    /// What the messages are read by.
    pub fn context(&self) -> Context {
        self.context
    }

    /// Messages begin anew, as on another connection: what had not come to its commit is dropped.
    pub fn begin_again(&mut self) {
        if let Some(open) = self.open.take() {
            self.batch.payload.truncate(open.payload_start);
        }
        self.relations.clear();
        self.types.expire();
        self.streams.clear();
        self.current_stream = None;
        self.held_elsewhere = 0;
        self.context.in_stream = false;
    }

    /// Whether there are transactions that are streamed before their commit.
    pub fn is_streaming(&self) -> bool {
        !self.streams.is_empty()
    }

    /// Whether taking a message may write to a spill.
    pub fn has_spills(&self) -> bool {
        let open = self.open.as_ref().is_some_and(|open| open.spill.is_some());
        open || !self.streams.is_empty()
    }

    /// Position of the last entry that was built.
    pub fn last_position(&self) -> Lsn {
        self.last_position
    }

    /// Whether messages of a transaction that has begun are still to come.
    pub fn in_transaction(&self) -> bool {
        self.open.is_some() || self.current_stream.is_some()
    }

    /// Complete entries waiting in the batch.
    pub fn entries_waiting(&self) -> usize {
        self.batch.entries.len()
    }

    /// Bytes waiting in the batch.
    pub fn bytes_waiting(&self) -> usize {
        self.batch.payload.len()
    }

    /// Row changes taken so far on this connection.
    pub fn changes_assembled(&self) -> u64 {
        self.changes_assembled
    }

    /// What definitions say of user-defined types comes from here.
    pub fn types(&mut self) -> &mut TypeCatalog {
        &mut self.types
    }

    /// The types of the columns that a Relation message defines; nothing for other messages.
    pub fn column_types(&self, data: &[u8]) -> Result<Vec<u32>, AssembleError> {
        if data.first() != Some(&b'R') {
            return Ok(Vec::new());
        }
        match pgoutput::decode(data, &self.context)?.message {
            Message::Relation(relation) => {
                Ok(relation.columns.iter().map(|column| column.type_oid).collect())
            }
            _ => Ok(Vec::new()),
        }
    }

    /// Takes one message. Blocks on the disk when a spill is written.
    pub fn message(&mut self, data: &[u8]) -> Result<(), AssembleError> {
        match data.first() {
            Some(b'I' | b'U' | b'D' | b'T') => self.change(data),
            Some(_) | None => self.control(data),
        }
    }

    /// The complete entries, ready to append. A transaction in progress stays behind.
    pub fn take_batch(&mut self) -> Option<Batch> {
        if self.batch.entries.is_empty() {
            return None;
        }
        // The next batch is likely to be as long; growing to it would copy it several times.
        let payload = Vec::with_capacity(self.batch.payload.len().min(RESERVED_MAX));
        let next = Batch { payload, ..Batch::default() };
        let mut batch = std::mem::replace(&mut self.batch, next);
        batch.dictionary = self.batch_definitions.iter().copied().collect();
        match &mut self.open {
            None => self.batch_definitions.clear(),
            // What the open transaction refers to is among them: keep all, harmlessly.
            Some(open) => {
                self.batch.payload.extend_from_slice(&batch.payload[open.payload_start..]);
                batch.payload.truncate(open.payload_start);
                open.payload_start = 0;
            }
        }
        Some(batch)
    }

    /// Adds an entry without a transaction: the publisher's log has been read up to `position`.
    pub fn watermark(&mut self, position: Lsn) {
        if self.in_transaction() || position <= self.last_position {
            return;
        }
        self.push_entry(EntryMeta {
            position,
            commit_time: PgTime::now(),
            kind: EntryKind::Watermark,
            payload_len: 0,
        });
    }

    fn push_transaction(&mut self, entry: EntryMeta, commands: u64) {
        self.committed.commands += commands;
        self.committed.newest = Some((entry.position, entry.commit_time));
        self.push_entry(entry);
    }

    fn push_entry(&mut self, entry: EntryMeta) {
        self.last_position = entry.position;
        self.batch.entries.push(entry);
    }

    fn change(&mut self, data: &[u8]) -> Result<(), AssembleError> {
        if let Some(top) = self.current_stream {
            return self.streamed_change(top, data);
        }
        let Some(open) = &mut self.open else {
            return Err(AssembleError::Unexpected("a change outside a transaction".into()));
        };
        reserve_large(&mut self.batch.payload, data.len());
        let (relations, definitions) = (&self.relations, &mut self.batch_definitions);
        stored::rewrite_to_stored(data, &self.context, &mut self.batch.payload, |oid| {
            let id = relations.get(&oid).map(|told| told.definition);
            definitions.extend(id);
            id
        })?;
        open.commands += 1;
        self.changes_assembled += 1;
        if self.batch.payload.len() - open.payload_start > SPILL_BYTES {
            self.spill_open_transaction()?;
        }
        Ok(())
    }

    fn spill_open_transaction(&mut self) -> Result<(), AssembleError> {
        let Some(open) = &mut self.open else { return Ok(()) };
        let definitions: Vec<DictionaryId> = self.batch_definitions.iter().copied().collect();
        let spill = match &mut open.spill {
            Some(spill) => spill,
            None => open.spill.insert(self.store.begin_spill()?),
        };
        let body_start = open.payload_start + HEADER_LEN_MIN;
        spill.follows(self.last_position);
        spill.write(&self.batch.payload[body_start..], &definitions)?;
        self.batch.payload.truncate(body_start);
        self.batch.payload.shrink_to(SPILL_BYTES);
        Ok(())
    }

    fn streamed_change(&mut self, top: Xid, data: &[u8]) -> Result<(), AssembleError> {
        let stream = self.streams.get_mut(&top).ok_or_else(|| unknown_stream(top))?;
        // Inside a stream every change begins with its tag and its (sub)transaction.
        let subtransaction = data.get(1..5).and_then(|xid| xid.try_into().ok());
        let subtransaction = subtransaction.map_or(top, u32::from_be_bytes);
        if subtransaction != stream.subtransaction {
            let mut mark = [SUBTRANSACTION_MARK; 5];
            mark[1..].copy_from_slice(&subtransaction.to_be_bytes());
            push_command(&mut stream.held, &mark);
            stream.subtransaction = subtransaction;
            stream.commands += 1;
        }
        // What the transaction itself wrote stays if it commits: then no other writer matters.
        if subtransaction == top && !stream.writers.contains(&top) {
            stream.writers.clear();
        }
        if !stream.writers.contains(&top) {
            stream.writers.insert(subtransaction);
            if stream.writers.len() > WRITERS_MAX {
                stream.writers = BTreeSet::from([top]);
            }
        }
        reserve_large(&mut stream.held, data.len());
        let (relations, session, definitions) =
            (&stream.relations, &self.relations, &mut stream.held_definitions);
        stored::rewrite_to_stored(data, &self.context, &mut stream.held, |oid| {
            let told = relations.get(&oid).or_else(|| session.get(&oid));
            let id = told.map(|told| told.definition);
            definitions.extend(id);
            id
        })?;
        stream.commands += 1;
        self.changes_assembled += 1;
        let bound = match stream.spill {
            Some(_) => CHUNK_BYTES,
            None => HELD_BYTES_EACH.min(HELD_BYTES_ALL.saturating_sub(self.held_elsewhere)),
        };
        if stream.held.len() >= bound {
            stream.write_held(self.store.as_ref(), self.last_position)?;
        }
        Ok(())
    }

    fn control(&mut self, data: &[u8]) -> Result<(), AssembleError> {
        match pgoutput::decode(data, &self.context)?.message {
            Message::Begin(begin) => {
                if self.in_transaction() {
                    return Err(AssembleError::Unexpected("Begin inside a transaction".into()));
                }
                let payload_start = self.batch.payload.len();
                self.batch.payload.resize(payload_start + HEADER_LEN_MIN, 0);
                self.open = Some(OpenTransaction {
                    xid: begin.xid,
                    commit_lsn: begin.final_lsn,
                    commit_time: begin.commit_time,
                    commands: 0,
                    tracer: None,
                    payload_start,
                    spill: None,
                });
            }
            Message::Commit(commit) => self.commit(commit.commit_lsn, commit.end_lsn)?,
            Message::Relation(mut relation) => {
                let types = relation.columns.iter().map(|column| column.type_oid);
                relation.types = self.types.closure(types);
                let definition = self.store.define(&stored::encode_definition(&relation));
                self.told += 1;
                let id = Told { definition, message: self.told };
                match self.current_stream {
                    None => self.relations.insert(relation.oid, id),
                    Some(top) => {
                        let stream =
                            self.streams.get_mut(&top).ok_or_else(|| unknown_stream(top))?;
                        stream.relations.insert(relation.oid, id)
                    }
                };
            }
            Message::Type { oid, schema, name } => self.types.name(oid, schema, name),
            // Messages of others are no row's history.
            Message::Message { prefix, content, .. } => {
                let token = tracer::token(&self.slot, prefix, content);
                if let (Some(open), Some(_)) = (&mut self.open, token) {
                    open.tracer = token;
                }
            }
            // Origins matter to loops between publishers.
            Message::Origin { .. } => {}
            Message::StreamStart { xid, first } => self.stream_start(xid, first)?,
            Message::StreamStop => {
                let Some(top) = self.current_stream.take() else {
                    return Err(AssembleError::Unexpected("StreamStop outside a stream".into()));
                };
                self.context.in_stream = false;
                let stream = self.streams.get_mut(&top).ok_or_else(|| unknown_stream(top))?;
                // Many transactions may be streaming: an idle one with a spill holds no buffer.
                if stream.spill.is_some() {
                    stream.write_held(self.store.as_ref(), self.last_position)?;
                    stream.held = Vec::new();
                }
                if let Some(spill) = &mut stream.spill {
                    spill.flush()?;
                }
                self.held_elsewhere += stream.held.len();
            }
            Message::StreamAbort { xid, subxid, .. } => {
                if xid == subxid {
                    fault::point("spill.before-abort");
                    if let Some(aborted) = self.streams.remove(&xid) {
                        self.held_elsewhere -= aborted.held.len();
                    }
                } else if let Some(stream) = self.streams.get_mut(&xid) {
                    stream.writers.remove(&subxid);
                    stream.aborted.insert(subxid);
                }
            }
            Message::StreamCommit { xid, commit_lsn, end_lsn, commit_time } => {
                self.stream_commit(xid, commit_lsn, end_lsn, commit_time)?;
            }
            other @ (Message::Insert { .. }
            | Message::Update { .. }
            | Message::Delete { .. }
            | Message::Truncate { .. }
            | Message::BeginPrepare { .. }
            | Message::Prepare { .. }
            | Message::CommitPrepared { .. }
            | Message::RollbackPrepared { .. }
            | Message::StreamPrepare { .. }) => {
                return Err(AssembleError::Unexpected(format!("{other:?}")));
            }
        }
        Ok(())
    }

    fn commit(&mut self, commit_lsn: Lsn, end_lsn: Lsn) -> Result<(), AssembleError> {
        let Some(mut open) = self.open.take() else {
            return Err(AssembleError::Unexpected("Commit outside a transaction".into()));
        };
        if commit_lsn != open.commit_lsn {
            return Err(AssembleError::Unexpected(format!(
                "transaction {} begun for {} but committed at {commit_lsn}",
                open.xid, open.commit_lsn
            )));
        }
        let is_empty = open.commands == 0 && open.tracer.is_none();
        if is_empty || end_lsn <= self.last_position {
            self.batch.payload.truncate(open.payload_start);
            return Ok(());
        }
        if let Some(token) = open.tracer {
            let commit_time = open.commit_time;
            self.tracers.push_back(Tracer { token, position: end_lsn, commit_time });
        }
        let kind = match open.spill.take() {
            None => EntryKind::Transaction,
            Some(mut spill) => {
                let definitions: Vec<DictionaryId> =
                    self.batch_definitions.iter().copied().collect();
                let body_start = open.payload_start + HEADER_LEN_MIN;
                spill.write(&self.batch.payload[body_start..], &definitions)?;
                self.batch.payload.truncate(body_start);
                EntryKind::Spilled(spill.finish()?)
            }
        };
        let header = Header {
            xid: open.xid,
            commit_lsn,
            end_lsn,
            commit_time: open.commit_time,
            commands: open.commands,
            aborted_subtransactions: Vec::new(),
        };
        let mut encoded = Vec::with_capacity(HEADER_LEN_MIN);
        header.encode(&mut encoded);
        let header_end = open.payload_start + HEADER_LEN_MIN;
        self.batch.payload[open.payload_start..header_end].copy_from_slice(&encoded);
        let entry = EntryMeta {
            position: end_lsn,
            commit_time: open.commit_time,
            kind,
            payload_len: (self.batch.payload.len() - open.payload_start) as u32,
        };
        self.push_transaction(entry, open.commands);
        Ok(())
    }

    fn stream_start(&mut self, xid: Xid, first: bool) -> Result<(), AssembleError> {
        if self.in_transaction() {
            return Err(AssembleError::Unexpected("StreamStart inside a transaction".into()));
        }
        if first {
            let stream = StreamedTransaction {
                held: Vec::new(),
                held_definitions: BTreeSet::new(),
                spill: None,
                commands: 0,
                subtransaction: xid,
                writers: BTreeSet::new(),
                aborted: BTreeSet::new(),
                relations: HashMap::new(),
            };
            if let Some(before) = self.streams.insert(xid, stream) {
                self.held_elsewhere -= before.held.len();
            }
        } else {
            let stream = self.streams.get(&xid).ok_or_else(|| unknown_stream(xid))?;
            self.held_elsewhere -= stream.held.len();
        }
        self.current_stream = Some(xid);
        self.context.in_stream = true;
        Ok(())
    }

    fn stream_commit(
        &mut self,
        xid: Xid,
        commit_lsn: Lsn,
        end_lsn: Lsn,
        commit_time: PgTime,
    ) -> Result<(), AssembleError> {
        if self.in_transaction() {
            return Err(AssembleError::Unexpected("StreamCommit inside a transaction".into()));
        }
        let mut stream = self.streams.remove(&xid).ok_or_else(|| unknown_stream(xid))?;
        self.held_elsewhere -= stream.held.len();
        for (oid, told) in &stream.relations {
            let newest = self.relations.entry(*oid).or_insert(*told);
            if newest.message < told.message {
                *newest = *told;
            }
        }
        // One of which nothing is left is none when it is decoded after its commit, and must not be
        // looked for then. Its spill goes with it.
        if end_lsn <= self.last_position || stream.writers.is_empty() {
            return Ok(());
        }
        if stream.spill.is_some() {
            stream.write_held(self.store.as_ref(), self.last_position)?;
        }
        let kind = match stream.spill.take() {
            Some(spill) => EntryKind::Spilled(spill.finish()?),
            None => EntryKind::Transaction,
        };
        let header = Header {
            xid,
            commit_lsn,
            end_lsn,
            commit_time,
            commands: stream.commands,
            aborted_subtransactions: stream.aborted.into_iter().collect(),
        };
        let start = self.batch.payload.len();
        header.encode(&mut self.batch.payload);
        self.batch.payload.extend_from_slice(&stream.held);
        self.batch_definitions.extend(&stream.held_definitions);
        let entry = EntryMeta {
            position: end_lsn,
            commit_time,
            kind,
            payload_len: (self.batch.payload.len() - start) as u32,
        };
        self.push_transaction(entry, stream.commands);
        Ok(())
    }
}

impl StreamedTransaction {
    /// Moves what is held to the spill. It came after the commit at `last_position`.
    fn write_held(
        &mut self,
        store: &dyn LogStore,
        last_position: Lsn,
    ) -> Result<(), AssembleError> {
        let spill = match &mut self.spill {
            Some(spill) => spill,
            None => self.spill.insert(store.begin_spill()?),
        };
        let definitions: Vec<DictionaryId> = self.held_definitions.iter().copied().collect();
        spill.follows(last_position);
        spill.write(&self.held, &definitions)?;
        self.held.clear();
        self.held.shrink_to(2 * CHUNK_BYTES);
        self.held_definitions.clear();
        Ok(())
    }
}

/// Makes room for a large message without doubling what is there.
fn reserve_large(buffer: &mut Vec<u8>, bytes: usize) {
    if bytes > CHUNK_BYTES {
        buffer.reserve_exact(bytes + 16);
    }
}

fn unknown_stream(xid: Xid) -> AssembleError {
    AssembleError::Unexpected(format!("part of a streamed transaction {xid} that never began"))
}

/// Why a message was not taken.
#[derive(Debug, thiserror::Error)]
pub enum AssembleError {
    /// It does not parse.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// It may not stand here.
    #[error("{0}")]
    Unexpected(String),
    /// The store refused.
    #[error(transparent)]
    Store(#[from] farshore_store::StoreError),
}

impl AssembleError {
    /// With the place it happened at.
    pub fn at(self, server: String, near: Lsn) -> CaptureError {
        match self {
            AssembleError::Decode(error) => CaptureError::Decode { server, near, error },
            AssembleError::Unexpected(what) => {
                CaptureError::Protocol(format!("{server}, near {near}: {what}"))
            }
            AssembleError::Store(error) => CaptureError::Store(error),
        }
    }
}
