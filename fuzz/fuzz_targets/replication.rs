#![no_main]

use farshore_wire::replication::{FromClient, FromServer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let mut out = Vec::new();
    if let Ok(message) = FromServer::decode(data) {
        message.encode(&mut out);
        assert_eq!(out, data);
        out.clear();
    }
    if let Ok(message) = FromClient::decode(data) {
        message.encode(&mut out);
        assert_eq!(out, data);
    }
});
