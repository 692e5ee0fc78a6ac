//! How much log a near end has: asked by a far end whose standby is to be promoted, in a session of
//! its own, so that what the answer says is true now and not when log came last.

use super::message::as_text;
use crate::error::MirrorError;
use crate::receive::Near;
use crate::spool::Spool;
use farshore_link::Session;
use farshore_model::Lsn;
use farshore_pg::{Connection, Mode};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// The near end waits so long for the principal.
const PRINCIPAL_WITHIN: Duration = Duration::from_secs(5);
/// How long the far end has to take in the answer.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// What the session is opened with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndRequest {
    /// The mirror's name at the near end.
    pub mirror: String,
}

/// The only message, from the near end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndAnswer {
    /// What a flush promises there, as in a site file.
    pub mode: String,
    /// What can be streamed from there.
    pub log: PrincipalsLog,
    /// The log comes from a spool beside the near end, which takes nothing in at present, as the far
    /// end has asked: nothing more is acknowledged to who writes it. A near end that knows nothing of
    /// this holds nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub holds: bool,
    /// What commits have returned for. Absent where nothing was acknowledged since that node started,
    /// and from a near end of an earlier version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub acknowledged: Option<Acknowledged>,
}

/// Log that a near end's principal was told as flushed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acknowledged {
    /// Whose log: the cluster's system identifier.
    pub system_id: String,
    /// All before this.
    #[serde(with = "as_text")]
    pub up_to: Lsn,
}

/// The log of a near end's principal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrincipalsLog {
    /// It can be had.
    EndsAt {
        /// Whose log: the cluster's system identifier.
        system_id: String,
        /// Durable at the principal before this.
        #[serde(with = "as_text")]
        end: Lsn,
    },
    /// The principal does not answer.
    Unknown {
        /// Why, for a person.
        why: String,
    },
}

impl EndAnswer {
    /// Whether commits return at the principal before the far end has them.
    pub fn is_async(&self) -> bool {
        self.mode == "async"
    }
}

impl Near {
    /// Where the principal's log ends now.
    pub async fn end(&self) -> EndAnswer {
        let log = match tokio::time::timeout(PRINCIPAL_WITHIN, self.principals_log()).await {
            Ok(Ok(log)) => log,
            Ok(Err(error)) => PrincipalsLog::Unknown { why: error.to_string() },
            Err(_) => PrincipalsLog::Unknown {
                why: format!("the principal does not answer within {PRINCIPAL_WITHIN:?}"),
            },
        };
        self.answer(log)
    }

    fn answer(&self, log: PrincipalsLog) -> EndAnswer {
        let mode = self.promise.as_str().to_owned();
        EndAnswer { mode, log, holds: false, acknowledged: self.acknowledged() }
    }

    fn acknowledged(&self) -> Option<Acknowledged> {
        let status = *self.status();
        let system_id = status.system_id.filter(|_| status.acknowledged > Lsn::ZERO)?.to_string();
        Some(Acknowledged { system_id, up_to: status.acknowledged })
    }

    /// The same of a principal that is a spool of this node's, which need not be asked by way of its
    /// server.
    pub fn end_of_spool(&self, spool: &Spool) -> EndAnswer {
        let log = PrincipalsLog::EndsAt {
            system_id: spool.identity().system_id.to_string(),
            end: spool.positions().borrow().durable,
        };
        self.answer(log)
    }

    /// Tells a far end.
    ///
    /// # Errors
    /// The link's.
    pub async fn tell_end(&self, session: Session, answer: &EndAnswer) -> Result<(), MirrorError> {
        let (mut sender, mut receiver) = session.split();
        sender.send(serde_json::to_vec(answer).unwrap_or_default().into()).await?;
        // The far end hangs up when it has heard.
        let _ = tokio::time::timeout(LAST_WORDS, async {
            sender.finish().await?;
            receiver.next().await
        })
        .await;
        Ok(())
    }

    async fn principals_log(&self) -> Result<PrincipalsLog, farshore_pg::Error> {
        let mut connection =
            Connection::connect(&self.principal, Mode::PhysicalReplication).await?;
        let system = connection.identify_system().await?;
        connection.close().await;
        self.status().system_id = system.system_id.parse().ok();
        Ok(PrincipalsLog::EndsAt { system_id: system.system_id, end: system.xlogpos })
    }
}

/// What a near end says to a session that was opened with an [`EndRequest`].
///
/// # Errors
/// The link's, or that it says something else.
pub async fn hear_end(session: Session) -> Result<EndAnswer, MirrorError> {
    let site = session.peer_site().to_owned();
    let (_sender, mut receiver) = session.split();
    let protocol = |what: String| MirrorError::Protocol { site: site.clone(), what };
    let answer = receiver.next().await?.ok_or_else(|| protocol("no answer".to_owned()))?;
    serde_json::from_slice(&answer)
        .map_err(|error| protocol(format!("an answer that cannot be read ({error})")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_read_as_they_were_written() {
        let ends = PrincipalsLog::EndsAt { system_id: "7".to_owned(), end: Lsn(0x300_0148) };
        let unknown = PrincipalsLog::Unknown { why: "gone".to_owned() };
        for (mode, log, is_async) in [("async", ends, true), ("far", unknown, false)] {
            let up_to = Lsn(0x300_0000);
            let acknowledged = is_async.then(|| Acknowledged { system_id: "7".to_owned(), up_to });
            let answer = EndAnswer { mode: mode.to_owned(), log, holds: is_async, acknowledged };
            let text = serde_json::to_string(&answer).unwrap();
            assert_eq!(serde_json::from_str::<EndAnswer>(&text).unwrap(), answer, "{text}");
            assert_eq!(answer.is_async(), is_async);
        }
        // One of an earlier version.
        let before = r#"{"mode":"async","log":{"unknown":{"why":"gone"}}}"#;
        let before = serde_json::from_str::<EndAnswer>(before).unwrap();
        assert!(!before.holds && before.acknowledged.is_none());
    }
}
