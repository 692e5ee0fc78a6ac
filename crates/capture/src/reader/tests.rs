use super::*;
use farshore_pg::Config;
use farshore_store::segmented::{Options, SegmentedStore};
use farshore_testkit::postgres::{Cluster, Installation};
use std::collections::BTreeMap;
use tokio::runtime::Runtime;

/// Log that a slot does not keep where the server is told to keep the least.
const MUCH_LOG: &str = "CREATE TABLE filler (v text); INSERT INTO filler SELECT repeat('x', 1000) \
    FROM generate_series(1, 3000); SELECT pg_switch_wal(); INSERT INTO filler VALUES ('more')";

fn capture(cluster: &Cluster, folder: &tempfile::TempDir) -> Capture {
    let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
    Capture {
        spec: PublicationSpec {
            name: "p".to_owned(),
            source: Config::parse(&cluster.url("postgres")).unwrap(),
            tables: Vec::new(),
            articles: BTreeMap::new(),
            via_partition_root: false,
            adopt_publication: None,
            adopt_slot: None,
        },
        store,
        status: Arc::new(Mutex::new(CaptureStatus::default())),
        ready: watch::Sender::new(0),
        text_only: AtomicBool::new(false),
        stream_only: AtomicBool::new(false),
        awaited: watch::Sender::new(Lsn::ZERO),
    }
}

/// Why no stream begins.
async fn refusal(capture: &Capture) -> CaptureError {
    let spec = &capture.spec;
    let mut sql = spec.connect(Mode::Sql).await.unwrap();
    let server = slot::Server::ask(spec, &mut sql).await.unwrap();
    let watch = alterations::Watch::new(capture.store.clone());
    let attendant = Attendant::start(spec.clone(), (sql, server.clone()), Lsn(1), watch);
    let options = [("proto_version", "2".to_owned()), ("publication_names", "p".to_owned())];
    match capture.start_stream(&attendant, Lsn(1), &options, &server).await {
        Ok(_) => panic!("it streams"),
        Err(error) => error,
    }
}

#[test]
fn a_slot_that_was_dropped_or_lost_meanwhile_is_said_to_be_as_at_the_start() {
    for major in [15, 18] {
        let installation = Installation::find(major).unwrap();
        let cluster = Cluster::builder(&installation)
            .setting("wal_level", "logical")
            .setting("max_slot_wal_keep_size", "1MB")
            .setting("max_wal_size", "32MB")
            .start()
            .unwrap();
        Runtime::new().unwrap().block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let capture = capture(&cluster, &folder);
            let gone = refusal(&capture).await;
            assert!(matches!(gone, CaptureError::Gap(_)), "{gone}");
            assert!(gone.to_string().contains("slot \"farshore_p\" is gone from"), "{gone}");

            let mut sql = capture.spec.connect(Mode::Sql).await.unwrap();
            let made = "SELECT pg_create_logical_replication_slot('farshore_p', 'pgoutput')";
            sql.simple_query(made).await.unwrap();
            for statement in MUCH_LOG.split("; ").chain(["CHECKPOINT"]) {
                sql.simple_query(statement).await.unwrap();
            }
            let lost = refusal(&capture).await;
            assert!(matches!(lost, CaptureError::Gap(_)), "{lost}");
            assert!(
                lost.to_string().contains("was invalidated: the publisher has removed log"),
                "{lost}"
            );
        });
    }
}
