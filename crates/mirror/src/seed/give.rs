//! The near end of a seeding: a base backup of the principal, of which what differs goes on the link.
//!
//! Three things go on at once, with a bounded queue between each and the next: reading the backup,
//! comparing and packing (on a thread of its own), sending.

use super::message::{Digest, FromGiver, FromTaker, SeedAnswer, SeedRequest};
use super::tar::{Entry, Reader};
use super::{CHUNK_BYTES, QUEUE_MESSAGES_MAX};
use crate::error::MirrorError;
use crate::relay::compression::{Compression, Packer};
use bytes::{Bytes, BytesMut};
use farshore_fault as fault;
use farshore_link::{Receiver, Sender, Session};
use farshore_pg::replication::{BackupMessage, BaseBackup};
use farshore_pg::{Config, Connection, Mode};
use farshore_wire::base_backup::BackupOptions;
use ring::digest::{SHA256, digest};
use std::collections::HashMap;
use std::time::Duration;
use tokio::sync::mpsc;

/// How long a far end has to take in the last message.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// Digests that are remembered: of 1 TiB. What the far end has beyond that is sent again.
const DIGESTS_KEPT_MAX: usize = 4 << 20;

type Digests = HashMap<String, Vec<Digest>>;

/// Gives a far end the files of the principal.
///
/// # Errors
/// Why it ended. The far end is told where it can be.
pub async fn give(
    principal: &Config,
    compression: Compression,
    session: Session,
    request: &SeedRequest,
) -> Result<(), MirrorError> {
    let (sender, mut receiver) = session.split();
    let has = hear(&mut receiver).await?;
    let packer = Packer::new(compression);
    let packer = packer.map_err(|error| MirrorError::Io { action: "compress files", error })?;
    let (sender, backup) = tell_begun(sender, begin(principal, request).await).await?;
    hand_over((sender, receiver), packer, |pieces| {
        let (path, chunk) = (String::new(), BytesMut::with_capacity(CHUNK_BYTES));
        Reading { pieces, has, path, chunk, number: 0 }.files(backup)
    })
    .await
}

/// Tells a far end how its request begins, or why it does not.
pub(super) async fn tell_begun<Backup>(
    mut sender: Sender,
    begun: Result<(SeedAnswer, Backup), MirrorError>,
) -> Result<(Sender, Backup), MirrorError> {
    match begun {
        Ok((answer, backup)) => {
            sender.send(json(&answer)).await?;
            Ok((sender, backup))
        }
        Err(error) => {
            say_no(sender, &error).await?;
            Err(error)
        }
    }
}

/// Has what `read` hands on packed and sent, all three at once.
///
/// # Errors
/// Why it ended. The far end is told where it can be.
pub(super) async fn hand_over<Reading: Future<Output = Result<(), MirrorError>>>(
    (mut sender, mut receiver): (Sender, Receiver),
    packer: Packer,
    read: impl FnOnce(mpsc::Sender<Piece>) -> Reading,
) -> Result<(), MirrorError> {
    let (pieces, to_pack) = mpsc::channel(QUEUE_MESSAGES_MAX);
    let (packed, to_send) = mpsc::channel(QUEUE_MESSAGES_MAX);
    let packing = tokio::task::spawn_blocking(move || pack(packer, to_pack, &packed));
    let ended = tokio::select! {
        ended = async { tokio::try_join!(read(pieces), send(&mut sender, to_send)) } => {
            ended.map(|((), ())| ())
        }
        gone = gone(&mut receiver) => Err(gone),
    };
    // It has no more to do, or nobody to do it for: both its queues are closed. Where it is why the
    // others ended, only it can tell.
    let packed = packing.await.unwrap_or_else(|_| Err(stopped()));
    let ended = packed.and(ended);
    if let Err(error) = &ended
        && !matches!(error, MirrorError::Link(_))
    {
        let failed = FromGiver::Failed { why: error.to_string().into() };
        sender.send_parts(&failed.encode()).await?;
    }
    // The far end hangs up when it has all.
    let _ = tokio::time::timeout(LAST_WORDS, async {
        tokio::select! {
            _ = sender.finish() => {}
            _ = gone(&mut receiver) => {}
        }
    })
    .await;
    ended
}

/// Tells a far end why it gets no files.
///
/// # Errors
/// The link's.
pub async fn refuse(session: Session, why: &MirrorError) -> Result<(), MirrorError> {
    let (sender, mut receiver) = session.split();
    hear(&mut receiver).await?;
    say_no(sender, why).await
}

