//! What is created, when, and what is not.

use crate::definitions::assert_same;
use anyhow::{Result, ensure};
use farshore_tests::{DATABASE, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

const SCHEMA: &str = "
    CREATE TYPE mood AS ENUM ('sad', 'happy');
    CREATE TABLE a (id serial PRIMARY KEY, m mood DEFAULT 'sad', v text, w integer UNIQUE,
      CONSTRAINT longer CHECK (length(v) > 0));
    CREATE TABLE b (id integer PRIMARY KEY, a integer REFERENCES a ON DELETE CASCADE, v text);
    CREATE INDEX b_a ON b (a);
    CREATE INDEX a_v ON a (lower(v));
    COMMENT ON TABLE a IS 'The first';
    INSERT INTO a (v, w) SELECT 'v' || i, i FROM generate_series(1, 2000) i;
    INSERT INTO b SELECT i, i, 'v' FROM generate_series(1, 2000) i;";

fn pair(direction: farshore_tests::Direction, tables: &[&str], more: &str) -> Result<Pair> {
    let mut pair = Pair::bare(direction)?;
    pair.publish(SCHEMA)?;
    pair.add_publication("p", tables, "")?;
    let target = pair.subscriber.url(DATABASE);
    pair.site
        .add(&format!("[subscription.s]\npublication = \"p\"\ntarget = \"{target}\"\n{more}\n"))?;
    Ok(pair)
}

/// Waits until nothing waits for the end of a copy any more.
fn await_all_created(pair: &mut Pair) -> Result<()> {
    let mut target = pair.subscriber.connect()?;
    pair.site.wait_for("all indexes and constraints", SOON, || {
        let query = "SELECT FROM farshore.after_copy WHERE refusal IS NULL LIMIT 1";
        Ok(target.query_opt(query, &[])?.map_or(Some(()), |_| None))
    })
}

#[test]
fn the_dry_run_prints_what_is_run() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, &["public.*"], "")?;
        let dry = pair.site.verb("schema", &[])?;
        ensure!(dry.code == Some(0), "{dry:?}");
        let json = pair.site.verb("schema", &["--json", "--subscription", "s"])?;
        let parsed: serde_json::Value = serde_json::from_str(&json.stdout)?;
        ensure!(parsed["subscription"] == "s" && parsed["left_out"] == serde_json::json!([]));
        for statement in ["before", "after"].map(|when| parsed[when].as_array().cloned()) {
            for one in statement.unwrap_or_default() {
                let sql = one["sql"].as_str().unwrap_or("none");
                ensure!(dry.stdout.contains(&format!("{sql};\n")), "{sql} is not in {dry:?}");
            }
        }
        ensure!(pair.site.verb("schema", &["--subscription", "x"])?.code == Some(1));
        ensure!(
            pair.subscriber_says("SELECT count(*) FROM pg_type WHERE typname = 'mood'")? == "0"
        );
        // Run by hand, it gives what a run gives; and then there is nothing left to do.
        pair.subscriber.execute_script(&dry.stdout)?;
        assert_same(&pair.publisher, &pair.subscriber, &[])?;
        let again = pair.site.verb("schema", &[])?;
        ensure!(again.stdout == "-- subscription s: the target lacks nothing\n", "{again:?}");
        pair.site.start()?;
        pair.assert_equal(&["public"])
    })
}

/// Whatever is cut off, the next start makes the rest, and nothing twice.
#[test]
fn killed_at_every_step_of_the_creation() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, &["public.*"], "copy_workers = 1")?;
        // Around the first row of progress, each object and table, and each begin of a copy; then
        // around each index and constraint, the end of the copy, and the foreign key.
        let begin = ["before-state:1", "after-state:1", "before-state:2", "after-state:1"];
        let end = ["before-finish:1", "after-finish:1"];
        let twice = ["before-finish:2", "after-finish:1"];
        let all = [begin; 3].concat().into_iter().chain([end; 3].concat()).chain(twice);
        for point in all.chain([end; 2].concat()) {
            pair.site.env("FARSHORE_CRASH", &format!("snapshot.{point}"));
            pair.site.start()?;
            let ended = pair.site.farshore()?.wait(SOON)?;
            ensure!(ended.is_some(), "{point} was not reached{}", pair.site.log_tail());
            pair.site.kill9()?;
        }
        pair.site.env("FARSHORE_CRASH", "");
        pair.site.start()?;
        pair.publish("INSERT INTO a (v) VALUES ('new'); DELETE FROM a WHERE id = 7")?;
        pair.assert_equal(&["public"])?;
        await_all_created(&mut pair)?;
        assert_same(&pair.publisher, &pair.subscriber, &[])
    })
}
