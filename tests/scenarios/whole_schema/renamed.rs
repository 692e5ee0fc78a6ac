//! A table that is renamed under a wildcard joins by its new name, while the target has it by the old
//! one, with all the names that belong to it.

use anyhow::{Context, Result, ensure};
use farshore_tests::{DATABASE, Pair, both_ways};

#[test]
fn a_renamed_table_says_which_names_are_in_its_way() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(
            "CREATE TABLE t (id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text); \
             CREATE INDEX by_v ON t (v); \
             INSERT INTO t (v) SELECT 'v' || i FROM generate_series(1, 100) i",
        )?;
        pair.add_publication("p", &["public.*"], "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("ALTER TABLE t RENAME TO u; INSERT INTO u (v) VALUES ('after')")?;
        let (state, said) = pair.site.await_trouble("s", "renamed public.t to public.u")?;
        ensure!(state == "stopped" && said.contains("DROP TABLE public.t"), "{state}: {said}");
        // What it says is enough.
        let rename = said.split_once("to keep it: ").and_then(|(_, rest)| rest.split_once(". Do"));
        let (rename, _) = rename.with_context(|| said.clone())?;
        pair.site.stop()?;
        pair.subscriber.execute_script(rename)?;
        pair.site.start()?;
        pair.publish("INSERT INTO u (v) VALUES ('last')")?;
        pair.await_arrival()?;
        let rows = "SELECT string_agg(u::text, ' ' ORDER BY id) FROM u";
        ensure!(pair.publisher_says(rows)? == pair.subscriber_says(rows)?);
        ensure!(pair.subscriber_says("SELECT count(*) FROM t")? == "100");
        let names = "SELECT pg_get_serial_sequence('u', 'id') || ' ' || string_agg(i, ' ' \
             ORDER BY i) FROM (SELECT indexrelid::regclass::text FROM pg_index \
             WHERE indrelid = 'u'::regclass) AS x (i)";
        let names = pair.subscriber_says(names)?;
        ensure!(names == "public.t_id_seq by_v u_pkey", "{names}");
        Ok(())
    })
}

/// Nothing is in the way but the name of its key's index: that is another one then.
#[test]
fn a_renamed_table_with_a_key_joins_while_the_rest_streams() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::bare(direction)?;
        pair.publish(
            "CREATE TABLE t (id integer PRIMARY KEY, v text); \
             INSERT INTO t SELECT i, 'v' FROM generate_series(1, 100) i; \
             CREATE TABLE root (id integer PRIMARY KEY) PARTITION BY RANGE (id); \
             CREATE TABLE leaf PARTITION OF root FOR VALUES FROM (0) TO (1000); \
             INSERT INTO root SELECT i FROM generate_series(1, 100) i",
        )?;
        pair.add_publication("p", &["public.*"], "")?;
        let target = pair.subscriber.url(DATABASE);
        pair.add_subscription("s", "p", &target)?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("ALTER TABLE t RENAME TO u; INSERT INTO u VALUES (101, 'after')")?;
        pair.await_copy("u")?;
        pair.publish("UPDATE u SET v = 'w' WHERE id < 10; DELETE FROM root WHERE id > 90")?;
        pair.await_arrival()?;
        let rows = "SELECT string_agg(u::text, ' ' ORDER BY id) FROM u";
        ensure!(pair.publisher_says(rows)? == pair.subscriber_says(rows)?);
        let key = "SELECT string_agg(indexrelid::regclass::text, ' ') FROM pg_index \
             WHERE indrelid = 'u'::regclass AND indisprimary";
        let key = pair.subscriber_says(key)?;
        ensure!(key == "u_pkey", "{key}");
        Ok(())
    })
}
