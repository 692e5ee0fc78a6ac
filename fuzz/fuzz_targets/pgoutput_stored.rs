#![no_main]

use farshore_wire::pgoutput::stored::{self, Stored};
use farshore_wire::pgoutput::{OldTuple, Tuple};
use libfuzzer_sys::fuzz_target;

fn read(tuple: Tuple<'_>) {
    assert_eq!(tuple.values().count(), tuple.len());
    assert_eq!(Tuple::parse(tuple.as_bytes()).unwrap(), tuple);
}

fuzz_target!(|command: &[u8]| {
    match stored::decode_stored(command) {
        Ok(Stored::Insert { new, .. }) => read(new),
        Ok(Stored::Update { old, new, .. }) => {
            old.tuple().into_iter().for_each(read);
            read(new);
        }
        Ok(Stored::Delete { old, .. }) => {
            assert_ne!(old, OldTuple::None);
            old.tuple().into_iter().for_each(read);
        }
        Ok(Stored::Truncate { relations, .. }) => {
            assert_eq!(relations.len() * 4 + 6, command.len());
            assert_eq!(relations.len(), relations.count());
        }
        Ok(Stored::Message { prefix, content, .. }) => {
            assert_eq!(1 + 1 + 8 + prefix.len() + 1 + 4 + content.len(), command.len());
        }
        Ok(Stored::SubtransactionMark(xid)) => {
            let mut framed = Vec::new();
            stored::push_subtransaction_mark(&mut framed, xid);
            assert_eq!(&framed[4..], command);
        }
        Err(error) => assert!(!error.to_string().is_empty() && error.offset <= command.len()),
    }
    if let Ok(relation) = stored::decode_definition(command) {
        assert_eq!(stored::encode_definition(&relation), command);
    }
});
