//! One change that is at odds with the target, dealt with as the policy says, and recorded in
//! `farshore.conflicts` in the same target transaction.
//!
//! The change has a savepoint of its own ([`CHANGE`]), rolled back to before anything here begins.
//! Publisher's row over target's rows: an insert that meets its own key there becomes an update of
//! that row; other rows that hold a value it must have (unique, exclusion) are deleted; an update
//! whose row is missing becomes an insert if the publisher sent the whole row. Where rows are found
//! by all of their old values, the one with the same primary key is the row, whatever the rest of it.
//! What cannot be stored even so is left out.

use crate::ApplyError;
use crate::conflict::{self, OnConflict};
use crate::error::{Cause, FailedChange, is_about_data};
use crate::postgres::answers;
use crate::postgres::pipeline::{Expect, PipelineError};
use crate::postgres::session::Session;
use crate::postgres::statements::{Likeness, Shape, TargetRelation};
use crate::postgres::writer::{Writer, parameter, setting_all, shape_of};
use farshore_capture::publication::TableName;
use farshore_model::quote_identifier;
use farshore_model::transaction::Header;
use farshore_pg::{partition_tree, quote_literal};
use farshore_wire::backend::ServerError;
use farshore_wire::frontend::Format;
use farshore_wire::pgoutput::stored::decode_stored;
use farshore_wire::pgoutput::{Tuple, Value};

/// Savepoint of a run of changes, or of one change.
const CHANGE: &str = "farshore_change";
/// Savepoint of an attempt within it.
const ATTEMPT: &str = "farshore_attempt";
/// Savepoint of the record of a conflict.
const RECORDING: &str = "farshore_record";
/// SQLSTATE of a character that the target's encoding has not got: untranslatable_character.
const UNTRANSLATABLE: &str = "22P05";
/// Constraints that one row may be cleared of.
const ATTEMPTS_MAX: usize = 64;
/// Rows of the target kept in one record.
const EXISTING_MAX: usize = 8;

const RECORD: &str = "INSERT INTO farshore.conflicts \
    (subscription, schema_name, table_name, operation, key, action, sqlstate, reason, source_xid, \
    source_lsn, commit_time, old_row, new_row, existing_row) VALUES ($1, $2, $3, $4, \
    $5::text::jsonb, $6, $7, $8, $9::text::bigint, $10::text::pg_lsn, $11::text::timestamptz, \
    $12::text::jsonb, $13::text::jsonb, $14::text::jsonb)";

/// Foreign keys by which to delete rows of a table (`$1`) does more than that: CASCADE, SET NULL and SET
/// DEFAULT, where their triggers fire in this session (PostgreSQL docs: "ALTER TABLE", ENABLE REPLICA
/// TRIGGER). Each with the table that refers, its columns, and those that they refer to.
const KEYS_THAT_TAKE_OTHERS: &str = "SELECT c.conname, pg_catalog.format('%I.%I', n.nspname, r.relname), \
      (SELECT pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ' ORDER BY k.n) \
       FROM unnest(c.conkey) WITH ORDINALITY AS k (number, n) \
       JOIN pg_catalog.pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = k.number), \
      (SELECT pg_catalog.string_agg(pg_catalog.quote_ident(a.attname), ', ' ORDER BY k.n) \
       FROM unnest(c.confkey) WITH ORDINALITY AS k (number, n) \
       JOIN pg_catalog.pg_attribute a ON a.attrelid = c.confrelid AND a.attnum = k.number) \
    FROM pg_catalog.pg_constraint c \
    JOIN pg_catalog.pg_class r ON r.oid = c.conrelid \
    JOIN pg_catalog.pg_namespace n ON n.oid = r.relnamespace \
    WHERE c.contype = 'f' AND c.confdeltype IN ('c', 'n', 'd') \
      AND c.confrelid = pg_catalog.to_regclass($1) \
      AND EXISTS (SELECT FROM pg_catalog.pg_trigger t WHERE t.tgconstraint = c.oid \
        AND t.tgrelid = c.confrelid AND t.tgtype & 8 <> 0 AND t.tgenabled IN ('A', \
          CASE pg_catalog.current_setting('session_replication_role') \
            WHEN 'replica' THEN 'R' ELSE 'O' END)) \
    ORDER BY c.conname";

