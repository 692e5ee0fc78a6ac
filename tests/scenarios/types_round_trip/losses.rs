//! Types of the target that would round values without an error are refused.

use anyhow::{Result, ensure};
use farshore_tests::{DATABASE, Pair, both_ways};

const PUBLISHED: &str = "
    CREATE DOMAIN amount AS numeric(10,4);
    CREATE DOMAIN precise AS amount;
    CREATE TYPE co AS (n numeric, t text);
    CREATE TYPE same AS (n numeric(6,1), t text, a amount[]);
    CREATE TABLE a (k integer PRIMARY KEY, n numeric, t timestamp, v text, w varchar(9), j json,
      na numeric[], va varchar(10)[], ja json[], c co, cs co[], d amount, ds precise[]);
    CREATE TABLE fits (k integer PRIMARY KEY, n numeric(6,1), v varchar(3), j jsonb, s same,
      ss same[], e amount, es amount[]);
    INSERT INTO a VALUES (1, 1.256, '2024-01-01 10:00:00.7', 'ab      ', 'ab   ', '{\"a\":1,\"a\":2}',
      '{1.256}', '{\"ab    \"}', '{\"{\\\"a\\\":1}\"}', (1.256, 't'), '{\"(1.256,t)\"}', 1.2345, '{1.2345}');
    INSERT INTO fits VALUES (1, 1.2, 'abc', '{}', (1.2, 't', '{1.2345}'), '{}', 1.2345, '{1.2345}');";

const ON_THE_TARGET: &str = "
    CREATE DOMAIN amount AS numeric(10,2);
    CREATE DOMAIN precise AS amount;
    CREATE DOMAIN n1 AS numeric(6,1);
    CREATE DOMAIN n2 AS n1;
    CREATE DOMAIN ts0 AS timestamp(0);
    CREATE DOMAIN finer AS numeric(10,4);
    CREATE TYPE co AS (n numeric(6,1), t text);
    CREATE TYPE same AS (n numeric(8,2), t text, a finer[]);
    CREATE TABLE a (k integer PRIMARY KEY, n n2, t ts0, v varchar(3), w varchar(3), j jsonb,
      na numeric(6,1)[], va varchar(3)[], ja jsonb[], c co, cs co[], d amount, ds precise[]);
    CREATE TABLE fits (k integer PRIMARY KEY, n n1, v varchar(3), j text, s same,
      ss same[], e finer, es numeric(10,4)[]);";

/// Column, its type on the target, and what would be lost.
const LOSSES: [(&str, &str, &str); 7] = [
    ("n", "public.n2", ROUNDED),
    ("t", "public.ts0", ROUNDED),
    ("na", "numeric(6,1)[]", ROUNDED),
    ("c", "public.co", ROUNDED),
    ("cs", "public.co[]", ROUNDED),
    ("d", "public.amount", ROUNDED),
    ("ds", "public.precise[]", ROUNDED),
];
const ROUNDED: &str = "(finer values would be rounded, without an error)";

/// What `farshore check` says, of one severity, with its exit code.
fn checked(pair: &Pair, severity: &str) -> Result<(Option<i32>, Vec<String>)> {
    let check = pair.site.verb("check", &["--json"])?;
    let mut said = Vec::new();
    for line in check.stdout.lines() {
        let finding: serde_json::Value = serde_json::from_str(line)?;
        if finding["severity"] == severity {
            said.push(finding["what"].as_str().unwrap_or_default().to_owned());
        }
    }
    Ok((check.code, said))
}

#[test]
fn a_target_that_would_round_is_refused_before_a_row_moves() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(PUBLISHED)?;
        pair.subscriber.execute_script(ON_THE_TARGET)?;
        pair.add_publication("p", &["public.*"], "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        let wanted: Vec<String> = LOSSES
            .iter()
            .map(|(column, there, why)| {
                format!(
                    "column {column} of public.a is {there} on the target, which cannot hold every \
                     value of the publisher's type as it is {why}"
                )
            })
            .collect();
        let (code, errors) = checked(&pair, "error")?;
        ensure!(code == Some(1) && errors == wanted, "{code:?} {errors:#?}");
        pair.site.start()?;
        let (state, said) = pair.site.await_trouble("s", "cannot hold every value")?;
        ensure!(state == "stopped" && said.contains(&wanted[0]), "{state}: {said}");
        ensure!(pair.subscriber_says("SELECT count(*) FROM a")? == "0");
        // With types of the publisher's all goes well.
        pair.subscriber.execute_script(
            "DROP TABLE a; DROP TYPE co; DROP DOMAIN precise; DROP DOMAIN amount",
        )?;
        // The log has the trouble.
        pair.site.restart()?;
        pair.publish("INSERT INTO fits SELECT 2, n, v, j, s, ss, e, es FROM fits")?;
        pair.await_arrival()?;
        for query in [
            "SELECT string_agg(a::text, ' ') FROM a",
            "SELECT string_agg(k || n::text || v || e || es::text, ' ' ORDER BY k) FROM fits",
        ] {
            let (there, here) = (pair.publisher_says(query)?, pair.subscriber_says(query)?);
            ensure!(there == here, "{query}: {there} and {here}");
        }
        Ok(())
    })
}

#[test]
fn a_column_that_begins_to_round_stops_the_stream() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TYPE co AS (n numeric); CREATE TABLE a (k integer PRIMARY KEY, n numeric, c co)";
        let mut pair = Pair::new(direction, &["public.*"], schema)?;
        pair.publish("INSERT INTO a VALUES (1, 1.2, ROW(1.2))")?;
        pair.site.start()?;
        pair.await_arrival()?;
        pair.site.stop()?;
        for (n, c, spoil, mend) in [
            (
                "1.256",
                "1.2",
                "CREATE DOMAIN n1 AS numeric(6,1); ALTER TABLE a ALTER n TYPE n1",
                "ALTER TABLE a ALTER n TYPE numeric",
            ),
            (
                "1.2",
                "1.256",
                "CREATE SCHEMA other; CREATE TYPE other.co AS (n numeric(6,1)); \
                 ALTER TABLE a ALTER c TYPE other.co USING ROW((c).n)::other.co",
                "ALTER TABLE a ALTER c TYPE co USING ROW((c).n)::co",
            ),
        ] {
            pair.subscriber.execute_script(spoil)?;
            let (code, warnings) = checked(&pair, "warning")?;
            ensure!(code == Some(0) && warnings.len() == 1, "{code:?} {warnings:#?}");
            ensure!(warnings[0].contains(ROUNDED), "{warnings:#?}");
            pair.site.start()?;
            pair.publish(&format!("INSERT INTO a SELECT max(k) + 1, {n}, ROW({c})::co FROM a"))?;
            let (state, said) = pair.site.await_trouble("s", "cannot hold every value")?;
            ensure!(state == "stopped" && said.contains(ROUNDED), "{state}: {said}");
            pair.subscriber.execute_script(mend)?;
            // The log has the trouble.
            pair.site.restart()?;
            pair.assert_equal(&["public"])?;
            pair.site.stop()?;
        }
        Ok(())
    })
}
