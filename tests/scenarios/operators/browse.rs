//! browse: the stored log, readable.

use anyhow::{Context, Result, ensure};
use farshore_tests::{Pair, both_ways};
use serde_json::{Value, json};

const SCHEMA: &str = "CREATE TABLE kinds (id integer PRIMARY KEY, b boolean, i2 smallint, i8 bigint, \
    f4 real, f8 double precision, n numeric, t text, by bytea, d date, tm time, ts timestamp, \
    tz timestamptz, iv interval, u uuid, j json, jb jsonb, ip inet, net cidr, mac macaddr, \
    ints integer[], texts text[], bits varbit, tmz timetz, p point); \
    CREATE TABLE wide (id integer PRIMARY KEY, v text); \
    CREATE TABLE whole (id integer, v text); ALTER TABLE whole REPLICA IDENTITY FULL";

const KINDS: &str = "INSERT INTO kinds VALUES \
    (1, true, -2, 9007199254740993, 1.5, 1e-300, 12345678.900, E'it''s\\n\"quoted\"', '\\x00ff', \
     '2026-02-28', '12:34:56.789', '1999-12-31 23:59:59.5', '2026-11-21 12:00:00+02', \
     '1 year 2 mons -3 days 04:05:06.7', 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '{\"a\":  [1]}', \
     '{\"b\": null}', '10.1.2.3', '10.1.0.0/16', '08:00:2b:01:02:03', '{1,NULL,-3}', \
     '{\"a b\",\"\",\"NULL\",c}', B'10101', '12:00:00-03:30', '(1.5,-2)'), \
    (2, false, NULL, NULL, 'NaN', '-Infinity', 'NaN', '', '', 'infinity', '24:00:00', '-infinity', \
     '0044-03-15 12:00:00+00 BC', '0', NULL, '[]', '\"x\"', '::1/64', '::/0', NULL, '{}', \
     '{{a,b},{c,d}}', '', NULL, NULL), \
    (3, NULL, NULL, NULL, 3.4e38, 123456789012345680, 0.00001234, 't', NULL, '0001-01-01', NULL, NULL, \
     NULL, '-00:00:01', NULL, NULL, NULL, '2001:db8::1', NULL, NULL, NULL, NULL, NULL, NULL, NULL), \
    (4, NULL, NULL, NULL, 0.1, 100000, -100000000.5, 't', NULL, '12026-01-01', NULL, NULL, \
     NULL, '25:00:00', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)";

fn browse(pair: &Pair, more: &[&str]) -> Result<(Vec<String>, String)> {
    let arguments = [&["--publication", "p"], more].concat();
    let said = pair.site.verb("browse", &arguments)?;
    ensure!(said.code == Some(0), "{said:?}");
    Ok((said.stdout.lines().map(str::to_owned).collect(), said.stderr))
}

fn browse_json(pair: &Pair, more: &[&str]) -> Result<Vec<Value>> {
    let (lines, _) = browse(pair, &[more, &["--json"]].concat())?;
    lines.iter().map(|line| serde_json::from_str(line).with_context(|| line.clone())).collect()
}

/// PostgreSQL reads back what is shown, into the very same row.
#[test]
fn values_are_shown_as_postgres_reads_them() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.*"], SCHEMA)?;
        pair.site.start()?;
        pair.await_arrival()?;
        pair.publish(KINDS)?;
        pair.await_arrival()?;
        let (lines, said) = browse(&pair, &["--table", "public.kinds", "--json"])?;
        ensure!(lines.len() == 4 && said == "4 changes\n", "{said} {lines:#?}");
        let mut publisher = pair.publisher.connect()?;
        for line in &lines {
            let (_, new) = line.split_once("\"new\":").context("no new row")?;
            let new = new.strip_suffix('}').context("no end")?;
            let query = "SELECT shown *= kinds.*, shown::text || kinds::text FROM kinds, \
                json_populate_record(NULL::kinds, $1::text::json) AS shown WHERE kinds.id = shown.id";
            let row = publisher.query_one(query, &[&new]).with_context(|| new.to_owned())?;
            ensure!(row.get::<_, bool>(0), "{new}: {}", row.get::<_, String>(1));
        }
        let (lines, _) = browse(&pair, &["--table", "public.kinds"])?;
        ensure!(lines.len() == 5 && lines[0].contains(" committed 2"), "{lines:#?}");
        ensure!(
            lines[1].starts_with("  INSERT public.kinds new (id=1, b=true, i2=-2, "),
            "{lines:#?}"
        );
        ensure!(lines[1].contains("t='it''s\\n\"quoted\"', by='\\x00ff'"), "{lines:#?}");
        Ok(())
    })
}

