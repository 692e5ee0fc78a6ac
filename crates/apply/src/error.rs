use farshore_capture::CaptureError;
use farshore_capture::publication::TableName;
use farshore_model::Lsn;
use farshore_store::StoreError;

/// Why a subscription stopped. Each message names the object and the next step.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The target or the way to it.
    #[error("target {server}: {error}")]
    Target {
        /// Redacted address.
        server: String,
        /// What it said.
        #[source]
        error: farshore_pg::Error,
    },
    /// The target refused a change, or the change met other rows than it should.
    #[error("{0}")]
    Change(Box<FailedChange>),
    /// The publisher's side of the initial copy.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// The store refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something about the set-up that a person has to change.
    #[error("{0}")]
    Setup(String),
    /// Changes this subscription needs are gone.
    #[error("{0}")]
    Gap(String),
    /// Something is not there yet; trying again finds it.
    #[error("{0}")]
    NotYet(String),
    /// The initial copy ended to let somebody else at a table; it goes on at once.
    #[error("{0}")]
    GaveWay(String),
    /// The target did not take a batch; its changes are applied again row by row, at once.
    #[error("subscription \"{subscription}\": a batch up to {position} was refused: {what}")]
    BatchRefused {
        /// Subscription.
        subscription: String,
        /// Whose changes were refused, if it was one table's.
        table: Option<Box<TableName>>,
        /// Newest position in the batch.
        position: Lsn,
        /// Why.
        what: String,
    },
    /// A stored change that cannot be read.
    #[error(
        "stored transaction at {position}: {what}. Nothing after it was applied; please report it"
    )]
    Stored {
        /// Where.
        position: Lsn,
        /// What is wrong.
        what: String,
    },
}

/// A change that could not be applied.
#[derive(Debug, thiserror::Error)]
#[error(
    "subscription \"{subscription}\": cannot apply {operation} on {table} (key {key}) of the \
     transaction that committed at {position}: {what}. {remedy}"
)]
pub struct FailedChange {
    /// Subscription.
    pub subscription: String,
    /// INSERT, UPDATE, DELETE or TRUNCATE.
    pub operation: &'static str,
    /// Qualified table name.
    pub table: String,
    /// The row's key, readable.
    pub key: String,
    /// End of the transaction's commit record on the publisher.
    pub position: Lsn,
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub remedy: &'static str,
    /// SQLSTATE, when the target sent one.
    pub sqlstate: Option<String>,
}

impl ApplyError {
    /// Whether trying again later, unchanged, can succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            ApplyError::Target { error, .. } => {
                error.is_transient() || error.sqlstate().is_some_and(passes_by_itself)
            }
            ApplyError::Change(failed) => failed.sqlstate.as_deref().is_some_and(passes_by_itself),
            ApplyError::Capture(error) => error.is_transient(),
            ApplyError::NotYet(_) | ApplyError::GaveWay(_) | ApplyError::BatchRefused { .. } => {
                true
            }
            ApplyError::Store(_)
            | ApplyError::Setup(_)
            | ApplyError::Gap(_)
            | ApplyError::Stored { .. } => false,
        }
    }
}

/// SQLSTATEs of conditions that end without anybody mending the data: serialisation failures,
/// deadlocks, time limits, shutdowns, a target that is read-only while it fails over, and resources
/// that may come back.
pub(crate) fn passes_by_itself(code: &str) -> bool {
    matches!(
        code,
        "40001" | "40P01" | "55P03" | "57014" | "57P01" | "57P02" | "57P03" | "25006" | "25P04"
    ) || code.starts_with("53")
        || code.starts_with("58")
        || code.starts_with("08")
}
