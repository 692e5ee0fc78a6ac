//! Changes at odds with the target, under each policy.

use anyhow::{Result, ensure};
use farshore_tests::{Direction, Pair, both_ways};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

const SCHEMA: &str = "
    CREATE TABLE t (id integer PRIMARY KEY, code text UNIQUE, v text, n integer, parent integer,
                    r int4range, amount integer, big text);
    ALTER TABLE t ALTER COLUMN big SET STORAGE EXTERNAL;
    CREATE TABLE fine (id integer PRIMARY KEY)";

const ROWS: &str = "INSERT INTO t SELECT i, 'c' || i, 'v', i, 1, int4range(1000 + i, 1001 + i), i, \
    repeat('x', 5000) FROM generate_series(1, 20) AS i";

/// What only the target demands, and rows that something else has changed there.
const TARGET: &str = "
    CREATE TABLE parent (id integer PRIMARY KEY); INSERT INTO parent VALUES (1);
    ALTER TABLE t ADD CONSTRAINT small CHECK (n < 100), ALTER COLUMN v SET NOT NULL,
      ADD CONSTRAINT apart EXCLUDE USING gist (r WITH &&),
      ADD CONSTRAINT known FOREIGN KEY (parent) REFERENCES parent,
      ALTER COLUMN amount TYPE smallint;
    DO $$ DECLARE name text; BEGIN
      FOR name IN SELECT tgname FROM pg_trigger WHERE tgrelid = 't'::regclass LOOP
        EXECUTE format('ALTER TABLE t ENABLE ALWAYS TRIGGER %I', name);
      END LOOP; END $$;
    DELETE FROM t WHERE id IN (1, 2, 10);
    INSERT INTO t VALUES (100, 'mine', 'mine', 1, 1, NULL, 1, 'b');
    UPDATE t SET code = 'taken' WHERE id = 4;
    UPDATE t SET r = '[15,16)' WHERE id = 8;
    UPDATE t SET r = '[35,36)' WHERE id = 11";

/// One conflict: what the publisher commits, and the record of it: operation, key, SQLSTATE, the
/// value of `v` in the old row, the new row and the target's row.
struct Case {
    publish: &'static str,
    record: &'static str,
    is_overwritten: bool,
}

const CASES: &[Case] = &[
    Case {
        // Whole, as the publisher sends it: the large value was changed.
        publish: "UPDATE t SET v = 'w', big = repeat('y', 5000) WHERE id = 1",
        record: "UPDATE {\"id\": 1} - - w -",
        is_overwritten: true,
    },
    Case {
        publish: "UPDATE t SET v = 'w' WHERE id = 10",
        record: "UPDATE {\"id\": 10} - - w -",
        is_overwritten: false,
    },
    Case {
        publish: "DELETE FROM t WHERE id = 2",
        record: "DELETE {\"id\": 2} - - - -",
        is_overwritten: false,
    },
    Case {
        publish: "INSERT INTO t VALUES (100, 'c100', 'theirs', 1, 1, NULL, 1, 'b')",
        record: "INSERT {\"id\": 100} 23505 - theirs mine",
        is_overwritten: true,
    },
    Case {
        publish: "UPDATE t SET code = 'taken', v = 'w' WHERE id = 3",
        record: "UPDATE {\"id\": 3} 23505 - w v",
        is_overwritten: true,
    },
    Case {
        publish: "UPDATE t SET n = 200 WHERE id = 5",
        record: "UPDATE {\"id\": 5} 23514 - v v",
        is_overwritten: false,
    },
    Case {
        publish: "UPDATE t SET v = NULL WHERE id = 6",
        record: "UPDATE {\"id\": 6} 23502 - - v",
        is_overwritten: false,
    },
    Case {
        publish: "INSERT INTO t VALUES (101, 'c101', 'v', 1, 999, NULL, 1, 'b')",
        record: "INSERT {\"id\": 101} 23503 - v -",
        is_overwritten: false,
    },
    Case {
        publish: "UPDATE t SET r = '[10,20)' WHERE id = 7",
        record: "UPDATE {\"id\": 7} 23P01 - v v",
        is_overwritten: false,
    },
    Case {
        publish: "INSERT INTO t VALUES (102, 'c102', 'theirs', 1, 1, '[30,40)', 1, 'b')",
        record: "INSERT {\"id\": 102} 23P01 - theirs v",
        is_overwritten: true,
    },
    Case {
        publish: "UPDATE t SET amount = 100000 WHERE id = 9",
        record: "UPDATE {\"id\": 9} 22003 - v v",
        is_overwritten: false,
    },
];

