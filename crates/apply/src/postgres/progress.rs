//! The `farshore` schema on a target: what a subscription has applied and copied.
//!
//! | table | a row per | written |
//! | --- | --- | --- |
//! | `subscription` | subscription | with every target transaction |
//! | `table_copy` | copied table | when its copy starts and ends |
//! | `range_copy` | copied range of an unfinished table | with the range's rows |
//! | `skip_request` | transaction to be left out | by `farshore skip`; deleted with that transaction |
//! | `conflicts` | change that was left out or overwrote rows | with its transaction |
//! | `after_copy` | index or constraint that a created table still lacks | with the table, and with the index |

mod column_numbers;
mod enum_labels;
mod tables;

pub use column_numbers::ColumnNumbers;
pub(crate) use enum_labels::ForLabel;
pub use enum_labels::{EnumLabels, RenamedLabel};

use crate::ApplyError;
use crate::postgres::noted_definition::name_in;
use crate::postgres::schema::foreign_keys_waiting_sql;
use crate::postgres::session::{Session, lock_sql};
use crate::status::SourceTransaction;
use farshore_capture::publication::{PublishedTable, TableName};
use farshore_capture::snapshot::BlockRange;
use farshore_model::{Lsn, PgTime};
use farshore_pg::{Question, Row, text_array};
use std::collections::BTreeSet;
use std::time::Duration;

pub(super) use tables::SCHEMA_LOCK;
pub(crate) use tables::TableCopyColumn;
use tables::{LATEST, is_true};

/// The newest transaction may not be kept: then it is null.
const LOAD_PROGRESS: &str = "SELECT state, applied, publisher, publication, \
    pg_catalog.to_jsonb(s) ->> 'newest', pg_catalog.to_jsonb(s) ? 'newest' \
    FROM farshore.subscription s WHERE name = $1";

/// A definition begins with its tag, the table's OID and its name, which is given where it is another
/// than that of the copy. Where `table_copy` belongs to a role that has
/// not added the last columns yet, their names find those beside it.
const LOAD_TABLES: &str = "SELECT noted.* FROM (SELECT NULL::bigint AS attached, \
      NULL::jsonb AS column_numbers, NULL::jsonb AS enum_labels) AS lacking, LATERAL \
    (SELECT schema_name, table_name, state, copied_at, membership, \
      CASE WHEN pg_catalog.length(definition) > 5 THEN \
        ('x' || pg_catalog.encode(pg_catalog.substr(definition, 2, 4), 'hex'))::bit(32)::bigint END, \
      state <> 'copied' AND file_node = 0 AND NOT EXISTS (SELECT FROM farshore.range_copy r \
        WHERE (r.subscription, r.schema_name, r.table_name) \
          = (c.subscription, c.schema_name, c.table_name)), attached, \
      CASE WHEN pg_catalog.length(definition) > 5 AND pg_catalog.substr(definition, 6, \
        pg_catalog.length(named)) <> named THEN pg_catalog.substr(definition, 6, 1000) END, \
      column_numbers::text, enum_labels::text \
    FROM farshore.table_copy c, LATERAL (SELECT pg_catalog.convert_to(schema_name, 'UTF8') || zero \
      || pg_catalog.convert_to(table_name, 'UTF8') || zero AS named \
      FROM pg_catalog.decode('00', 'hex') AS zero) AS known \
    WHERE subscription = $1) AS noted ORDER BY 1, 2";

const SKIPS: &str = "SELECT lsn FROM farshore.skip_request WHERE subscription = $1";

/// Moves progress on from where the last group left it. If it is not there (another writer was
/// here), that is an error of [`ADVANCE_FAILED`], and with it the transaction cannot be committed.
pub const ADVANCE: &str = "WITH moved AS (UPDATE farshore.subscription SET applied = $3, \
    newest = coalesce($5, newest), state = $4, applied_at = clock_timestamp() WHERE name = $1 AND applied = $2 RETURNING 1) \
    SELECT CASE count(*) WHEN 1 THEN 1 ELSE ('progress of a Farshore subscription is not where it \
    was left; rows moved: ' || count(*))::int END FROM moved";

/// SQLSTATE of an [`ADVANCE`] that does not meet its row: invalid_text_representation.
pub const ADVANCE_FAILED: &str = "22P02";

