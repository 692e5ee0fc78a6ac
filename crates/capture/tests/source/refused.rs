//! What a site that is hostile, or wrong, asks for and does not get.

use super::over::{Elsewhere, Pipe, cluster, spec};
use super::{publish, whole};
use bytes::{BufMut, Bytes, BytesMut};
use farshore_capture::source::{Channel, ChannelError};
use serde_json::{Value, json};
use std::sync::Arc;
use tokio::runtime::Runtime;

/// The last part of a message.
const LAST: u8 = 2;

fn frame(tag: u8, content: &[u8]) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(tag);
    frame.put_u32(content.len() as u32);
    frame.put_slice(content);
    frame.freeze()
}

/// A request, with keys behind it.
fn request(version: u32, request: &Value, keys: &[&[u8]]) -> Bytes {
    let json = json!({ "version": version, "request": request }).to_string();
    let mut message = BytesMut::new();
    message.put_u32(json.len() as u32);
    message.put_slice(json.as_bytes());
    for key in keys {
        message.put_u32(key.len() as u32);
        message.put_slice(key);
    }
    frame(LAST, &message)
}

/// What comes up to the answer that ends it: the data, and the answer; none at the channel's end.
async fn answer(channel: &mut Pipe) -> Option<(Vec<u8>, Value)> {
    let (mut data, mut message) = (Vec::new(), Vec::new());
    loop {
        let frame = channel.next().await.unwrap()?;
        let len = u32::from_be_bytes(frame[1..5].try_into().unwrap()) as usize;
        let content = match &frame[5..] {
            whole if whole.len() == len => whole.to_vec(),
            less => zstd::bulk::decompress(less, len).unwrap(),
        };
        match frame[0] {
            3 => data.extend(content),
            tag => {
                message.extend(content);
                if tag == LAST {
                    let answer: Value = serde_json::from_slice(&message).unwrap();
                    if answer != json!("begins") {
                        return Some((data, answer));
                    }
                    message.clear();
                }
            }
        }
    }
}

async fn ask(channel: &mut Pipe, asked: &Value, keys: &[&[u8]]) -> (Vec<u8>, Value) {
    channel.send(request(1, asked, keys)).await.unwrap();
    answer(channel).await.unwrap_or_else(|| panic!("no answer to {asked}"))
}

fn failure(answer: &Value) -> &str {
    answer["failed"]["message"].as_str().unwrap_or_else(|| panic!("{answer} is no failure"))
}

/// A channel that keeps a snapshot, and one to a session in it.
async fn session(elsewhere: &Arc<Elsewhere>) -> (Pipe, Pipe) {
    let mut keeps = elsewhere.channel();
    let (_, exported) = ask(&mut keeps, &json!({ "export": { "reader": "test" } }), &[]).await;
    let mut session = elsewhere.channel();
    let open = json!({ "open": { "snapshot": exported["exported"]["snapshot"] } });
    assert_eq!(ask(&mut session, &open, &[]).await.1, json!("done"));
    (keeps, session)
}

async fn oid(elsewhere: &Elsewhere, table: &str) -> u32 {
    let oid =
        super::value(elsewhere.direct.spec(), &format!("SELECT '{table}'::regclass::oid")).await;
    oid.parse().unwrap()
}

fn key(value: &[u8]) -> Vec<u8> {
    let mut key = vec![0];
    key.extend_from_slice(&(value.len() as u32).to_be_bytes());
    key.extend_from_slice(value);
    key
}

#[test]
fn only_what_is_published_is_given() {
    for major in [15, 18] {
        let cluster = cluster(major);
        let spec = whole(&cluster);
        Runtime::new().unwrap().block_on(async {
            let elsewhere = publish(&spec).await;
            questions(&elsewhere).await;
            sessions(&elsewhere).await;
        });
    }
}

