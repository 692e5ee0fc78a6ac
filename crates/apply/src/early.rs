//! A large transaction applied while it still arrives, before its commit has come.
//!
//! Its rows go to the target on a connection of their own, in a transaction that nobody sees into.
//! When the commit comes and everything before it is on the target, that transaction moves progress
//! and is committed like any group. So it is done little later than its last row has come, instead
//! of beginning then.
//!
//! It is an opportunity that may be given up at any moment before its turn: it is rolled back then,
//! and the transaction is applied when its commit has come, like any other. That happens when
//!
//! - something goes wrong, or comes that is more than rows in bulk: TRUNCATE, a table that the
//!   target has otherwise, triggers that fire;
//! - the publisher gives the transaction up, or rolls a part of it back that is written;
//! - anybody waits for a lock of it: an earlier transaction, or a session of somebody else;
//! - its commit comes before it has begun on the target;
//! - nothing of it has come, or nothing of it could be written, for [`IDLE_MAX`], or all of it has
//!   and its turn does not come within that, since an open transaction keeps the target from
//!   cleaning up;
//! - its commit names another spill, which has the number now.
//!
//! Rows are written when all that the publisher had committed before it sent them is on the target
//! ([`farshore_store::Growth::after`]): they meet the rows that they met there. Where that cannot be
//! told, or the target has more constraints, they may not, and what follows is one of the reasons
//! above: rows that are not there are counted, and whoever wants a row that it has changed waits.

mod lookout;

use crate::ApplyError;
use crate::conflict::ConflictPolicy;
use crate::log_feed::{Definitions, SpillFollowFeed};
use crate::postgres::lanes::{CancelTokens, LaneSettings, join, withdraw};
use crate::postgres::pipeline::Pipeline;
use crate::postgres::progress::ProgressStep;
use crate::postgres::writer::{CopiedTables, Following, InTransaction, Writer};
use crate::row_by_row::RowByRow;
use crate::status::SourceTransaction;
use farshore_capture::schema::NameMap;
use farshore_fault as fault;
use farshore_model::transaction::{Header, SUBTRANSACTION_MARK, commands};
use farshore_model::{Lsn, PgTime, Xid};
use farshore_pg::CancelToken;
use farshore_store::{Growth, LogStore, SpillFollower, SpillId};
use lookout::Lookout;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;

/// A transaction of which nothing has come, or nothing could be written, for so long is given up.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// A transaction is begun when so many bytes of it are in its spill, compressed: two connections
/// cost as much time as some megabytes. Fault-injection builds begin with the first ones, so that
/// small workloads meet it.
const BEGIN_AT: u64 = if cfg!(feature = "faults") { 1 } else { 4 << 20 };

/// When no more has come for so long, what is here is written.
const FLUSH_AFTER: Duration = Duration::from_millis(20);

/// How long the end of one that is given up is waited for.
const GIVE_UP_WITHIN: Duration = Duration::from_secs(5);

/// A transaction with more subtransactions than this is given up.
const SUBTRANSACTIONS_MAX: usize = 1 << 16;

const UNWANTED: &str = "the subscription stops or starts again";

/// What it takes to apply a transaction early.
#[derive(Clone)]
pub(crate) struct EarlySettings {
    pub store: Arc<dyn LogStore>,
    pub lanes: LaneSettings,
    pub on_conflict: ConflictPolicy,
    pub copied: CopiedTables,
    pub row_by_row: RowByRow,
    pub target_names: NameMap,
    pub following: Following,
}

/// The turn of a transaction: everything before it is on the target.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    /// As its commit says.
    pub header: Header,
    /// Where progress stands.
    pub from: Lsn,
    /// What progress then says of the target.
    pub state: &'static str,
}

/// What came of a transaction whose turn came.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// It is on the target: so many changes.
    Committed { changes: u64 },
    /// Nothing of it is on the target.
    GivenUp,
    /// The target may have it or not.
    Failed(ApplyError),
}

/// Begins with transactions that arrive, one at a time.
pub(crate) struct EarlyStart {
    /// `None`: with none.
    settings: Option<EarlySettings>,
    growing: watch::Receiver<Vec<SpillId>>,
    /// Spills that are not begun with again.
    tried: BTreeSet<SpillId>,
    current: Option<Early>,
    /// Up to where everything is on the target.
    settled: watch::Sender<Lsn>,
}

