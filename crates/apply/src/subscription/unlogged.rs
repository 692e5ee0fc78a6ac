//! What is done to the publisher's tables and leaves nothing in its log: a column that is dropped and
//! added again, or whose name another one gets, and labels of enums that get other names. Its catalogue
//! has that, by numbers and OIDs; they are noted when a table is copied, or first seen, and compared
//! when an agent starts, which it does when capture sees that the catalogue is another.

use super::Subscription;
use super::start::ANSWER_WITHIN;
use crate::ApplyError;
use crate::error::{Cause, FailedChange, others_told};
use crate::postgres::follow_ddl::{Follow, same_columns};
use crate::postgres::log_points::POINT_WITHIN;
use crate::postgres::noted_definition::{definition_of, load_definitions};
use crate::postgres::progress::{
    ColumnNumbers, EnumLabels, ForLabel, RenamedLabel, TableCopyColumn, TableProgress,
};
use crate::postgres::resume::Touched;
use crate::postgres::session::{Session, application_name};
use crate::postgres::target_table::{TargetTable, target_table, target_tables};
use crate::remedy;
use farshore_capture::publication::{PublishedTable, TableName};
use farshore_model::{Lsn, Relation, is_made_of, quote_identifier};
use farshore_pg::quote_literal;
use std::collections::{BTreeSet, HashMap};
use std::sync::OnceLock;
use std::time::Duration;

/// Published tables as they are now, by name.
type Now<'a> = HashMap<&'a TableName, &'a PublishedTable>;

/// What is only noted keeps nothing waiting for longer.
const SOON: Duration = Duration::from_millis(300);

/// What of a copied table is otherwise than the log tells.
enum Unlogged {
    /// A column that is another one.
    Column(String),
    /// Labels that have other names.
    Labels,
}

/// Notes how copied tables are attached on the publisher, where earlier versions have not.
pub(super) async fn note_attached(
    session: &mut Session,
    name: &str,
    published: &[PublishedTable],
    tables: &mut [TableProgress],
) -> Result<(), ApplyError> {
    let now: Now<'_> = published.iter().map(|now| (&now.table, now)).collect();
    let mut newly = Vec::new();
    let mut noted = Vec::new();
    for table in tables {
        let now = now.get(&table.table);
        let Some(attached) = now.and_then(|now| table.newly_attached(now)) else { continue };
        newly.push((table.table.clone(), attached));
        noted.push((table, attached));
    }
    // Nothing streams before it is done.
    if newly.is_empty() || !session.note_attached_all(name, &newly).await? {
        return Ok(());
    }
    for (table, attached) in noted {
        table.attached = Some(attached);
    }
    Ok(())
}

/// Notes the labels that enums of these tables have now.
async fn note_labels(
    session: &mut Session,
    name: &str,
    now: &Now<'_>,
    tables: &mut [TableProgress],
    which: &BTreeSet<TableName>,
) -> Result<(), ApplyError> {
    let mut newly: Vec<(&mut TableProgress, EnumLabels)> = Vec::new();
    for table in tables.iter_mut().filter(|table| which.contains(&table.table)) {
        let Some(now) = now.get(&table.table) else { continue };
        let Some(labels) = table.newly_labelled(now, true) else { continue };
        newly.push((table, labels));
    }
    let noted =
        |(table, all): &(&mut TableProgress, EnumLabels)| (table.table.clone(), all.to_json());
    let noted: Vec<_> = newly.iter().map(noted).collect();
    let column = TableCopyColumn::EnumLabels;
    if noted.is_empty() || !session.note_of_tables(name, column, &noted).await? {
        return Ok(());
    }
    for (table, labels) in newly {
        table.enum_labels = labels;
    }
    Ok(())
}

/// The name of a type of a published table.
fn type_name(now: &PublishedTable, oid: u32) -> Option<TableName> {
    let known = now.types.iter().find(|known| known.oid == oid)?;
    Some(TableName { schema: known.schema.clone(), name: known.name.clone() })
}

/// What is to be done about a label that was renamed, and the name of its enum on the target.
struct LeftLabel {
    renamed: RenamedLabel,
    to_do: ForLabel,
    there: Option<TableName>,
}

/// Of tables, the labels that were renamed on the publisher and not on the target.
type LeftLabels = HashMap<TableName, Vec<LeftLabel>>;

