//! Groups side by side where foreign keys fire for what the subscription's role writes.

use anyhow::{Result, ensure};
use farshore_tests::{DATABASE, Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(120);
const MET: &str = "groups were in each other's way";

/// Parents of parents, a key of two columns that is not the primary key, a table that refers to
/// itself, types that differ. What an order comes to is the sum of its lines, at every commit.
const SCHEMA: &str = "
    CREATE TABLE customer (id integer PRIMARY KEY, country text, code integer, note text,
      UNIQUE (country, code));
    CREATE TABLE orders (id bigint PRIMARY KEY, customer integer NOT NULL REFERENCES customer,
      total bigint NOT NULL);
    CREATE TABLE line (orders bigint REFERENCES orders, n integer, amount integer NOT NULL,
      PRIMARY KEY (orders, n));
    CREATE TABLE visit (id bigint PRIMARY KEY, country text, code integer, customer bigint,
      FOREIGN KEY (country, code) REFERENCES customer (country, code),
      FOREIGN KEY (customer) REFERENCES customer ON DELETE SET NULL);
    CREATE TABLE part (id integer PRIMARY KEY, whole integer REFERENCES part);
    CREATE PROCEDURE trade(seed float, steps integer) LANGUAGE plpgsql AS $$
    DECLARE
      last integer := coalesce((SELECT max(id) FROM customer), 0);
      number bigint := coalesce((SELECT max(id) FROM orders), 0);
      it record;
    BEGIN
      PERFORM setseed(seed);
      FOR step IN 1..steps LOOP
        IF random() < 0.3 OR last = 0 THEN
          last := last + 1;
          INSERT INTO customer VALUES (last, 'c' || last % 3, last, 'new');
        END IF;
        -- Often a customer that came just now.
        SELECT * INTO it FROM customer WHERE id > last * random() ^ 0.2 ORDER BY id LIMIT 1;
        IF found THEN
          number := number + 1;
          INSERT INTO orders VALUES (number, it.id, 6);
          INSERT INTO line SELECT number, n, n FROM generate_series(1, 3) AS n;
          INSERT INTO visit VALUES (number, it.country, it.code, it.id);
          UPDATE customer SET note = 'ordered ' || step WHERE id = it.id AND random() < 0.3;
        END IF;
        COMMIT;
        IF random() < 0.3 THEN
          SELECT * INTO it FROM line WHERE orders > number - 30 * random() LIMIT 1;
          UPDATE line SET amount = amount + step WHERE orders = it.orders AND n = it.n;
          UPDATE orders SET total = total + step WHERE id = it.orders;
          COMMIT;
        END IF;
        IF random() < 0.2 THEN
          -- Lines and then, in the next transaction, their order.
          SELECT id INTO it FROM orders WHERE id > number - 30 * random() ORDER BY id LIMIT 1;
          DELETE FROM line WHERE orders = it.id;
          UPDATE orders SET total = 0 WHERE id = it.id;
          COMMIT;
          DELETE FROM orders WHERE id = it.id AND random() < 0.7;
          COMMIT;
        END IF;
        IF random() < 0.1 THEN
          SELECT c.id INTO it FROM customer c WHERE random() < 0.1
            AND NOT EXISTS (SELECT FROM orders o WHERE o.customer = c.id) LIMIT 1;
          DELETE FROM visit v USING customer c
            WHERE c.id = it.id AND v.country = c.country AND v.code = c.code;
          COMMIT;
          DELETE FROM customer WHERE id = it.id;
          COMMIT;
        END IF;
        IF random() < 0.1 THEN
          UPDATE customer SET code = -code WHERE id = (SELECT c.id FROM customer c WHERE NOT EXISTS
            (SELECT FROM visit v WHERE v.country = c.country AND v.code = c.code) LIMIT 1);
        END IF;
        INSERT INTO part SELECT coalesce(max(id), 0) + 1, nullif(max(id) - step % 2, 0) FROM part;
        DELETE FROM part WHERE id = (SELECT max(id) FROM part) AND random() < 0.2;
        COMMIT;
      END LOOP;
    END $$;";

/// A pair whose subscription applies small groups, in batches, on four connections, as a role for
/// which foreign keys fire.
fn pair(direction: Direction, schema: &str) -> Result<Pair> {
    let mut pair = Pair::new(direction, &["public.*"], schema)?;
    pair.subscriber.execute_script(
        "CREATE ROLE plain LOGIN; GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES \
         IN SCHEMA public, farshore_marks TO plain; GRANT USAGE ON SCHEMA farshore_marks TO plain; \
         GRANT CREATE ON DATABASE postgres TO plain",
    )?;
    let target = pair.subscriber.url(DATABASE);
    pair.site.replace(&target, &target.replace("postgres@", "plain@"))?;
    pair.apply_side_by_side()?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    Ok(pair)
}

/// Drains the backlog, and looks at the target all the while.
fn drain(pair: &mut Pair) -> Result<()> {
    let mut reader = pair.subscriber.connect()?;
    let mark = pair.mark()?;
    pair.site.start()?;
    pair.site.wait_for("the backlog to be drained", SOON, || {
        // One statement, one snapshot.
        let look = "SELECT EXISTS (SELECT FROM farshore_marks.mark WHERE id = $1), \
                    (SELECT count(*) FROM orders o WHERE total <> \
                      (SELECT coalesce(sum(amount), 0) FROM line l WHERE l.orders = o.id))";
        let row = reader.query_one(look, &[&mark])?;
        let wrong: i64 = row.get(1);
        ensure!(wrong == 0, "{wrong} orders are not the sum of their lines");
        Ok(row.get::<_, bool>(0).then_some(()))
    })
}

/// There were several connections, and nothing had to be repeated.
fn assert_side_by_side(pair: &Pair) -> Result<()> {
    let connections = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'farshore s'";
    ensure!(pair.subscriber_says(connections)? != "1", "there was only one connection");
    let met = pair.site.log().matches(MET).count();
    ensure!(met == 0, "groups were in each other's way {met} times");
    Ok(())
}

/// Parents and children in partitions; things change theirs, and come as a delete and an insert.
const PARTITIONED: &str = "
    CREATE TABLE owner (id integer PRIMARY KEY, note text) PARTITION BY HASH (id);
    CREATE TABLE owner_0 PARTITION OF owner FOR VALUES WITH (MODULUS 2, REMAINDER 0);
    CREATE TABLE owner_1 PARTITION OF owner FOR VALUES WITH (MODULUS 2, REMAINDER 1);
    CREATE TABLE thing (id bigint, kind integer, owner integer NOT NULL REFERENCES owner,
      PRIMARY KEY (id, kind)) PARTITION BY LIST (kind);
    CREATE TABLE thing_0 PARTITION OF thing FOR VALUES IN (0);
    CREATE TABLE thing_1 PARTITION OF thing FOR VALUES IN (1, 2);
    CREATE TABLE tag (thing bigint, kind integer, label text, PRIMARY KEY (thing, kind),
      FOREIGN KEY (thing, kind) REFERENCES thing (id, kind));
    CREATE PROCEDURE trade(seed float, first integer, last integer) LANGUAGE plpgsql AS $$
    BEGIN
      PERFORM setseed(seed);
      FOR step IN first..last LOOP
        INSERT INTO owner VALUES (step, 'new');
        COMMIT;
        INSERT INTO thing SELECT step * 10 + i, i % 3, o.id FROM generate_series(1, 4) AS i,
          LATERAL (SELECT id FROM owner WHERE i > 0 ORDER BY random() LIMIT 1) AS o;
        COMMIT;
        INSERT INTO tag SELECT id, kind, 'first' FROM thing WHERE id / 10 = step AND random() < 0.5;
        COMMIT;
        UPDATE thing SET kind = (kind + 1) % 3 WHERE id > (step - 5) * 10 AND random() < 0.2
          AND NOT EXISTS (SELECT FROM tag t WHERE (t.thing, t.kind) = (thing.id, thing.kind));
        UPDATE owner SET note = 'seen ' || step WHERE id = step - 3;
        COMMIT;
        DELETE FROM tag WHERE thing / 10 = step - 7;
        COMMIT;
        DELETE FROM thing WHERE id / 10 = step - 7;
        COMMIT;
        DELETE FROM owner WHERE id < step - 7
          AND NOT EXISTS (SELECT FROM thing WHERE thing.owner = owner.id);
        COMMIT;
      END LOOP;
    END $$;";

#[test]
fn rows_in_partitions_wait_for_their_parents() -> Result<()> {
    let seed: f64 = rand::random();
    println!("seed {seed}");
    both_ways(|direction| {
        let mut pair = pair(direction, PARTITIONED)?;
        for (first, last) in [(1, 150), (151, 300)] {
            pair.site.stop()?;
            pair.publish(&format!("CALL trade({seed}, {first}, {last})"))?;
            pair.site.start()?;
            pair.assert_equal(&["public"])?;
        }
        assert_side_by_side(&pair)
    })
}

#[test]
fn rows_wait_for_their_parents() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, SCHEMA)?;
        let seed: f64 = rand::random();
        println!("seed {seed}");
        for round in 0..3 {
            pair.site.stop()?;
            pair.publish(&format!("CALL trade({seed} / {}, 400)", round + 1))?;
            drain(&mut pair)?;
            pair.assert_equal(&["public"])?;
        }
        assert_side_by_side(&pair)
    })
}

