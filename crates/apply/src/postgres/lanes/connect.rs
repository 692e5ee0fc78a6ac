//! How connections to the target are made, one for each lane.

use super::{AWAIT, BEGIN, COMMIT, DEFER, FAR, FENCE, LaneSettings, PROGRESS};
use crate::postgres::pipeline::{Pipeline, PipelineError};
use crate::postgres::progress::{ADVANCE, ADVANCE_TYPES};
use crate::postgres::session::Session;
use farshore_fault as fault;
use std::borrow::Cow;
use std::time::{Duration, Instant};

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
    let mut pipeline = Pipeline::new(join(&settings, foreign_keys_fire).await?);
    match prepare(&mut pipeline).await {
        Ok((pid, _)) => Ok(Lane { pipeline, pid }),
        Err(error) => Err(format!("{error:?}")),
    }
}

/// A session beside the first, which the next agent waits for as well; or why there is none.
pub(crate) async fn join(
    settings: &LaneSettings,
    foreign_keys_fire: bool,
) -> Result<Session, String> {
    let LaneSettings { subscription, target, cancel, .. } = settings;
    let application = format!("farshore {subscription}");
    let session = Session::connect(target, &application).await;
    let mut session = session.map_err(|error| error.to_string())?;
    let token = session.connection.cancel_token();
    cancel.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).push(token);
    if session.replica_role == foreign_keys_fire {
        return Err("session_replication_role can be set on some of them only".to_owned());
    }
    if !session.join_lanes(subscription).await.map_err(|error| error.to_string())? {
        return Err("another agent waits for this one to end".to_owned());
    }
    Ok(session)
}

/// What every connection needs. Returns the target's process and how long one round trip took.
pub(super) async fn prepare(pipeline: &mut Pipeline) -> Result<(String, Duration), PipelineError> {
    let connection = &mut pipeline.idle_session().await?.connection;
    let asked = Instant::now();
    let sql = format!("{PLANNING}; SELECT pg_catalog.pg_backend_pid()");
    let results = connection.simple_query(&sql).await?;
    let mut round_trip = asked.elapsed();
    let is_as_far_by_tcp = connection.round_trip().is_some_and(|shortest| shortest >= FAR);
    if round_trip >= FAR && !is_as_far_by_tcp {
        // Or it was busy.
        let again = Instant::now();
        connection.simple_query("").await?;
        round_trip = round_trip.min(again.elapsed());
    }
    let row = results.last().and_then(|result| result.rows.first());
    let pid = row.and_then(|row| row.get(0)).unwrap_or_default().to_owned();
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
    // Answered with what comes next.
    pipeline.sync();
    Ok((pid, round_trip))
}