/// Each is refused in these words, and the channel goes on.
async fn questions(elsewhere: &Arc<Elsewhere>) {
    let hidden = oid(elsewhere, "hidden").await;
    let catalog = oid(elsewhere, "pg_authid").await;
    let table = |name: &str| json!({ "schema": "public", "name": name });
    let old_values = |name: &str, column: &str| {
        let columns = [json!({ "name": column, "type_oid": 23 })];
        json!({ "old_values": { "table": table(name), "columns": columns } })
    };
    let dropped = |schema: &str, name: &str| {
        let table = json!({ "schema": schema, "name": name });
        json!({ "dropped_columns": { "table": table, "gone": ["password"] } })
    };
    let mut channel = elsewhere.channel();
    for (asked, why) in [
        (json!({ "definitions": { "tables": [hidden] } }), "not of the publication"),
        (json!({ "definitions": { "tables": [catalog] } }), "not of the publication"),
        (old_values("hidden", "added"), "not published now"),
        (old_values("orders", "secret_added"), "column secret_added of public.orders"),
        (
            json!({ "dropped_columns": { "table": table("orders"), "gone": vec!["x"; 1601] } }),
            "1601 columns",
        ),
        (dropped("public", "hidden"), "public.hidden, which is not published"),
        (dropped("pg_catalog", "pg_authid"), "which is not published"),
        (json!({ "hold_still": { "tables": [hidden] } }), "only a session"),
        (json!({ "open": { "snapshot": "00000003-00000002-1" } }), "does not have"),
        (json!({ "open": { "snapshot": "" } }), "does not have"),
    ] {
        let (data, refused) = ask(&mut channel, &asked, &[]).await;
        assert!(data.is_empty());
        assert!(failure(&refused).contains(why), "{asked}: {refused}");
        assert!(failure(&refused).contains("publication \"whole\": refused"), "{refused}");
    }
    let nothing = ask(&mut channel, &dropped("public", "nothing"), &[]).await.1;
    assert_eq!(nothing["dropped"]["columns"], json!([]));
    assert_eq!(
        ask(&mut channel, &old_values("orders", "secret"), &[]).await.1["old_values"][0],
        "null"
    );

    // A snapshot is another publication's secret, and no channel for questions.
    let (mut keeps, _session) = session(elsewhere).await;
    let refused = ask(&mut keeps, &json!("published_tables"), &[]).await.1;
    assert!(failure(&refused).contains("keeps a snapshot"), "{refused}");
    let mut exporting = elsewhere.channel();
    let exported = ask(&mut exporting, &json!({ "export": { "reader": "x" } }), &[]).await.1;
    let id = exported["exported"]["snapshot"].clone();
    assert_eq!(id.as_str().map(str::len), Some(32));
    let people = spec_of_people(elsewhere);
    let other = Elsewhere::new(&people, &elsewhere.snapshots);
    let refused = ask(&mut other.channel(), &json!({ "open": { "snapshot": id } }), &[]).await.1;
    assert!(failure(&refused).contains("does not have"), "{refused}");
    assert_eq!(refused["failed"]["transient"], json!(true));
}

fn spec_of_people(elsewhere: &Elsewhere) -> farshore_capture::publication::PublicationSpec {
    let tables = vec![farshore_capture::publication::TablePattern::parse("public.people").unwrap()];
    farshore_capture::publication::PublicationSpec {
        name: "people".into(),
        tables,
        articles: Default::default(),
        ..elsewhere.direct.spec().clone()
    }
}

