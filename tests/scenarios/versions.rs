//! The whole way between major versions: copied while it is written to, every kind of change
//! streamed, a restart, a SIGKILL, and equal at the end.
//!
//! - `FARSHORE_VERSIONS=all` (`make test-versions`): every pair of 14 to 18, and a version that is
//!   not installed is a failure. Else a few pairs, of the versions that are installed.

use anyhow::{Context, Result, bail, ensure};
use farshore_testkit::postgres::Installation;
use farshore_testkit::skip::{skipped, this_test};
use farshore_tests::mixed_tables::{CHANGES, ROWS, SCHEMA, SCHEMAS, TABLES, from_id, run_each};
use farshore_tests::{Direction, Pair};

const MAJORS: [u32; 5] = [14, 15, 16, 17, 18];
/// Each version on each side, and two pairs of one version; from 15 to 18 and back is what all
/// other scenarios do.
const A_FEW: [(u32, u32); 6] = [(14, 17), (15, 15), (16, 18), (17, 14), (18, 16), (18, 18)];

/// The subscribers for one publisher in this run.
fn subscribers(publisher: u32) -> Vec<u32> {
    if std::env::var("FARSHORE_VERSIONS").as_deref() == Ok("all") {
        return MAJORS.to_vec();
    }
    let few = A_FEW.iter().filter(|(from, _)| *from == publisher).map(|(_, to)| *to);
    few.collect()
}

fn from_publisher(publisher: u32) -> Result<()> {
    let all = std::env::var("FARSHORE_VERSIONS").as_deref() == Ok("all");
    let (mut failed, mut missing_all) = (Vec::new(), Vec::new());
    for subscriber in subscribers(publisher) {
        let pair = format!("from {publisher} to {subscriber}");
        let missing =
            [publisher, subscriber].iter().find_map(|major| Installation::find(*major).err());
        let result = match missing {
            Some(error) if all => Err(error),
            Some(error) => {
                println!("left out: {pair}: {error}");
                missing_all.push(pair);
                continue;
            }
            None => end_to_end(Direction { publisher, subscriber }),
        };
        match result {
            Ok(()) => println!("{pair}: equal"),
            Err(error) => failed.push(format!("{pair}: {error:#}")),
        }
    }
    if missing_all.len() == subscribers(publisher).len() {
        skipped(&this_test(), &format!("not installed: {}", missing_all.join(", ")));
    }
    if !failed.is_empty() {
        bail!("{}", failed.join("\n\n"));
    }
    Ok(())
}

fn end_to_end(direction: Direction) -> Result<()> {
    let mut pair = Pair::new(direction, &TABLES, SCHEMA)?;
    pair.publish(&from_id(ROWS, 1_000))?;
    pair.site.add("copy_workers = 2\ncopy_range = \"64KB\"")?;
    pair.site.start()?;
    // From before the consistent point to after the copy.
    run_each(&pair, &from_id(CHANGES, 1_000))?;
    pair.assert_equal(&SCHEMAS).context("copied under writes")?;

    change_everything(&pair, 5_000)?;
    truncate(&pair)?;
    pair.assert_equal(&SCHEMAS).context("streamed")?;
    let streamed = pair.publisher_says(
        "SELECT sum(stream_count) FROM pg_stat_replication_slots WHERE slot_name = 'farshore_p'",
    )?;
    ensure!(streamed != "0", "no transaction was sent before it committed");

    pair.site.restart()?;
    change_everything(&pair, 10_000)?;
    pair.assert_equal(&SCHEMAS).context("after a restart")?;

    change_everything(&pair, 15_000)?;
    pair.site.kill9()?;
    truncate(&pair)?;
    change_everything(&pair, 20_000)?;
    pair.site.start()?;
    pair.assert_equal(&SCHEMAS).context("after a SIGKILL")?;
    pair.site.stop()?;
    Ok(())
}

fn change_everything(pair: &Pair, id: u32) -> Result<()> {
    pair.publish(&from_id(ROWS, id))?;
    run_each(pair, &from_id(CHANGES, id))
}

fn truncate(pair: &Pair) -> Result<()> {
    pair.publish("TRUNCATE events, one_column; TRUNCATE swaps, measured RESTART IDENTITY")
}

#[test]
fn publisher_14() -> Result<()> {
    from_publisher(14)
}

#[test]
fn publisher_15() -> Result<()> {
    from_publisher(15)
}

#[test]
fn publisher_16() -> Result<()> {
    from_publisher(16)
}

#[test]
fn publisher_17() -> Result<()> {
    from_publisher(17)
}

#[test]
fn publisher_18() -> Result<()> {
    from_publisher(18)
}
