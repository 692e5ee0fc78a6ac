//! Whether something else altered the PostgreSQL publication.
//!
//! What a publication does not publish leaves no trace in the stream: a table taken out of it, or
//! `publish = 'insert'`, is a gap that only the catalog tells of. So the publication's shape is
//! noted in the store, compared at every start, and looked at again while streaming.

pub mod out;
mod shape;

use crate::publication::{PublicationSpec, TableName};
use crate::{CaptureError, slot};
use farshore_fault as fault;
use farshore_model::quote_identifier;
use farshore_pg::{Connection, partition_tree};
use farshore_store::LogStore;
use out::Out;
use shape::{Alteration, Shape, VIA_ROOTS, decode_members, decode_schemas, decode_tables};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

const NOTE_SHAPE: &str = "publication.shape";

/// What we are about to set `publish_via_partition_root` to; empty when that is noted as its shape.
const NOTE_SETS_VIA_ROOT: &str = "publication.sets-via-root";

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
    let (schemas, has_schemas, in_schemas) = if sql.server_version() >= 150_000 {
        (
            "(SELECT string_agg(pnnspid || ':' || oid, ',' ORDER BY pnnspid) \
              FROM pg_publication_namespace WHERE pnpubid = p.oid)",
            "EXISTS (SELECT FROM pg_publication_namespace WHERE pnpubid = p.oid)",
            "c.relnamespace IN (SELECT pnnspid FROM pg_publication_namespace WHERE pnpubid = p.oid)",
        )
    } else {
        ("NULL", "false", "false")
    };
    // Partitions of a schema's tables are published wherever they are. Through their roots they are
    // not published as themselves. 16384: what is below belongs to the server.
    let tables = format!(
        "SELECT t.oid FROM (\
           SELECT c.oid FROM pg_class c WHERE c.relkind IN ('r', 'p') AND c.oid >= 16384 \
             AND (p.puballtables OR {in_schemas}) \
           UNION SELECT part.relid FROM pg_class c CROSS JOIN LATERAL {below} AS part \
             WHERE c.relkind = 'p' AND NOT p.puballtables AND NOT p.pubviaroot AND {in_schemas}) AS f \
         JOIN pg_class t ON t.oid = f.oid AND t.relpersistence = 'p' \
         WHERE NOT EXISTS (SELECT FROM pg_publication_rel r \
           WHERE r.prpubid = p.oid AND r.prrelid = t.oid)",
        below = partition_tree("c.oid"),
    );
    // Not md5: a server in FIPS mode has none.
    let hash = |list: &str| format!("encode(sha256(convert_to({list}, 'UTF8')), 'hex')");
    let (members_hash, tables_hash) = (hash("m.list"), hash("w.list"));
    // Members are many; so their hash comes first, and then what is new.
    let text = format!(
        "SELECT p.oid, p.xmin, p.pubowner, \
           concat_ws(', ', CASE WHEN pubinsert THEN 'insert' END, \
             CASE WHEN pubupdate THEN 'update' END, CASE WHEN pubdelete THEN 'delete' END, \
             CASE WHEN pubtruncate THEN 'truncate' END) \
           || CASE WHEN pubviaroot THEN '{VIA_ROOTS}' ELSE '' END \
           || CASE WHEN puballtables THEN ' of all tables' ELSE '' END {generated}, \
           {members_hash}, CASE WHEN {members_hash} IS DISTINCT FROM $2 THEN m.list END, {schemas}, \
           {tables_hash}, CASE WHEN {tables_hash} IS DISTINCT FROM $3 THEN w.list END \
         FROM pg_publication p, LATERAL (SELECT coalesce(string_agg(prrelid || ':' || oid, ',' \
           ORDER BY prrelid), '') AS list FROM pg_publication_rel WHERE prpubid = p.oid) AS m, \
           LATERAL (SELECT CASE WHEN p.puballtables OR {has_schemas} THEN \
             (SELECT string_agg(o.oid::text, ',' ORDER BY o.oid) FROM ({tables}) AS o) END AS list) \
           AS w \
         WHERE pubname = $1"
    );
    let known_hash = known.map_or("", |shape| shape.members_hash.as_str());
    let known_tables = known.map_or("", |shape| shape.tables_hash.as_str());
    let rows = sql
        .query(&text, &[Some(&spec.publication_name()), Some(known_hash), Some(known_tables)])
        .await
        .map_err(|error| spec.publisher_error(error))?;
    let Some(row) = rows.first() else { return Ok(None) };
    let field = |i: usize| row.get(i).unwrap_or_default().to_owned();
    let members = match (row.get(5), known) {
        (Some(list), _) => decode_members(list).unwrap_or_default(),
        (None, Some(known)) => known.members.clone(),
        (None, None) => BTreeMap::new(),
    };
    // Those that have left are the caller's to remember.
    let published =
        |known: &Shape| known.tables.iter().filter(|t| *t.1).map(|t| (*t.0, true)).collect();
    let tables = match (row.get(8), known) {
        (Some(list), _) => decode_tables(list).unwrap_or_default(),
        (None, Some(known)) if row.get(7).is_some() => published(known),
        (None, _) => BTreeMap::new(),
    };
    Ok(Some(Shape {
        oid: field(0),
        version: field(1),
        owner: field(2),
        publishes: field(3),
        members_hash: field(4),
        members,
        schemas: decode_schemas(&field(6)).unwrap_or_default(),
        tables_hash: field(7),
        tables,
    }))
}