/// One that is under way. Dropped, it is given up.
struct Early {
    spill: SpillId,
    turn: oneshot::Sender<Turn>,
    task: JoinHandle<Result<Outcome, String>>,
    wanted: oneshot::Sender<Infallible>,
}

impl EarlyStart {
    /// Whether one is under way.
    pub fn is_busy(&self) -> bool {
        self.current.is_some()
    }

    /// Nothing is under way.
    pub fn new(store: &dyn LogStore, settings: Option<EarlySettings>) -> EarlyStart {
        EarlyStart {
            settings,
            growing: store.growing_spills(),
            tried: BTreeSet::new(),
            current: None,
            settled: watch::Sender::new(Lsn::ZERO),
        }
    }

    /// Everything up to `position` is on the target.
    pub fn settled(&self, position: Lsn) {
        self.settled.send_if_modified(|settled| {
            let moves = position > *settled;
            *settled = (*settled).max(position);
            moves
        });
    }

    /// Begins with the oldest transaction that is arriving, if none is under way. Everything before
    /// what it changes is on the target, or about to be.
    pub fn consider(&mut self, applied: Lsn, consistent_at: Lsn) {
        let Some(settings) = &self.settings else { return };
        // While tables are at different points, a transaction without a position cannot tell what
        // of it to pass over.
        if applied < consistent_at || applied < settings.lanes.alone_until {
            return;
        }
        if self.current.as_ref().is_some_and(|current| current.task.is_finished()) {
            self.current = None;
        }
        let growing = self.growing.borrow_and_update();
        self.tried.retain(|spill| growing.contains(spill));
        let is_new = |spill: &&SpillId| !self.tried.contains(*spill);
        let Some(spill) = growing.iter().find(is_new).filter(|_| self.current.is_none()) else {
            return;
        };
        let spill = *spill;
        self.tried.insert(spill);
        let ((turn, turn_comes), (wanted, until_unwanted)) =
            (oneshot::channel(), oneshot::channel());
        let run =
            run(settings.clone(), spill, turn_comes, until_unwanted, self.settled.subscribe());
        self.current = Some(Early { spill, turn, task: tokio::spawn(run), wanted });
    }

