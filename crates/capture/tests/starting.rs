//! How capture begins where somebody has a table for himself.

use farshore_capture::publication::{PublicationSpec, TablePattern};
use farshore_capture::{Capture, CaptureStatus};
use farshore_pg::{Config, Connection, Mode};
use farshore_store::segmented::{Options, SegmentedStore};
use farshore_testkit::postgres::{Cluster, Installation};
use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio::sync::watch;

/// What takes no time once it may go on.
const SOON: Duration = Duration::from_secs(30);

const TABLES: &str = "CREATE TABLE t (i integer PRIMARY KEY)";
const LOCKED: &str = "BEGIN; LOCK TABLE t IN ACCESS EXCLUSIVE MODE";
const QUEUED: &str = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted";
const NONE_QUEUED: &str = "SELECT count(*) = 0 FROM pg_locks WHERE NOT granted";

fn cluster(major: u32) -> (Cluster, PublicationSpec) {
    let installation = Installation::find(major).unwrap();
    let cluster = Cluster::builder(&installation).setting("wal_level", "logical").start().unwrap();
    cluster.execute_script(TABLES).unwrap();
    let spec = PublicationSpec {
        name: "p".to_owned(),
        source: Config::parse(&cluster.url("postgres")).unwrap(),
        tables: vec![TablePattern::parse("public.*").unwrap()],
        articles: BTreeMap::new(),
        via_partition_root: false,
        adopt_publication: None,
        adopt_slot: None,
    };
    (cluster, spec)
}

fn capture(spec: &PublicationSpec, folder: &tempfile::TempDir) -> Capture {
    let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
    Capture {
        spec: spec.clone(),
        store,
        status: Arc::new(Mutex::new(CaptureStatus::default())),
        ready: watch::Sender::new(0),
        text_only: AtomicBool::new(false),
        stream_only: AtomicBool::new(false),
        awaited: watch::Sender::default(),
    }
}

async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, work).await.unwrap_or_else(|_| panic!("{what}: not in time"))
}

/// Until this is true on the server.
async fn await_true(sql: &mut Connection, question: &str) {
    let seen = async { while sql.query(question, &[]).await.unwrap()[0].get(0) != Some("t") {} };
    in_time(question, seen).await;
}

/// Until the status is so.
async fn await_status(capture: &Capture, is_so: impl Fn(&CaptureStatus) -> bool) {
    let seen = async {
        while !is_so(&capture.status.lock().unwrap()) {
            tokio::task::yield_now().await;
        }
    };
    in_time("the status", seen).await;
}

#[test]
fn a_table_that_is_locked_when_the_publication_is_made_is_waited_for_without_blocking_others() {
    for major in [15, 18] {
        let (_cluster, spec) = cluster(major);
        Runtime::new().unwrap().block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let capture = capture(&spec, &folder);
            let mut holder = spec.connect(Mode::Sql).await.unwrap();
            let mut sql = spec.connect(Mode::Sql).await.unwrap();
            holder.simple_query(LOCKED).await.unwrap();
            let (stop, stopped) = watch::channel(false);
            let watches = async {
                await_true(&mut sql, QUEUED).await;
                // It leaves the queue, and says why it waits.
                await_true(&mut sql, NONE_QUEUED).await;
                await_status(&capture, |status| {
                    status.waits_for.as_ref().is_some_and(|why| why.contains("lock timeout"))
                })
                .await;
                stop.send_replace(true);
            };
            let stopping = async {
                let (ended, ()) = tokio::join!(capture.run(None, stopped.clone()), watches);
                ended
            };
            in_time("a stop", stopping).await.unwrap();
            stop.send_replace(false);
            let streams = async {
                holder.simple_query("COMMIT").await.unwrap();
                capture.ready.subscribe().wait_for(|ready| *ready > 0).await.unwrap();
                assert_eq!(capture.status.lock().unwrap().waits_for, None);
                stop.send_replace(true);
            };
            let streaming = async { tokio::join!(capture.run(None, stopped), streams).0 };
            in_time("streaming", streaming).await.unwrap();
        });
    }
}

#[test]
fn a_table_that_is_locked_when_it_joins_holds_up_no_others_at_start() {
    for major in [15, 18] {
        let (_cluster, spec) = cluster(major);
        Runtime::new().unwrap().block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let capture = capture(&spec, &folder);
            let mut holder = spec.connect(Mode::Sql).await.unwrap();
            let mut sql = spec.connect(Mode::Sql).await.unwrap();
            // The slot is there: its creation would wait for the holder's transaction.
            let (stop, stopped) = watch::channel(false);
            let begins = async {
                capture.ready.subscribe().wait_for(|ready| *ready > 0).await.unwrap();
                stop.send_replace(true);
            };
            let run = async { tokio::join!(capture.run(None, stopped.clone()), begins).0 };
            in_time("the first start", run).await.unwrap();
            let joins = "CREATE TABLE joins (i integer PRIMARY KEY)";
            sql.simple_query(joins).await.unwrap();
            let locked = "BEGIN; LOCK TABLE joins IN ACCESS EXCLUSIVE MODE";
            holder.simple_query(locked).await.unwrap();
            stop.send_replace(false);
            let watches = async {
                capture.ready.subscribe().wait_for(|ready| *ready > 1).await.unwrap();
                await_status(&capture, |status| {
                    let told = status.tables_stay.as_deref().unwrap_or_default();
                    told.contains("public.joins") && told.contains("lock timeout")
                })
                .await;
                holder.simple_query("COMMIT").await.unwrap();
                let joined = "SELECT count(*) = 2 FROM pg_publication_rel";
                await_true(&mut sql, joined).await;
                await_status(&capture, |status| status.tables_stay.is_none()).await;
                stop.send_replace(true);
            };
            let run = async { tokio::join!(capture.run(None, stopped), watches).0 };
            tokio::time::timeout(SOON * 4, run).await.expect("it waits for the table").unwrap();
        });
    }
}
