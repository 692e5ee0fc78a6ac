//! A publication's log from its upstream site into a store here.

mod room;

use super::on_disk;
use super::protocol::{
    Answer, FromDownstream, FromUpstream, Have, HeldSpill, Naming, Newest, Wanted,
};
use bytes::Bytes;
use farshore_capture::slot;
use farshore_fault as fault;
use farshore_link::{Dialer, LinkError, Receiver, Sender, Traffic};
use farshore_model::{Lsn, PgTime};
use farshore_store::packs::unpack;
use farshore_store::segmented::SegmentedStore;
use farshore_store::{
    Batch, EntryKind, EntryMeta, LogStore, Replicate, SpillId, SpillReceiver, StoreError,
    StoredBlock,
};
use room::{Lack, free_bytes, with_margin};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::{OwnedMutexGuard, watch};

/// zstd level of blocks that came in packs, as they are stored here.
const STORED_LEVEL: i32 = 1;

/// What was on its way to the disk when a session ended gets there within this, or begins anew.
const LAST_PIECE: Duration = Duration::from_secs(5);

/// The store's note of which log it is a replica of.
const NOTE_LOG: &str = "upstream.log";

/// How receiving a publication goes.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReceiveStatus {
    /// Blocks come in as they are made.
    pub connected: bool,
    /// Newest position that came in.
    pub received: Lsn,
    /// What the upstream site was told last.
    pub acknowledged: Lsn,
    /// Why the upstream site's own log gets nothing more, in its words.
    pub trouble: Option<String>,
    /// Of that, what was logged: each session that is asked for again may end with it.
    logged: Option<String>,
    /// Bytes on the link in this session, as frames.
    pub traffic: Traffic,
}

/// Why a publication is not received.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    /// The link.
    #[error("{0}")]
    Link(#[from] LinkError),
    /// The store here.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// A large transaction does not fit on the disk here, and is not asked for before it does.
    #[error(
        "a large transaction from site \"{site}\" has no room in {folder}: it is asked for again once \
         there are {needed} bytes free there. Free space on that disk: it goes on by itself, and \
         nothing is lost meanwhile"
    )]
    NoRoom {
        /// The upstream site.
        site: String,
        /// The store's folder.
        folder: String,
        /// Bytes that have to be free; of a transaction whose size the upstream site does not tell
        /// it may be more in the end.
        needed: u64,
    },
    /// The upstream site says no.
    #[error("site \"{site}\" does not give it: {why}")]
    Refused {
        /// The upstream site.
        site: String,
        /// In its words.
        why: String,
        /// It may end by itself.
        passes: bool,
    },
    /// What came is not what a site of this kind sends.
    #[error("site \"{site}\" sent {what}; is it of a newer version?")]
    Protocol {
        /// The upstream site.
        site: String,
        /// What came.
        what: String,
    },
    /// What is here cannot be continued from there.
    #[error(
        "what is here of it is of another log than site \"{site}\" has now: its store was \
         replaced. {}",
        begin_anew(folder)
    )]
    AnotherLog {
        /// The upstream site.
        site: String,
        /// The store's folder.
        folder: String,
    },
    /// Nobody can tell what is here.
    #[error(
        "{folder} holds log, and does not say any more of which log of site \"{site}\": its file \
         \"notes\" was lost. If there is a copy of that, stop this node, put it back and start. {}",
        begin_anew(folder)
    )]
    NotesLost {
        /// The upstream site.
        site: String,
        /// The store's folder.
        folder: String,
    },
}

/// Progress of other subscriptions stands in the same schema of a target: it is left alone.
fn begin_anew(folder: &str) -> String {
    format!(
        "To begin anew: stop this node, remove {folder}, start it, and for each subscription to this \
         log: farshore resync, then farshore resume; sites that it is passed on to have to do the \
         same with theirs"
    )
}

impl ReceiveError {
    /// Whether trying again may help.
    pub fn is_transient(&self) -> bool {
        match self {
            // Also when certificates are refused: whoever mends that may do so at the other site.
            ReceiveError::Link(_) | ReceiveError::NoRoom { .. } => true,
            // A disk that could not be read or written, or had no room, for a moment. A log that failed
            // stays closed and says so; what came and does not belong into it never will.
            ReceiveError::Store(StoreError::Io { error, .. }) => {
                error.kind() != io::ErrorKind::InvalidData
            }
            ReceiveError::Store(_) => false,
            ReceiveError::Refused { passes, .. } => *passes,
            ReceiveError::Protocol { .. }
            | ReceiveError::AnotherLog { .. }
            | ReceiveError::NotesLost { .. } => false,
        }
    }
}