impl Subscription {
    /// Notes the numbers of columns, and labels of enums, of copied tables that are not noted yet, where
    /// the stream has come to what is `published`: the catalogue may be ahead of it. True if that is
    /// still to come for one.
    pub(super) async fn note_unlogged(
        &self,
        session: &mut Session,
        (published, applied): (&[PublishedTable], Lsn),
        tables: &mut [TableProgress],
    ) -> Result<bool, ApplyError> {
        let name = self.spec.name.as_str();
        let now: Now<'_> = published.iter().map(|now| (&now.table, now)).collect();
        let of_columns =
            |table: &TableProgress, now| table.newly_numbered(now).filter(|all| !all.is_empty());
        let newly: Vec<(&PublishedTable, TableProgress)> = tables
            .iter()
            .filter_map(|table| Some((*now.get(&table.table)?, table)))
            .filter(|(now, table)| {
                of_columns(table, now).is_some() || table.newly_labelled(now, false).is_some()
            })
            .map(|(now, table)| (now, table.clone()))
            .collect();
        let seen: Vec<PublishedTable> = newly.iter().map(|(now, _)| (*now).clone()).collect();
        self.noting.keep(&seen).await;
        if newly.is_empty() || !session.keeps(TableCopyColumn::EnumLabels).await? {
            self.noting.all_done();
            return Ok(false);
        }
        let names: Vec<TableName> = newly.iter().map(|(_, table)| table.table.clone()).collect();
        let followed = load_definitions(session, name, &names).await?;
        let (mut waits, mut numbers, mut labels) = (false, Vec::new(), BTreeSet::new());
        for (now, table) in &newly {
            let definition = followed.get(&table.table);
            let is_followed = |followed: &Relation| same_columns(followed, &definition_of(now));
            // What is not followed yet is looked at once its first change has come.
            let wanted = of_columns(table, now).filter(|_| definition.is_some_and(is_followed));
            let wants_labels =
                table.newly_labelled(now, false).is_some() && definition.is_none_or(is_followed);
            if wanted.is_none() && !wants_labels {
                continue;
            }
            let when = (applied, SOON);
            let left = self.left_at_point(&self.noting, now, &seen, table, when).await?;
            if !matches!(left, Some(Touched::Nothing)) {
                waits = true;
                continue;
            }
            numbers.extend(wanted.map(|all| (table.table.clone(), all)));
            if wants_labels {
                labels.insert(table.table.clone());
            }
        }
        let noted: Vec<(TableName, String)> =
            numbers.iter().map(|(table, all)| (table.clone(), all.to_json())).collect();
        let column = TableCopyColumn::ColumnNumbers;
        if !noted.is_empty() && session.note_of_tables(name, column, &noted).await? {
            for (table, all) in numbers {
                let of_table = tables.iter_mut().filter(|known| known.table == table);
                of_table.for_each(|known| known.column_numbers = all.clone());
            }
        }
        note_labels(session, name, &now, tables, &labels).await?;
        if !waits {
            self.noting.all_done();
        }
        Ok(waits)
    }

