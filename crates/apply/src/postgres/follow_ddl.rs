//! The target's columns follow the publisher's.
//!
//! `farshore.table_copy.definition` keeps the definition that a table on the target follows: that
//! of its copy, and then of the newest relation version that was applied. When a change refers to
//! another one, the two say what happened in between:
//!
//! | columns of the new version | what is done |
//! | --- | --- |
//! | some more, none gone | those that the target lacks are added |
//! | some gone, none more | left on the target, if they can be left empty; or dropped |
//! | some more and some gone, or in another order | as their numbers say ([`renames`]), or it stops |
//! | one of another type | it stops, unless the target's column has that type already |
//!
//! One of another table, by the publisher's OID, stops it; so does one that was noted under another
//! name, which changes came by that are not in the copy.
//!
//! All of it happens in the target transaction of the change, so it is there exactly once.
//!
//! Rows that were there when a column was added have a value that is not in the log:
//! `attmissingval` on the publisher, or NULL, or, where the table was rewritten, anything.

mod renames;

use crate::ApplyError;
use crate::error::passes_by_itself;
use crate::postgres::noted_definition::{
    is_known_by_oid, load_definition, note_definition, published_name,
};
use crate::postgres::progress::ColumnNumbers;
use crate::postgres::put_off;
use crate::postgres::session::Session;
use crate::postgres::target_table::TargetTable;
use crate::postgres::value_plan::ColumnType;
use crate::remedy;
use farshore_capture::publication::{PublishedTable, TableName, partition_root};
use farshore_capture::schema::NameMap;
use farshore_capture::source::{AddedColumn, DroppedColumns, GrownTable, OldValue, Source};
use farshore_model::{Column, FIRST_UNSTABLE_OID, Lsn, Relation, quote_identifier};
use farshore_pg::{quote_literal, text_array};
use renames::ByNumbers;
use std::fmt::Write as _;
use std::sync::OnceLock;

/// What is done about columns that the publisher's table gained or lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FollowDdl {
    /// New columns are added on the target, and renamed ones get their new names; dropped ones are
    /// left.
    #[default]
    Add,
    /// New columns are added on the target, and those that the publisher dropped are dropped.
    AddDrop,
    /// Where the target lacks a column, or one has another name, the subscription stops.
    Stop,
}

/// What following has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Followed {
    /// The target's table has another shape now.
    pub changed: bool,
    /// And columns of it have other names, and those of tables below it.
    pub renamed: bool,
    /// There is more to do: the version is to be followed again.
    pub put_off: bool,
}

/// Follows one table.
pub struct Follow<'a> {
    /// Subscription name.
    pub subscription: &'a str,
    /// What is done.
    pub policy: FollowDdl,
    /// Columns are not dropped yet, and the version is not noted if there are such.
    pub puts_drops_off: bool,
    /// Where the log stands: where the transaction commits that has the change.
    pub at: Lsn,
    /// Where the publisher is.
    pub source: &'a dyn Source,
    /// What tables are called on the target.
    pub names: &'a NameMap,
    /// The table on the target.
    pub table: &'a TableName,
    /// Its definition from now on.
    pub relation: &'a Relation,
    /// It is that of a copy which is only beginning: what was there before does not matter.
    pub is_copied_anew: bool,
    /// The top of the partitions that the table is one of, or the table itself, and whether it has or
    /// is a partition; once it was asked for.
    pub root: OnceLock<(TableName, bool)>,
}