/// Tells a far end why there is no base backup.
///
/// # Errors
/// The link's.
pub async fn decline(session: Session, why: &MirrorError) -> Result<(), MirrorError> {
    let (sender, _receiver) = session.split();
    say_no(sender, why).await
}

pub(super) async fn say_no(mut sender: Sender, why: &MirrorError) -> Result<(), MirrorError> {
    sender.send(json(&SeedAnswer::Refused { why: why.to_string() })).await?;
    let _ = tokio::time::timeout(LAST_WORDS, sender.finish()).await;
    Ok(())
}

pub(super) async fn gone(receiver: &mut Receiver) -> MirrorError {
    let site = receiver.peer_site().to_owned();
    match receiver.next().await {
        Ok(_) => MirrorError::Protocol { site, what: "something while files came".to_owned() },
        Err(error) => error.into(),
    }
}

fn json(answer: &SeedAnswer) -> Bytes {
    serde_json::to_vec(answer).unwrap_or_default().into()
}

/// What the far end has.
async fn hear(receiver: &mut Receiver) -> Result<Digests, MirrorError> {
    let site = receiver.peer_site().to_owned();
    let protocol = |what: String| MirrorError::Protocol { site: site.clone(), what };
    let (mut has, mut kept) = (Digests::new(), 0);
    loop {
        let message = receiver.next().await?;
        let message = message.ok_or_else(|| protocol("no more, before it began".to_owned()))?;
        match FromTaker::decode(message).map_err(|what| protocol(what.to_string()))? {
            FromTaker::Go => return Ok(has),
            FromTaker::Has { path, first, digests } => {
                kept += digests.len();
                let known = has.entry(path).or_default();
                if known.len() == first as usize && kept <= DIGESTS_KEPT_MAX {
                    known.extend(digests);
                }
            }
        }
    }
}

async fn begin(
    principal: &Config,
    request: &SeedRequest,
) -> Result<(SeedAnswer, BaseBackup), MirrorError> {
    let name = format!("farshore_seed_{}", request.mirror);
    let config = principal.clone().with_application_name(&name);
    let mut connection = Connection::connect(&config, Mode::PhysicalReplication).await?;
    let system_id = connection.identify_system().await?.system_id;
    let options = BackupOptions {
        label: Some(format!("farshore mirror {}", request.mirror)),
        progress: true,
        fast: true,
        wait: false,
        max_rate_kb: request.max_rate_kb,
        manifest: Some("yes".to_owned()),
        manifest_checksums: Some("SHA256".to_owned()),
        ..BackupOptions::default()
    };
    let backup = connection.base_backup(&options).await?;
    let answer = SeedAnswer::Begins {
        system_id,
        start: backup.start,
        timeline: backup.timeline,
        bytes: backup.tablespaces.iter().map(|part| part.bytes).sum(),
        tablespaces: backup.tablespaces.iter().filter_map(|part| part.location.clone()).collect(),
    };
    Ok((answer, backup))
}

/// What reading hands to packing.
pub(super) enum Piece {
    /// A chunk of the file that was told of last.
    Chunk {
        chunk: Bytes,
        /// The digest of what the far end has there.
        known: Option<Digest>,
    },
    /// Anything else, as it goes on the link.
    Say(FromGiver),
}

pub(super) fn stopped() -> MirrorError {
    let error = std::io::Error::other("the thread that does it ended");
    MirrorError::Io { action: "compress files", error }
}

/// Reads the backup.
struct Reading {
    pieces: mpsc::Sender<Piece>,
    has: Digests,
    /// The file that is being read.
    path: String,
    /// Its chunk that is not whole yet.
    chunk: BytesMut,
    /// The chunk's number.
    number: usize,
}

