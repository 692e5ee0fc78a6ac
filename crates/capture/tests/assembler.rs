//! Messages in, a real store out: what capture makes of a replication stream.

use farshore_capture::assembler::{Assembler, SPILL_BYTES};
use farshore_model::transaction::{Header, commands};
use farshore_model::{Column, Lsn, PgTime, Relation, ReplicaIdentity, Xid};
use farshore_store::segmented::{Options, SegmentedStore};
use farshore_store::{EntryKind, Item, LogStore, SpillItem};
use farshore_wire::pgoutput::stored::{Stored, decode_stored};
use farshore_wire::pgoutput::{Begin, Commit, Context, Message, Value, encode};
use std::sync::Arc;

const TABLE: u32 = 16_500;

struct Bench {
    _folder: tempfile::TempDir,
    store: Arc<SegmentedStore>,
    assembler: Assembler,
}

/// A transaction as read back: its position and the text values it inserts.
type Seen = (u64, Vec<String>);

impl Bench {
    fn new() -> Bench {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = SegmentedStore::open(folder.path(), Options::default()).unwrap();
        let assembler = Assembler::new(store.clone(), Context::new(2, false), Lsn(100));
        Bench { _folder: folder, store, assembler }
    }

    fn say(&mut self, message: &Message<'_>) {
        self.raw(&encode::message(message, None));
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.assembler.message(bytes).unwrap();
    }

    fn relation(&mut self, xid: Option<Xid>) {
        let relation = Relation {
            oid: TABLE,
            schema: "public".into(),
            name: "t".into(),
            identity: ReplicaIdentity::Default,
            columns: vec![Column { key: true, name: "v".into(), type_oid: 25, type_modifier: -1 }],
            types: vec![],
        };
        self.raw(&encode::relation(&relation, xid));
    }

    fn insert(&mut self, text: &str, xid: Option<Xid>) {
        self.raw(&encode::insert(TABLE, &[Value::Text(text.as_bytes())], xid));
    }

    fn begin(&mut self, commit_lsn: u64, xid: Xid) {
        let final_lsn = Lsn(commit_lsn);
        self.say(&Message::Begin(Begin { final_lsn, commit_time: PgTime(7), xid }));
    }

    fn commit(&mut self, commit_lsn: u64) {
        self.say(&Message::Commit(Commit {
            commit_lsn: Lsn(commit_lsn),
            end_lsn: Lsn(commit_lsn + 10),
            commit_time: PgTime(7),
        }));
    }

    fn stream_commit(&mut self, xid: Xid, commit_lsn: u64) {
        self.say(&Message::StreamCommit {
            xid,
            commit_lsn: Lsn(commit_lsn),
            end_lsn: Lsn(commit_lsn + 10),
            commit_time: PgTime(7),
        });
    }

    async fn flush(&mut self) {
        if let Some(batch) = self.assembler.take_batch() {
            let last = batch.entries.last().unwrap().position;
            self.store.append(batch).await.unwrap();
            self.store.durable().wait_for(|durable| durable.0 >= last).await.unwrap();
        }
    }

    /// Everything in the store, aborted sub-transactions passed over as apply does.
    fn stored(&self) -> Vec<Seen> {
        let mut reader = self.store.read_from(Lsn::ZERO).unwrap();
        let mut seen = Vec::new();
        while let Some(items) = reader.next_block().unwrap() {
            for item in items {
                let Item::Entry(entry) = item else { continue };
                let mut bodies = Vec::new();
                let header = match entry.kind {
                    EntryKind::Watermark => continue,
                    EntryKind::Transaction => {
                        let (header, body) = Header::decode(&entry.payload).unwrap();
                        bodies.push(body.to_vec());
                        header
                    }
                    EntryKind::Spilled(spill) => {
                        let mut spill = self.store.open_spill(spill).unwrap();
                        while let Some(items) = spill.next_block().unwrap() {
                            bodies.extend(items.into_iter().filter_map(|item| match item {
                                SpillItem::Chunk(bytes) => Some(bytes.to_vec()),
                                SpillItem::Definition(..) => None,
                            }));
                        }
                        Header::decode(&entry.payload).unwrap().0
                    }
                };
                let (mut texts, mut sub, mut count) = (Vec::new(), header.xid, 0);
                for body in &bodies {
                    for command in commands(body) {
                        count += 1;
                        match decode_stored(command.unwrap()).unwrap() {
                            Stored::SubtransactionMark(xid) => sub = xid,
                            Stored::Insert { new, .. } => {
                                if header.aborted_subtransactions.contains(&sub) {
                                    continue;
                                }
                                let Some(Value::Text(text)) = new.values().next() else {
                                    panic!("a text value was inserted")
                                };
                                texts.push(String::from_utf8_lossy(text).chars().take(9).collect());
                            }
                            other => panic!("{other:?}"),
                        }
                    }
                }
                assert_eq!(count, header.commands, "the header counts its commands");
                assert_eq!(header.end_lsn, entry.position);
                seen.push((entry.position.0, texts));
            }
        }
        seen
    }
}