/// Those of these tables that still exist, with their names: a table that was dropped leaves every
/// publication, and nothing is missing.
async fn existing(
    spec: &PublicationSpec,
    sql: &mut Connection,
    tables: &[u32],
) -> Result<Vec<(u32, String)>, CaptureError> {
    if tables.is_empty() {
        return Ok(Vec::new());
    }
    let list: Vec<String> = tables.iter().map(u32::to_string).collect();
    let rows = sql
        .query(
            "SELECT c.oid, n.nspname, c.relname FROM pg_class c JOIN pg_namespace n \
             ON n.oid = c.relnamespace WHERE c.oid = ANY ($1::oid[]) ORDER BY 2, 3",
            &[Some(&format!("{{{}}}", list.join(",")))],
        )
        .await
        .map_err(|error| spec.publisher_error(error))?;
    let name = |i: usize, row: &farshore_pg::Row| quote_identifier(row.get(i).unwrap_or_default());
    let table = |row: &farshore_pg::Row| {
        let oid = row.parse(0).map_err(|error| spec.publisher_error(error))?;
        Ok((oid, format!("{}.{}", name(1, row), name(2, row))))
    };
    rows.iter().map(table).collect()
}

/// Their names.
async fn still_there(
    spec: &PublicationSpec,
    sql: &mut Connection,
    tables: &[u32],
) -> Result<Vec<String>, CaptureError> {
    let existing = existing(spec, sql, tables).await?;
    Ok(existing.into_iter().map(|(_, name)| name).collect())
}

/// Names of those of these tables that are there, and that the publication should have. One that no
/// pattern names any more, because it was renamed or moved, we take out of our own one ourselves.
async fn missed(
    spec: &PublicationSpec,
    sql: &mut Connection,
    tables: &[u32],
) -> Result<Vec<String>, CaptureError> {
    let mut there = still_there(spec, sql, tables).await?;
    if spec.adopt_publication.is_none() && !there.is_empty() {
        let wanted = spec.tables_wanted(sql).await?;
        let wanted: HashSet<String> = wanted.iter().map(TableName::to_string).collect();
        there.retain(|table| wanted.contains(table));
    }
    Ok(there)
}

