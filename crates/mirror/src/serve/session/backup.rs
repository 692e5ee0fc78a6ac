//! A base backup, from the principal by way of the near end.

use super::messages::Messages;
use super::{Done, Refusal, Session, SessionError, for_log};
use crate::relay::compression::Unpacker;
use crate::seed::BackupRequest;
use crate::seed::message::{FromGiver, SeedAnswer};
use crate::spool::Positions;
use crate::wal::Timeline;
use farshore_link::Receiver;
use farshore_model::Lsn;
use farshore_wire::base_backup::{BackupOptions, ONE_COPY};
use farshore_wire::server::FromFrontend;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

/// The log from the backup's start on is waited for so long: then the client streams it from here.
const LOG_WITHIN: Duration = Duration::from_secs(60);

/// A client that takes nothing for so long keeps the principal in a backup no longer.
const TAKEN_WITHIN: Duration = Duration::from_secs(600);

/// `connection_failure`: the way to the principal.
const NO_WAY: &str = "08006";

impl Session {
    pub(super) async fn base_backup(
        &mut self,
        options: &BackupOptions,
    ) -> Result<Done, SessionError> {
        let mirror = self.context.mirror.clone();
        if let Some(refusal) = self.no_backup() {
            return Ok(Done::Refused(refusal));
        }
        let request = BackupRequest { mirror: mirror.clone(), command: options.command(ONE_COPY) };
        let near_end = self.context.near_end.clone();
        let opened = tokio::select! {
            opened = near_end.open_backup(request) => opened,
            left = left(&mut self.messages) => return Err(left),
        };
        let no_way = |why: String| {
            Done::Refused(Refusal::new(
                NO_WAY,
                format!("mirror \"{mirror}\": the principal's files come by its near end: {why}"),
            ))
        };
        let session = match opened {
            Ok(session) => session,
            Err(why) => return Ok(no_way(why)),
        };
        // The near end ends when its peer does.
        let (_sender, mut receiver) = session.split();
        let answer = match self.next_of(&mut receiver).await? {
            Ok(message) => serde_json::from_slice(&message).map_err(|error| error.to_string()),
            Err(why) => Err(why),
        };
        let (system_id, (start, timeline)) = match answer {
            Ok(SeedAnswer::Begins { system_id, start, timeline, .. }) => {
                (system_id, (start, Timeline(timeline)))
            }
            Ok(SeedAnswer::Refused { why }) | Err(why) => return Ok(no_way(why)),
        };
        let own = self.spool.identity().system_id.to_string();
        if system_id != own {
            let why = format!(
                "the principal's system identifier is {system_id}, and the spool holds the log of \
                 {own}: it is another cluster"
            );
            return Ok(Done::Refused(Refusal::new("55000", why)));
        }
        if !options.wal
            && let Some(refusal) = self.await_log(start, timeline).await?
        {
            return Ok(Done::Refused(refusal));
        }
        tracing::info!(
            %mirror, client = %for_log(&self.application_name), %start,
            "a base backup of the principal goes through"
        );
        let broken = |error: &dyn std::fmt::Display| no_way(format!("it sent {error}"));
        let mut unpacker = Unpacker::new()?;
        loop {
            let message = match self.next_of(&mut receiver).await? {
                Ok(message) => message,
                Err(why) => return Ok(no_way(why)),
            };
            match FromGiver::decode(message) {
                Ok(FromGiver::Data { bytes, packing, packed }) => {
                    match unpacker.unpack(packing, packed, bytes as usize) {
                        Ok(messages) => self.give(&messages).await?,
                        Err(error) => return Ok(broken(&error)),
                    }
                }
                Ok(FromGiver::End { .. }) => return Ok(Done::Answered),
                Ok(FromGiver::Failed { why }) => {
                    return Ok(no_way(String::from_utf8_lossy(&why).into_owned()));
                }
                Ok(_) => return Ok(broken(&"something else than a backup")),
                Err(error) => return Ok(broken(&error)),
            }
        }
    }

    /// Why nobody gets one now.
    fn no_backup(&self) -> Option<Refusal> {
        let mirror = &self.context.mirror;
        if !self.context.door.asks_password() {
            // The log alone does not hold the server's own files: keys, pg_hba.conf, passwords.
            let message = format!(
                "mirror \"{mirror}\" asks nobody for a password, and gives base backups only to who \
                 has shown one"
            );
            return Some(Refusal::new("28000", message).hint(
                "Name a file under [mirror.NAME] standby_password at the far end, and start the \
                 node again; farshore mirror seed needs none.",
            ));
        }
        self.spool.closed().map(|closed| {
            let message = format!(
                "a standby of mirror \"{mirror}\" was promoted (timeline {}): what the old principal \
                 has is not what was gone on with",
                closed.timeline
            );
            Refusal::new("55000", message).hint("Take the backup from the server that was promoted.")
        })
    }

    /// Waits for the log from `start` on, which the client will ask for.
    async fn await_log(
        &mut self,
        start: Lsn,
        timeline: Timeline,
    ) -> Result<Option<Refusal>, SessionError> {
        let mut positions = self.spool.positions();
        let has_come = |now: &Positions| now.timeline == timeline && now.durable >= start;
        let come = async { positions.wait_for(has_come).await.is_ok() };
        let come = tokio::select! {
            come = timeout(LOG_WITHIN, come) => come.unwrap_or(false),
            left = left(&mut self.messages) => return Err(left),
        };
        let now = *self.spool.positions().borrow();
        Ok((!come).then(|| {
            let message = format!(
                "the backup begins at {start} on timeline {timeline}, and the mirror's log ends at {} \
                 on timeline {}: it did not come within {LOG_WITHIN:?}",
                now.durable, now.timeline
            );
            Refusal::new("55000", message).hint("Try again once the mirror has caught up.")
        }))
    }

    /// A client that writes to a slow disk, or to a pipe, may take its time.
    async fn give(&mut self, messages: &[u8]) -> Result<(), SessionError> {
        let Session { writer, messages: from_client, .. } = self;
        let written = async {
            writer.write_all(messages).await?;
            writer.flush().await
        };
        tokio::select! {
            written = timeout(TAKEN_WITHIN, written) => {
                Ok(written.map_err(|_| SessionError::Silent)??)
            }
            left = left(from_client) => Err(left),
        }
    }

    /// The near end's next message, or why there is none, while the client is there.
    async fn next_of(
        &mut self,
        receiver: &mut Receiver,
    ) -> Result<Result<bytes::Bytes, String>, SessionError> {
        tokio::select! {
            message = receiver.next() => Ok(match message {
                Ok(Some(message)) => Ok(message),
                Ok(None) => Err("it said no more".to_owned()),
                Err(error) => Err(error.to_string()),
            }),
            left = left(&mut self.messages) => Err(left),
        }
    }
}

/// The client goes, or says what it has no reason to say.
async fn left(messages: &mut Messages) -> SessionError {
    match messages.next().await {
        Ok(None | Some(FromFrontend::Terminate)) => SessionError::Left,
        Ok(Some(_)) => SessionError::OutOfPlace("a message in the middle of a base backup"),
        Err(error) => error,
    }
}
