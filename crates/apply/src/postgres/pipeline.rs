//! Statements on their way to the target: sent without waiting, answered in order.
//!
//! What each answer must be is remembered until it comes. A COMMIT is only sent when every
//! statement of its transaction whose answer has to be looked at has been answered as it should be:
//! see [`Pipeline::must_be_answered`]. What fails is passed over by the target together with all
//! that was sent behind it, up to the Sync that follows the COMMIT. So a change that failed or met
//! no row is never committed, and nothing after it either.

use crate::ApplyError;
use crate::error::passes_by_itself;
use crate::postgres::progress::ADVANCE_FAILED;
use crate::postgres::session::{Answers, Session};
use crate::postgres::statements::{ROWS_MET, ROWS_MET_FAILED};
use crate::postgres::target_table::ALTERED;
use bytes::{Bytes, BytesMut};
use farshore_fault as fault;
use farshore_model::{DictionaryId, Lsn, PgTime};
use farshore_pg::Question;
use farshore_wire::backend::{Message, ServerError};
use farshore_wire::frontend::{self, EncodeError, Format};
use std::collections::{HashSet, VecDeque};

/// Encoded bytes after which they are written to the socket.
const WRITE_BYTES: usize = 64 << 10;
/// Statements in flight at most.
const IN_FLIGHT_MAX: usize = 16_384;
/// Statement bytes in flight at most (a single larger statement passes alone).
const IN_FLIGHT_BYTES_MAX: usize = 4 << 20;

/// Which stored change a statement stands for.
#[derive(Clone, Debug)]
pub struct ChangeRef {
    /// End of the transaction's commit record.
    pub position: Lsn,
    /// When it committed on the publisher.
    pub commit_time: PgTime,
    /// Relation version.
    pub relation: DictionaryId,
    /// The stored command.
    pub command: Bytes,
    /// The row may be gone already: a foreign key of the target deleted it with its parent.
    pub may_be_gone: bool,
}

/// What a statement's answer must be.
#[derive(Debug)]
pub enum Expect {
    /// ParseComplete, of a statement for this change if it is for one.
    Parsed(Option<ChangeRef>),
    /// A command, whatever it counts.
    Done,
    /// A row change that touches one row.
    OneRow(ChangeRef),
    /// A row change that fails unless it touches one row.
    OneRowOrError(ChangeRef),
    /// A TRUNCATE.
    Truncated(ChangeRef),
    /// ParseComplete, of a statement for a batch of changes of this relation.
    BatchParsed(DictionaryId),
    /// A statement for a batch of changes, which touches this many rows.
    Counted {
        /// Relation version.
        relation: DictionaryId,
        /// Rows.
        rows: u64,
    },
    /// CloseComplete.
    Closed,
    /// The progress row.
    Progress,
    /// Tables are as they were seen.
    Unaltered,
    /// A COMMIT.
    Commit {
        /// Of everything up to here.
        position: Lsn,
        /// Statements for batches are part of it.
        batch: bool,
    },
    /// ReadyForQuery.
    Ready,
}

/// A statement that is prepared on each connection that comes to need it.
#[derive(Clone, Debug)]
pub struct Statement {
    /// Unique among those of a subscription's connections.
    pub name: String,
    /// Its text.
    pub sql: String,
    /// Types of its parameters.
    pub types: Vec<u32>,
}

