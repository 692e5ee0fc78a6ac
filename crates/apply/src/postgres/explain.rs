//! What went wrong with statements in flight, as the subscription says it.

use crate::ApplyError;
use crate::conflict::{self, FoundBy};
use crate::error::{Cause, FailedChange, RefusedCommit, passes_by_itself};
use crate::postgres::in_use::is_of_a_lock;
use crate::postgres::pipeline::{BatchFailure, ChangeRef, Pipeline, PipelineError};
use crate::postgres::statements::TargetRelation;
use crate::postgres::target_table::altered;
use farshore_capture::publication::TableName;
use farshore_model::{DictionaryId, Lsn};
use farshore_wire::pgoutput::OldTuple;
use farshore_wire::pgoutput::stored::{Stored, decode_stored};
use std::collections::HashMap;

/// Names subscription, table and row in an error of the pipeline; `newest` is the newest position
/// of what was applied so far.
pub fn explain(
    error: PipelineError,
    subscription: &str,
    pipeline: &Pipeline,
    relations: &HashMap<DictionaryId, TargetRelation>,
    newest: Lsn,
) -> ApplyError {
    let subscription = subscription.to_owned();
    let (change, cause) = match error {
        PipelineError::Connection(error) => return pipeline.target_error(error),
        PipelineError::Server(error) if matches!(error.code.as_str(), "42P01" | "3F000") => {
            return ApplyError::Setup(format!(
                "subscription \"{subscription}\": its progress table farshore.subscription has gone \
                 from the target ({error}), and with it the progress of all subscriptions into that \
                 database. Restore it; or empty the tables of all of them, DROP SCHEMA IF EXISTS \
                 farshore CASCADE there, and go on (farshore resume) to copy anew"
            ));
        }
        PipelineError::Server(error) => {
            return pipeline.target_error(farshore_pg::Error::Server(error));
        }
        PipelineError::CommitRefused { error, batch: true, .. } if !passes_by_itself(&error) => {
            let what = error.to_string();
            return ApplyError::BatchRefused { subscription, table: None, position: newest, what };
        }
        PipelineError::CommitRefused { position, error, .. } => {
            return ApplyError::Commit(Box::new(RefusedCommit { subscription, position, error }));
        }
        PipelineError::Batch(_, BatchFailure::Refused(error)) if passes_by_itself(&error) => {
            return pipeline.target_error(farshore_pg::Error::Server(error));
        }
        PipelineError::Batch(relation, failure) => {
            let table = relations.get(&relation).map(|target| Box::new(target.table.clone()));
            let what = match failure {
                BatchFailure::Refused(error) => error.to_string(),
                BatchFailure::Rows { wanted, found } => {
                    format!("it met {found} rows instead of {wanted}")
                }
            };
            return ApplyError::BatchRefused { subscription, table, position: newest, what };
        }
        PipelineError::Met(what) => {
            return ApplyError::LanesMet { subscription, position: newest, what };
        }
        PipelineError::Stored(what) => return ApplyError::Stored { position: newest, what },
        PipelineError::ProgressMoved => {
            return ApplyError::NotYet(format!(
                "subscription \"{subscription}\": its progress row on the target was changed by \
                 something else. Starting again from what it says now"
            ));
        }
        PipelineError::Altered => {
            return altered(&subscription);
        }
        PipelineError::Encode(error) => {
            return ApplyError::Setup(format!("subscription \"{subscription}\": {error}"));
        }
        PipelineError::Rows(change, rows) => (change, Cause::Rows(rows)),
        PipelineError::Refused(change, error) if is_of_a_lock(&error) => {
            match emptied_by(&change, relations) {
                Some(tables) => return ApplyError::TablesInUse { subscription, tables },
                None => (change, Cause::Refused(error)),
            }
        }
        PipelineError::Refused(change, error) => (change, Cause::Refused(error)),
    };
    ApplyError::Change(Box::new(failed_change(subscription, change, cause, relations)))
}

/// The tables that a TRUNCATE is of, by their names on the target.
fn emptied_by(
    change: &ChangeRef,
    relations: &HashMap<DictionaryId, TargetRelation>,
) -> Option<Vec<TableName>> {
    let Ok(Stored::Truncate { relations: emptied, .. }) = decode_stored(&change.command) else {
        return None;
    };
    Some(emptied.filter_map(|id| relations.get(&id)).map(|target| target.table.clone()).collect())
}

fn failed_change(
    subscription: String,
    change: ChangeRef,
    cause: Cause,
    relations: &HashMap<DictionaryId, TargetRelation>,
) -> FailedChange {
    let (mut operation, mut table, mut key) = ("change", String::new(), String::new());
    let stored = decode_stored(&change.command);
    if let (Ok(stored), Some(target)) = (&stored, relations.get(&change.relation)) {
        operation = conflict::operation(stored);
        table = target.table.to_string();
        key = conflict::readable_key(stored, &target.relation);
    }
    let found_by = match (&stored, relations.get(&change.relation)) {
        (Ok(stored), Some(target)) => found_by(stored, target),
        _ => FoundBy::Key,
    };
    let is_insert = matches!(stored, Ok(Stored::Insert { .. }));
    FailedChange {
        remedy: conflict::remedy(&cause, is_insert, found_by),
        subscription,
        operation,
        table,
        key,
        position: change.position,
        commit_time: change.commit_time,
        cause,
        relation: change.relation,
        command: change.command,
    }
}

fn found_by(change: &Stored<'_>, target: &TargetRelation) -> FoundBy {
    let (Stored::Update { old, .. } | Stored::Delete { old, .. }) = change else {
        return FoundBy::Key;
    };
    match old {
        _ if !target.is_found_by_image() => FoundBy::Key,
        OldTuple::None => FoundBy::KeyForWantOfImage,
        OldTuple::Key(old) | OldTuple::Full(old) if target.is_like_a_key(*old) => {
            FoundBy::PartialImage
        }
        OldTuple::Key(_) | OldTuple::Full(_) => FoundBy::Image,
    }
}
