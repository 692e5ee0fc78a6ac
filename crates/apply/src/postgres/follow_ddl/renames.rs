//! Columns that got other names. The log does not tell a column that was renamed from one that was
//! dropped and another that was added; the numbers that columns have in the publisher's catalogue do,
//! which were noted when the table was copied.

use super::{Follow, renamed_in_place};
use crate::ApplyError;
use crate::postgres::noted_definition::{load_definition, note_definition, published_name};
use crate::postgres::progress::{ColumnNumbers, TableCopyColumn, TableProgress};
use crate::postgres::put_off;
use crate::postgres::session::Session;
use crate::postgres::target_table::{TargetTable, names, target_table};
use crate::remedy;
use farshore_capture::publication::{PublishedTable, TableName};
use farshore_model::{Column, Relation, quote_identifier};
use farshore_pg::Row;
use std::collections::{BTreeMap, BTreeSet};

/// What is noted of a table's columns: their numbers on the publisher, and what those of the target
/// were called, by number, if the target's table is still the one that was seen then. As JSON: a schema
/// of before has no such columns.
const NOTED: &str = "SELECT noted.row ->> 'column_numbers', membership, \
      CASE WHEN (noted.row ->> 'noted_in')::oid = c.tableoid \
        AND (noted.row ->> 'target_oid')::oid = pg_catalog.to_regclass($4) \
      THEN noted.row ->> 'target_columns' END \
    FROM farshore.table_copy c, LATERAL (SELECT pg_catalog.to_jsonb(c)) AS noted (row) \
    WHERE subscription = $1 AND schema_name = $2 AND table_name = $3";

/// The target's columns, by number.
const ON_TARGET: &str = "SELECT attnum, attname FROM pg_catalog.pg_attribute \
    WHERE attrelid = pg_catalog.to_regclass($1) AND attnum > 0 AND NOT attisdropped";

/// A table and all that are partitions of it, or inherit from it.
macro_rules! tree_of {
    ($root:literal) => {
        concat!(
            "WITH RECURSIVE tree (oid) AS (SELECT pg_catalog.to_regclass(",
            $root,
            ")::oid UNION SELECT i.inhrelid FROM tree t \
             JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid) "
        )
    };
}

/// Tables below `$2` that other subscriptions than `$1` fill.
const OF_OTHERS: &str = concat!(
    tree_of!("$2"),
    "SELECT c.subscription, t.oid::pg_catalog.regclass FROM farshore.table_copy c \
     CROSS JOIN LATERAL (SELECT pg_catalog.to_jsonb(c)) AS noted (row) \
     JOIN tree t ON t.oid = (noted.row ->> 'target_oid')::oid \
     WHERE c.subscription <> $1 AND (noted.row ->> 'noted_in')::oid = c.tableoid LIMIT 1"
);

/// Which of the tables `$2` are below `$1`.
const BELOW: &str = concat!(
    tree_of!("$1"),
    "SELECT own.number - 1 FROM unnest($2::text::text[]) WITH ORDINALITY AS own (name, number) \
     JOIN tree t ON t.oid = pg_catalog.to_regclass(own.name)::oid ORDER BY 1"
);

/// See [`NOTED`].
pub(super) struct Noted {
    /// None where nothing is noted.
    pub numbers: ColumnNumbers,
    membership: Option<u32>,
    target: Option<Vec<String>>,
}

/// What is noted of the columns of a published table that is `target` there.
pub(super) async fn noted(
    session: &mut Session,
    subscription: &str,
    published: &TableName,
    target: &TableName,
) -> Result<Noted, ApplyError> {
    let target = target.to_string();
    let which = [
        Some(subscription),
        Some(published.schema.as_str()),
        Some(published.name.as_str()),
        Some(target.as_str()),
    ];
    let noted = session.query(NOTED, &which).await?;
    let text = |column| noted.first().and_then(|row| row.get(column));
    Ok(Noted {
        numbers: text(0).map(ColumnNumbers::from_json).unwrap_or_default(),
        membership: text(1).and_then(|text| text.parse().ok()),
        target: text(2).and_then(|text| serde_json::from_str(text).ok()),
    })
}

/// Old name and new one.
type Renamed = (String, String);