/// Each is refused in these words, and the session goes on in its snapshot.
async fn sessions(elsewhere: &Arc<Elsewhere>) {
    let (_keeps, mut session) = session(elsewhere).await;
    let (hidden, orders) = (oid(elsewhere, "hidden").await, oid(elsewhere, "orders").await);
    let parent = oid(elsewhere, "days").await;
    let all = json!({ "start": 0, "end": null });
    let copy = |table: u32, casts: Value| {
        let plan = json!({ "format": "text", "casts": casts });
        json!({ "copy_range": { "table": table, "range": all, "plan": plan } })
    };
    let look_up = |table: u32, columns: Value| {
        let plan = json!({ "format": "text", "casts": [] });
        json!({ "look_up": { "table": table, "plan": plan, "key_columns": columns } })
    };
    let cast = |cast: &str| copy(orders, json!([null, null, null, cast]));
    let one = key(b"1");
    let one: &[&[u8]] = &[&one];
    let two_values = [key(b"1"), key(b"2")].concat();
    for (asked, keys, why) in [
        (copy(hidden, json!([])), &[][..], "not published"),
        (copy(parent, json!([])), &[], "not published"),
        (copy(1260, json!([])), &[], "not published"),
        (cast("text FROM hidden) TO STDOUT --"), &[], "not a built-in type"),
        (cast("text, (SELECT password FROM hidden)"), &[], "not a built-in type"),
        (cast("text; DROP TABLE hidden"), &[], "not a built-in type"),
        (cast("pg_catalog.text\u{0}"), &[], "not a built-in type"),
        (cast("no_such_type"), &[], "not a built-in type"),
        (cast(""), &[], "not a built-in type"),
        (cast("regclass"), &[], "not a built-in type"),
        (cast("regclass[]"), &[], "not a built-in type"),
        (cast("public.mood"), &[], "not a built-in type"),
        (cast("public.short"), &[], "not a built-in type"),
        (cast("public.hidden"), &[], "not a built-in type"),
        (cast("record"), &[], "not a built-in type"),
        (cast("cstring"), &[], "not a built-in type"),
        (cast(&"x".repeat(5000)), &[], "not a built-in type"),
        (copy(orders, json!([null, null, null, null, null, null, "text"])), &[], "more casts"),
        (look_up(hidden, json!(["id"])), one, "not published"),
        (look_up(orders, json!(["secret"])), one, "not a published column"),
        (look_up(orders, json!(["id = id OR id"])), one, "not a published column"),
        (look_up(orders, json!(["ctid"])), one, "not a published column"),
        (look_up(orders, json!([])), &[], "a key of 0 columns"),
        (look_up(orders, json!(["id", "id", "id", "id", "id", "id", "id"])), one, "a key of 7"),
        (look_up(orders, json!(["id"])), &[&two_values], "another number of values"),
        (look_up(orders, json!(["id"])), &[b""], "another number of values"),
        (json!({ "hold_still": { "tables": [orders, hidden] } }), &[], "not of the publication"),
        (json!({ "is_in_the_way": { "tables": [hidden] } }), &[], "not of the publication"),
        (json!({ "definitions": { "tables": [hidden] } }), &[], "not of the publication"),
        (json!("published_tables"), &[], "does not answer"),
        (json!({ "export": { "reader": "x" } }), &[], "does not answer"),
    ] {
        let (data, refused) = ask(&mut session, &asked, keys).await;
        assert!(data.is_empty(), "{asked}");
        assert!(failure(&refused).contains(why), "{asked}: {refused}");
        assert_eq!(refused["failed"]["transient"], json!(false), "{asked}");
    }
    let often = json!({ "hold_still": { "tables": vec![orders; 100_000] } });
    assert_eq!(ask(&mut session, &often, &[]).await.1, json!({ "is": true }));
    // What is published is all that comes, whatever the other side says of filters and columns.
    let (data, done) = ask(&mut session, &cast(" character  VARYING "), &[]).await;
    assert_eq!(done, json!("done"));
    let text = String::from_utf8(data).unwrap();
    assert_eq!(text.lines().count(), 20_000 - 20_000 / 3);
    assert!(!text.contains("secret"));
    assert!(text.lines().all(|line| line.split('\t').count() == 6));
    let (three, four) = (key(b"3"), key(b"4"));
    let (data, done) = ask(&mut session, &look_up(orders, json!(["id"])), &[&three, &four]).await;
    assert_eq!(done, json!("done"));
    assert!(data.len() > 4 && data.len() < 600, "{}", data.len());
    let first = u32::from_be_bytes(data[..4].try_into().unwrap()) as usize;
    assert_eq!(data.len(), 4 + first, "row 3 does not pass the filter");
    // The publisher itself refuses: the session is over, and says so.
    let nonsense = key(b"nonsense");
    let (_, failed) = ask(&mut session, &look_up(orders, json!(["id"])), &[&nonsense]).await;
    assert!(failure(&failed).contains("invalid input syntax"), "{failed}");
}

