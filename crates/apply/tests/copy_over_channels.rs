//! An initial copy whose publisher is behind channels, as at a far site.

use bytes::Bytes;
use farshore_apply::postgres::initial_copy::{CopySettings, InitialCopy, Which};
use farshore_apply::postgres::schema::SchemaSettings;
use farshore_apply::postgres::session::Session;
use farshore_apply::{LogPoints, SubscriptionStatus};
use farshore_capture::publication::{Article, PublicationSpec, TableName, TablePattern};
use farshore_capture::source::{
    Channel, ChannelError, Direct, Opener, Registry, Remote, Source, serve,
};
use farshore_model::{Lsn, PgTime};
use farshore_pg::{Config, Connection, Mode};
use farshore_store::segmented::{Options, SegmentedStore};
use farshore_store::{Batch, BoxFuture, EntryKind, EntryMeta, LogStore};
use farshore_testkit::postgres::{Cluster, Installation};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, watch};

const NAME: &str = "far";

struct Pipe {
    to: mpsc::Sender<Bytes>,
    from: mpsc::Receiver<Bytes>,
}

impl Channel for Pipe {
    fn send(&mut self, message: Bytes) -> BoxFuture<'_, Result<(), ChannelError>> {
        Box::pin(async move {
            let sent = self.to.send(message).await;
            sent.map_err(|_| ChannelError::away("nobody is at the other end"))
        })
    }

    fn next(&mut self) -> BoxFuture<'_, Result<Option<Bytes>, ChannelError>> {
        Box::pin(async move { Ok(self.from.recv().await) })
    }
}

/// The way to the site that has the publisher; it leads there so many times.
struct Way {
    direct: Direct,
    snapshots: Arc<Registry>,
    stop: watch::Sender<bool>,
    left: AtomicUsize,
}

impl Opener for Way {
    fn open(&self) -> BoxFuture<'_, Result<Box<dyn Channel>, ChannelError>> {
        Box::pin(async move {
            let less = |left: usize| left.checked_sub(1);
            if self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_err() {
                return Err(ChannelError::away("no way there"));
            }
            let (to, far_from) = mpsc::channel(2);
            let (far_to, from) = mpsc::channel(2);
            let mut far = Pipe { to: far_to, from: far_from };
            let (direct, snapshots) = (self.direct.clone(), self.snapshots.clone());
            let stop = self.stop.subscribe();
            tokio::spawn(async move { serve(&direct, &snapshots, &mut far, stop).await });
            Ok(Box::new(Pipe { to, from }) as Box<dyn Channel>)
        })
    }
}

fn way(spec: &PublicationSpec, times: usize) -> Remote {
    let (stop, _) = watch::channel(false);
    let (direct, snapshots) = (Direct::new(spec.clone()), Arc::default());
    let left = AtomicUsize::new(times);
    Remote::new("hq", Arc::new(Way { direct, snapshots, stop, left }))
}

const SETUP: &str = "
CREATE TYPE mood AS ENUM ('fine', 'not so');
CREATE TABLE orders (id bigint PRIMARY KEY, mood mood DEFAULT 'fine', note text, amount int);
INSERT INTO orders SELECT i, 'not so', repeat(md5(i::text), i % 9), i
  FROM generate_series(1, 30000) i;
CREATE TABLE lines (id serial PRIMARY KEY, of_order bigint REFERENCES orders, body bytea);
INSERT INTO lines (of_order, body) SELECT i, decode(md5(i::text), 'hex')
  FROM generate_series(1, 500) i;
CREATE INDEX ON lines (of_order);
CREATE DATABASE target;
";

async fn value(config: &Config, sql: &str) -> String {
    let mut connection = Connection::connect(config, Mode::Sql).await.unwrap();
    let rows = connection.query(sql, &[]).await.unwrap();
    rows.first().and_then(|row| row.get(0)).unwrap_or_default().to_owned()
}

/// A publisher with these tables in database `postgres`, and a `target` beside it.
fn cluster(setup: &str) -> (Cluster, PublicationSpec, Config) {
    let installation = Installation::find(18).unwrap();
    let builder = Cluster::builder(&installation).setting("wal_level", "logical");
    let cluster = builder.start().unwrap();
    for statement in setup.split(";\n") {
        cluster.execute_script(statement).unwrap();
    }
    let config = |database: &str| Config::parse(&cluster.url(database)).unwrap();
    let (publisher, target) = (config("postgres"), config("target"));
    let spec = PublicationSpec {
        name: "shop".into(),
        source: publisher,
        tables: vec![TablePattern::parse("public.*").unwrap()],
        articles: BTreeMap::new(),
        via_partition_root: false,
        adopt_publication: None,
        adopt_slot: None,
    };
    (cluster, spec, target)
}

