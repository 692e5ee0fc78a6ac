//! Queries, COPY and pipelines against a real server.

mod cluster;

use bytes::{BufMut, BytesMut};
use cluster::Cluster;
use farshore_pg::{Connection, Error, Mode, Question, TransactionStatus, quote_literal};
use farshore_wire::backend::Message;
use farshore_wire::frontend::{self, Bind, Format, Target};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

#[tokio::test]
async fn queries_give_rows_and_errors() {
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut connection = cluster.connect().await;

    let results = connection
        .simple_query("CREATE TABLE t (id int PRIMARY KEY, v text); INSERT INTO t VALUES (1,'a'),(2,NULL); SELECT * FROM t ORDER BY id;;")
        .await
        .unwrap();
    assert_eq!(
        results.iter().map(|r| r.tag.as_str()).collect::<Vec<_>>(),
        ["CREATE TABLE", "INSERT 0 2", "SELECT 2"]
    );
    assert_eq!(results[2].columns, ["id", "v"]);
    assert_eq!((results[2].rows[0].by_name("v"), results[2].rows[1].get(1)), (Some("a"), None));
    assert_eq!(connection.simple_query("").await.unwrap()[0].tag, "");

    let rows = connection.query("SELECT v FROM t WHERE id = $1", &[Some("1")]).await.unwrap();
    assert_eq!((rows.len(), rows[0].get(0)), (1, Some("a")));
    let update = "UPDATE t SET v = $1 WHERE id > $2";
    assert_eq!(connection.execute(update, &[None, Some("0")]).await.unwrap(), 2);
    for text in ["it's", "back\\slash", "\\'; DROP TABLE t; --", "ü\n"] {
        for setting in ["on", "off"] {
            let set = format!("SET standard_conforming_strings = {setting}");
            connection.simple_query(&set).await.unwrap();
            let sql = format!("SELECT {}", quote_literal(text));
            let results = connection.simple_query(&sql).await.unwrap();
            assert_eq!(results[0].rows[0].get(0), Some(text));
        }
    }

    let error =
        connection.execute("INSERT INTO t VALUES ($1, 'x')", &[Some("1")]).await.unwrap_err();
    let server = error.server_error().unwrap();
    assert_eq!((server.code.as_str(), server.constraint.as_deref()), ("23505", Some("t_pkey")));
    assert!(!error.is_transient());
    assert!(matches!(connection.query("SELECT 'a\0'", &[]).await, Err(Error::Encode(_))));
    assert!(connection.simple_query("SELEKT").await.is_err());
    for copy in ["COPY t FROM STDIN", "COPY t TO STDOUT"] {
        assert!(matches!(connection.query(copy, &[]).await, Err(Error::Protocol(_))), "{copy}");
        assert!(matches!(connection.simple_query(copy).await, Err(Error::Protocol(_))), "{copy}");
    }
    assert!(matches!(connection.copy_in("SELECT 1").await, Err(Error::Protocol(_))));
    assert!(matches!(connection.copy_out("COPY t FROM STDIN").await, Err(Error::Protocol(_))));

    connection.simple_query("BEGIN").await.unwrap();
    assert_eq!(connection.transaction_status(), TransactionStatus::InTransaction);
    assert!(connection.query("SELECT 1/0", &[]).await.is_err());
    assert_eq!(connection.transaction_status(), TransactionStatus::Failed);
    connection.simple_query("ROLLBACK").await.unwrap();
    assert_eq!(connection.query("SELECT 1", &[]).await.unwrap()[0].get(0), Some("1"));
    connection.close().await;
}

