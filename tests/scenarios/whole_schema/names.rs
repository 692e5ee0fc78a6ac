//! Tables under other names, and tables that differ where it does no harm.

use anyhow::{Result, ensure};
use farshore_tests::{DATABASE, Pair, both_ways};

const SCHEMA: &str = "
    CREATE SCHEMA audit;
    CREATE SEQUENCE numbers;
    CREATE TABLE orders (id bigserial PRIMARY KEY, v text DEFAULT 'x',
      number bigint DEFAULT nextval('numbers'));
    CREATE TABLE lines (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
      order_id bigint NOT NULL REFERENCES orders, v text);
    CREATE INDEX lines_order ON lines (order_id);
    CREATE TABLE audit.log (at integer PRIMARY KEY, what text);
    CREATE TABLE audit.other (id integer PRIMARY KEY, a text, b text);
    INSERT INTO orders (v) SELECT 'v' || i FROM generate_series(1, 500) i;
    INSERT INTO lines (order_id) SELECT i FROM generate_series(1, 500) i;
    INSERT INTO audit.log SELECT i, 'w' FROM generate_series(1, 500) i;
    INSERT INTO audit.other SELECT i, 'a' || i, 'b' FROM generate_series(1, 500) i;";

const MAPPING: &str = "
    [subscription.s.tables]
    \"public.orders\" = \"archive.orders_copy\"
    'audit.other' = '\"Odd.x\".\"Other\"'
    [subscription.s.schemas]
    public = \"mirror\"";

/// Publisher's query, target's query: both give the same.
const SAME: [(&str, &str); 4] = [
    ("FROM orders", "FROM archive.orders_copy"),
    ("FROM lines", "FROM mirror.lines"),
    ("FROM audit.log", "FROM audit.log"),
    (", '' FROM audit.other", ", max(c) FILTER (WHERE c <> 'c') FROM \"Odd.x\".\"Other\""),
];

fn assert_equal(pair: &mut Pair) -> Result<()> {
    pair.await_arrival()?;
    for (left, right) in SAME {
        let columns = if left.contains("other") { "id, a, b" } else { "*" };
        let sum = |from: &str| {
            let table = from.split("FROM ").last().unwrap_or_default();
            format!(
                "SELECT coalesce(md5(string_agg(t::text, ',' ORDER BY t::text)), 'none') \
                 FROM (SELECT {columns} FROM {table}) t"
            )
        };
        let (left, right) = (pair.publisher_says(&sum(left))?, pair.subscriber_says(&sum(right))?);
        ensure!(left == right, "{left} {right}");
    }
    Ok(())
}

#[test]
fn mapped_tables_are_created_copied_and_followed() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(SCHEMA)?;
        // This one is there already: another order, and a column more.
        pair.subscriber.execute_script(
            "CREATE SCHEMA \"Odd.x\"; CREATE TABLE \"Odd.x\".\"Other\" \
             (b text, c text NOT NULL DEFAULT 'c', id integer PRIMARY KEY, a text)",
        )?;
        pair.add_publication("p", &["public.*", "audit.*"], "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.add(MAPPING)?;
        let check = pair.site.verb("check", &[])?;
        ensure!(check.code == Some(0), "{check:?}");
        pair.site.start()?;
        pair.publish(
            "UPDATE orders SET v = 'new' WHERE id % 3 = 0; DELETE FROM lines WHERE id % 7 = 0; \
             INSERT INTO orders DEFAULT VALUES; INSERT INTO lines (order_id) VALUES (501); \
             UPDATE audit.other SET a = NULL WHERE id % 2 = 0; INSERT INTO audit.other VALUES (0)",
        )?;
        assert_equal(&mut pair)?;
        pair.site.restart()?;
        pair.publish("TRUNCATE lines, orders RESTART IDENTITY; TRUNCATE audit.other; \
                      INSERT INTO orders DEFAULT VALUES; INSERT INTO audit.other VALUES (7, 'a', 'b')")?;
        assert_equal(&mut pair)?;
        ensure!(pair.subscriber_says("SELECT count(*) FROM archive.orders_copy")? == "1");
        ensure!(
            pair.subscriber_says("SELECT pg_get_serial_sequence('archive.orders_copy', 'id')")?
                == "archive.orders_id_seq"
        );
        ensure!(
            pair.subscriber_says("SELECT to_regclass('public.orders') IS NULL")? == "t",
            "the publisher's name was used"
        );
        let keys = "SELECT string_agg(conrelid::regclass || ' ' || confrelid::regclass, ',') \
                    FROM pg_constraint WHERE contype = 'f' AND connamespace <> 'farshore'::regnamespace";
        let keys = pair.subscriber_says(keys)?;
        ensure!(keys == "mirror.lines archive.orders_copy", "{keys}");
        // An unfinished copy that starts over, and one more table under its mapped schema.
        pair.publish("CREATE TABLE later (id integer PRIMARY KEY); INSERT INTO later VALUES (1)")?;
        pair.await_copy("later")?;
        ensure!(pair.subscriber_says("SELECT count(*) FROM mirror.later")? == "1");
        // Sequences stand where they should, also one that its table does not own.
        pair.site.stop()?;
        for (there, here) in
            [("numbers", "mirror.numbers"), ("orders_id_seq", "archive.orders_id_seq")]
        {
            let last = |sequence: &str| format!("SELECT last_value FROM {sequence}");
            let (left, right) =
                (pair.publisher_says(&last(there))?, pair.subscriber_says(&last(here))?);
            ensure!(left == right, "{there} stands at {left}, {here} at {right}");
        }
        Ok(())
    })
}