impl Writer {
    /// Begins a run of changes that can be undone alone.
    pub(crate) fn begin_changes(&mut self) -> Result<(), ApplyError> {
        let sent = self.lanes.current().run_sql(&format!("SAVEPOINT {CHANGE}"), Expect::Done);
        sent.map_err(|error| self.explain(error))
    }

    /// Keeps the run of changes once all of them are answered as they should be.
    pub(crate) async fn keep_changes(&mut self) -> Result<(), ApplyError> {
        // First: a change that met no row leaves the target willing to release the savepoint.
        self.drain().await?;
        let release = format!("RELEASE SAVEPOINT {CHANGE}");
        let sent = self.lanes.current().run_sql(&release, Expect::Done);
        sent.map_err(|error| self.explain(error))
    }

    /// Undoes the run of changes in which something failed. Its savepoint stays.
    pub(crate) async fn undo_changes(&mut self) -> Result<(), ApplyError> {
        let lost = self.lanes.current().recover().await;
        if lost.map_err(|error| self.explain(error))? {
            for target in self.relations.values_mut() {
                target.prepared.clear();
            }
        }
        self.session().await?.simple(&format!("ROLLBACK TO SAVEPOINT {CHANGE}")).await
    }

    /// The session, once nothing is in flight.
    pub(crate) async fn session(&mut self) -> Result<&mut Session, ApplyError> {
        let idle: Result<(), PipelineError> = self.lanes.current().idle_session().await.map(drop);
        idle.map_err(|error| self.explain(error))?;
        Ok(self.lanes.current().session())
    }

    /// Records in the open target transaction that `header`'s transaction is left out, as it was
    /// asked for.
    pub(crate) async fn record_skip(
        &mut self,
        header: &Header,
        changes: &str,
    ) -> Result<(), ApplyError> {
        let subscription = self.subscription.clone();
        let (xid, lsn) = (header.xid.to_string(), header.end_lsn.to_string());
        let commit_time = header.commit_time.to_string();
        let reason = format!("skipped on request: {changes}");
        let session = self.session().await?;
        session
            .execute(
                "INSERT INTO farshore.conflicts \
                 (subscription, operation, action, reason, source_xid, source_lsn, commit_time) \
                 VALUES ($1, 'TRANSACTION', 'skipped', $2, $3::text::bigint, $4::text::pg_lsn, \
                 $5::text::timestamptz)",
                &[Some(&subscription), Some(&reason), Some(&xid), Some(&lsn), Some(&commit_time)],
            )
            .await?;
        let done =
            "DELETE FROM farshore.skip_request WHERE subscription = $1 AND lsn = $2::text::pg_lsn";
        session.execute(done, &[Some(&subscription), Some(&lsn)]).await.map(drop)
    }

    /// What the policy says of the failed change's table.
    pub(crate) fn policy_for(&self, failed: &FailedChange) -> OnConflict {
        let target = self.relations.get(&failed.relation);
        target.map_or(OnConflict::Stop, |target| self.on_conflict.of(&target.relation))
    }

    /// Undoes the run and applies the change in it that found no row to the row that shows the same
    /// values. False where there is none, and for rows that are found by a key.
    pub(crate) async fn apply_as_shown(
        &mut self,
        failed: &FailedChange,
    ) -> Result<bool, ApplyError> {
        if !matches!(failed.cause, Cause::Rows(0)) {
            return Ok(false);
        }
        self.undo_changes().await?;
        let position = failed.position;
        let stored = |what: String| ApplyError::Stored { position, what };
        let change = decode_stored(&failed.command).map_err(|error| stored(error.to_string()))?;
        let Some(target) = self.relations.get(&failed.relation) else { return Ok(false) };
        if !target.is_found_by_image() || target.primary_key.is_empty() {
            return Ok(false);
        }
        let (shape, new, find) = shape_of(&change, target).map_err(stored)?;
        if target.lacks_old_row(&shape) {
            return Ok(false);
        }
        let session = self.lanes.current().session();
        let step = Step::Like(shape.clone(), Likeness::Shown);
        let mut row = ConflictRow { session, target, shape, new, find, existing: Vec::new() };
        match row.run(&step).await {
            Ok(rows) => Ok(rows == 1),
            Err(farshore_pg::Error::Server(error)) if is_about_data(&error) => Ok(false),
            Err(error) => Err(row.session.error(error)),
        }
    }