/// What went wrong with a statement in flight.
#[derive(Debug)]
pub enum PipelineError {
    /// The connection, or an answer that fits no question.
    Connection(farshore_pg::Error),
    /// A row change found another number of rows than one.
    Rows(ChangeRef, u64),
    /// The target refused a row change.
    Refused(ChangeRef, Box<ServerError>),
    /// A statement for a batch of changes was refused, or touched other rows than it names.
    Batch(DictionaryId, BatchFailure),
    /// A stored change that cannot be read.
    Stored(String),
    /// The target refused to commit what leads up to a position.
    CommitRefused {
        /// Where to.
        position: Lsn,
        /// What it said.
        error: Box<ServerError>,
        /// Statements for batches were part of it.
        batch: bool,
    },
    /// The target refused something else.
    Server(Box<ServerError>),
    /// The progress row was not as we left it.
    ProgressMoved,
    /// A table is not as it was seen.
    Altered,
    /// A statement that the protocol cannot carry.
    Encode(EncodeError),
    /// Groups that ran side by side were in each other's way.
    Met(String),
}

/// What was wrong with a statement for a batch.
#[derive(Debug)]
pub enum BatchFailure {
    /// It touched `found` rows instead of `wanted`.
    Rows {
        /// Rows it names.
        wanted: u64,
        /// Rows it touched.
        found: u64,
    },
    /// The target refused it.
    Refused(Box<ServerError>),
}

impl PipelineError {
    /// What the error says, if it may be due to groups that ran side by side.
    pub fn of_lanes(&self) -> Option<String> {
        match self {
            PipelineError::Rows(change, rows) => {
                Some(format!("a change at {} met {rows} rows", change.position))
            }
            PipelineError::Batch(_, BatchFailure::Rows { wanted, found }) => {
                Some(format!("a batch met {found} rows instead of {wanted}"))
            }
            PipelineError::Refused(_, error)
            | PipelineError::Batch(_, BatchFailure::Refused(error))
            | PipelineError::Server(error) => {
                let locks = ["40001", "40P01", "55P03"].contains(&error.code.as_str());
                (locks || !passes_by_itself(error)).then(|| error.to_string())
            }
            PipelineError::Connection(_)
            | PipelineError::Stored(_)
            | PipelineError::CommitRefused { .. }
            | PipelineError::ProgressMoved
            | PipelineError::Altered
            | PipelineError::Encode(_)
            | PipelineError::Met(_) => None,
        }
    }
}

impl From<farshore_pg::Error> for PipelineError {
    fn from(error: farshore_pg::Error) -> Self {
        PipelineError::Connection(error)
    }
}

impl From<EncodeError> for PipelineError {
    fn from(error: EncodeError) -> Self {
        PipelineError::Encode(error)
    }
}

/// How many rows a change has met, if it failed because that was not one.
fn rows_met(error: &ServerError) -> Option<u64> {
    let (_, count) =
        error.message.split_once(ROWS_MET).filter(|_| error.code == ROWS_MET_FAILED)?;
    let digits = count.find(|c: char| !c.is_ascii_digit()).unwrap_or(count.len());
    count[..digits].parse().ok()
}

/// A target session with statements in flight.
pub struct Pipeline {
    session: Session,
    in_flight: VecDeque<(Expect, u32)>,
    bytes_in_flight: usize,
    /// Questions behind what is in flight.
    asked: usize,
    /// Something is in flight that the target was not asked to answer at once.
    unasked: bool,
    committed: Option<Lsn>,
    confirmed: Lsn,
    /// Names of statements that are prepared here.
    prepared: HashSet<String>,
    /// Of those, the ones that are used no more.
    stale: Vec<String>,
}

impl Pipeline {
    /// Nothing is in flight.
    pub fn new(mut session: Session) -> Pipeline {
        // The target may be waiting for a lock, with much before it that it has not read.
        session.connection.reset_when_dropped();
        Pipeline {
            session,
            in_flight: VecDeque::new(),
            bytes_in_flight: 0,
            asked: 0,
            unasked: false,
            committed: None,
            confirmed: Lsn::ZERO,
            prepared: HashSet::new(),
            stale: Vec::new(),
        }
    }

    /// The session, once nothing is in flight.
    pub async fn idle_session(&mut self) -> Result<&mut Session, PipelineError> {
        if !self.in_flight.is_empty() {
            // The session's own queries end with Sync; a failed statement must be found first.
            self.drain().await?;
        }
        Ok(&mut self.session)
    }