fn texts(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[tokio::test]
async fn transactions_reach_the_store_in_commit_order() {
    let mut bench = Bench::new();
    bench.begin(200, 1);
    bench.relation(None);
    bench.insert("a", None);
    bench.insert("b", None);
    bench.commit(200);
    bench.begin(300, 2);
    bench.insert("c", None);
    // A batch may be taken while a transaction is open: it waits for its commit.
    bench.flush().await;
    assert_eq!(bench.stored(), [(210, texts(&["a", "b"]))]);
    bench.insert("d", None);
    bench.commit(300);
    bench.flush().await;
    assert_eq!(bench.stored(), [(210, texts(&["a", "b"])), (310, texts(&["c", "d"]))]);
}

#[tokio::test]
async fn what_the_store_has_is_not_taken_again() {
    let mut bench = Bench::new();
    bench.begin(80, 1);
    bench.relation(None);
    bench.insert("old", None);
    bench.commit(80);
    bench.say(&Message::StreamStart { xid: 5, first: true });
    bench.insert("old too", Some(5));
    bench.say(&Message::StreamStop);
    bench.stream_commit(5, 90);
    assert!(bench.assembler.take_batch().is_none());
    bench.begin(100, 2);
    bench.insert("new", None);
    bench.commit(100);
    bench.flush().await;
    assert_eq!(bench.stored(), [(110, texts(&["new"]))]);
}

#[tokio::test]
async fn empty_transactions_leave_no_trace() {
    let mut bench = Bench::new();
    bench.begin(200, 1);
    bench.commit(200);
    assert!(bench.assembler.take_batch().is_none());
    bench.assembler.watermark(Lsn(250));
    bench.assembler.watermark(Lsn(240));
    bench.flush().await;
    assert_eq!(bench.stored(), []);
    assert_eq!(bench.store.status().durable.0, Lsn(250));
}

#[tokio::test]
async fn streamed_transactions_interleave_and_abort() {
    let mut bench = Bench::new();
    bench.say(&Message::StreamStart { xid: 10, first: true });
    bench.relation(Some(10));
    bench.insert("10a", Some(10));
    bench.insert("10 sub11", Some(11));
    bench.insert("10 sub12", Some(12));
    bench.say(&Message::StreamStop);
    bench.say(&Message::StreamStart { xid: 20, first: true });
    bench.relation(Some(20));
    bench.insert("20 lost", Some(20));
    bench.say(&Message::StreamStop);
    // A small transaction commits between.
    bench.begin(200, 30);
    bench.relation(None);
    bench.insert("30", None);
    bench.commit(200);
    bench.say(&Message::StreamAbort { xid: 10, subxid: 11, abort: None });
    bench.say(&Message::StreamStart { xid: 10, first: false });
    bench.insert("10b", Some(10));
    bench.say(&Message::StreamStop);
    bench.say(&Message::StreamAbort { xid: 20, subxid: 20, abort: None });
    bench.stream_commit(10, 300);
    // Its relation holds for the session from its commit on.
    bench.begin(400, 31);
    bench.insert("31", None);
    bench.commit(400);
    bench.flush().await;
    assert_eq!(
        bench.stored(),
        [(210, texts(&["30"])), (310, texts(&["10a", "10 sub12", "10b"])), (410, texts(&["31"])),]
    );
}

#[tokio::test]
async fn a_streamed_transaction_of_which_nothing_is_left_leaves_no_trace() {
    let mut bench = Bench::new();
    let filler = "z".repeat(600_000);
    // The second outgrows memory.
    for (xid, text) in [(10, "lost"), (20, filler.as_str())] {
        for first in [true, false] {
            bench.say(&Message::StreamStart { xid, first });
            bench.relation(Some(xid));
            bench.insert(text, Some(xid + 1));
            bench.insert(text, Some(xid + 2));
            bench.say(&Message::StreamStop);
        }
        bench.say(&Message::StreamAbort { xid, subxid: xid + 2, abort: None });
        bench.say(&Message::StreamAbort { xid, subxid: xid + 1, abort: None });
        bench.stream_commit(xid, 200 + u64::from(xid));
    }
    assert!(bench.assembler.take_batch().is_none() && !bench.assembler.has_spills());
    // Each keeps a row: one by itself, one in another sub-transaction.
    for (xid, kept) in [(30, 30), (40, 43)] {
        bench.say(&Message::StreamStart { xid, first: true });
        bench.insert("kept", Some(kept));
        bench.insert("lost", Some(xid + 1));
        bench.say(&Message::StreamStop);
        bench.say(&Message::StreamAbort { xid, subxid: xid + 1, abort: None });
        bench.stream_commit(xid, 300 + u64::from(xid));
    }
    bench.flush().await;
    assert_eq!(bench.stored(), [(340, texts(&["kept"])), (350, texts(&["kept"]))]);
}

#[tokio::test]
async fn a_transaction_that_outgrows_memory_goes_to_a_spill() {
    let mut bench = Bench::new();
    bench.begin(200, 1);
    bench.relation(None);
    let rows = 40;
    let filler = "x".repeat(SPILL_BYTES / 10);
    for row in 0..rows {
        bench.insert(&format!("{row:09}{filler}"), None);
        assert!(bench.assembler.bytes_waiting() <= SPILL_BYTES + SPILL_BYTES / 5);
    }
    bench.commit(200);
    bench.begin(300, 2);
    bench.insert("after", None);
    bench.commit(300);
    bench.flush().await;
    let wanted: Vec<String> = (0..rows).map(|row| format!("{row:09}")).collect();
    assert_eq!(bench.stored(), [(210, wanted), (310, texts(&["after"]))]);
}

#[tokio::test]
async fn a_streamed_transaction_that_outgrows_memory_goes_to_a_spill() {
    let mut bench = Bench::new();
    let filler = "y".repeat(100_000);
    let mut wanted = Vec::new();
    for block in 0..5 {
        bench.say(&Message::StreamStart { xid: 40, first: block == 0 });
        bench.relation(Some(40));
        for row in 0..6 {
            bench.insert(&format!("{:09}{filler}", block * 10 + row), Some(40));
            bench.insert(&format!("lost{filler}"), Some(41 + block));
            wanted.push(format!("{:09}", block * 10 + row));
        }
        bench.say(&Message::StreamStop);
        bench.say(&Message::StreamAbort { xid: 40, subxid: 41 + block, abort: None });
    }
    bench.stream_commit(40, 200);
    bench.flush().await;
    assert_eq!(bench.stored(), [(210, wanted)]);
}

#[tokio::test]
async fn a_stream_that_breaks_its_rules_stops_capture() {
    let insert = encode::insert(TABLE, &[Value::Null], None);
    let start = encode::message(&Message::StreamStart { xid: 9, first: false }, None);
    let stop = encode::message(&Message::StreamStop, None);
    for (what, bytes) in [
        ("a change outside a transaction", &insert[..]),
        ("a stream that never began", &start[..]),
        ("a stop without a start", &stop[..]),
        ("an unknown tag", b"?"),
        ("nothing", b""),
    ] {
        let mut bench = Bench::new();
        assert!(bench.assembler.message(bytes).is_err(), "{what}");
    }
    let mut bench = Bench::new();
    bench.begin(200, 1);
    assert!(bench.assembler.message(&insert).is_err(), "a relation that was not described");
}

#[tokio::test]
async fn a_tracer_token_is_an_entry_without_changes() {
    let mut bench = Bench::new();
    bench.assembler.keep_tracers("farshore_sales".to_owned());
    let contents: [&[u8]; 3] = [b"farshore_sales 2a", b"farshore_stock 2b", b"\xff"];
    for (nth, content) in contents.into_iter().enumerate() {
        let at = 200 + 100 * nth as u64;
        bench.begin(at, 1);
        bench.say(&Message::Message {
            transactional: true,
            lsn: Lsn(at - 10),
            prefix: "farshore.tracer",
            content,
        });
        bench.commit(at);
    }
    let tracers = bench.assembler.take_tracers();
    bench.flush().await;
    assert_eq!(bench.stored(), vec![(210, vec![])]);
    let tokens: Vec<_> = tracers.iter().map(|t| (t.token, t.position, t.commit_time)).collect();
    assert_eq!(tokens, vec![(0x2a, Lsn(210), PgTime(7))]);
    assert!(bench.assembler.take_tracers().is_empty());
}
