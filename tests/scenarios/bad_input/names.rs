//! Hostile names that are right: they go through like any others.

use anyhow::{Result, ensure};
use farshore_testkit::checksum;
use farshore_tests::{DATABASE, Pair, both_ways};

/// Quotes, statements, backslashes, format marks, letters of many bytes, and as long as names get.
const NAMES: &[&str] = &[
    "it's \"quoted\"",
    "x'); DROP TABLE victim; --",
    "x\"; DROP TABLE victim; --",
    "back\\slash \\' \\\\",
    "100% %s %d %n",
    "$1 $$ $x$",
    "line\nbreak\r\ttab",
    "naïve 表 таблица 🐘",
    "-dash --and; -- comment",
    "*",
    "a.b.\"c\"",
    " leading and trailing ",
    "select",
    "{\"json\": [\"x\"]}",
    "sixty-three bytes sixty-three bytes sixty-three bytes sixty-thr",
];

fn quoted(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// A schema, a table and a column of every name, and a type of it.
fn schema() -> String {
    let mut sql = "CREATE TABLE victim (id integer PRIMARY KEY, v text);".to_owned();
    for (number, name) in NAMES.iter().enumerate() {
        let (name, next) = (quoted(name), quoted(NAMES[(number + 1) % NAMES.len()]));
        sql.push_str(&format!(
            "CREATE SCHEMA {name}; CREATE TYPE {name}.{name} AS ENUM ('a', 'it''s', '{number}');
             CREATE TABLE {name}.{next} (id integer, {name} text, mood {name}.{name},
               CONSTRAINT {name} PRIMARY KEY (id, {name}));
             CREATE TABLE {name}.whole ({name} text, {next} integer);
             ALTER TABLE {name}.whole REPLICA IDENTITY FULL;"
        ));
    }
    sql
}

fn rows(text: &str) -> String {
    let mut sql = format!("INSERT INTO victim VALUES ({}, 'v');", text.len());
    for (number, name) in NAMES.iter().enumerate() {
        let (name, next) = (quoted(name), quoted(NAMES[(number + 1) % NAMES.len()]));
        sql.push_str(&format!(
            "INSERT INTO {name}.{next} SELECT i, '{text}' || i, 'it''s' FROM generate_series(1, 20) AS i;
             INSERT INTO {name}.whole SELECT '{text}', i FROM generate_series(1, 5) AS i;"
        ));
    }
    sql
}

fn changes() -> String {
    let mut sql = String::new();
    for (number, name) in NAMES.iter().enumerate() {
        let (name, next) = (quoted(name), quoted(NAMES[(number + 1) % NAMES.len()]));
        sql.push_str(&format!(
            "UPDATE {name}.{next} SET mood = 'a' WHERE id % 3 = 0;
             UPDATE {name}.{next} SET {name} = {name} || '!' WHERE id % 5 = 0;
             DELETE FROM {name}.{next} WHERE id % 7 = 0;
             UPDATE {name}.whole SET {next} = -{next} WHERE {next} > 3;
             DELETE FROM {name}.whole WHERE {next} = 1;"
        ));
    }
    sql
}

fn assert_equal(pair: &mut Pair, target: &str) -> Result<()> {
    pair.await_arrival_at(pair.subscriber.connect_to(target)?)?;
    let source = pair.publisher.url(DATABASE);
    let target = pair.subscriber.url(&target.replace('%', "%25").replace(' ', "%20"));
    for schema in NAMES.iter().chain(&["public"]) {
        let tables = checksum::tables_in_schema(&source, schema)?;
        ensure!(!tables.is_empty(), "no tables in {schema}");
        checksum::assert_equal(&source, &target, &tables)?;
    }
    Ok(())
}

#[test]
fn hostile_names_go_through() -> Result<()> {
    const TARGET: &str = "a target's 100% \"base\"";
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(&schema())?;
        pair.publish(&rows("first"))?;
        pair.subscriber.connect()?.batch_execute(&format!("CREATE DATABASE {}", quoted(TARGET)))?;
        pair.subscriber.connect_to(TARGET)?.batch_execute(&format!(
            "{} CREATE SCHEMA farshore_marks; CREATE TABLE farshore_marks.mark (id bigint PRIMARY KEY)",
            schema()
        ))?;
        // As TOML's basic strings, which know the same escapes as JSON's.
        let patterns: Vec<String> = NAMES
            .iter()
            .map(|name| serde_json::to_string(&format!("{}.*", quoted(name))))
            .collect::<Result<_, _>>()?;
        let source = pair.publisher.url(DATABASE);
        let port = pair.subscriber.port();
        let conninfo = format!(
            "host=127.0.0.1 port={port} user=postgres dbname='{}'",
            TARGET.replace('\\', "\\\\").replace('\'', "\\'")
        );
        let article = format!("{}.{}", quoted(NAMES[0]), quoted(NAMES[1]));
        let article = serde_json::to_string(&article)?;
        pair.site.add(&format!(
            "[publication.p]\nsource = \"{source}\"\n\
             tables = [{}, \"public.victim\", \"farshore_marks.mark\"]\n\
             [publication.p.article.{article}]\nwhere = {}\n\
             [subscription.s]\npublication = \"p\"\ntarget = {}\n",
            patterns.join(", "),
            serde_json::to_string(&format!("{} <> 'x''); --'", quoted(NAMES[0])))?,
            serde_json::to_string(&conninfo)?
        ))?;
        let check = pair.site.verb("check", &[])?;
        ensure!(check.code == Some(0), "{}{}", check.stdout, check.stderr);
        pair.site.start()?;
        pair.publish(&rows("second"))?;
        pair.publish(&changes())?;
        assert_equal(&mut pair, TARGET)?;
        pair.site.restart()?;
        pair.publish(&changes())?;
        assert_equal(&mut pair, TARGET)
    })
}
