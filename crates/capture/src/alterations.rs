//! Whether something else altered the PostgreSQL publication.
//!
//! What a publication does not publish leaves no trace in the stream: a table taken out of it, or
//! `publish = 'insert'`, is a gap that only the catalog tells of. So the publication's shape is
//! noted in the store, compared at every start, and looked at again while streaming.

use crate::publication::PublicationSpec;
use crate::{CaptureError, slot};
use farshore_model::quote_identifier;
use farshore_pg::Connection;
use farshore_store::LogStore;
use std::collections::BTreeMap;

const NOTE_SHAPE: &str = "publication.shape";

/// What the catalog says of a publication.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Another number after it was dropped and made again.
    oid: String,
    /// The transaction that wrote its catalog row last: adding and removing tables does not.
    version: String,
    owner: String,
    /// Which operations it publishes, and how.
    publishes: String,
    /// Numbers of memberships by the OIDs of tables.
    members: BTreeMap<u32, u32>,
    /// The server's hash of the members.
    members_hash: String,
    /// Schemas of which it publishes all tables, or did.
    schemas: BTreeMap<u32, InSchema>,
}

/// The membership of a schema (`FOR TABLES IN SCHEMA`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct InSchema {
    /// Another number after it has left and come back.
    number: u32,
    /// It has not left.
    is_in: bool,
}

/// What an altered publication means.
#[derive(Debug, PartialEq, Eq)]
enum Alteration {
    /// Changes may be missing that nobody can tell.
    Gap(String),
    /// Tables that are members no longer, or became members anew.
    TakenOut(Vec<u32>),
    /// Schemas that are members no longer.
    SchemasTakenOut(Vec<u32>),
}

impl Shape {
    /// The form of the note in the store.
    fn encode(&self) -> String {
        let members: Vec<String> =
            self.members.iter().map(|(table, number)| format!("{table}:{number}")).collect();
        let schemas = self.schemas.iter().map(|(schema, InSchema { number, is_in })| {
            format!("{schema}:{number}:{}", if *is_in { "in" } else { "out" })
        });
        let schemas: Vec<String> = schemas.collect();
        let Shape { oid, version, owner, publishes, members_hash, .. } = self;
        let (members, schemas) = (members.join(","), schemas.join(","));
        format!("{oid};{version};{owner};{publishes};{members_hash};{members};{schemas}")
    }

    fn decode(note: &str) -> Option<Shape> {
        let mut fields = note.split(';').map(str::to_owned);
        let [oid, version, owner, publishes, members_hash, members] =
            std::array::from_fn(|_| fields.next());
        Some(Shape {
            oid: oid?,
            version: version?,
            owner: owner?,
            publishes: publishes?,
            members_hash: members_hash?,
            members: decode_members(&members?)?,
            // Notes of earlier versions end before.
            schemas: decode_schemas(&fields.next().unwrap_or_default())?,
        })
    }

    /// Remembers schemas that `before` had: one that comes back has missed changes.
    fn remember(&mut self, before: &Shape) {
        for (schema, known) in &before.schemas {
            self.schemas.entry(*schema).or_insert(InSchema { is_in: false, ..*known });
        }
    }

    /// What it means that the publication looks like `now`.
    fn compare(&self, now: Option<&Shape>) -> Option<Alteration> {
        let gap = |what: String| Some(Alteration::Gap(what));
        let Some(now) = now else { return gap("was dropped by something else".to_owned()) };
        if now.oid != self.oid {
            return gap("was dropped by something else, and made again".to_owned());
        }
        if now.publishes != self.publishes {
            return gap(format!(
                "was altered by something else: it published {}, and now {}",
                self.publishes, now.publishes
            ));
        }
        if now.version != self.version && now.owner == self.owner {
            return gap("was altered by something else, and set back".to_owned());
        }
        let came_back = self.schemas.iter().any(|(schema, known)| {
            now.schemas.get(schema).is_some_and(|now| now.is_in && now.number != known.number)
        });
        if came_back {
            return gap("had a schema taken out of it by something else, and put back".to_owned());
        }
        let left = self
            .members
            .iter()
            .filter(|(table, number)| now.members.get(table).is_none_or(|now| now != *number));
        let left: Vec<u32> = left.map(|(table, _)| *table).collect();
        if !left.is_empty() {
            return Some(Alteration::TakenOut(left));
        }
        let is_in = |shape: &Shape, schema| shape.schemas.get(schema).is_some_and(|s| s.is_in);
        let schemas = self.schemas.keys().filter(|s| is_in(self, s) && !is_in(now, s));
        let schemas: Vec<u32> = schemas.copied().collect();
        (!schemas.is_empty()).then_some(Alteration::SchemasTakenOut(schemas))
    }
}