    /// Looks for columns that were dropped and added again, or whose names others have got, without a
    /// change in between that tells: once everything is applied that was in the log when that was
    /// seen, the stream has not seen them go. And for labels of enums that were renamed, and not on the
    /// target. True if that is still to come for one.
    ///
    /// # Errors
    /// The first table that has such a column or label: what its rows have there is not in the log.
    pub(super) async fn look_for_unlogged(
        &self,
        session: &mut Session,
        published: &[PublishedTable],
        tables: &mut [TableProgress],
        applied: Lsn,
    ) -> Result<bool, ApplyError> {
        let left_labels = self.left_labels(session, published, tables).await?;
        let mut found: Vec<(&PublishedTable, &TableProgress, Unlogged)> = Vec::new();
        for now in published {
            let Some(table) = tables.iter().find(|table| table.table == now.table) else {
                continue;
            };
            if let Some(column) = table.replaced_column(now) {
                found.push((now, table, Unlogged::Column(column)));
            } else if left_labels.contains_key(&now.table) {
                found.push((now, table, Unlogged::Labels));
            }
        }
        let seen: Vec<PublishedTable> = found.iter().map(|(now, ..)| (*now).clone()).collect();
        self.unlogged.keep(&seen).await;
        for (now, table, _) in &found {
            let left = self
                .left_at_point(&self.unlogged, now, &seen, table, (applied, POINT_WITHIN))
                .await?;
            // Others would be waited for as long.
            if !matches!(left, Some(Touched::Nothing)) {
                return Ok(true);
            }
        }
        self.unlogged.all_done();
        let (mut left, mut followed) = (Vec::new(), Vec::new());
        for (now, table, what) in found {
            let numbers = match &what {
                Unlogged::Column(_) => {
                    match self.follow_as_published(session, now, applied).await {
                        // Nothing that streams has to wait for it.
                        Err(ApplyError::InUse(why)) => {
                            self.leave_for_later(why);
                            return Ok(true);
                        }
                        numbers => numbers?,
                    }
                }
                Unlogged::Labels => None,
            };
            match numbers {
                Some(numbers) if numbers.replaced(&ColumnNumbers::of(now)).is_none() => {
                    followed.push((now.table.clone(), numbers));
                }
                Some(_) | None => left.push((now, table, what)),
            }
        }
        let mut found = left;
        let is_column = |what: &Unlogged| matches!(what, Unlogged::Column(_));
        let of_columns = found.iter().any(|(.., what)| is_column(what));
        found.retain(|(.., what)| is_column(what) == of_columns);
        let Some((now, _, what)) = found.first() else {
            for (table, numbers) in followed {
                tables
                    .iter_mut()
                    .filter(|known| known.table == table)
                    .for_each(|known| known.column_numbers = numbers.clone());
            }
            return Ok(false);
        };
        let others: Vec<TableName> = found[1..].iter().map(|(now, ..)| now.table.clone()).collect();
        Err(match what {
            Unlogged::Column(column) => ApplyError::ColumnsMoved {
                subscription: self.spec.name.clone(),
                table: Box::new(now.table.clone()),
                oid: now.oid,
                column: quote_identifier(column),
                renames: Vec::new(),
                others,
            },
            Unlogged::Labels => {
                let labels = left_labels.get(&now.table).map(Vec::as_slice).unwrap_or_default();
                self.labels_renamed(now, labels, &others)
            }
        })
    }