/// What of [`ADVANCE`] is left out where `farshore.subscription` belongs to a role that has not added
/// the column yet.
pub const ADVANCE_NEWEST: &str = "newest = coalesce($5, newest), ";

/// Types of [`ADVANCE`]'s parameters: text, pg_lsn, pg_lsn, text, text.
pub const ADVANCE_TYPES: [u32; 5] = [25, 3220, 3220, 25, 25];

/// State words in `farshore.subscription.state`.
pub mod state {
    /// Tables are being copied.
    pub const COPYING: &str = "copying";
    /// All copied, at different points.
    pub const CATCHING_UP: &str = "catching-up";
    /// Every visible state is a prefix of the publisher's commit order.
    pub const STREAMING: &str = "streaming";
}

/// State word of a finished table in `farshore.table_copy.state`.
pub const TABLE_COPIED: &str = "copied";
/// State word of an unfinished table in `farshore.table_copy.state`.
pub const TABLE_COPYING: &str = "copying";

/// The ranges of an unfinished table that are on the target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangesDone {
    /// Where the table was kept on the publisher when the copy began.
    pub file_node: u32,
    /// Which ranges.
    pub ranges: Vec<BlockRange>,
}

/// A subscription's row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// State word.
    pub state: String,
    /// Newest applied position.
    pub applied: Lsn,
    /// System identifier of the publisher.
    pub publisher: String,
    /// Publication as `site/publication`.
    pub publication: String,
    /// The newest transaction that was applied, if that is known: none may have been since the copy.
    pub newest: Option<SourceTransaction>,
    /// Whether it is kept.
    pub keeps_newest: bool,
}

impl Progress {
    /// Whether an operator asked for all of its tables to be copied anew, and nothing was copied
    /// since: then nothing on the target is what was applied, and it may be of another publisher.
    pub fn is_to_be_copied_anew(&self, tables: &[TableProgress]) -> bool {
        // A first copy may stand at the log's zero, too; its tables are not asked for.
        self.state == state::COPYING
            && self.applied == Lsn::ZERO
            && tables.iter().all(|table| table.asked_for)
    }
}

/// A step of progress, committed with the rows that it stands for.
#[derive(Clone, Copy, Debug)]
pub struct ProgressStep {
    /// Where the group before leaves progress.
    pub from: Lsn,
    /// Everything up to here is on the target then.
    pub to: Lsn,
    /// The newest transaction between the two, if one ends there.
    pub newest: Option<SourceTransaction>,
    /// What the target is then ([`state`]).
    pub state: &'static str,
}

/// A transaction as `farshore.subscription.newest` has it.
pub fn newest_text(newest: SourceTransaction) -> String {
    format!("{} {}", newest.position, newest.commit_time.0)
}

fn parse_newest(text: &str) -> Option<SourceTransaction> {
    let (position, micros) = text.split_once(' ')?;
    let commit_time = PgTime(micros.parse().ok()?);
    Some(SourceTransaction { position: position.parse().ok()?, commit_time })
}

/// What the target has of a subscription.
#[derive(Debug)]
pub struct Opened {
    /// Its row, if there is one.
    pub progress: Option<Progress>,
    /// Copies that were begun or finished.
    pub tables: Vec<TableProgress>,
    /// What was asked for.
    pub requests: Requests,
}

/// What a subscription is still to do.
#[derive(Debug)]
pub struct Requests {
    /// Positions of transactions that are to be left out.
    pub skips: BTreeSet<Lsn>,
    /// Foreign keys are still to be added.
    pub foreign_keys_wait: bool,
}

/// A table's copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableProgress {
    /// Which table.
    pub table: TableName,
    /// Whether the copy is complete.
    pub copied: bool,
    /// Consistent point of the copy.
    pub copied_at: Lsn,
    /// Which membership in the publication it was copied for.
    pub membership: u32,
    /// How it was attached then below the table that has this membership; `None` where it has it
    /// itself, and where that is not known: earlier versions did not note it.
    pub attached: Option<u32>,
    /// The numbers that its columns had then, as far as they are known.
    pub column_numbers: ColumnNumbers,
    /// What labels of its enums were called then, as far as that is known.
    pub enum_labels: EnumLabels,
    /// The publisher's OID of it, where it is known.
    pub oid: Option<u32>,
    /// The name that it had on the publisher when it was changed and the copy was not.
    pub renamed: Option<TableName>,
    /// It is to be copied whatever it is now: somebody asked for that.
    pub asked_for: bool,
}

