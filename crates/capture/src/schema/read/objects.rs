//! Extensions, collations, types and functions that tables refer to.

use super::{is, optional, text};
use crate::schema::{Extension, Object, ObjectKind};
use farshore_model::quote_identifier;
use farshore_pg::{Connection, Error, quote_literal};
use std::collections::{BTreeMap, HashMap, HashSet};

/// Everything that the tables, their defaults, checks and indexes need, by `pg_depend`: class and
/// object. What belongs to an extension leads to that extension and no further.
const NEEDED: &str = "WITH RECURSIVE need (classid, objid) AS ( \
    (SELECT 'pg_catalog.pg_class'::regclass::oid, pg_catalog.unnest($1::text::oid[]) \
     UNION SELECT 'pg_catalog.pg_class'::regclass::oid, indexrelid FROM pg_catalog.pg_index \
       WHERE indrelid = ANY ($1::text::oid[]) \
     UNION SELECT 'pg_catalog.pg_attrdef'::regclass::oid, oid FROM pg_catalog.pg_attrdef \
       WHERE adrelid = ANY ($1::text::oid[]) \
     UNION SELECT 'pg_catalog.pg_constraint'::regclass::oid, oid FROM pg_catalog.pg_constraint \
       WHERE conrelid = ANY ($1::text::oid[]) AND contype IN ('c', 'x')) \
    UNION \
    SELECT x.classid, x.objid FROM need n CROSS JOIN LATERAL ( \
      SELECT d.refclassid, d.refobjid FROM pg_catalog.pg_depend d \
      WHERE d.classid = n.classid AND d.objid = n.objid AND d.deptype IN ('n', 'i', 'e') \
        AND d.refclassid IN ('pg_catalog.pg_type'::regclass, 'pg_catalog.pg_proc'::regclass, \
          'pg_catalog.pg_extension'::regclass, 'pg_catalog.pg_collation'::regclass, \
          'pg_catalog.pg_opclass'::regclass, 'pg_catalog.pg_operator'::regclass, \
          'pg_catalog.pg_ts_config'::regclass) \
        AND (d.deptype = 'e' OR NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend e \
          WHERE e.classid = n.classid AND e.objid = n.objid AND e.deptype = 'e')) \
      UNION ALL SELECT 'pg_catalog.pg_constraint'::regclass, k.oid FROM pg_catalog.pg_constraint k \
      WHERE n.classid = 'pg_catalog.pg_type'::regclass AND k.contypid = n.objid \
      UNION ALL SELECT 'pg_catalog.pg_class'::regclass, c.oid FROM pg_catalog.pg_class c \
      WHERE n.classid = 'pg_catalog.pg_type'::regclass AND c.reltype = n.objid \
        AND c.relkind = 'c') x (classid, objid)) ";

/// Extensions and objects that `tables` (an array of OIDs) need.
pub(super) async fn objects(
    sql: &mut Connection,
    tables: &str,
) -> Result<(Vec<Extension>, Vec<Object>), Error> {
    let extensions = sql
        .query(
            &format!(
                "{NEEDED} SELECT DISTINCT e.extname, s.nspname FROM need n \
                 JOIN pg_catalog.pg_extension e ON e.oid = n.objid \
                   AND n.classid = 'pg_catalog.pg_extension'::regclass \
                 JOIN pg_catalog.pg_namespace s ON s.oid = e.extnamespace \
                 WHERE e.extname <> 'plpgsql' ORDER BY 1"
            ),
            &[Some(tables)],
        )
        .await?;
    let extensions =
        extensions.iter().map(|row| Extension { name: text(row, 0), schema: text(row, 1) });
    let mut found = Found::default();
    collations(sql, tables, &mut found).await?;
    types(sql, tables, &mut found).await?;
    functions(sql, tables, &mut found).await?;
    Ok((extensions.collect(), in_order(found, &edges(sql, tables).await?)))
}

/// Objects by OID (collations, types and functions share no numbers that matter here: the edges
/// between them are of the same kinds).
type Found = BTreeMap<(char, u32), Object>;