/// The pair with its first copy done and the target changed by something else.
fn pair(direction: Direction, policy: &str) -> Result<Pair> {
    let mut pair = Pair::new(direction, &["public.t", "public.fine"], SCHEMA)?;
    pair.site.add(policy)?;
    pair.publish(ROWS)?;
    pair.site.start()?;
    pair.await_arrival()?;
    pair.subscriber.execute_script(TARGET)?;
    Ok(pair)
}

/// Stops the site, and has it apply nothing in batches from its next start on, however busy the
/// machine is.
fn apply_row_by_row(pair: &mut Pair) -> Result<()> {
    pair.site.stop()?;
    pair.site.replace("batches = ", "batches = \"never\" # ")?;
    Ok(())
}

/// Commits every case by itself, each among changes that are fine, and waits for the last of them.
fn publish_all(pair: &mut Pair) -> Result<()> {
    for (n, case) in CASES.iter().enumerate() {
        pair.publish(&format!(
            "BEGIN; INSERT INTO fine VALUES ({n}); {}; UPDATE t SET amount = amount + 1 \
             WHERE id = 20; INSERT INTO fine VALUES ({}); COMMIT",
            case.publish,
            n + 1000,
        ))?;
    }
    pair.await_arrival()
}

fn records(pair: &Pair) -> Result<Vec<String>> {
    let query = "SELECT coalesce(string_agg(concat_ws(' ', operation, key, coalesce(sqlstate, '-'), \
          coalesce(old_row->>'v', '-'), coalesce(new_row->>'v', '-'), \
          coalesce(existing_row->>'v', '-'), action), E'\\n' ORDER BY id), '') \
        FROM farshore.conflicts WHERE subscription = 's' AND schema_name = 'public' \
          AND table_name = 't' AND source_lsn > '0/0' AND commit_time > now() - interval '1 hour'";
    Ok(pair.subscriber_says(query)?.lines().map(str::to_owned).collect())
}

/// What every fine change leaves behind.
fn assert_all_fine(pair: &Pair) -> Result<()> {
    let fine = pair.subscriber_says("SELECT count(*) FROM fine")?;
    ensure!(fine == (2 * CASES.len()).to_string(), "{fine} fine rows");
    let amount = pair.subscriber_says("SELECT amount FROM t WHERE id = 20")?;
    ensure!(amount == (20 + CASES.len()).to_string(), "amount {amount}");
    let status = pair.site.status()?;
    let conflicts = &status["subscriptions"][0]["conflicts"];
    ensure!(*conflicts == CASES.len(), "{conflicts} conflicts in the status");
    Ok(())
}

#[test]
fn skip_leaves_out_what_fails_and_nothing_else() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, "on_conflict = \"skip\"")?;
        let rows = "SELECT md5(string_agg(t::text, ',' ORDER BY id)) FROM t WHERE id <> 20";
        let before = pair.subscriber_says(rows)?;
        publish_all(&mut pair)?;
        let wanted: Vec<String> =
            CASES.iter().map(|case| format!("{} skipped", case.record)).collect();
        let said = records(&pair)?;
        ensure!(said == wanted, "{said:#?}");
        ensure!(pair.subscriber_says(rows)? == before, "a skipped change left something");
        assert_all_fine(&pair)
    })
}

#[test]
fn overwrite_makes_the_publishers_row_win_where_it_can() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, "on_conflict = \"overwrite\"")?;
        publish_all(&mut pair)?;
        let wanted: Vec<String> = CASES
            .iter()
            .map(|case| {
                let action = if case.is_overwritten { "overwritten" } else { "skipped" };
                format!("{} {action}", case.record)
            })
            .collect();
        let said = records(&pair)?;
        ensure!(said == wanted, "{said:#?}");
        let rows = "SELECT string_agg(concat_ws(' ', id, code, v), ',' ORDER BY id) FROM t \
            WHERE id < 12 OR id >= 100";
        let rows = pair.subscriber_says(rows)?;
        // 4 and 11 held what the publisher gave to 3 and 102.
        ensure!(
            rows == "1 c1 w,3 taken w,5 c5 v,6 c6 v,7 c7 v,8 c8 v,9 c9 v,100 c100 theirs,102 c102 theirs",
            "{rows}"
        );
        assert_all_fine(&pair)
    })
}