/// A log that has come further than any snapshot.
async fn far_log(folder: &Path) -> Arc<dyn LogStore> {
    let (store, _) = SegmentedStore::open(folder, Options::default()).unwrap();
    let position = Lsn(u64::MAX >> 1);
    let entry =
        EntryMeta { position, commit_time: PgTime(0), kind: EntryKind::Watermark, payload_len: 0 };
    store.append(Batch { entries: vec![entry], ..Batch::default() }).await.unwrap();
    store.durable().wait_for(|durable| durable.0 >= position).await.unwrap();
    store
}

/// A session on the target, where the subscription is known.
async fn subscribed(spec: &PublicationSpec, target: &Config) -> Session {
    let mut sql = spec.connect(Mode::Sql).await.unwrap();
    spec.ensure_publication(&mut sql).await.unwrap();
    let mut session = Session::connect(target, "farshore test").await.unwrap();
    session.ensure_schema().await.unwrap();
    let row = "INSERT INTO farshore.subscription (name, publication, publisher, state, applied) \
               VALUES ($1, 'shop', '', 'copying', '0/0')";
    session.execute(row, &[Some(NAME)]).await.unwrap();
    session
}

#[test]
fn a_target_is_made_and_filled_over_channels() {
    let (_cluster, spec, target) = cluster(SETUP);
    let publisher = spec.source.clone();
    let folder = tempfile::tempdir().unwrap();
    Runtime::new().unwrap().block_on(async {
        let store = far_log(folder.path()).await;
        let mut session = subscribed(&spec, &target).await;
        let (schema, status) = (SchemaSettings::default(), Arc::new(Mutex::default()));
        let status: Arc<Mutex<SubscriptionStatus>> = status;

        // The snapshot, its first session and one of two workers: then no way more.
        for (times, whole) in [(3, false), (100, true)] {
            let source = way(&spec, times);
            let copy = InitialCopy {
                subscription: NAME,
                source: &source,
                target: &target,
                store: &store,
                settings: CopySettings { workers: 2, range_blocks: 50 },
                streaming: false,
                schema: &schema,
                follow_ddl: farshore_apply::postgres::follow_ddl::FollowDdl::Add,
                ends: true,
                which: Which::All,
                status: &status,
                detaching: &LogPoints::default(),
            };
            let known = session.load_tables(NAME).await.unwrap();
            match copy.run(&mut session, &known).await {
                Ok(_) => assert!(whole),
                Err(error) => {
                    assert!(!whole && error.is_transient(), "{error}");
                    assert_eq!(error.to_string(), "site hq: no way there");
                }
            }
        }
        for table in ["orders", "lines"] {
            let sum = format!("SELECT md5(string_agg(t::text, ',' ORDER BY id)) FROM {table} t");
            assert_eq!(value(&target, &sum).await, value(&publisher, &sum).await, "{table}");
        }
        let indexes = "SELECT count(*) FROM pg_indexes WHERE schemaname = 'public'";
        assert_eq!(value(&target, indexes).await, "2");
        let after = "SELECT string_agg(object, '; ' ORDER BY stage) FROM farshore.after_copy";
        let after = value(&target, after).await;
        assert_eq!(
            after,
            "index public.lines_of_order_idx; constraint lines_of_order_fkey of public.lines"
        );
        // What the copy held on the publisher has gone with its channels.
        for left in ["pg_replication_slots", "pg_locks WHERE relation = 'orders'::regclass"] {
            let left = format!("SELECT count(*) FROM {left}");
            for _ in 0..200 {
                if value(&publisher, &left).await == "0" {
                    break;
                }
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            }
            assert_eq!(value(&publisher, &left).await, "0", "{left}");
        }
    });
}