fn decode_schemas(text: &str) -> Option<BTreeMap<u32, InSchema>> {
    let members = text.split(',').filter(|member| !member.is_empty());
    members
        .map(|member| {
            let mut parts = member.split(':');
            let (schema, number) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
            Some((schema, InSchema { number, is_in: parts.next() != Some("out") }))
        })
        .collect()
}

fn decode_members(text: &str) -> Option<BTreeMap<u32, u32>> {
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| pair.split_once(':'))
        .map(|pair| {
            let (table, number) = pair?;
            Some((table.parse().ok()?, number.parse().ok()?))
        })
        .collect()
}

/// The publication as it is now; without its members where they are those of `known`.
async fn look(
    spec: &PublicationSpec,
    sql: &mut Connection,
    known: Option<&Shape>,
) -> Result<Option<Shape>, CaptureError> {
    let generated = if sql.server_version() >= 180_000 {
        "|| CASE pubgencols WHEN 's' THEN ', stored generated columns' ELSE '' END"
    } else {
        ""
    };
    // Schemas came with 15.
    let schemas = if sql.server_version() >= 150_000 {
        "(SELECT string_agg(pnnspid || ':' || oid, ',' ORDER BY pnnspid) \
          FROM pg_publication_namespace WHERE pnpubid = p.oid)"
    } else {
        "NULL"
    };
    // Members are many; so their hash comes first, and then what is new.
    let text = format!(
        "SELECT p.oid, p.xmin, p.pubowner, \
           concat_ws(', ', CASE WHEN pubinsert THEN 'insert' END, \
             CASE WHEN pubupdate THEN 'update' END, CASE WHEN pubdelete THEN 'delete' END, \
             CASE WHEN pubtruncate THEN 'truncate' END) \
           || CASE WHEN pubviaroot THEN ' via partition roots' ELSE '' END \
           || CASE WHEN puballtables THEN ' of all tables' ELSE '' END {generated}, \
           md5(m.list), CASE WHEN md5(m.list) IS DISTINCT FROM $2 THEN m.list END, {schemas} \
         FROM pg_publication p, LATERAL (SELECT coalesce(string_agg(prrelid || ':' || oid, ',' \
           ORDER BY prrelid), '') AS list FROM pg_publication_rel WHERE prpubid = p.oid) AS m \
         WHERE pubname = $1"
    );
    let known_hash = known.map_or("", |shape| shape.members_hash.as_str());
    let rows = sql
        .query(&text, &[Some(&spec.publication_name()), Some(known_hash)])
        .await
        .map_err(|error| spec.publisher_error(error))?;
    let Some(row) = rows.first() else { return Ok(None) };
    let field = |i: usize| row.get(i).unwrap_or_default().to_owned();
    let members = match (row.get(5), known) {
        (Some(list), _) => decode_members(list).unwrap_or_default(),
        (None, Some(known)) => known.members.clone(),
        (None, None) => BTreeMap::new(),
    };
    Ok(Some(Shape {
        oid: field(0),
        version: field(1),
        owner: field(2),
        publishes: field(3),
        members_hash: field(4),
        members,
        schemas: decode_schemas(&field(6)).unwrap_or_default(),
    }))
}

/// Names of those of these tables that still exist: a table that was dropped leaves every
/// publication, and nothing is missing.
async fn still_there(
    spec: &PublicationSpec,
    sql: &mut Connection,
    tables: &[u32],
) -> Result<Vec<String>, CaptureError> {
    let list: Vec<String> = tables.iter().map(u32::to_string).collect();
    let rows = sql
        .query(
            "SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n \
             ON n.oid = c.relnamespace WHERE c.oid = ANY ($1::oid[]) ORDER BY 1, 2",
            &[Some(&format!("{{{}}}", list.join(",")))],
        )
        .await
        .map_err(|error| spec.publisher_error(error))?;
    let name = |i: usize, row: &farshore_pg::Row| quote_identifier(row.get(i).unwrap_or_default());
    Ok(rows.iter().map(|row| format!("{}.{}", name(0, row), name(1, row))).collect())
}