/// Receives one publication until told to stop.
pub(crate) struct Receive {
    /// The upstream site.
    pub site: String,
    /// Its name there.
    pub publication: String,
    /// The store's folder, for messages.
    pub folder: String,
    /// The way there.
    pub dialer: Dialer,
    /// Where it is kept.
    pub store: Arc<SegmentedStore>,
    /// How it goes.
    pub status: Mutex<ReceiveStatus>,
    /// Whoever writes a spill. A session that has ended may still be at it, on a thread of its own,
    /// and its end removes the file.
    pub spills: Arc<tokio::sync::Mutex<()>>,
    /// What has come of spills whose block has not: after a cut it does not come again.
    pub held: Mutex<Held>,
    /// A spill that did not fit on the disk.
    pub lack: Mutex<Option<Lack>>,
    /// As a capture's: counts occasions on which tables may have joined the publication.
    pub ready: watch::Sender<u64>,
}

/// Spills whose block has not come.
#[derive(Default)]
pub struct Held {
    /// Those that are complete, and the block that names each.
    whole: Vec<(SpillId, Option<Naming>)>,
    /// The one that is coming. It has its turn at writing spills.
    coming: Option<Taking>,
}

impl Held {
    fn told(&self) -> Vec<HeldSpill> {
        let whole = self.whole.iter();
        let whole = whole.map(|(id, naming)| HeldSpill { id: id.0, blocks: None, naming: *naming });
        let coming = self.coming.iter().map(|taking| HeldSpill {
            id: taking.id.0,
            blocks: Some(taking.blocks),
            naming: taking.naming,
        });
        whole.chain(coming).collect()
    }
}

impl Receive {
    /// Runs until `stop` turns true or the link or the store fails.
    pub async fn run(&self, mut stop: watch::Receiver<bool>) -> Result<(), ReceiveError> {
        let stopped = async {
            // A sender that is gone is a stop too.
            let _ = stop.wait_for(|stop| *stop).await;
        };
        let ended = tokio::select! {
            biased;
            () = stopped => Ok(()),
            ended = self.session() => ended,
        };
        self.status().connected = false;
        ended
    }

    pub fn status(&self) -> MutexGuard<'_, ReceiveStatus> {
        self.status.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Blocks of the spill that is coming, which the log does not name yet.
    pub fn blocks_coming(&self) -> u64 {
        self.held().coming.as_ref().map_or(0, |coming| coming.blocks)
    }

    fn protocol(&self, what: impl Into<String>) -> ReceiveError {
        ReceiveError::Protocol { site: self.site.clone(), what: what.into() }
    }

    fn lack(&self) -> MutexGuard<'_, Option<Lack>> {
        self.lack.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn no_room(&self, lack: Lack) -> ReceiveError {
        let (site, folder) = (self.site.clone(), self.folder.clone());
        ReceiveError::NoRoom { site, folder, needed: lack.needed() }
    }

    async fn free(&self) -> Result<Option<u64>, StoreError> {
        let folder = PathBuf::from(&self.folder);
        on_disk(move || Ok(free_bytes(&folder))).await
    }

    /// Fails for as long as what had no room has none.
    async fn room_for_what_had_none(&self) -> Result<(), ReceiveError> {
        let Some(lack) = *self.lack() else { return Ok(()) };
        if lack.lasts(self.free().await?, Instant::now()) {
            return Err(self.no_room(lack));
        }
        tracing::info!(
            site = %self.site, publication = %self.publication,
            "there may be room now for the transaction that had none"
        );
        *self.lack() = None;
        Ok(())
    }

    /// What is told of an error that came while a spill of so many bytes was written, as far as is
    /// known; what had come of it was given back.
    async fn of_spill(&self, bytes: u64, error: StoreError) -> ReceiveError {
        if !error.is_out_of_room() {
            return error.into();
        }
        let lack = Lack::of(bytes, self.free().await.ok().flatten(), Instant::now());
        // Once, with the file and what the disk said; then it is told what has to be free.
        tracing::warn!(site = %self.site, publication = %self.publication, "{error}");
        *self.lack() = Some(lack);
        self.no_room(lack)
    }