impl Follow<'_> {
    /// Brings the target's table to the new version, inside the open transaction.
    pub async fn follow(
        &self,
        session: &mut Session,
        on_target: &TargetTable,
    ) -> Result<Followed, ApplyError> {
        let published = published_name(self.relation);
        let before = load_definition(session, self.subscription, &published).await?;
        let before = before.map_err(|damaged| self.stops(damaged))?;
        if let (Some(before), false) = (&before, self.is_copied_anew) {
            if !has_same_oid(before, self.relation) {
                return Err(ApplyError::AnotherTable {
                    subscription: self.subscription.to_owned(),
                    table: Box::new(published),
                    copied: before.oid,
                    found: self.relation.oid,
                });
            }
            if !is_same_table(before, self.relation) {
                return Err(ApplyError::Renamed {
                    subscription: self.subscription.to_owned(),
                    table: Box::new(published),
                    other: Box::new(published_name(before)),
                    oid: self.relation.oid,
                });
            }
        }
        if !before.as_ref().is_some_and(|before| same_columns(before, self.relation)) {
            // What is said is to be done there.
            self.root(session).await?;
        }
        let by_numbers = match &before {
            Some(before) if self.renames() => self.rename(session, before, on_target).await?,
            Some(_) | None => None,
        };
        let Some(by_numbers) = by_numbers else {
            if let (Some(before), false) = (&before, self.is_copied_anew) {
                self.check_places(before, on_target)?;
                self.check_names(session, before, on_target).await?;
            }
            return self.follow_columns(session, before, on_target, None).await;
        };
        let ByNumbers { before, on_target: renamed, numbers, statements } = by_numbers;
        let on_target = renamed.as_ref().unwrap_or(on_target);
        let followed = self.follow_columns(session, Some(before), on_target, Some(numbers)).await;
        let followed = followed.map_err(|error| self.after_renames(error, &statements))?;
        let renamed = renamed.is_some();
        Ok(Followed { changed: followed.changed || renamed, renamed, ..followed })
    }

    /// Adds and drops. `numbers` are those of the columns of now, where they are known: then those which
    /// are gone were dropped, and those which are new were added.
    async fn follow_columns(
        &self,
        session: &mut Session,
        before: Option<Relation>,
        on_target: &TargetTable,
        numbers: Option<ColumnNumbers>,
    ) -> Result<Followed, ApplyError> {
        let before = before.filter(|before| !is_known_by_oid(before, self.relation));
        let published = published_name(self.relation);
        let columns = &self.relation.columns;
        let is_known = numbers.is_some();
        if !is_known && before.as_ref().is_some_and(|before| same_columns(before, self.relation)) {
            return Ok(Followed { changed: false, renamed: false, put_off: false });
        }
        let had = |name: &str| match &before {
            Some(before) => before.columns.iter().any(|column| column.name == name),
            // Nothing is known from before: whatever the target has may be what was published.
            None => on_target.columns.iter().any(|column| column.name == name),
        };
        let missing: Vec<&Column> = columns
            .iter()
            .filter(|column| !on_target.columns.iter().any(|there| there.name == column.name))
            .collect();
        let gone: Vec<&str> = on_target
            .columns
            .iter()
            .filter(|there| !there.generated && had(&there.name))
            .map(|there| there.name.as_str())
            .filter(|name| !columns.iter().any(|column| column.name == *name))
            .collect();
        if let Some(before) = &before {
            self.check_returned(session, before, on_target).await?;
            self.check_types(session, before, on_target).await?;
        }
        if let Some(first) = missing.first() {
            let definition = self.type_on_target(session, first).await?;
            let add = self.alter(&format!("ADD COLUMN {} {definition}", quoted(first)));
            if let (Some(old), false) = (gone.first(), is_known) {
                return Err(self.stops(&format!(
                    "column {0} is new and {1} is gone. If the publisher renamed it: {2}. If it \
                     dropped the one and added the other: {add}; and {3}, or make the old one \
                     nullable under another name",
                    quoted(first),
                    quote_identifier(old),
                    self.alter(&format!(
                        "RENAME COLUMN {} TO {}",
                        quote_identifier(old),
                        quoted(first)
                    )),
                    self.alter(&format!("DROP COLUMN {}", quote_identifier(old))),
                )));
            }
            if self.policy == FollowDdl::Stop {
                return Err(self.told_to_add(session, &missing).await?);
            }
        }
        let may_drop = self.policy == FollowDdl::AddDrop
            && !self.puts_drops_off
            && before.is_some()
            && !gone.is_empty();
        let (dropped, publishers_root) =
            if may_drop { self.dropped(&gone).await? } else { (Vec::new(), published) };
        let left: Vec<&str> = gone.iter().copied().filter(|name| !dropped.contains(name)).collect();
        let put_off = self.puts_drops_off && self.policy == FollowDdl::AddDrop && !left.is_empty();
        if !left.is_empty() {
            self.check_left(session, &left).await?;
            if before.is_some() && !put_off {
                self.note_left(session, &left).await?;
            }
        }
        if !dropped.is_empty() {
            self.drop(session, (&dropped, &publishers_root)).await?;
        }
        if !missing.is_empty() {
            self.add(session, &missing).await?;
        }
        if !put_off {
            let published = published_name(self.relation);
            let (subscription, relation) = (self.subscription, self.relation);
            if let Some(before) = &before {
                let has = |name: &str| columns.iter().any(|column| column.name == name);
                let names = before.columns.iter().map(|column| column.name.as_str());
                let lost: Vec<&str> = names.filter(|name| !has(name)).collect();
                session.forget_column_numbers(subscription, &published, &lost).await?;
            }
            if let Some(numbers) = numbers {
                self.note_numbers(session, &numbers).await?;
            }
            note_definition(session, subscription, (&published, self.table), relation).await?;
        }
        let changed = !missing.is_empty() || !dropped.is_empty();
        Ok(Followed { changed, renamed: false, put_off })
    }

    fn renames(&self) -> bool {
        self.policy != FollowDdl::Stop && !self.is_copied_anew
    }

    /// A column that the publisher gave another type must have got it on the target too: what that
    /// made of the rows that were there is not in the log.
    async fn check_types(
        &self,
        session: &mut Session,
        before: &Relation,
        on_target: &TargetTable,
    ) -> Result<(), ApplyError> {
        for column in &self.relation.columns {
            let old = before.columns.iter().find(|old| old.name == column.name);
            let Some(old) = old.filter(|old| !same_type(old, column)) else { continue };
            let plan = |of: &Column, types| {
                let (oid, modifier) = (of.type_oid, of.type_modifier);
                on_target.plan(&of.name, ColumnType { oid, modifier, types }).map(|(_, plan)| plan)
            };
            let was_cast = plan(old, &before.types).is_ok_and(|plan| !plan.is_verbatim());
            let is_followed = plan(column, &self.relation.types).is_ok_and(|now| {
                let there = on_target.columns.iter().find(|there| there.name == column.name);
                let has_type = there.is_some_and(|there| {
                    // Types of their own have other numbers there.
                    there.type_oid >= FIRST_UNSTABLE_OID
                        || (there.type_oid, there.type_modifier)
                            == (column.type_oid, column.type_modifier)
                });
                let may_differ = was_cast && keeps_values(old, column);
                may_differ || now.is_verbatim() && (has_type || keeps_values(old, column))
            });
            let stays = is_followed && self.has_type_as_noted(session, column).await?;
            if !is_followed || stays {
                return Err(self.retyped(session, column, (was_cast, stays)).await?);
            }
        }
        Ok(())
    }

    /// Whether the target's column has a type of its own, and the very one that it had when the
    /// definition was noted. Neither its name nor what it holds would tell another one from it.
    async fn has_type_as_noted(
        &self,
        session: &mut Session,
        column: &Column,
    ) -> Result<bool, ApplyError> {
        let published = published_name(self.relation);
        let table = self.table.to_string();
        let which = [
            Some(self.subscription),
            Some(published.schema.as_str()),
            Some(published.name.as_str()),
            Some(table.as_str()),
            Some(column.name.as_str()),
        ];
        Ok(!session.query(TYPE_AS_NOTED, &which).await?.is_empty())
    }

    /// `is_another`: the target's column had another type than the publisher's before. `stays`: it
    /// has a type of its own, and the same one as before.
    async fn retyped(
        &self,
        session: &mut Session,
        column: &Column,
        (is_another, stays): (bool, bool),
    ) -> Result<ApplyError, ApplyError> {
        let definition = self.type_on_target(session, column).await?;
        if stays {
            let resync = remedy::resync(self.subscription, Some(&published_name(self.relation)));
            let alter = self.alter(&format!("ALTER COLUMN {} TYPE …", quoted(column)));
            return Ok(self.stops(&format!(
                "column {} has another type, {definition}, maybe a new one under the name of the old \
                 one, and what that made of rows that were there is not in the log. On the target the \
                 column's type is the one that it was: do there what was done on the publisher (make \
                 the new type, and {alter} with the same USING clause); or {resync}",
                quoted(column),
            )));
        }
        let alter = self.alter(&format!("ALTER COLUMN {} TYPE {definition}", quoted(column)));
        let mut what = format!(
            "column {} has another type: {alter} (with the USING clause of the publisher, if it had \
             one)",
            quoted(column)
        );
        if is_another {
            let resync = remedy::resync(self.subscription, Some(&published_name(self.relation)));
            let _ = write!(what, "; or, to keep the type that it has there, {resync}");
        }
        Ok(self.stops(&what))
    }

    /// A column that was dropped, left on the target, and added again: rows there have what they had
    /// before it was dropped.
    async fn check_returned(
        &self,
        session: &mut Session,
        before: &Relation,
        on_target: &TargetTable,
    ) -> Result<(), ApplyError> {
        let is_new = |column: &&Column| before.columns.iter().all(|old| old.name != column.name);
        let is_there = |column: &&Column| on_target.columns.iter().any(|c| c.name == column.name);
        let now = self.relation.columns.iter();
        let found: Vec<&Column> = now.filter(is_new).filter(is_there).collect();
        if found.is_empty() {
            return Ok(());
        }
        let published = published_name(self.relation);
        let table = self.table.to_string();
        let which = [
            Some(self.subscription),
            Some(published.schema.as_str()),
            Some(published.name.as_str()),
            Some(table.as_str()),
        ];
        let left = session.query(COLUMNS_LEFT, &which).await?;
        let was_left = |column: &&&Column| left.iter().any(|row| row.get(0) == Some(&column.name));
        let Some(column) = found.iter().find(was_left) else { return Ok(()) };
        let (root, _) = self.root(session).await?;
        if session.query(&format!("SELECT FROM {root} LIMIT 1"), &[]).await?.is_empty() {
            return Ok(());
        }
        let name = quoted(column);
        Err(self.stops(&format!(
            "column {name} was dropped and added again, and on the target, which has kept it, rows \
             have what they had before: ALTER TABLE {root} DROP COLUMN {name} (it is added with what \
             rows have in it now)"
        )))
    }

    async fn note_left(&self, session: &mut Session, left: &[&str]) -> Result<(), ApplyError> {
        let may = "SELECT FROM pg_catalog.pg_attribute WHERE attname = 'columns_left' \
             AND attrelid = pg_catalog.to_regclass('farshore.table_copy')";
        if session.query(may, &[]).await?.is_empty() {
            return Ok(());
        }
        let published = published_name(self.relation);
        let left = text_array(left.iter().copied());
        // With their numbers: one that is made again is another.
        let note = "UPDATE farshore.table_copy SET columns_left = ARRAY( \
               SELECT kept FROM unnest(columns_left) AS kept UNION \
               SELECT attnum || ' ' || attname FROM pg_catalog.pg_attribute \
               WHERE attrelid = pg_catalog.to_regclass($5) AND attname = ANY ($4::text::name[])) \
             WHERE subscription = $1 AND schema_name = $2 AND table_name = $3";
        let table = self.table.to_string();
        let which = [
            Some(self.subscription),
            Some(published.schema.as_str()),
            Some(published.name.as_str()),
            Some(left.as_str()),
            Some(table.as_str()),
        ];
        session.execute(note, &which).await.map(drop)
    }

    /// Columns that are left must be able to stay empty.
    async fn check_left(&self, session: &mut Session, gone: &[&str]) -> Result<(), ApplyError> {
        let rows = session
            .query(
                "SELECT attname FROM pg_catalog.pg_attribute \
                 WHERE attrelid = pg_catalog.to_regclass($1) AND attnum > 0 \
                 AND NOT attisdropped AND attnotnull AND NOT atthasdef AND attidentity = ''",
                &[Some(&self.table.to_string())],
            )
            .await?;
        let demanding = |name: &&&str| rows.iter().any(|row| row.get(0) == Some(**name));
        let Some(name) = gone.iter().find(demanding) else { return Ok(()) };
        let was_taken_out = self.is_there_still(session, name).await;
        let name = quote_identifier(name);
        let nullable = self.alter(&format!("ALTER COLUMN {name} DROP NOT NULL"));
        if was_taken_out {
            return Err(self.stops(&format!(
                "column {name} was taken out of the publication (the publisher's table still has it), \
                 and on the target it takes no NULL and has no default. If that was not meant, publish \
                 it again (what was done by hand to Farshore's own publication is put back by itself), \
                 and {}; if it was, {nullable}",
                remedy::resync(self.subscription, Some(&published_name(self.relation)))
            )));
        }
        Err(self.stops(&format!(
            "column {name} is gone, and on the target it takes no NULL and has no default: {}, or \
             {nullable}",
            self.alter(&format!("DROP COLUMN {name}"))
        )))
    }

    /// Whether the publisher's table has this column still; false too where nobody can tell.
    async fn is_there_still(&self, session: &mut Session, column: &str) -> bool {
        let published = published_name(self.relation);
        let Ok(now) = self.source.published_tables().await else { return false };
        let is_this =
            |now: &&PublishedTable| now.oid == self.relation.oid && now.table == published;
        let Some(now) = now.iter().find(is_this) else { return false };
        // One that was only taken out of the publication for a while is still the same.
        if let Some(number) = ColumnNumbers::of(now).number(column) {
            let noted = renames::noted(session, self.subscription, &published, self.table).await;
            return noted.is_ok_and(|noted| noted.numbers.number(column) == Some(number));
        }
        self.dropped(&[column]).await.is_ok_and(|(dropped, _)| dropped.is_empty())
    }

    /// The top of the partitions that the table is one of, or the table itself; and whether it has
    /// or is a partition.
    async fn root(&self, session: &mut Session) -> Result<(TableName, bool), ApplyError> {
        if let Some(root) = self.root.get() {
            return Ok(root.clone());
        }
        let root = partition_root(&mut session.connection, self.table).await;
        let root = root.map_err(|error| session.error(error))?;
        let root = root.unwrap_or_else(|| (self.table.clone(), false));
        Ok(self.root.get_or_init(|| root).clone())
    }

    /// Those of the columns that the publisher has dropped, and what it calls the top of the
    /// partitions that the table is one of.
    async fn dropped<'b>(&self, gone: &[&'b str]) -> Result<(Vec<&'b str>, TableName), ApplyError> {
        let published = published_name(self.relation);
        let names: Vec<String> = gone.iter().map(|name| (*name).to_owned()).collect();
        let dropped = self.source.dropped_columns(&published, &names).await?;
        let DroppedColumns { columns, root } = dropped;
        let is_dropped = |name: &&str| columns.iter().any(|column| column == name);
        Ok((gone.iter().copied().filter(is_dropped).collect(), root))
    }

    async fn drop(
        &self,
        session: &mut Session,
        (dropped, publishers_root): (&[&str], &TableName),
    ) -> Result<(), ApplyError> {
        let (root, is_in_tree) = self.root(session).await?;
        for column in dropped {
            let column = quote_identifier(column);
            // Inheriting tables are published by themselves, and partitions cannot differ.
            let only = if is_in_tree { "" } else { "ONLY " };
            let drop = format!("ALTER TABLE {only}{root} DROP COLUMN {column}");
            if is_in_tree && self.names.table(publishers_root) != root {
                return Err(self.stops(&format!(
                    "column {column} was dropped, and on the target the table is a partition of \
                     {root}, from which it was not: take it out there (ALTER TABLE {root} DETACH \
                     PARTITION {}), or leave the column (follow_ddl = \"add\")",
                    self.table
                )));
            }
            put_off::alter(session, self.subscription, &root, &drop).await.map_err(|error| {
                self.refused(error, |refused| {
                    format!(
                        "column {column} was dropped, and the target refused to drop it \
                         ({refused}). As the table's owner, and where it is inherited from the \
                         table that it comes from: {drop}; or leave it (follow_ddl = \"add\")"
                    )
                })
            })?;
            tracing::info!(
                subscription = %self.subscription,
                table = %self.table,
                %column,
                "column dropped on the target, as on the publisher"
            );
        }
        Ok(())
    }

    /// An error of the target that does not pass by itself stops with `what` of it.
    fn refused(
        &self,
        error: ApplyError,
        what: impl FnOnce(&farshore_pg::Error) -> String,
    ) -> ApplyError {
        match &error {
            ApplyError::Target { error: refused, .. }
                if refused.server_error().is_some_and(|said| {
                    !passes_by_itself(said) && !put_off::is_of_a_check(said)
                }) =>
            {
                self.stops(&what(refused))
            }
            _ => error,
        }
    }

    /// As [`Follow::add`] would: with what rows that are there have in the new columns.
    async fn told_to_add(
        &self,
        session: &mut Session,
        missing: &[&Column],
    ) -> Result<ApplyError, ApplyError> {
        let additions = self.additions(session, missing).await?;
        let (root, _) = self.root(session).await?;
        let names: Vec<String> = missing.iter().map(|column| quoted(column)).collect();
        let (columns, are) = if names.len() == 1 { ("column", "is") } else { ("columns", "are") };
        let adds: Vec<String> =
            additions.iter().map(|add| format!("ALTER TABLE {root} {add}")).collect();
        Ok(self.stops(&format!("{columns} {} {are} new: {}", names.join(", "), adds.join("; "))))
    }

    /// What adds columns on the target, with what rows that are there have in them: that the publisher
    /// knows.
    async fn additions(
        &self,
        session: &mut Session,
        missing: &[&Column],
    ) -> Result<Vec<String>, ApplyError> {
        let added = missing
            .iter()
            .map(|column| AddedColumn { name: column.name.clone(), type_oid: column.type_oid });
        let added = added.collect::<Vec<_>>();
        let file_node = self.file_node_of_copy(session).await?;
        let grown = GrownTable {
            table: published_name(self.relation),
            oid: self.relation.oid,
            copied_from: file_node,
            columns: self.relation.columns.iter().map(|column| column.name.clone()).collect(),
        };
        let old_values = self.source.old_values(&grown, &added).await?;
        let (root, _) = self.root(session).await?;
        let mut additions = Vec::new();
        for (column, old) in missing.iter().zip(old_values) {
            let definition = self.type_on_target(session, column).await?;
            let mut add = format!("ADD COLUMN {} {definition}", quoted(column));
            match old {
                OldValue::Missing(text) => {
                    add.push_str(&format!(" DEFAULT {}::{definition}", quote_literal(&text)));
                }
                OldValue::Filled { file_node: now } if Some(now) != file_node => {
                    self.check_empty(session, column, &root).await?;
                }
                // A domain may have a default of its own there, which old rows would get.
                OldValue::Filled { .. } | OldValue::Null
                    if column.type_oid >= FIRST_UNSTABLE_OID =>
                {
                    add.push_str(" DEFAULT NULL");
                }
                OldValue::Filled { .. } | OldValue::Null => {}
            }
            additions.push(add);
        }
        Ok(additions)
    }

    async fn add(&self, session: &mut Session, missing: &[&Column]) -> Result<(), ApplyError> {
        let additions = self.additions(session, missing).await?;
        let (root, _) = self.root(session).await?;
        for (column, add) in missing.iter().zip(additions) {
            let alter = format!("ALTER TABLE {root} {add}");
            put_off::alter(session, self.subscription, &root, &alter).await.map_err(|error| {
                self.refused(error, |refused| {
                    format!(
                        "column {} is new, and the target refused to add it ({refused}). As the \
                         table's owner: {}",
                        quoted(column),
                        self.alter(&add)
                    )
                })
            })?;
            tracing::info!(
                subscription = %self.subscription,
                table = %self.table,
                column = %column.name,
                "column added on the target, as on the publisher"
            );
        }
        Ok(())
    }

    /// Values that the publisher's rows got by a rewrite cannot be had from the log.
    /// The column is added to all tables below `root`.
    async fn check_empty(
        &self,
        session: &mut Session,
        column: &Column,
        root: &TableName,
    ) -> Result<(), ApplyError> {
        let filled = session.query(&format!("SELECT 1 FROM {root} LIMIT 1"), &[]).await?;
        if filled.is_empty() {
            return Ok(());
        }
        let definition = self.type_on_target(session, column).await?;
        Err(self.stops(&format!(
            "column {} is new, and its values in the rows that were there (a default that is \
             computed for each row, or one that the publisher has no more) are not in the log. Add it \
             ({}) and fill it as on the publisher, or copy the table anew",
            quoted(column),
            self.alter(&format!("ADD COLUMN {} {definition}", quoted(column)))
        )))
    }

    async fn file_node_of_copy(&self, session: &mut Session) -> Result<Option<u32>, ApplyError> {
        let published = published_name(self.relation);
        let rows = session
            .query(
                "SELECT file_node FROM farshore.table_copy \
                 WHERE subscription = $1 AND schema_name = $2 AND table_name = $3",
                &[Some(self.subscription), Some(&published.schema), Some(&published.name)],
            )
            .await?;
        Ok(rows.first().and_then(|row| row.parse(0).ok()))
    }

    /// The column's type, as the target names it.
    async fn type_on_target(
        &self,
        session: &mut Session,
        column: &Column,
    ) -> Result<String, ApplyError> {
        let modifier = column.type_modifier.to_string();
        let rows = if column.type_oid < FIRST_UNSTABLE_OID {
            session
                .query(
                    "SELECT pg_catalog.format_type($1::text::oid, $2::text::int4)",
                    &[Some(&column.type_oid.to_string()), Some(&modifier)],
                )
                .await?
        } else {
            let known = self.relation.user_type(column.type_oid);
            let (schema, name) = known.map_or(("", "?"), |known| (&known.schema, &known.name));
            session
                .query(
                    "SELECT pg_catalog.format_type(t.oid, $3::text::int4) FROM pg_catalog.pg_type t \
                     JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace WHERE t.typname = $2 \
                     ORDER BY n.nspname <> $1 LIMIT 1",
                    &[Some(schema), Some(name), Some(&modifier)],
                )
                .await?
        };
        match rows.first().and_then(|row| row.get(0)).filter(|name| *name != "???") {
            Some(name) => Ok(name.to_owned()),
            None => {
                let named = self.relation.user_type(column.type_oid).map(|known| {
                    format!("{}.{}", quote_identifier(&known.schema), quote_identifier(&known.name))
                });
                Err(self.stops(&format!(
                    "column {} is of {}, which the target does not have. Create it there",
                    quoted(column),
                    named.map_or("a type".to_owned(), |named| format!("type {named}"))
                )))
            }
        }
    }

    /// PostgreSQL adds columns at the end, and leaves the others where they are: what has another
    /// name in front of one that stays was renamed. On the target it must have been, too.
    fn check_places(&self, before: &Relation, on_target: &TargetTable) -> Result<(), ApplyError> {
        let moved = |column: &Column, renames| ApplyError::ColumnsMoved {
            subscription: self.subscription.to_owned(),
            table: Box::new(published_name(self.relation)),
            oid: self.relation.oid,
            column: quoted(column),
            renames,
            others: Vec::new(),
        };
        let renamed = renamed_in_place(&before.columns, &self.relation.columns);
        let renamed = renamed.map_err(|column| moved(column, Vec::new()))?;
        let is_there = |name: &str| on_target.columns.iter().any(|there| there.name == name);
        let is_followed =
            |(old, new): &&(&Column, &Column)| is_there(&new.name) && !is_there(&old.name);
        let Some((_, first)) = renamed.iter().find(|pair| !is_followed(pair)) else {
            return Ok(());
        };
        let left = renamed.iter().filter(|pair| !is_followed(pair));
        let rename =
            left.map(|(old, new)| format!("RENAME COLUMN {} TO {}", quoted(old), quoted(new)));
        Err(moved(first, rename.map(|rename| self.alter(&rename)).collect()))
    }

    /// A partition's columns are altered at its root.
    fn alter(&self, what: &str) -> String {
        let root = self.root.get().map_or(self.table, |(root, _)| root);
        format!("ALTER TABLE {root} {what}")
    }

    fn stops(&self, what: &str) -> ApplyError {
        ApplyError::Setup(format!("{}{what}. Then go on (farshore resume)", self.was_altered()))
    }

    fn was_altered(&self) -> String {
        format!(
            "subscription \"{}\": the publisher's table {} was altered: ",
            self.subscription,
            published_name(self.relation)
        )
    }

    /// What stops behind columns that were renamed, which is undone with it: who follows by hand has to
    /// begin with that.
    fn after_renames(&self, error: ApplyError, statements: &str) -> ApplyError {
        match error {
            ApplyError::Setup(told) if !statements.is_empty() => {
                let altered = self.was_altered();
                let told = told.strip_prefix(&altered).unwrap_or(&told);
                ApplyError::Setup(format!(
                    "{altered}columns were renamed, so first of all on the target: {statements}. And \
                     {told}"
                ))
            }
            error => error,
        }
    }
}

