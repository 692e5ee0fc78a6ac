#![no_main]

#[path = "../../crates/wire/tests/totality/mod.rs"]
mod totality;

use farshore_wire::pgoutput::Context;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Some((settings, data)) = input.split_first() else { return };
    let context = Context {
        protocol: (settings & 3) + 1,
        in_stream: settings & 4 != 0,
        parallel_streaming: settings & 8 != 0,
    };
    totality::check_total(data, &context);
});