#[test]
fn every_kind_of_change_is_shown_and_nothing_that_was_rolled_back() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.*"], SCHEMA)?;
        pair.site.start()?;
        pair.await_arrival()?;
        let begin = pair.publisher_says("SELECT clock_timestamp() AT TIME ZONE 'UTC'")?;
        pair.publish("INSERT INTO whole VALUES (1, 'a')")?;
        pair.publish("UPDATE whole SET v = 'b'")?;
        pair.publish("INSERT INTO wide VALUES (-1, 'x'), (-2, 'y')")?;
        pair.publish("UPDATE wide SET id = -3 WHERE id = -2")?;
        pair.publish("DELETE FROM wide WHERE id = -1")?;
        let middle = pair.publisher_says("SELECT clock_timestamp() AT TIME ZONE 'UTC'")?;
        pair.publish("TRUNCATE wide, whole")?;
        // Larger than the publisher's memory for it, and than a batch.
        pair.publish(
            "BEGIN; INSERT INTO wide SELECT i, repeat('x', 50) FROM generate_series(1, 20000) AS i; \
             SAVEPOINT a; INSERT INTO wide SELECT i, 'never' FROM generate_series(30000, 40000) AS i; \
             ROLLBACK TO a; INSERT INTO wide VALUES (20001, 'last'); COMMIT",
        )?;
        pair.publish("BEGIN; INSERT INTO wide VALUES (50000, 'never'); ROLLBACK")?;
        pair.await_arrival()?;
        let shown: Vec<Value> = browse_json(&pair, &["--from", &begin, "--to", &middle])?;
        let what: Vec<Value> = shown
            .iter()
            .map(|line| {
                json!([line["operation"], line["table"], line["key"], line["old"], line["new"]])
            })
            .collect();
        let wanted = [
            json!(["INSERT", "public.whole", null, null, {"id": 1, "v": "a"}]),
            json!(["UPDATE", "public.whole", null, {"id": 1, "v": "a"}, {"id": 1, "v": "b"}]),
            json!(["INSERT", "public.wide", null, null, {"id": -1, "v": "x"}]),
            json!(["INSERT", "public.wide", null, null, {"id": -2, "v": "y"}]),
            json!(["UPDATE", "public.wide", {"id": -2}, null, {"id": -3, "v": "y"}]),
            json!(["DELETE", "public.wide", {"id": -1}, null, null]),
        ];
        ensure!(what == wanted, "{what:#?}");
        let rest = browse_json(&pair, &["--from", &middle, "--limit", "0"])?;
        let mut truncated: Vec<&str> =
            rest[..2].iter().filter_map(|line| line["table"].as_str()).collect();
        truncated.sort_unstable();
        ensure!(
            truncated == ["public.whole", "public.wide"] && rest[0]["operation"] == "TRUNCATE",
            "{truncated:?}"
        );
        let wide: Vec<&Value> = rest[2..].iter().filter(|l| l["table"] == "public.wide").collect();
        ensure!(wide.len() == 20_001, "{} inserts", wide.len());
        ensure!(
            wide.iter().all(|line| line["new"]["v"] != "never"),
            "what was rolled back is shown"
        );
        let large = wide[0]["lsn"].as_str().context("no position")?;
        let one = browse_json(&pair, &["--from", large, "--to", large, "--limit", "0"])?;
        ensure!(one.len() == 20_001, "{} changes of {large}", one.len());
        let (lines, said) = browse(&pair, &["--from", large, "--limit", "3"])?;
        ensure!(
            lines.len() == 4 && said.contains(&format!("more, see --limit and --from {large}")),
            "{said} {lines:#?}"
        );
        // As the subscription would apply it, if it had to catch up: TRUNCATE and spill stand alone.
        let groups = browse_json(&pair, &["--schedule", "s"])?;
        let alone: Vec<&Value> =
            groups.iter().filter(|g| g["ends_because"] == "a barrier stands alone").collect();
        ensure!(
            alone.len() >= 2 && alone.iter().all(|group| group["transactions"] == 1),
            "{groups:#?}"
        );
        ensure!(alone.iter().any(|g| g["first"] == large && g["spilled"] == true), "{groups:#?}");
        let numbers: Vec<u64> = groups.iter().filter_map(|g| g["group"].as_u64()).collect();
        ensure!(numbers.iter().copied().eq(1..=groups.len() as u64), "{numbers:?}");
        let (some, said) = browse(&pair, &["--schedule", "s", "--limit", "1"])?;
        ensure!(some.len() == 1 && said.contains("there are more"), "{said} {some:#?}");
        // The same without a node.
        let online = browse(&pair, &["--limit", "0"])?;
        pair.site.stop()?;
        let offline = browse(&pair, &["--limit", "0"])?;
        ensure!(online == offline, "{} and {} lines", online.0.len(), offline.0.len());
        let said = pair.site.verb("browse", &["--publication", "p", "--schedule", "nobody"])?;
        let why = "no subscription \"nobody\"";
        ensure!(said.code == Some(1) && said.stderr.contains(why), "{said:?}");
        pair.site.start()?;
        pair.assert_equal(&["public"])
    })
}