impl Reading {
    async fn files(mut self, mut backup: BaseBackup) -> Result<(), MirrorError> {
        let server = backup.server().to_owned();
        let wrong = |what: String| MirrorError::WrongPrincipal { server: server.clone(), what };
        let mut reader = Reader::default();
        let mut prefix = String::new();
        let mut is_manifest = false;
        while let Some(message) = backup.next().await? {
            match message {
                BackupMessage::Archive(number) => {
                    reader.finish().map_err(|error| wrong(error.to_string()))?;
                    self.end_file().await?;
                    let location =
                        backup.tablespaces.get(number).and_then(|part| part.location.as_ref());
                    prefix = location.map_or(String::new(), |(oid, _)| format!("pg_tblspc/{oid}/"));
                }
                BackupMessage::Manifest => {
                    reader.finish().map_err(|error| wrong(error.to_string()))?;
                    self.end_file().await?;
                    is_manifest = true;
                    self.path.clear();
                    self.say(FromGiver::Manifest).await?;
                }
                BackupMessage::Data(data) if is_manifest => self.data(&data).await?,
                BackupMessage::Data(data) => {
                    reader.push(&data);
                    while let Some(entry) =
                        reader.next_entry().map_err(|error| wrong(error.to_string()))?
                    {
                        self.entry(&prefix, entry).await?;
                    }
                }
            }
        }
        self.end_file().await?;
        let end = backup.end().ok_or_else(|| wrong("its backup has no end".to_owned()))?;
        self.say(FromGiver::End { end }).await
    }

    async fn entry(&mut self, prefix: &str, entry: Entry) -> Result<(), MirrorError> {
        match entry {
            Entry::File { path, mode, bytes } => {
                self.end_file().await?;
                fault::point("seed.before-file");
                self.path = format!("{prefix}{path}");
                self.number = 0;
                let path = self.path.clone();
                self.say(FromGiver::File { path, mode, bytes }).await
            }
            Entry::Data(data) => self.data(&data).await,
            Entry::Directory { path, mode } => {
                self.end_file().await?;
                self.say(FromGiver::Directory { path: format!("{prefix}{path}"), mode }).await
            }
            // A tablespace's: the far end puts it where it is told to.
            Entry::Link { .. } => self.end_file().await,
        }
    }

    async fn data(&mut self, mut data: &[u8]) -> Result<(), MirrorError> {
        while !data.is_empty() {
            let (here, rest) = data.split_at(data.len().min(CHUNK_BYTES - self.chunk.len()));
            self.chunk.extend_from_slice(here);
            data = rest;
            if self.chunk.len() == CHUNK_BYTES {
                self.end_chunk().await?;
            }
        }
        Ok(())
    }

    async fn end_chunk(&mut self) -> Result<(), MirrorError> {
        let chunk = self.chunk.split().freeze();
        self.chunk.reserve(CHUNK_BYTES);
        let known = self.has.get(&self.path).and_then(|digests| digests.get(self.number)).copied();
        self.number += 1;
        self.hand_on(Piece::Chunk { chunk, known }).await
    }

    async fn end_file(&mut self) -> Result<(), MirrorError> {
        if self.chunk.is_empty() { Ok(()) } else { self.end_chunk().await }
    }

    async fn say(&mut self, message: FromGiver) -> Result<(), MirrorError> {
        self.hand_on(Piece::Say(message)).await
    }

    async fn hand_on(&mut self, piece: Piece) -> Result<(), MirrorError> {
        self.pieces.send(piece).await.map_err(|_| stopped())
    }
}

/// Leaves out what the far end has, and packs the rest.
fn pack(
    mut packer: Packer,
    mut pieces: mpsc::Receiver<Piece>,
    messages: &mpsc::Sender<FromGiver>,
) -> Result<(), MirrorError> {
    // Bytes that the far end has, and was not told of yet.
    let mut same = 0;
    while let Some(piece) = pieces.blocking_recv() {
        let message = match piece {
            Piece::Chunk { chunk, known: Some(known) }
                if digest(&SHA256, &chunk).as_ref().starts_with(&known) =>
            {
                same += chunk.len() as u64;
                continue;
            }
            Piece::Chunk { chunk, .. } => {
                let bytes = chunk.len() as u32;
                let packed = packer.pack(&[chunk]);
                let (packing, packed) =
                    packed.map_err(|error| MirrorError::Io { action: "compress files", error })?;
                FromGiver::Data { bytes, packing, packed }
            }
            Piece::Say(message) => message,
        };
        let before = match std::mem::take(&mut same) {
            0 => None,
            bytes => Some(FromGiver::Same { bytes }),
        };
        for message in before.into_iter().chain([message]) {
            if messages.blocking_send(message).is_err() {
                // Sending has ended, and says why.
                return Ok(());
            }
        }
    }
    Ok(())
}

async fn send(
    sender: &mut Sender,
    mut messages: mpsc::Receiver<FromGiver>,
) -> Result<(), MirrorError> {
    while let Some(message) = messages.recv().await {
        sender.send_parts(&message.encode()).await?;
    }
    Ok(())
}