    async fn session(&self) -> Result<(), ReceiveError> {
        self.room_for_what_had_none().await?;
        if self.held().coming.is_none() {
            drop(self.spills.lock().await);
        }
        // What an earlier session handed over is asked for again unless it is durable.
        self.until_durable(self.store.accepted_end()).await?;
        let have = self.have().await?;
        let publication = self.publication.clone();
        let spills = self.held().told();
        let wanted = Wanted::Log {
            publication,
            have,
            packs: true,
            hears_trouble: true,
            spills,
            hears_naming: true,
            hears_bytes: true,
            start: Some(this_start()),
        };
        let request = serde_json::to_vec(&wanted).map_err(|error| {
            self.protocol(format!("nothing, since a request could not be written ({error})"))
        })?;
        let (mut sender, mut receiver) = self.dialer.open(&request).await?.split();
        let first = receiver.next().await?.ok_or_else(|| self.protocol("no answer"))?;
        let answer: Answer = serde_json::from_slice(&first)
            .map_err(|error| self.protocol(format!("an answer that cannot be read ({error})")))?;
        self.begin(have, answer).await?;
        tracing::info!(
            site = %self.site, publication = %self.publication,
            after = %self.store.durable().borrow().0, "receiving"
        );
        {
            let mut status = self.status();
            status.connected = true;
            status.trouble = None;
            status.received = self.store.durable().borrow().0;
        }
        self.ready.send_modify(|times| *times += 1);
        let mut taking_in = pin!(self.take_in(&mut receiver));
        let ended = tokio::select! {
            ended = &mut taking_in => return ended,
            ended = self.acknowledge(&mut sender) => ended,
        };
        // What is being written of a spill is kept, and not written once more.
        let _ = tokio::time::timeout(LAST_PIECE, taking_in).await;
        ended
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// What is here.
    async fn have(&self) -> Result<Option<Have>, ReceiveError> {
        let log_id = self.store.note(NOTE_LOG).and_then(|noted| noted.parse().ok());
        let (Some(log_id), Some(begins)) = (log_id, slot::log_begins(self.store.as_ref())) else {
            return Ok(None);
        };
        let durable = self.store.durable().borrow().0.max(begins);
        let store = self.store.clone();
        let newest = on_disk(move || store.newest_transaction_ever()).await?;
        let newest =
            newest.map(|(position, commit_time)| Newest { position, commit_time: commit_time.0 });
        Ok(Some(Have { log_id, durable, newest }))
    }

    /// Begins a replica, or goes on with it.
    async fn begin(&self, have: Option<Have>, answer: Answer) -> Result<(), ReceiveError> {
        let (log_id, after, publisher) = match answer {
            Answer::Follows { log_id, after, publisher } => (log_id, after, publisher),
            Answer::Refused { why, passes } => {
                return Err(ReceiveError::Refused { site: self.site.clone(), why, passes });
            }
        };
        match have {
            Some(have) if have.log_id != log_id => {
                let (site, folder) = (self.site.clone(), self.folder.clone());
                return Err(ReceiveError::AnotherLog { site, folder });
            }
            Some(have) if have.durable != after => {
                let what = format!("what follows {after} instead of {}", have.durable);
                return Err(self.protocol(what));
            }
            Some(_) => {}
            None if self.store.durable().borrow().0 > Lsn::ZERO => {
                let (site, folder) = (self.site.clone(), self.folder.clone());
                return Err(ReceiveError::NotesLost { site, folder });
            }
            None => {
                // The beginning comes last: until then there is nothing to go on with.
                self.store.set_note(NOTE_LOG, &log_id.to_string())?;
                slot::begin_replica(self.store.as_ref(), &publisher, after)?;
            }
        }
        if self.store.durable().borrow().0 < after {
            let mut batch = Batch::default();
            batch.entries.push(EntryMeta {
                position: after,
                commit_time: PgTime(0),
                kind: EntryKind::Watermark,
                payload_len: 0,
            });
            self.store.append(batch).await?;
            self.until_durable(after).await?;
        }
        Ok(())
    }

    async fn until_durable(&self, position: Lsn) -> Result<(), ReceiveError> {
        let mut durable = self.store.durable();
        match durable.wait_for(|durable| durable.0 >= position).await {
            Ok(_) => Ok(()),
            Err(_) => Err(self.store_failure()),
        }
    }

    fn store_failure(&self) -> ReceiveError {
        of_failed(self.store.failure())
    }

    async fn take_in(&self, receiver: &mut Receiver) -> Result<(), ReceiveError> {
        while let Some(message) = receiver.next().await? {
            self.status().traffic = receiver.meter().traffic();
            let message = FromUpstream::decode(message).map_err(|what| self.protocol(what))?;
            match message {
                FromUpstream::Block(block) => self.take_block(block).await?,
                FromUpstream::Packed(packed) => {
                    for block in self.unpack(packed).await? {
                        self.take_block(block).await?;
                    }
                }
                FromUpstream::SpillBegins { id, naming, bytes } => {
                    // What is here is another block's, or the upstream site knows nothing of going
                    // on.
                    drop(self.held().coming.take());
                    self.held().whole.retain(|(held, _)| *held != id);
                    self.begin_spill(id, naming, bytes.unwrap_or_default()).await?;
                }
                FromUpstream::SpillGoesOn(id) => {
                    let is_held = self.held().coming.as_ref().is_some_and(|c| c.id == id);
                    if !is_held {
                        return Err(self.protocol("the rest of a spill that is not here"));
                    }
                }
                FromUpstream::SpillBlock(block) => self.take_spilled(vec![block]).await?,
                FromUpstream::SpillPacked(packed) => {
                    let blocks = self.unpack(packed).await?;
                    self.take_spilled(blocks).await?;
                }
                FromUpstream::SpillEnds => {
                    let taking = self.coming("the end of no spill")?;
                    let (held, bytes) = ((taking.id, taking.naming), taking.bytes_known());
                    if let Err(error) = taking.finish().await {
                        return Err(self.of_spill(bytes, error).await);
                    }
                    self.held().whole.push(held);
                }
                FromUpstream::Ready => self.ready.send_modify(|times| *times += 1),
                FromUpstream::Trouble(why) => {
                    let mut status = self.status();
                    status.trouble = (!why.is_empty()).then_some(why);
                    if status.logged != status.trouble {
                        if let Some(why) = &status.trouble {
                            let (site, publication) = (&self.site, &self.publication);
                            tracing::warn!(%site, %publication, "its log gets nothing more: {why}");
                        }
                        status.logged = status.trouble.clone();
                    }
                }
            }
        }
        let (site, trouble) = (self.site.clone(), self.status().trouble.take());
        Err(match trouble {
            // A disk that cannot be read for a moment: the upstream site does not ask, this one does.
            Some(why) => ReceiveError::Refused { site, why, passes: true },
            None => self.protocol("no more, without a reason"),
        })
    }

    fn coming(&self, without: &str) -> Result<Taking, ReceiveError> {
        self.held().coming.take().ok_or_else(|| self.protocol(without))
    }

    /// Begins to take a spill of so many bytes; zero if the upstream site does not tell. Without room
    /// for it nothing of it is taken: it would cross for nothing.
    async fn begin_spill(
        &self,
        id: SpillId,
        naming: Option<Naming>,
        whole_bytes: u64,
    ) -> Result<(), ReceiveError> {
        let turn = self.spills.clone().lock_owned().await;
        let free = self.free().await?;
        if whole_bytes > 0 && free.is_some_and(|free| free < with_margin(whole_bytes)) {
            let lack = Lack::of(whole_bytes, free, Instant::now());
            *self.lack() = Some(lack);
            return Err(self.no_room(lack));
        }
        let begun = Taking::begin(self.store.clone(), turn, (id, naming), whole_bytes);
        match begun.await {
            Ok(taking) => self.held().coming = Some(taking),
            Err(error) => return Err(self.of_spill(whole_bytes, error).await),
        }
        Ok(())
    }

    /// Between two blocks the spill is where a session that begins after this one finds it.
    async fn take_spilled(&self, blocks: Vec<StoredBlock>) -> Result<(), ReceiveError> {
        for block in blocks {
            fault::point("receive.before-spill-block");
            let taking = self.coming("a piece of no spill")?;
            let bytes = taking.bytes_known();
            match taking.take(block).await {
                Ok(taking) => self.held().coming = Some(taking),
                Err(error) => return Err(self.of_spill(bytes, error).await),
            }
        }
        Ok(())
    }

    async fn take_block(&self, block: StoredBlock) -> Result<(), ReceiveError> {
        let (last, spilled) = (block.last, block.spilled.clone());
        fault::point("receive.before-block");
        self.store.append_stored(block).await?;
        fault::point("receive.after-block");
        self.held().whole.retain(|(held, _)| !spilled.contains(held));
        let mut status = self.status();
        // Blocks without entries say an earlier position.
        status.received = status.received.max(last);
        status.logged = status.trouble.clone();
        Ok(())
    }

    async fn unpack(&self, packed: Bytes) -> Result<Vec<StoredBlock>, ReceiveError> {
        let unpacked = on_disk(move || Ok(unpack(packed, STORED_LEVEL))).await?;
        unpacked.map_err(|what| self.protocol(what))
    }

    /// Tells the upstream site what is durable here, and so what it need not keep for us.
    async fn acknowledge(&self, sender: &mut Sender) -> Result<(), ReceiveError> {
        let mut durable = self.store.durable();
        loop {
            let position = durable.borrow_and_update().0;
            fault::point("receive.before-acknowledge");
            sender.send(FromDownstream::Durable(position).encode()).await?;
            fault::point("receive.after-acknowledge");
            self.status().acknowledged = position;
            if durable.changed().await.is_err() {
                return Err(self.store_failure());
            }
        }
    }
}

/// A spill that comes in; what it does to the disk it does on a thread that may wait.
struct Taking {
    id: SpillId,
    naming: Option<Naming>,
    /// Taken.
    blocks: u64,
    /// Bytes of those.
    bytes: u64,
    /// Bytes of the whole of it at the upstream site; zero if that does not tell.
    whole_bytes: u64,
    receiver: Box<dyn SpillReceiver>,
    // Let go of last, when nothing touches the file any more.
    turn: OwnedMutexGuard<()>,
}

impl Taking {
    async fn begin(
        store: Arc<SegmentedStore>,
        turn: OwnedMutexGuard<()>,
        (id, naming): (SpillId, Option<Naming>),
        whole_bytes: u64,
    ) -> Result<Taking, StoreError> {
        let begun = on_disk(move || {
            let receiver = store.receive_spill(id)?;
            Ok(Taking { id, naming, blocks: 0, bytes: 0, whole_bytes, receiver, turn })
        });
        begun.await
    }