#[test]
fn stop_stops_before_the_transaction_and_names_everything() -> Result<()> {
    let mut pair =
        pair(Direction::UP, "[subscription.s.on_conflict_tables]\n\"public.u\" = \"skip\"")?;
    // A group: the failing row stands in the middle of the third of five transactions.
    let mut publisher = pair.publisher.connect()?;
    publisher.batch_execute("INSERT INTO fine VALUES (1)")?;
    publisher.batch_execute("INSERT INTO fine VALUES (2)")?;
    publisher.batch_execute(
        "BEGIN; INSERT INTO fine VALUES (3); UPDATE t SET n = 200 WHERE id = 5; \
         INSERT INTO fine VALUES (4); COMMIT",
    )?;
    publisher.batch_execute("INSERT INTO fine VALUES (5)")?;
    let line = pair.site.await_log(" stopped: ", SOON)?;
    for part in [
        "subscription \"s\": cannot apply UPDATE on public.t (key id=5) of the transaction that \
         committed at ",
        "+00): ERROR 23514: new row for relation \"t\" violates check constraint \"small\"",
        "Mend the target",
    ] {
        ensure!(line.contains(part), "{part} is not in {line}");
    }
    let fine = "SELECT string_agg(id::text, ',' ORDER BY id) FROM fine";
    ensure!(pair.subscriber_says(fine)? == "1,2");
    ensure!(records(&pair)?.is_empty());
    pair.subscriber.execute_script("ALTER TABLE t DROP CONSTRAINT small")?;
    pair.site.restart()?;
    pair.await_arrival()?;
    ensure!(pair.subscriber_says(fine)? == "1,2,3,4,5");
    ensure!(pair.subscriber_says("SELECT n FROM t WHERE id = 5")? == "200");
    Ok(())
}

/// Whether the target itself sees that a change has met no row, behind which its COMMIT was sent
/// already, or we do, depends on how many changes there are.
#[test]
fn a_change_that_meets_no_row_is_not_committed_however_large_its_transaction() -> Result<()> {
    let mut pair = pair(Direction::UP, "")?;
    apply_row_by_row(&mut pair)?;
    pair.site.start()?;
    let fine = "SELECT count(*) FROM fine";
    for (number, inserts) in [0, 1, 15, 16, 40, 600].into_iter().enumerate() {
        let (id, first) = (12 + number, number * 1_000);
        // To look at a table takes the answers to what was sent before: that is done here.
        pair.publish(&format!(
            "BEGIN; UPDATE t SET v = 'x' WHERE id = 11; INSERT INTO fine VALUES ({first} + 998); COMMIT"
        ))?;
        pair.await_arrival()?;
        let take = format!("DELETE FROM t WHERE id = {id} RETURNING n");
        ensure!(pair.subscriber_says(&take)? == id.to_string());
        let before = pair.subscriber_says(fine)?;
        pair.publish(&format!(
            "BEGIN; INSERT INTO fine SELECT {first} + i FROM generate_series(1, {inserts}) AS i; \
             UPDATE t SET v = 'w' WHERE id = {id}; INSERT INTO fine VALUES ({first}); COMMIT"
        ))?;
        pair.publish(&format!("INSERT INTO fine VALUES ({first} + 999)"))?;
        let line = pair.site.await_log(&format!("UPDATE on public.t (key id={id}) "), SOON)?;
        ensure!(line.contains("it met 0 rows instead of one"), "{line}");
        ensure!(pair.subscriber_says(fine)? == before, "something of {inserts} was committed");
        pair.subscriber.execute_script(&format!(
            "INSERT INTO t VALUES ({id}, 'c{id}', 'v', {id}, 1, int4range(1000 + {id}, \
             1001 + {id}), {id}, repeat('x', 5000))"
        ))?;
        pair.site.restart()?;
        pair.await_arrival()?;
        ensure!(pair.subscriber_says(&format!("SELECT v FROM t WHERE id = {id}"))? == "w");
    }
    Ok(())
}

