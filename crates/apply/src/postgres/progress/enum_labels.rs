//! The labels that the publisher's enums had when tables were copied. A row has a label by its OID, and
//! its value travels as the label's name: one that gets another name changes what rows say there, and
//! the log has nothing of it.

use crate::ApplyError;
use crate::postgres::session::Session;
use farshore_capture::publication::{EnumLabel, PublishedTable, TableName};
use farshore_pg::text_array;
use std::collections::{BTreeMap, HashMap};

/// Of the enums that columns of a copied table are made of: what each is called, by its OID.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EnumLabels(BTreeMap<u32, String>);

/// A label that has another name by now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RenamedLabel {
    /// The enum, on the publisher.
    pub type_oid: u32,
    /// What it was called.
    pub from: String,
    /// What it is called now.
    pub to: String,
    /// Another label of the type has the name that this one had: since then a row with it may mean
    /// the one or the other.
    pub was_taken: bool,
}

impl EnumLabels {
    /// Those of a table as it is now.
    pub fn of(table: &PublishedTable) -> EnumLabels {
        EnumLabels(table.labels.iter().map(|known| (known.oid, known.label.clone())).collect())
    }

    /// Whether none is known.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What [`EnumLabels::to_json`] made; nothing of anything else.
    pub(super) fn from_json(text: &str) -> EnumLabels {
        EnumLabels(serde_json::from_str(text).unwrap_or_default())
    }

    /// As `farshore.table_copy.enum_labels` has them.
    pub(crate) fn to_json(&self) -> String {
        serde_json::json!(self.0).to_string()
    }

    /// Labels that have other names now.
    pub fn renamed(&self, now: &[EnumLabel]) -> Vec<RenamedLabel> {
        let renamed = |label: &EnumLabel| {
            let from = self.0.get(&label.oid).filter(|from| **from != label.label)?;
            let has_taken = |it: &EnumLabel| it.type_oid == label.type_oid && it.label == *from;
            Some(RenamedLabel {
                type_oid: label.type_oid,
                from: from.clone(),
                to: label.label.clone(),
                was_taken: now.iter().any(has_taken),
            })
        };
        now.iter().filter_map(renamed).collect()
    }

    /// These, and those of `now`; `None` where that adds nothing.
    pub(super) fn with(&self, now: &EnumLabels) -> Option<EnumLabels> {
        let mut all = self.clone();
        all.0.extend(now.0.iter().map(|(oid, label)| (*oid, label.clone())));
        (all != *self).then_some(all)
    }
}

/// Enums of a target by the names that the publisher's have: the name there, and its labels. One of
/// another schema counts where there is none in the same, as when columns are compared.
const ON_TARGET: &str = "SELECT w.schema_name, w.type_name, t.nspname, t.typname, t.oid, e.enumlabel \
    FROM unnest($1::text::text[], $2::text::text[]) AS w (schema_name, type_name) \
    CROSS JOIN LATERAL (SELECT t.oid, n.nspname, t.typname FROM pg_catalog.pg_type t \
      JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace \
      WHERE t.typname = w.type_name AND t.typtype = 'e' \
      ORDER BY n.nspname <> w.schema_name, n.nspname LIMIT 1) AS t \
    JOIN pg_catalog.pg_enum e ON e.enumtypid = t.oid";

/// An enum of the target.
#[derive(Clone, Debug)]
pub(crate) struct TargetEnum {
    /// Its OID there.
    pub oid: u32,
    /// Its name.
    pub name: TableName,
    /// Its labels.
    pub labels: Vec<String>,
}

/// What is to be done on the target about a label that was renamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ForLabel {
    /// Nothing: it has the new name there, or no row can have it.
    Nothing,
    /// To rename it does it: every row that has it means this one.
    Rename,
    /// To rename it would not do, for this reason.
    CopyAnew(&'static str),
}