    /// Leaves a change out or overwrites the target, and records it.
    pub(crate) async fn resolve(
        &mut self,
        failed: &FailedChange,
        policy: OnConflict,
        header: &Header,
    ) -> Result<(), ApplyError> {
        self.session().await?;
        let position = header.end_lsn;
        let stored = |what: String| ApplyError::Stored { position, what };
        let change = decode_stored(&failed.command).map_err(|error| stored(error.to_string()))?;
        let target = self.relations.get(&failed.relation).ok_or_else(|| {
            stored(format!("refers to definition {}, which is not known", failed.relation.0))
        })?;
        let (shape, new, find) = shape_of(&change, target).map_err(stored)?;
        let session = self.lanes.current().session();
        let mut row = ConflictRow { session, target, shape, new, find, existing: Vec::new() };
        let mut reason = failed.cause.to_string();
        let mut action = "skipped";
        match policy {
            OnConflict::Stop | OnConflict::Skip => row.look(&failed.cause).await?,
            OnConflict::Overwrite => match row.overwrite(&failed.cause).await? {
                Overwrite::Done => action = "overwritten",
                Overwrite::Impossible(why) => {
                    row.session.simple(&format!("ROLLBACK TO SAVEPOINT {CHANGE}")).await?;
                    if row.existing.is_empty() {
                        row.look(&failed.cause).await?;
                    }
                    reason = format!("{reason}; cannot be overwritten: {why}");
                }
            },
        }
        let existing = match row.existing.as_slice() {
            [] => None,
            [one] => Some(one.clone()),
            several => Some(format!("[{}]", several.join(", "))),
        };
        let relation = &target.relation;
        // PostgreSQL's jsonb cannot hold this character, its json can.
        let jsonb = |json: Option<String>| json.map(|json| json.replace("\\u0000", "\\ufffd"));
        let mut rows = [conflict::key_json, conflict::old_json, conflict::new_json]
            .map(|json| jsonb(json(&change, relation)));
        let (xid, position) = (header.xid.to_string(), header.end_lsn.to_string());
        let commit_time = header.commit_time.to_string();
        let session = self.lanes.current().session();
        session.simple(&format!("SAVEPOINT {RECORDING}")).await?;
        let mut is_ascii = false;
        loop {
            let [key, old, new] = rows.each_ref().map(Option::as_deref);
            let values = [
                Some(self.subscription.as_str()),
                Some(&target.table.schema),
                Some(&target.table.name),
                Some(failed.operation),
                key,
                Some(action),
                failed.cause.sqlstate(),
                Some(&reason),
                Some(&xid),
                Some(&position),
                Some(&commit_time),
                old,
                new,
                existing.as_deref(),
            ];
            match session.execute(RECORD, &values).await {
                // What the change failed for may be in the record of it.
                Err(ApplyError::Target { error, .. })
                    if error.sqlstate() == Some(UNTRANSLATABLE) && !is_ascii =>
                {
                    session.simple(&format!("ROLLBACK TO SAVEPOINT {RECORDING}")).await?;
                    rows = rows.map(|row| row.map(|row| in_ascii(&row)));
                    reason = reason.replace(|c: char| !c.is_ascii(), "?");
                    is_ascii = true;
                }
                recorded => return recorded.map(drop),
            }
        }
    }
}

/// JSON with a question mark for every character beyond ASCII, escaped ones too: jsonb takes no
/// escape of a character that the database's encoding has not got.
fn in_ascii(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    let mut rest = json.chars();
    while let Some(c) = rest.next() {
        match c {
            '\\' => {
                out.push(c);
                let escaped = rest.next();
                out.extend(escaped);
                if escaped == Some('u') {
                    let digits: String = rest.by_ref().take(4).collect();
                    let is_beyond = u32::from_str_radix(&digits, 16).is_ok_and(|code| code > 0x7f);
                    out.push_str(if is_beyond { "003f" } else { &digits });
                }
            }
            c if c.is_ascii() => out.push(c),
            _ => out.push('?'),
        }
    }
    out
}

enum Overwrite {
    Done,
    Impossible(String),
}