/// A defect that sends the COMMIT before the answers have been looked at is one that the check above
/// finds.
#[test]
fn a_commit_that_does_not_wait_for_answers_is_caught() -> Result<()> {
    let mut pair = pair(Direction::UP, "")?;
    apply_row_by_row(&mut pair)?;
    pair.site.env("FARSHORE_DEFECT", "commit-unanswered");
    pair.subscriber.execute_script("DELETE FROM t WHERE id = 12")?;
    pair.site.start()?;
    // To look at a table takes the answers to what was sent before.
    pair.publish("BEGIN; UPDATE t SET v = 'w' WHERE id = 13; INSERT INTO fine VALUES (0); COMMIT")?;
    pair.await_arrival()?;
    pair.publish(
        "BEGIN; UPDATE t SET v = 'w' WHERE id = 12; \
         INSERT INTO fine SELECT generate_series(1, 40); COMMIT",
    )?;
    // It stops then, which is too late.
    farshore_testkit::wait::wait_until("rows of a transaction that missed one", SOON, &[], || {
        Ok((pair.subscriber_says("SELECT count(*) FROM fine")? == "41").then_some(()))
    })
}

/// Rules have no place in the statements with which the target sees how many rows it met.
#[test]
fn a_rule_that_fires_on_the_target_does_so_for_every_change() -> Result<()> {
    let mut pair = pair(Direction::UP, "")?;
    let rules = "CREATE TABLE seen (what text, id integer); \
        CREATE RULE inserted AS ON INSERT TO fine DO ALSO INSERT INTO seen VALUES ('in', NEW.id); \
        CREATE RULE updated AS ON UPDATE TO t DO ALSO INSERT INTO seen VALUES ('up', NEW.id); \
        ALTER TABLE fine ENABLE ALWAYS RULE inserted; ALTER TABLE t ENABLE ALWAYS RULE updated";
    pair.publish("INSERT INTO fine VALUES (1)")?;
    pair.publish("UPDATE t SET v = 'w' WHERE id = 12")?;
    pair.await_arrival()?;
    // The tables have been looked at before.
    pair.subscriber.execute_script(rules)?;
    for id in 2..5 {
        pair.publish(&format!("INSERT INTO fine VALUES ({id})"))?;
        pair.publish(&format!("UPDATE t SET v = 'w{id}' WHERE id = 12"))?;
    }
    pair.await_arrival()?;
    let seen = "SELECT string_agg(what || id, ',' ORDER BY what, id) FROM seen";
    let seen = pair.subscriber_says(seen)?;
    ensure!(seen == "in2,in3,in4,up12,up12,up12", "{seen}");
    Ok(())
}

#[test]
fn tables_have_policies_of_their_own() -> Result<()> {
    let policy =
        "on_conflict = \"overwrite\"\n[subscription.s.on_conflict_tables]\n\"public.t\" = \"skip\"";
    let mut pair = pair(Direction::DOWN, policy)?;
    pair.subscriber.execute_script("INSERT INTO fine VALUES (7)")?;
    pair.publish("INSERT INTO t VALUES (100, 'c100', 'theirs', 1, 1, NULL, 1, 'b')")?;
    pair.publish("INSERT INTO fine VALUES (7)")?;
    pair.await_arrival()?;
    let actions = "SELECT string_agg(table_name || ' ' || action, ',' ORDER BY id) \
        FROM farshore.conflicts";
    let actions = pair.subscriber_says(actions)?;
    ensure!(actions == "t skipped,fine overwritten", "{actions}");
    ensure!(pair.subscriber_says("SELECT v FROM t WHERE id = 100")? == "mine");
    Ok(())
}

#[test]
fn rows_fail_in_the_middle_of_a_large_streamed_transaction() -> Result<()> {
    both_ways(|direction| {
        let mut pair = pair(direction, "on_conflict = \"skip\"")?;
        pair.subscriber.execute_script(
            "INSERT INTO t (id, v) SELECT i, 'mine' FROM generate_series(5000, 5004) AS i; \
             INSERT INTO t (id, v) VALUES (30000, 'mine')",
        )?;
        pair.publish(
            "BEGIN; INSERT INTO t (id, v, big) SELECT i, 'theirs', repeat('x', 100) \
               FROM generate_series(1000, 40000) AS i; \
             SAVEPOINT a; INSERT INTO t (id, v) SELECT i, 'never' FROM generate_series(50000, 52000) AS i; \
             ROLLBACK TO a; UPDATE t SET v = 'w' WHERE id = 10; COMMIT",
        )?;
        pair.await_arrival()?;
        let said = records(&pair)?;
        let wanted: Vec<String> = [5000, 5001, 5002, 5003, 5004, 30000]
            .iter()
            .map(|id| format!("INSERT {{\"id\": {id}}} 23505 - theirs mine skipped"))
            .chain(["UPDATE {\"id\": 10} - - w - skipped".to_owned()])
            .collect();
        ensure!(said == wanted, "{said:#?}");
        let rows = "SELECT count(*) FILTER (WHERE v = 'theirs') || ' ' || \
            count(*) FILTER (WHERE v = 'never') FROM t WHERE id >= 1000";
        let rows = pair.subscriber_says(rows)?;
        ensure!(rows == "38995 0", "{rows}");
        Ok(())
    })
}