impl TableProgress {
    /// A table of which nothing is copied yet.
    pub fn not_begun(published: &PublishedTable) -> TableProgress {
        TableProgress {
            table: published.table.clone(),
            copied: false,
            copied_at: Lsn::ZERO,
            membership: published.membership,
            attached: published.attached_by(published.membership),
            column_numbers: ColumnNumbers::of(published),
            enum_labels: EnumLabels::of(published),
            oid: Some(published.oid),
            renamed: None,
            asked_for: false,
        }
    }

    /// Whether `published` is the table that was copied, and has been published ever since: by
    /// the same membership, or by that of a partitioned table above it which it never left. Where how
    /// it was attached is not known, it counts as attached ever since. What lacks changes that were
    /// made under another name is not that table any more.
    pub fn is_still(&self, published: &PublishedTable) -> bool {
        let is_same_table =
            self.renamed.is_none() && self.oid.is_none_or(|oid| oid == published.oid);
        let is_published_still = self.membership == published.membership
            || published.memberships_above.contains(&self.membership);
        let is_attached_still = match (self.attached, published.attached_by(self.membership)) {
            (Some(noted), Some(now)) => noted == now,
            (None, _) | (_, None) => true,
        };
        let is_still = is_same_table && is_published_still && is_attached_still;
        self.table == published.table && (self.asked_for || is_still)
    }

    /// A column of `published` that is another one than was copied, under the same name and of the
    /// same type. Where the stream has not come to now, it may still see that one go.
    pub fn replaced_column(&self, published: &PublishedTable) -> Option<String> {
        let replaced = || self.column_numbers.replaced(&ColumnNumbers::of(published));
        self.is_copy_of(published).then(replaced).flatten()
    }

    /// Labels of enums of `published` that have other names than when they were noted.
    pub fn renamed_labels(&self, published: &PublishedTable) -> Vec<RenamedLabel> {
        match self.is_copy_of(published) {
            true => self.enum_labels.renamed(&published.labels),
            false => Vec::new(),
        }
    }

    /// Whether it is copied and stays so.
    fn is_copy_of(&self, published: &PublishedTable) -> bool {
        self.copied && !self.asked_for && self.is_still(published)
    }

    /// The numbers of columns of `published`, which is still this, with those that were noted, where
    /// there are more of them now, and none is another one's.
    pub fn newly_numbered(&self, published: &PublishedTable) -> Option<ColumnNumbers> {
        let now = ColumnNumbers::of(published);
        let is_noted = self.is_copy_of(published) && self.column_numbers.replaced(&now).is_none();
        is_noted.then(|| self.column_numbers.with(&now)).flatten()
    }

    /// The labels of enums of `published`, which is still this, with those that were noted, where that
    /// is not the same; those that `have_followed` may have other names now.
    pub fn newly_labelled(
        &self,
        published: &PublishedTable,
        have_followed: bool,
    ) -> Option<EnumLabels> {
        let is_noted = self.is_copy_of(published)
            && (have_followed || self.renamed_labels(published).is_empty());
        is_noted.then(|| self.enum_labels.with(&EnumLabels::of(published))).flatten()
    }

    /// Whether a start has something to do about what of `published` the log does not have: to note
    /// new columns and labels, or to look at a column that was replaced or a label that was renamed.
    pub fn is_otherwise(&self, published: &PublishedTable) -> bool {
        // Where they are not kept nothing is ever noted.
        let in_columns = !self.column_numbers.is_empty()
            && (self.newly_numbered(published).is_some()
                || self.replaced_column(published).is_some());
        let in_labels =
            !self.enum_labels.is_empty() && self.newly_labelled(published, true).is_some();
        in_columns || in_labels
    }

    /// How `published`, which is still this, is attached, where that is to be noted: it is known now
    /// and was not.
    pub fn newly_attached(&self, published: &PublishedTable) -> Option<u32> {
        let attached =
            published.attached_by(self.membership).filter(|_| self.attached.is_none())?;
        (!self.asked_for && self.is_still(published)).then_some(attached)
    }
}

