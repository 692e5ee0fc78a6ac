//! A table on both sides: columns, types, keys.

use super::tables::{Column, Table};
use super::{Findings, some_of};
use farshore_capture::publication::TableName;
use farshore_model::quote_identifier;

/// Looks at the columns of a table that both sides have, and that may be `copied` by now. That every
/// published column can be written has been looked at before; of those that were `refused` for their
/// type no more is said.
pub fn check(
    name: &TableName,
    source: &Table,
    target: &Table,
    copied: bool,
    refused: &[&str],
    findings: &mut Findings,
) {
    let pairs: Vec<(&Column, &Column)> = source
        .columns
        .iter()
        .filter_map(|ours| Some((ours, target.columns.iter().find(|c| c.name == ours.name)?)))
        .collect();
    for (ours, theirs) in &pairs {
        let is_refused = refused.contains(&ours.name.as_str());
        if !is_refused && !takes(&ours.type_name, &theirs.type_name) {
            findings.warning(
                format!(
                    "column {}.{} is {} on the publisher and {} on the target: a value that does \
                     not fit stops the subscription{}",
                    name,
                    quote_identifier(&ours.name),
                    ours.type_name,
                    theirs.type_name,
                    lost(&theirs.type_name)
                ),
                format!(
                    "On the target: ALTER TABLE {name} ALTER COLUMN {} TYPE {}",
                    quote_identifier(&ours.name),
                    ours.type_name
                ),
            );
        }
    }
    let stricter: Vec<String> = pairs
        .iter()
        .filter(|(ours, theirs)| theirs.not_null && !ours.not_null)
        .map(|(ours, _)| quote_identifier(&ours.name))
        .collect();
    if let Some(first) = stricter.first() {
        findings.warning(
            format!(
                "{name} on the target takes no NULL in {}, where the publisher does: a NULL stops \
                 the subscription",
                some_of(&stricter)
            ),
            format!("ALTER TABLE {name} ALTER COLUMN {first} DROP NOT NULL"),
        );
    }
    check_unfilled(name, source, target, copied, findings);
    check_speed(name, source, target, findings);
}

/// Columns of the target that no row would have a value for. One of a table that is copied may have
/// been renamed on the publisher since: what the log has from before is for it.
pub fn check_unfilled(
    name: &TableName,
    source: &Table,
    target: &Table,
    copied: bool,
    findings: &mut Findings,
) {
    let unfilled: Vec<String> = target
        .columns
        .iter()
        .filter(|theirs| theirs.not_null && !theirs.has_default && !theirs.generated)
        .filter(|theirs| !source.columns.iter().any(|ours| ours.name == theirs.name))
        .map(|theirs| quote_identifier(&theirs.name))
        .collect();
    let Some(first) = unfilled.first() else { return };
    let new: Vec<String> = source
        .columns
        .iter()
        .filter(|ours| !target.columns.iter().any(|theirs| theirs.name == ours.name))
        .map(|ours| quote_identifier(&ours.name))
        .collect();
    let what = format!(
        "{name} on the target has columns that are not published, take no NULL and have no default: {}",
        some_of(&unfilled)
    );
    let filled = format!("ALTER TABLE {name} ALTER COLUMN {first} SET DEFAULT …, or DROP NOT NULL");
    if copied && !new.is_empty() {
        findings.warning(
            format!("{what}. The publisher has others that the target does not: {}", some_of(&new)),
            format!(
                "If it renamed them, nothing yet: they are renamed here with the first change since, or \
                 the subscription stops at it, with the SQL for the target. Else {filled}"
            ),
        );
        return;
    }
    findings.error(what, filled);
}

/// Whether updates and deletes find their row without reading the whole table.
fn check_speed(name: &TableName, source: &Table, target: &Table, findings: &mut Findings) {
    if source.identity == 'f' {
        if !target.primary_key {
            findings.warning(
                format!(
                    "{name} has REPLICA IDENTITY FULL, and no primary key on the target: every \
                     UPDATE and DELETE reads the whole table"
                ),
                format!("ALTER TABLE {name} ADD PRIMARY KEY (…) on the target"),
            );
        }
        return;
    }
    if source.key.is_empty() {
        return;
    }
    let key: Vec<String> = source.key.iter().map(|column| quote_identifier(column)).collect();
    if !source.key.iter().any(|column| target.indexed.contains(column)) {
        findings.warning(
            format!(
                "{name} on the target has no index on its key ({}): every UPDATE and DELETE reads \
                 the whole table",
                key.join(", ")
            ),
            format!("ALTER TABLE {name} ADD PRIMARY KEY ({})", key.join(", ")),
        );
    } else if !target.unique.iter().any(|unique| unique.iter().all(|c| source.key.contains(c))) {
        findings.warning(
            format!(
                "{name} on the target has no unique index on its key ({}) or a part of it: no UPDATE \
                 and DELETE goes in bulk, since of a row that is there twice nothing would be seen",
                key.join(", ")
            ),
            format!("CREATE UNIQUE INDEX ON {name} ({}) on the target", key.join(", ")),
        );
    }
}