/// A table for which the target fills in a column by itself is alone in its group: what was put
/// aside for its sake, or before it, keeps its place among what it refers to.
#[test]
fn a_table_with_a_column_of_its_own_stands_among_them() -> Result<()> {
    let mut pair = pair(Direction::DOWN, SCHEMA)?;
    pair.subscriber
        .execute_script("ALTER TABLE visit ADD COLUMN seen timestamptz DEFAULT now()")?;
    pair.site.stop()?;
    pair.publish("CALL trade(0.25, 400)")?;
    drain(&mut pair)?;
    let met = pair.site.log().matches(MET).count();
    ensure!(met == 0, "groups were in each other's way {met} times");
    pair.subscriber.execute_script("ALTER TABLE visit DROP COLUMN seen")?;
    pair.assert_equal(&["public"])
}

/// What the target does of its own accord with a parent's delete finds the rows of all groups
/// before: a trigger behind `ON DELETE CASCADE` notes how many there are.
#[test]
fn what_a_delete_sets_off_finds_what_was_committed_before() -> Result<()> {
    let mut pair = pair(Direction::UP, SCHEMA)?;
    pair.on_both(
        "CREATE TABLE parent (id integer PRIMARY KEY);
         CREATE TABLE child (id integer PRIMARY KEY,
           parent integer REFERENCES parent ON DELETE CASCADE);
         CREATE TABLE many (id integer PRIMARY KEY, v text);
         CREATE TABLE deleted (parent integer PRIMARY KEY, many integer);
         CREATE PROCEDURE fill() LANGUAGE plpgsql AS $$
         BEGIN
           FOR step IN 1..1500 LOOP
             INSERT INTO many VALUES (step, repeat('x', 300));
             IF step % 10 = 5 THEN
               DELETE FROM parent WHERE id = step;
               INSERT INTO deleted VALUES (step, step);
             END IF;
             COMMIT;
           END LOOP;
         END $$;",
    )?;
    pair.subscriber.execute_script(
        "CREATE SCHEMA own;
         CREATE TABLE own.noted (parent integer, many integer);
         CREATE FUNCTION own.note() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
         BEGIN INSERT INTO own.noted SELECT OLD.parent, count(*) FROM public.many; RETURN NULL; END $$;
         CREATE TRIGGER note AFTER DELETE ON child FOR EACH ROW EXECUTE FUNCTION own.note();
         GRANT SELECT, INSERT, UPDATE, DELETE, TRUNCATE ON ALL TABLES IN SCHEMA public TO plain",
    )?;
    pair.publish("INSERT INTO parent SELECT i FROM generate_series(1, 1500) i")?;
    // The children are the target's own business.
    pair.site.restart()?;
    pair.await_copy("deleted")?;
    pair.assert_equal(&["public"])?;
    pair.site.stop()?;
    pair.subscriber.execute_script("INSERT INTO child SELECT id, id FROM parent")?;
    pair.publish("CALL fill()")?;
    pair.site.start()?;
    pair.await_arrival()?;
    // A group has ten transactions, whose inserts come before or after its deletes.
    let wrong = "SELECT count(*) FILTER (WHERE abs(n.many - d.many) > 10) \
                 || ' of ' || count(*) FROM own.noted n JOIN deleted d USING (parent)";
    let wrong = pair.subscriber_says(wrong)?;
    ensure!(wrong == "0 of 150", "{wrong} triggers found other rows than were committed");
    Ok(())
}