    /// Asks several questions in one round trip. What was prepared at the start and not answered yet
    /// is answered in the same one; anything else in flight is waited for first. Not cancel-safe.
    pub async fn ask<const N: usize>(
        &mut self,
        questions: [Question<'_>; N],
    ) -> Result<Result<Answers<N>, ApplyError>, PipelineError> {
        let needs_no_look = |(expect, _): &(Expect, u32)| {
            matches!(expect, Expect::Parsed(None) | Expect::Done | Expect::Ready)
        };
        // A series that was not ended would take the first question with it if it failed.
        let is_ended = matches!(self.in_flight.back(), None | Some((Expect::Ready, _)));
        if !is_ended || !self.in_flight.iter().all(needs_no_look) {
            self.drain().await?;
        }
        if self.in_flight.is_empty() {
            return Ok(self.session.ask(questions).await);
        }
        self.session.connection.put_questions(&questions)?;
        self.asked = N;
        self.drain().await?;
        self.asked = 0;
        Ok(self.session.answers().await)
    }

    /// The session, whatever is in flight: for use after [`Pipeline::idle_session`] only.
    /// Waits until the connection has ended, of itself, while nothing is asked of it. Cancel-safe.
    pub async fn ended(&mut self) -> PipelineError {
        if !self.in_flight.is_empty() {
            // Whoever waits for the answers hears of it.
            return std::future::pending().await;
        }
        loop {
            match self.session.connection.receive().await {
                Ok(Message::ErrorResponse(error)) => return PipelineError::Server(error),
                Ok(_) => {}
                Err(error) => return PipelineError::Connection(error),
            }
        }
    }

    pub(super) fn session(&mut self) -> &mut Session {
        &mut self.session
    }

    /// Prepares a statement, for a change if one needs it.
    pub fn parse(
        &mut self,
        name: &str,
        sql: &str,
        types: &[u32],
        change: Option<ChangeRef>,
    ) -> Result<(), PipelineError> {
        frontend::parse(self.session.connection.out(), name, sql, types)?;
        self.expect(Expect::Parsed(change), 0);
        Ok(())
    }

    /// Runs a prepared statement with parameters written by `parameters`.
    pub fn run(
        &mut self,
        statement: &str,
        parameters: usize,
        expect: Expect,
        write: impl FnOnce(&mut frontend::Bind<'_>) -> Result<(), EncodeError>,
    ) -> Result<(), PipelineError> {
        let out = self.session.connection.out();
        let before = out.len();
        let mut bind = frontend::Bind::begin(out, "", statement, parameters)?;
        write(&mut bind)?;
        bind.finish(Format::Text)?;
        frontend::execute(out, "", 0)?;
        let bytes = u32::try_from(out.len() - before).unwrap_or(u32::MAX);
        self.bytes_in_flight += bytes as usize;
        self.expect(expect, bytes);
        Ok(())
    }

    /// Prepares a statement unless it is prepared here already; `expect` is for the answer.
    pub fn prepare(
        &mut self,
        statement: &Statement,
        expect: impl FnOnce() -> Expect,
    ) -> Result<(), PipelineError> {
        if !self.prepared.contains(&statement.name) {
            let Statement { name, sql, types } = statement;
            frontend::parse(self.session.connection.out(), name, sql, types)?;
            self.expect(expect(), 0);
            self.prepared.insert(name.clone());
        }
        Ok(())
    }

    /// A prepared statement is used no more.
    pub fn forget_later(&mut self, name: &str) {
        if let Some(name) = self.prepared.take(name) {
            self.stale.push(name);
        }
    }

    /// Closes the statements that are used no more.
    pub fn forget_stale(&mut self) -> Result<(), PipelineError> {
        for name in std::mem::take(&mut self.stale) {
            frontend::close(self.session.connection.out(), frontend::Target::Statement(&name))?;
            self.expect(Expect::Closed, 0);
        }
        Ok(())
    }

    /// Starts a prepared COPY FROM STDIN: whole CopyData messages go to [`Pipeline::out`] until
    /// [`Pipeline::end_copy`]. (A server that takes COPY data passes over Flush and Sync, so what
    /// follows the data may be sent before it answers.)
    pub fn begin_copy(&mut self, statement: &str) -> Result<(), PipelineError> {
        let out = self.session.connection.out();
        frontend::Bind::begin(out, "", statement, 0)?.finish(Format::Text)?;
        frontend::execute(out, "", 0)?;
        Ok(())
    }

    /// Ends the data of a COPY.
    pub fn end_copy(&mut self, expect: Expect) {
        frontend::copy_done(self.session.connection.out());
        self.expect(expect, 0);
    }

    /// Messages that are not yet written.
    pub fn out(&mut self) -> &mut BytesMut {
        self.session.connection.out()
    }

    /// Whether so much waits to be written that it is time to.
    pub fn is_full(&mut self) -> bool {
        self.session.connection.out().len() >= WRITE_BYTES
    }

    /// Whether something is to be written or answered.
    pub fn is_busy(&mut self) -> bool {
        !self.in_flight.is_empty() || !self.session.connection.out().is_empty()
    }

    /// Writes what waits to be written, or waits for one message of the target when nothing does.
    /// Cancel-safe.
    pub async fn exchange(&mut self) -> Result<(), PipelineError> {
        if self.session.connection.out().is_empty() {
            self.next_answer().await
        } else {
            self.send().await
        }
    }

    /// Writes what the socket takes now; returns how many bytes are left.
    pub fn write_available(&mut self) -> usize {
        if !self.session.connection.out().is_empty() {
            self.session.connection.write_available();
        }
        self.session.connection.out().len()
    }

    /// Waits for one message of the target; forever if nothing was asked. Cancel-safe.
    pub async fn next_answer(&mut self) -> Result<(), PipelineError> {
        if self.in_flight.is_empty() {
            std::future::pending::<()>().await;
        }
        let message = self.session.connection.receive().await?;
        self.answer(message)
    }

    /// Takes the answers that have come, without waiting; true when everything is answered.
    pub fn poll(&mut self) -> Result<bool, PipelineError> {
        if !self.in_flight.is_empty() {
            self.session.connection.read_available()?;
            self.take_answers()?;
        }
        Ok(self.in_flight.is_empty())
    }

    /// Runs SQL text without parameters or rows.
    pub fn run_sql(&mut self, sql: &str, expect: Expect) -> Result<(), PipelineError> {
        let change = match &expect {
            Expect::Truncated(change) => Some(change.clone()),
            _ => None,
        };
        self.parse("", sql, &[], change)?;
        self.run("", 0, expect, |_| Ok(()))
    }

    /// Ends an implicit group: the target may do its end-of-command work (statistics).
    pub fn sync(&mut self) {
        frontend::sync(self.session.connection.out());
        self.expect(Expect::Ready, 0);
        self.unasked = false;
    }

    /// Writes and reads as needed to keep what is in flight within bounds.
    pub async fn pace(&mut self) -> Result<(), PipelineError> {
        if self.session.connection.out().len() >= WRITE_BYTES {
            self.session.connection.flush().await?;
            self.take_answers()?;
        }
        if self.in_flight.len() > IN_FLIGHT_MAX || self.bytes_in_flight > IN_FLIGHT_BYTES_MAX {
            self.request_answers().await?;
            while self.in_flight.len() > IN_FLIGHT_MAX / 2
                || self.bytes_in_flight > IN_FLIGHT_BYTES_MAX / 2
            {
                let message = self.session.connection.receive().await?;
                self.answer(message)?;
            }
        }
        Ok(())
    }

    fn expect(&mut self, expect: Expect, bytes: u32) {
        self.in_flight.push_back((expect, bytes));
        self.unasked = true;
    }

    /// Whether the COMMIT has to wait: only an answer tells whether something in flight was right.
    pub fn must_be_answered(&self) -> bool {
        let is_counted = |(expect, _): &(Expect, u32)| {
            matches!(expect, Expect::OneRow(_) | Expect::Counted { .. })
        };
        self.in_flight.iter().any(is_counted) && !fault::defect("commit-unanswered")
    }

    /// Asks the target to answer what was sent, once this is written, if it was not asked yet.
    pub fn ask_for_answers(&mut self) {
        if std::mem::take(&mut self.unasked) {
            frontend::flush(self.session.connection.out());
        }
    }

    /// Ends the connection.
    pub async fn close(self) {
        self.session.connection.close().await;
    }

    /// Writes everything and asks the target to answer now.
    pub async fn request_answers(&mut self) -> Result<(), PipelineError> {
        self.ask_for_answers();
        self.session.connection.flush().await?;
        Ok(())
    }

    /// Waits until everything in flight is answered.
    pub async fn drain(&mut self) -> Result<(), PipelineError> {
        self.request_answers().await?;
        while !self.in_flight.is_empty() {
            let message = self.session.connection.receive().await?;
            self.answer(message)?;
        }
        Ok(())
    }

    /// After an error: ends the series of statements that the target passes over, forgets what was
    /// in flight, and leaves a session that can roll back to a savepoint. Returns whether prepared
    /// statements may be among what was lost.
    pub async fn recover(&mut self) -> Result<bool, PipelineError> {
        frontend::sync(self.session.connection.out());
        self.session.connection.flush().await?;
        // Series that were ended before are answered first.
        let earlier = self.in_flight.iter().filter(|(expect, _)| matches!(expect, Expect::Ready));
        let mut answers_left = earlier.count() + std::mem::take(&mut self.asked) + 1;
        while answers_left > 0 {
            if let Message::ReadyForQuery(_) = self.session.connection.receive().await? {
                answers_left -= 1;
            }
        }
        let lost = self.in_flight.iter().any(|(expect, _)| matches!(expect, Expect::Parsed(_)));
        self.in_flight.clear();
        self.bytes_in_flight = 0;
        self.unasked = false;
        Ok(lost)
    }

    /// Writes everything without waiting for answers.
    pub async fn send(&mut self) -> Result<(), PipelineError> {
        self.session.connection.flush().await?;
        self.take_answers()
    }

    /// Takes the answers that are here already.
    pub fn take_answers(&mut self) -> Result<(), PipelineError> {
        while !self.in_flight.is_empty() {
            match self.session.connection.try_receive()? {
                Some(message) => self.answer(message)?,
                None => break,
            }
        }
        Ok(())
    }

    /// The newest commit that was answered since the last call.
    pub fn take_committed(&mut self) -> Option<Lsn> {
        self.committed.take()
    }

    /// The newest commit that was answered on this connection.
    pub fn confirmed(&self) -> Lsn {
        self.confirmed
    }

    fn answer(&mut self, message: Message) -> Result<(), PipelineError> {
        let unexpected = |message: &Message| {
            PipelineError::Connection(farshore_pg::Error::Protocol(format!(
                "the target answered {message:?}, which no statement asked for"
            )))
        };
        let Some((expect, bytes)) = self.in_flight.front() else {
            return Err(unexpected(&message));
        };
        let bytes = *bytes as usize;
        match (message, expect) {
            (Message::BindComplete, _) => return Ok(()),
            (Message::CopyInResponse(_), Expect::Counted { .. }) => return Ok(()),
            // Rows without columns, of statements that only count them.
            (Message::DataRow(_), Expect::Counted { .. } | Expect::OneRow(_)) => return Ok(()),
            (
                Message::DataRow(_),
                Expect::Done | Expect::OneRowOrError(_) | Expect::Progress | Expect::Unaltered,
            ) => return Ok(()),
            (Message::ParseComplete, Expect::BatchParsed(_)) => {}
            (Message::CloseComplete, Expect::Closed) => {}
            (Message::CommandComplete(tag), Expect::Counted { relation, rows }) => {
                let found = tag.rows().unwrap_or(0);
                if found != *rows {
                    let failure = BatchFailure::Rows { wanted: *rows, found };
                    return Err(PipelineError::Batch(*relation, failure));
                }
            }
            (Message::ParseComplete, Expect::Parsed(_)) => {}
            (Message::ReadyForQuery(_), Expect::Ready) => {}
            (Message::CommandComplete(_), Expect::Done | Expect::Truncated(_)) => {}
            (Message::CommandComplete(tag), Expect::OneRow(change)) => {
                let rows = tag.rows().unwrap_or(0);
                if rows != 1 && !(rows == 0 && change.may_be_gone) {
                    return Err(PipelineError::Rows(change.clone(), rows));
                }
            }
            (
                Message::CommandComplete(_),
                Expect::OneRowOrError(_) | Expect::Progress | Expect::Unaltered,
            ) => {}
            (Message::ErrorResponse(error), Expect::OneRowOrError(change)) => {
                return Err(match rows_met(&error) {
                    Some(rows) => PipelineError::Rows(change.clone(), rows),
                    None => PipelineError::Refused(change.clone(), error),
                });
            }
            (Message::ErrorResponse(error), Expect::Unaltered) if error.code == ALTERED => {
                return Err(PipelineError::Altered);
            }
            (Message::ErrorResponse(error), Expect::Progress) if error.code == ADVANCE_FAILED => {
                return Err(PipelineError::ProgressMoved);
            }
            (Message::CommandComplete(tag), Expect::Commit { position, .. }) => {
                // COMMIT of a failed transaction answers ROLLBACK without an error.
                if tag.as_str() != "COMMIT" {
                    return Err(PipelineError::Connection(farshore_pg::Error::Protocol(format!(
                        "the target answered COMMIT with {}",
                        tag.as_str()
                    ))));
                }
                self.committed = Some(*position);
                self.confirmed = *position;
            }
            (
                Message::ErrorResponse(error),
                Expect::OneRow(change) | Expect::Truncated(change) | Expect::Parsed(Some(change)),
            ) => {
                return Err(PipelineError::Refused(change.clone(), error));
            }
            (
                Message::ErrorResponse(error),
                Expect::BatchParsed(relation) | Expect::Counted { relation, .. },
            ) => return Err(PipelineError::Batch(*relation, BatchFailure::Refused(error))),
            (Message::ErrorResponse(error), Expect::Commit { position, batch }) => {
                let (position, batch) = (*position, *batch);
                return Err(PipelineError::CommitRefused { position, error, batch });
            }
            (Message::ErrorResponse(error), _) => return Err(PipelineError::Server(error)),
            (message, _) => return Err(unexpected(&message)),
        }
        self.in_flight.pop_front();
        self.bytes_in_flight -= bytes;
        Ok(())
    }

    /// The server's name in an error.
    pub fn target_error(&self, error: farshore_pg::Error) -> ApplyError {
        self.session.error(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_many_rows_a_change_met_is_read_in_any_language() {
        let said = |code: &str, message: &str| {
            let error =
                ServerError { code: code.into(), message: message.into(), ..Default::default() };
            rows_met(&error)
        };
        let met = format!("ungültige Eingabesyntax für Typ integer: »{ROWS_MET}12«");
        assert_eq!(said(ROWS_MET_FAILED, &met), Some(12));
        assert_eq!(said("23505", &met), None);
        assert_eq!(said(ROWS_MET_FAILED, "invalid input value for enum mood: \"12\""), None);
    }
}
