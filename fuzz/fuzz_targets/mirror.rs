#![no_main]

use bytes::Bytes;
use farshore_mirror::relay::compression::Unpacker;
use farshore_mirror::relay::message::{FromFar, FromNear, Packing};
use farshore_mirror::seed::message::{FromGiver, FromTaker};
use farshore_mirror::seed::tar::Reader;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let bytes = Bytes::copy_from_slice(data);
    if let Ok(message) = FromNear::decode(bytes.clone()) {
        assert_eq!(message.encode().concat(), data);
    }
    if let Ok(message) = FromFar::decode(bytes.clone()) {
        assert_eq!(message.encode(), data);
    }
    if let Ok(message) = FromTaker::decode(bytes.clone()) {
        assert_eq!(message.encode(), data);
    }
    // Bits of a mode beyond permissions are dropped.
    if let Ok(message) = FromGiver::decode(bytes.clone()) {
        assert_eq!(FromGiver::decode(message.encode().concat().into()), Ok(message));
    }
    for packing in [Packing::Plain, Packing::Zstd, Packing::Lz4] {
        if let Ok(mut unpacker) = Unpacker::new() {
            let length = data.first().map_or(0, |first| usize::from(*first) * 16);
            if let Ok(log) = unpacker.unpack(packing, bytes.clone(), length) {
                assert_eq!(log.len(), length);
            }
        }
    }
    let mut reader = Reader::default();
    reader.push(data);
    while let Ok(Some(_)) = reader.next_entry() {}
    let _ = reader.finish();
});
