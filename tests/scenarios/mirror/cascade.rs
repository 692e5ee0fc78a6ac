//! A standby behind the mirror's standby.

use crate::mirrored::{LONG, Mirrored, SLOT};
use crate::promotion::{check_rows, promote};
use anyhow::{Result, ensure};
use farshore_testkit::wait::wait_until;
use farshore_tests::Site;

#[test]
fn a_standby_behind_the_mirrors_standby_follows_it_through_a_promotion() -> Result<()> {
    let mut mirrored = Mirrored::start_idle(15, "far", None, Site::named("far")?)?;
    let conninfo = format!(
        "host=127.0.0.1 port={} user=postgres application_name=behind",
        mirrored.standby.port()
    );
    let settings = [
        ("primary_conninfo", conninfo.as_str()),
        ("primary_slot_name", ""),
        ("wal_retrieve_retry_interval", "100ms"),
    ];
    // Copied from the principal, as the first one was.
    mirrored.principal.execute_script("SELECT pg_drop_replication_slot('standby')")?;
    let behind = mirrored.principal.standby(&settings, &[SLOT])?;
    mirrored.start_clients()?;
    mirrored.await_commits(20)?;
    let returned = mirrored.lose_the_principal()?;
    let promoted = promote(&mirrored, &mirrored.standby, &[])?;
    ensure!(promoted.code == Some(0), "{promoted:?}");
    mirrored.standby.execute_script("INSERT INTO t VALUES (100, 1)")?;
    wait_until("the new timeline to get there", LONG, &[&behind.log_path()], || {
        let row = behind.connect()?.query_opt("SELECT FROM t WHERE client = 100", &[])?;
        Ok(row.map(drop))
    })?;
    check_rows(&behind, &returned)
}
