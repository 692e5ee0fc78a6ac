//! A `farshore` schema that an earlier version made, on a target where somebody reads its tables.

use farshore_apply::postgres::session::Session;
use farshore_pg::{Config, Connection, Mode};
use farshore_testkit::postgres::{Cluster, Installation};
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;

async fn has(session: &mut Session, table: &str, column: &str) -> bool {
    let sql = "SELECT FROM pg_catalog.pg_attribute \
        WHERE attrelid = pg_catalog.to_regclass($1) AND attname = $2 AND NOT attisdropped";
    !session.query(sql, &[Some(table), Some(column)]).await.unwrap().is_empty()
}

#[test]
fn what_is_added_to_the_schema_does_not_wait_for_who_reads_it() {
    let installation = Installation::find(18).unwrap();
    let cluster = Cluster::builder(&installation).start().unwrap();
    let target = Config::parse(&cluster.url("postgres")).unwrap();
    Runtime::new().unwrap().block_on(async {
        let mut session = Session::connect(&target, "farshore test").await.unwrap();
        session.ensure_schema().await.unwrap();
        assert!(has(&mut session, "farshore.subscription", "newest").await);
        assert!(has(&mut session, "farshore.table_copy", "attached").await);
        session
            .simple(
                "ALTER TABLE farshore.table_copy DROP COLUMN target_columns, \
                 DROP COLUMN enum_labels, DROP COLUMN column_numbers, \
                 DROP COLUMN own_types, \
                 DROP COLUMN attached, DROP COLUMN noted_in",
            )
            .await
            .unwrap();

        // As pg_dump holds its tables.
        let mut reader = Connection::connect(&target, Mode::Sql).await.unwrap();
        let reads = "BEGIN; LOCK TABLE farshore.subscription, farshore.table_copy \
                     IN ACCESS SHARE MODE";
        reader.simple_query(reads).await.unwrap();
        let since = Instant::now();
        let opened = session.open_subscription("s", Duration::from_secs(5)).await.unwrap();
        assert!(opened.progress.is_none() && opened.tables.is_empty());
        assert!(since.elapsed() < Duration::from_secs(60), "{:?}", since.elapsed());
        assert!(!has(&mut session, "farshore.table_copy", "attached").await);

        // What lacks nothing is not waited for.
        reader.simple_query("COMMIT").await.unwrap();
        reader
            .simple_query("BEGIN; LOCK TABLE farshore.subscription IN ACCESS SHARE MODE")
            .await
            .unwrap();
        session.ensure_schema().await.unwrap();
        for column in [
            "target_columns",
            "enum_labels",
            "column_numbers",
            "attached",
            "own_types",
            "noted_in",
            "columns_left",
            "target_oid",
            "definition",
        ] {
            assert!(has(&mut session, "farshore.table_copy", column).await, "{column}");
        }
        session.connection.close().await;
        reader.close().await;
    });
}