/// Objects of `class` that no extension has and that are not PostgreSQL's own.
fn needed_of(class: &str, columns: &str, joins: &str) -> String {
    format!(
        "{NEEDED} SELECT DISTINCT {columns} FROM need n {joins} \
         WHERE n.classid = 'pg_catalog.{class}'::regclass AND o.oid >= 16384 \
           AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_depend e WHERE e.classid = n.classid \
             AND e.objid = n.objid AND e.deptype = 'e')"
    )
}

async fn collations(sql: &mut Connection, tables: &str, found: &mut Found) -> Result<(), Error> {
    let locale = match sql.server_version() {
        170_000.. => "o.colllocale",
        150_000.. => "o.colliculocale",
        _ => "NULL::text",
    };
    let query = needed_of(
        "pg_collation",
        &format!(
            "o.oid, s.nspname, o.collname, o.collprovider, coalesce({locale}, o.collcollate::text), \
             o.collctype::text, o.collisdeterministic"
        ),
        "JOIN pg_catalog.pg_collation o ON o.oid = n.objid \
         JOIN pg_catalog.pg_namespace s ON s.oid = o.collnamespace",
    );
    for row in sql.query(&query, &[Some(tables)]).await? {
        let provider = match row.get(3) {
            Some("i") => "icu",
            Some("b") => "builtin",
            _ => "libc",
        };
        let locale = quote_literal(row.get(4).unwrap_or_default());
        let mut options = format!("provider = {provider}, ");
        match row.get(5) {
            Some(ctype) if provider == "libc" => options
                .push_str(&format!("lc_collate = {locale}, lc_ctype = {}", quote_literal(ctype))),
            _ => options.push_str(&format!("locale = {locale}")),
        }
        if !is(&row, 6) {
            options.push_str(", deterministic = false");
        }
        let object = Object {
            schema: text(&row, 1),
            name: text(&row, 2),
            kind: ObjectKind::Collation { options },
        };
        found.insert(('c', row.parse(0)?), object);
    }
    Ok(())
}

async fn types(sql: &mut Connection, tables: &str, found: &mut Found) -> Result<(), Error> {
    let query = needed_of(
        "pg_type",
        "o.oid, s.nspname, o.typname, o.typtype, \
         pg_catalog.format_type(o.typbasetype, o.typtypmod), \
         concat(CASE WHEN o.typcollation <> b.typcollation THEN \
           pg_catalog.format(' COLLATE %I.%I', cs.nspname, co.collname) END, \
           ' DEFAULT ' || pg_catalog.pg_get_expr(o.typdefaultbin, 0), \
           CASE WHEN o.typnotnull THEN ' NOT NULL' END)",
        "JOIN pg_catalog.pg_type o ON o.oid = n.objid AND o.typtype IN ('e', 'd', 'c', 'r') \
         LEFT JOIN pg_catalog.pg_class rel ON rel.oid = o.typrelid AND rel.relkind <> 'c' \
         JOIN pg_catalog.pg_namespace s ON s.oid = o.typnamespace \
         LEFT JOIN pg_catalog.pg_type b ON b.oid = o.typbasetype \
         LEFT JOIN pg_catalog.pg_collation co ON co.oid = o.typcollation \
         LEFT JOIN pg_catalog.pg_namespace cs ON cs.oid = co.collnamespace",
    ) + " AND rel.oid IS NULL";
    let rows = sql.query(&query, &[Some(tables)]).await?;
    let mut pieces = TypePieces::read(sql, tables).await?;
    for row in &rows {
        let oid: u32 = row.parse(0)?;
        let kind = match row.get(3) {
            Some("e") => {
                ObjectKind::Enum { labels: pieces.labels.remove(&oid).unwrap_or_default() }
            }
            Some("d") => ObjectKind::Domain {
                base: text(row, 4),
                clauses: text(row, 5),
                checks: pieces.checks.remove(&oid).unwrap_or_default(),
            },
            Some("c") => ObjectKind::Composite {
                attributes: pieces.attributes.remove(&oid).unwrap_or_default(),
            },
            _ => match pieces.ranges.remove(&oid) {
                Some((options, multirange)) => ObjectKind::Range { options, multirange },
                None => continue,
            },
        };
        found.insert(('t', oid), Object { schema: text(row, 1), name: text(row, 2), kind });
    }
    Ok(())
}

