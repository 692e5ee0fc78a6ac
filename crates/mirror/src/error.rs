//! Why a mirror does not run.

use crate::spool::SpoolError;
use farshore_link::LinkError;
use farshore_model::Lsn;

/// Why an end of a mirror stopped. Every message says what happened and what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum MirrorError {
    /// The link.
    #[error("{0}")]
    Link(#[from] LinkError),
    /// The principal, or the way there.
    #[error("the principal: {0}")]
    Principal(#[from] farshore_pg::Error),
    /// The principal is not what it should be.
    #[error("the principal {server}: {what}")]
    WrongPrincipal {
        /// Which server.
        server: String,
        /// What is wrong, and what to do.
        what: String,
    },
    /// The principal left the timeline that the far end's spool is on, before where that ends.
    #[error("the principal {server}: {what}")]
    LeftBefore {
        /// Which server.
        server: String,
        /// Where.
        at: Lsn,
        /// What that means, and what to do.
        what: String,
    },
    /// The principal is not as far as the far end's spool, and may get there.
    #[error("the principal {server}: {what}")]
    Behind {
        /// Which server.
        server: String,
        /// In what, and what to do.
        what: String,
    },
    /// Another standby has this one's name.
    #[error(
        "the principal {server} has another standby that is called \"{application_name}\" (process \
         {pid}, from {from}): synchronous_standby_names takes the two for one, and a commit may \
         return that is not here. Give one of the two another application_name"
    )]
    Namesake {
        /// Which server.
        server: String,
        /// The name.
        application_name: String,
        /// The other's walsender.
        pid: String,
        /// Where it comes from.
        from: String,
    },
    /// Another spool has gone on with the mirror, and this one was copied from it, or it from this one.
    #[error(
        "another spool has gone on with mirror \"{mirror}\" since this one did: this one is a copy, or \
         was copied, or was set back to an earlier state (a machine that was cloned or restored, say). \
         What was acknowledged is in the other one. Take the wrong one out of service. If this one is \
         to go on: farshore mirror resume SITE.toml {mirror}, at the near end, takes whichever asks \
         next; until it has caught up, commits that have returned may not be in it"
    )]
    CopiedSpool {
        /// The mirror.
        mirror: String,
    },
    /// It was dropped, and waits for an operator.
    #[error("{0}")]
    Dropped(String),
    /// The principal has ended the stream.
    #[error("the principal {server} ended the stream: it shuts down, or was told to")]
    Ended {
        /// Which server.
        server: String,
    },
    /// The spool.
    #[error("{0}")]
    Spool(#[from] SpoolError),
    /// A file of the spool, which goes on.
    #[error("{0}. It is tried again")]
    File(SpoolError),
    /// The near end says no.
    #[error("site \"{site}\" does not give it: {why}")]
    Refused {
        /// The near end.
        site: String,
        /// In its words.
        why: String,
        /// It may end by itself.
        passes: bool,
    },
    /// As [`MirrorError::Refused`], by a near end that is here too.
    #[error("{why}")]
    NearEnd {
        /// In its words.
        why: String,
        /// It may end by itself.
        passes: bool,
    },
    /// What came is not what an end of a mirror sends.
    #[error("site \"{site}\" sent {what}; is it of another version?")]
    Protocol {
        /// The peer.
        site: String,
        /// What came.
        what: String,
    },
    /// The spool ended within a record that its principal never finished.
    #[error(
        "the log here ended at {was}, within a record that the principal before never finished, so \
         that nobody was promised it: it ends at {end} now, and log is asked for again"
    )]
    Unfinished {
        /// Where it ended.
        was: Lsn,
        /// Where the last whole record does, or the segment begins.
        end: Lsn,
    },
    /// Reduced log came back otherwise than it was ([`crate::relay::redundancy`]).
    #[error(
        "site \"{site}\" sent log that came back here otherwise than it was there ({what}); nothing \
         of it was kept, and it is asked for again without being reduced. If that comes again, have \
         the memory of both machines checked"
    )]
    NotRestored {
        /// The near end.
        site: String,
        /// What was found.
        what: String,
    },
    /// This machine.
    #[error("cannot {action}: {error}")]
    Io {
        /// Verb phrase.
        action: &'static str,
        /// Why.
        error: std::io::Error,
    },
    /// The address that standbys shall connect to.
    #[error("cannot listen at {address} for standbys: {what}")]
    Listen {
        /// As configured.
        address: String,
        /// Why, and what to do.
        what: String,
    },
}

impl MirrorError {
    /// Of what the operating system refused, and its spool's writer did not stop for.
    pub(crate) fn of_file(error: SpoolError) -> MirrorError {
        match error {
            SpoolError::Io { .. } => MirrorError::File(error),
            error => MirrorError::Spool(error),
        }
    }

    /// Whether trying again may help although nobody changes anything here.
    pub fn is_transient(&self) -> bool {
        match self {
            // A standby may follow its principal, and a server recover.
            MirrorError::Behind { .. } => true,
            // Also when certificates or roles are refused: whoever mends that may do so elsewhere.
            MirrorError::Link(_) | MirrorError::Principal(_) | MirrorError::Ended { .. } => true,
            // Standbys may get past it, or somebody put it back.
            MirrorError::Spool(SpoolError::Damaged { .. }) => true,
            MirrorError::Spool(error) => error.is_out_of_room(),
            MirrorError::File(_) => true,
            // Somebody may resume it, without a word to the far end.
            MirrorError::Namesake { .. } | MirrorError::Dropped(_) => true,
            MirrorError::Refused { passes, .. } | MirrorError::NearEnd { passes, .. } => *passes,
            MirrorError::Io { .. }
            | MirrorError::Listen { .. }
            | MirrorError::NotRestored { .. }
            | MirrorError::Unfinished { .. } => true,
            MirrorError::WrongPrincipal { .. }
            | MirrorError::LeftBefore { .. }
            | MirrorError::CopiedSpool { .. }
            | MirrorError::Protocol { .. } => false,
        }
    }
}