/// A table whose columns are known by their numbers.
pub(super) struct ByNumbers {
    /// The definition that it follows, with the names of now.
    pub before: Relation,
    /// The target's table, where columns were renamed.
    pub on_target: Option<TargetTable>,
    /// The numbers that its columns have.
    pub numbers: ColumnNumbers,
    /// What renamed them.
    pub statements: String,
}

impl Follow<'_> {
    /// Whether columns may have been renamed: some are new and some are gone, or some stand where they
    /// cannot have come by adding and dropping.
    fn may_be_renamed(&self, before: &Relation) -> bool {
        let (old, new) = (&before.columns, &self.relation.columns);
        let lacks = |all: &[Column], name: &str| all.iter().all(|column| column.name != name);
        let has_gone = old.iter().any(|column| lacks(new, &column.name));
        let has_come = new.iter().any(|column| lacks(old, &column.name));
        has_gone && has_come || renamed_in_place(old, new).is_err()
    }

    /// Renames the target's columns as the publisher's were, where their numbers tell which those are.
    /// `None` where nothing can be told: then names and places have to do.
    pub(super) async fn rename(
        &self,
        session: &mut Session,
        before: &Relation,
        on_target: &TargetTable,
    ) -> Result<Option<ByNumbers>, ApplyError> {
        if before.columns.is_empty() || !self.may_be_renamed(before) {
            return Ok(None);
        }
        let published = published_name(self.relation);
        let Noted { numbers: noted, membership, target: were } =
            noted(session, self.subscription, &published, self.table).await?;
        if noted.is_empty() {
            return Ok(None);
        }
        let now = match self.source.published_tables().await {
            Ok(now) => now,
            // A publisher that is gone for good does not hold up what was followed by hand.
            Err(_) if self.has_followed_by_names(before, on_target) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let is_this = |now: &&PublishedTable| {
            let is_noted = |membership: u32| {
                now.membership == membership || now.memberships_above.contains(&membership)
            };
            now.oid == self.relation.oid
                && now.table == published
                && membership.is_some_and(is_noted)
        };
        let now = now.iter().find(is_this);
        let found = now.and_then(|now| {
            let renamed = renamed(&before.columns, &noted, &self.relation.columns, now)?;
            Some((renamed, ColumnNumbers::in_order(&self.relation.columns, now)))
        });
        let Some((renamed, numbers)) = found else { return Ok(None) };
        let Some(left) = left_on_target(session, self.table, &renamed, on_target, were).await?
        else {
            self.check_places(before, on_target)?;
            return Err(self.stops(&format!(
                "columns have other names ({}), and the target has both names of one, or neither, and \
                 does not tell whether it was renamed there. Rename it there by hand, without a column \
                 of the other name; or {}",
                told(&renamed),
                remedy::resync(self.subscription, Some(&published))
            )));
        };
        let statements = match left.is_empty() {
            true => String::new(),
            false => self.rename_on_target(session, &left).await?,
        };
        let mut before = before.clone();
        rename_columns(&mut before.columns, &renamed);
        let on_target = match left.is_empty() {
            true => None,
            false => target_table(session, self.table).await?,
        };
        Ok(Some(ByNumbers { before, on_target, numbers, statements }))
    }

    /// Whether the target has all columns, and by their places none of them is still to be renamed.
    fn has_followed_by_names(&self, before: &Relation, on_target: &TargetTable) -> bool {
        let is_there =
            |column: &Column| on_target.columns.iter().any(|there| there.name == column.name);
        self.check_places(before, on_target).is_ok() && self.relation.columns.iter().all(is_there)
    }

    /// Refuses a version in which a column's name is another column's, where the publisher's catalogue is
    /// ahead of it, and so does not tell what each of its columns is: by names and places the one may
    /// have been dropped and the other added.
    pub(super) async fn check_names(
        &self,
        session: &mut Session,
        before: &Relation,
        on_target: &TargetTable,
    ) -> Result<(), ApplyError> {
        if before.columns.is_empty()
            || !self.may_be_renamed(before)
            || self.has_followed_by_names(before, on_target)
        {
            return Ok(());
        }
        let published = published_name(self.relation);
        let noted = noted(session, self.subscription, &published, self.table).await?.numbers;
        // Nothing is known then, as ever.
        let Ok(all) = self.source.published_tables().await else { return Ok(()) };
        let is_this =
            |now: &&PublishedTable| now.oid == self.relation.oid && now.table == published;
        let Some(now) = all.iter().find(is_this).map(ColumnNumbers::of) else { return Ok(()) };
        let stays = |column: &&Column| before.columns.iter().any(|old| old.name == column.name);
        let is_another = |column: &&Column| {
            let numbers = noted.number(&column.name).zip(now.number(&column.name));
            numbers.is_some_and(|(before, now)| before != now)
        };
        match self.relation.columns.iter().filter(stays).find(is_another) {
            None => Ok(()),
            Some(column) => Err(ApplyError::ColumnsMoved {
                subscription: self.subscription.to_owned(),
                table: Box::new(published),
                oid: self.relation.oid,
                column: quote_identifier(&column.name),
                renames: Vec::new(),
                others: Vec::new(),
            }),
        }
    }

    async fn rename_on_target(
        &self,
        session: &mut Session,
        renamed: &[Renamed],
    ) -> Result<String, ApplyError> {
        let (root, is_in_tree) = self.root(session).await?;
        if is_in_tree {
            let (_, publishers_root) = self.dropped(&[]).await?;
            if self.names.table(&publishers_root) != root {
                return Err(self.stops(&format!(
                    "columns have other names ({}), and on the target the table is a partition of \
                     {root}, whose columns have not: take it out there (ALTER TABLE {root} DETACH \
                     PARTITION {}) and rename them, or rename those of all of its partitions",
                    told(renamed),
                    self.table
                )));
            }
        }
        let kin = self.kin(session, &root).await?;
        let statements: Vec<String> =
            steps(renamed).iter().map(|step| format!("ALTER TABLE {root} {step}")).collect();
        let statements = statements.join("; ");
        put_off::alter(session, self.subscription, &root, &statements).await.map_err(|error| {
            self.refused(error, |refused| {
                format!(
                    "columns have other names ({}), and the target refused to rename them \
                     ({refused}). As the table's owner, and where they are inherited from the table \
                     that they come from: {statements}",
                    told(renamed)
                )
            })
        })?;
        for table in kin {
            self.rename_in_notes(session, &table, renamed).await?;
        }
        tracing::info!(
            subscription = %self.subscription,
            table = %self.table,
            columns = %told(renamed),
            "columns renamed on the target, as on the publisher"
        );
        Ok(statements)
    }

    /// Other copied tables whose columns are renamed with those of `root`.
    ///
    /// # Errors
    /// One of them is another subscription's.
    async fn kin(
        &self,
        session: &mut Session,
        root: &TableName,
    ) -> Result<Vec<TableName>, ApplyError> {
        let root = root.to_string();
        let others = session.query(OF_OTHERS, &[Some(self.subscription), Some(&root)]).await?;
        if let Some(row) = others.first() {
            return Err(self.stops(&format!(
                "columns have other names, and on the target {} is renamed with them, which \
                 subscription \"{}\" fills: rename them there by hand once both have come as far",
                row.get(1).unwrap_or_default(),
                row.get(0).unwrap_or_default()
            )));
        }
        let published = published_name(self.relation);
        let mut copied = session.load_tables(self.subscription).await?;
        copied.retain(|copied| copied.table != published);
        let targets = copied.iter().map(|copied| self.names.table(&copied.table));
        let targets: Vec<TableName> = targets.collect();
        let rows = session.query(BELOW, &[Some(&root), Some(&names(&targets))]).await?;
        let number = |row: &Row| row.parse::<usize>(0).map_err(|error| session.error(error));
        let numbers: Vec<usize> = rows.iter().map(number).collect::<Result<_, _>>()?;
        let kin = numbers.iter().filter_map(|number| copied.get(*number));
        let kin: Vec<&TableProgress> = kin.collect();
        // Its rows came under the new names, into columns that had the old ones.
        if let Some(later) = kin.iter().find(|kin| !kin.copied || kin.copied_at > self.at) {
            return Err(self.stops(&format!(
                "columns have other names, and on the target {} is renamed with them, which was copied \
                 later than that. To have this one copied anew as well: {}",
                later.table,
                remedy::resync(self.subscription, Some(&published))
            )));
        }
        Ok(kin.into_iter().map(|kin| kin.table.clone()).collect())
    }

    /// What is noted of the columns of another copied table goes by the new names too: what comes for
    /// it is compared with that.
    async fn rename_in_notes(
        &self,
        session: &mut Session,
        table: &TableName,
        renamed: &[Renamed],
    ) -> Result<(), ApplyError> {
        let target = self.names.table(table);
        let mut noted = noted(session, self.subscription, table, &target).await?.numbers;
        if noted.rename(renamed) {
            let noted = [(table.clone(), noted.to_json())];
            let column = TableCopyColumn::ColumnNumbers;
            session.note_of_tables(self.subscription, column, &noted).await?;
        }
        let definition = load_definition(session, self.subscription, table).await?;
        if let Ok(Some(mut definition)) = definition {
            rename_columns(&mut definition.columns, renamed);
            let names = (table, &target);
            note_definition(session, self.subscription, names, &definition).await?;
        }
        Ok(())
    }

    /// Notes the numbers that the columns have now.
    pub(super) async fn note_numbers(
        &self,
        session: &mut Session,
        numbers: &ColumnNumbers,
    ) -> Result<(), ApplyError> {
        let noted = [(published_name(self.relation), numbers.to_json())];
        let column = TableCopyColumn::ColumnNumbers;
        session.note_of_tables(self.subscription, column, &noted).await.map(drop)
    }
}