/// Makes `now` remember what `known` had, and warns of tables that have left with neither a
/// membership of theirs nor their schema's.
async fn remember(
    spec: &PublicationSpec,
    sql: &mut Connection,
    known: &Shape,
    now: &mut Shape,
) -> Result<(), CaptureError> {
    let left = known.tables_left(now);
    if left.is_empty() {
        now.remember(known, &[]);
    } else {
        // Those that left before may have been dropped since.
        let before = known.tables.iter().filter(|(_, is_in)| !**is_in).map(|(oid, _)| *oid);
        let out: Vec<u32> = left.iter().copied().chain(before).collect();
        let mut there = existing(spec, sql, &out).await?;
        let is_there = |oid: &u32| there.iter().any(|(there, _)| there == oid);
        let gone: Vec<u32> = out.iter().filter(|oid| !is_there(oid)).copied().collect();
        now.remember(known, &gone);
        there.retain(|(oid, _)| left.contains(oid));
        warn_of_tables(spec, known, now, &there);
    }
    Ok(())
}

/// Warns of tables that have left, unless that is told of their schema.
fn warn_of_tables(spec: &PublicationSpec, known: &Shape, now: &Shape, left: &[(u32, String)]) {
    let schema_left = known
        .schemas
        .iter()
        .any(|(schema, known)| known.is_in && now.schemas.get(schema).is_none_or(|now| !now.is_in));
    if !left.is_empty() && !schema_left {
        let names: Vec<&str> = left.iter().map(|(_, name)| name.as_str()).collect();
        tracing::warn!(
            "publication \"{}\": {} left PostgreSQL publication \"{}\" (moved to another schema, \
             detached, or made UNLOGGED): changes of it are not carried. When it comes back, the \
             publication stops, since they are missing",
            spec.name,
            names.join(", "),
            spec.publication_name()
        );
    }
}

fn came_back(spec: &PublicationSpec, tables: &[String]) -> CaptureError {
    gap(
        spec,
        &format!(
            "had {} leave it, and come back (moved to another schema, detached, or made UNLOGGED \
             meanwhile)",
            tables.join(", ")
        ),
    )
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
    let mut noted = store.note(NOTE_SHAPE).as_deref().and_then(Shape::decode);
    let sets_via_root = store.note(NOTE_SETS_VIA_ROOT).filter(|sets| !sets.is_empty());
    if let Some(noted) = &mut noted {
        let now = look(spec, sql, Some(noted)).await?;
        if let (Some(now), Some(sets)) = (&now, &sets_via_root) {
            noted.accept_own(now, sets == "true");
        }
        match noted.compare(now.as_ref()) {
            Some(Alteration::Gap(what)) => return Err(gap(spec, &what)),
            Some(Alteration::TakenOut(tables)) => {
                out::note(spec, store, &tables, Out::TakenOut)?;
                let tables = missed(spec, sql, &tables).await?;
                if !tables.is_empty() {
                    tracing::warn!("{}", taken_out(spec, &tables));
                    forget_definition(spec, sql).await?;
                }
            }
            Some(Alteration::SchemasTakenOut(schemas)) => {
                warn_of_schemas(spec, sql, &schemas).await?;
            }
            Some(Alteration::CameBack(tables)) => {
                return Err(came_back(spec, &still_there(spec, sql, &tables).await?));
            }
            None => {}
        }
        // Set below. Whoever dies before that is noted as the publication's shape must not find it
        // altered.
        let sets = spec.via_partition_root.to_string();
        let is_so = now.is_none_or(|now| now.is_via_roots() == spec.via_partition_root);
        if spec.adopt_publication.is_none() && !is_so && sets_via_root.as_ref() != Some(&sets) {
            store.set_note(NOTE_SETS_VIA_ROOT, &sets)?;
        }
    }
    let left_out = spec.ensure_publication(sql).await?;
    fault::point("capture.before-shape-noted");
    if let Some(mut shape) = look(spec, sql, None).await? {
        if let Some(noted) = &noted {
            out::note(spec, store, &noted.tables_left(&shape), Out::Left)?;
            remember(spec, sql, noted, &mut shape).await?;
        }
        store.set_note(NOTE_SHAPE, &shape.encode())?;
        if store.note(NOTE_SETS_VIA_ROOT).is_some_and(|sets| !sets.is_empty()) {
            store.set_note(NOTE_SETS_VIA_ROOT, "")?;
        }
    }
    Ok(left_out)
}

