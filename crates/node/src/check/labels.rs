//! Labels of enums: one that the target's type lacks stops a subscription at the first row with it.

use super::{Findings, some_of};
use farshore_capture::publication::{EnumLabel, TableName, enum_labels};
use farshore_model::UserType;
use farshore_pg::{Connection, Error, quote_literal};
use std::collections::{BTreeSet, HashMap};

/// Of enums, by OID on their server.
pub type Labels = HashMap<u32, Vec<String>>;

/// Those of the enums among `types`. Asks nothing where there are none.
pub async fn read(sql: &mut Connection, types: &[UserType]) -> Result<Labels, Error> {
    let mut labels = Labels::new();
    for EnumLabel { type_oid, label, .. } in enum_labels(sql, types).await? {
        labels.entry(type_oid).or_default().push(label);
    }
    Ok(labels)
}

/// What adds the labels that `there` lacks, each in its place: labels have an order.
fn additions<'a>(labels: &'a [String], there: &'a [String]) -> impl Iterator<Item = String> + 'a {
    labels.iter().enumerate().filter(|(_, label)| !there.contains(label)).map(|(at, label)| {
        let place = match at.checked_sub(1) {
            // It is there, or was added before this one.
            Some(before) => format!(" AFTER {}", quote_literal(&labels[before])),
            None => {
                let next = labels.iter().find(|label| there.contains(label));
                next.map_or_else(String::new, |next| format!(" BEFORE {}", quote_literal(next)))
            }
        };
        format!("{}{place}", quote_literal(label))
    })
}

/// Compares the enums of columns: of each `(publisher's, target's)` type.
pub fn check(
    columns: &BTreeSet<(u32, u32)>,
    publishers: &Labels,
    (targets, types): (&Labels, &[UserType]),
    findings: &mut Findings,
) {
    for (ours, theirs) in columns {
        let (Some(labels), Some(there)) = (publishers.get(ours), targets.get(theirs)) else {
            continue;
        };
        let lacking: Vec<&String> = labels.iter().filter(|label| !there.contains(label)).collect();
        let Some(known) = types.iter().find(|known| known.oid == *theirs) else { continue };
        if lacking.is_empty() {
            continue;
        }
        let name = TableName { schema: known.schema.clone(), name: known.name.clone() };
        let quoted: Vec<String> = lacking.iter().map(|label| quote_literal(label)).collect();
        let add = additions(labels, there).map(|add| format!("ALTER TYPE {name} ADD VALUE {add}"));
        let add: Vec<String> = add.collect();
        // One that only the target has may be the old name of one that it lacks.
        let beyond = there.iter().filter(|label| !labels.contains(label)).map(|l| quote_literal(l));
        let beyond: Vec<String> = beyond.collect();
        let rename = match beyond.is_empty() {
            true => String::new(),
            false => format!(
                ". But where the publisher gave a label another name (it has not {}): ALTER TYPE {name} \
                 RENAME VALUE … TO …, or rows that have it keep the old one",
                some_of(&beyond)
            ),
        };
        findings.warning(
            format!(
                "type {name} on the target lacks labels that the publisher's has: {}. A row with one \
                 stops the subscription",
                some_of(&quoted)
            ),
            format!("On the target: {}{rename}", add.join("; ")),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_added_in_their_places() {
        let all = |labels: &str| labels.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let add = |ours: &str, theirs: &str| {
            additions(&all(ours), &all(theirs)).collect::<Vec<_>>().join("; ")
        };
        assert_eq!(add("a b c", "a b c own"), "");
        assert_eq!(add("a b c d", "own b d"), "'a' BEFORE 'b'; 'c' AFTER 'b'");
        assert_eq!(add("a b c", "c"), "'a' BEFORE 'c'; 'b' AFTER 'a'");
        assert_eq!(add("a b", "own"), "'a'; 'b' AFTER 'a'");
    }
}