fn rename_columns(columns: &mut [Column], renamed: &[Renamed]) {
    for column in columns {
        if let Some((_, new)) = renamed.iter().find(|(old, _)| *old == column.name) {
            column.name.clone_from(new);
        }
    }
}

fn told(renamed: &[Renamed]) -> String {
    let told = |(old, new): &Renamed| {
        format!("{} is {} now", quote_identifier(old), quote_identifier(new))
    };
    renamed.iter().map(told).collect::<Vec<_>>().join(", ")
}

/// What renames the columns, none to a name that another one has at that moment.
fn steps(renamed: &[Renamed]) -> Vec<String> {
    let rename = |old: &str, new: &str| {
        format!("RENAME COLUMN {} TO {}", quote_identifier(old), quote_identifier(new))
    };
    let is_old = |name: &String| renamed.iter().any(|(old, _)| old == name);
    if !renamed.iter().any(|(_, new)| is_old(new)) {
        return renamed.iter().map(|(old, new)| rename(old, new)).collect();
    }
    let aside = |at: usize| format!("farshore renames {at}");
    let away = renamed.iter().enumerate().map(|(at, (old, _))| rename(old, &aside(at)));
    let back = renamed.iter().enumerate().map(|(at, (_, new))| rename(&aside(at), new));
    away.chain(back).collect()
}