/// Where somebody has removed Farshore's notes, which hold no progress, it goes on with new ones.
#[test]
fn what_keeps_notes_is_made_again() -> Result<()> {
    let mut pair = pair(Direction::UP, "on_conflict = \"skip\"")?;
    pair.subscriber.execute_script("DROP TABLE farshore.conflicts, farshore.skip_request")?;
    pair.publish(CASES[2].publish)?;
    pair.await_arrival()?;
    let said = records(&pair)?;
    ensure!(said == [format!("{} skipped", CASES[2].record)], "{said:#?}");
    let left = pair.subscriber_says("SELECT count(*) FROM farshore.skip_request")?;
    ensure!(left == "0", "{left}");
    Ok(())
}

#[test]
fn a_conflict_is_recorded_once_whatever_kills_the_node() -> Result<()> {
    let mut pair = pair(Direction::UP, "on_conflict = \"skip\"")?;
    // Every commit below is of a transaction with a conflict, and there are enough of them.
    pair.site.stop()?;
    for (n, case) in CASES.iter().enumerate() {
        pair.publish(&format!("BEGIN; INSERT INTO fine VALUES ({n}); {}; COMMIT", case.publish))?;
    }
    for point in ["apply.before-commit", "apply.after-commit-sent", "apply.after-commit"] {
        for nth in 1..=2 {
            let crash = format!("{point}:{nth}");
            pair.site.env("FARSHORE_CRASH", &crash);
            pair.site.start()?;
            pair.site.await_kill(&crash, SOON)?;
        }
    }
    pair.site.env("FARSHORE_CRASH", "");
    pair.site.start()?;
    pair.await_arrival()?;
    let wanted: Vec<String> = CASES.iter().map(|case| format!("{} skipped", case.record)).collect();
    let said = records(&pair)?;
    ensure!(said == wanted, "{said:#?}");
    let fine = pair.subscriber_says("SELECT count(*) FROM fine")?;
    ensure!(fine == CASES.len().to_string(), "{fine}");
    Ok(())
}