/// A statement that puts the publisher's row there.
enum Step {
    /// As it would be without a conflict.
    Plain(Shape),
    /// To a row that is like the old one as far as this.
    Like(Shape, Likeness),
    /// An update of the row that is in the way of an insert.
    Replace(Condition),
}

/// A condition with its parameters' columns.
#[derive(Clone)]
struct Condition {
    terms: Vec<(usize, Term)>,
    predicate: Option<String>,
    /// The partition that has the rows, and the constraint: rows of others may hold the same.
    partition: Option<TableName>,
}

#[derive(Clone)]
enum Term {
    /// `column operator $n`
    Holds(String),
    IsNull,
}

/// What a violated constraint is made of.
struct Constraint {
    condition: Condition,
    /// Its columns are what rows are known by.
    is_key: bool,
    is_exclusion: bool,
}

struct ConflictRow<'a> {
    session: &'a mut Session,
    target: &'a TargetRelation,
    shape: Shape,
    new: Option<Tuple<'a>>,
    find: Option<Tuple<'a>>,
    /// The target's rows that the conflict is with, as JSON.
    existing: Vec<String>,
}

type Parameters<'a> = (Vec<u32>, Vec<(Format, Option<&'a [u8]>)>);

impl<'a> ConflictRow<'a> {
    /// Finds the target's rows that the conflict is with.
    async fn look(&mut self, cause: &Cause) -> Result<(), ApplyError> {
        if let Cause::Refused(error) = cause
            && let Some(constraint) = self.constraint(error).await?
        {
            return self.keep_existing(&constraint.condition, CHANGE).await;
        }
        if self.shape == Shape::Insert {
            return Ok(());
        }
        if matches!(cause, Cause::Rows(0)) || self.target.lacks_old_row(&self.shape) {
            return self.look_by_key().await;
        }
        let (condition, types) = self.target.identified();
        let (_, find) = self.target.parameters(&Shape::Delete);
        let values = bound(&find, self.find);
        self.select(&condition, &types, &values, CHANGE).await
    }

    /// Finds the row with the old one's primary key, where it is not the same in the rest.
    async fn look_by_key(&mut self) -> Result<(), ApplyError> {
        if !self.target.is_found_by_image() || self.target.primary_key.is_empty() {
            return Ok(());
        }
        let (condition, types) = self.target.identified_by_key();
        let values = bound(&self.target.primary_key, self.find);
        self.select(&condition, &types, &values, CHANGE).await
    }