/// Which columns of `before` have other names in `relation`; `None` where that cannot be told. `now`
/// is what the catalogue says, which may be later than `relation`.
///
/// A number is never used again. So where the columns are those that were noted, and as many, they were
/// the same ones all the time, in the same order: places tell which is which, whatever they are called
/// now. Where others have come or gone since, the catalogue has to say what the log says, name by name.
fn renamed(
    before: &[Column],
    noted: &ColumnNumbers,
    relation: &[Column],
    now: &PublishedTable,
) -> Option<Vec<Renamed>> {
    let old: Vec<(i16, &str)> = before
        .iter()
        .map(|column| Some((noted.number(&column.name)?, column.name.as_str())))
        .collect::<Option<_>>()?;
    let numbers: Vec<i16> =
        now.columns.iter().map(|column| column.number).collect::<Option<_>>()?;
    if numbers.len() != relation.len() || !numbers.is_sorted() {
        return None;
    }
    let names = relation.iter().map(|column| column.name.as_str());
    let new: BTreeMap<i16, &str> = numbers.iter().copied().zip(names).collect();
    let known: BTreeSet<i16> = old.iter().map(|(number, _)| *number).collect();
    let newest = known.last().copied().unwrap_or_default();
    // Numbers grow from place to place, and with what is added.
    if !old.is_sorted_by(|(a, _), (b, _)| a < b)
        || new.keys().any(|number| !known.contains(number) && *number < newest)
    {
        return None;
    }
    let has_type_as_noted = |(number, column): (&i16, &Column)| {
        let was = old.iter().find(|(known, _)| known == number);
        was.is_some_and(|(_, name)| noted.has_type(name, column))
    };
    let are_the_same = known.len() == new.len() && new.keys().zip(relation).all(has_type_as_noted);
    let is_as_now = || {
        relation.iter().zip(&now.columns).all(|(column, now)| {
            column.name == now.name
                && (column.type_oid, column.type_modifier) == (now.type_oid, now.type_modifier)
        })
    };
    if !are_the_same && !is_as_now() {
        return None;
    }
    let mut renamed = Vec::new();
    for (number, name) in &old {
        match new.get(number) {
            Some(now) if now != name => renamed.push(((*name).to_owned(), (*now).to_owned())),
            Some(_) => {}
            // It was dropped; one that has its name is another, with other values.
            None if new.values().any(|now| now == name) => return None,
            None => {}
        }
    }
    Some(renamed)
}

