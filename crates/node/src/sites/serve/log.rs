//! A publication's log to a downstream site, and how far it is there.

use super::{Served, ServedSource, Serving, cursor_of};
use crate::agents::lock;
use crate::config::sites::Downstream;
use crate::sites::crossing::Blocks;
use crate::sites::on_disk;
use crate::sites::packing::Packing;
use crate::sites::protocol::{
    Answer, FromDownstream, FromUpstream, Have, HeldSpill, Naming, Newest,
};
use bytes::Bytes;
use farshore_capture::slot;
use farshore_link::{LinkError, Receiver, Sender, Session};
use farshore_model::{Applied, Lsn, PgTime};
use farshore_store::segmented::SegmentedStore;
use farshore_store::{LogStore, Replicate, SpillId, StoreError};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Why a site does not get a log.
#[derive(Debug)]
struct Refusal {
    why: String,
    passes: bool,
}

impl Refusal {
    fn passing(why: impl Into<String>) -> Refusal {
        Refusal { why: why.into(), passes: true }
    }

    fn lasting(why: impl Into<String>) -> Refusal {
        Refusal { why: why.into(), passes: false }
    }
}

/// What a downstream site can take beside blocks.
#[derive(Clone, Copy)]
pub(super) struct Takes {
    pub packs: bool,
    /// It hears why the log gets nothing more.
    pub trouble: bool,
    /// It hears which block names a spill.
    pub naming: bool,
    /// It hears how many bytes a spill has.
    pub bytes: bool,
}

/// Whether the log gets nothing more is looked at this often while there is nothing to send.
const LOOK_FOR_TROUBLE_EVERY: Duration = Duration::from_secs(2);
/// That much of the reason is told.
const TROUBLE_CHARS_MAX: usize = 1_000;

impl Serving {
    pub(super) async fn serve_log(
        &self,
        key: &(String, String),
        downstream: &Downstream,
        served: &Served,
        session: Session,
        (have, held): (Option<Have>, Vec<HeldSpill>),
        takes: Takes,
    ) -> Result<(), LinkError> {
        let (mut sender, mut receiver) = session.split();
        let cursor = cursor_of(&downstream.site);
        // What changed before the answer is seen by who looks when it has come.
        let mut ready = served.ready.clone();
        ready.mark_unchanged();
        let received = matches!(served.source, ServedSource::Upstream(..));
        // Before its cursor is moved to what it has.
        let which = (downstream.site.as_str(), key.1.as_str());
        let begun = match is_the_same_log(&served.store, which, have).await {
            Ok(()) => begin(&served.store, received, which, have),
            Err(refused) => Err(refused),
        };
        // What has stopped here does not begin by being waited for.
        let begun = begun.map_err(|refused| match (served.trouble)() {
            Some(trouble) if refused.passes => {
                Refusal::passing(format!("{}: {trouble}", refused.why))
            }
            _ => refused,
        });
        let (answer, after) = match begun {
            Ok((after, publisher)) => {
                (Answer::Follows { log_id: served.store.log_id(), after, publisher }, Some(after))
            }
            Err(refusal) => {
                let (site, publication) = key;
                let why = format!("publication \"{publication}\": {}", refusal.why);
                self.refusals.tell(site, None, &why);
                self.note_refusal(key, &refusal);
                let Refusal { why, passes } = refusal;
                (Answer::Refused { why, passes }, None)
            }
        };
        let answer = serde_json::to_vec(&answer).unwrap_or_default();
        sender.send(Bytes::from(answer)).await?;
        let Some(after) = after else {
            // It was told, and logged here; who has read it may be gone before the end.
            if let Err(ended) = sender.finish().await {
                tracing::debug!(site = %key.0, publication = %key.1, "{ended}");
            }
            return Ok(());
        };
        tracing::info!(site = %key.0, publication = %key.1, %after, "downstream site connected");
        let _connected = self.connected(key, after);
        let packing = Packing::new(downstream.compression, takes.packs, Instant::now());
        tokio::select! {
            ended = self.send_log(key, sender, served, ready, (after, held), (packing, takes)) => ended,
            ended = self.take_positions(key, &mut receiver, &served.store, &cursor) => ended,
        }
    }

    /// Refuses a log for as long as the reason lasts.
    pub(super) async fn refuse_log(
        &self,
        key: &(String, String),
        session: Session,
        why: String,
    ) -> Result<(), LinkError> {
        self.refusals.tell(&key.0, None, &why);
        let (mut sender, _receiver) = session.split();
        let answer = Answer::Refused { why, passes: true };
        sender.send(Bytes::from(serde_json::to_vec(&answer).unwrap_or_default())).await?;
        sender.finish().await
    }