    /// Makes the publisher's row win.
    async fn overwrite(&mut self, cause: &Cause) -> Result<Overwrite, ApplyError> {
        let is_complete =
            |tuple: Tuple<'_>| tuple.values().all(|value| !matches!(value, Value::Unchanged));
        if matches!(cause, Cause::Rows(0)) {
            self.look_by_key().await?;
        }
        let mut step = match (cause, &self.shape) {
            (Cause::Rows(0), shape) if !self.existing.is_empty() => {
                // The target's row may differ in what has not changed.
                Step::Like(setting_all(shape, self.new), Likeness::Key)
            }
            (Cause::Rows(0), Shape::Update { old_given, .. }) => {
                let is_key_of_another = |old| {
                    *old_given
                        && self.target.is_found_by_image()
                        && !self.target.has_primary_key(old)
                };
                // The row that it was may be there, and would be a second one beside the new one.
                if self.find.is_some_and(is_key_of_another) {
                    let why = "the publisher did not send the old row's primary key";
                    return Ok(Overwrite::Impossible(why.to_owned()));
                }
                if !self.new.is_some_and(is_complete) {
                    let why = "the publisher did not send all of the row (unchanged large values)";
                    return Ok(Overwrite::Impossible(why.to_owned()));
                }
                Step::Plain(Shape::Insert)
            }
            (Cause::Rows(0), Shape::Delete) => {
                return Ok(Overwrite::Impossible("there is nothing to delete".to_owned()));
            }
            (Cause::Rows(rows), _) => {
                return Ok(Overwrite::Impossible(format!("{rows} rows are not one")));
            }
            (Cause::Refused(_), shape) => Step::Plain(shape.clone()),
        };
        self.session.simple(&format!("SAVEPOINT {ATTEMPT}")).await?;
        for _ in 0..ATTEMPTS_MAX {
            let error = match self.run(&step).await {
                Ok(1) => return Ok(Overwrite::Done),
                Ok(rows) => {
                    let why = format!("the row met {rows} rows instead of one");
                    return Ok(Overwrite::Impossible(why));
                }
                Err(farshore_pg::Error::Server(error)) if is_about_data(&error) => error,
                Err(error) => return Err(self.session.error(error)),
            };
            self.session.simple(&format!("ROLLBACK TO SAVEPOINT {ATTEMPT}")).await?;
            let Some(constraint) = self.constraint(&error).await? else {
                return Ok(Overwrite::Impossible(error.to_string()));
            };
            let is_insert = matches!(&step, Step::Plain(Shape::Insert));
            if constraint.is_exclusion && !is_insert {
                // The row itself may be one of those that its new value excludes.
                return Ok(Overwrite::Impossible(error.to_string()));
            }
            self.keep_existing(&constraint.condition, ATTEMPT).await?;
            let settable = self.target.columns.iter().all(|column| !column.identity_always);
            if is_insert && constraint.is_key && settable {
                step = Step::Replace(constraint.condition);
            } else {
                if let Some(why) = self.would_take_others(&constraint.condition).await? {
                    return Ok(Overwrite::Impossible(why));
                }
                match self.delete(&constraint.condition).await {
                    Ok(0) => return Ok(Overwrite::Impossible(error.to_string())),
                    Ok(_) => {}
                    Err(farshore_pg::Error::Server(error)) if is_about_data(&error) => {
                        return Ok(Overwrite::Impossible(error.to_string()));
                    }
                    Err(error) => return Err(self.session.error(error)),
                }
            }
            let next = format!("RELEASE SAVEPOINT {ATTEMPT}; SAVEPOINT {ATTEMPT}");
            self.session.simple(&next).await?;
        }
        Ok(Overwrite::Impossible(format!("more than {ATTEMPTS_MAX} rows are in the way")))
    }

    /// Runs a step; returns how many rows it touched.
    async fn run(&mut self, step: &Step) -> Result<u64, farshore_pg::Error> {
        let (sql, types, values) = match step {
            Step::Plain(shape) => {
                let (sql, types) = self.target.sql(shape);
                let (set, find) = self.target.parameters(shape);
                let mut values = bound(&set, self.new);
                values.extend(bound(&find, self.find));
                (sql, types, values)
            }
            Step::Like(shape, likeness) => {
                let (sql, types, find) = self.target.sql_by(shape, *likeness);
                let (set, _) = self.target.parameters(shape);
                let mut values = bound(&set, self.new);
                values.extend(bound(&find, self.find));
                (sql, types, values)
            }
            Step::Replace(condition) => {
                let columns: Vec<usize> = (0..self.target.columns.len()).collect();
                let mut types: Vec<u32> =
                    columns.iter().map(|column| self.target.parameter_type(*column)).collect();
                let mut values = bound(&columns, self.new);
                let assignments: Vec<String> = columns
                    .iter()
                    .map(|column| format!("{} = ${}", self.name(*column), column + 1))
                    .collect();
                let text = self.condition_text(condition, &mut types, &mut values);
                let rows = self.target.rows_of_its_own();
                let sql = format!("UPDATE {rows} SET {} WHERE {text}", assignments.join(", "));
                (sql, types, values)
            }
        };
        // Some take no RETURNING: those that are a SELECT already.
        answers::run_counted(&mut self.session.connection, &sql, &types, &values).await
    }

