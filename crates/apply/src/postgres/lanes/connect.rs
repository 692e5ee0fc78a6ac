//! How connections to the target are made, one for each lane.

use super::{AWAIT, BEGIN, COMMIT, DEFER, FENCE, LaneSettings, PROGRESS};
use crate::ApplyError;
use crate::postgres::pipeline::{Pipeline, PipelineError};
use crate::postgres::progress::{ADVANCE, ADVANCE_TYPES};
use crate::postgres::session::{Session, application_name, join_lanes_sql};
use farshore_fault as fault;
use farshore_pg::{FAR, Question, Row};
use std::borrow::Cow;
use std::time::Instant;

/// Every statement finds its rows by a key, whatever the planner thinks of the table's size at the
/// moment: a plan made while a table was empty must not read all of it later.
const PLANNING: &str = "SET plan_cache_mode = force_generic_plan; SET enable_seqscan = off; \
     SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off";

/// A name for the time of one group, as a lock.
const GROUP_KEY: &str = "pg_catalog.hashtextextended($1, 0)";

/// A connection that groups can be written on.
pub(super) struct Lane {
    pub(super) pipeline: Pipeline,
    /// The target's process at its other end (a pooler tells another one at first).
    pub(super) pid: String,
}

/// One more lane beside the first, or why there is none.
pub(super) async fn connect(
    settings: LaneSettings,
    foreign_keys_fire: bool,
) -> Result<Lane, String> {
    let plan = plan_sql();
    let (session, answers) =
        join_and_ask(&settings, foreign_keys_fire, &[Question::Simple(&plan)]).await?;
    let mut pipeline = Pipeline::new(session);
    let planned = answers.into_iter().next().unwrap_or(Ok(Vec::new()));
    let pid = pid_of(&planned.map_err(|error| error.to_string())?);
    parse(&mut pipeline).map_err(|error| format!("{error:?}"))?;
    Ok(Lane { pipeline, pid })
}

/// A session beside the first, which the next agent waits for as well; or why there is none.
pub(crate) async fn join(
    settings: &LaneSettings,
    foreign_keys_fire: bool,
) -> Result<Session, String> {
    Ok(join_and_ask(settings, foreign_keys_fire, &[]).await?.0)
}

type Answers = Vec<Result<Vec<Row>, ApplyError>>;

async fn join_and_ask(
    settings: &LaneSettings,
    foreign_keys_fire: bool,
    questions: &[Question<'_>],
) -> Result<(Session, Answers), String> {
    let LaneSettings { subscription, target, cancel, .. } = settings;
    let join = join_lanes_sql(subscription);
    let asked = [&[Question::Simple(&join)], questions].concat();
    let connected = Session::connect_and_ask(target, &application_name(subscription), &asked).await;
    let (session, mut answers) = connected.map_err(|error| error.to_string())?;
    let token = session.connection.cancel_token();
    cancel.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(token);
    if session.replica_role == foreign_keys_fire {
        return Err("session_replication_role can be set on some of them only".to_owned());
    }
    let rest = answers.split_off(1);
    let joined = answers.pop().unwrap_or(Ok(Vec::new())).map_err(|error| error.to_string())?;
    if joined.first().and_then(|row| row.get(0)) != Some("t") {
        return Err("another agent waits for this one to end".to_owned());
    }
    Ok((session, rest))
}

/// Settings of a lane's connection, and the question for [`pid_of`].
fn plan_sql() -> String {
    format!("{PLANNING}; SELECT pg_catalog.pg_backend_pid()")
}

/// The target's process at the other end of a connection.
fn pid_of(rows: &[Row]) -> String {
    rows.first().and_then(|row| row.get(0)).unwrap_or_default().to_owned()
}

/// What every connection needs. Returns the target's process, and whether it is far.
pub(super) async fn prepare(pipeline: &mut Pipeline) -> Result<(String, bool), PipelineError> {
    let connection = &mut pipeline.idle_session().await?.connection;
    let asked = Instant::now();
    let results = connection.simple_query(&plan_sql()).await?;
    let mut is_far = connection.is_far() || asked.elapsed() >= FAR;
    if is_far && !connection.is_far() {
        // Behind a pooler; or it was busy.
        let again = Instant::now();
        connection.simple_query("").await?;
        is_far = again.elapsed() >= FAR;
    }
    parse(pipeline)?;
    Ok((results.last().map_or(String::new(), |result| pid_of(&result.rows)), is_far))
}

/// Prepares the statements of groups; answered with what comes next.
fn parse(pipeline: &mut Pipeline) -> Result<(), PipelineError> {
    // Progress is moved by who sees what the group before has committed.
    pipeline.parse(BEGIN, "BEGIN ISOLATION LEVEL READ COMMITTED", &[], None)?;
    pipeline.parse(COMMIT, "COMMIT", &[], None)?;
    pipeline.parse(DEFER, "SET CONSTRAINTS ALL DEFERRED", &[], None)?;
    let fence = format!("SELECT pg_catalog.pg_advisory_xact_lock({GROUP_KEY})");
    pipeline.parse(FENCE, &fence, &[25], None)?;
    let await_fence = format!("SELECT pg_catalog.pg_advisory_xact_lock_shared({GROUP_KEY})");
    pipeline.parse(AWAIT, &await_fence, &[25], None)?;
    let advance = if fault::defect("unordered-commits") {
        ADVANCE.replace("applied = $2", "$2 IS NOT NULL").into()
    } else {
        Cow::Borrowed(ADVANCE)
    };
    pipeline.parse(PROGRESS, &advance, &ADVANCE_TYPES, None)?;
    pipeline.sync();
    Ok(())
}
