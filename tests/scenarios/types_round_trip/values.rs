//! Values of every type, alone and as parts of others.

use super::kinds::{BUILT_IN, CONTRIB, Kind, NAMED};
use anyhow::{Result, ensure};
use farshore_testkit::seed;
use farshore_tests::{Direction, Pair, both_ways};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use std::fmt::Write as _;

const EXTENSIONS: &str = "CREATE SCHEMA things; CREATE SCHEMA odd_place; \
    CREATE EXTENSION citext; CREATE EXTENSION hstore; CREATE EXTENSION ltree SCHEMA odd_place; \
    CREATE EXTENSION cube; CREATE EXTENSION lo; CREATE EXTENSION seg; CREATE EXTENSION isn; \
    CREATE EXTENSION intarray;";

/// Types that stand in the same order on both sides, under other OIDs.
const THINGS: &str = "CREATE TYPE things.mood AS ENUM ('sad', 'ok', 'it''s \"great\"', 'é漢'); \
    CREATE TABLE things.t (id integer); CREATE TABLE things.\"Odd table\" (id integer); \
    CREATE FUNCTION things.double(integer) RETURNS integer LANGUAGE sql AS 'SELECT 2 * $1'; \
    CREATE TYPE things.floats AS RANGE (subtype = double precision, subtype_diff = float8mi); \
    CREATE DOMAIN things.positive AS integer CHECK (VALUE > 0); \
    CREATE DOMAIN things.small_positive AS things.positive CHECK (VALUE < 100000000); \
    CREATE TYPE things.moods AS RANGE (subtype = things.mood);";

/// OIDs of what is created next differ from the publisher's.
const SHIFT_OIDS: &str = "DO $$ BEGIN FOR i IN 1..57 LOOP \
    EXECUTE format('CREATE TYPE shift_%s AS ENUM ()', i); END LOOP; END $$;";

/// A table with a column of a type, arrays and domains of it, and composites of those.
struct TypeTable<'a> {
    kind: &'a Kind,
    name: String,
    domain: String,
    composite: String,
}

