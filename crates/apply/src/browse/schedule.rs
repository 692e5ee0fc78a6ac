//! How the scheduler would group what is stored, for a subscription that has to catch up with it.

use super::{Bound, Browse, Lines, Place};
use crate::ApplyError;
use crate::log_feed::{LogFeed, LogItem};
use crate::scheduler::{Decision, GroupLimits, Scheduler};
use crate::streaming::input_of;
use farshore_model::Lsn;
use farshore_store::LogStore;
use std::sync::Arc;

/// One target transaction.
#[derive(Clone, Copy, Debug)]
struct Group {
    number: u64,
    first: Lsn,
    last: Lsn,
    transactions: u64,
    commands: u64,
    /// Of bodies that are not in spills.
    bytes: u64,
    spilled: bool,
    batch: bool,
}

/// Writes a line for every group that the log would be applied in, as of now and with these
/// limits, by a subscription that is behind all of it. Returns the number of groups, and whether the
/// limit on them left some out. What runs side
/// by side is found out while they run: groups whose rows wait for each other go one after the
/// other.
///
/// # Errors
/// The store's, and those of `lines`.
pub async fn schedule<L: Lines>(
    store: &Arc<dyn LogStore>,
    wanted: &Browse,
    limits: GroupLimits,
    lines: &mut L,
) -> Result<(u64, bool), L::Error> {
    let start = store.status().start;
    let after = match wanted.from {
        Some(Bound::Position(from)) => start.max(Lsn(from.0.saturating_sub(1))),
        Some(Bound::Time(_)) | None => start,
    };
    let mut feed = LogFeed::open(store.clone(), after).map_err(ApplyError::from)?;
    let (mut scheduler, mut open, mut groups) = (Scheduler::new(limits), None::<Group>, 0);
    loop {
        let (header, body) = match feed.next_at_hand().await? {
            Some(LogItem::Transaction { header, body }) => (header, body),
            Some(LogItem::Watermark(_)) => continue,
            Some(LogItem::Halt(_)) | None => break,
        };
        match wanted.place(&header) {
            Place::Before => continue,
            Place::Within => {}
            Place::Behind => break,
        }
        let (input, facts) = input_of(&header, &body, true);
        let Decision { commit_before, begin, batch, commit_after, .. } = scheduler.step(input);
        let why = if facts.barrier { "a barrier follows" } else { "a large transaction follows" };
        if let Some(group) = open.take_if(|_| commit_before) {
            lines.line(&group.line(why, wanted.json)).await?;
        }
        if begin {
            if wanted.limit > 0 && groups == wanted.limit {
                return Ok((groups, true));
            }
            groups += 1;
            let (first, last) = (header.end_lsn, header.end_lsn);
            let number = groups;
            open = Some(Group {
                number,
                first,
                last,
                transactions: 0,
                commands: 0,
                bytes: 0,
                spilled: false,
                batch,
            });
        }
        if let Some(group) = &mut open {
            group.last = header.end_lsn;
            group.transactions += 1;
            group.commands += header.commands;
            group.bytes += facts.bytes.unwrap_or(0);
            group.spilled |= facts.bytes.is_none();
        }
        let why = if facts.barrier { "a barrier stands alone" } else { "a limit was met" };
        if let Some(group) = open.take_if(|_| commit_after) {
            lines.line(&group.line(why, wanted.json)).await?;
        }
    }
    if let Some(group) = open {
        lines.line(&group.line("the log ends", wanted.json)).await?;
    }
    Ok((groups, false))
}

impl Group {
    fn line(&self, why: &str, json: bool) -> String {
        let Group { number, first, last, transactions, commands, bytes, spilled, batch } = *self;
        if json {
            // Nothing in it needs to be escaped.
            return format!(
                "{{\"group\":{number},\"first\":\"{first}\",\"last\":\"{last}\",\
                 \"transactions\":{transactions},\"commands\":{commands},\"bytes\":{bytes},\
                 \"spilled\":{spilled},\"batch\":{batch},\"ends_because\":\"{why}\"}}"
            );
        }
        let how = if batch { "batch" } else { "change by change" };
        let size = if spilled { "a spill".to_owned() } else { format!("{bytes} bytes") };
        format!(
            "group {number}: {first} to {last}, {transactions} transactions, {commands} commands, \
             {size}, {how}; {why}"
        )
    }
}