/// Rows that are found by all of their old values: one that differs there and has the same primary
/// key is the one that the publisher's overwrites.
#[test]
fn rows_of_a_full_identity_are_overwritten_by_their_key() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both(
        "CREATE TABLE f (id integer PRIMARY KEY, v text, w integer); \
         ALTER TABLE f REPLICA IDENTITY FULL",
    )?;
    pair.publish("INSERT INTO f SELECT i, 'v', i FROM generate_series(1, 20) AS i")?;
    pair.add_publication("p", &["public.*"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.site.replace("batches = ", "on_conflict = \"overwrite\"\nbatches = ")?;
    pair.site.start()?;
    pair.assert_equal(&["public"])?;
    pair.subscriber.execute_script("UPDATE f SET w = 99 WHERE id IN (2, 3, 4, 5)")?;
    pair.publish("DELETE FROM f WHERE id = 2")?;
    pair.publish("UPDATE f SET id = 50 WHERE id = 3")?;
    pair.publish("BEGIN; UPDATE f SET id = 30 WHERE id = 4; UPDATE f SET v = 'w', w = 5 WHERE id = 5; COMMIT")?;
    pair.assert_equal(&["public"])?;
    let recorded = "SELECT string_agg(concat_ws(' ', action, existing_row ->> 'w'), ',' \
                    ORDER BY id) FROM farshore.conflicts";
    let said = pair.subscriber_says(recorded)?;
    ensure!(said == ["overwritten 99"; 4].join(","), "{said}");
    Ok(())
}

/// They would be gone without a word, and for good: the publisher deletes none.
#[test]
fn rows_that_refer_to_what_is_overwritten_do_not_go_with_it() -> Result<()> {
    for (effect, major) in [("CASCADE", 15), ("SET NULL", 18)] {
        let direction = Direction { publisher: 18, subscriber: major };
        let mut pair = Pair::bare(direction)?;
        pair.on_both(&format!(
            "CREATE TABLE customer (id integer PRIMARY KEY, mail text UNIQUE); \
             CREATE TABLE \"an Order\" (id integer PRIMARY KEY, \
               customer integer REFERENCES customer ON DELETE {effect})",
        ))?;
        // Its triggers fire whatever the role may set.
        pair.subscriber.execute_script(
            "DO $$ DECLARE name name; BEGIN \
               FOR name IN SELECT tgname FROM pg_trigger WHERE tgrelid = 'customer'::regclass LOOP \
                 EXECUTE format('ALTER TABLE customer ENABLE ALWAYS TRIGGER %I', name); \
               END LOOP; END $$",
        )?;
        pair.publish(
            "INSERT INTO customer SELECT i, 'c' || i FROM generate_series(1, 4) AS i; \
             INSERT INTO \"an Order\" VALUES (1, 1), (2, 1)",
        )?;
        pair.add_publication("p", &["public.*"], "")?;
        let target = pair.subscriber.url("postgres");
        pair.add_subscription("s", "p", &target)?;
        pair.site.replace("batches = ", "on_conflict = \"overwrite\"\nbatches = ")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        // One has orders, the other has none.
        pair.subscriber
            .execute_script("UPDATE customer SET mail = 'new' || id WHERE id IN (1, 2)")?;
        pair.publish("UPDATE customer SET mail = 'new1' WHERE id = 3")?;
        pair.publish("UPDATE customer SET mail = 'new2' WHERE id = 4")?;
        pair.await_arrival()?;
        let recorded = "SELECT string_agg(action || ' ' || (key ->> 'id') || \
            CASE WHEN reason LIKE '%\"an Order\"% refer to %' THEN ' referred to' ELSE '' END, ',' \
            ORDER BY id) FROM farshore.conflicts";
        let said = pair.subscriber_says(recorded)?;
        ensure!(said == "skipped 3 referred to,overwritten 4", "{effect}: {said}");
        let rows = "SELECT string_agg(id || mail, ',' ORDER BY id) || ' ' || \
            (SELECT count(customer) FROM \"an Order\") FROM customer";
        let rows = pair.subscriber_says(rows)?;
        ensure!(rows == "1new1,3c3,4new2 2", "{effect}: {rows}");
    }
    Ok(())
}

/// A constraint of another table, which a trigger on the target writes to, says nothing of the rows of
/// the table itself.
#[test]
fn a_row_that_a_trigger_cannot_write_overwrites_nothing() -> Result<()> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.on_both("CREATE TABLE orders (id integer PRIMARY KEY, customer integer)")?;
    pair.subscriber.execute_script(
        "CREATE TABLE stats (customer integer PRIMARY KEY); \
         CREATE FUNCTION counts() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
           IF TG_OP = 'DELETE' THEN DELETE FROM public.stats WHERE customer = OLD.customer; \
           ELSE INSERT INTO public.stats VALUES (NEW.customer); END IF; \
           RETURN NULL; END $$; \
         CREATE TRIGGER counts AFTER INSERT OR DELETE ON orders FOR EACH ROW \
           EXECUTE FUNCTION counts(); \
         ALTER TABLE orders ENABLE ALWAYS TRIGGER counts",
    )?;
    pair.add_publication("p", &["public.orders"], "")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.site.replace("batches = ", "on_conflict = \"overwrite\"\nbatches = ")?;
    pair.site.start()?;
    pair.await_arrival()?;
    pair.publish("INSERT INTO orders VALUES (1, 5)")?;
    pair.await_arrival()?;
    pair.publish("INSERT INTO orders VALUES (2, 5)")?;
    pair.await_arrival()?;
    let there = pair.subscriber_says("SELECT string_agg(id::text, ',' ORDER BY id) FROM orders")?;
    ensure!(there == "1", "{there}");
    let recorded = "SELECT action || ' ' || (existing_row IS NULL)::text FROM farshore.conflicts";
    let recorded = pair.subscriber_says(recorded)?;
    ensure!(recorded == "skipped true", "{recorded}");
    Ok(())
}