impl<'a> TypeTable<'a> {
    fn all(schema: &str, kinds: impl Iterator<Item = &'a Kind>) -> Vec<TypeTable<'a>> {
        kinds
            .enumerate()
            .map(|(number, kind)| TypeTable {
                kind,
                name: format!("{schema}.t{number}"),
                domain: format!("{schema}.d{number}"),
                composite: format!("{schema}.c{number}"),
            })
            .collect()
    }

    fn definition(&self, rng: &mut StdRng) -> String {
        let TypeTable { kind, name, domain, composite } = self;
        let sql = kind.sql;
        let mut text = format!(
            "CREATE DOMAIN {domain} AS {sql}; CREATE DOMAIN {domain}a AS {sql}[]; \
             CREATE TYPE {composite} AS (v {sql}, vs {sql}[], d {domain}, m things.mood, n integer); \
             CREATE TABLE {name} (id integer PRIMARY KEY, v {sql}, vs {sql}[], d {domain}, \
             ds {domain}[], da {domain}a, c {composite}, cs {composite}[], m things.mood, \
             ms things.mood[], p things.small_positive);"
        );
        if rng.random_ratio(1, 4) {
            write!(text, "ALTER TABLE {name} REPLICA IDENTITY FULL;").expect("to a string");
        }
        if kind.ordered {
            write!(text, "CREATE TABLE {name}_keyed (k {sql} PRIMARY KEY, n integer);")
                .expect("to a string");
        }
        text
    }

    fn mood(rng: &mut StdRng) -> String {
        const MOODS: [&str; 5] = ["NULL", "'sad'", "'ok'", "'it''s \"great\"'", "'é漢'"];
        format!("{}::things.mood", MOODS[rng.random_range(0..MOODS.len())])
    }

    fn composite(&self, rng: &mut StdRng) -> String {
        let (kind, composite) = (self.kind, &self.composite);
        format!(
            "ROW({}, {}, {}, {}, {})::{composite}",
            kind.value(rng),
            kind.array(rng),
            kind.value(rng),
            Self::mood(rng),
            rng.random::<i32>()
        )
    }

    /// Values of all columns but the id.
    fn values(&self, rng: &mut StdRng) -> Vec<(&'static str, String)> {
        let TypeTable { kind, domain, composite, .. } = self;
        vec![
            ("v", kind.value(rng)),
            ("vs", kind.array(rng)),
            ("d", kind.value(rng)),
            ("ds", format!("{}::{domain}[]", kind.array(rng))),
            ("da", kind.array(rng)),
            ("c", if rng.random_ratio(1, 8) { "NULL".into() } else { self.composite(rng) }),
            (
                "cs",
                format!(
                    "ARRAY[{}, NULL, {}]::{composite}[]",
                    self.composite(rng),
                    self.composite(rng)
                ),
            ),
            ("m", Self::mood(rng)),
            ("ms", format!("ARRAY[{}, {}]::things.mood[]", Self::mood(rng), Self::mood(rng))),
            ("p", rng.random_range(1..100_000_000).to_string()),
        ]
    }

    fn inserts(&self, ids: std::ops::Range<u32>, rng: &mut StdRng) -> String {
        let mut text = String::new();
        for id in ids {
            let values: Vec<String> =
                self.values(rng).into_iter().map(|(_, value)| value).collect();
            write!(text, "INSERT INTO {} VALUES ({id}, {});", self.name, values.join(", "))
                .expect("to a string");
            if self.kind.ordered {
                let key = self.kind.some(rng);
                write!(
                    text,
                    "INSERT INTO {}_keyed VALUES ({key}, {id}) ON CONFLICT DO NOTHING;",
                    self.name
                )
                .expect("to a string");
            }
        }
        text
    }

    fn updates(&self, ids: std::ops::Range<u32>, rng: &mut StdRng) -> String {
        let mut text = String::new();
        for id in ids {
            let assignments: Vec<String> = self
                .values(rng)
                .into_iter()
                .filter(|_| rng.random())
                .map(|(column, value)| format!("{column} = {value}"))
                .collect();
            if assignments.is_empty() || rng.random_ratio(1, 5) {
                write!(text, "DELETE FROM {} WHERE id = {id};", self.name).expect("to a string");
            } else {
                let set = assignments.join(", ");
                write!(text, "UPDATE {} SET {set} WHERE id = {id};", self.name)
                    .expect("to a string");
            }
        }
        if self.kind.ordered {
            write!(
                text,
                "UPDATE {0}_keyed SET n = -n WHERE n % 3 = 0; DELETE FROM {0}_keyed WHERE n % 5 = 0;",
                self.name
            )
            .expect("to a string");
        }
        text
    }
}

/// Ranges and multiranges of the built-in types that have them, and of user-defined ones.
fn ranges(ids: std::ops::Range<u32>, rng: &mut StdRng) -> String {
    const RANGES: [(&str, &str, &str); 8] = [
        ("integer", "int4range", "int4multirange"),
        ("bigint", "int8range", "int8multirange"),
        ("numeric", "numrange", "nummultirange"),
        ("date", "daterange", "datemultirange"),
        ("timestamp", "tsrange", "tsmultirange"),
        ("timestamptz", "tstzrange", "tstzmultirange"),
        ("double precision", "things.floats", "things.floats_multirange"),
        ("", "things.moods", "things.moods_multirange"),
    ];
    let mut text = String::new();
    for id in ids {
        let mut values = Vec::new();
        for (kind, range, multirange) in RANGES {
            let one = |rng: &mut StdRng| match BUILT_IN.iter().find(|k| k.sql == kind) {
                // The largest integers and dates have no successor, which a closed bound needs.
                Some(kind) if matches!(kind.sql, "integer" | "bigint" | "date") => {
                    let start = rng.random_range(-1000..1000);
                    let unit = if kind.sql == "date" { "date '2000-01-01' + " } else { "" };
                    format!("{range}({unit}{start}, {unit}{}, '(]')", start + 5)
                }
                Some(kind) => kind.range(range, rng),
                None => format!("{range}('sad', 'ok', '[]')"),
            };
            values.push(one(rng));
            values.push(format!("{multirange}({}, {})", one(rng), one(rng)));
            values.push(format!("ARRAY[{}, NULL]::{range}[]", one(rng)));
        }
        write!(text, "INSERT INTO things.ranges VALUES ({id}, {});", values.join(", "))
            .expect("to a string");
    }
    text
}

const RANGE_TABLE: &str = "CREATE TABLE things.ranges (id integer PRIMARY KEY, \
    r1 int4range, m1 int4multirange, a1 int4range[], r2 int8range, m2 int8multirange, a2 int8range[], \
    r3 numrange, m3 nummultirange, a3 numrange[], r4 daterange, m4 datemultirange, a4 daterange[], \
    r5 tsrange, m5 tsmultirange, a5 tsrange[], r6 tstzrange, m6 tstzmultirange, a6 tstzrange[], \
    r7 things.floats, m7 things.floats_multirange, a7 things.floats[], \
    r8 things.moods, m8 things.moods_multirange, a8 things.moods[]);";

fn round_trip(direction: Direction, seed: u64) -> Result<()> {
    println!("FARSHORE_SEED={seed} {direction:?}");
    let rng = &mut StdRng::seed_from_u64(seed);
    let in_binary = TypeTable::all("plain", BUILT_IN.iter().chain(CONTRIB));
    let as_text = TypeTable::all("named", NAMED.iter());
    let mut schema = format!(
        "{EXTENSIONS} {THINGS} {RANGE_TABLE} CREATE SCHEMA plain; CREATE SCHEMA named; \
         SET search_path = public, odd_place;"
    );
    for table in in_binary.iter().chain(&as_text) {
        schema.push_str(&table.definition(rng));
    }
    let mut pair = Pair::bare(direction)?;
    pair.subscriber.execute_script(SHIFT_OIDS)?;
    pair.on_both(&schema)?;
    // What either side's settings make of values must not matter.
    pair.on_both(
        "ALTER DATABASE postgres SET DateStyle = 'SQL, DMY'; \
         ALTER DATABASE postgres SET IntervalStyle = 'sql_standard'; \
         ALTER DATABASE postgres SET bytea_output = 'escape'; \
         ALTER DATABASE postgres SET extra_float_digits = -5; \
         ALTER DATABASE postgres SET TimeZone = 'Asia/Kolkata'; \
         ALTER DATABASE postgres SET search_path = public, things, odd_place;",
    )?;
    pair.subscriber.execute_script(
        "ALTER DATABASE postgres SET TimeZone = 'America/St_Johns'; \
         ALTER DATABASE postgres SET array_nulls = off;",
    )?;
    pair.add_publication("p", &["plain.*", "things.ranges"], "")?;
    let target = pair.subscriber.url(farshore_tests::DATABASE);
    pair.add_subscription("s", "p", &target)?;
    let mut fill = |pair: &Pair, ids: std::ops::Range<u32>| -> Result<()> {
        let mut rows = ranges(ids.clone(), rng);
        for table in in_binary.iter().chain(&as_text) {
            rows.push_str(&table.inserts(ids.clone(), rng));
        }
        pair.publish(&rows)
    };
    fill(&pair, 0..20)?;
    pair.site.start()?;
    pair.assert_equal(&["plain", "things"])?;
    let log = pair.site.log();
    ensure!(log.contains("binary=true"), "plain values travel in binary:\n{log}");
    fill(&pair, 20..50)?;
    for table in &in_binary {
        pair.publish(&table.updates(10..40, &mut StdRng::seed_from_u64(seed)))?;
    }
    pair.assert_equal(&["plain", "things"])?;
    // The same with a publication in which some values must be text.
    pair.site.replace("'plain.*'", "'plain.*', 'named.*'")?;
    pair.site.restart()?;
    pair.assert_equal(&["plain", "things", "named"])?;
    fill(&pair, 50..70)?;
    for table in in_binary.iter().chain(&as_text) {
        pair.publish(&table.updates(35..60, &mut StdRng::seed_from_u64(seed)))?;
    }
    pair.assert_equal(&["plain", "things", "named"])
}

#[test]
fn values_of_every_type() -> Result<()> {
    let rounds = std::env::var("FARSHORE_ROUNDS").ok().and_then(|text| text.parse().ok());
    let first = seed();
    for seed in first..first + rounds.unwrap_or(1) {
        both_ways(|direction| round_trip(direction, seed))?;
    }
    Ok(())
}
