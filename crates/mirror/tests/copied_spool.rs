//! A far end whose machine was copied: of the two, only one goes on with the mirror.

mod running;

use anyhow::{Context, Result, bail, ensure};
use farshore_mirror::MirrorError;
use farshore_mirror::keep::Far;
use farshore_mirror::receive::Promise;
use farshore_testkit::postgres::{Cluster, Installation, copy_tree};
use farshore_testkit::wait::wait_until;
use running::{LONG, Mirror, NAME, flush_position};

const RESUME: &str = "farshore mirror resume SITE.toml m";

fn write(principal: &Cluster) -> Result<()> {
    principal.execute_script("INSERT INTO t SELECT FROM generate_series(1, 1000)")
}

/// Asks for log until it has all that the principal has flushed by now.
fn follows(mirror: &Mirror, far: &Far, principal: &Cluster) -> Result<Result<(), MirrorError>> {
    let end = flush_position(principal)?;
    let kept = async {
        let spool = far.spool().context("no spool")?;
        let mut positions = spool.positions();
        tokio::select! {
            kept = mirror.keep(far) => Ok(kept),
            reached = positions.wait_for(|positions| positions.durable.0 >= end) => {
                reached.context("the spool ended")?;
                Ok(Ok(()))
            }
        }
    };
    mirror.block_on(async { tokio::time::timeout(LONG, kept).await })?
}

#[test]
fn of_two_copies_the_second_to_come_is_refused() -> Result<()> {
    let principal = Cluster::builder(&Installation::find(18)?)
        .setting("wal_level", "replica")
        .setting("wal_keep_size", "512MB")
        .start()?;
    principal.execute_script("CREATE TABLE t ()")?;
    let mut mirror = Mirror::start(&principal.url("postgres"), Promise::Far)?;
    mirror.caught_up(&principal)?;
    mirror.disconnect_far();
    let folder = mirror.folder.path().join("copy");
    copy_tree(&mirror.spool_folder(), &folder)?;
    let copy = Far::open(NAME, folder)?;

    // The one that was there goes on, which nobody knows of the copy.
    write(&principal)?;
    mirror.connect_far();
    mirror.caught_up(&principal)?;
    mirror.disconnect_far();
    write(&principal)?;
    for _ in 0..2 {
        let refused = match follows(&mirror, &copy, &principal)? {
            Err(MirrorError::Refused { why, passes: false, .. }) => why,
            other => bail!("a copy of the far end was given log: {other:?}"),
        };
        ensure!(refused.contains("is a copy") && refused.contains(RESUME), "{refused}");
    }
    follows(&mirror, &mirror.far, &principal)??;

    // On an operator's word the copy goes on, and the other one does not.
    ensure!(follows(&mirror, &copy, &principal)?.is_err());
    ensure!(mirror.near.turns.take_any().map_err(anyhow::Error::msg)?);
    write(&principal)?;
    follows(&mirror, &copy, &principal)??;
    mirror.connect_far();
    let said = wait_until("the other one to be refused", LONG, &[], || Ok(mirror.said()))?;
    ensure!(said.contains(RESUME), "{said}");
    Ok(())
}