/// Columns that no UPDATE may set, a key of another type on the target, and a partition whose unique
/// index the others have not got.
#[test]
fn rows_are_overwritten_whatever_statement_it_takes() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.on_both(
            "CREATE TABLE i (code text PRIMARY KEY, n integer GENERATED ALWAYS AS IDENTITY, \
               u integer UNIQUE); \
             CREATE TABLE f (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text, w integer); \
             ALTER TABLE f REPLICA IDENTITY FULL; \
             CREATE TABLE p (id integer, part integer, code text, PRIMARY KEY (id, part)) \
               PARTITION BY LIST (part); \
             CREATE TABLE p1 PARTITION OF p FOR VALUES IN (1); \
             CREATE TABLE p2 PARTITION OF p FOR VALUES IN (2)",
        )?;
        pair.publish("CREATE TABLE x (id integer PRIMARY KEY, v text)")?;
        pair.subscriber.execute_script(
            "CREATE TABLE x (id text PRIMARY KEY, v text); CREATE UNIQUE INDEX ON p1 (code)",
        )?;
        pair.publish(
            "INSERT INTO i (code, u) SELECT 'c' || k, k FROM generate_series(1, 3) AS k; \
             INSERT INTO f (v, w) SELECT 'v', k FROM generate_series(1, 3) AS k; \
             INSERT INTO p VALUES (20, 2, 'taken')",
        )?;
        let tables = ["public.i", "public.f", "public.p", "public.x"];
        pair.add_publication("p", &tables, "publish_via_partition_root = true")?;
        let target = pair.subscriber.url("postgres");
        pair.add_subscription("s", "p", &target)?;
        pair.site.replace("batches = ", "on_conflict = \"overwrite\"\nbatches = ")?;
        pair.site.start()?;
        pair.await_arrival()?;
        pair.subscriber.execute_script(
            "UPDATE i SET u = 99 WHERE code = 'c2'; UPDATE f SET w = 99 WHERE id = 2; \
             INSERT INTO p VALUES (10, 1, 'taken'); INSERT INTO x VALUES ('7', 'mine')",
        )?;
        for change in [
            "UPDATE i SET u = 99 WHERE code = 'c1'",
            "UPDATE f SET v = 'w' WHERE id = 2",
            "INSERT INTO p VALUES (11, 1, 'taken')",
            "INSERT INTO x VALUES (7, 'theirs')",
        ] {
            pair.publish(change)?;
        }
        pair.await_arrival()?;
        let recorded = "SELECT string_agg(table_name || ' ' || action, ',' ORDER BY id) \
                        FROM farshore.conflicts";
        let said = pair.subscriber_says(recorded)?;
        ensure!(said == "i overwritten,f overwritten,p overwritten,x overwritten", "{said}");
        for (rows, wanted) in [
            ("concat_ws(' ', code, n, u), ',' ORDER BY code) FROM i", "c1 1 99,c3 3 3"),
            ("concat_ws(' ', id, v, w), ',' ORDER BY id) FROM f", "1 v 1,2 w 2,3 v 3"),
            ("concat_ws(' ', id, code), ',' ORDER BY id) FROM p", "11 taken,20 taken"),
            ("concat_ws(' ', id, v), ',' ORDER BY id) FROM x", "7 theirs"),
        ] {
            let said = pair.subscriber_says(&format!("SELECT string_agg({rows}"))?;
            ensure!(said == wanted, "{said} instead of {wanted}");
        }
        Ok(())
    })
}

/// Through a root with a full identity come changes of partitions that have not got it: PostgreSQL
/// does not hand it down.
const ROOT: &str = "CREATE TABLE r (id integer, part integer, v text, PRIMARY KEY (id, part)) \
     PARTITION BY LIST (part); \
     CREATE TABLE r1 PARTITION OF r FOR VALUES IN (1); \
     CREATE TABLE r2 PARTITION OF r FOR VALUES IN (2); \
     ALTER TABLE r REPLICA IDENTITY FULL; ALTER TABLE r2 REPLICA IDENTITY FULL";

fn through_the_root(policy: &str, on_target: &str) -> Result<Pair> {
    let mut pair = Pair::bare(Direction::UP)?;
    pair.publish(ROOT)?;
    pair.publish("INSERT INTO r SELECT i, 1 + i % 2, 'v' FROM generate_series(1, 20) AS i")?;
    pair.subscriber.execute_script(on_target)?;
    pair.add_publication("p", &["public.r"], "publish_via_partition_root = true")?;
    let target = pair.subscriber.url("postgres");
    pair.add_subscription("s", "p", &target)?;
    pair.site.replace("batches = ", &format!("on_conflict = \"{policy}\"\nbatches = "))?;
    pair.site.start()?;
    pair.await_arrival()?;
    Ok(pair)
}

fn rows_of_the_root_are_equal(pair: &Pair) -> Result<()> {
    let rows = "SELECT string_agg(concat_ws(' ', id, part, v), ',' ORDER BY id) FROM r";
    let (there, here) = (pair.publisher_says(rows)?, pair.subscriber_says(rows)?);
    ensure!(there == here, "{there} and {here}");
    Ok(())
}