/// What goes without an error where a type takes less than the publisher's has.
fn lost(target: &str) -> &'static str {
    match split_modifier(target).0.as_str() {
        "character varying" | "character" => {
            ", but for spaces at its end beyond that length, which are cut off"
        }
        "jsonb" => ". Of equal keys jsonb keeps the last, and neither their order nor spaces",
        _ => "",
    }
}

/// Whether every value of one type is a value of the other, of which some are.
fn takes(source: &str, target: &str) -> bool {
    if source == target {
        return true;
    }
    let ((source, source_length), (target, target_length)) =
        (split_modifier(source), split_modifier(target));
    let (source, target) = (source.as_str(), target.as_str());
    const NUMBERS: [&str; 4] = ["smallint", "integer", "bigint", "numeric"];
    const FLOATS: [&str; 2] = ["real", "double precision"];
    const TEXTS: [&str; 2] = ["character varying", "text"];
    let rank = |list: &[&str], name: &str| list.iter().position(|n| *n == name);
    for list in [&NUMBERS[..], &FLOATS[..]] {
        if let (Some(from), Some(to)) = (rank(list, source), rank(list, target)) {
            return target_length.is_none() && from <= to;
        }
    }
    if rank(&TEXTS, target).is_some() && target_length.is_none() {
        return true;
    }
    let same = source == target && source != "bit";
    if !same && (rank(&TEXTS, source).is_none() || rank(&TEXTS, target).is_none()) {
        return false;
    }
    match (source_length, target_length) {
        (_, None) => true,
        (None, Some(_)) => false,
        (Some(from), Some(to)) => {
            matches!((from.parse::<u32>(), to.parse::<u32>()), (Ok(from), Ok(to)) if from <= to)
        }
    }
}

/// `timestamp(3) without time zone` → the first word or words, and what stands in parentheses.
fn split_modifier(name: &str) -> (String, Option<&str>) {
    let parts =
        name.split_once('(').and_then(|(before, rest)| Some((before, rest.split_once(')')?)));
    match parts {
        Some((before, (modifier, after))) => (format!("{before}{after}"), Some(modifier)),
        None => (name.to_owned(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::takes;

    #[test]
    fn wider_types_take_every_value() {
        for (source, target) in [
            ("integer", "integer"),
            ("integer", "bigint"),
            ("smallint", "numeric"),
            ("numeric(10,2)", "numeric"),
            ("real", "double precision"),
            ("character varying(10)", "character varying(20)"),
            ("character varying(10)", "text"),
            ("text", "character varying"),
            ("character(3)", "text"),
            ("integer", "text"),
            ("public.mood", "character varying"),
            ("timestamp(3) without time zone", "timestamp(3) without time zone"),
            ("timestamp(3) without time zone", "timestamp(6) without time zone"),
            ("timestamp(3) without time zone", "timestamp without time zone"),
            ("character(3)", "character(5)"),
            ("bit(3)", "bit(3)"),
            ("public.mood", "public.mood"),
        ] {
            assert!(takes(source, target), "{source} → {target}");
        }
        for (source, target) in [
            ("bigint", "integer"),
            ("numeric", "bigint"),
            ("numeric", "numeric(10,2)"),
            ("text", "character varying(10)"),
            ("character varying(20)", "character varying(10)"),
            ("text", "integer"),
            ("bit(3)", "bit(5)"),
            ("timestamp(3) without time zone", "timestamp(3) with time zone"),
            ("time(6) without time zone", "time(0) without time zone"),
            ("public.mood", "public.temper"),
            ("integer", "text[]"),
        ] {
            assert!(!takes(source, target), "{source} → {target}");
        }
    }
}