    /// Why rows that meet a condition cannot be deleted: a foreign key that fires would delete, or
    /// change, rows that refer to them, of which the publisher deletes none and nothing is recorded.
    async fn would_take_others(
        &mut self,
        condition: &Condition,
    ) -> Result<Option<String>, ApplyError> {
        let table = self.target.table.to_string();
        for key in self.session.query(KEYS_THAT_TAKE_OTHERS, &[Some(&table)]).await? {
            let text = |column: usize| key.get(column).unwrap_or_default();
            let (name, referring, from, to) = (text(0), text(1), text(2), text(3));
            let (mut types, mut values): Parameters<'_> = Default::default();
            let deleted = self.condition_text(condition, &mut types, &mut values);
            let rows = self.target.rows_of_its_own();
            let referring_rows = format!(
                "SELECT FROM {referring} WHERE ({from}) IN \
                 (SELECT {to} FROM {rows} WHERE {deleted}) LIMIT 1"
            );
            let sent = answers::run(&mut self.session.connection, &referring_rows, &types, &values);
            match sent.await {
                Ok(found) if found.is_empty() => {}
                Ok(_) => {
                    return Ok(Some(format!(
                        "rows of {referring} refer to the row that is in the way, and would go with \
                         it (foreign key {name}, which fires for this role)"
                    )));
                }
                Err(farshore_pg::Error::Server(error)) if !error.is_fatal() => {
                    return Ok(Some(format!(
                        "whether rows of {referring} refer to the row that is in the way cannot be \
                         looked at (foreign key {name}, which fires for this role): {error}"
                    )));
                }
                Err(error) => return Err(self.session.error(error)),
            }
        }
        Ok(None)
    }

    async fn delete(&mut self, condition: &Condition) -> Result<u64, farshore_pg::Error> {
        let (mut types, mut values): Parameters<'_> = Default::default();
        let text = self.condition_text(condition, &mut types, &mut values);
        let rows = self.target.rows_of_its_own();
        let sql = format!("DELETE FROM {rows} WHERE {text}");
        answers::run_counted(&mut self.session.connection, &sql, &types, &values).await
    }

    /// Remembers the rows that meet a condition.
    async fn keep_existing(
        &mut self,
        condition: &Condition,
        savepoint: &str,
    ) -> Result<(), ApplyError> {
        let (mut types, mut values): Parameters<'_> = Default::default();
        let text = self.condition_text(condition, &mut types, &mut values);
        self.select(&text, &types, &values, savepoint).await
    }

    async fn select(
        &mut self,
        condition: &str,
        types: &[u32],
        values: &[(Format, Option<&[u8]>)],
        savepoint: &str,
    ) -> Result<(), ApplyError> {
        let sql = format!(
            "SELECT pg_catalog.to_jsonb(farshore_row.*)::text FROM {} AS farshore_row \
             WHERE {condition} LIMIT {EXISTING_MAX}",
            self.target.rows_of_its_own()
        );
        match answers::run(&mut self.session.connection, &sql, types, values).await {
            Ok(rows) => {
                let texts = rows.into_iter().filter_map(|row| row.into_iter().next().flatten());
                self.existing.extend(texts.map(|text| String::from_utf8_lossy(&text).into_owned()));
                Ok(())
            }
            // Too large for jsonb, or a value that does not compare: the record goes without it.
            Err(farshore_pg::Error::Server(error)) if !error.is_fatal() => {
                tracing::debug!(%error, "the target's row of a conflict cannot be shown");
                self.session.simple(&format!("ROLLBACK TO SAVEPOINT {savepoint}")).await
            }
            Err(error) => Err(self.session.error(error)),
        }
    }

    fn name(&self, column: usize) -> String {
        quote_identifier(&self.target.relation.columns[column].name)
    }