#[test]
fn partitions_without_their_roots_full_identity_are_found_by_the_key_or_named() -> Result<()> {
    let mut pair = through_the_root("stop", ROOT)?;
    let said = pair.site.verb("check", &["--json"])?.stdout;
    let wanted = "ALTER TABLE public.r1 REPLICA IDENTITY FULL";
    ensure!(said.contains(wanted) && !said.contains("public.r2"), "{said}");
    pair.publish("UPDATE r SET v = 'w' WHERE id % 4 < 2; UPDATE r SET v = v WHERE id = 2")?;
    pair.await_arrival()?;
    rows_of_the_root_are_equal(&pair)?;
    // Of a DELETE the key alone has come.
    pair.publish("DELETE FROM r WHERE id = 2")?;
    let (state, error) = pair.site.await_trouble("s", "REPLICA IDENTITY FULL on each such")?;
    ensure!(state == "stopped" && error.contains("DELETE on public.r"), "{state}: {error}");
    pair.site.stop().map(drop)
}

#[test]
fn nothing_is_overwritten_with_nothing_where_the_old_row_did_not_come() -> Result<()> {
    let mut pair = through_the_root("overwrite", ROOT)?;
    pair.subscriber.execute_script("DELETE FROM r WHERE id = 4")?;
    pair.publish(
        "UPDATE r SET v = 'w' WHERE id IN (2, 4); UPDATE r SET id = 100 WHERE id = 6; \
         DELETE FROM r WHERE id = 8; UPDATE r SET part = 2 WHERE id = 10",
    )?;
    pair.await_arrival()?;
    rows_of_the_root_are_equal(&pair)?;
    pair.site.stop()?;
    // Without a key on the target there is nothing to find the row by, whatever the policy.
    for policy in ["overwrite", "skip"] {
        let mut pair =
            through_the_root(policy, "CREATE TABLE r (id integer, part integer, v text)")?;
        pair.publish("UPDATE r SET v = 'w' WHERE id = 2")?;
        let (state, error) = pair.site.await_trouble("s", "without the old row")?;
        ensure!(state == "stopped" && error.contains("UPDATE of public.r"), "{state}: {error}");
        let recorded = pair.subscriber_says("SELECT count(*) FROM farshore.conflicts")?;
        ensure!(recorded == "0", "{recorded}");
        pair.site.stop()?;
    }
    Ok(())
}

/// Values that are equal and have other bytes are no conflict.
#[test]
fn equal_rows_of_a_full_identity_are_found_whatever_their_bytes() -> Result<()> {
    for batches in ["never", "always"] {
        let mut pair = Pair::bare(Direction::UP)?;
        pair.on_both(
            "CREATE TYPE co AS (n integer, t text); CREATE TABLE f (id integer PRIMARY KEY, \
             x float8, c co, v text); ALTER TABLE f REPLICA IDENTITY FULL; \
             CREATE TABLE named (id integer PRIMARY KEY, r regclass)",
        )?;
        pair.publish(
            "INSERT INTO f SELECT i, -'NaN'::float8, ROW(i, 't')::co, 'v' \
             FROM generate_series(1, 20) AS i",
        )?;
        pair.add_publication("p", &["public.*"], "")?;
        let target = pair.subscriber.url("postgres");
        pair.add_subscription("s", "p", &target)?;
        let before = pair.site.replace("batches = \"auto\"", &format!("batches = \"{batches}\""));
        if before.is_err() {
            println!("skipped: FARSHORE_BATCHES says how changes are applied");
            return Ok(());
        }
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.on_both("ALTER TYPE co ADD ATTRIBUTE z integer")?;
        pair.publish("UPDATE f SET v = 'w' WHERE id IN (2, 3)")?;
        pair.publish("DELETE FROM f WHERE id = 4; UPDATE f SET id = 100 WHERE id = 5")?;
        pair.assert_equal(&["public"])?;
        let recorded = pair.subscriber_says("SELECT count(*) FROM farshore.conflicts")?;
        ensure!(recorded == "0", "{recorded}");
        // What is not equal is one, and is said to be.
        pair.subscriber.execute_script("UPDATE f SET v = 'other' WHERE id = 6")?;
        pair.publish("UPDATE f SET v = 'w' WHERE id = 6")?;
        let (state, error) = pair.site.await_trouble("s", "in all columns what this one was")?;
        ensure!(state == "stopped", "{state}: {error}");
        pair.site.stop()?;
    }
    Ok(())
}