pub(super) fn quoted(column: &Column) -> String {
    quote_identifier(&column.name)
}

/// Columns that got another name in front of one that has kept its own, and which one that was: as
/// many are there as before, and each has its place.
///
/// # Errors
/// One that stands where it cannot have come by that.
fn renamed_in_place<'a>(
    before: &'a [Column],
    now: &'a [Column],
) -> Result<Vec<(&'a Column, &'a Column)>, &'a Column> {
    let has = |all: &[Column], name: &str| all.iter().any(|column| column.name == name);
    let mut renamed = Vec::new();
    let (mut left, mut gone) = (before.iter(), Vec::new());
    let mut new: Vec<&Column> = Vec::new();
    for column in now {
        if !has(before, &column.name) {
            new.push(column);
            continue;
        }
        gone.clear();
        // Up to the next one that has stayed, which is to be this one.
        let stayed = left.by_ref().find(|old| {
            let stays = has(now, &old.name);
            if !stays {
                gone.push(*old);
            }
            stays
        });
        let is_in_place = stayed.is_some_and(|stayed| stayed.name == column.name);
        let pairs = || gone.iter().copied().zip(new.iter().copied());
        let are_renamed = new.is_empty()
            || new.len() == gone.len() && pairs().all(|(old, new)| same_type(old, new));
        if !is_in_place || !are_renamed {
            return Err(column);
        }
        if !new.is_empty() {
            renamed.extend(pairs());
        }
        new.clear();
    }
    Ok(renamed)
}