impl Session {
    /// Takes the subscription's lock ([`Session::lock_subscription`]), makes the `farshore` schema
    /// where it is missing, and reads what it has of the subscription.
    pub async fn open_subscription(
        &mut self,
        name: &str,
        wait: Duration,
    ) -> Result<Opened, ApplyError> {
        let (lock, which) = (lock_sql(name, wait), [Some(name)]);
        let waiting = foreign_keys_waiting_sql();
        let read = [LOAD_PROGRESS, LOAD_TABLES, SKIPS, &waiting];
        let read = read.map(|sql| Question::Extended(sql, &which));
        let questions = [Question::Simple(&lock), Question::Simple(LATEST)];
        let (locked, latest, at_once) = if self.has_seen_schema {
            let ([locked, latest], [progress, tables, skips, waiting]) = (questions, read);
            let questions = [locked, latest, progress, tables, skips, waiting];
            let [locked, latest, answers @ ..] = self.ask(questions).await?;
            (locked, latest, Some(answers))
        } else {
            let [locked, latest] = self.ask(questions).await?;
            (locked, latest, None)
        };
        if let Err(error) = locked {
            return Err(self.locked_by(name, error).await);
        }
        let is_latest = is_true(&latest?);
        if is_latest {
            self.keeps.extend(TableCopyColumn::ALL.map(|column| (column, true)));
        } else {
            self.ensure_schema().await?;
        }
        let [progress, tables, skips, waiting] = match at_once {
            Some(answers) if is_latest => answers,
            Some(_) | None => self.ask(read).await?,
        };
        Ok(Opened {
            progress: self.progress_of(&progress?)?,
            tables: self.tables_of(&tables?)?,
            requests: self.requests_of(&skips?, &waiting?)?,
        })
    }

    /// The subscription's row, if there is one.
    pub async fn load_progress(&mut self, name: &str) -> Result<Option<Progress>, ApplyError> {
        let rows = self.query(LOAD_PROGRESS, &[Some(name)]).await?;
        self.progress_of(&rows)
    }

    fn progress_of(&self, rows: &[Row]) -> Result<Option<Progress>, ApplyError> {
        let Some(row) = rows.first() else { return Ok(None) };
        let text = |i: usize| row.get(i).unwrap_or_default().to_owned();
        Ok(Some(Progress {
            state: text(0),
            applied: row.parse(1).map_err(|error| self.error(error))?,
            publisher: text(2),
            publication: text(3),
            newest: row.get(4).and_then(parse_newest),
            keeps_newest: row.get(5) == Some("t"),
        }))
    }

    /// Copies begun or finished.
    pub async fn load_tables(&mut self, name: &str) -> Result<Vec<TableProgress>, ApplyError> {
        let rows = self.query(LOAD_TABLES, &[Some(name)]).await?;
        self.tables_of(&rows)
    }

    fn tables_of(&self, rows: &[Row]) -> Result<Vec<TableProgress>, ApplyError> {
        rows.iter()
            .map(|row| {
                let table = TableName {
                    schema: row.get(0).unwrap_or_default().to_owned(),
                    name: row.get(1).unwrap_or_default().to_owned(),
                };
                Ok(TableProgress {
                    renamed: row.get(8).and_then(name_in).filter(|noted| *noted != table),
                    table,
                    copied: row.get(2) == Some(TABLE_COPIED),
                    copied_at: row.parse(3).map_err(|error| self.error(error))?,
                    membership: row.parse(4).map_err(|error| self.error(error))?,
                    oid: row.get(5).and_then(|oid| oid.parse().ok()).filter(|oid| *oid != 0),
                    asked_for: row.get(6) == Some("t"),
                    attached: row.get(7).and_then(|attached| attached.parse().ok()),
                    column_numbers: row.get(9).map(ColumnNumbers::from_json).unwrap_or_default(),
                    enum_labels: row.get(10).map(EnumLabels::from_json).unwrap_or_default(),
                })
            })
            .collect()
    }

    /// Notes that all is copied anew from another publisher than before. What was to be left out was a
    /// position in that one's log.
    pub async fn follow_publisher(
        &mut self,
        name: &str,
        publisher: &str,
    ) -> Result<(), ApplyError> {
        let sql = "WITH forgotten AS (DELETE FROM farshore.skip_request WHERE subscription = $1) \
             UPDATE farshore.subscription SET publisher = $2 WHERE name = $1";
        self.execute(sql, &[Some(name), Some(publisher)]).await.map(drop)
    }

