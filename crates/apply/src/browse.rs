//! The stored log, readable: one line per change, as text or as JSON.

mod schedule;

pub use schedule::schedule;

use crate::ApplyError;
use crate::careful::Chunks;
use crate::conflict::{self, relations_of};
use crate::log_feed::{Definitions, LogFeed, LogItem};
use crate::postgres::writer::InTransaction;
use farshore_capture::publication::TableName;
use farshore_model::transaction::{Header, commands};
use farshore_model::{Lsn, PgTime, Relation};
use farshore_store::LogStore;
use farshore_wire::pgoutput::stored::Stored;
use farshore_wire::pgoutput::{OldTuple, Tuple, Value};
use farshore_wire::readable::{Readable, hexadecimal, push_json_string, readable};
use std::fmt::Write as _;
use std::future::Future;
use std::sync::Arc;

/// Longest value shown in text, in characters.
const SHOWN_CHARS_MAX: usize = 200;

/// An end of what is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A position: the end of a commit record.
    Position(Lsn),
    /// The publisher's clock at commit.
    Time(PgTime),
}

impl std::str::FromStr for Bound {
    type Err = String;

    fn from_str(text: &str) -> Result<Bound, String> {
        if text.contains('/') {
            return text.parse().map(Bound::Position).map_err(|error| format!("{error}"));
        }
        text.parse().map(Bound::Time).map_err(|error| format!("{error}, nor a position"))
    }
}

/// What to show.
#[derive(Clone, Debug, Default)]
pub struct Browse {
    /// From this transaction on, itself included; else from the log's start.
    pub from: Option<Bound>,
    /// Up to this transaction, itself included; else to the log's end.
    pub to: Option<Bound>,
    /// Changes of this table alone.
    pub table: Option<TableName>,
    /// Changes at most; 0 for all.
    pub limit: u64,
    /// One JSON object per line, instead of text.
    pub json: bool,
}

/// Where a transaction stands to what is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Not wanted; others behind it may be, since commit times need not rise with positions.
    Before,
    /// Wanted.
    Within,
    /// Not wanted, and none behind it is.
    Behind,
}

impl Browse {
    fn place(&self, header: &Header) -> Place {
        let too_early = match self.from {
            Some(Bound::Time(from)) => header.commit_time < from,
            // Reading starts there.
            Some(Bound::Position(_)) | None => false,
        };
        match self.to {
            Some(Bound::Position(to)) if header.end_lsn > to => Place::Behind,
            Some(Bound::Time(to)) if header.commit_time > to => Place::Before,
            Some(_) | None if too_early => Place::Before,
            Some(_) | None => Place::Within,
        }
    }
}

/// What was not shown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shown {
    /// Changes shown.
    pub changes: u64,
    /// The limit ended it: the position of the transaction that goes on.
    pub more_at: Option<Lsn>,
    /// The log begins only here, after the wanted start.
    pub log_start: Option<Lsn>,
}

/// Takes lines, and waits where the reader does.
pub trait Lines {
    /// The reader has gone.
    type Error: From<ApplyError>;

    /// Takes one line (without its end).
    fn line(&mut self, line: &str) -> impl Future<Output = Result<(), Self::Error>> + Send;
}

/// Writes the stored changes that are wanted, in commit order. What was rolled back (also to a
/// savepoint) is not shown. Memory: one block, or one row where that is larger.
///
/// # Errors
/// The store's, and those of `lines`.
pub async fn browse<L: Lines>(
    store: &Arc<dyn LogStore>,
    wanted: &Browse,
    lines: &mut L,
) -> Result<Shown, L::Error> {
    let start = store.status().start;
    let mut shown = Shown::default();
    let mut after = start;
    if let Some(Bound::Position(from)) = wanted.from {
        let before = Lsn(from.0.saturating_sub(1));
        after = start.max(before);
        shown.log_start = (before < start).then_some(start);
    }
    let mut feed = LogFeed::open(store.clone(), after).map_err(ApplyError::from)?;
    loop {
        let (header, body) = match feed.next_at_hand().await? {
            Some(LogItem::Transaction { header, body }) => (header, body),
            Some(LogItem::Watermark(_)) => continue,
            Some(LogItem::Halt(_)) | None => return Ok(shown),
        };
        match wanted.place(&header) {
            Place::Before => continue,
            Place::Within => {}
            Place::Behind => return Ok(shown),
        }
        let mut at = InTransaction { header: &header, subtransaction: header.xid };
        let mut is_first = true;
        let mut chunks = Chunks::of(body, &feed)?;
        while let Some(chunk) = chunks.next(&mut feed, &header).await? {
            for command in commands(&chunk) {
                let command = command.map_err(|error| ApplyError::Stored {
                    position: header.end_lsn,
                    what: error.to_string(),
                })?;
                let Some(change) = at.read(command)? else { continue };
                for line in lines_of(&change, &header, feed.definitions(), wanted) {
                    if wanted.limit > 0 && shown.changes == wanted.limit {
                        shown.more_at = Some(header.end_lsn);
                        return Ok(shown);
                    }
                    if std::mem::take(&mut is_first) && !wanted.json {
                        lines.line(&heading(&header)).await?;
                    }
                    shown.changes += 1;
                    lines.line(&line).await?;
                }
            }
        }
    }
}

