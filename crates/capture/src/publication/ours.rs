//! Makes and alters the PostgreSQL publication, where it is our own.

use super::{Article, Chosen, PublicationSpec, TableName, ToPublish, Unfit, some_of};
use crate::CaptureError;
use crate::error::is_of_a_dropped_table;
use farshore_model::quote_identifier;
use farshore_pg::{Connection, Row, quote_literal};
use std::collections::BTreeSet;

/// So often in a row tables are listed anew to be published, if one of them is dropped meanwhile.
const LISTS_MAX: u32 = 50;

impl PublicationSpec {
    /// Creates or alters our PostgreSQL publication to publish just what is configured; an adopted
    /// one is only looked up. Returns what is not published although it was configured, for a
    /// person: one table that may not be published holds up no others that are published already.
    pub async fn ensure_publication(
        &self,
        sql: &mut Connection,
    ) -> Result<Vec<String>, CaptureError> {
        let mut tries = 1;
        loop {
            match self.publish_what_is_there(sql).await {
                // Where tables come and go all the time, the next list may hold long enough.
                Err(CaptureError::Interrupted(_)) if tries < LISTS_MAX => tries += 1,
                done => return done,
            }
        }
    }

    async fn publish_what_is_there(
        &self,
        sql: &mut Connection,
    ) -> Result<Vec<String>, CaptureError> {
        let name = self.publication_name();
        let existing = self.existing_comment(sql).await?;
        if self.adopt_publication.is_some() {
            if existing.is_none() {
                return Err(CaptureError::Setup(format!(
                    "publication \"{}\": the publisher has no publication named \"{name}\" to \
                     adopt. Create it, or remove `adopt_publication`",
                    self.name
                )));
            }
            let missing = self.not_published(sql).await;
            if let Some(missing) = missing.map_err(|error| self.publisher_error(error))? {
                tracing::warn!(publication = %self.name, "{missing}");
            }
            return Ok(Vec::new());
        }
        let unfit = if existing.is_some() { Unfit::LeaveOut } else { Unfit::Refuse };
        let Chosen { tables, mut told, all_match, .. } = self.choose(sql, unfit).await?;
        let members_now = self.members_now(sql).await?;
        let joins: Vec<&TableName> =
            tables.keys().filter(|table| !members_now.contains(*table)).collect();
        let leaves: BTreeSet<&TableName> =
            members_now.iter().filter(|table| !tables.contains_key(*table)).collect();
        // What was renamed may be renamed back: taken out, it would have to be copied anew. Until
        // something has its name again nothing leaves, and only joins go on.
        let keeps_all = !all_match && !leaves.is_empty();
        // Where all of it was dropped there is nothing to publish, and no list of nothing either.
        if tables.is_empty() && existing.is_some() || keeps_all && joins.is_empty() {
            return Ok(told);
        }
        let members = members_of(&tables);
        let all: Vec<String> = members.iter().map(only).collect();
        let (members, all) = (members.join(", "), all.join(", "));
        // The statement that made the publication is kept as its comment: PostgreSQL rewrites
        // filters when it stores them, so only this tells whether anything has changed.
        let via_root = self.via_partition_root;
        let mut comment = comment(&members, via_root);
        let quoted = quote_identifier(&name);
        // Who follows the tables looks again where a publication is so.
        let is_followed = matches!(existing, Some(Some(_)));
        // Nothing but a join is put off until capture streams: what is altered then is somebody else's
        // doing.
        let mut only_joins = false;
        let statement = match existing {
            Some(Some(existing)) if existing == comment && joins.is_empty() => {
                return Ok(told);
            }
            Some(existing) if keeps_all => {
                only_joins = true;
                let were_whole = existing.is_some_and(|comment| are_whole(&comment));
                let is_as_wanted = self.articles.is_empty()
                    && were_whole
                    && self.is_via_root(sql).await? == via_root;
                comment = comment_on_kept(&tables, &leaves, via_root, is_as_wanted);
                let joining = tables.iter().filter(|(table, _)| joins.contains(table));
                let joining: ToPublish =
                    joining.map(|(table, article)| (table.clone(), article.clone())).collect();
                let joining: Vec<String> = members_of(&joining).iter().map(only).collect();
                let add = format!("ALTER PUBLICATION {quoted} ADD TABLE {}", joining.join(", "));
                let locks = overlooks_joins(sql.server_version()).then(|| without_writers(&joins));
                in_one(&locks.into_iter().chain([add]).collect::<Vec<_>>())
            }
            Some(existing) => {
                // Nothing is set that is so already: it would look like somebody else's doing.
                let sets_root = self.is_via_root(sql).await? != via_root;
                let existing = existing.unwrap_or_default();
                let were_whole = !existing.is_empty() && are_whole(&existing);
                let sets_all = !self.articles.is_empty() || !were_whole;
                only_joins = !sets_root && !sets_all;
                let mut steps = Vec::new();
                if overlooks_joins(sql.server_version()) {
                    // A filter is overlooked like a join.
                    let otherwise = tables.iter().filter(|(table, article)| {
                        joins.contains(table) || sets_all && !has_member(&existing, table, article)
                    });
                    let otherwise: Vec<&TableName> = otherwise.map(|(table, _)| table).collect();
                    if !otherwise.is_empty() {
                        steps.push(without_writers(&otherwise));
                    }
                }
                if self.articles.is_empty() && were_whole {
                    // What stays is not locked, and may be somebody else's by now.
                    if !joins.is_empty() {
                        let joins: Vec<String> = joins.iter().map(only).collect();
                        let joins = joins.join(", ");
                        steps.push(format!("ALTER PUBLICATION {quoted} ADD TABLE {joins}"));
                    }
                    if !leaves.is_empty() {
                        let leaves: Vec<String> = leaves.iter().map(only).collect();
                        let leaves = leaves.join(", ");
                        steps.push(format!("ALTER PUBLICATION {quoted} DROP TABLE {leaves}"));
                    }
                } else {
                    steps.push(format!("ALTER PUBLICATION {quoted} SET TABLE {all}"));
                }
                if sets_root {
                    steps.push(format!(
                        "ALTER PUBLICATION {quoted} SET (publish_via_partition_root = {via_root})"
                    ));
                }
                in_one(&steps)
            }
            None => create_statement(&quoted, &all, via_root),
        };
        if let Err(error) = sql.simple_query(&statement).await {
            // Outside of a transaction this does nothing.
            sql.simple_query("ROLLBACK").await.map_err(|error| self.publisher_error(error))?;
            if error.sqlstate() == Some("55P03") && is_followed && only_joins {
                let joins: BTreeSet<TableName> = joins.into_iter().cloned().collect();
                told.push(self.joins_later(&joins, sql.server_version(), error));
                return Ok(told);
            }
            return Err(self.refused(&members, error));
        }
        let describe = format!("COMMENT ON PUBLICATION {quoted} IS {}", quote_literal(&comment));
        sql.simple_query(&describe).await.map_err(|error| self.publisher_error(error))?;
        Ok(told)
    }