    /// Says that tables stand at different points from here on, until the stream has passed the
    /// newest of them.
    pub async fn mark_catching_up(&mut self, name: &str) -> Result<(), ApplyError> {
        let sql = "UPDATE farshore.subscription SET state = $2 WHERE name = $1 AND state <> $2";
        self.execute(sql, &[Some(name), Some(state::CATCHING_UP)]).await.map(drop)
    }

    /// Forgets copies that were begun of tables which are no longer published.
    pub async fn forget_begun(
        &mut self,
        name: &str,
        published: &[PublishedTable],
        known: &[TableProgress],
    ) -> Result<(), ApplyError> {
        let has_left =
            |known: &&TableProgress| !published.iter().any(|table| table.table == known.table);
        for TableProgress { table, .. } in known.iter().filter(|k| !k.copied).filter(has_left) {
            tracing::warn!(
                subscription = %name, %table,
                "the table left the publication while it was copied; its rows on the target are \
                 not complete, and stay"
            );
            let which = [Some(name), Some(table.schema.as_str()), Some(table.name.as_str())];
            for kept in ["table_copy", "range_copy"] {
                let sql = format!(
                    "DELETE FROM farshore.{kept} \
                     WHERE subscription = $1 AND schema_name = $2 AND table_name = $3"
                );
                self.execute(&sql, &which).await?;
            }
        }
        Ok(())
    }

    /// Notes that the copy of a table begins, at `point`.
    pub(super) async fn note_begun(
        &mut self,
        name: &str,
        published: &PublishedTable,
        point: Lsn,
    ) -> Result<(), ApplyError> {
        let PublishedTable { table, file_node, membership, .. } = published;
        let (point, file_node) = (point.to_string(), file_node.to_string());
        let attached = published.attached_by(*membership).map(|attached| attached.to_string());
        let membership = membership.to_string();
        let mut parameters = vec![
            Some(name),
            Some(table.schema.as_str()),
            Some(table.name.as_str()),
            Some(TABLE_COPYING),
            Some(point.as_str()),
            Some(file_node.as_str()),
            Some(membership.as_str()),
        ];
        let numbers = ColumnNumbers::of(published).to_json();
        let labels = EnumLabels::of(published).to_json();
        let (mut columns, mut values, mut set) = (String::new(), String::new(), String::new());
        let mut also = |column: &str, value: &str| {
            columns.push_str(&format!(", {column}"));
            values.push_str(&format!(", {value}"));
            set.push_str(&format!(", {column} = excluded.{column}"));
        };
        if self.keeps(TableCopyColumn::Attached).await? {
            parameters.push(attached.as_deref());
            also("attached", &format!("${}::text::bigint", parameters.len()));
        }
        if self.keeps(TableCopyColumn::ColumnNumbers).await? {
            parameters.push(Some(&numbers));
            also("column_numbers", &format!("${}::text::jsonb", parameters.len()));
        }
        if self.keeps(TableCopyColumn::EnumLabels).await? {
            parameters.push(Some(&labels));
            also("enum_labels", &format!("${}::text::jsonb", parameters.len()));
        }
        let sql = format!(
            "INSERT INTO farshore.table_copy \
             (subscription, schema_name, table_name, state, copied_at, file_node, membership{columns}) \
             VALUES ($1, $2, $3, $4, $5::text::pg_lsn, $6::text::bigint, $7::text::bigint{values}) \
             ON CONFLICT (subscription, schema_name, table_name) DO UPDATE SET \
             state = excluded.state, copied_at = excluded.copied_at, \
             file_node = excluded.file_node, membership = excluded.membership{set}"
        );
        self.execute(&sql, &parameters).await.map(drop)
    }

    /// Notes that a table which was published by a partitioned table above it is now published by
    /// itself too: from here on it may leave that partitioned table.
    pub async fn note_membership(
        &mut self,
        name: &str,
        published: &PublishedTable,
    ) -> Result<(), ApplyError> {
        let table = &published.table;
        self.execute(
            "UPDATE farshore.table_copy SET membership = $4::text::bigint \
             WHERE subscription = $1 AND schema_name = $2 AND table_name = $3",
            &[
                Some(name),
                Some(&table.schema),
                Some(&table.name),
                Some(&published.membership.to_string()),
            ],
        )
        .await?;
        self.note_attached(name, table, published.attached_by(published.membership)).await
    }

