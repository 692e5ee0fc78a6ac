//! Servers that are reached by Unix socket, as Debian's are by whoever is on the same machine.

use anyhow::Result;
use farshore_testkit::postgres::Cluster;
use farshore_tests::{Pair, both_ways};

const SCHEMA: &str = "
    CREATE TABLE t (id bigint PRIMARY KEY, v text);
    CREATE PROCEDURE commit_some(first bigint, last bigint) LANGUAGE plpgsql AS $$
    BEGIN
      FOR step IN first..last LOOP
        INSERT INTO t SELECT step * 100 + i, repeat(md5((step * i)::text), 30)
          FROM generate_series(1, 50) AS i;
        UPDATE t SET v = 'changed' WHERE id = step * 100 - 99;
        COMMIT;
      END LOOP;
    END $$;";

fn by_socket(cluster: &Cluster) -> (String, u16) {
    (cluster.socket_dir().display().to_string(), cluster.port())
}

/// The copy, a flood of messages that is left to gather, a backlog by SQL function, and a server
/// that restarts.
#[test]
fn everything_goes_by_unix_sockets() -> Result<()> {
    both_ways(|direction| {
        let mut pair = Pair::new(direction, &["public.t"], SCHEMA)?;
        let (directory, port) = by_socket(&pair.publisher);
        let url = format!("postgres://postgres@{}:{port}/postgres", directory.replace('/', "%2F"));
        pair.site.replace(&pair.publisher.url("postgres"), &url)?;
        let (directory, port) = by_socket(&pair.subscriber);
        let keywords = format!("host={directory} port={port} user=postgres dbname=postgres");
        pair.site.replace(&pair.subscriber.url("postgres"), &keywords)?;
        pair.publish("CALL commit_some(1, 10)")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publish("CALL commit_some(11, 800)")?;
        pair.assert_equal(&["public"])?;
        pair.site.stop()?;
        pair.publish("CALL commit_some(801, 1000)")?;
        pair.site.start()?;
        pair.assert_equal(&["public"])?;
        pair.publisher.restart()?;
        pair.publish("CALL commit_some(1001, 1010)")?;
        pair.assert_equal(&["public"])
    })
}