fn same_type(a: &Column, b: &Column) -> bool {
    a.type_oid == b.type_oid && a.type_modifier == b.type_modifier
}

/// Whether `ALTER COLUMN … TYPE` leaves every value as it was, without a `USING` that says otherwise.
fn keeps_values(old: &Column, new: &Column) -> bool {
    // pg_type.dat.
    const INT8: u32 = 20;
    const INT2: u32 = 21;
    const INT4: u32 = 23;
    const TEXT: u32 = 25;
    const VARCHAR: u32 = 1043;
    const TIMES: [u32; 4] = [1083, 1114, 1184, 1266];
    const VARBIT: u32 = 1562;
    const NUMERIC: u32 = 1700;
    let (was, is) = (old.type_modifier, new.type_modifier);
    match (old.type_oid, new.type_oid) {
        (INT2, INT4 | INT8) | (INT4, INT8) | (VARCHAR, TEXT) => true,
        (TEXT, VARCHAR) => is < 0,
        (VARCHAR, VARCHAR) | (VARBIT, VARBIT) => is < 0 || (was >= 0 && is >= was),
        (before, now) if before == now && TIMES.contains(&now) => is < 0 || (was >= 0 && is >= was),
        // Digits in all above, of these behind the point below (numeric.c).
        (NUMERIC, NUMERIC) => {
            is < 0 || (was >= 0 && is >= was && (is - was).trailing_zeros() >= u16::BITS)
        }
        _ => false,
    }
}

