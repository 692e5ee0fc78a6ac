use crate::conflict;
use crate::remedy;
use bytes::Bytes;
use farshore_capture::CaptureError;
use farshore_capture::publication::TableName;
use farshore_model::{DictionaryId, Lsn, PgTime};
use farshore_pg::is_lost_by_pooler;
use farshore_store::StoreError;
use farshore_wire::backend::ServerError;
use std::borrow::Cow;
use std::fmt;

/// Why a subscription stopped. Each message names the object and the next step.
#[derive(Debug, thiserror::Error)]
pub enum ApplyError {
    /// The target or the way to it.
    #[error("target {server}: {error}{}", remedy::sentence(.error))]
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
    /// The target has no room (locks, memory) for groups side by side, or of many transactions.
    #[error("{error}")]
    NoRoom {
        /// Confirmed by it.
        applied: Lsn,
        /// What it said.
        #[source]
        error: Box<ApplyError>,
    },
    /// The target refused to commit.
    #[error("{0}")]
    Commit(Box<RefusedCommit>),
    /// The publisher's side of the initial copy.
    #[error(transparent)]
    Capture(#[from] CaptureError),
    /// The store refused.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something about the set-up that a person has to change.
    #[error("{0}")]
    Setup(String),
    /// The publisher's table is another one than was copied under its name.
    #[error(
        "subscription \"{subscription}\": the publisher's table {table} is another one than was \
         copied (OID {found} instead of {copied}): it was renamed, or dropped and made again. To \
         have it copied anew, rows and all: {}",
        remedy::resync(.subscription, Some(.table))
    )]
    AnotherTable {
        /// Subscription.
        subscription: String,
        /// Its name on the publisher.
        table: Box<TableName>,
        /// The publisher's OID of the one that was copied.
        copied: u32,
        /// That of the one which changes are for.
        found: u32,
    },
    /// Changes of the publisher's table came while it had another name.
    #[error(
        "subscription \"{subscription}\": the publisher's table {table} was called {other} for a \
         while, and what was changed in it then is not in the copy. To have it copied anew, rows and \
         all: {}",
        remedy::resync(.subscription, Some(.table))
    )]
    Renamed {
        /// Subscription.
        subscription: String,
        /// Its name on the publisher.
        table: Box<TableName>,
        /// The other one.
        other: Box<TableName>,
        /// The publisher's OID of the table.
        oid: u32,
    },
    /// The publisher's table has its columns in other places than before, or others in their places.
    #[error(
        "subscription \"{subscription}\": the publisher's table {table} was altered: {}",
        columns_moved(.subscription, .table, .column, .renames, .others)
    )]
    ColumnsMoved {
        /// Subscription.
        subscription: String,
        /// Its name on the publisher.
        table: Box<TableName>,
        /// The publisher's OID of the table.
        oid: u32,
        /// The first of them, quoted.
        column: String,
        /// What does the same on the target, where nothing else can have happened than that columns
        /// were renamed.
        renames: Vec<String>,
        /// More tables of which that has been seen.
        others: Vec<TableName>,
    },
    /// An update brought a row within the publication's filter, and so came as an INSERT; what it
    /// left as it was, and lies apart from the row (TOAST), the publisher does not send.
    #[error(
        "subscription \"{subscription}\": transaction at {position}: an update of the publisher's \
         table {table} brought a row within its filter, and left a large value of column {column} \
         as it was, which the publisher does not send then. Such values are sent with REPLICA \
         IDENTITY FULL (of all partitions, too; not with a list of columns, under which the \
         publisher would refuse every UPDATE), or where the table is published without a filter. To \
         have the table copied anew: {}",
        remedy::resync(.subscription, Some(.table))
    )]
    ValueNotSent {
        /// Subscription.
        subscription: String,
        /// Of the transaction.
        position: Lsn,
        /// Its name on the publisher.
        table: Box<TableName>,
        /// The first of such columns, quoted.
        column: String,
    },
    /// An update of a table whose rows are found by all of their old values came without them.
    #[error(
        "subscription \"{subscription}\": transaction at {position}: the publisher has sent an UPDATE \
         of {table} without the old row, by which it would be found: the table has REPLICA IDENTITY \
         FULL, and the partition that the row is in has not (PostgreSQL does not hand it down), and \
         the target has no primary key of columns that came. ALTER TABLE … REPLICA IDENTITY FULL on \
         each such partition of the publisher (`farshore check` names them). To have the table \
         copied anew then: {}",
        remedy::resync(.subscription, Some(.table))
    )]
    OldRowNotSent {
        /// Subscription.
        subscription: String,
        /// Of the transaction.
        position: Lsn,
        /// Its name on the publisher.
        table: Box<TableName>,
    },
    /// Changes this subscription needs are gone.
    #[error("{0}")]
    Gap(String),
    /// Something is not there yet; trying again finds it.
    #[error("{0}")]
    NotYet(String),
    /// The initial copy ended to let somebody else at a table; it goes on at once.
    #[error("{0}")]
    GaveWay(String),
    /// The log has not come as far as a copy's snapshot: another one is taken when it has.
    #[error("{what}")]
    LogBehind {
        /// Where the log has to come.
        point: Lsn,
        /// Whose copy, for a person.
        what: String,
    },
    /// Others use a table of the target that is needed for itself; it is tried again later, and what
    /// does not need that goes on.
    #[error("{0}")]
    InUse(String),
    /// A TRUNCATE waited a moment for who uses these tables of the target, and gave way to them. Who
    /// that is is still to be asked.
    #[error(
        "subscription \"{subscription}\": others use {} on the target, which is to be emptied. It is \
         tried again",
        .tables.iter().map(TableName::to_string).collect::<Vec<_>>().join(", ")
    )]
    TablesInUse {
        /// Subscription.
        subscription: String,
        /// By their names on the target.
        tables: Vec<TableName>,
    },
    /// What was streamed before a table could join is still to be applied; it is copied after that.
    #[error("{0}")]
    StreamFirst(String),
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
    /// Groups that ran side by side were in each other's way; they are applied again one after
    /// the other, at once.
    #[error(
        "subscription \"{subscription}\": groups up to {position} were in each other's way: {what}"
    )]
    LanesMet {
        /// Subscription.
        subscription: String,
        /// Newest position in the groups.
        position: Lsn,
        /// How that showed.
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
     transaction that committed at {position} ({commit_time}): {cause}. {remedy}"
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
    /// The publisher's clock at commit.
    pub commit_time: PgTime,
    /// What is wrong.
    pub cause: Cause,
    /// What to do.
    pub remedy: Cow<'static, str>,
    pub(crate) relation: DictionaryId,
    /// The stored command, as the slice of the body that it was applied from.
    pub(crate) command: Bytes,
}