    /// The tables that the publication has: one that was dropped and made again under its name has
    /// left it.
    pub(super) async fn members_now(
        &self,
        sql: &mut Connection,
    ) -> Result<BTreeSet<TableName>, CaptureError> {
        let rows = sql
            .query(
                "SELECT n.nspname, c.relname FROM pg_publication p \
                 JOIN pg_publication_rel r ON r.prpubid = p.oid \
                 JOIN pg_class c ON c.oid = r.prrelid JOIN pg_namespace n ON n.oid = c.relnamespace \
                 WHERE p.pubname = $1",
                &[Some(&self.publication_name())],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        let name =
            |row: &Row| Some(TableName { schema: row.get(0)?.into(), name: row.get(1)?.into() });
        Ok(rows.iter().filter_map(name).collect())
    }

    /// The comment on the publication, where there is a publication.
    pub(super) async fn existing_comment(
        &self,
        sql: &mut Connection,
    ) -> Result<Option<Option<String>>, CaptureError> {
        let rows = sql
            .query(
                "SELECT obj_description(oid, 'pg_publication') FROM pg_publication \
                 WHERE pubname = $1",
                &[Some(&self.publication_name())],
            )
            .await
            .map_err(|error| self.publisher_error(error))?;
        Ok(rows.first().map(|row| row.get(0).map(str::to_owned)))
    }

    /// While capture is at work: takes tables that match the patterns into our publication, and
    /// tables that do not any more out of it. One that is not there is left to be missed.
    pub(crate) async fn follow_tables(
        &self,
        sql: &mut Connection,
    ) -> Result<Vec<String>, CaptureError> {
        let ours = self.adopt_publication.is_none();
        if ours && matches!(self.existing_comment(sql).await?, Some(Some(_))) {
            return self.ensure_publication(sql).await;
        }
        Ok(Vec::new())
    }

    fn joins_later(
        &self,
        joins: &BTreeSet<TableName>,
        server_version: u32,
        error: farshore_pg::Error,
    ) -> String {
        let (name, tables) = (&self.name, some_of(joins));
        if overlooks_joins(server_version) {
            format!(
                "publication \"{name}\": {tables} can join only while no transaction is open that has \
                 written there: {error}. Tried again; a publisher of version 14.18, 15.13, 16.9, 17.5 \
                 or later needs no such moment"
            )
        } else {
            let error = self.publisher_error(error);
            format!("publication \"{name}\": {tables} cannot join now: {error}")
        }
    }

    pub(super) fn refused(&self, members: &str, error: farshore_pg::Error) -> CaptureError {
        // What is named here was there a moment ago.
        if matches!(error.sqlstate(), Some("42P01" | "3F000")) || is_of_a_dropped_table(&error) {
            return CaptureError::Interrupted(format!(
                "publication \"{}\": {} has lost a table while it was to be published: {error}. \
                 Trying again",
                self.name,
                self.source.redacted()
            ));
        }
        // A table that somebody has for himself, or a lost connection, says nothing of the list.
        if error.is_transient() {
            return self.publisher_error(error);
        }
        let next = match error.sqlstate() {
            // Insufficient privilege.
            Some("42501") => "Run `farshore check` to see which privileges are missing",
            Some(_) => "Correct its tables and articles in the site file",
            None => "See the message",
        };
        CaptureError::Setup(format!(
            "publication \"{}\": {} cannot publish {members}: {error}. {next}",
            self.name,
            self.source.redacted()
        ))
    }
}

/// What the publication lists: each table with its columns and filter, as SQL.
pub(super) fn members_of(tables: &ToPublish) -> Vec<String> {
    tables.iter().map(|(table, article)| member(table, article)).collect()
}

fn member(table: &TableName, article: &Article) -> String {
    let mut member = table.to_string();
    if let Some(columns) = &article.columns {
        let list: Vec<String> = columns.iter().map(|c| quote_identifier(c)).collect();
        member.push_str(&format!(" ({})", list.join(", ")));
    }
    if let Some(filter) = &article.row_filter {
        member.push_str(&format!(" WHERE ({filter})"));
    }
    member
}

/// A member as statements are to name it. Without ONLY the server would add or drop with it all that
/// inherits from it now, and refuse where one of those is a member already, or none any more.
pub(super) fn only(member: impl std::fmt::Display) -> String {
    format!("ONLY {member}")
}

/// Whether a server may go on decoding as if a table had not joined a publication, or had no other
/// filter there, when a transaction is open that has written to the table before and does so after: what
/// the decoder remembers of the table is what that transaction saw, and nothing tells it otherwise when
/// it comes to later ones (PostgreSQL's commit 4909b38af0, "Fix data loss in logical replication").
pub(super) fn overlooks_joins(server_version: u32) -> bool {
    let minor = server_version % 10_000;
    match server_version / 10_000 {
        ..14 => true,
        14 => minor < 18,
        15 => minor < 13,
        16 => minor < 9,
        17 => minor < 5,
        18.. => false,
    }
}

/// How long a table that joins is waited for: who comes to write to it meanwhile waits behind us.
const JOIN_WAIT: &str = "300ms";

/// SQL of a transaction after which no other is open that has written to one of these tables, or to a
/// partition of one. Fails where that would take long.
pub(super) fn without_writers(joins: &[&TableName]) -> String {
    let joins: Vec<String> = joins.iter().map(ToString::to_string).collect();
    format!(
        "SET LOCAL lock_timeout = '{JOIN_WAIT}'; LOCK TABLE {} IN SHARE ROW EXCLUSIVE MODE",
        joins.join(", ")
    )
}

/// Whether a [`comment`] names this very member: with this filter and list of columns. One of a
/// publication that is not as configured yet says nothing of that.
fn has_member(comment: &str, table: &TableName, article: &Article) -> bool {
    let member = member(table, article);
    if !comment.starts_with(MANAGED) {
        return false;
    }
    comment.match_indices(&member).any(|(at, _)| {
        let (before, behind) = (&comment[..at], &comment[at + member.len()..]);
        let begins = before.ends_with(", ") || before.ends_with(": ");
        begins && (behind.is_empty() || behind.starts_with(", "))
    })
}

/// Whether all tables that a [`comment`] names were published without filter and list of columns.
/// One whose name looks as if it had them is none the worse for it.
fn are_whole(comment: &str) -> bool {
    !comment.contains(" WHERE (") && !comment.contains(" (")
}

/// How the comment on a publication begins that is as configured.
const MANAGED: &str = "managed by farshore: ";

pub(super) fn comment(members: &str, via_root: bool) -> String {
    let root = if via_root { "via partition root: " } else { "" };
    format!("{MANAGED}{root}{members}")
}

/// The comment where tables `leaves` are members still, though nothing names them at the moment. Unless
/// all else `is_as_wanted`, it is no wanted publication's, so that the next one is altered to be that.
fn comment_on_kept(
    tables: &ToPublish,
    leaves: &BTreeSet<&TableName>,
    via_root: bool,
    is_as_wanted: bool,
) -> String {
    let mut members = tables.clone();
    members.extend(leaves.iter().map(|table| ((*table).clone(), Article::default())));
    let members = members_of(&members).join(", ");
    if is_as_wanted {
        comment(&members, via_root)
    } else {
        // For `are_whole` it is not.
        format!("managed by farshore (not all as configured yet): {members}")
    }
}

/// These steps as one statement.
fn in_one(steps: &[String]) -> String {
    match steps {
        [] => String::new(),
        [step] => step.clone(),
        steps => format!("BEGIN; {}; COMMIT", steps.join("; ")),
    }
}

pub(super) fn create_statement(quoted_name: &str, members: &str, via_root: bool) -> String {
    // Of nothing as yet: `FOR TABLE` takes no empty list.
    let members = if members.is_empty() { String::new() } else { format!("FOR TABLE {members} ") };
    format!(
        "CREATE PUBLICATION {quoted_name} {members}\
         WITH (publish = 'insert, update, delete, truncate', \
         publish_via_partition_root = {via_root})"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The others are locked where a server would overlook what is set of them.
    #[test]
    fn members_that_stay_as_they_are_are_known_by_the_comment() {
        let article = |columns: &[&str], filter: &str| Article {
            columns: (!columns.is_empty()).then(|| columns.iter().map(|c| (*c).into()).collect()),
            row_filter: (!filter.is_empty()).then(|| filter.to_owned()),
        };
        let table = |name: &str| TableName { schema: "s".into(), name: name.into() };
        let tables: ToPublish = [
            (table("a"), article(&[], "")),
            (table("b"), article(&[], "x IN (1, 2)")),
            (table("c"), article(&["id", "v"], "")),
            (table("d"), article(&["id"], "id > 0")),
        ]
        .into_iter()
        .collect();
        for via_root in [false, true] {
            let comment = comment(&members_of(&tables).join(", "), via_root);
            for (table, article) in &tables {
                assert!(has_member(&comment, table, article), "{table}");
            }
            for (name, columns, filter) in [
                ("a", &[][..], "x > 0"),
                ("b", &[], ""),
                ("b", &[], "x IN (1)"),
                ("c", &["id"], ""),
                ("c", &[], ""),
                ("d", &["id"], ""),
                ("e", &[], ""),
            ] {
                let otherwise = article(columns, filter);
                assert!(!has_member(&comment, &table(name), &otherwise), "{name} {otherwise:?}");
            }
        }
        assert!(!has_member("", &table("a"), &article(&[], "")));
        let leaves = BTreeSet::new();
        let kept = comment_on_kept(&tables, &leaves, false, false);
        assert!(!has_member(&kept, &table("a"), &article(&[], "")), "{kept}");
    }
}