/// Whether two definitions are of one table, and not of two which had its name in turn, nor from
/// when it had another name.
pub fn is_same_table(a: &Relation, b: &Relation) -> bool {
    has_same_oid(a, b) && published_name(a) == published_name(b)
}

fn has_same_oid(a: &Relation, b: &Relation) -> bool {
    a.oid == b.oid || a.oid == 0 || b.oid == 0
}

/// Whether two versions of a table have the same columns, of the same types, in the same order.
pub fn same_columns(a: &Relation, b: &Relation) -> bool {
    a.columns.len() == b.columns.len()
        && a.columns.iter().zip(&b.columns).all(|(a, b)| a.name == b.name && same_type(a, b))
}

/// Columns that a target's table has kept. As JSON: a schema of before has no such column.
const COLUMNS_LEFT: &str = "SELECT a.attname FROM farshore.table_copy c \
     JOIN pg_catalog.pg_attribute a ON a.attrelid = pg_catalog.to_regclass($4) AND a.attnum > 0 \
       AND NOT a.attisdropped \
       AND pg_catalog.to_jsonb(c) -> 'columns_left' @> pg_catalog.to_jsonb(a.attnum || ' ' || a.attname) \
     WHERE c.subscription = $1 AND c.schema_name = $2 AND c.table_name = $3";