/// What of `renamed` is still to be done on the target; `None` where it has not got these columns, or
/// nobody can tell. `were`: the target's columns with their numbers when the definition was noted.
async fn left_on_target(
    session: &mut Session,
    table: &TableName,
    renamed: &[Renamed],
    on_target: &TargetTable,
    were: Option<Vec<String>>,
) -> Result<Option<Vec<Renamed>>, ApplyError> {
    let has = |name: &str| on_target.columns.iter().any(|column| column.name == name);
    if renamed.iter().any(|(old, new)| has(old) && has(new)) {
        // By names nobody could tell whether it was done by hand.
        let Some(were) = were else { return Ok(None) };
        let mut are = BTreeMap::new();
        for row in session.query(ON_TARGET, &[Some(&table.to_string())]).await? {
            let number: i16 = row.parse(0).map_err(|error| session.error(error))?;
            are.insert(number, row.get(1).unwrap_or_default().to_owned());
        }
        return Ok(left_by_numbers(renamed, &were, &are));
    }
    if renamed.iter().any(|(old, new)| !has(old) && !has(new)) {
        return Ok(None);
    }
    let left = renamed.iter().filter(|(old, _)| has(old));
    Ok(Some(left.cloned().collect()))
}

/// As [`left_on_target`], where all or nothing was done.
fn left_by_numbers(
    renamed: &[Renamed],
    were: &[String],
    are: &BTreeMap<i16, String>,
) -> Option<Vec<Renamed>> {
    let name_now = |old: &str| {
        let number_of = |were: &String| {
            let (number, name) = were.split_once(' ')?;
            (name == old).then(|| number.parse().ok()).flatten()
        };
        are.get(&were.iter().find_map(number_of)?)
    };
    let is_old = |name: &String| renamed.iter().any(|(old, _)| old == name);
    let is_free = |name: &String| is_old(name) || are.values().all(|there| there != name);
    if renamed.iter().all(|(old, new)| name_now(old) == Some(old) && is_free(new)) {
        return Some(renamed.to_vec());
    }
    renamed.iter().all(|(old, new)| name_now(old) == Some(new)).then(Vec::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::postgres::progress::tests::leaf;
    use farshore_capture::publication::PublishedColumn;

    /// `name`, or `number:name`; one in capitals is of another type.
    fn columns(text: &str) -> Vec<(i16, Column)> {
        let column = |(at, word): (usize, &str)| {
            let place = i16::try_from(at + 1).unwrap();
            let (number, name) = match word.split_once(':') {
                Some((number, name)) => (number.parse().unwrap(), name),
                None => (place, word),
            };
            let type_oid = if name.chars().all(char::is_uppercase) { 25 } else { 23 };
            let name = name.to_lowercase();
            (number, Column { key: false, name, type_oid, type_modifier: -1 })
        };
        text.split(' ').enumerate().map(column).collect()
    }

    fn published(text: &str) -> PublishedTable {
        let column = |(number, column): (i16, Column)| PublishedColumn {
            name: column.name,
            type_oid: column.type_oid,
            type_modifier: column.type_modifier,
            number: Some(number),
        };
        PublishedTable { columns: columns(text).into_iter().map(column).collect(), ..leaf(1, &[]) }
    }

    fn only(text: &str) -> Vec<Column> {
        columns(text).into_iter().map(|(_, column)| column).collect()
    }

    #[test]
    fn numbers_tell_what_was_renamed() {
        let of = |noted: &str, relation: &str, now: &str| {
            let numbers = ColumnNumbers::of(&published(noted));
            let found = renamed(&only(noted), &numbers, &only(relation), &published(now));
            let pair = |(old, new): &Renamed| format!("{old}>{new}");
            found.map(|found| found.iter().map(pair).collect::<Vec<_>>().join(" "))
        };
        for (noted, relation, now, told) in [
            ("i a b", "i a x", "i a x", "b>x"),
            ("i a b", "i b a", "i b a", "a>b b>a"),
            // It has other names by now.
            ("i a b", "i b a", "i a b", "a>b b>a"),
            ("i a b", "i x b", "i y z", "a>x"),
            // An integer key becomes a larger one.
            ("id a X", "id_old a ID", "id_old a ID", "id>id_old x>id"),
            // Dropped and added, the catalogue says the same.
            ("i a b", "i a c", "i a 4:c", ""),
            ("i a b", "i x c", "i 2:x 4:c", "a>x"),
            ("i a b c", "i b", "i 3:b", ""),
            ("i a b", "i c b a", "i c b 4:a", "a>c"),
        ] {
            assert_eq!(
                of(noted, relation, now).as_deref(),
                Some(told),
                "{noted}: {relation}, {now}"
            );
        }
        for (noted, relation, now) in [
            // The catalogue is ahead, and columns have come or gone.
            ("i a b", "i a c", "i a 4:d"),
            ("i a b", "i x b", "i 3:b"),
            ("i a b", "i x b", "i x b 4:c"),
            ("i a b", "i a C", "i a 4:c"),
            // Other values under an old name.
            ("i a b", "i b a", "i 3:b 4:a"),
            ("i a b c", "i c b", "i 4:c 5:b"),
            // Noted when the catalogue was ahead of the log already.
            ("i a b 5:c 4:d", "i a b d c", "i a b 4:d 5:c"),
            ("i a b 5:c", "i a b d c", "i a b 4:d 5:c"),
        ] {
            assert_eq!(of(noted, relation, now), None, "{noted}: {relation}, {now}");
        }
        let unknown = ColumnNumbers::default();
        assert!(renamed(&only("i a"), &unknown, &only("i b"), &published("i b")).is_none());
    }

    #[test]
    fn no_name_is_given_twice() {
        let pairs = |text: &str| -> Vec<Renamed> {
            let pair = |word: &str| {
                let (old, new) = word.split_once('>').unwrap();
                (old.to_owned(), new.to_owned())
            };
            text.split(' ').map(pair).collect()
        };
        assert_eq!(steps(&pairs("a>x b>y")), ["RENAME COLUMN a TO x", "RENAME COLUMN b TO y"]);
        let crossed = steps(&pairs("a>b b>a"));
        assert_eq!(crossed.len(), 4, "{crossed:?}");
        assert_eq!(crossed[0], "RENAME COLUMN a TO \"farshore renames 0\"");
        assert_eq!(crossed[3], "RENAME COLUMN \"farshore renames 1\" TO a");

        let crossed = pairs("a>b b>a");
        let were = ["1 i", "2 a", "4 b"].map(str::to_owned);
        let are = |names: &str| -> BTreeMap<i16, String> {
            columns(names).into_iter().map(|(number, column)| (number, column.name)).collect()
        };
        assert_eq!(left_by_numbers(&crossed, &were, &are("i a 4:b")), Some(crossed.clone()));
        assert_eq!(left_by_numbers(&crossed, &were, &are("i b 4:a")), Some(Vec::new()));
        assert_eq!(left_by_numbers(&crossed, &were, &are("i b 5:a")), None);
        let one = pairs("a>b");
        assert_eq!(
            left_by_numbers(&one, &were, &are("i a 4:b")),
            None,
            "it has a column of that name"
        );
        assert_eq!(left_by_numbers(&crossed, &were[..2], &are("i a 4:b")), None);
    }
}
