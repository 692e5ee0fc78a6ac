//! Sample databases, loaded with psql and carried whole.

use crate::definitions::assert_same;
use anyhow::{Context, Result, ensure};
use farshore_testkit::checksum;
use farshore_testkit::postgres::Installation;
use farshore_testkit::skip::skipped;
use farshore_tests::{DATABASE, Direction, Pair, both_ways, publisher_cluster, subscriber_cluster};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// Loads a file of ours.
fn load(pair: &Pair, file: &str) -> Result<()> {
    psql(pair, &Path::new(env!("CARGO_MANIFEST_DIR")).join("scenarios/whole_schema").join(file))
}

/// Loads a file as an operator would.
fn psql(pair: &Pair, file: &Path) -> Result<()> {
    let output = Command::new(Installation::find(15)?.bin().join("psql"))
        .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-f"])
        .arg(file)
        .arg(pair.publisher.url(DATABASE))
        .output()
        .context("run psql")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

const SCHEMAS: &[&str] =
    &["public", "person", "sales", "production", "Odd \"Schema\".x", "farshore_marks"];

/// Writes to every kind of table; `n` tells the rounds apart.
fn write(pair: &Pair, n: i64) -> Result<()> {
    pair.publish(&format!(
        "INSERT INTO film (title, language_id, description) VALUES ('New {n}', 1, 'about {n}'); \
         UPDATE film SET rental_rate = 2.99, rating = 'R' WHERE film_id % 10 = {n} % 10; \
         UPDATE actor SET actor_id = actor_id + 10000 * {n} WHERE actor_id = {n} + 10; \
         DELETE FROM film_actor WHERE film_id = {n} + 2; \
         INSERT INTO payment (customer_id, amount, payment_date) SELECT 1 + i, i, \
           '2022-01-15 UTC'::timestamptz + i * interval '1 month' FROM generate_series(1, 5) i; \
         UPDATE payment SET payment_date = payment_date + interval '1 month' WHERE payment_id % 20 = {n}; \
         BEGIN; INSERT INTO store (store_id, manager_staff_id) VALUES (10 + {n}, 10 + {n}); \
         INSERT INTO staff (staff_id, first_name, store_id) VALUES (10 + {n}, 'S', 10 + {n}); COMMIT; \
         INSERT INTO person.businessentity DEFAULT VALUES; \
         UPDATE person.person SET demographics = '<y/>', attributes = 'n=>{n}', short = DEFAULT \
           WHERE businessentityid % 7 = {n} % 7; \
         UPDATE sales.territory SET salesytd = salesytd * 1.1, parent = NULL WHERE \"TerritoryID\" % 5 = {n} % 5; \
         DELETE FROM sales.\"Order Details\" WHERE order_id = 20 + {n}; \
         INSERT INTO sales.log (what) VALUES ('round {n}'); \
         INSERT INTO sales.cache VALUES ({n}); \
         UPDATE production.document SET amount = amount * 2, period = NULL WHERE owner = {n} + 1;"
    ))?;
    pair.publish(&format!(
        "SET search_path = \"Odd \"\"Schema\"\".x\"; \
         INSERT INTO \"select\" (n, r) VALUES ({n}, '[1,2]'); \
         UPDATE \"select\" SET n = n + 1, \"dot.ted\" = NULL WHERE \"from\" % 30 = 10; \
         INSERT INTO child (more) VALUES (NULL); UPDATE parent SET kind = 'new' WHERE id % 5 = {n} % 5; \
         INSERT INTO tree VALUES (1000 + {n}, 'w', now(), NULL); \
         UPDATE tree SET b = 'w' WHERE a = 52 + 3 * {n}; \
         UPDATE refers SET n = -n WHERE a % 5 = {n} % 5; DELETE FROM tree WHERE a = {n} + 1; \
         UPDATE by_index SET a = a + 1000, c = 'd' WHERE a = {n}; DELETE FROM by_index WHERE a = 50 + {n};"
    ))
}

/// All rows are equal, but for the table that is not logged and the one that has no columns.
fn assert_equal(pair: &mut Pair) -> Result<()> {
    pair.await_arrival()?;
    let (source, target) = (pair.publisher.url(DATABASE), pair.subscriber.url(DATABASE));
    for schema in SCHEMAS {
        let mut tables = checksum::tables_in_schema(&source, schema)?;
        tables.retain(|table| table != "sales.cache" && !table.ends_with(".nothing_at_all"));
        checksum::assert_equal(&source, &target, &tables)?;
    }
    Ok(())
}

fn carried_whole(direction: Direction) -> Result<()> {
    let mut pair = Pair::of(
        publisher_cluster(direction.publisher)?.start()?,
        subscriber_cluster(direction.subscriber)?.start()?,
    )?;
    for file in ["rental.sql", "orders.sql", "oddities.sql"] {
        load(&pair, file)?;
    }
    let check_before = {
        pair.add_publication("p", &["*.*"], "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.verb("check", &[])?
    };
    ensure!(check_before.code == Some(0), "{check_before:?}");
    pair.site.start()?;
    for n in 1..=3 {
        write(&pair, n)?;
    }
    assert_equal(&mut pair)?;
    for n in 4..=6 {
        write(&pair, n)?;
    }
    assert_equal(&mut pair)?;
    pair.site.restart()?;
    write(&pair, 7)?;
    assert_equal(&mut pair)?;
    assert_same(&pair.publisher, &pair.subscriber, &["cannot be there"])?;
    let check = pair.site.verb("check", &[])?;
    ensure!(check.code == Some(0), "{check:?}");
    Ok(())
}

#[test]
fn three_samples_are_carried_to_an_empty_newer_server() -> Result<()> {
    carried_whole(Direction::UP)
}

#[test]
fn three_samples_are_carried_to_an_empty_older_server() -> Result<()> {
    carried_whole(Direction::DOWN)
}

/// Samples of one's own: files that psql loads, separated by colons, in `FARSHORE_SAMPLE`. What
/// `FARSHORE_SAMPLE_LACKS` lists (separated by commas) is passed over when definitions are
/// compared.
#[test]
fn a_sample_of_ones_own_is_carried_whole() -> Result<()> {
    let Ok(files) = std::env::var("FARSHORE_SAMPLE") else {
        skipped("a_sample_of_ones_own_is_carried_whole", "FARSHORE_SAMPLE is not set");
        return Ok(());
    };
    let lacks = std::env::var("FARSHORE_SAMPLE_LACKS").unwrap_or_default();
    let lacks: Vec<&str> = lacks.split(',').filter(|text| !text.is_empty()).collect();
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        for file in files.split(':') {
            psql(&pair, Path::new(file))?;
        }
        pair.add_publication("p", &["*.*"], "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        let schemas = "SELECT string_agg(DISTINCT schemaname, E'\\n') FROM pg_publication_tables";
        pair.await_arrival()?;
        let schemas = pair.publisher_says(schemas)?;
        pair.assert_equal(&schemas.split('\n').collect::<Vec<_>>())?;
        let mut target = pair.subscriber.connect()?;
        pair.site.wait_for("indexes and keys", Duration::from_secs(60), || {
            let query = "SELECT FROM farshore.after_copy WHERE refusal IS NULL LIMIT 1";
            Ok(target.query_opt(query, &[])?.map_or(Some(()), |_| None))
        })?;
        assert_same(&pair.publisher, &pair.subscriber, &lacks)
    })
}
