//! Tables that something else took out of an adopted publication. It is not ours, so they are not
//! put back, and their changes are missing for as long as nobody does: that is told for as long, or
//! until somebody says that it is meant.

use super::existing;
use crate::CaptureError;
use crate::publication::PublicationSpec;
use farshore_pg::{Connection, quote_identifier, quote_literal};
use farshore_store::{LogStore, StoreError};
use std::collections::BTreeMap;

/// Their OIDs; of those that had no membership of their own, with `:left`.
const NOTE_OUT: &str = "publication.taken-out";

/// How a table left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Out {
    /// Its membership was taken away.
    TakenOut,
    /// It had none of its own, and is published no more with its schema or with all tables.
    Left,
}

/// Tables that are out of a publication, for a person.
#[derive(Debug)]
pub struct TakenOut {
    /// Which, and what it means.
    pub what: String,
    /// What to do.
    pub remedy: String,
}

fn decode(note: &str) -> BTreeMap<u32, Out> {
    let entry = |entry: &str| match entry.strip_suffix(":left") {
        Some(oid) => Some((oid.parse().ok()?, Out::Left)),
        None => Some((entry.parse().ok()?, Out::TakenOut)),
    };
    note.split(',').filter_map(entry).collect()
}

fn encode(out: &BTreeMap<u32, Out>) -> String {
    let entry = |(oid, out): (&u32, &Out)| match out {
        Out::TakenOut => oid.to_string(),
        Out::Left => format!("{oid}:left"),
    };
    out.iter().map(entry).collect::<Vec<_>>().join(",")
}

/// Notes tables that are out of an adopted publication. One that comes back, or is dropped, is told
/// of no more, so it may stay in the note.
pub(super) fn note(
    spec: &PublicationSpec,
    store: &dyn LogStore,
    tables: &[u32],
    out: Out,
) -> Result<(), CaptureError> {
    if spec.adopt_publication.is_none() || tables.is_empty() {
        return Ok(());
    }
    let mut noted = decode(&store.note(NOTE_OUT).unwrap_or_default());
    noted.extend(tables.iter().map(|table| (*table, out)));
    store.set_note(NOTE_OUT, &encode(&noted))?;
    Ok(())
}

/// Somebody says that what is out is meant to be: it is told of no more.
///
/// # Errors
/// The store's.
pub fn accept(store: &dyn LogStore) -> Result<(), StoreError> {
    if store.note(NOTE_OUT).is_some_and(|noted| !noted.is_empty()) {
        store.set_note(NOTE_OUT, "")?;
    }
    Ok(())
}

/// What is out of an adopted publication now; `note` gives the store's notes. Without it nothing is
/// asked.
///
/// # Errors
/// The publisher's.
pub async fn told(
    spec: &PublicationSpec,
    sql: &mut Connection,
    note: impl Fn(&str) -> Option<String>,
) -> Result<Vec<TakenOut>, CaptureError> {
    let noted = decode(&note(NOTE_OUT).unwrap_or_default());
    if noted.is_empty() || spec.adopt_publication.is_none() {
        return Ok(Vec::new());
    }
    let all: Vec<u32> = noted.keys().copied().collect();
    let mut there = existing(spec, sql, &all).await?;
    let published = published(spec, sql, &all).await?;
    there.retain(|(oid, _)| !published.contains(oid));
    let names = |out: Out| -> Vec<&str> {
        let of = there.iter().filter(|(oid, _)| noted.get(oid) == Some(&out));
        of.map(|(_, name)| name.as_str()).collect()
    };
    let name = quote_identifier(&spec.publication_name());
    let meant =
        format!("where that is meant: farshore resume SITE.toml --publication {}", spec.name);
    let mut told = Vec::new();
    let taken_out = names(Out::TakenOut).join(", ");
    if !taken_out.is_empty() {
        told.push(TakenOut {
            what: format!(
                "something else took {taken_out} out of PostgreSQL publication {name}: changes since \
                 then are not carried"
            ),
            remedy: format!(
                "Put back what is to be followed (on the publisher: ALTER PUBLICATION {name} ADD \
                 TABLE {taken_out}), emptied on the targets, and it is copied anew; or, {meant}"
            ),
        });
    }
    let left = names(Out::Left).join(", ");
    if !left.is_empty() {
        told.push(TakenOut {
            what: format!(
                "{left} left PostgreSQL publication {name} (moved to another schema, detached, made \
                 UNLOGGED, or its schema was taken out): changes since then are not carried"
            ),
            remedy: format!(
                "When it comes back, the publication stops, and everything is to be copied anew, \
                 since they are missing; or, {meant}"
            ),
        });
    }
    Ok(told)
}

/// Those of these tables that the publication publishes, or has as members.
async fn published(
    spec: &PublicationSpec,
    sql: &mut Connection,
    tables: &[u32],
) -> Result<Vec<u32>, CaptureError> {
    let list: Vec<String> = tables.iter().map(u32::to_string).collect();
    let name = quote_literal(&spec.publication_name());
    let text = format!(
        "SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace \
         WHERE c.oid = ANY ($1::oid[]) AND (EXISTS (SELECT FROM pg_publication_rel r \
             JOIN pg_publication p ON p.oid = r.prpubid \
             WHERE p.pubname = {name} AND r.prrelid = c.oid) \
           OR EXISTS (SELECT FROM pg_publication_tables t WHERE t.pubname = {name} \
             AND t.schemaname = n.nspname AND t.tablename = c.relname))"
    );
    let rows = sql.query(&text, &[Some(&format!("{{{}}}", list.join(",")))]).await;
    let rows = rows.map_err(|error| spec.publisher_error(error))?;
    let oid = |row: &farshore_pg::Row| row.parse(0).map_err(|error| spec.publisher_error(error));
    rows.iter().map(oid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_as_it_was_written() {
        let out = BTreeMap::from([(16_400, Out::TakenOut), (16_500, Out::Left)]);
        assert_eq!(encode(&out), "16400,16500:left");
        assert_eq!(decode(&encode(&out)), out);
        assert!(decode("").is_empty());
        assert!(decode("x,1:y").is_empty());
    }
}