    /// Notes how a table is attached on the publisher below the one whose membership is noted of it.
    async fn note_attached(
        &mut self,
        name: &str,
        table: &TableName,
        attached: Option<u32>,
    ) -> Result<(), ApplyError> {
        if !self.keeps(TableCopyColumn::Attached).await? {
            return Ok(());
        }
        let attached = attached.map(|attached| attached.to_string());
        self.execute(
            "UPDATE farshore.table_copy SET attached = $4::text::bigint \
             WHERE subscription = $1 AND schema_name = $2 AND table_name = $3 \
               AND attached IS DISTINCT FROM $4::text::bigint",
            &[Some(name), Some(&table.schema), Some(&table.name), attached.as_deref()],
        )
        .await
        .map(drop)
    }

    /// Notes at once how tables are attached that an earlier version copied; false where that is not
    /// kept.
    pub async fn note_attached_all(
        &mut self,
        name: &str,
        attached: &[(TableName, u32)],
    ) -> Result<bool, ApplyError> {
        if !self.keeps(TableCopyColumn::Attached).await? {
            return Ok(false);
        }
        let schemas = text_array(attached.iter().map(|(table, _)| table.schema.as_str()));
        let names = text_array(attached.iter().map(|(table, _)| table.name.as_str()));
        let numbers: Vec<String> = attached.iter().map(|(_, number)| number.to_string()).collect();
        let numbers = text_array(numbers.iter().map(String::as_str));
        self.execute(
            "UPDATE farshore.table_copy t SET attached = now.attached \
             FROM unnest($2::text::text[], $3::text::text[], $4::text::bigint[]) \
               AS now (schema_name, table_name, attached) \
             WHERE t.subscription = $1 \
               AND (t.schema_name, t.table_name) = (now.schema_name, now.table_name)",
            &[Some(name), Some(&schemas), Some(&names), Some(&numbers)],
        )
        .await?;
        Ok(true)
    }

    /// What was asked for, and is still to be done.
    pub async fn load_requests(&mut self, name: &str) -> Result<Requests, ApplyError> {
        let waiting = foreign_keys_waiting_sql();
        let which = [Some(name)];
        let questions = [SKIPS, &waiting].map(|sql| Question::Extended(sql, &which));
        let [skips, waiting] = self.ask(questions).await?;
        self.requests_of(&skips?, &waiting?)
    }

    fn requests_of(&self, skips: &[Row], waiting: &[Row]) -> Result<Requests, ApplyError> {
        let skips: Result<_, _> =
            skips.iter().map(|row| row.parse(0).map_err(|error| self.error(error))).collect();
        Ok(Requests { skips: skips?, foreign_keys_wait: !waiting.is_empty() })
    }

