//! What holds for any bytes that claim to be a pgoutput message. The fuzz target `pgoutput` checks
//! the same.

use farshore_model::{DictionaryId, transaction::push_command};
use farshore_wire::pgoutput::{Context, Tuple, decode, encode, stored};

/// What holds for any bytes at all.
pub fn check_total(data: &[u8], context: &Context) {
    let decoded = decode(data, context);
    if let Ok(decoded) = &decoded {
        // Nothing is passed over: the value says every byte.
        assert_eq!(encode::message(&decoded.message, decoded.xid), data);
    }
    let mut out = Vec::new();
    let rewritten =
        stored::rewrite_to_stored(data, context, &mut out, |oid| Some(DictionaryId(oid)));
    match &rewritten {
        Ok(rewritten) => {
            let decoded = decoded.unwrap();
            assert_eq!(rewritten.subxid, decoded.xid);
            let command = encode::message(&decoded.message, None);
            let mut expected = Vec::new();
            push_command(&mut expected, &command);
            assert_eq!(out, expected);
            stored::decode_stored(&command).unwrap();
        }
        Err(_) => {
            assert!(out.is_empty());
            assert!(decoded.is_err() || stored::CommandKind::of(data).is_none());
        }
    }
    let mut visited = Vec::new();
    let visits = stored::for_each_relation(data, context, |oid| visited.push(oid));
    if rewritten.is_ok() {
        visits.unwrap();
        let mut looked_up = Vec::new();
        out.clear();
        stored::rewrite_to_stored(data, context, &mut out, |oid| {
            looked_up.push(oid);
            Some(DictionaryId(oid))
        })
        .unwrap();
        assert_eq!(visited, looked_up);
    }
    let _ = stored::decode_definition(data);
    if let Ok(tuple) = Tuple::parse(data) {
        assert_eq!(tuple.values().count(), tuple.len());
    }
}