fn heading(header: &Header) -> String {
    format!("{} committed {} xid {}", header.end_lsn, header.commit_time, header.xid)
}

/// A line for each table that the change is on (several for TRUNCATE), or for a message.
fn lines_of(
    change: &Stored<'_>,
    header: &Header,
    definitions: &Definitions,
    wanted: &Browse,
) -> Vec<String> {
    if let Stored::Message { prefix, content, .. } = change {
        if wanted.table.is_some() {
            return Vec::new();
        }
        let content =
            std::str::from_utf8(content).map_or_else(|_| hexadecimal(content), Into::into);
        let line = if wanted.json {
            let mut line = json_head(header, "MESSAGE");
            line.push_str(",\"prefix\":");
            push_json_string(&mut line, prefix);
            line.push_str(",\"content\":");
            push_json_string(&mut line, &content);
            line + "}"
        } else {
            format!("  MESSAGE {} {}", quoted(prefix), quoted(&content))
        };
        return vec![line];
    }
    let relations = relations_of(change).into_iter().filter_map(|id| definitions.get(&id));
    relations
        .filter(|relation| {
            wanted.table.as_ref().is_none_or(|table| {
                table.name == relation.name && table.schema == schema_of(relation)
            })
        })
        .map(|relation| {
            if wanted.json {
                json_line(change, header, relation)
            } else {
                text_line(change, relation)
            }
        })
        .collect()
}

fn schema_of(relation: &Relation) -> &str {
    if relation.schema.is_empty() { "pg_catalog" } else { &relation.schema }
}

fn json_head(header: &Header, operation: &str) -> String {
    format!(
        "{{\"lsn\":\"{}\",\"commit_time\":\"{}\",\"xid\":{},\"operation\":\"{operation}\"",
        header.end_lsn, header.commit_time, header.xid
    )
}

fn json_line(change: &Stored<'_>, header: &Header, relation: &Relation) -> String {
    let mut line = json_head(header, conflict::operation(change));
    line.push_str(",\"table\":");
    push_json_string(&mut line, &relation.qualified_name());
    for (name, values) in parts_of(change, relation) {
        let _ = write!(line, ",\"{name}\":{{");
        for (n, (column, value)) in values.iter().enumerate() {
            if n > 0 {
                line.push(',');
            }
            push_json_string(&mut line, column);
            line.push(':');
            value.push_json(&mut line);
        }
        line.push('}');
    }
    if let Stored::Truncate { cascade, restart_identity, .. } = change {
        let _ = write!(line, ",\"cascade\":{cascade},\"restart_identity\":{restart_identity}");
    }
    line.push('}');
    line
}

fn text_line(change: &Stored<'_>, relation: &Relation) -> String {
    let mut line = format!("  {} {}", conflict::operation(change), relation.qualified_name());
    for (name, values) in parts_of(change, relation) {
        let values: Vec<String> =
            values.iter().map(|(column, value)| format!("{column}={}", text_of(value))).collect();
        let _ = write!(line, " {name} ({})", values.join(", "));
    }
    line
}

fn text_of(value: &Readable) -> String {
    match value {
        Readable::Text(text) => quoted(text),
        other => shortened(other.text()),
    }
}

/// As an SQL string on one line; what does not print is escaped.
fn quoted(text: &str) -> String {
    let mut out = String::from("'");
    for c in shortened(text).chars() {
        match c {
            '\'' => out.push_str("''"),
            c if c.is_control() => out.extend(c.escape_default()),
            c => out.push(c),
        }
    }
    out.push('\'');
    out
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARS_MAX) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}… ({} bytes)", &text[..end], text.len()),
    }
}

type Part<'a> = (&'static str, Vec<(&'a str, Readable)>);

/// What identifies the row, and its new values.
fn parts_of<'a>(change: &Stored<'_>, relation: &'a Relation) -> Vec<Part<'a>> {
    let part = |name, tuple: Tuple<'_>, wanted: &dyn Fn(bool, Value<'_>) -> bool| {
        let values = relation
            .columns
            .iter()
            .zip(tuple.values())
            .filter(|(column, value)| wanted(column.key, *value))
            .map(|(column, value)| {
                (column.name.as_str(), readable(value, column.type_oid, &relation.types))
            });
        (name, values.collect())
    };
    let old_part = |old: &OldTuple<'_>| match old {
        OldTuple::None => None,
        OldTuple::Key(tuple) => Some(part("key", *tuple, &|is_key, _| is_key)),
        OldTuple::Full(tuple) => Some(part("old", *tuple, &|_, _| true)),
    };
    match change {
        Stored::Insert { new, .. } => vec![part("new", *new, &|_, _| true)],
        Stored::Update { old, new, .. } => {
            let key = old_part(old).unwrap_or_else(|| part("key", *new, &|is_key, _| is_key));
            vec![key, part("new", *new, &|_, value| !matches!(value, Value::Unchanged))]
        }
        Stored::Delete { old, .. } => old_part(old).into_iter().collect(),
        Stored::Truncate { .. } | Stored::Message { .. } | Stored::SubtransactionMark(_) => {
            Vec::new()
        }
    }
}