    /// Waits until [`EarlyStart::consider`] may find something. Cancel-safe.
    pub async fn wait(&mut self) {
        let is_idle = self.settings.is_none();
        if is_idle || self.growing.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    /// Gives up what is under way, and waits a moment until the target has noticed.
    pub async fn give_up(&mut self) {
        let Some(Early { task, .. }) = self.current.take() else { return };
        let _ = tokio::time::timeout(GIVE_UP_WITHIN, task).await;
    }

    /// Whether this spill's transaction is under way.
    pub fn has(&self, spill: SpillId) -> bool {
        self.current.as_ref().is_some_and(|current| current.spill == spill)
    }

    /// The turn of the transaction under way has come: everything before it is on the target.
    pub async fn commit(&mut self, turn: Turn) -> Outcome {
        let Some(Early { turn: tell, task, wanted, .. }) = self.current.take() else {
            return Outcome::GivenUp;
        };
        // Whoever gave up does not listen, and says why.
        let _ = tell.send(turn);
        let ended = task.await;
        drop(wanted);
        match ended {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Outcome::GivenUp,
            // It may have come to its COMMIT.
            Err(died) => {
                Outcome::Failed(ApplyError::NotYet(format!("an early transaction's task: {died}")))
            }
        }
    }
}

/// Applies the transaction of one spill, until its commit or until it is given up; says why then.
async fn run(
    settings: EarlySettings,
    spill: SpillId,
    mut turn: oneshot::Receiver<Turn>,
    until_unwanted: oneshot::Receiver<Infallible>,
    settled: watch::Receiver<Lsn>,
) -> Result<Outcome, String> {
    let subscription = settings.lanes.subscription.clone();
    let given_up = |why: &dyn std::fmt::Display| {
        tracing::debug!(%subscription, %why, "a large transaction is not applied while it arrives");
        why.to_string()
    };
    let begin = async {
        let follower = settings.store.follow_spill(spill).map_err(|error| error.to_string())?;
        let mut growth = follower.growth();
        let grown = growth.wait_for(|growth| growth.end >= BEGIN_AT);
        if !matches!(tokio::time::timeout(IDLE_MAX, grown).await, Ok(Ok(_))) {
            return Err("it does not grow large".to_owned());
        }
        let mut lookout = Lookout::connect(&settings.lanes).await?;
        let (work, backend) = Work::begin(settings, follower, settled).await?;
        lookout.sees(&backend).await?;
        Ok((lookout, work, backend))
    };
    let begun = tokio::select! {
        begun = begin => begun,
        // Nobody waits for a connection.
        _ = &mut turn => Err("its commit came before it was begun".to_owned()),
    };
    let (mut lookout, mut work, backend) = begun.map_err(|why| given_up(&why))?;
    let ready = tokio::select! {
        ready = work.work(&mut turn) => ready.map_err(|error| error.to_string()),
        why = lookout.until_in_the_way(&backend) => Err(why),
        _ = until_unwanted => Err(UNWANTED.to_owned()),
    };
    match ready {
        Ok(turn) => {
            let committed = work.commit(&turn).await;
            if committed.is_ok() {
                work.writer.close_connections().await;
            }
            lookout.close().await;
            Ok(committed.map_or_else(Outcome::Failed, |changes| Outcome::Committed { changes }))
        }
        Err(why) => {
            drop(work);
            // Its locks must be gone before somebody else changes its rows.
            lookout.end(&backend).await;
            Err(given_up(&why))
        }
    }
}

/// A connection's token, for as long as it is of use.
struct Token {
    tokens: CancelTokens,
    token: CancelToken,
}

impl Drop for Token {
    fn drop(&mut self) {
        withdraw(&self.tokens, &self.token);
    }
}

/// The transaction on the target.
struct Work {
    writer: Writer,
    _token: Token,
    feed: SpillFollowFeed,
    definitions: Definitions,
    settled: watch::Receiver<Lsn>,
    /// Stands for the one that has not come.
    header: Header,
    /// What the commands that follow belong to; zero is the transaction itself.
    subtransaction: Xid,
    /// All that commands belonged to.
    subtransactions: BTreeSet<Xid>,
}

impl Work {
    async fn begin(
        settings: EarlySettings,
        follower: Box<dyn SpillFollower>,
        settled: watch::Receiver<Lsn>,
    ) -> Result<(Work, lookout::Backend), String> {
        let failed = |error: ApplyError| error.to_string();
        let mut session = join(&settings.lanes, false).await?;
        let (tokens, token) = (settings.lanes.cancel.clone(), session.connection.cancel_token());
        let token = Token { tokens, token };
        let backend = lookout::Backend::of(&mut session).await.map_err(failed)?;
        let writer = Writer::new(
            Pipeline::new(session),
            settings.lanes,
            settings.on_conflict,
            settings.copied,
            settings.row_by_row,
            settings.target_names,
            settings.following,
        );
        let mut writer = writer.await.map_err(failed)?;
        writer.be_early();
        writer.begin(true).await.map_err(failed)?;
        let header = Header {
            xid: Xid::default(),
            // After the copies of all tables, and after what is on the target.
            commit_lsn: Lsn::MAX,
            end_lsn: *settled.borrow(),
            commit_time: PgTime::now(),
            commands: 0,
            aborted_subtransactions: Vec::new(),
        };
        let work = Work {
            writer,
            _token: token,
            feed: SpillFollowFeed::new(follower),
            definitions: Definitions::default(),
            settled,
            header,
            subtransaction: Xid::default(),
            subtransactions: BTreeSet::new(),
        };
        Ok((work, backend))
    }

