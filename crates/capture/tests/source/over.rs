//! Channels in memory, with `serve` at the other end, and a publisher to serve.

use bytes::Bytes;
use farshore_capture::publication::{Article, PublicationSpec, TableName, TablePattern};
use farshore_capture::source::{Channel, ChannelError, Direct, Opener, Registry, Remote, serve};
use farshore_pg::{Config, Connection, Mode};
use farshore_store::BoxFuture;
use farshore_testkit::postgres::{Cluster, Installation};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// Messages that may wait on their way.
const UNDER_WAY: usize = 2;

pub struct Pipe {
    to: mpsc::Sender<Bytes>,
    from: mpsc::Receiver<Bytes>,
}

impl Pipe {
    pub fn pair() -> (Pipe, Pipe) {
        let (to, from) = mpsc::channel(UNDER_WAY);
        let (back_to, back_from) = mpsc::channel(UNDER_WAY);
        (Pipe { to, from: back_from }, Pipe { to: back_to, from })
    }
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

/// What runs at the other end of one channel.
pub type Served = JoinHandle<Result<(), ChannelError>>;

/// The site that has the publisher, in this process.
pub struct Elsewhere {
    pub direct: Direct,
    pub snapshots: Arc<Registry>,
    pub stop: watch::Sender<bool>,
    /// One for each channel that was opened, in order.
    pub served: Mutex<Vec<Served>>,
}

impl Elsewhere {
    pub fn new(spec: &PublicationSpec, snapshots: &Arc<Registry>) -> Arc<Elsewhere> {
        let (stop, _) = watch::channel(false);
        let (direct, snapshots) = (Direct::new(spec.clone()), snapshots.clone());
        Arc::new(Elsewhere { direct, snapshots, stop, served: Mutex::default() })
    }

    /// A channel to it.
    pub fn channel(&self) -> Pipe {
        let (near, mut far) = Pipe::pair();
        let (direct, snapshots) = (self.direct.clone(), self.snapshots.clone());
        let stop = self.stop.subscribe();
        let served = tokio::spawn(async move { serve(&direct, &snapshots, &mut far, stop).await });
        self.served.lock().unwrap().push(served);
        near
    }

    /// Until so many channels are served: one that was closed here ends there a moment later.
    pub async fn until_at_work(&self, wanted: usize) {
        let mut now = 0;
        for _ in 0..200 {
            now = self.served.lock().unwrap().iter().filter(|task| !task.is_finished()).count();
            if now == wanted {
                return;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("{now} channels are served instead of {wanted}");
    }

    pub fn remote(self: &Arc<Elsewhere>) -> Remote {
        Remote::new("hq", Arc::new(Open(self.clone())))
    }
}

struct Open(Arc<Elsewhere>);

impl Opener for Open {
    fn open(&self) -> BoxFuture<'_, Result<Box<dyn Channel>, ChannelError>> {
        Box::pin(async move { Ok(Box::new(self.0.channel()) as Box<dyn Channel>) })
    }
}

/// Tables of many kinds; `hidden` is not published, nor is `orders.secret`.
const SETUP: &str = "
CREATE TYPE mood AS ENUM ('fine', 'not so');
CREATE DOMAIN short AS varchar(20) CHECK (length(VALUE) > 0);
CREATE TABLE orders (id bigint PRIMARY KEY, region short, amount numeric(12,2), note text,
  secret text, at timestamptz DEFAULT now());
INSERT INTO orders SELECT i, 'r' || i % 7, i * 1.5, repeat(md5(i::text), i % 9), 'secret' || i,
  '2020-01-01'::timestamptz + i * '1 minute'::interval FROM generate_series(1, 20000) i;
UPDATE orders SET note = NULL WHERE id % 5 = 0;
CREATE TABLE people (id serial PRIMARY KEY, name text UNIQUE, mood mood, tags text[], manager int
  REFERENCES people);
INSERT INTO people (name, mood, tags) SELECT 'p' || i, 'not so', ARRAY['a', NULL, 'c']
  FROM generate_series(1, 50) i;
COMMENT ON TABLE people IS 'who works here';
CREATE TABLE large (id int PRIMARY KEY, body text);
INSERT INTO large SELECT i, (SELECT string_agg(md5(i::text || j::text), '')
  FROM generate_series(1, 40000) j) FROM generate_series(1, 4) i;
CREATE TABLE days (id int, day date, v text, PRIMARY KEY (id, day)) PARTITION BY RANGE (day);
CREATE TABLE days_1 PARTITION OF days FOR VALUES FROM ('2024-01-01') TO ('2024-02-01');
CREATE TABLE days_2 PARTITION OF days FOR VALUES FROM ('2024-02-01') TO ('2024-03-01');
INSERT INTO days SELECT i, '2024-01-01'::date + i % 59, 'v' || i FROM generate_series(1, 500) i;
ALTER TABLE orders ADD COLUMN added int DEFAULT 42;
ALTER TABLE orders ADD COLUMN secret_added int DEFAULT 43;
ALTER TABLE orders ADD COLUMN gone int;
ALTER TABLE orders DROP COLUMN gone;
CREATE TABLE hidden (id int PRIMARY KEY, password text);
INSERT INTO hidden VALUES (1, 'hunter2');
ALTER TABLE hidden ADD COLUMN added int DEFAULT 44;
CREATE SEQUENCE hidden_sequence;
ANALYZE;
";

/// A server with those tables.
pub fn cluster(major: u32) -> Cluster {
    let installation = Installation::find(major).unwrap();
    let builder = Cluster::builder(&installation).setting("wal_level", "logical");
    let cluster = builder.setting("autovacuum", "off").start().unwrap();
    cluster.execute_script(SETUP).unwrap();
    cluster
}

/// A publication of some of the cluster's tables.
pub fn spec(cluster: &Cluster, name: &str, tables: &[&str]) -> PublicationSpec {
    let columns = ["id", "region", "amount", "note", "at", "added"];
    let orders = Article {
        columns: Some(columns.map(str::to_owned).to_vec()),
        row_filter: Some("id % 3 <> 0".to_owned()),
    };
    let mut articles = BTreeMap::new();
    if tables.contains(&"public.orders") {
        articles.insert(TableName { schema: "public".into(), name: "orders".into() }, orders);
    }
    PublicationSpec {
        name: name.to_owned(),
        source: Config::parse(&cluster.url("postgres")).unwrap(),
        tables: tables.iter().map(|table| TablePattern::parse(table).unwrap()).collect(),
        articles,
        via_partition_root: false,
        adopt_publication: None,
        adopt_slot: None,
    }
}

/// Runs a query, and gives the first value.
pub async fn value(spec: &PublicationSpec, sql: &str) -> String {
    let mut connection = Connection::connect(&spec.source, Mode::Sql).await.unwrap();
    let results = connection.simple_query(sql).await.unwrap();
    let row = results.last().and_then(|set| set.rows.first());
    row.and_then(|row| row.get(0)).unwrap_or_default().to_owned()
}

/// Waits until a query gives `wanted`.
pub async fn wait_for(spec: &PublicationSpec, sql: &str, wanted: &str) {
    let mut now = String::new();
    for _ in 0..200 {
        now = value(spec, sql).await;
        if now == wanted {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("{sql} gives {now} instead of {wanted}");
}