/// A schema that was dropped leaves every publication as well, and nothing is missing.
async fn warn_of_schemas(
    spec: &PublicationSpec,
    sql: &mut Connection,
    schemas: &[u32],
) -> Result<(), CaptureError> {
    let list: Vec<String> = schemas.iter().map(u32::to_string).collect();
    let rows = sql
        .query(
            "SELECT nspname FROM pg_namespace WHERE oid = ANY ($1::oid[]) ORDER BY 1",
            &[Some(&format!("{{{}}}", list.join(",")))],
        )
        .await
        .map_err(|error| spec.publisher_error(error))?;
    for row in &rows {
        tracing::warn!(
            "publication \"{}\": something else took schema {} out of PostgreSQL publication \"{}\": \
             changes of its tables are not carried. When it is put back, the publication stops, \
             since they are missing",
            spec.name,
            quote_identifier(row.get(0).unwrap_or_default()),
            spec.publication_name()
        );
    }
    Ok(())
}

/// Before capture starts: refuses a publication whose changes may be missing, and makes sure that
/// it publishes what is configured; returns what it does not, for a person.
pub(crate) async fn ensure_publication(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &dyn LogStore,
) -> Result<Vec<String>, CaptureError> {
    let noted = store.note(NOTE_SHAPE).as_deref().and_then(Shape::decode);
    if let Some(noted) = &noted {
        let now = look(spec, sql, Some(noted)).await?;
        match noted.compare(now.as_ref()) {
            Some(Alteration::Gap(what)) => return Err(gap(spec, &what)),
            Some(Alteration::TakenOut(tables)) => {
                let tables = still_there(spec, sql, &tables).await?;
                if !tables.is_empty() {
                    tracing::warn!("{}", taken_out(spec, &tables));
                    forget_definition(spec, sql).await?;
                }
            }
            Some(Alteration::SchemasTakenOut(schemas)) => {
                warn_of_schemas(spec, sql, &schemas).await?;
            }
            None => {}
        }
    }
    let left_out = spec.ensure_publication(sql).await?;
    if let Some(mut shape) = look(spec, sql, None).await? {
        if let Some(noted) = &noted {
            shape.remember(noted);
        }
        store.set_note(NOTE_SHAPE, &shape.encode())?;
    }
    Ok(left_out)
}

/// Our own publication keeps its definition as its comment; without it, it is defined again.
async fn forget_definition(
    spec: &PublicationSpec,
    sql: &mut Connection,
) -> Result<(), CaptureError> {
    if spec.adopt_publication.is_some() {
        return Ok(());
    }
    let name = quote_identifier(&spec.publication_name());
    sql.simple_query(&format!("COMMENT ON PUBLICATION {name} IS NULL"))
        .await
        .map_err(|error| spec.publisher_error(error))?;
    Ok(())
}

fn gap(spec: &PublicationSpec, what: &str) -> CaptureError {
    CaptureError::Gap(format!(
        "publication \"{}\": PostgreSQL publication \"{}\" on {} {what}. Changes may be missing \
         from its stream. {}",
        spec.name,
        spec.publication_name(),
        spec.source.redacted(),
        slot::copy_anew(&spec.name)
    ))
}

fn taken_out(spec: &PublicationSpec, tables: &[String]) -> String {
    let next = match &spec.adopt_publication {
        Some(_) => "Their changes are not carried while they are not in it",
        None => {
            "They are put back, and are to be copied anew: empty them on the targets, and restart \
             this node"
        }
    };
    format!(
        "publication \"{}\": something else took {} out of PostgreSQL publication \"{}\" or changed \
         its filter or columns: changes since then are missing. {next}",
        spec.name,
        tables.join(", "),
        spec.publication_name()
    )
}

/// Looks at the publication again and again.
pub(crate) struct Watch {
    known: Option<Shape>,
    /// It was not there when last looked for.
    missing: bool,
}

impl Watch {
    /// Begins with the publication as [`ensure_publication`] left it.
    pub fn new(store: &dyn LogStore) -> Watch {
        let known = store.note(NOTE_SHAPE).as_deref().and_then(Shape::decode);
        Watch { known, missing: false }
    }