    /// What is on the target of a table whose copy was begun.
    pub async fn load_ranges(
        &mut self,
        name: &str,
        table: &TableName,
    ) -> Result<RangesDone, ApplyError> {
        let rows = self
            .query(
                "SELECT t.file_node, r.start_block, r.end_block \
                 FROM farshore.table_copy t LEFT JOIN farshore.range_copy r \
                   USING (subscription, schema_name, table_name) \
                 WHERE subscription = $1 AND schema_name = $2 AND table_name = $3 ORDER BY 2",
                &[Some(name), Some(&table.schema), Some(&table.name)],
            )
            .await?;
        let mut done = RangesDone { file_node: 0, ranges: Vec::new() };
        for row in &rows {
            done.file_node = row.parse(0).map_err(|error| self.error(error))?;
            if row.get(1).is_none() {
                continue;
            }
            let start = row.parse(1).map_err(|error| self.error(error))?;
            let end = match row.get(2) {
                Some(_) => Some(row.parse(2).map_err(|error| self.error(error))?),
                None => None,
            };
            done.ranges.push(BlockRange { start, end });
        }
        Ok(done)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    fn progress(state: &str, applied: Lsn) -> Progress {
        Progress {
            state: state.to_owned(),
            applied,
            publisher: "1".to_owned(),
            publication: "p".to_owned(),
            newest: None,
            keeps_newest: true,
        }
    }

    fn table(asked_for: bool, copied: bool) -> TableProgress {
        TableProgress {
            table: TableName { schema: "public".to_owned(), name: "t".to_owned() },
            copied,
            copied_at: Lsn(7),
            membership: 1,
            oid: Some(16_384),
            asked_for,
            renamed: None,
            attached: None,
            column_numbers: ColumnNumbers::default(),
            enum_labels: EnumLabels::default(),
        }
    }

    #[test]
    fn only_what_was_asked_for_as_a_whole_and_is_not_begun_may_be_of_another_publisher() {
        let (asked, begun, copied) = (table(true, false), table(false, false), table(false, true));
        let all = [asked.clone()];
        let whole = progress(state::COPYING, Lsn::ZERO);
        assert!(whole.is_to_be_copied_anew(&[asked.clone(), asked.clone()]));
        assert!(!whole.is_to_be_copied_anew(&[asked.clone(), begun]));
        assert!(!whole.is_to_be_copied_anew(&[asked.clone(), copied.clone()]));
        assert!(!progress(state::COPYING, Lsn(9)).is_to_be_copied_anew(&all));
        // One table of several was asked for.
        for word in [state::CATCHING_UP, state::STREAMING] {
            let one = progress(word, Lsn(9));
            assert!(!one.is_to_be_copied_anew(&[asked.clone(), copied.clone()]), "{word}");
            assert!(!one.is_to_be_copied_anew(&all), "{word}");
        }
    }

    /// A partition that is published by the tables of these memberships above it, attached so.
    pub(crate) fn leaf(membership: u32, above: &[(u32, u32)]) -> PublishedTable {
        PublishedTable {
            oid: 1,
            table: TableName { schema: "s".into(), name: "leaf".into() },
            columns: Vec::new(),
            types: Vec::new(),
            labels: Vec::new(),
            row_filter: None,
            membership,
            memberships_above: above.iter().map(|(membership, _)| *membership).collect(),
            attached_above: above.iter().map(|(_, attached)| *attached).collect(),
            file_node: 2,
            blocks: 0,
            bytes: 0,
            binary_safe: true,
            binary_copy: true,
            partitioned: false,
            unsent_key: None,
            updates_untold: false,
            old_keys_untold: false,
        }
    }

    #[test]
    fn a_partition_that_was_detached_and_attached_again_is_not_what_was_copied() {
        let copied = TableProgress::not_begun(&leaf(10, &[(10, 700)]));
        assert_eq!(copied.attached, Some(700));
        assert!(copied.is_still(&leaf(10, &[(10, 700)])));
        assert!(!copied.is_still(&leaf(10, &[(10, 701)])));
        // Asked for, it is emptied and copied whatever it is.
        let asked_for = TableProgress { asked_for: true, ..copied.clone() };
        assert!(asked_for.is_still(&leaf(10, &[(10, 701)])));
        // Published by itself too since: it may leave that table then.
        assert!(copied.is_still(&leaf(12, &[(10, 700)])));
        let by_itself = TableProgress::not_begun(&leaf(12, &[(10, 700)]));
        assert_eq!(by_itself.attached, None);
        assert!(by_itself.is_still(&leaf(12, &[])) && by_itself.is_still(&leaf(12, &[(10, 701)])));
        // What is detached from a table in between has not left the other one.
        assert!(copied.is_still(&leaf(9, &[(9, 600), (10, 700)])));
    }

    #[test]
    fn how_it_is_attached_is_noted_once_where_an_earlier_version_did_not() {
        let now = leaf(10, &[(10, 700)]);
        let earlier = TableProgress { attached: None, ..TableProgress::not_begun(&now) };
        assert!(earlier.is_still(&now));
        assert_eq!(earlier.newly_attached(&now), Some(700));
        assert_eq!(TableProgress::not_begun(&now).newly_attached(&now), None);
        // A site of an earlier version does not tell.
        let untold = PublishedTable { attached_above: Vec::new(), ..now.clone() };
        assert_eq!(earlier.newly_attached(&untold), None);
        assert!(TableProgress::not_begun(&now).is_still(&untold));
    }

    #[test]
    fn what_was_changed_under_another_name_is_not_what_was_copied() {
        let now = leaf(10, &[]);
        let copied = TableProgress::not_begun(&now);
        assert!(copied.is_still(&now));
        let renamed = TableProgress { renamed: Some(now.table.clone()), ..copied };
        assert!(!renamed.is_still(&now));
        assert!(TableProgress { asked_for: true, ..renamed }.is_still(&now));
    }
}