#[tokio::test]
async fn questions_that_are_asked_together_have_answers_of_their_own() {
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut connection = cluster.connect().await;
    let answers = connection
        .ask_all(&[
            Question::Simple("SELECT 1; SELECT 2"),
            Question::Extended("SELECT 1/0", &[]),
            Question::Extended("SELECT $1::text, NULL", &[Some("it's")]),
            Question::Simple("no SQL"),
            Question::Simple(""),
            Question::Extended("SELECT generate_series(1, 1000)", &[]),
        ])
        .await
        .unwrap();
    let values = |n: usize| -> Vec<Option<&str>> {
        answers[n].as_ref().unwrap().iter().map(|row| row.get(0)).collect()
    };
    assert_eq!(values(0), [Some("1"), Some("2")]);
    assert_eq!(answers[1].as_ref().unwrap_err().sqlstate(), Some("22012"));
    assert_eq!(values(2), [Some("it's")]);
    assert_eq!(answers[3].as_ref().unwrap_err().sqlstate(), Some("42601"));
    assert!(values(4).is_empty());
    assert_eq!(values(5).len(), 1000);
    assert!(connection.ask_all(&[]).await.unwrap().is_empty());
    assert_eq!(connection.query("SELECT 1", &[]).await.unwrap()[0].get(0), Some("1"));
}

/// Drops a future after its first poll.
fn begin_and_drop(future: impl Future) {
    let mut future = std::pin::pin!(future);
    let poll = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(poll.is_pending());
}

#[tokio::test]
async fn a_dropped_operation_leaves_the_connection_usable() {
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut connection = cluster.connect().await;
    connection.simple_query("CREATE TABLE t (id int)").await.unwrap();
    let works = async |connection: &mut Connection| {
        let rows = connection.query("SELECT 'mine'", &[]).await.unwrap();
        assert_eq!(rows[0].get(0), Some("mine"));
    };
    begin_and_drop(connection.query("SELECT generate_series(1, 1000)", &[]));
    works(&mut connection).await;
    begin_and_drop(connection.query("COPY t FROM STDIN", &[]));
    works(&mut connection).await;
    let questions = [Question::Simple("SELECT 1"), Question::Extended("SELECT 1/0", &[])];
    begin_and_drop(connection.ask_all(&[questions[0], questions[1], questions[0]]));
    works(&mut connection).await;
    begin_and_drop(connection.copy_in("COPY t FROM STDIN"));
    works(&mut connection).await;
    let mut copy = connection.copy_in("COPY t FROM STDIN").await.unwrap();
    copy.send(b"1\n2\n").await.unwrap();
    drop(copy);
    works(&mut connection).await;
    let mut copy = connection.copy_in("COPY t FROM STDIN").await.unwrap();
    copy.send(b"3\n").await.unwrap();
    copy.abort("changed our mind").await.unwrap();
    works(&mut connection).await;
    let mut copy =
        connection.copy_out("COPY (SELECT generate_series(1, 100000)) TO STDOUT").await.unwrap();
    assert_eq!(copy.next().await.unwrap().unwrap(), "1\n");
    drop(copy);
    works(&mut connection).await;
    let rows = connection.query("SELECT count(*) FROM t", &[]).await.unwrap();
    assert_eq!(rows[0].get(0), Some("0"));
}

/// The server sends the error by itself, and that it is ready for more only later: who has asked for
/// one more piece that is at hand, and has given up on it, is told of the error when he asks again.
#[tokio::test]
async fn a_copy_that_fails_on_the_way_never_looks_complete() {
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut connection = cluster.connect().await;
    let mut context = Context::from_waker(Waker::noop());
    for round in 0..300 {
        let sql = "COPY (SELECT 1 / (4 - i) FROM generate_series(1, 9) i) TO STDOUT";
        let mut copy = connection.copy_out(sql).await.unwrap();
        let mut pieces = 0;
        let error = 'copy: loop {
            match copy.next().await {
                Ok(Some(_)) => pieces += 1,
                Ok(None) => panic!("round {round}: complete after {pieces} rows"),
                Err(error) => break error,
            }
            // Whatever is at hand, each asked for once.
            loop {
                let mut next = std::pin::pin!(copy.next());
                match next.as_mut().poll(&mut context) {
                    Poll::Ready(Ok(Some(_))) => pieces += 1,
                    Poll::Ready(Ok(None)) => panic!("round {round}: complete after {pieces} rows"),
                    Poll::Ready(Err(error)) => break 'copy error,
                    Poll::Pending => break,
                }
            }
        };
        assert_eq!(error.sqlstate(), Some("22012"), "{error}");
        assert!(pieces <= 3, "{pieces}");
        drop(copy);
        let rows = connection.query("SELECT 7", &[]).await.unwrap();
        assert_eq!(rows[0].get(0), Some("7"));
    }
}