/// A defect that lets rows run before their parents is noticed by the target: it costs a
/// repetition, and nothing else.
#[test]
fn a_missed_parent_does_no_harm() -> Result<()> {
    let mut pair = pair(Direction::UP, SCHEMA)?;
    pair.site.stop()?;
    pair.site.env("FARSHORE_DEFECT", "missed-parent");
    pair.publish("CALL trade(0.5, 600)")?;
    drain(&mut pair)?;
    pair.assert_equal(&["public"])?;
    pair.site.await_log(MET, SOON).map(drop)
}

/// An UPDATE cannot set such a column, and one that is what it was need not be set.
#[test]
fn rows_with_an_identity_column_keep_their_children() -> Result<()> {
    both_ways(|direction| {
        let schema = "
            CREATE TABLE parent (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text);
            CREATE TABLE child (id integer PRIMARY KEY,
              parent bigint NOT NULL REFERENCES parent ON DELETE CASCADE);
            ALTER TABLE parent REPLICA IDENTITY FULL";
        let mut pair = pair(direction, schema)?;
        pair.publish(
            "INSERT INTO parent (v) SELECT 'v' FROM generate_series(1, 20); \
             INSERT INTO child SELECT i, 1 + i % 20 FROM generate_series(1, 100) AS i",
        )?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
        pair.site.replace("batches = \"always\"", "batches = \"never\"")?;
        pair.site.start()?;
        for id in 1..=5 {
            pair.publish(&format!("UPDATE parent SET v = 'w' WHERE id = {id}"))?;
        }
        pair.publish("DELETE FROM parent WHERE id = 6")?;
        pair.assert_equal(&["public"])
    })
}