    async fn take_positions(
        &self,
        key: &(String, String),
        receiver: &mut Receiver,
        store: &SegmentedStore,
        cursor: &str,
    ) -> Result<(), LinkError> {
        while let Some(message) = receiver.next().await? {
            match FromDownstream::decode(message) {
                Ok(FromDownstream::Durable(position)) => {
                    // It holds nothing that it has not got from here.
                    if position > store.durable().borrow().0 {
                        tracing::warn!(site = %key.0, %position, "it holds more than there is");
                        return Ok(());
                    }
                    if let Err(error) = store.move_cursor(cursor, Applied(position)) {
                        tracing::warn!(site = %key.0, publication = %key.1, "{error}");
                        return Ok(());
                    }
                    if let Some(following) = self.lock_following().get_mut(key) {
                        following.durable = position;
                        lock(&following.arrivals).note(position, PgTime::now(), 0);
                    }
                }
                Err(what) => {
                    tracing::warn!(site = %key.0, publication = %key.1, "it sent {what}");
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// A site that is refused for good does not ask again: what it is told has to be seen here too.
    fn note_refusal(&self, key: &(String, String), refusal: &Refusal) {
        if !refusal.passes {
            let mut following = self.lock_following();
            following.entry(key.clone()).or_default().error = Some(refusal.why.clone());
        }
    }

    /// Says at both ends that the store here cannot be read, and ends the session.
    async fn give_up(
        &self,
        key: &(String, String),
        mut sender: Sender,
        takes: Takes,
        error: &StoreError,
    ) -> Result<(), LinkError> {
        let error = error.to_string();
        let mut is_known = false;
        if let Some(following) = self.lock_following().get_mut(key) {
            is_known = following.logged.as_ref() == Some(&error);
            following.error = Some(error.clone());
        }
        // The site asks again, every few seconds.
        if is_known {
            tracing::debug!(site = %key.0, publication = %key.1, "again: {error}");
        } else {
            tracing::error!(site = %key.0, publication = %key.1, "the log cannot be sent: {error}");
        }
        if takes.trouble {
            let why = format!("its store cannot be read: {error}");
            let why = why.chars().take(TROUBLE_CHARS_MAX).collect();
            sender.send_parts(&FromUpstream::Trouble(why).encode()).await?;
        }
        sender.finish().await
    }

    async fn send_log(
        &self,
        key: &(String, String),
        mut sender: Sender,
        served: &Served,
        mut ready: watch::Receiver<u64>,
        (after, mut held): (Lsn, Vec<HeldSpill>),
        (mut packing, takes): (Packing, Takes),
    ) -> Result<(), LinkError> {
        let mut durable = served.store.durable();
        let reader = match served.store.read_stored(after) {
            Ok(reader) => reader,
            Err(error) => {
                return self.give_up(key, sender, takes, &error).await;
            }
        };
        let mut blocks = Blocks::new(reader);
        let (mut told, mut look_at) = (None, Instant::now());
        loop {
            if takes.trouble && Instant::now() >= look_at {
                let trouble = (served.trouble)();
                if trouble != told {
                    let why = trouble.as_deref().unwrap_or_default();
                    let why = why.chars().take(TROUBLE_CHARS_MAX).collect();
                    sender.send_parts(&FromUpstream::Trouble(why).encode()).await?;
                    told = trouble;
                }
                look_at = Instant::now() + LOOK_FOR_TROUBLE_EVERY;
            }
            durable.mark_unchanged();
            if ready.has_changed().unwrap_or(false) {
                ready.mark_unchanged();
                sender.send_parts(&FromUpstream::Ready.encode()).await?;
            }
            match blocks.next(&packing).await {
                Ok(Some(crossing)) => {
                    for (spill, naming) in crossing.spilled() {
                        let Some(there) = blocks_there(&mut held, spill, naming) else { continue };
                        match served.store.read_stored_spill(spill) {
                            Ok(reader) => {
                                let begins = match there {
                                    0 => FromUpstream::SpillBegins {
                                        id: spill,
                                        naming: takes.naming.then_some(naming),
                                        bytes: reader.bytes_on_disk().filter(|_| takes.bytes),
                                    },
                                    _ => FromUpstream::SpillGoesOn(spill),
                                };
                                let blocks = Blocks::behind(reader, there);
                                let sent = send_spill(&mut sender, begins, blocks, &mut packing);
                                if let Err(error) = sent.await? {
                                    return self.give_up(key, sender, takes, &error).await;
                                }
                            }
                            Err(error) => {
                                return self.give_up(key, sender, takes, &error).await;
                            }
                        }
                    }
                    let raw_bytes = crossing.raw_bytes();
                    let message = crossing.message(FromUpstream::Block, FromUpstream::Packed);
                    send_measured(&mut sender, &message, raw_bytes, &mut packing).await?;
                    if let Some(following) = self.lock_following().get_mut(key) {
                        following.sent_bytes = sender.traffic().wire_bytes_sent;
                        following.packed_bytes = packing.packed_bytes;
                        following.logged = None;
                    }
                }
                Ok(None) => {
                    tokio::select! {
                        () = tokio::time::sleep(LOOK_FOR_TROUBLE_EVERY), if takes.trouble => {}
                        changed = durable.changed() => if changed.is_err() {
                            // The store is closed, and the node with it, or it has failed.
                            return Ok(());
                        },
                        changed = ready.changed() => if changed.is_err() {
                            return Ok(());
                        } else {
                            sender.send_parts(&FromUpstream::Ready.encode()).await?;
                        },
                    }
                }
                Err(error) => {
                    return self.give_up(key, sender, takes, &error).await;
                }
            }
        }
    }
}

/// What is to be done where a site cannot go on with what it has. It is read at both sites, and passed
/// on to those behind them: so none is "this" one.
fn begin_anew((site, publication): (&str, &str)) -> String {
    let folder = publication.replace('/', "+");
    format!(
        "To begin anew: at site \"{site}\" stop the node, remove its folder of this log (the one in \
         data_dir/received that ends in +{folder}), start it, and for each of its subscriptions to \
         this log: farshore resync, then farshore resume; sites that it passes the log on to have to \
         do the same"
    )
}

/// Where a log begins for a site that has this much of it; and the publisher's identity.
fn begin(
    store: &SegmentedStore,
    received: bool,
    (site, publication): (&str, &str),
    have: Option<Have>,
) -> Result<(Lsn, String), Refusal> {
    let cursor = &cursor_of(site);
    let begin_anew = || begin_anew((site, publication));
    let (Some(begins), Some(publisher)) =
        (slot::log_begins(store), slot::publisher_identity(store))
    else {
        return Err(Refusal::passing("its capture has not begun yet"));
    };
    let failed = |error: StoreError| Refusal::passing(format!("its store refuses: {error}"));
    let durable = store.durable().borrow().0;
    // Nothing is kept for who cannot go on from here.
    match have {
        Some(have) if have.log_id != store.log_id() => {
            return Err(Refusal::lasting(format!(
                "site \"{site}\" has another log than the site that it comes from: the store there was \
                 replaced. {}",
                begin_anew()
            )));
        }
        Some(have) if have.durable > durable && !received => {
            return Err(Refusal::lasting(format!(
                "site \"{site}\" has the log up to {}, and at the site that it comes from it ends at \
                 {durable}: the store there was set back. If the store that had it is put back, go on \
                 at site \"{site}\" (farshore resume --publication). {}",
                have.durable,
                begin_anew()
            )));
        }
        Some(_) | None => {}
    }
    let known = store.register_cursor(cursor).map_err(failed)?;
    let after = match have {
        // A replica that was set back is filled again from its own upstream site.
        Some(have) if have.durable > durable => {
            return Err(Refusal::passing(format!(
                "site \"{site}\" has the log up to {}, and at the site that it comes from it ends at \
                 {durable} as yet",
                have.durable
            )));
        }
        Some(have) => have.durable,
        // What an earlier attempt was promised is still there.
        None if known.expired.is_none() => known.applied.0.max(begins),
        None => durable.max(begins),
    };
    if durable < after {
        return Err(Refusal::passing("its log does not reach its own beginning yet"));
    }
    match store.move_cursor(cursor, Applied(after)) {
        Ok(()) => Ok((after, publisher)),
        Err(StoreError::Dropped { start, .. }) => Err(Refusal::lasting(format!(
            "the log no longer has what follows {after}, which is where site \"{site}\" stands; it \
             begins at {start} now (retention limits dropped it, site \"{site}\" was not granted it for \
             a while, or its store was set back). {}",
            begin_anew()
        ))),
        Err(error) => Err(failed(error)),
    }
}

/// Refuses a site which has what this store does not: it was set back together with the publisher,
/// or with the site that it comes from, and has come past what the site has with other changes. What
/// has left the store since cannot be compared; what follows it can.
async fn is_the_same_log(
    store: &Arc<SegmentedStore>,
    (site, publication): (&str, &str),
    have: Option<Have>,
) -> Result<(), Refusal> {
    let Some(Have { log_id, durable, newest: Some(newest) }) = have else { return Ok(()) };
    if log_id != store.log_id() || durable > store.durable().borrow().0 {
        return Ok(());
    }
    let Newest { position, commit_time } = newest;
    let before = Lsn(position.0.saturating_sub(1));
    let store = store.clone();
    let found = on_disk(move || {
        let there = match store.first_transaction(before) {
            Err(StoreError::Dropped { .. }) => None,
            there => Some(there?),
        };
        let from = match store.first_transaction(position) {
            Err(StoreError::Dropped { start, .. }) => start,
            next => return Ok((there, next?)),
        };
        Ok((there, store.first_transaction(from)?))
    });
    let (there, next) = match found.await {
        Ok(found) => found,
        Err(error) => return Err(Refusal::passing(format!("its store refuses: {error}"))),
    };
    let what = if there.is_some_and(|there| there != Some((position, PgTime(commit_time)))) {
        format!(
            "site \"{site}\" has a transaction at {position} ({}) that the log which it comes from does \
             not have",
            PgTime(commit_time)
        )
    } else if let Some((next, _)) = next.filter(|(next, _)| *next <= durable) {
        format!(
            "the log which site \"{site}\" follows has a transaction at {next} that it does not have"
        )
    } else {
        return Ok(());
    };
    Err(Refusal::lasting(format!(
        "{what}, and site \"{site}\" has the log up to {durable}: the store at the site that it comes \
         from was set back to before that, and has gone on with other changes. {}",
        begin_anew((site, publication))
    )))
}

/// Sends what holds `raw_bytes` of payload, and notes how long the line had it wait.
async fn send_measured(
    sender: &mut Sender,
    message: &FromUpstream,
    raw_bytes: u64,
    packing: &mut Packing,
) -> Result<(), LinkError> {
    let asked = Instant::now();
    sender.send_parts(&message.encode()).await?;
    if matches!(message, FromUpstream::Packed(_) | FromUpstream::SpillPacked(_)) {
        packing.packed_bytes += raw_bytes;
    }
    let now = Instant::now();
    packing.sent(raw_bytes, now.duration_since(asked), now);
    Ok(())
}

/// How many blocks of the spill that this block names need not cross; `None` if it is there. Only
/// what came for the same block counts: a number may be given twice. (Who has not heard of the block
/// is of an earlier version: it is believed, or a large spill would begin anew at every cut.)
fn blocks_there(held: &mut Vec<HeldSpill>, spill: SpillId, naming: Naming) -> Option<u64> {
    let is_it =
        |there: &HeldSpill| there.id == spill.0 && there.naming.is_none_or(|there| there == naming);
    match held.iter().position(is_it) {
        Some(at) => held.swap_remove(at).blocks,
        None => Some(0),
    }
}

/// Sends these blocks of a spill.
async fn send_spill(
    sender: &mut Sender,
    begins: FromUpstream,
    mut blocks: Blocks,
    packing: &mut Packing,
) -> Result<Result<(), StoreError>, LinkError> {
    sender.send_parts(&begins.encode()).await?;
    loop {
        match blocks.next(packing).await {
            Ok(Some(crossing)) => {
                let raw_bytes = crossing.raw_bytes();
                let message = crossing.message(FromUpstream::SpillBlock, FromUpstream::SpillPacked);
                send_measured(sender, &message, raw_bytes, packing).await?;
            }
            Ok(None) => break,
            Err(error) => return Ok(Err(error)),
        }
    }
    sender.send_parts(&FromUpstream::SpillEnds.encode()).await?;
    Ok(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::sites::SitesConfig;
    use farshore_store::segmented::Options;
    use farshore_store::{Batch, EntryKind, EntryMeta};
    use std::collections::BTreeMap;

    #[test]
    fn a_spill_goes_on_only_for_the_block_that_named_it() {
        let naming = |time| Naming { last: Lsn(100), commit_times: (time, time) };
        let held = |blocks| vec![HeldSpill { id: 7, blocks, naming: Some(naming(1)) }];
        assert_eq!(blocks_there(&mut held(Some(3)), SpillId(7), naming(1)), Some(3));
        assert_eq!(blocks_there(&mut held(None), SpillId(7), naming(1)), None);
        // Another transaction of a store that was set back: the same number, and even position.
        for blocks in [Some(3), None] {
            assert_eq!(blocks_there(&mut held(blocks), SpillId(7), naming(2)), Some(0));
            assert_eq!(blocks_there(&mut held(blocks), SpillId(8), naming(1)), Some(0));
        }
        let mut unnamed = vec![HeldSpill { id: 7, blocks: Some(3), naming: None }];
        assert_eq!(blocks_there(&mut unnamed, SpillId(7), naming(1)), Some(3));
    }

    /// What the site has newest has left the log here, and the log was set back to that and has gone
    /// on with something else.
    #[tokio::test]
    async fn a_log_that_went_on_with_something_else_is_known_by_what_it_still_has() {
        let dir = tempfile::tempdir().unwrap();
        let options = Options { segment_bytes: 1, ..Options::default() };
        let store = SegmentedStore::open(dir.path(), options).unwrap().0;
        for (position, kind) in [
            (20, EntryKind::Transaction),
            (30, EntryKind::Watermark),
            (40, EntryKind::Transaction),
            (50, EntryKind::Watermark),
        ] {
            let mut batch = Batch::default();
            // Nothing packs it: a segment for each.
            let mut state = 1_u64;
            let noise = std::iter::repeat_with(|| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            });
            if kind == EntryKind::Transaction {
                batch.payload.extend(noise.take(8_000));
            }
            let (position, commit_time) = (Lsn(position), PgTime(1));
            let payload_len = batch.payload.len() as u32;
            batch.entries.push(EntryMeta { position, commit_time, kind, payload_len });
            store.append(batch).await.unwrap();
            store.durable().wait_for(|durable| durable.0 >= position).await.unwrap();
        }
        let newest = Some(Newest { position: Lsn(20), commit_time: 1 });
        let have = |durable| Have { log_id: store.log_id(), durable: Lsn(durable), newest };
        let judged =
            async |durable| is_the_same_log(&store, ("down", "p"), Some(have(durable))).await;
        for is_dropped in [false, true] {
            if is_dropped {
                store.register_cursor("@down").unwrap();
                store.move_cursor("@down", Applied(Lsn(30))).unwrap();
                store.enforce_retention(&farshore_store::Retention::default()).unwrap();
                assert!(store.first_transaction(Lsn(19)).is_err());
            }
            assert!(judged(35).await.is_ok(), "{is_dropped}");
            let refused = judged(45).await.unwrap_err();
            assert!(!refused.passes, "{}", refused.why);
            assert!(refused.why.contains("has a transaction at 0/28"), "{}", refused.why);
        }
    }

    #[tokio::test]
    async fn nothing_is_kept_for_a_site_that_is_refused_for_good() {
        let dir = tempfile::tempdir().unwrap();
        let store = SegmentedStore::open(dir.path(), Options::default()).unwrap().0;
        slot::begin_replica(store.as_ref(), "7", Lsn(10)).unwrap();
        let mut batch = Batch::default();
        batch.entries.push(EntryMeta {
            position: Lsn(20),
            commit_time: PgTime(0),
            kind: EntryKind::Watermark,
            payload_len: 0,
        });
        store.append(batch).await.unwrap();
        store.durable().wait_for(|durable| durable.0 >= Lsn(20)).await.unwrap();
        let have = |log_id, durable| Some(Have { log_id, durable: Lsn(durable), newest: None });
        let refused = |have, received| begin(&store, received, ("down", "p"), have).unwrap_err();
        let another = refused(have(store.log_id() + 1, 15), false);
        assert!(!another.passes && another.why.contains("To begin anew"), "{}", another.why);
        let ahead = refused(have(store.log_id(), 30), false);
        assert!(!ahead.passes, "{}", ahead.why);
        assert!(ahead.why.contains("resume") && ahead.why.contains("To begin anew"));
        assert_eq!(store.cursors(), []);
        // It may go on once this one has more.
        assert!(refused(have(store.log_id(), 30), true).passes);
        assert_eq!(store.cursors().len(), 1);
        let (after, _) =
            begin(&store, false, ("down", "p"), have(store.log_id(), 15)).ok().unwrap();
        assert_eq!((after, store.cursors()[0].applied), (Lsn(15), Applied(Lsn(15))));
    }

    #[test]
    fn what_a_site_is_refused_for_good_is_seen_here_too() {
        let none = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let serving = Serving::new(SitesConfig::default(), none.0, none.1, none.2);
        let key = ("down".to_owned(), "p".to_owned());
        serving.note_refusal(&key, &Refusal::passing("not yet"));
        assert!(serving.following().is_empty());
        serving.note_refusal(&key, &Refusal::lasting("another log"));
        assert_eq!(serving.following()[&key].error.as_deref(), Some("another log"));
        // What goes on again has no error.
        let _connected = serving.connected(&key, Lsn(1));
        assert_eq!(serving.following()[&key].error, None);
    }
}
