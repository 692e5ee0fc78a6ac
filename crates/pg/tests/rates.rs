//! Measurements rather than tests: `cargo test --release --test rates -- --ignored --nocapture`.
//! A peer made of canned bytes takes PostgreSQL's own speed out of the numbers.

use bytes::{BufMut, BytesMut};
use farshore_model::Lsn;
use farshore_pg::replication::StreamMessage;
use farshore_pg::{Config, Connection, Mode};
use farshore_wire::frontend::{self, Bind, Format};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::time::Instant;

fn message(out: &mut BytesMut, tag: u8, body: &[u8]) {
    out.put_u8(tag);
    out.put_u32(body.len() as u32 + 4);
    out.put_slice(body);
}

/// Lets one client in without a password and answers its first query with `answer`, many times.
fn canned_server(answer: BytesMut, times: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        assert!(socket.read(&mut request).unwrap() > 0);
        let mut hello = BytesMut::new();
        message(&mut hello, b'R', &[0; 4]);
        message(&mut hello, b'S', b"server_version\x0018.0\0");
        message(&mut hello, b'Z', b"I");
        socket.write_all(&hello).unwrap();
        assert!(socket.read(&mut request).unwrap() > 0);
        socket.write_all(b"W\0\0\0\x07\0\0\0").unwrap();
        for _ in 0..times {
            socket.write_all(&answer).unwrap();
        }
    });
    port
}

#[tokio::test]
#[ignore = "prints a rate; run by hand"]
async fn stream_messages() {
    const BLOCK: usize = 5_000;
    const BLOCKS: usize = 1_000;
    let mut block = BytesMut::new();
    for i in 0..BLOCK as u64 {
        let mut body = BytesMut::new();
        body.put_u8(b'w');
        body.put_u64(i);
        body.put_u64(i);
        body.put_u64(i);
        body.put_bytes(b'x', 60);
        message(&mut block, b'd', &body);
    }
    let port = canned_server(block, BLOCKS);
    let config =
        Config::parse(&format!("postgres://u@127.0.0.1:{port}/d?sslmode=disable")).unwrap();
    let connection = Connection::connect(&config, Mode::LogicalReplication).await.unwrap();
    let mut stream = connection.start_replication("s", Lsn::ZERO, &[]).await.unwrap();
    let started = Instant::now();
    let (mut messages, mut bytes) = (0, 0);
    while messages < BLOCK * BLOCKS {
        let Some(StreamMessage::XLogData { data, .. }) = stream.next().await.unwrap() else {
            panic!()
        };
        messages += 1;
        bytes += data.len();
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("received {:.2} M messages/s, {bytes} bytes", messages as f64 / 1e6 / seconds);
}

#[test]
#[ignore = "prints a rate; run by hand"]
fn bind_encoding() {
    const BINDS: u32 = 5_000_000;
    let started = Instant::now();
    let mut out = BytesMut::new();
    for i in 0..BINDS {
        let mut bind = Bind::begin(&mut out, "", "statement", 4).unwrap();
        for _ in 0..3 {
            bind.parameter(Format::Text, Some(b"some text value")).unwrap();
        }
        bind.parameter_with(Format::Binary, |out| out.put_u32(i)).unwrap();
        bind.finish(Format::Text).unwrap();
        frontend::execute(&mut out, "", 0).unwrap();
        if out.len() > 1 << 20 {
            out.clear();
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    println!("encoded {:.2} M Bind+Execute/s", f64::from(BINDS) / 1e6 / seconds);
}