/// Tables that are out of an adopted publication, each with what to do, for a person.
pub(crate) async fn told_out(
    spec: &PublicationSpec,
    sql: &mut Connection,
    store: &dyn LogStore,
) -> Result<Vec<String>, CaptureError> {
    let told = out::told(spec, sql, |key| store.note(key)).await?;
    Ok(told.into_iter().map(|out| format!("{}. {}", out.what, out.remedy)).collect())
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
    store: Arc<dyn LogStore>,
    known: Option<Shape>,
    /// It was not there when last looked for.
    missing: bool,
}

impl Watch {
    /// Begins with the publication as [`ensure_publication`] left it.
    pub fn new(store: Arc<dyn LogStore>) -> Watch {
        let known = store.note(NOTE_SHAPE).as_deref().and_then(Shape::decode);
        Watch { store, known, missing: false }
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
                out::note(spec, self.store.as_ref(), &tables, Out::TakenOut)?;
                let tables = missed(spec, sql, &tables).await?;
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
            Some(Alteration::CameBack(tables)) => {
                return Err(came_back(spec, &still_there(spec, sql, &tables).await?));
            }
            None => {}
        }
        if let Some(now) = &mut now {
            out::note(spec, self.store.as_ref(), &known.tables_left(now), Out::Left)?;
            remember(spec, sql, known, now).await?;
            // What has left must be known when it comes back, whoever ran meanwhile.
            if now != known {
                self.store.set_note(NOTE_SHAPE, &now.encode())?;
            }
        }
        self.known = now;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::publication::TablePattern;
    use farshore_pg::{Config, Mode};
    use farshore_store::segmented::{Options, SegmentedStore};
    use farshore_testkit::postgres::{Cluster, Installation};
    use tokio::runtime::Runtime;

    fn handed(cluster: &Cluster) -> PublicationSpec {
        PublicationSpec {
            name: "p".to_owned(),
            source: Config::parse(&cluster.url("postgres")).unwrap(),
            tables: Vec::new(),
            articles: BTreeMap::new(),
            via_partition_root: false,
            adopt_publication: Some("handed".to_owned()),
            adopt_slot: None,
        }
    }

    /// Looks after each statement; what the last look but one noted, and what the last one found.
    async fn after(spec: &PublicationSpec, statements: &[&str]) -> (Shape, CaptureError) {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
        let mut sql = spec.connect(Mode::Sql).await.unwrap();
        ensure_publication(spec, &mut sql, store.as_ref()).await.unwrap();
        for statement in statements {
            // Each by a node of its own: what one has learnt, the next must know.
            Watch::new(store.clone()).look(spec, &mut sql).await.unwrap();
            sql.simple_query(statement).await.unwrap();
        }
        let noted = store.note(NOTE_SHAPE).as_deref().and_then(Shape::decode).unwrap();
        let found = Watch::new(store.clone()).look(spec, &mut sql).await.unwrap_err();
        let at_start = ensure_publication(spec, &mut sql, store.as_ref()).await.unwrap_err();
        assert_eq!(found.to_string(), at_start.to_string());
        (noted, found)
    }

