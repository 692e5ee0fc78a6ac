//! What another parser (pg_walstream) has read, in our words.

use farshore_model::{Column, Lsn, PgTime, Relation, ReplicaIdentity};
use farshore_wire::pgoutput::{
    Begin, Commit, Message, OldTuple, Prepared, Relations, Tuple, Value, encode,
};
use pg_walstream::protocol::{ColumnData, LogicalReplicationMessage as Theirs, TupleData};

fn tuple(theirs: &TupleData) -> Vec<u8> {
    fn value(column: &ColumnData) -> Value<'_> {
        match column.data_type {
            b'n' => Value::Null,
            b'u' => Value::Unchanged,
            b't' => Value::Text(column.as_bytes()),
            b'b' => Value::Binary(column.as_bytes()),
            kind => panic!("kind {kind}"),
        }
    }
    let values: Vec<Value<'_>> = theirs.columns.iter().map(value).collect();
    encode::tuple(&values)
}

fn old<'a>(kind: Option<char>, bytes: &'a [u8]) -> OldTuple<'a> {
    match kind {
        Some('K') => OldTuple::Key(Tuple::parse(bytes).unwrap()),
        Some('O') => OldTuple::Full(Tuple::parse(bytes).unwrap()),
        None => OldTuple::None,
        Some(kind) => panic!("kind {kind}"),
    }
}

/// What they have read, as our type.
pub fn with_ours(theirs: &Theirs, check: impl FnOnce(Message<'_>)) {
    let prepared = |prepare: &u64, end: &u64, time: &i64, xid: &u32| Prepared {
        prepare_lsn: Lsn(*prepare),
        end_lsn: Lsn(*end),
        prepare_time: PgTime(*time),
        xid: *xid,
        gid: "",
    };
    match theirs {
        Theirs::Begin { final_lsn, timestamp, xid } => check(Message::Begin(Begin {
            final_lsn: Lsn(*final_lsn),
            commit_time: PgTime(*timestamp),
            xid: *xid,
        })),
        Theirs::Commit { flags: 0, commit_lsn, end_lsn, timestamp } => {
            check(Message::Commit(Commit {
                commit_lsn: Lsn(*commit_lsn),
                end_lsn: Lsn(*end_lsn),
                commit_time: PgTime(*timestamp),
            }));
        }
        Theirs::Relation { relation_id, namespace, relation_name, replica_identity, columns } => {
            let column = |column: &pg_walstream::protocol::ColumnInfo| Column {
                key: column.flags == 1,
                name: column.name.to_string(),
                type_oid: column.type_id,
                type_modifier: column.type_modifier,
            };
            check(Message::Relation(Relation {
                oid: *relation_id,
                schema: namespace.to_string(),
                name: relation_name.to_string(),
                identity: match replica_identity {
                    b'd' => ReplicaIdentity::Default,
                    b'n' => ReplicaIdentity::Nothing,
                    b'f' => ReplicaIdentity::Full,
                    b'i' => ReplicaIdentity::Index,
                    other => panic!("identity {other}"),
                },
                columns: columns.iter().map(column).collect(),
                types: vec![],
            }));
        }
        Theirs::Insert { relation_id, tuple: new } => {
            let new = tuple(new);
            check(Message::Insert { relation: *relation_id, new: Tuple::parse(&new).unwrap() });
        }
        Theirs::Update { relation_id, old_tuple, new_tuple, key_type } => {
            let before = old_tuple.as_ref().map(tuple).unwrap_or_default();
            let new = tuple(new_tuple);
            check(Message::Update {
                relation: *relation_id,
                old: old(*key_type, &before),
                new: Tuple::parse(&new).unwrap(),
            });
        }
        Theirs::Delete { relation_id, old_tuple, key_type } => {
            let before = tuple(old_tuple);
            check(Message::Delete { relation: *relation_id, old: old(Some(*key_type), &before) });
        }
        Theirs::Truncate { relation_ids, flags } => {
            let numbers: Vec<[u8; 4]> = relation_ids.iter().map(|oid| oid.to_be_bytes()).collect();
            check(Message::Truncate {
                relations: Relations::new(&numbers),
                cascade: flags & 1 != 0,
                restart_identity: flags & 2 != 0,
            });
        }
        Theirs::Type { type_id, namespace, type_name } => {
            check(Message::Type { oid: *type_id, schema: namespace, name: type_name });
        }
        Theirs::Origin { origin_lsn, origin_name } => {
            check(Message::Origin { lsn: Lsn(*origin_lsn), name: origin_name });
        }
        Theirs::Message { flags, lsn, prefix, content } => {
            check(Message::Message { transactional: *flags == 1, lsn: Lsn(*lsn), prefix, content })
        }
        Theirs::StreamStart { xid, first_segment } => {
            check(Message::StreamStart { xid: *xid, first: *first_segment });
        }
        Theirs::StreamStop => check(Message::StreamStop),
        Theirs::StreamCommit { xid, flags: 0, commit_lsn, end_lsn, timestamp } => {
            check(Message::StreamCommit {
                xid: *xid,
                commit_lsn: Lsn(*commit_lsn),
                end_lsn: Lsn(*end_lsn),
                commit_time: PgTime(*timestamp),
            });
        }
        Theirs::StreamAbort { xid, subtransaction_xid, abort_lsn, abort_timestamp } => {
            let abort = abort_lsn.zip(*abort_timestamp);
            check(Message::StreamAbort {
                xid: *xid,
                subxid: *subtransaction_xid,
                abort: abort.map(|(lsn, time)| (Lsn(lsn), PgTime(time))),
            });
        }
        Theirs::BeginPrepare { prepare_lsn, end_lsn, timestamp, xid, gid } => {
            let prepared = prepared(prepare_lsn, end_lsn, timestamp, xid);
            check(Message::BeginPrepare(Prepared { gid, ..prepared }));
        }
        Theirs::Prepare { flags: 0, prepare_lsn, end_lsn, timestamp, xid, gid } => {
            let prepared = prepared(prepare_lsn, end_lsn, timestamp, xid);
            check(Message::Prepare(Prepared { gid, ..prepared }));
        }
        Theirs::StreamPrepare { flags: 0, prepare_lsn, end_lsn, timestamp, xid, gid } => {
            let prepared = prepared(prepare_lsn, end_lsn, timestamp, xid);
            check(Message::StreamPrepare(Prepared { gid, ..prepared }));
        }
        Theirs::CommitPrepared { flags: 0, commit_lsn, end_lsn, timestamp, xid, gid } => {
            check(Message::CommitPrepared {
                commit_lsn: Lsn(*commit_lsn),
                end_lsn: Lsn(*end_lsn),
                commit_time: PgTime(*timestamp),
                xid: *xid,
                gid,
            });
        }
        Theirs::RollbackPrepared {
            flags: 0,
            prepare_end_lsn,
            rollback_end_lsn,
            prepare_timestamp,
            rollback_timestamp,
            xid,
            gid,
        } => check(Message::RollbackPrepared {
            prepare_end_lsn: Lsn(*prepare_end_lsn),
            rollback_end_lsn: Lsn(*rollback_end_lsn),
            prepare_time: PgTime(*prepare_timestamp),
            rollback_time: PgTime(*rollback_timestamp),
            xid: *xid,
            gid,
        }),
        other => panic!("flags that no server sets: {other:?}"),
    }
}