    /// Fails when the publication was altered so that capture must not go on as it is.
    pub async fn look(
        &mut self,
        spec: &PublicationSpec,
        sql: &mut Connection,
    ) -> Result<(), CaptureError> {
        let Some(known) = &self.known else { return Ok(()) };
        let mut now = look(spec, sql, Some(known)).await?;
        // The stream may have more to say of a publication that is gone: it goes first.
        if now.is_none() && !std::mem::replace(&mut self.missing, true) {
            return Ok(());
        }
        match known.compare(now.as_ref()) {
            Some(Alteration::Gap(what)) => return Err(gap(spec, &what)),
            Some(Alteration::TakenOut(tables)) => {
                let tables = still_there(spec, sql, &tables).await?;
                if !tables.is_empty() && spec.adopt_publication.is_none() {
                    return Err(CaptureError::Interrupted(taken_out(spec, &tables)));
                }
                if !tables.is_empty() {
                    tracing::warn!("{}", taken_out(spec, &tables));
                }
            }
            Some(Alteration::SchemasTakenOut(schemas)) => {
                warn_of_schemas(spec, sql, &schemas).await?;
            }
            None => {}
        }
        if let Some(now) = &mut now {
            now.remember(known);
        }
        self.known = now;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape() -> Shape {
        Shape {
            oid: "16384".into(),
            version: "750".into(),
            owner: "10".into(),
            publishes: "insert, update, delete, truncate".into(),
            members: BTreeMap::from([(1, 100), (2, 101)]),
            members_hash: "abc".into(),
            schemas: BTreeMap::from([
                (5, InSchema { number: 200, is_in: true }),
                (6, InSchema { number: 201, is_in: false }),
            ]),
        }
    }

    #[test]
    fn a_note_is_read_as_it_was_written() {
        assert_eq!(Shape::decode(&shape().encode()), Some(shape()));
        let empty = Shape { members: BTreeMap::new(), ..shape() };
        assert_eq!(Shape::decode(&empty.encode()), Some(empty));
        let earlier = "16384;750;10;insert, update, delete, truncate;abc;1:100,2:101";
        let without = Shape { schemas: BTreeMap::new(), ..shape() };
        assert_eq!(Shape::decode(earlier), Some(without));
        assert_eq!(Shape::decode("1;2;3"), None);
        assert_eq!(Shape::decode("1;2;3;4;5;6:x"), None);
    }

    #[test]
    fn only_what_can_miss_changes_is_an_alteration() {
        let is_gap =
            |now: Option<Shape>| matches!(shape().compare(now.as_ref()), Some(Alteration::Gap(_)));
        assert!(is_gap(None));
        assert!(is_gap(Some(Shape { oid: "2".into(), ..shape() })));
        assert!(is_gap(Some(Shape { publishes: "insert".into(), ..shape() })));
        assert!(is_gap(Some(Shape { version: "751".into(), ..shape() })));

        let harmless = [
            shape(),
            Shape { owner: "11".into(), version: "751".into(), ..shape() },
            Shape { members: BTreeMap::from([(1, 100), (2, 101), (3, 102)]), ..shape() },
        ];
        for now in harmless {
            assert_eq!(shape().compare(Some(&now)), None, "{now:?}");
        }
        let left = Shape { members: BTreeMap::from([(2, 103)]), ..shape() };
        assert_eq!(shape().compare(Some(&left)), Some(Alteration::TakenOut(vec![1, 2])));
    }

    #[test]
    fn a_schema_that_comes_back_has_missed_changes() {
        let schemas = |all: &[(u32, u32)]| {
            let all = all
                .iter()
                .map(|(schema, number)| (*schema, InSchema { number: *number, is_in: true }));
            let mut now = Shape { schemas: all.collect(), ..shape() };
            now.remember(&shape());
            now
        };
        // One more, and none of them is new.
        assert_eq!(shape().compare(Some(&schemas(&[(5, 200), (7, 300)]))), None);
        let without = schemas(&[]);
        let left = Some(Alteration::SchemasTakenOut(vec![5]));
        assert_eq!(shape().compare(Some(&without)), left);
        assert_eq!(without.compare(Some(&without)), None);
        for back in [schemas(&[(5, 202)]), schemas(&[(5, 200), (6, 203)])] {
            assert!(matches!(without.compare(Some(&back)), Some(Alteration::Gap(_))), "{back:?}");
        }
    }
}
