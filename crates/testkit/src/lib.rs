//! What whole-system tests, the demo and the benchmarks stand on: throwaway PostgreSQL clusters,
//! the product run as a process that can be killed, proofs that two databases are equal, the
//! checker of the promise that a subscriber only ever shows prefixes of the publisher's commits, and
//! the checker of the promise that a mirror loses no commit that a client saw return.
//!
//! Nothing here depends on a product crate: SQL goes through the independent `postgres` crate and
//! the publisher's commit order is read with PostgreSQL's own `test_decoding`.
//!
//! | module | what it gives |
//! | --- | --- |
//! | [`postgres`] | find an installation, start, kill and measure a private cluster |
//! | [`process`] | build and run `farshore`, kill it, read its log and its costs |
//! | [`checksum`] | the servers themselves prove tables equal |
//! | [`prefix`] | workload, oracle, samplers and checker of the prefix guarantee |
//! | [`serializability`] | clients that go on at another server, and the checker of what they saw |
//! | [`chaos`] | a seeded schedule of kills among farshore, publisher and subscriber |
//! | [`wait`] | bounded waiting for a condition, with the last lines of logs on timeout |
//! | [`skip`] | tests that do nothing here are counted |
//! | [`thread`] | threads that are waited for, and not for ever |
//! | [`wan`] | two networks and a long line between them: delay, rate, loss, cuts, flipped bits |
//! | [`interrupt`] | Ctrl-C ends a long run in order |
//! | [`child`], [`port`], [`proc_fs`] | the operating-system pieces under them |

pub mod chaos;
pub mod checksum;
pub mod child;
pub mod interrupt;
pub mod port;
pub mod postgres;
pub mod prefix;
pub mod proc_fs;
pub mod process;
pub mod serializability;
pub mod skip;
pub mod thread;
pub mod wait;
pub mod wan;

/// The seed of a randomised test: the environment variable `FARSHORE_SEED`, else from the clock.
/// Print it, so that a failure can be replayed.
pub fn seed() -> u64 {
    if let Ok(text) = std::env::var("FARSHORE_SEED") {
        match text.parse() {
            Ok(seed) => return seed,
            Err(_) => eprintln!("FARSHORE_SEED={text} is no number: taking one from the clock"),
        }
    }
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64 % 1_000_000_000)
}
