//! Tables of random shapes, with random changes and DDL.

use super::kinds::{BUILT_IN, Kind, odd_name};
use anyhow::Result;
use farshore_testkit::seed;
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{RngExt, SeedableRng};
use std::fmt::Write as _;

const SCHEMA: &str = "\"Odd shapes\"";
/// Tables besides the one of 1,600 columns.
const TABLES: usize = 16;
const STEPS: usize = 60;

/// What rows are known by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Identity {
    Key,
    LongKey,
    Index,
    Full,
    FullWithKey,
    /// Only inserts.
    None,
}

struct Column {
    name: String,
    kind: &'static Kind,
}

struct Shape {
    name: String,
    identity: Identity,
    /// `n integer` and `big text` stand before them.
    columns: Vec<Column>,
    next_n: u32,
    columns_made: usize,
    /// Truncated now and then; then columns are added without defaults.
    is_truncated: bool,
}

fn quote(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

impl Shape {
    fn random(number: usize, rng: &mut StdRng) -> Shape {
        const IDENTITIES: [Identity; 6] = [
            Identity::Key,
            Identity::LongKey,
            Identity::Index,
            Identity::Full,
            Identity::FullWithKey,
            Identity::None,
        ];
        let count = *[0, 1, 2, 5, 9, 20, 63, 64, 65].choose(rng).expect("counts");
        let mut shape = Shape {
            name: quote(&odd_name(rng, number)),
            identity: IDENTITIES[number % IDENTITIES.len()],
            columns: Vec::new(),
            next_n: 0,
            columns_made: 0,
            is_truncated: rng.random(),
        };
        for _ in 0..count {
            let kind = BUILT_IN.choose(rng).expect("kinds");
            shape.new_column(kind, rng);
        }
        shape
    }

    fn widest(rng: &mut StdRng) -> Shape {
        let small: Vec<&Kind> = BUILT_IN
            .iter()
            .filter(|k| ["boolean", "smallint", "\"char\""].contains(&k.sql))
            .collect();
        let mut shape = Shape {
            name: quote("the widest table"),
            identity: if rng.random() { Identity::Key } else { Identity::Full },
            columns: Vec::new(),
            next_n: 0,
            columns_made: 0,
            is_truncated: rng.random(),
        };
        for _ in 0..1_598 {
            let kind = small.choose(rng).expect("small kinds");
            shape.new_column(kind, rng);
        }
        shape
    }

    fn new_column(&mut self, kind: &'static Kind, rng: &mut StdRng) {
        self.columns_made += 1;
        self.columns.push(Column { name: quote(&odd_name(rng, self.columns_made)), kind });
    }

    fn table(&self) -> String {
        format!("{SCHEMA}.{}", self.name)
    }

    fn definition(&self) -> String {
        let table = self.table();
        let columns: Vec<String> =
            self.columns.iter().map(|c| format!(", {} {}", c.name, c.kind.sql)).collect();
        let mut text = format!(
            "CREATE TABLE {table} (n integer NOT NULL, big text NOT NULL{});",
            columns.concat()
        );
        text.push_str(&match self.identity {
            Identity::Key => format!("ALTER TABLE {table} ADD PRIMARY KEY (n);"),
            Identity::LongKey => format!("ALTER TABLE {table} ADD PRIMARY KEY (big, n);"),
            Identity::Index => {
                let key = quote(&format!("key of {}", self.name.replace('"', "")));
                format!(
                    "ALTER TABLE {table} ADD CONSTRAINT {key} UNIQUE (n); \
                     ALTER TABLE {table} REPLICA IDENTITY USING INDEX {key};"
                )
            }
            Identity::Full => format!("ALTER TABLE {table} REPLICA IDENTITY FULL;"),
            Identity::FullWithKey => format!(
                "ALTER TABLE {table} ADD PRIMARY KEY (n); ALTER TABLE {table} REPLICA IDENTITY FULL;"
            ),
            Identity::None => format!("ALTER TABLE {table} REPLICA IDENTITY NOTHING;"),
        });
        write!(text, "ALTER TABLE {table} ALTER big SET STORAGE EXTERNAL;").expect("to a string");
        text
    }

    fn insert(&mut self, rng: &mut StdRng) -> String {
        let mut text = String::new();
        for _ in 0..rng.random_range(1..6) {
            self.next_n += 1;
            let big = match self.identity {
                // An index holds at most 2,704 bytes of a row.
                Identity::LongKey => rng.random_range(0..2_500),
                _ if rng.random_ratio(1, 3) => rng.random_range(2_000..20_000),
                _ => rng.random_range(0..50),
            };
            let values: Vec<String> =
                self.columns.iter().map(|c| format!(", {}", c.kind.value(rng))).collect();
            write!(
                text,
                "INSERT INTO {} VALUES ({}, (SELECT left(coalesce(string_agg(md5({1} || ' ' || i), ''), \
                 ''), {big}) FROM generate_series(0, {big} / 32) AS i){});",
                self.table(),
                self.next_n,
                values.concat()
            )
            .expect("to a string");
        }
        text
    }

    fn some_rows(&self, rng: &mut StdRng) -> String {
        let modulus = rng.random_range(2..6);
        format!("n % {modulus} = {}", rng.random_range(0..modulus))
    }

    fn update(&mut self, rng: &mut StdRng) -> String {
        let rows = self.some_rows(rng);
        let mut set = Vec::new();
        for column in &self.columns {
            if rng.random_ratio(1, 3) {
                set.push(format!("{} = {}", column.name, column.kind.value(rng)));
            }
        }
        match rng.random_range(0..6) {
            0 => {
                // Keys move out of the way of all others.
                self.next_n = self.next_n * 2 + 10;
                set.push(format!("n = n + {}", self.next_n));
                self.next_n *= 2;
                if self.next_n > 100_000_000 {
                    return format!("DELETE FROM {};", self.table());
                }
            }
            1 => set.push("big = 'b' || n".to_owned()),
            _ => {}
        }
        if set.is_empty() {
            set.push("big = big".to_owned());
        }
        format!("UPDATE {} SET {} WHERE {rows};", self.table(), set.join(", "))
    }

    fn ddl(&mut self, rng: &mut StdRng) -> String {
        let table = self.table();
        if self.columns.len() > 1_000 {
            return String::new();
        }
        if !self.columns.is_empty() && rng.random_ratio(1, 3) {
            let at = rng.random_range(0..self.columns.len());
            let column = self.columns.remove(at);
            // Seen by a change of its own, or the next column could be the same one renamed.
            return format!("ALTER TABLE {table} DROP COLUMN {};{}", column.name, self.insert(rng));
        }
        let kind = BUILT_IN.choose(rng).expect("kinds");
        self.new_column(kind, rng);
        let column = &self.columns[self.columns.len() - 1];
        let default = if !self.is_truncated && rng.random() {
            format!(" DEFAULT {}", kind.value(rng))
        } else {
            String::new()
        };
        let add = format!("ALTER TABLE {table} ADD COLUMN {} {}{default};", column.name, kind.sql);
        format!("{add}{}", self.insert(rng))
    }

    fn step(&mut self, rng: &mut StdRng) -> String {
        let only_inserts = self.identity == Identity::None;
        match rng.random_range(0..12) {
            0..5 => self.insert(rng),
            5..8 if !only_inserts => self.update(rng),
            8 if !only_inserts => {
                format!("DELETE FROM {} WHERE {};", self.table(), self.some_rows(rng))
            }
            // After a TRUNCATE the publisher cannot tell any more what the rows before it had in a
            // new column, and farshore stops where the log is that far behind.
            9 if self.is_truncated && rng.random_ratio(1, 4) => {
                format!("TRUNCATE {};", self.table())
            }
            10 => self.ddl(rng),
            _ => self.insert(rng),
        }
    }
}

/// What was dropped is left on the subscriber, and the comparison wants the same columns.
fn drop_what_is_left(pair: &Pair) -> Result<()> {
    let columns = "SELECT format('%I.%I', attrelid::regclass::text, attname) AS column, \
         format('ALTER TABLE %s DROP COLUMN %I', attrelid::regclass, attname) AS sql \
         FROM pg_attribute JOIN pg_class c ON c.oid = attrelid \
         WHERE relnamespace = '\"Odd shapes\"'::regnamespace AND relkind = 'r' \
         AND attnum > 0 AND NOT attisdropped";
    let listed = |url: String| -> Result<Vec<(String, String)>> {
        let mut client = postgres::Client::connect(&url, postgres::NoTls)?;
        let rows = client.query(columns, &[])?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    };
    let published = listed(pair.publisher.url(DATABASE))?;
    for (column, sql) in listed(pair.subscriber.url(DATABASE))? {
        if !published.iter().any(|(there, _)| *there == column) {
            pair.subscriber.execute_script(&sql)?;
        }
    }
    Ok(())
}

fn random_tables(direction: Direction, seed: u64) -> Result<()> {
    println!("FARSHORE_SEED={seed} {direction:?}");
    let rng = &mut StdRng::seed_from_u64(seed);
    let mut shapes: Vec<Shape> = (0..TABLES).map(|number| Shape::random(number, rng)).collect();
    shapes.push(Shape::widest(rng));
    let tables: Vec<String> = shapes.iter().map(Shape::definition).collect();
    let schema = format!("CREATE SCHEMA {SCHEMA}; {}", tables.concat());
    let mut pair = Pair::new(direction, &["\"Odd shapes\".*"], &schema)?;
    for shape in &mut shapes {
        pair.publish(&shape.insert(rng))?;
    }
    pair.site.start()?;
    pair.await_arrival()?;
    for step in 0..STEPS {
        let mut script = String::new();
        for _ in 0..rng.random_range(1..4) {
            let at = rng.random_range(0..shapes.len());
            let shape = &mut shapes[at];
            script.push_str(&shape.step(rng));
        }
        match rng.random_range(0..4) {
            0 => pair.publish(&script)?,
            _ => pair.publish(&format!("BEGIN;{script}COMMIT"))?,
        }
        let undone = shapes.choose(rng).expect("shapes");
        if undone.identity != Identity::None && rng.random_ratio(1, 5) {
            let undone = undone.table();
            pair.publish(&format!(
                "BEGIN; SAVEPOINT a; DELETE FROM {undone}; ROLLBACK TO a; COMMIT"
            ))?;
        }
        if step == STEPS / 2 {
            pair.site.kill9()?;
            pair.site.start()?;
        }
    }
    pair.await_arrival()?;
    drop_what_is_left(&pair)?;
    pair.assert_equal(&["Odd shapes"])
}

#[test]
fn tables_of_random_shapes() -> Result<()> {
    let rounds = std::env::var("FARSHORE_ROUNDS").ok().and_then(|text| text.parse().ok());
    let first = seed();
    for seed in first..first + rounds.unwrap_or(1) {
        both_ways(|direction| random_tables(direction, seed))?;
    }
    Ok(())
}