#[tokio::test]
async fn copies_a_hundred_thousand_rows_in_binary() {
    const ROWS: u32 = 100_000;
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut connection = cluster.connect().await;
    connection
        .simple_query("CREATE TABLE t (id int PRIMARY KEY, v text); CREATE TABLE big (v bytea)")
        .await
        .unwrap();
    let mut copy = connection.copy_in("COPY t FROM STDIN (FORMAT binary)").await.unwrap();
    assert_eq!(copy.format().overall, Format::Binary);
    copy.send(b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0").await.unwrap();
    let mut row = BytesMut::new();
    for id in 0..ROWS {
        row.clear();
        row.put_i16(2);
        row.put_i32(4);
        row.put_u32(id);
        row.put_i32(40);
        row.put_slice(format!("{id:040}").as_bytes());
        copy.send(&row).await.unwrap();
    }
    copy.send(b"\xff\xff").await.unwrap();
    assert_eq!(copy.finish().await.unwrap(), u64::from(ROWS));

    let mut copy = connection
        .copy_out("COPY (SELECT * FROM t ORDER BY id) TO STDOUT (FORMAT binary)")
        .await
        .unwrap();
    let mut bytes = 0;
    while let Some(data) = copy.next().await.unwrap() {
        bytes += data.len();
    }
    assert_eq!(copy.finish().await.unwrap(), u64::from(ROWS));
    assert_eq!(bytes, 19 + ROWS as usize * 54 + 2);

    // One value of 20 MB, in one send and out in one message.
    let mut copy = connection.copy_in("COPY big FROM STDIN (FORMAT binary)").await.unwrap();
    let mut data = BytesMut::from(&b"PGCOPY\n\xff\r\n\0\0\0\0\0\0\0\0\0\0\x01"[..]);
    data.put_u32(20_000_000);
    data.put_bytes(7, 20_000_000);
    data.put_i16(-1);
    copy.send(&data).await.unwrap();
    assert_eq!(copy.finish().await.unwrap(), 1);
    let copy = connection.copy_out("COPY big TO STDOUT (FORMAT binary)").await.unwrap();
    assert_eq!(copy.finish().await.unwrap(), 1);

    // An error is noticed while there is still data to send, not at its end.
    let mut copy = connection.copy_in("COPY t FROM STDIN").await.unwrap();
    copy.send(b"not a number\tx\n").await.unwrap();
    let filler = b"1\tx\n".repeat(100_000);
    let error = loop {
        if let Err(error) = copy.send(&filler).await {
            break error;
        }
    };
    assert_eq!(error.sqlstate(), Some("22P02"), "{error}");
    assert!(copy.finish().await.is_err());
    let rows = connection.query("SELECT count(*) FROM t", &[]).await.unwrap();
    assert_eq!(rows[0].parse::<u32>(0).unwrap(), ROWS);
}

#[tokio::test]
async fn an_error_in_a_pipeline_ends_at_its_sync() {
    let Some(cluster) = Cluster::start(&[], &[]) else { return };
    let mut connection = cluster.connect().await;
    connection.simple_query("CREATE TABLE t (id int PRIMARY KEY)").await.unwrap();
    let out = connection.out();
    frontend::parse(out, "insert", "INSERT INTO t VALUES ($1)", &[23]).unwrap();
    for (id, sync) in [(1, true), (2, false), (1, false), (3, true), (4, true)] {
        let mut bind = Bind::begin(out, "", "insert", 1).unwrap();
        bind.parameter_with(Format::Binary, |out| out.put_i32(id)).unwrap();
        bind.finish(Format::Binary).unwrap();
        frontend::execute(out, "", 0).unwrap();
        if sync {
            frontend::sync(out);
        }
    }
    connection.flush().await.unwrap();
    let mut story = Vec::new();
    let mut ready = 0;
    while ready < 3 {
        match connection.receive().await.unwrap() {
            Message::ParseComplete => story.push("parsed".to_owned()),
            Message::BindComplete => {}
            Message::CommandComplete(tag) => story.push(tag.as_str().to_owned()),
            Message::ErrorResponse(error) => story.push(error.code),
            Message::ReadyForQuery(_) => {
                ready += 1;
                story.push("ready".to_owned());
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(
        story,
        ["parsed", "INSERT 0 1", "ready", "INSERT 0 1", "23505", "ready", "INSERT 0 1", "ready"]
    );
    assert_eq!(connection.try_receive().unwrap(), None);
    let rows = connection.query("SELECT array_agg(id ORDER BY id) FROM t", &[]).await.unwrap();
    assert_eq!(rows[0].get(0), Some("{1,4}"));
    frontend::close(connection.out(), Target::Statement("insert")).unwrap();
    frontend::sync(connection.out());
    assert_eq!(connection.receive().await.unwrap(), Message::CloseComplete);
}

/// Neither side can go on unless this one reads while it writes.
async fn pipeline_without_reading(mut connection: Connection) {
    const STATEMENTS: usize = 200_000;
    let out = connection.out();
    frontend::parse(out, "s", "SELECT repeat('x', 100), $1::int", &[]).unwrap();
    for i in 0..STATEMENTS {
        let mut bind = Bind::begin(out, "", "s", 1).unwrap();
        bind.parameter_with(Format::Binary, |out| out.put_u32(i as u32)).unwrap();
        bind.finish(Format::Binary).unwrap();
        frontend::execute(out, "", 0).unwrap();
    }
    frontend::sync(out);
    let done = async {
        connection.flush().await.unwrap();
        let mut rows = 0;
        loop {
            match connection.receive().await.unwrap() {
                Message::DataRow(row) => {
                    let values: Vec<_> = row.values().collect();
                    assert_eq!(values[1], Some(&(rows as u32).to_be_bytes()[..]));
                    rows += 1;
                }
                Message::ReadyForQuery(_) => break rows,
                Message::ErrorResponse(error) => panic!("{error}"),
                _progress => {}
            }
        }
    };
    let rows = tokio::time::timeout(Duration::from_secs(120), done).await.expect("deadlock");
    assert_eq!(rows, STATEMENTS);
    assert!(connection.out().capacity() <= 1 << 20);
    assert_eq!(connection.query("SELECT 1", &[]).await.unwrap()[0].get(0), Some("1"));
}

#[tokio::test]
async fn a_pipeline_that_nobody_reads_does_not_deadlock() {
    let Some(cluster) = Cluster::start(&["host all all 127.0.0.1/32 trust"], &[]) else { return };
    pipeline_without_reading(cluster.connect().await).await;
    let tcp = format!("postgres://postgres@127.0.0.1:{}/postgres?sslmode=disable", cluster.port);
    let connection = Connection::connect(&cluster.parse(&tcp), Mode::Sql).await.unwrap();
    pipeline_without_reading(connection).await;
}

/// Connections are driven from spawned tasks.
#[test]
fn futures_can_move_between_threads() {
    fn is_send<T: Send>(_: impl Fn(&'static mut Connection) -> T) {}
    is_send(|c| c.query("", &[]));
    is_send(|c| c.simple_query(""));
    is_send(|c| c.receive());
    is_send(|c| c.flush());
    is_send(|c| async { c.copy_in("").await?.send(b"").await });
}
