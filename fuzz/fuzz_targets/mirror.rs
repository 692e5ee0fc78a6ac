#![no_main]

use bytes::Bytes;
use farshore_mirror::relay::compression::Unpacker;
use farshore_mirror::relay::message::{FromFar, FromNear, Packing};
use farshore_mirror::relay::redundancy::Redundancy;
use farshore_mirror::seed::message::{FromGiver, FromTaker};
use farshore_mirror::seed::tar::Reader;
use farshore_model::Lsn;
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
    for packing in [
        Packing::Plain,
        Packing::Zstd,
        Packing::Lz4,
        Packing::ReducedZstd,
        Packing::ReducedLz4,
        Packing::PagesReducedZstd,
        Packing::PagesReducedLz4,
    ] {
        if let Ok(mut unpacker) = Unpacker::new() {
            let length = data.first().map_or(0, |first| usize::from(*first) * 16);
            if let Ok(log) = unpacker.unpack_log(packing, bytes.clone(), Lsn(0), length) {
                assert_eq!(log.len(), length);
            }
        }
    }
    // As log that is cut into messages, whatever it is.
    if let Some(([start, length], log)) = data.split_first_chunk::<2>() {
        let start = u64::from(*start) * 1_024;
        let (mut reducing, mut restoring) = (Redundancy::default(), Redundancy::default());
        let mut at = 0;
        for message in log.chunks(usize::from(*length) * 16 + 1) {
            let mut changed = message.to_vec();
            reducing.reduce(Lsn(start + at), &mut changed, true);
            restoring.restore(Lsn(start + at), &mut changed, true);
            assert_eq!(changed, message);
            at += message.len() as u64;
        }
    }
    let mut reader = Reader::default();
    reader.push(data);
    while let Ok(Some(_)) = reader.next_entry() {}
    let _ = reader.finish();
});