/// What is wrong with a change.
#[derive(Debug)]
pub enum Cause {
    /// It touched another number of rows than one.
    Rows(u64),
    /// The target refused it.
    Refused(Box<ServerError>),
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Rows(rows) => write!(f, "it met {rows} rows instead of one"),
            // The sentence goes on after it.
            Cause::Refused(error) => f.write_str(error.to_string().trim_end_matches('.')),
        }
    }
}

impl Cause {
    /// SQLSTATE, when the target sent one.
    pub fn sqlstate(&self) -> Option<&str> {
        match self {
            Cause::Rows(_) => None,
            Cause::Refused(error) => Some(&error.code),
        }
    }

    /// Whether the target may have no partition for the row: it calls that a check violation
    /// (23514), which names its constraint where it is one.
    pub fn is_of_no_partition(&self) -> bool {
        match self {
            Cause::Rows(_) => false,
            Cause::Refused(error) => error.code == "23514" && error.constraint.is_none(),
        }
    }
}

/// A COMMIT that the target refused: a deferred constraint or trigger.
#[derive(Debug, thiserror::Error)]
#[error(
    "subscription \"{subscription}\": the target refuses to commit the transaction that committed at \
     {position}: {}. {}", .error.to_string().trim_end_matches('.'), conflict::COMMIT_REFUSED
)]
pub struct RefusedCommit {
    /// Subscription.
    pub subscription: String,
    /// End of the newest transaction's commit record on the publisher.
    pub position: Lsn,
    /// What the target said.
    pub error: Box<ServerError>,
}

/// Tables that are named beside the first.
const OTHERS_SHOWN: usize = 8;

/// More tables of which that is so, behind what is said of the first.
pub(crate) fn others_told(others: &[TableName]) -> String {
    if others.is_empty() {
        return String::new();
    }
    let shown: Vec<String> = others.iter().take(OTHERS_SHOWN).map(TableName::to_string).collect();
    format!(
        " (so it is with {} more {}: {}{}; without --table all tables of the subscription are \
         copied anew)",
        others.len(),
        if others.len() == 1 { "table" } else { "tables" },
        shown.join(", "),
        if others.len() > OTHERS_SHOWN { " and so on" } else { "" },
    )
}

fn columns_moved(
    subscription: &str,
    table: &TableName,
    column: &str,
    renames: &[String],
    others: &[TableName],
) -> String {
    if renames.is_empty() {
        return format!(
            "its column {column} stands in another place than before, so columns were renamed, or \
             dropped and added again, and what rows have in them is not in the log{}. To have it \
             copied anew: {}",
            others_told(others),
            remedy::resync(subscription, Some(table))
        );
    }
    format!(
        "its column {column} had another name before. Do the same on the target: {}. Then go on \
         (farshore resume)",
        renames.join("; ")
    )
}