/// Of a copy's ranges none is committed into a table that was altered since it was looked at.
#[test]
fn a_range_is_not_committed_into_a_table_that_was_altered() {
    let (_cluster, spec, target) = cluster(
        "CREATE TABLE orders (id bigint PRIMARY KEY, amount integer);\n\
         INSERT INTO orders SELECT i, i FROM generate_series(1, 20000) i;\nCREATE DATABASE target;\n",
    );
    let folder = tempfile::tempdir().unwrap();
    Runtime::new().unwrap().block_on(async {
        let store = far_log(folder.path()).await;
        let mut session = subscribed(&spec, &target).await;
        // Behind the rows of the third range, while its transaction is open.
        let alters = "CREATE TABLE orders (id bigint PRIMARY KEY, amount integer); \
            CREATE FUNCTION alters() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
              IF (SELECT count(*) FROM farshore.range_copy) = 3 THEN \
                ALTER TABLE public.orders ALTER amount TYPE numeric; END IF; \
              RETURN NULL; END $$; \
            CREATE TRIGGER alters AFTER INSERT ON farshore.range_copy FOR EACH ROW \
              EXECUTE FUNCTION alters(); \
            ALTER TABLE farshore.range_copy ENABLE ALWAYS TRIGGER alters";
        let alters = format!("SET search_path = public; {alters}");
        session.simple(&format!("{alters}; SET search_path = ''")).await.unwrap();
        let (schema, status) = (SchemaSettings::default(), Arc::new(Mutex::default()));
        let status: Arc<Mutex<SubscriptionStatus>> = status;
        for alters in [true, false] {
            let source = way(&spec, 100);
            let copy = InitialCopy {
                subscription: NAME,
                source: &source,
                target: &target,
                store: &store,
                settings: CopySettings { workers: 1, range_blocks: 10 },
                streaming: false,
                schema: &schema,
                follow_ddl: farshore_apply::postgres::follow_ddl::FollowDdl::Add,
                ends: true,
                which: Which::All,
                status: &status,
                detaching: &LogPoints::default(),
            };
            let known = session.load_tables(NAME).await.unwrap();
            let copied = copy.run(&mut session, &known).await;
            let ranges = value(&target, "SELECT count(*) FROM farshore.range_copy").await;
            if alters {
                let error = copied.unwrap_err();
                assert!(error.is_transient(), "{error}");
                assert!(error.to_string().contains("was altered on the target"), "{error}");
                assert_eq!(ranges, "2");
                session.simple("DROP FUNCTION public.alters CASCADE").await.unwrap();
            } else {
                copied.unwrap();
            }
        }
        let sum = "SELECT count(*) || ' ' || sum(amount) FROM orders";
        assert_eq!(value(&target, sum).await, value(&spec.source, sum).await);
    });
}

/// A trigger that fires for what is copied would leave rows out silently.
#[test]
fn rows_that_the_target_leaves_out_are_missed() {
    let (_cluster, spec, target) = cluster(
        "CREATE TABLE orders (id bigint, part integer) PARTITION BY LIST (part);\n\
         CREATE TABLE even PARTITION OF orders FOR VALUES IN (0);\n\
         CREATE TABLE odd PARTITION OF orders FOR VALUES IN (1);\n\
         INSERT INTO orders SELECT i, i % 2 FROM generate_series(1, 2000) i;\n\
         CREATE DATABASE target;\n",
    );
    let mut articles = BTreeMap::new();
    let filter = Article { row_filter: Some("id <= 1500".into()), ..Article::default() };
    articles.insert(TableName { schema: "public".into(), name: "orders".into() }, filter);
    let tables = vec![TablePattern::parse("public.orders").unwrap()];
    let spec = PublicationSpec { via_partition_root: true, tables, articles, ..spec };
    let folder = tempfile::tempdir().unwrap();
    Runtime::new().unwrap().block_on(async {
        let store = far_log(folder.path()).await;
        let mut session = subscribed(&spec, &target).await;
        let schema = "SET search_path = public; \
            CREATE TABLE orders (id bigint, part integer) PARTITION BY LIST (part); \
            CREATE TABLE even PARTITION OF orders FOR VALUES IN (0); \
            CREATE TABLE odd PARTITION OF orders FOR VALUES IN (1); \
            CREATE FUNCTION leaves_out() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN \
              IF NEW.id < 100 THEN RETURN NULL; END IF; RETURN NEW; END $$; \
            CREATE TRIGGER leaves_out BEFORE INSERT ON odd FOR EACH ROW EXECUTE FUNCTION leaves_out(); \
            ALTER TABLE odd ENABLE ALWAYS TRIGGER leaves_out; SET search_path = ''";
        session.simple(schema).await.unwrap();
        let (schema, status) = (SchemaSettings::default(), Arc::new(Mutex::default()));
        let status: Arc<Mutex<SubscriptionStatus>> = status;
        let (far, near) = (way(&spec, 100), Direct::new(spec.clone()));
        for (source, loses) in [(&far as &dyn Source, true), (&near, true), (&far, false)] {
            if !loses {
                session.simple("DROP FUNCTION public.leaves_out CASCADE").await.unwrap();
            }
            let copy = InitialCopy {
                subscription: NAME,
                source,
                target: &target,
                store: &store,
                settings: CopySettings::default(),
                streaming: false,
                schema: &schema,
                follow_ddl: farshore_apply::postgres::follow_ddl::FollowDdl::Add,
                ends: true,
                which: Which::All,
                status: &status,
                detaching: &LogPoints::default(),
            };
            let known = session.load_tables(NAME).await.unwrap();
            match copy.run(&mut session, &known).await {
                Ok(_) => assert!(!loses),
                Err(error) => {
                    assert!(loses && !error.is_transient(), "{error}");
                    let error = error.to_string();
                    assert!(error.contains("table public.orders on the target took 1450 rows of "));
                    assert!(error.contains(" and 1500 were sent. "), "{error}");
                    assert_eq!(value(&target, "SELECT count(*) FROM orders").await, "0");
                }
            }
        }
        assert_eq!(value(&target, "SELECT count(*) FROM orders").await, "1500");
    });
}