/// To set a column that is GENERATED ALWAYS, a row is taken out and put back: not where a key would
/// take its children as well.
#[test]
fn children_of_a_row_that_would_be_put_back_stay() -> Result<()> {
    both_ways(|direction| {
        let schema = "CREATE TABLE parent (code text PRIMARY KEY, n bigint GENERATED ALWAYS AS IDENTITY, \
               v text); \
             CREATE TABLE child (id integer PRIMARY KEY, code text REFERENCES parent ON DELETE CASCADE)";
        let mut pair = pair(direction, schema)?;
        pair.publish(
            "INSERT INTO parent (code, v) VALUES ('x', 'v'), ('y', 'v'); \
             INSERT INTO child VALUES (1, 'x'), (2, 'y')",
        )?;
        pair.publish("UPDATE parent SET v = 'w' WHERE code = 'y'")?;
        pair.assert_equal(&["public"])?;
        pair.publish("UPDATE parent SET n = DEFAULT, v = 'n' WHERE code = 'x'")?;
        let line = pair.site.await_log(" stopped: ", SOON)?;
        let remedy = "ALTER TABLE public.parent ALTER COLUMN n SET GENERATED BY DEFAULT";
        ensure!(line.contains(remedy), "{line}");
        ensure!(pair.subscriber_says("SELECT count(*) FROM child")? == "2");
        pair.site.stop()?;
        pair.subscriber.execute_script(remedy)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])
    })
}
