//! A publisher on a slow line.

use super::{found, plan, publish, whole};
use crate::over::cluster;
use bytes::{Bytes, BytesMut};
use farshore_capture::publication::PublicationSpec;
use farshore_capture::snapshot::CopyFormat;
use farshore_capture::source::{Direct, Key, LookUp, Source};
use farshore_pg::Config;
use farshore_wire::frontend::Format;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};

/// What a line takes there and back.
const ROUND_TRIP: Duration = Duration::from_millis(20);

/// Carries what comes, as fast as it comes, half a round trip later.
async fn carry(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin + Send + 'static) {
    let (put, mut take) = mpsc::channel::<(Instant, Bytes)>(4_096);
    tokio::spawn(async move {
        while let Some((due, bytes)) = take.recv().await {
            sleep_until(due).await;
            if to.write_all(&bytes).await.is_err() {
                break;
            }
        }
    });
    let mut buffer = BytesMut::with_capacity(64 << 10);
    while matches!(from.read_buf(&mut buffer).await, Ok(1..)) {
        if put.send((Instant::now() + ROUND_TRIP / 2, buffer.split().freeze())).await.is_err() {
            break;
        }
    }
}

/// The port of a line to the server on that port.
async fn line(server: u16) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let server = TcpStream::connect(("127.0.0.1", server)).await.unwrap();
            client.set_nodelay(true).unwrap();
            server.set_nodelay(true).unwrap();
            let ((from_client, to_client), (from_server, to_server)) =
                (client.into_split(), server.into_split());
            tokio::spawn(carry(from_client, to_server));
            tokio::spawn(carry(from_server, to_client));
        }
    });
    port
}

#[test]
fn rows_are_looked_up_by_many_keys_in_a_round_trip() {
    const KEYS: i64 = 10_000;
    let cluster = cluster(18);
    let spec = whole(&cluster);
    Runtime::new().unwrap().block_on(async {
        publish(&spec).await;
        let port = line(cluster.port()).await;
        let url = cluster.url("postgres").replace(&cluster.port().to_string(), &port.to_string());
        let source = Config::parse(&url).unwrap();
        let direct = Direct::new(PublicationSpec { source, ..spec });
        let snapshot = direct.export("slow").await.unwrap();
        let mut session = snapshot.open().await.unwrap();
        let tables = session.tables().await.unwrap();
        let orders = tables.iter().find(|table| table.table.name == "orders").unwrap();
        let keys: Vec<Key> = (1..=KEYS)
            .map(|id| {
                let mut key = Key::default();
                key.push(Format::Binary, &id.to_be_bytes());
                key
            })
            .collect();
        let keys: Vec<&Key> = keys.iter().collect();
        let (plan, key_columns) = (plan(orders, CopyFormat::Text), ["id".to_owned()]);
        let wanted = LookUp { table: orders, plan: &plan, key_columns: &key_columns, keys: &keys };
        let begun = Instant::now();
        // A round trip for a few of them would take ten times as long.
        let all = timeout(Duration::from_secs(5), found(session.as_mut(), wanted)).await;
        let all = all.expect("the keys take too many round trips");
        println!("{KEYS} keys: {} rows in {:?}", all.len(), begun.elapsed());
        // The publication leaves every third of them out.
        assert_eq!(all.len() as i64, KEYS - KEYS / 3);

        // Given up in the middle, the session answers what it is asked next.
        let mut some = session.look_up(wanted).await.unwrap();
        assert!(some.next().await.unwrap().is_some());
        drop(some);
        assert_eq!(session.tables().await.unwrap(), tables);
        assert!(found(session.as_mut(), wanted).await == all);
        session.close().await;
        snapshot.close().await;
    });
}
