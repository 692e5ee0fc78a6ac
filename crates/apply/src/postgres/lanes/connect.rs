//! How connections to the target are made, one for each lane.

use super::{AWAIT, BEGIN, COMMIT, DEFER, FENCE, LOOK_AGAIN, LaneSettings, PROGRESS};
use crate::postgres::pipeline::{Expect, Pipeline, PipelineError};
use crate::postgres::progress::{ADVANCE, ADVANCE_NEWEST, ADVANCE_TYPES};
use crate::postgres::session::{Session, application_name, join_lanes_sql};
use crate::postgres::target_table::UNALTERED;
use farshore_fault as fault;
use farshore_pg::{FAR, Question};
use std::borrow::Cow;
use std::time::Instant;

/// Every statement finds its rows by a key, whatever the planner thinks of the table's size at the
/// moment: a plan made while a table was empty must not read all of it later.
const PLANNING: [&str; 5] = [
    "SET plan_cache_mode = force_generic_plan",
    "SET enable_seqscan = off",
    "SET enable_hashjoin = off",
    "SET enable_mergejoin = off",
    "SET jit = off",
];

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
    let session = join(&settings, foreign_keys_fire).await?;
    let pid = session.pid.clone();
    let mut pipeline = Pipeline::new(session);
    prepare(&mut pipeline, &settings).map_err(|error| format!("{error:?}"))?;
    Ok(Lane { pipeline, pid })
}

/// A session beside the first, which the next agent waits for as well; or why there is none.
pub(crate) async fn join(
    settings: &LaneSettings,
    foreign_keys_fire: bool,
) -> Result<Session, String> {
    let LaneSettings { subscription, target, cancel, .. } = settings;
    let join = join_lanes_sql(subscription);
    let asked = [Question::Simple(&join)];
    let connected = Session::connect_and_ask(target, &application_name(subscription), &asked).await;
    let (session, mut answers) = connected.map_err(|error| error.to_string())?;
    let token = session.connection.cancel_token();
    cancel.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(token);
    if session.replica_role == foreign_keys_fire {
        return Err("session_replication_role can be set on some of them only".to_owned());
    }
    let joined = answers.pop().unwrap_or(Ok(Vec::new())).map_err(|error| error.to_string())?;
    if joined.first().and_then(|row| row.get(0)) != Some("t") {
        return Err("another agent waits for this one to end".to_owned());
    }
    Ok(session)
}

/// Whether the target's answers take 5 ms or more.
pub(super) async fn is_far(pipeline: &mut Pipeline) -> Result<bool, PipelineError> {
    let connection = &mut pipeline.idle_session().await?.connection;
    if connection.is_far() {
        return Ok(true);
    }
    // It may be behind a pooler; or it was busy for a moment.
    for _ in 0..2 {
        let asked = Instant::now();
        connection.simple_query("").await?;
        if asked.elapsed() < FAR {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What every connection needs: its settings, and the statements of groups. Answered with what comes
/// next.
pub(super) fn prepare(
    pipeline: &mut Pipeline,
    settings: &LaneSettings,
) -> Result<(), PipelineError> {
    for setting in PLANNING {
        pipeline.run_sql(setting, Expect::Done)?;
    }
    // Progress is moved by who sees what the group before has committed.
    pipeline.parse(BEGIN, "BEGIN ISOLATION LEVEL READ COMMITTED", &[], None)?;
    pipeline.parse(COMMIT, "COMMIT", &[], None)?;
    pipeline.parse(DEFER, "SET CONSTRAINTS ALL DEFERRED", &[], None)?;
    let fence = format!("SELECT pg_catalog.pg_advisory_xact_lock({GROUP_KEY})");
    pipeline.parse(FENCE, &fence, &[25], None)?;
    let await_fence = format!("SELECT pg_catalog.pg_advisory_xact_lock_shared({GROUP_KEY})");
    pipeline.parse(AWAIT, &await_fence, &[25], None)?;
    let mut advance = Cow::Borrowed(ADVANCE);
    if !settings.keeps_newest {
        advance = advance.replace(ADVANCE_NEWEST, "").into();
    }
    if fault::defect("unordered-commits") {
        advance = advance.replace("applied = $2", "$2 IS NOT NULL").into();
    }
    pipeline.parse(LOOK_AGAIN, UNALTERED, &[1028, 1009, 1009], None)?;
    pipeline.parse(PROGRESS, &advance, &ADVANCE_TYPES, None)?;
    pipeline.sync();
    Ok(())
}