impl ApplyError {
    /// Whether trying again later, unchanged, can succeed.
    pub fn is_transient(&self) -> bool {
        match self {
            ApplyError::Target { error, .. } => {
                error.is_transient() || error.server_error().is_some_and(passes_by_itself)
            }
            ApplyError::Change(failed) => match &failed.cause {
                Cause::Rows(_) => false,
                Cause::Refused(error) => passes_by_itself(error),
            },
            ApplyError::Commit(refused) => passes_by_itself(&refused.error),
            ApplyError::Capture(error) => error.is_transient(),
            ApplyError::NotYet(_)
            | ApplyError::GaveWay(_)
            | ApplyError::LogBehind { .. }
            | ApplyError::InUse(_)
            | ApplyError::TablesInUse { .. }
            | ApplyError::StreamFirst(_)
            | ApplyError::BatchRefused { .. }
            | ApplyError::LanesMet { .. }
            | ApplyError::NoRoom { .. } => true,
            // The distributor's disk is full.
            ApplyError::Store(error) if error.is_out_of_room() => true,
            ApplyError::Store(_)
            | ApplyError::Setup(_)
            | ApplyError::AnotherTable { .. }
            | ApplyError::ColumnsMoved { .. }
            | ApplyError::Renamed { .. }
            | ApplyError::ValueNotSent { .. }
            | ApplyError::OldRowNotSent { .. }
            | ApplyError::Gap(_)
            | ApplyError::Stored { .. } => false,
        }
    }

    /// Whether another session was in the way, and the target ended what we were at: trying again
    /// at once is what is called for (PostgreSQL docs: "13.5. Serialization Failure Handling").
    pub fn is_clash(&self) -> bool {
        matches!(self.sqlstate(), Some("40001" | "40P01"))
    }

    /// The target has no memory for what was asked, or no room for its locks (out_of_memory).
    pub(crate) fn is_out_of_memory(&self) -> bool {
        self.sqlstate() == Some("53200")
    }

    /// Where a change failed by itself because a foreign key of the target does not hold
    /// (foreign_key_violation).
    pub(crate) fn breaks_key_at(&self) -> Option<Lsn> {
        match self {
            ApplyError::Change(failed) if failed.breaks_key() => Some(failed.position),
            _ => None,
        }
    }

    fn sqlstate(&self) -> Option<&str> {
        match self {
            ApplyError::Target { error, .. } => error.sqlstate(),
            ApplyError::Change(failed) => failed.cause.sqlstate(),
            ApplyError::Commit(refused) => Some(refused.error.code.as_str()),
            _ => None,
        }
    }
}

impl FailedChange {
    /// A TRUNCATE that the target refuses for a foreign key, where a DELETE may go.
    ///
    /// Object in use: keys are still to be checked for rows that the same transaction changed before;
    /// on the publisher they were checked at once, here all together. Feature not supported: another
    /// table refers to one of these and is not truncated with it. That is so where a partitioned table
    /// refers to it: of that the log names the partitions alone, and TRUNCATE wants the root named.
    pub(crate) fn may_go_as_delete(&self) -> bool {
        let is_of_keys = |cause: &Cause| matches!(cause, Cause::Refused(e) if e.code == "55006" || e.code == "0A000");
        self.operation == "TRUNCATE" && is_of_keys(&self.cause)
    }

    /// Its row has a label that an enum of the target does not have.
    pub(crate) fn lacks_label(&self) -> bool {
        matches!(&self.cause, Cause::Refused(error) if remedy::enum_and_label(error).is_some())
    }

    /// A foreign key of the target does not hold (foreign_key_violation).
    pub(crate) fn breaks_key(&self) -> bool {
        matches!(&self.cause, Cause::Refused(error) if error.code == "23503")
    }

    /// Whether the data is at odds with the target, so that a policy decides; anything else is the
    /// server's or the set-up's trouble.
    pub fn is_conflict(&self) -> bool {
        match &self.cause {
            Cause::Rows(_) => true,
            Cause::Refused(error) => is_about_data(error),
        }
    }
}

/// Whether an error says that a value or row does not fit: data exceptions, integrity constraints,
/// values in a form that the type does not read, and what a trigger raises. What ends the session is
/// never about one of them.
pub(crate) fn is_about_data(error: &ServerError) -> bool {
    let code = error.code.as_str();
    let is_of_data = code.starts_with("22")
        || code.starts_with("23")
        || matches!(code, "08P01" | "42804" | "44000" | "P0001");
    is_of_data && !error.is_fatal()
}

/// Whether an error ends without anybody mending the data.
pub(crate) fn passes_by_itself(error: &ServerError) -> bool {
    code_passes_by_itself(&error.code) || is_lost_by_pooler(error)
}

/// SQLSTATEs of conditions that end without anybody mending the data: serialisation failures,
/// deadlocks, time limits, shutdowns, a target that is read-only while it fails over, and resources
/// that may come back.
pub(crate) fn code_passes_by_itself(code: &str) -> bool {
    if code == "08P01" {
        // The same bytes would violate the protocol again.
        return false;
    }
    matches!(
        code,
        "40001" | "40P01" | "55P03" | "57014" | "57P01" | "57P02" | "57P03" | "25006" | "25P04"
    ) || code.starts_with("53")
        || code.starts_with("58")
        || code.starts_with("08")
}