    /// Renames columns of the target's table as those of the published one were, of which the log has
    /// nothing more. Gives back their numbers as they are noted then.
    async fn follow_as_published(
        &self,
        session: &mut Session,
        now: &PublishedTable,
        applied: Lsn,
    ) -> Result<Option<ColumnNumbers>, ApplyError> {
        let table = self.spec.schema.names.table(&now.table);
        let Some(target) = target_table(session, &table).await? else { return Ok(None) };
        let relation = definition_of(now);
        let follow = Follow {
            subscription: &self.spec.name,
            policy: self.spec.follow_ddl,
            puts_drops_off: false,
            at: applied,
            source: self.source.as_ref(),
            names: &self.spec.schema.names,
            table: &table,
            relation: &relation,
            is_copied_anew: false,
            root: OnceLock::new(),
        };
        session.simple("BEGIN").await?;
        match follow.follow(session, &target).await {
            Ok(_) => session.simple("COMMIT").await?,
            // Of all such tables it is said at once.
            Err(ApplyError::ColumnsMoved { .. }) => {
                session.simple("ROLLBACK").await?;
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        let noted = session.load_tables(&self.spec.name).await?;
        let noted = noted.into_iter().find(|noted| noted.table == now.table);
        Ok(noted.map(|noted| noted.column_numbers))
    }

    /// Labels of copied tables that have other names on the publisher than were noted, and not on the
    /// target. Of tables where it has followed, the new names are noted.
    async fn left_labels(
        &self,
        session: &mut Session,
        published: &[PublishedTable],
        tables: &mut [TableProgress],
    ) -> Result<LeftLabels, ApplyError> {
        let now: Now<'_> = published.iter().map(|now| (&now.table, now)).collect();
        let mut renamed: Vec<(&PublishedTable, Vec<RenamedLabel>)> = Vec::new();
        for table in tables.iter() {
            let Some(now) = now.get(&table.table) else { continue };
            let labels = table.renamed_labels(now);
            if !labels.is_empty() {
                renamed.push((now, labels));
            }
        }
        if renamed.is_empty() {
            return Ok(LeftLabels::new());
        }
        let types = renamed.iter().flat_map(|(now, labels)| {
            labels.iter().filter_map(|label| type_name(now, label.type_oid))
        });
        let types: BTreeSet<TableName> = types.collect();
        let enums = session.enums_named(&types.into_iter().collect::<Vec<_>>()).await?;
        let targets = renamed.iter().map(|(now, _)| self.spec.schema.names.table(&now.table));
        let targets = target_tables(session, &targets.collect::<Vec<_>>()).await?;
        let (mut left, mut have_followed) = (LeftLabels::new(), BTreeSet::new());
        for ((now, labels), target) in renamed.into_iter().zip(targets) {
            let of_table = labels.into_iter().map(|renamed| {
                let there = type_name(now, renamed.type_oid).and_then(|name| enums.get(&name));
                let there = there.filter(|there| {
                    target.as_ref().is_none_or(|target| has_enum(now, &renamed, target, there.oid))
                });
                let to_do = renamed.to_do(there);
                LeftLabel { renamed, to_do, there: there.map(|there| there.name.clone()) }
            });
            let of_table = of_table.filter(|label| label.to_do != ForLabel::Nothing);
            let of_table: Vec<LeftLabel> = of_table.collect();
            match of_table.is_empty() {
                true => drop(have_followed.insert(now.table.clone())),
                false => drop(left.insert(now.table.clone(), of_table)),
            }
        }
        note_labels(session, &self.spec.name, &now, tables, &have_followed).await?;
        Ok(left)
    }

    /// A change with a label that the target's enum does not have: if it is one that was renamed, that
    /// is what is to be done there, and nothing else.
    pub(super) async fn of_renamed_label(&self, mut failed: Box<FailedChange>) -> ApplyError {
        let Cause::Refused(refused) = &failed.cause else { return ApplyError::Change(failed) };
        let Some((of, label)) = remedy::enum_and_label(refused) else {
            return ApplyError::Change(failed);
        };
        let asked = async {
            let name = application_name(&format!("{} looks for labels", self.spec.name));
            let mut session = Session::connect(&self.spec.target, &name).await?;
            let tables = session.load_tables(&self.spec.name).await?;
            session.connection.close().await;
            let published = self.source.published_tables().await?;
            let renamed = published.iter().find_map(|now| {
                let table = tables.iter().find(|table| table.table == now.table)?;
                let mut renamed = table.renamed_labels(now).into_iter();
                renamed.find(|renamed| renamed.to == label && !renamed.was_taken)
            });
            Ok::<_, ApplyError>(renamed)
        };
        match tokio::time::timeout(ANSWER_WITHIN, asked).await {
            Ok(Ok(Some(renamed))) => {
                failed.remedy = remedy::rename_label(of, &renamed.from, &renamed.to).into();
            }
            Ok(Ok(None)) | Err(_) => {}
            Ok(Err(error)) => tracing::debug!("renamed labels cannot be looked for: {error}"),
        }
        ApplyError::Change(failed)
    }

    fn labels_renamed(
        &self,
        now: &PublishedTable,
        labels: &[LeftLabel],
        others: &[TableName],
    ) -> ApplyError {
        let of = labels.first().and_then(|label| type_name(now, label.renamed.type_oid));
        let of = of.map_or_else(|| "?".to_owned(), |of| of.to_string());
        let (mut told, mut renames) = (Vec::new(), Vec::new());
        for LeftLabel { renamed, there, .. } in labels {
            let (from, to) = (quote_literal(&renamed.from), quote_literal(&renamed.to));
            told.push(format!("{from} is {to} now"));
            let there = there.as_ref().map_or_else(|| of.clone(), TableName::to_string);
            renames.push(format!("ALTER TYPE {there} RENAME VALUE {from} TO {to}"));
        }
        let why = labels.iter().find_map(|label| match label.to_do {
            ForLabel::CopyAnew(why) => Some(why),
            ForLabel::Nothing | ForLabel::Rename => None,
        });
        let next = match why {
            None => format!("On the target: {}. Then go on (farshore resume)", renames.join("; ")),
            Some(why) => format!(
                "To rename them on the target is not enough ({why}). To have it copied anew: {}",
                remedy::resync(&self.spec.name, Some(&now.table))
            ),
        };
        ApplyError::Setup(format!(
            "subscription \"{}\": labels of enum {of} have other names on the publisher ({}), and \
             rows of {} on the target have the old ones{}. {next}",
            self.spec.name,
            told.join(", "),
            now.table,
            others_told(others)
        ))
    }
}

/// Whether all columns of the target have `there` that have the label's enum on the publisher.
fn has_enum(
    now: &PublishedTable,
    renamed: &RenamedLabel,
    target: &TargetTable,
    there: u32,
) -> bool {
    let of_enum = now
        .columns
        .iter()
        .filter(|column| is_made_of(&now.types, column.type_oid, renamed.type_oid));
    let mut on_target =
        of_enum.filter_map(|column| target.columns.iter().find(|there| there.name == column.name));
    on_target.all(|column| is_made_of(&target.types, column.type_oid, there))
}