#[test]
fn what_is_no_request_is_told_so_and_nothing_else_is_read() {
    let cluster = cluster(18);
    let spec = spec(&cluster, "people", &["public.people"]);
    Runtime::new().unwrap().block_on(async {
        let elsewhere = publish(&spec).await;
        let good = json!("published_tables");
        let with_json = |json: &str| {
            let mut message = (json.len() as u32).to_be_bytes().to_vec();
            message.extend_from_slice(json.as_bytes());
            frame(LAST, &message)
        };
        let deep = "[".repeat(100_000);
        let part = frame(1, &vec![b'x'; 1 << 20]);
        let bomb = {
            let packed = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
            let mut frame = BytesMut::from(&[LAST][..]);
            frame.put_u32(1 << 20);
            frame.put_slice(&packed[..packed.len().min(1 << 19)]);
            frame.freeze()
        };
        for (sent, why) in [
            (vec![Bytes::new()], "a frame of 0 bytes"),
            (vec![Bytes::from_static(b"GET / HTTP/1.1\r\n\r\n")], "unknown tag 71"),
            (vec![frame(3, b"data")], "data came"),
            (vec![frame(1, b"")], "an empty part"),
            (vec![frame(1, b"x"), frame(3, b"x")], "within a message"),
            (vec![frame(LAST, &vec![0; 2 << 20])], "that says it has"),
            (vec![part; 5], "a message of more than"),
            (vec![bomb], "cannot be decompressed"),
            (vec![frame(LAST, b"")], "cut off"),
            (vec![frame(LAST, &[0xff; 100])], "cut off"),
            (vec![with_json("")], "no request"),
            (vec![with_json("{}")], "no request"),
            (vec![with_json(&deep)], "no request"),
            (vec![with_json(r#"{"version":1}"#)], "no request"),
            (vec![with_json(r#"{"version":1,"request":"drop_everything"}"#)], "no request"),
            (vec![with_json(r#"{"version":-1,"request":"sequences"}"#)], "no request"),
            (vec![with_json(r#"{"version":2,"request":{"new":true}}"#)], "version 2"),
            (vec![request(1, &good, &[b"\x00\x00\x00\x00\x09x"])], "damaged"),
        ] {
            let mut channel = elsewhere.channel();
            for message in sent {
                // It may have had enough before the last of them.
                let _ = channel.send(message).await;
            }
            let (_, refused) = answer(&mut channel).await.expect(why);
            assert!(failure(&refused).contains(why), "{why}: {refused}");
            assert_eq!(answer(&mut channel).await, None, "{why}");
            let served = elsewhere.served.lock().unwrap().pop().unwrap();
            let ChannelError { message, transient } = served.await.unwrap().unwrap_err();
            assert!(message.contains(why) && !transient, "{message}");
        }
        // Speaking before the answer came.
        let mut channel = elsewhere.channel();
        channel.send(request(1, &json!({ "export": { "reader": "x" } }), &[])).await.unwrap();
        channel.send(request(1, &good, &[])).await.unwrap();
        while answer(&mut channel).await.is_some() {}
        // A well-behaved one is still served.
        let (_, tables) = ask(&mut elsewhere.channel(), &good, &[]).await;
        assert_eq!(tables["tables"][0]["table"]["name"], "people");
    });
}