    /// Bytes that it takes on the disk, at least.
    fn bytes_known(&self) -> u64 {
        self.whole_bytes.max(self.bytes)
    }

    async fn take(mut self, block: StoredBlock) -> Result<Taking, StoreError> {
        let taken = on_disk(move || {
            let bytes = block.payload.len() as u64;
            self.receiver.take(block)?;
            self.blocks += 1;
            self.bytes += bytes;
            Ok(self)
        });
        taken.await
    }

    async fn finish(self) -> Result<(), StoreError> {
        let done = on_disk(move || {
            let Taking { receiver, turn, .. } = self;
            let finished = receiver.finish().map(drop);
            drop(turn);
            finished
        });
        done.await
    }
}

/// A number that no other start of a node has; the standard library seeds its hashers from the
/// operating system.
fn this_start() -> u64 {
    static START: OnceLock<u64> = OnceLock::new();
    *START.get_or_init(|| RandomState::new().hash_one(std::process::id()))
}

/// The log is closed for good then, whatever it was: trying again is for who starts the node again.
fn of_failed(failure: Option<StoreError>) -> ReceiveError {
    ReceiveError::Store(match failure {
        Some(error @ StoreError::Failed(_)) => error,
        Some(error) => StoreError::Failed(Arc::new(error)),
        None => StoreError::Unknown("writer any more".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_link::certificates::Authority;
    use farshore_link::{Identity, IdentityFiles, LinkOptions, Session};
    use farshore_store::segmented::Options;
    use std::path::Path;

    fn receive_into(folder: &Path) -> Receive {
        let authority = Authority::create(&folder.join("authority")).unwrap();
        let made = authority.issue("down", 30, folder).unwrap();
        let identity = Identity::load(&IdentityFiles {
            certificate: made.certificate,
            key: made.key,
            authorities: authority.certificate(),
            revoked: Some(authority.revoked()),
        });
        let (identity, options) = (identity.unwrap(), LinkOptions::default());
        let store = folder.join("store");
        Receive {
            site: "up".to_owned(),
            publication: "p".to_owned(),
            folder: store.display().to_string(),
            dialer: Dialer::new("127.0.0.1:1", "up", &identity, options).unwrap(),
            store: SegmentedStore::open(&store, Options::default()).unwrap().0,
            status: Mutex::default(),
            spills: Arc::default(),
            held: Mutex::default(),
            lack: Mutex::default(),
            ready: watch::Sender::new(0),
        }
    }

    #[tokio::test]
    async fn what_does_not_say_which_log_it_is_of_is_not_gone_on_with() {
        let folder = tempfile::tempdir().unwrap();
        let receive = receive_into(folder.path());
        let mut batch = Batch::default();
        batch.entries.push(EntryMeta {
            position: Lsn(20),
            commit_time: PgTime(0),
            kind: EntryKind::Watermark,
            payload_len: 0,
        });
        receive.store.append(batch).await.unwrap();
        receive.until_durable(Lsn(20)).await.unwrap();
        let follows =
            |log_id| Answer::Follows { log_id, after: Lsn(20), publisher: "7".to_owned() };
        let lost = receive.begin(None, follows(1)).await.unwrap_err();
        assert!(matches!(lost, ReceiveError::NotesLost { .. }), "{lost}");
        let have = Some(Have { log_id: 1, durable: Lsn(20), newest: None });
        let another = receive.begin(have, follows(2)).await.unwrap_err();
        assert!(matches!(another, ReceiveError::AnotherLog { .. }), "{another}");
        for error in [lost, another] {
            let text = error.to_string();
            assert!(!error.is_transient() && !text.contains("DROP"), "{text}");
            assert!(text.contains("farshore resync") && text.contains(&receive.folder), "{text}");
        }
    }

    #[test]
    fn a_disk_that_could_not_be_read_for_a_moment_stops_nothing() {
        let error = |kind: io::ErrorKind| {
            let (path, error) = ("1.log".into(), Arc::new(kind.into()));
            ReceiveError::Store(StoreError::Io { action: "read", path, error })
        };
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::Other, io::ErrorKind::OutOfMemory] {
            assert!(error(kind).is_transient(), "{kind}");
        }
        assert!(!error(io::ErrorKind::InvalidData).is_transient());
    }

    #[tokio::test]
    async fn a_spill_that_has_no_room_is_not_asked_for_before_it_has() {
        let folder = tempfile::tempdir().unwrap();
        let receive = receive_into(folder.path());
        let refused = receive.begin_spill(SpillId(1), None, u64::MAX / 2).await.unwrap_err();
        assert!(refused.is_transient() && receive.held().coming.is_none(), "{refused}");
        let text = refused.to_string();
        assert!(
            text.contains("Free space on that disk") && text.contains(&receive.folder),
            "{text}"
        );
        // The site is not even called.
        let waits = receive.session().await.unwrap_err();
        assert!(matches!(waits, ReceiveError::NoRoom { .. }), "{waits}");
        // An upstream site that does not tell the size sends until the disk is full.
        let full = || {
            let error = Arc::new(io::ErrorKind::StorageFull.into());
            StoreError::Io { action: "write", path: "1.spill".into(), error }
        };
        let refused = receive.of_spill(u64::MAX / 2, full()).await;
        assert!(matches!(refused, ReceiveError::NoRoom { .. }), "{refused}");
        *receive.lack() = Some(Lack::of(0, Some(0), Instant::now()));
        receive.room_for_what_had_none().await.unwrap();
        assert_eq!(*receive.lack(), None);
        receive.begin_spill(SpillId(1), None, 0).await.unwrap();
        assert!(receive.held().coming.is_some());
    }

    #[test]
    fn a_log_that_failed_is_not_tried_again_and_says_what_to_do() {
        let error = Arc::new(io::ErrorKind::StorageFull.into());
        let failure = StoreError::Io { action: "sync", path: "1.log".into(), error };
        let failed = of_failed(Some(failure));
        let text = failed.to_string();
        assert!(!failed.is_transient() && text.contains("start this node again"), "{text}");
        // It does not.
        assert!(text.contains("cannot sync 1.log") && !text.contains("by itself"), "{text}");
    }

    #[tokio::test]
    async fn a_log_that_ended_in_trouble_is_asked_for_again() {
        let folder = tempfile::tempdir().unwrap();
        let receive = receive_into(folder.path());
        let end_after = async |troubles: &[&str]| {
            let (up, down) = Session::within("up", 8);
            let ((mut sender, _receiver), (_sender, mut receiver)) = (up.split(), down.split());
            let ending = async {
                for trouble in troubles {
                    let trouble = FromUpstream::Trouble((*trouble).to_owned());
                    sender.send_parts(&trouble.encode()).await.unwrap();
                }
                sender.finish().await.unwrap();
            };
            let (ended, ()) = tokio::join!(receive.take_in(&mut receiver), ending);
            ended.unwrap_err()
        };
        let unreadable = end_after(&["its store cannot be read: EIO"]).await;
        assert!(unreadable.is_transient(), "{unreadable}");
        assert!(unreadable.to_string().contains("does not give it: its store cannot be read"));
        for troubles in [&[][..], &["its publisher is away", ""]] {
            let error = end_after(troubles).await;
            assert!(!error.is_transient(), "{error}");
        }
    }
}
