//! The near end of a base backup that a client of the far end's server asks for (`pg_basebackup`, or
//! another mirror's near end): what the principal sends is handed on as it is, compressed.

use super::CHUNK_BYTES;
use super::give::{Piece, gone, hand_over, say_no, stopped, tell_begun};
use super::message::{FromGiver, SeedAnswer};
use crate::error::MirrorError;
use crate::relay::compression::{Compression, Packer};
use farshore_fault as fault;
use farshore_link::Session;
use farshore_model::Lsn;
use farshore_pg::replication::PassedBackup;
use farshore_pg::{Config, Connection, Mode};
use farshore_wire::base_backup::BackupOptions;
use farshore_wire::replication_command::ReplicationCommand;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

/// What a far end asks for when it opens the session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupRequest {
    /// The mirror's name at the near end.
    pub mirror: String,
    /// The command, in the grammar of 15 and later.
    pub command: String,
}

/// Hands on a base backup of the principal. The far end's client is told what [`SeedAnswer`] says,
/// then comes [`FromGiver::Data`] alone: the principal's messages, but for its errors.
///
/// # Errors
/// Why it ended. The far end is told where it can be.
pub async fn pass(
    principal: &Config,
    compression: Compression,
    session: Session,
    request: &BackupRequest,
) -> Result<(), MirrorError> {
    let (sender, mut receiver) = session.split();
    // What is asked for is taken from the text, and nothing else of it gets to the principal.
    let options = match ReplicationCommand::parse(&request.command) {
        Ok(ReplicationCommand::BaseBackup(options)) => options,
        Ok(_) | Err(_) => {
            let what = format!("\"{}\" as a request for a backup", request.command.escape_debug());
            let error = MirrorError::Protocol { site: sender.peer_site().to_owned(), what };
            say_no(sender, &error).await?;
            return Err(error);
        }
    };
    let packer = Packer::new(compression);
    let packer = packer.map_err(|error| MirrorError::Io { action: "compress files", error })?;
    // The checkpoint may take minutes, and who asked may be gone before it is over.
    let begun = tokio::select! {
        begun = begin(principal, &request.mirror, &options) => begun,
        gone = gone(&mut receiver) => return Err(gone),
    };
    let (sender, backup) = tell_begun(sender, begun).await?;
    hand_over((sender, receiver), packer, |pieces| hand_on(backup, pieces)).await
}

async fn begin(
    principal: &Config,
    mirror: &str,
    options: &BackupOptions,
) -> Result<(SeedAnswer, PassedBackup), MirrorError> {
    let config = principal.clone().with_application_name(&format!("farshore_backup_{mirror}"));
    let mut connection = Connection::connect(&config, Mode::PhysicalReplication).await?;
    let system_id = connection.identify_system().await?.system_id;
    let backup = connection.pass_base_backup(options).await?;
    let (start, timeline) = (backup.start, backup.timeline);
    let answer =
        SeedAnswer::Begins { system_id, start, timeline, bytes: 0, tablespaces: Vec::new() };
    Ok((answer, backup))
}

async fn hand_on(mut backup: PassedBackup, pieces: mpsc::Sender<Piece>) -> Result<(), MirrorError> {
    let hand_on = async |piece| pieces.send(piece).await.map_err(|_| stopped());
    // Whole messages: behind each piece the client may be told that no more comes.
    while let Some(chunk) = backup.next(CHUNK_BYTES / 2).await? {
        fault::point("backup.before-piece");
        if chunk.len() > CHUNK_BYTES {
            let (server, what) = (backup.server().to_owned(), "sent a message that is too long");
            return Err(MirrorError::WrongPrincipal { server, what: what.to_owned() });
        }
        hand_on(Piece::Chunk { chunk, known: None }).await?;
    }
    hand_on(Piece::Say(FromGiver::End { end: Lsn::ZERO })).await
}