/// As JSON: a schema of before has no such column.
const TYPE_AS_NOTED: &str = "SELECT FROM farshore.table_copy c \
     JOIN pg_catalog.pg_attribute a ON a.attrelid = pg_catalog.to_regclass($4) AND a.attname = $5 \
       AND NOT a.attisdropped \
       AND pg_catalog.to_jsonb(c) -> 'own_types' \
         @> pg_catalog.to_jsonb(a.attnum || ' ' || a.atttypid || ' ' || a.atttypmod) \
     WHERE c.subscription = $1 AND c.schema_name = $2 AND c.table_name = $3";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_that_keep_every_value() {
        let numeric = |digits: i32, scale: i32| (1700, ((digits << 16) | scale) + 4);
        let column = |(type_oid, type_modifier)| Column {
            key: false,
            name: "c".to_owned(),
            type_oid,
            type_modifier,
        };
        let keeps = |old, new| keeps_values(&column(old), &column(new));
        for (narrow, wide) in [
            ((21, -1), (20, -1)),
            ((1043, 14), (1043, 24)),
            ((1043, 14), (1043, -1)),
            ((1043, 14), (25, -1)),
            (numeric(10, 2), numeric(12, 2)),
            (numeric(10, 2), (1700, -1)),
            ((1114, 3), (1114, 6)),
        ] {
            assert!(keeps(narrow, wide), "{narrow:?} {wide:?}");
            assert!(!keeps(wide, narrow), "{wide:?} {narrow:?}");
        }
        for (old, new) in [
            (numeric(12, 4), numeric(12, 2)),
            (numeric(12, 2), numeric(12, 4)),
            ((25, -1), (1043, 54)),
            ((1042, 7), (1042, 9)),
            ((700, -1), (701, -1)),
            ((23, -1), (1700, -1)),
        ] {
            assert!(!keeps(old, new), "{old:?} {new:?}");
        }
    }

    #[test]
    fn columns_that_were_renamed_are_known_by_their_places() {
        let columns = |names: &str| -> Vec<Column> {
            let column = |name: &str| {
                // One in capitals is of another type.
                let is_other = name.chars().all(char::is_uppercase);
                let type_oid = if is_other { 25 } else { 23 };
                Column { key: false, name: name.to_owned(), type_oid, type_modifier: -1 }
            };
            names.split(' ').map(column).collect()
        };
        let renamed = |before: &str, now: &str| {
            let (before, now) = (columns(before), columns(now));
            let found = renamed_in_place(&before, &now).map(|pairs| {
                let pair = |(old, new): &(&Column, &Column)| format!("{}>{}", old.name, new.name);
                pairs.iter().map(pair).collect::<Vec<_>>().join(" ")
            });
            found.map_err(|column| column.name.clone())
        };
        for (before, now, pairs) in [
            ("i a b", "i a b", ""),
            ("i a b", "i x b", "a>x"),
            ("i a b c", "x a y c", "i>x b>y"),
            ("i a b c", "i x y c", "a>x b>y"),
            // Those behind all that have stayed may be new.
            ("i a b", "i a x", ""),
            ("i a c", "i x c d", "a>x"),
            ("i a b c", "i b c", ""),
            ("i a b c", "i a c x", ""),
        ] {
            assert_eq!(renamed(before, now).as_deref(), Ok(pairs), "{before} to {now}");
        }
        for (before, now, first) in [
            ("i a b", "i b a", "b"),
            ("i a b c", "i x c", "c"),
            ("i a b", "i x y b", "b"),
            ("i a b", "i X b", "b"),
            ("i a b", "i x a b", "a"),
        ] {
            let moved = renamed(before, now).unwrap_err();
            assert_eq!(moved, first, "{before} to {now}");
        }
    }
}
