//! `farshore validate`: a subscription's tables compared with the publisher's, told line by line.

use crate::control::Answer;
use farshore_apply::Subscription;
use farshore_apply::validate::{Compared, Difference, Differences, Told, Verdict, copy_anew};
use farshore_capture::publication::TableName;
use serde::Serialize;
use tokio::sync::mpsc;

/// What is told and waits for the client: a line each, of tables mostly.
const TOLD_MAX: usize = 4096;

/// A table that takes more on disk is announced.
const LARGE_BYTES: u64 = 256 << 20;

/// Tables that are named in the outcome.
const NAMED_MAX: usize = 10;

/// A table as JSON.
#[derive(Serialize)]
struct Line<'a> {
    table: String,
    target: String,
    /// `equal`, `differs` or `not compared`.
    result: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    position: Option<String>,
    publisher_rows: u64,
    target_rows: u64,
    missing: u64,
    extra: u64,
    other: u64,
    /// Every difference was counted.
    counted_all: bool,
    named_by: &'a [String],
    rows: Vec<NamedRow<'a>>,
}

#[derive(Serialize)]
struct NamedRow<'a> {
    difference: &'static str,
    row: &'a str,
}

/// Compares the tables, and tells of each on a line; how it went for a person.
///
/// # Errors
/// That tables differ or could not be compared; what kept all from being compared. The client has
/// gone.
pub(crate) async fn validate(
    subscription: &Subscription,
    tables: &[TableName],
    json: bool,
    lines: &mut Answer,
) -> Result<String, String> {
    let (tell, mut told) = mpsc::channel(TOLD_MAX);
    let name = subscription.spec.name.as_str();
    let mut outcome = Outcome::default();
    let work = async move { Ok::<_, String>(subscription.validate(tables, &tell).await) };
    // Side by side: whoever reads slowly has nobody wait for what is held meanwhile.
    let telling = async {
        while let Some(told) = told.recv().await {
            for line in outcome.note(told, json) {
                let told = lines.progress(&line).await;
                told.map_err(|error| format!("nobody listens: {error}"))?;
            }
        }
        Ok(())
    };
    let (done, ()) = tokio::try_join!(work, telling)?;
    match (done, outcome.said(name)) {
        (Ok(()), said) => said,
        (Err(error), _) if outcome == Outcome::default() => Err(error.to_string()),
        (Err(error), Ok(said) | Err(said)) => Err(format!("{error}. Before that: {said}")),
    }
}

/// What came of the tables so far.
#[derive(Debug, Default, PartialEq, Eq)]
struct Outcome {
    equal: usize,
    rows: u64,
    differ: Vec<TableName>,
    not_compared: Vec<TableName>,
}

impl Outcome {
    /// The lines to be shown.
    fn note(&mut self, told: Told, json: bool) -> Vec<String> {
        match told {
            Told::Compared(compared) => {
                match &compared.verdict {
                    Verdict::Equal => {
                        self.equal += 1;
                        self.rows += compared.rows.0;
                    }
                    Verdict::Differ(_) => self.differ.push(compared.table.clone()),
                    Verdict::NotCompared(_) => self.not_compared.push(compared.table.clone()),
                }
                if json { vec![json_line(&compared)] } else { compared.lines() }
            }
            Told::Waits(why) if !json => vec![why],
            Told::Begins { tables, point } if !json => {
                vec![format!("comparing {} as of {point}", counted(tables, "table"))]
            }
            Told::Comparing { table, bytes } if !json && bytes >= LARGE_BYTES => {
                vec![format!("{table}: {} MB to read on each side", bytes >> 20)]
            }
            Told::Waits(_) | Told::Begins { .. } | Told::Comparing { .. } => Vec::new(),
        }
    }

    fn said(&self, subscription: &str) -> Result<String, String> {
        let Outcome { equal, rows, differ, not_compared } = self;
        let mut text = format!(
            "subscription \"{subscription}\": {} equal ({})",
            counted(*equal, "table"),
            counted(usize::try_from(*rows).unwrap_or(usize::MAX), "row")
        );
        if differ.is_empty() && not_compared.is_empty() {
            return Ok(text);
        }
        if let Some(first) = differ.first() {
            let verb = if differ.len() == 1 { "differs" } else { "differ" };
            text.push_str(&format!(
                "; {} {verb}: {}. To copy one anew: {}",
                counted(differ.len(), "table"),
                listed(differ),
                copy_anew(subscription, first)
            ));
        }
        if !not_compared.is_empty() {
            text.push_str(&format!(
                "; {} not compared: {}",
                counted(not_compared.len(), "table"),
                listed(not_compared)
            ));
        }
        Err(text)
    }
}

fn counted(number: usize, what: &str) -> String {
    if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") }
}

fn listed(tables: &[TableName]) -> String {
    let names: Vec<String> = tables.iter().take(NAMED_MAX).map(ToString::to_string).collect();
    let more = tables.len().saturating_sub(NAMED_MAX);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{more}", names.join(", "))
}

fn json_line(compared: &Compared) -> String {
    let Compared { table, target, point, rows, named_by, verdict } = compared;
    let none = Differences { all: true, ..Differences::default() };
    let (result, why, found) = match verdict {
        Verdict::Equal => ("equal", None, &none),
        Verdict::Differ(found) => ("differs", None, found),
        Verdict::NotCompared(why) => ("not compared", Some(why.as_str()), &none),
    };
    let named = found.named.iter().map(|(what, row)| NamedRow {
        difference: match what {
            Difference::Missing => "missing",
            Difference::Extra => "extra",
            Difference::Other => "other",
        },
        row,
    });
    let line = Line {
        table: table.to_string(),
        target: target.to_string(),
        result,
        why,
        position: why.is_none().then(|| point.to_string()),
        publisher_rows: rows.0,
        target_rows: rows.1,
        missing: found.missing,
        extra: found.extra,
        other: found.other,
        counted_all: found.all,
        named_by,
        rows: named.collect(),
    };
    serde_json::to_string(&line).unwrap_or_else(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_model::Lsn;

    fn compared(name: &str, verdict: Verdict) -> Told {
        let table = TableName { schema: "public".into(), name: name.into() };
        Told::Compared(Compared {
            target: table.clone(),
            table,
            point: Lsn(16),
            rows: (7, 6),
            named_by: vec!["id".into()],
            verdict,
        })
    }

    #[test]
    fn an_outcome_is_well_only_if_all_tables_are_equal() {
        let mut outcome = Outcome::default();
        assert_eq!(outcome.note(compared("a", Verdict::Equal), false), ["public.a: equal, 7 rows"]);
        assert_eq!(outcome.said("s").unwrap(), "subscription \"s\": 1 table equal (7 rows)");
        let named = vec![(Difference::Missing, "4".to_owned())];
        let found = Differences { missing: 1, named, all: true, ..Differences::default() };
        let lines = outcome.note(compared("b", Verdict::Differ(found.clone())), false);
        assert_eq!(lines.len(), 2);
        assert_eq!(lines[1], "  missing on the target: (id) = (4)");
        let said = outcome.said("s").unwrap_err();
        assert!(said.contains("1 table differs: public.b. To copy one anew: "), "{said}");
        outcome.note(compared("c", Verdict::NotCompared("why".into())), false);
        assert!(outcome.said("s").unwrap_err().ends_with("; 1 table not compared: public.c"));
        let json = outcome.note(compared("b", Verdict::Differ(found)), true).remove(0);
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!((&json["result"], &json["missing"]), (&"differs".into(), &1.into()));
        assert_eq!((&json["rows"][0]["row"], &json["position"]), (&"4".into(), &"0/10".into()));
    }
}