    /// Writes what comes, until all of it is on the target and its turn has come.
    async fn work(&mut self, turn: &mut oneshot::Receiver<Turn>) -> Result<Turn, ApplyError> {
        let gone = || ApplyError::NotYet(UNWANTED.to_owned());
        let idle = || {
            let seconds = IDLE_MAX.as_secs();
            ApplyError::NotYet(format!("nothing of it could be written for {seconds} s"))
        };
        let mut growth = self.feed.growth();
        let mut come = None;
        loop {
            let now = *growth.borrow_and_update();
            if come.is_none() {
                tokio::select! {
                    settled = self.settled.wait_for(|settled| *settled >= now.after) => {
                        settled.map_err(|_| gone())?;
                    }
                    turn = &mut *turn => come = Some(turn.map_err(|_| gone())?),
                    () = tokio::time::sleep(IDLE_MAX) => return Err(idle()),
                }
            }
            self.write(now).await?;
            if now.finished {
                break;
            }
            self.writer.send().await?;
            let mut more = tokio::time::timeout(FLUSH_AFTER, growth.changed()).await;
            if more.is_err() {
                self.writer.flush().await?;
                more = tokio::time::timeout(IDLE_MAX, growth.changed()).await;
            }
            match more {
                Ok(Ok(())) => {}
                Ok(Err(_)) if growth.borrow().finished => {}
                Ok(Err(_)) => {
                    let what = "it was rolled back, or is to arrive anew".to_owned();
                    return Err(ApplyError::NotYet(what));
                }
                Err(_) => return Err(idle()),
            }
        }
        self.writer.flush().await?;
        let turn = match come {
            Some(turn) => turn,
            // At a site that receives the log, other spills may have to cross before its commit.
            None => match tokio::time::timeout(IDLE_MAX, turn).await {
                Ok(turn) => turn.map_err(|_| gone())?,
                Err(_) => {
                    let seconds = IDLE_MAX.as_secs();
                    let what =
                        format!("all of it is here, and its turn did not come in {seconds} s");
                    return Err(ApplyError::NotYet(what));
                }
            },
        };
        self.writer.drain().await?;
        // Who sends the log here may have given the number to another transaction since.
        if !self.feed.has_the_number() {
            let what = "its commit names another spill of the same number".to_owned();
            return Err(ApplyError::NotYet(what));
        }
        let is_written = |xid: &Xid| self.subtransactions.contains(xid);
        let rolled_back = turn.header.aborted_subtransactions.iter().any(is_written);
        if rolled_back && !fault::defect("early-keeps-rolled-back") {
            let what = "the publisher rolled back to a savepoint in it".to_owned();
            return Err(ApplyError::NotYet(what));
        }
        Ok(turn)
    }

    /// Writes what is there at `growth` and was not written yet.
    async fn write(&mut self, growth: Growth) -> Result<(), ApplyError> {
        let position = self.header.end_lsn;
        while let Some(chunks) =
            self.feed.next_chunks(growth, position, &mut self.definitions).await?
        {
            for chunk in chunks {
                for command in commands(&chunk).map_while(Result::ok) {
                    if let [SUBTRANSACTION_MARK, xid @ ..] = command
                        && let Ok(xid) = xid.try_into()
                    {
                        self.subtransactions.insert(Xid::from_be_bytes(xid));
                    }
                }
                if self.subtransactions.len() > SUBTRANSACTIONS_MAX {
                    let what = format!("it has more than {SUBTRANSACTIONS_MAX} subtransactions");
                    return Err(ApplyError::NotYet(what));
                }
                let (header, subtransaction) = (&self.header, self.subtransaction);
                let mut at = InTransaction { header, subtransaction };
                self.writer.apply(&chunk, &mut at, &self.definitions).await?;
                self.subtransaction = at.subtransaction;
            }
        }
        Ok(())
    }

    /// Moves progress and commits; returns how many changes that were.
    async fn commit(&mut self, turn: &Turn) -> Result<u64, ApplyError> {
        let to = turn.header.end_lsn;
        self.writer.is_at(to);
        let newest = Some(SourceTransaction::from(&turn.header));
        self.writer.close(ProgressStep { from: turn.from, to, newest, state: turn.state }).await?;
        self.writer.finish_closing().await?;
        self.writer.drain().await?;
        match self.writer.take_committed() {
            Some(committed) if committed == to => Ok(self.writer.changes()),
            _ => Err(ApplyError::NotYet(format!("the commit at {to} was not confirmed"))),
        }
    }
}