/// What types are made of, by type.
struct TypePieces {
    labels: HashMap<u32, Vec<String>>,
    checks: HashMap<u32, Vec<(String, String)>>,
    attributes: HashMap<u32, Vec<(String, String, Option<String>)>>,
    ranges: HashMap<u32, (Vec<String>, Option<String>)>,
}

impl TypePieces {
    async fn read(sql: &mut Connection, tables: &str) -> Result<TypePieces, Error> {
        let only = "IN (SELECT objid FROM need WHERE classid = 'pg_catalog.pg_type'::regclass)";
        let parameters = [Some(tables)];
        let mut pieces = TypePieces {
            labels: HashMap::new(),
            checks: HashMap::new(),
            attributes: HashMap::new(),
            ranges: HashMap::new(),
        };
        let labels = format!(
            "{NEEDED} SELECT enumtypid, enumlabel FROM pg_catalog.pg_enum WHERE enumtypid {only} \
             ORDER BY enumtypid, enumsortorder"
        );
        for row in sql.query(&labels, &parameters).await? {
            pieces.labels.entry(row.parse(0)?).or_default().push(text(&row, 1));
        }
        let checks = format!(
            "{NEEDED} SELECT contypid, conname, pg_catalog.pg_get_constraintdef(oid) \
             FROM pg_catalog.pg_constraint WHERE contypid {only} AND contype = 'c' \
             ORDER BY contypid, conname"
        );
        for row in sql.query(&checks, &parameters).await? {
            let check = (text(&row, 1), text(&row, 2));
            pieces.checks.entry(row.parse(0)?).or_default().push(check);
        }
        let attributes = format!(
            "{NEEDED} SELECT c.reltype, a.attname, \
               pg_catalog.format_type(a.atttypid, a.atttypmod), \
               CASE WHEN a.attcollation <> t.typcollation THEN \
                 pg_catalog.format('%I.%I', cs.nspname, co.collname) END \
             FROM pg_catalog.pg_class c JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid \
             JOIN pg_catalog.pg_type t ON t.oid = a.atttypid \
             LEFT JOIN pg_catalog.pg_collation co ON co.oid = a.attcollation \
             LEFT JOIN pg_catalog.pg_namespace cs ON cs.oid = co.collnamespace \
             WHERE c.relkind = 'c' AND c.reltype {only} AND a.attnum > 0 AND NOT a.attisdropped \
             ORDER BY c.reltype, a.attnum"
        );
        for row in sql.query(&attributes, &parameters).await? {
            let attribute = (text(&row, 1), text(&row, 2), optional(&row, 3));
            pieces.attributes.entry(row.parse(0)?).or_default().push(attribute);
        }
        let ranges = format!(
            "{NEEDED} SELECT r.rngtypid, \
               concat_ws(chr(1), 'SUBTYPE = ' || pg_catalog.format_type(r.rngsubtype, NULL), \
                 CASE WHEN NOT oc.opcdefault THEN \
                   pg_catalog.format('SUBTYPE_OPCLASS = %I.%I', os.nspname, oc.opcname) END, \
                 CASE WHEN r.rngcollation <> t.typcollation THEN \
                   pg_catalog.format('COLLATION = %I.%I', cs.nspname, co.collname) END, \
                 CASE WHEN r.rngsubdiff <> 0 THEN 'SUBTYPE_DIFF = ' || \
                   (SELECT pg_catalog.format('%I.%I', ps.nspname, p.proname) \
                    FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace ps \
                      ON ps.oid = p.pronamespace WHERE p.oid = r.rngsubdiff) END), m.typname \
             FROM pg_catalog.pg_range r JOIN pg_catalog.pg_type t ON t.oid = r.rngsubtype \
             LEFT JOIN pg_catalog.pg_type m ON m.oid = r.rngmultitypid \
             LEFT JOIN pg_catalog.pg_opclass oc ON oc.oid = r.rngsubopc \
             LEFT JOIN pg_catalog.pg_namespace os ON os.oid = oc.opcnamespace \
             LEFT JOIN pg_catalog.pg_collation co ON co.oid = r.rngcollation \
             LEFT JOIN pg_catalog.pg_namespace cs ON cs.oid = co.collnamespace \
             WHERE r.rngtypid {only}"
        );
        for row in sql.query(&ranges, &parameters).await? {
            let options = text(&row, 1).split('\u{1}').map(str::to_owned).collect();
            pieces.ranges.insert(row.parse(0)?, (options, optional(&row, 2)));
        }
        Ok(pieces)
    }
}