impl RenamedLabel {
    /// `there` is the enum on the target, where it has one and all of the table's columns are of it
    /// that are of the publisher's.
    pub(crate) fn to_do(&self, there: Option<&TargetEnum>) -> ForLabel {
        let Some(there) = there else {
            return ForLabel::CopyAnew("its rows have the old names as text there");
        };
        let has = |label: &String| there.labels.contains(label);
        match (has(&self.from), has(&self.to)) {
            _ if self.was_taken => ForLabel::CopyAnew(
                "another label has got such a name, and what rows mean that came since cannot be told",
            ),
            (false, _) => ForLabel::Nothing,
            (true, false) => ForLabel::Rename,
            (true, true) => ForLabel::CopyAnew("the enum there has labels of both names"),
        }
    }
}

impl Session {
    /// The enums of the target that correspond to those of the publisher that have these names.
    pub(crate) async fn enums_named(
        &mut self,
        names: &[TableName],
    ) -> Result<HashMap<TableName, TargetEnum>, ApplyError> {
        let mut found: HashMap<TableName, TargetEnum> = HashMap::new();
        if names.is_empty() {
            return Ok(found);
        }
        let schemas = text_array(names.iter().map(|name| name.schema.as_str()));
        let names = text_array(names.iter().map(|name| name.name.as_str()));
        for row in self.query(ON_TARGET, &[Some(&schemas), Some(&names)]).await? {
            let text = |column| row.get(column).unwrap_or_default().to_owned();
            let name = TableName { schema: text(0), name: text(1) };
            let oid = row.parse(4).map_err(|error| self.error(error))?;
            let there = || TargetEnum {
                oid,
                name: TableName { schema: text(2), name: text(3) },
                labels: Vec::new(),
            };
            found.entry(name).or_insert_with(there).labels.push(text(5));
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(of: &[(u32, &str)]) -> Vec<EnumLabel> {
        let label = |(oid, label): &(u32, &str)| EnumLabel {
            oid: *oid,
            type_oid: oid / 100,
            label: (*label).to_owned(),
        };
        of.iter().map(label).collect()
    }

    fn noted(of: &[(u32, &str)]) -> EnumLabels {
        EnumLabels(labels(of).into_iter().map(|known| (known.oid, known.label)).collect())
    }

    #[test]
    fn labels_are_known_by_their_oids() {
        let copied = noted(&[(101, "a"), (102, "b\""), (201, "a")]);
        let renamed = |now: &[(u32, &str)]| {
            let renamed = copied.renamed(&labels(now)).into_iter();
            let told = |it: RenamedLabel| format!("{}>{} {}", it.from, it.to, it.was_taken);
            renamed.map(told).collect::<Vec<_>>().join(", ")
        };
        assert_eq!(renamed(&[(101, "a"), (103, "c"), (102, "b\""), (201, "a")]), "");
        assert_eq!(renamed(&[(102, "b\"")]), "", "the type has gone");
        assert_eq!(renamed(&[(101, "c"), (102, "b\""), (201, "a")]), "a>c false");
        assert_eq!(renamed(&[(101, "c"), (104, "a"), (201, "a")]), "a>c true");
        assert_eq!(renamed(&[(101, "b\""), (102, "a")]), "a>b\" true, b\">a true");
        assert_eq!(EnumLabels::from_json(&copied.to_json()), copied);
        assert_eq!(EnumLabels::from_json("{\"x\": 1}"), noted(&[]));
    }

    #[test]
    fn a_label_is_renamed_where_no_row_can_mean_another() {
        let to_do = |labels: &str, was_taken| {
            let (from, to) = ("a".to_owned(), "c".to_owned());
            let renamed = RenamedLabel { type_oid: 1, from, to, was_taken };
            let there = TargetEnum {
                oid: 2,
                name: TableName { schema: "s".into(), name: "e".into() },
                labels: labels.split(' ').map(str::to_owned).collect(),
            };
            match renamed.to_do(Some(&there)) {
                ForLabel::Nothing => "nothing",
                ForLabel::Rename => "rename",
                ForLabel::CopyAnew(_) => "copy anew",
            }
        };
        assert_eq!(to_do("a b", false), "rename");
        assert_eq!(to_do("c b", false), "nothing");
        assert_eq!(to_do("b", false), "nothing");
        assert_eq!(to_do("a b c", false), "copy anew");
        assert_eq!(to_do("a b", true), "copy anew");
        assert_eq!(to_do("c b", true), "copy anew");
    }
}
