use farshore_model::{DictionaryId, Lsn, transaction::Malformed};
use farshore_store::StoreError;
use farshore_wire::pgoutput::DecodeError;

/// Why capture or a snapshot stopped. Each message names the object and the next step.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The publisher or the way to it.
    #[error("publisher {server}: {error}{}", next_step(error))]
    Publisher {
        /// Redacted address.
        server: String,
        /// What it said.
        #[source]
        error: farshore_pg::Error,
    },
    /// The publisher takes no changes.
    #[error(
        "publisher {0} is a standby (it is in recovery). Trying again until it is promoted; if its primary is elsewhere, point `source` there (with several hosts and target_session_attrs=read-write in the URL it is found after a failover too)"
    )]
    Standby(String),
    /// Another site, which has the publisher, or the way to it.
    #[error("site {site}: {message}")]
    Remote {
        /// That site's name.
        site: String,
        /// What it said, or what is wrong with the way to it.
        message: String,
        /// Whether trying again later, unchanged, can succeed.
        transient: bool,
    },
    /// The store refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A message that this build cannot read: never skipped.
    #[error(
        "publisher {server} sent a message that cannot be decoded near {near}: {error}. Nothing after this position was taken; please report it"
    )]
    Decode {
        /// Redacted address.
        server: String,
        /// WAL position of the message.
        near: Lsn,
        /// What was wrong.
        error: DecodeError,
    },
    /// The stream broke its own rules.
    #[error("publisher broke the replication protocol: {0}")]
    Protocol(String),
    /// Something about the set-up that a person has to change.
    #[error("{0}")]
    Setup(String),
    /// The stream must be asked for again, with values as text.
    #[error("the publisher's values must be asked for as text; asking again")]
    TurnToText,
    /// Capture was given up so that it begins again.
    #[error("{0}")]
    Interrupted(String),
    /// Changes have been lost to this store, or might have been.
    #[error("{0}")]
    Gap(String),
    /// Stored bytes that do not parse.
    #[error("stored transaction at {position} is damaged: {error}")]
    Malformed {
        /// Where.
        position: Lsn,
        /// What is wrong.
        error: Malformed,
    },
    /// A stored change refers to a definition that was not read before it.
    #[error("stored change at {position} refers to the unknown definition {id:?}")]
    UnknownDefinition {
        /// Where.
        position: Lsn,
        /// Which.
        id: DictionaryId,
    },
}

impl CaptureError {
    /// Whether trying again later, unchanged, can succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            CaptureError::Publisher { error, .. } => {
                error.is_transient() || is_of_a_dropped_table(error)
            }
            CaptureError::Remote { transient, .. } => *transient,
            // A full disk may get room again; a log that failed stays closed and says so itself.
            CaptureError::Store(StoreError::Io { .. })
            | CaptureError::TurnToText
            | CaptureError::Standby(_)
            | CaptureError::Interrupted(_) => true,
            CaptureError::Store(_)
            | CaptureError::Decode { .. }
            | CaptureError::Protocol(_)
            | CaptureError::Setup(_)
            | CaptureError::Gap(_)
            | CaptureError::Malformed { .. }
            | CaptureError::UnknownDefinition { .. } => false,
        }
    }
}

impl CaptureError {
    /// Whether the publisher says that a lock was waited for longer than it may.
    pub(crate) fn is_of_a_lock(&self) -> bool {
        let CaptureError::Publisher { error, .. } = self else { return false };
        error.sqlstate() == Some("55P03")
    }
}

/// Whether a server says that it was about to look at a table which was dropped meanwhile: the next
/// look does not meet it. (`pg_publication_tables` does not hold what it lists.)
pub(crate) fn is_of_a_dropped_table(error: &farshore_pg::Error) -> bool {
    let of_a_relation = |said: &str| {
        said.starts_with("could not open relation with OID")
            || said.starts_with("cache lookup failed for relation")
    };
    error.sqlstate() == Some("XX000")
        && error.server_error().is_some_and(|said| of_a_relation(&said.message))
}

/// What follows a password that a server has refused: the node reads `.pgpass` at every connection, and
/// the environment, service files and the site file when it starts.
pub const ONCE_THE_PASSWORD_IS_RIGHT: &str = "Once it is right: farshore resume if it is in ~/.pgpass; \
     if it is in PGPASSWORD, the service file or the site file, which are read at the start only, \
     restart the node";

/// What helps against a server's refusal that does not say it.
fn next_step(error: &farshore_pg::Error) -> String {
    let said = error.server_error().map_or("", |said| said.message.as_str());
    let step = match error.sqlstate() {
        Some("28P01") => ONCE_THE_PASSWORD_IS_RIGHT,
        Some("53300") if said.contains("max_wal_senders") => {
            "Raise max_wal_senders on that server (needs a restart of it), or end another \
             replication connection: this one is tried again"
        }
        Some("53300") => {
            "Raise max_connections on that server, or the CONNECTION LIMIT of the role or the \
             database, or close connections: this one is tried again"
        }
        Some("53400") if said.contains("replication slots") => {
            "Raise max_replication_slots on that server (needs a restart of it; a publication \
             takes one, and one more while a table is copied), or drop slots that nothing uses \
             (SELECT slot_name FROM pg_replication_slots WHERE NOT active): this is tried again"
        }
        Some("55P03") => {
            "A session on that server has a table for itself, or waits to have it (TRUNCATE, DDL, \
             VACUUM FULL; see pg_locks there): tried again"
        }
        _ => return String::new(),
    };
    format!(". {step}")
}

#[cfg(test)]
mod tests {
    use super::CaptureError;
    use farshore_pg::{Error, ServerError};

    #[test]
    fn a_password_that_is_refused_ends_with_what_to_do_once_it_is_right() {
        let said = |code: &str| {
            let refusal = ServerError { code: code.to_owned(), ..ServerError::default() };
            let reason = "FATAL".to_owned();
            let error =
                Error::Auth { server: "s".to_owned(), reason, refusal: Some(Box::new(refusal)) };
            CaptureError::Publisher { server: "s".to_owned(), error }.to_string()
        };
        let password = said("28P01");
        assert!(password.contains(": farshore resume if it is in ~/.pgpass;"), "{password}");
        assert!(password.ends_with(", restart the node"), "{password}");
        assert!(!said("28000").contains("pgpass"));
    }
}