async fn functions(sql: &mut Connection, tables: &str, found: &mut Found) -> Result<(), Error> {
    let query = needed_of(
        "pg_proc",
        "o.oid, s.nspname, pg_catalog.format('%s(%s)', o.proname, \
           pg_catalog.pg_get_function_identity_arguments(o.oid)), \
         pg_catalog.pg_get_functiondef(o.oid)",
        "JOIN pg_catalog.pg_proc o ON o.oid = n.objid AND o.prokind = 'f' \
         JOIN pg_catalog.pg_language l ON l.oid = o.prolang AND l.lanname IN ('sql', 'plpgsql') \
         JOIN pg_catalog.pg_namespace s ON s.oid = o.pronamespace",
    );
    for row in sql.query(&query, &[Some(tables)]).await? {
        let kind = ObjectKind::Function { definition: text(&row, 3).trim_end().to_owned() };
        let object = Object { schema: text(&row, 1), name: text(&row, 2), kind };
        found.insert(('f', row.parse(0)?), object);
    }
    Ok(())
}

/// Which object needs which other, with array types and domains' checks between them.
async fn edges(
    sql: &mut Connection,
    tables: &str,
) -> Result<HashMap<(char, u32), Vec<(char, u32)>>, Error> {
    let letter = |column: &str| {
        format!(
            "CASE {column} WHEN 'pg_catalog.pg_type'::regclass THEN 't' \
             WHEN 'pg_catalog.pg_proc'::regclass THEN 'f' \
             WHEN 'pg_catalog.pg_collation'::regclass THEN 'c' END"
        )
    };
    let query = format!(
        "{NEEDED}, part AS ( \
           SELECT classid, objid, classid AS of_class, objid AS of_object FROM need \
           UNION ALL SELECT 'pg_catalog.pg_constraint'::regclass, k.oid, n.classid, n.objid \
             FROM need n JOIN pg_catalog.pg_constraint k ON k.contypid = n.objid \
             WHERE n.classid = 'pg_catalog.pg_type'::regclass \
           UNION ALL SELECT 'pg_catalog.pg_class'::regclass, c.oid, n.classid, n.objid \
             FROM need n JOIN pg_catalog.pg_class c ON c.reltype = n.objid AND c.relkind = 'c' \
             WHERE n.classid = 'pg_catalog.pg_type'::regclass) \
         SELECT {}, p.of_object, {}, d.refobjid FROM part p \
         JOIN pg_catalog.pg_depend d ON d.classid = p.classid AND d.objid = p.objid \
           AND d.deptype IN ('n', 'i')",
        letter("p.of_class"),
        letter("d.refclassid")
    );
    let mut edges: HashMap<(char, u32), Vec<(char, u32)>> = HashMap::new();
    for row in sql.query(&query, &[Some(tables)]).await? {
        let class = |column: usize| row.get(column).and_then(|letter| letter.chars().next());
        if let (Some(from), Some(to)) = (class(0), class(2)) {
            edges.entry((from, row.parse(1)?)).or_default().push((to, row.parse(3)?));
        }
    }
    Ok(edges)
}

/// Every object after those it needs; otherwise by kind and number.
fn in_order(mut found: Found, edges: &HashMap<(char, u32), Vec<(char, u32)>>) -> Vec<Object> {
    let mut ordered = Vec::new();
    let mut seen = HashSet::new();
    let all: Vec<(char, u32)> = found.keys().copied().collect();
    for start in all {
        // Depth first without recursion: an object is taken when it is met the second time.
        let mut stack = vec![(start, false)];
        while let Some((object, needs_taken)) = stack.pop() {
            if needs_taken {
                ordered.extend(found.remove(&object));
            } else if seen.insert(object) {
                stack.push((object, true));
                let needs = edges.get(&object).into_iter().flatten();
                stack.extend(needs.map(|need| (*need, false)));
            }
        }
    }
    ordered
}

/// The name as SQL; a function's argument types stay as they are.
impl Object {
    /// Schema and name as SQL.
    pub fn qualified_name(&self) -> String {
        format!("{}.{}", quote_identifier(&self.schema), quote_identifier(&self.name))
    }
}