    #[test]
    fn tables_of_a_schema_or_of_all_that_leave_and_come_back_are_seen() {
        for major in [15, 18] {
            let installation = Installation::find(major).unwrap();
            let cluster =
                Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap();
            cluster
                .execute_script(
                    "CREATE SCHEMA s; CREATE SCHEMA x; CREATE TABLE s.t (i integer PRIMARY KEY); \
                     CREATE TABLE s.gone (i integer); CREATE TABLE s.listed (i integer); \
                     CREATE TABLE s.out (i integer); \
                     CREATE TABLE s.root (i integer) PARTITION BY LIST (i); \
                     CREATE TABLE x.leaf PARTITION OF s.root FOR VALUES IN (1); \
                     CREATE UNLOGGED TABLE s.not_logged (i integer); \
                     CREATE PUBLICATION handed FOR TABLES IN SCHEMA s, TABLE s.listed",
                )
                .unwrap();
            let spec = handed(&cluster);
            Runtime::new().unwrap().block_on(async {
                let statements = [
                    "ALTER TABLE s.out SET SCHEMA x",
                    // Nobody remembers it for ever.
                    "DROP TABLE x.out",
                    "ALTER TABLE s.t SET SCHEMA x",
                    "DROP TABLE s.gone",
                    "ALTER TABLE x.t SET SCHEMA s",
                ];
                let (noted, found) = after(&spec, &statements).await;
                assert!(matches!(found, CaptureError::Gap(_)), "{found}");
                assert!(found.to_string().contains("had s.t leave it, and come back"), "{found}");
                let out = noted.tables.values().filter(|is_in| !**is_in).count();
                assert_eq!((noted.tables.len(), out), (3, 1), "{noted:?}");
                let statements = [
                    "ALTER TABLE s.root DETACH PARTITION x.leaf",
                    "ALTER TABLE s.root ATTACH PARTITION x.leaf FOR VALUES IN (1)",
                ];
                let (_, found) = after(&spec, &statements).await;
                assert!(found.to_string().contains("had x.leaf leave it"), "{found}");
                let mut sql = spec.connect(Mode::Sql).await.unwrap();
                sql.simple_query("DROP PUBLICATION handed").await.unwrap();
                sql.simple_query("CREATE PUBLICATION handed FOR ALL TABLES").await.unwrap();
                let statements = ["ALTER TABLE s.t SET UNLOGGED", "ALTER TABLE s.t SET LOGGED"];
                let (noted, found) = after(&spec, &statements).await;
                assert!(found.to_string().contains("had s.t leave it"), "{found}");
                assert_eq!(noted.tables.len(), 4, "{noted:?}");
            });
        }
    }

    #[test]
    fn a_table_that_no_pattern_names_any_more_is_taken_out_by_ourselves() {
        let installation = Installation::find(18).unwrap();
        let cluster =
            Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap();
        cluster
            .execute_script(
                "CREATE SCHEMA s; CREATE SCHEMA archive; CREATE TABLE s.moves (i integer); \
                 CREATE TABLE s.stays (i integer); CREATE TABLE t (i integer); \
                 CREATE TABLE t_new (i integer)",
            )
            .unwrap();
        let tables = ["s.*", "public.t"].map(|pattern| TablePattern::parse(pattern).unwrap());
        let spec = PublicationSpec {
            tables: tables.to_vec(),
            adopt_publication: None,
            ..handed(&cluster)
        };
        Runtime::new().unwrap().block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
            let mut sql = spec.connect(Mode::Sql).await.unwrap();
            ensure_publication(&spec, &mut sql, store.as_ref()).await.unwrap();
            let mut watch = Watch::new(store.clone());
            watch.look(&spec, &mut sql).await.unwrap();
            for statement in [
                "ALTER TABLE s.moves SET SCHEMA archive",
                "ALTER TABLE t RENAME TO t_old; ALTER TABLE t_new RENAME TO t",
            ] {
                sql.simple_query(statement).await.unwrap();
                let members = spec.listed_tables(&mut sql).await.unwrap();
                spec.follow_tables(&mut sql).await.unwrap();
                assert_ne!(spec.listed_tables(&mut sql).await.unwrap(), members);
                watch.look(&spec, &mut sql).await.unwrap();
            }
            // What a pattern names was somebody else.
            let taken_out = "ALTER PUBLICATION farshore_p DROP TABLE s.stays";
            sql.simple_query(taken_out).await.unwrap();
            let found = watch.look(&spec, &mut sql).await.unwrap_err();
            assert!(found.to_string().contains("something else took s.stays out"), "{found}");
        });
    }
}