    fn condition_text(
        &self,
        condition: &Condition,
        types: &mut Vec<u32>,
        values: &mut Vec<(Format, Option<&'a [u8]>)>,
    ) -> String {
        let mut texts: Vec<String> = Vec::new();
        for (column, term) in &condition.terms {
            let name = self.name(*column);
            match term {
                Term::IsNull => texts.push(format!("{name} IS NULL")),
                Term::Holds(operator) => {
                    types.push(self.target.parameter_type(*column));
                    values.extend(bound(&[*column], self.new));
                    let value = self.target.operand(*column, format!("${}", types.len()));
                    texts.push(format!("{name} {operator} {value}"));
                }
            }
        }
        texts.extend(condition.predicate.as_ref().map(|predicate| format!("({predicate})")));
        texts.extend(condition.partition.as_ref().map(|partition| {
            let partition = quote_literal(&partition.to_string());
            format!("tableoid = {partition}::pg_catalog.regclass")
        }));
        texts.join(" AND ")
    }

    /// The unique or exclusion constraint that an error names, as a condition on the rows that
    /// hold what the new row must have. `None` for other errors, and where the log does not tell
    /// the values (expressions, unchanged large values, columns that are not published).
    async fn constraint(&mut self, error: &ServerError) -> Result<Option<Constraint>, ApplyError> {
        let (Some(schema), Some(name)) = (&error.schema, &error.constraint) else {
            return Ok(None);
        };
        if !matches!(error.code.as_str(), "23505" | "23P01") {
            return Ok(None);
        }
        // Of another table, which a trigger writes to, it says nothing of these rows.
        let table = quote_literal(&self.target.table.to_string());
        let rows = self
            .session
            .query(
                &format!(
                    "SELECT a.attname, i.indisprimary, pg_catalog.pg_get_expr(i.indpred, i.indrelid), \
                   CASE WHEN o.oid IS NOT NULL THEN pg_catalog.format('OPERATOR(%I.%s)', \
                     s.nspname, o.oprname) END \
                 FROM pg_catalog.pg_class c \
                 JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace \
                 JOIN pg_catalog.pg_index i ON i.indexrelid = c.oid \
                 CROSS JOIN LATERAL pg_catalog.generate_series(0, i.indnkeyatts - 1) AS k \
                 LEFT JOIN pg_catalog.pg_attribute a \
                   ON a.attrelid = i.indrelid AND a.attnum = i.indkey[k] AND a.attnum > 0 \
                 LEFT JOIN pg_catalog.pg_constraint x ON x.conindid = c.oid AND x.contype = 'x' \
                 LEFT JOIN pg_catalog.pg_operator o ON o.oid = x.conexclop[k + 1] \
                 LEFT JOIN pg_catalog.pg_namespace s ON s.oid = o.oprnamespace \
                 WHERE n.nspname = $1 AND c.relname = $2 \
                   AND i.indrelid IN (SELECT part.relid FROM {} AS part) ORDER BY k",
                    partition_tree(&format!("{table}::pg_catalog.regclass"))
                ),
                &[Some(schema), Some(name)],
            )
            .await?;
        let Some(new) = self.new else { return Ok(None) };
        let new: Vec<Value<'_>> = new.values().collect();
        let columns = &self.target.relation.columns;
        let partition = match &error.table {
            Some(name) if self.target.partitioned => {
                Some(TableName { schema: schema.clone(), name: name.clone() })
            }
            _ => None,
        };
        let mut condition = Condition { terms: Vec::new(), predicate: None, partition };
        let (mut is_key, mut is_exclusion) = (true, false);
        for row in &rows {
            let column = row.get(0).and_then(|name| columns.iter().position(|c| c.name == name));
            let Some(column) = column else { return Ok(None) };
            let term = match new.get(column) {
                None | Some(Value::Unchanged) => return Ok(None),
                Some(Value::Null) => Term::IsNull,
                Some(Value::Text(_) | Value::Binary(_)) => Term::Holds(
                    row.get(3).unwrap_or(&self.target.columns[column].equals).to_owned(),
                ),
            };
            condition.terms.push((column, term));
            condition.predicate = row.get(2).map(str::to_owned);
            is_exclusion |= row.get(3).is_some();
            is_key &= columns[column].key || row.get(1) == Some("t");
        }
        if condition.terms.is_empty() {
            return Ok(None);
        }
        let is_key = is_key && !is_exclusion && condition.predicate.is_none();
        Ok(Some(Constraint { condition, is_key, is_exclusion }))
    }
}

/// The values of the columns in `wanted`, ascending.
fn bound<'a>(wanted: &[usize], tuple: Option<Tuple<'a>>) -> Vec<(Format, Option<&'a [u8]>)> {
    let values = tuple.into_iter().flat_map(|tuple| tuple.values().enumerate());
    values
        .filter(|(column, _)| wanted.contains(column))
        .map(|(_, value)| parameter(value))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::in_ascii;

    #[test]
    fn json_in_ascii_is_json_still() {
        let json =
            r#"{"größe": "5 €", "j": {"a": "\u20ac\ud83d\ude00\u0041"}, "b": "\\u20ac \"\n"}"#;
        let ascii =
            r#"{"gr??e": "5 ?", "j": {"a": "\u003f\u003f\u003f\u0041"}, "b": "\\u20ac \"\n"}"#;
        assert_eq!(in_ascii(json), ascii);
    }
}
