//! Mirrors: the principal of a near end, and the room of a far end.

use super::Findings;
use super::publisher::remedy_for;
use crate::config::SiteConfig;
use crate::config::mirrors::{FarMirror, NearMirror};
use crate::control;
use crate::mirrors::{self, HAS_PROMOTED};
use crate::report::MirrorReport;
use farshore_mirror::receive::Promise;
use farshore_model::standby_names;
use farshore_pg::{Connection, Error, Mode, Row};

/// Oldest version that is supported, as `server_version_num` writes it.
const VERSION_MIN: u32 = 140_000;

/// Looks at every mirror that has an end here.
pub async fn check(config: &SiteConfig) -> Vec<super::Finding> {
    let mut all = Vec::new();
    // What its far end told, nothing else here knows. A node that does not answer is told of
    // elsewhere.
    let told = match config.mirrors.near.is_empty() {
        true => Vec::new(),
        false => control::status(&config.data_dir)
            .await
            .ok()
            .flatten()
            .map_or_else(Vec::new, |r| r.mirrors),
    };
    for mirror in &config.mirrors.near {
        let mut findings = Findings::about(format!("mirror \"{}\"", mirror.name));
        if let Some(why) = mirrors::why_dropped(config, &mirror.name) {
            let remedy = format!("farshore mirror resume SITE.toml {}", mirror.name);
            findings.error(why, remedy);
        }
        if let Some((what, remedy)) = promoted(&told, &mirror.name) {
            findings.warning(what, remedy);
        }
        near(config, mirror, &mut findings).await;
        all.append(&mut findings.all);
    }
    for mirror in &config.mirrors.far {
        let mut findings = Findings::about(format!("mirror \"{}\"", mirror.name));
        far(config, mirror, &mut findings);
        all.append(&mut findings.all);
    }
    all
}

/// What the node tells of a mirror whose standby was promoted, and what to do.
fn promoted(told: &[MirrorReport], name: &str) -> Option<(String, String)> {
    let errors = told.iter().filter(|mirror| mirror.name == name).filter_map(|m| m.error.as_ref());
    let error = errors.into_iter().find(|error| error.contains(HAS_PROMOTED))?;
    // Something else may be told before it.
    let sentences: Vec<&str> = error.split(". ").collect();
    let first = sentences.iter().position(|sentence| sentence.contains(HAS_PROMOTED))?;
    let (what, remedy) = (sentences[first], sentences[first + 1..].join(". "));
    Some((what.to_owned(), remedy))
}

async fn near(config: &SiteConfig, mirror: &NearMirror, findings: &mut Findings) {
    // What the mirror itself does first.
    let streaming = async {
        let mut connection =
            Connection::connect(&mirror.principal, Mode::PhysicalReplication).await?;
        let system = connection.identify_system().await?;
        let version = connection.server_version();
        connection.close().await;
        Ok::<_, Error>((system, version))
    };
    match streaming.await {
        Ok((_, version)) if version < VERSION_MIN => {
            findings.error("the principal is older than PostgreSQL 14", "Upgrade it first");
        }
        Ok((system, _)) => findings.note(format!(
            "the principal can be streamed from: system identifier {}, timeline {}",
            system.system_id, system.timeline
        )),
        Err(Error::Connect { .. }) if config.mirrors.streamed_by(mirror).is_some() => {
            findings.note(
                "the principal is a mirror of this site, whose log can be streamed once the node \
                 runs",
            );
            return;
        }
        Err(error) => {
            let remedy = match error.sqlstate() {
                Some("28000" | "42501") => {
                    "The role needs LOGIN and REPLICATION, and pg_hba.conf a \
                     line that lets it in for the database \"replication\""
                        .to_owned()
                }
                _ => remedy_for(&error, "principal"),
            };
            let what = format!("the principal cannot be streamed from: {error}");
            findings.passing_error(what, remedy);
            return;
        }
    }
    let asked = async {
        let mut connection = Connection::connect(&mirror.principal, Mode::Sql).await?;
        let row = ask(&mut connection, mirror).await?;
        connection.close().await;
        Ok::<_, Error>(row)
    };
    match asked.await {
        Ok(Some(row)) => judge(mirror, &row, findings),
        Ok(None) => {}
        // Another mirror's server for standbys, for instance.
        Err(error) => {
            findings.note(format!(
                "the principal's settings cannot be looked at: {error}. Log can be streamed all the \
                 same"
            ));
            look_at_bounds(mirror, findings).await;
        }
    }
}

/// Whether they hold without SQL.
async fn look_at_bounds(mirror: &NearMirror, findings: &mut Findings) {
    let Err(error) = mirrors::kept_bytes(&mirror.principal, &mirror.slot).await else { return };
    let what = "how much log the principal keeps for it cannot be looked at";
    let remedy = format!("For this, {}", mirrors::LET_LOOK);
    match mirror.drop_behind {
        Some(_) => findings.error(format!("{what}, so drop_behind does nothing: {error}"), remedy),
        None => findings.warning(format!("{what}, so warn_behind does nothing: {error}"), remedy),
    }
}

async fn ask(connection: &mut Connection, mirror: &NearMirror) -> Result<Option<Row>, Error> {
    let sql = "SELECT current_setting('wal_level'), \
               current_setting('max_wal_senders')::int - (SELECT count(*) FROM pg_stat_replication), \
               current_setting('max_replication_slots')::int \
                 - (SELECT count(*) FROM pg_replication_slots), \
               (SELECT wal_status FROM pg_replication_slots WHERE slot_name = $1), \
               (SELECT active FROM pg_replication_slots WHERE slot_name = $1), \
               current_setting('max_slot_wal_keep_size') = '-1', \
               current_setting('synchronous_standby_names'), \
               (SELECT count(*) FROM pg_stat_replication \
                WHERE lower(application_name) = lower($2)), \
               current_setting('full_page_writes')";
    let parameters = [Some(mirror.slot.as_str()), Some(mirror.application_name.as_str())];
    Ok(connection.query(sql, &parameters).await?.into_iter().next())
}

fn judge(mirror: &NearMirror, row: &Row, findings: &mut Findings) {
    let text = |column| row.get(column).unwrap_or_default();
    let number = |column| text(column).parse::<i64>().unwrap_or(0);
    let slot = row.get(3);
    let is_active = text(4) == "t";
    if text(0) == "minimal" {
        findings.error(
            "wal_level is minimal: nothing can be streamed",
            "ALTER SYSTEM SET wal_level = 'replica'; then restart the principal",
        );
    }
    if number(1) <= 0 && !is_active {
        findings.error("no walsender is free", "Raise max_wal_senders, and restart the principal");
    }
    match slot {
        None if number(2) <= 0 => findings.error(
            "no replication slot is free",
            "Raise max_replication_slots, and restart the principal",
        ),
        Some("lost") => findings.error(
            format!("the slot \"{}\" has lost log that the far end needs", mirror.slot),
            "Drop it, stop the far site's node, remove the spool there, start it, and seed the \
             standbys anew",
        ),
        None | Some(_) => {}
    }
    match mirror.drop_behind {
        None if text(5) == "t" => findings.warning(
            "while the far end is away the principal keeps log for it without bound",
            "Set drop_behind under this mirror, or max_slot_wal_keep_size on the principal",
        ),
        Some(_) if text(5) == "t" => findings.warning(
            "drop_behind holds only while this node runs: without it the principal keeps all log for \
             the slot, since its max_slot_wal_keep_size is -1",
            "Set max_slot_wal_keep_size on the principal, above drop_behind",
        ),
        None | Some(_) => {}
    }
    if number(7) > i64::from(is_active) {
        findings.error(
            format!(
                "another standby of the principal is called \"{}\" too: \
                 synchronous_standby_names takes the two for one",
                mirror.application_name
            ),
            "Set application_name under this mirror, or give the other one another",
        );
    }
    let is_named = standby_names::includes(text(6), &mirror.application_name);
    match (mirror.promise, is_named) {
        (Promise::Async, true) => findings.warning(
            "mode is async, and synchronous_standby_names names it: commits wait up to a second",
            "Set another mode, or take it out of synchronous_standby_names",
        ),
        (Promise::Far | Promise::FarSync | Promise::FarApplied, false) => findings.note(format!(
            "no commit waits for it: synchronous_standby_names does not name \"{}\"",
            mirror.application_name
        )),
        _ => {}
    }
    if let (true, (waited_for, named)) = (is_named, standby_names::awaited(text(6)))
        && waited_for < named
        && mirror.promise != Promise::Async
    {
        findings.note(format!(
            "commits wait for {waited_for} of the {named} that synchronous_standby_names names: what \
             another one acknowledged may be missing here. Promote the one whose `durable` is \
             furthest (farshore status, at each far site)"
        ));
    }
    if text(8) == "off" {
        findings.warning(
            "full_page_writes is off: a standby whose machine fails may have torn pages",
            "ALTER SYSTEM SET full_page_writes = on",
        );
    }
}

fn far(config: &SiteConfig, mirror: &FarMirror, findings: &mut Findings) {
    match mirror.access.check() {
        Err(what) => findings.error(
            format!("standbys cannot be let in: {what}"),
            "Until then nobody can connect; log is taken in all the same",
        ),
        Ok(true) => findings.note("standbys are asked for a password, and can bind it to TLS"),
        Ok(false) if mirror.access.password.is_some() => findings.note(
            "standbys are asked for a password; there is no channel binding for it (no \
             certificate, or one whose signature defines no hash)",
        ),
        // As it has always been, and right on a machine of one's own.
        Ok(false) => findings.note(format!(
            "standbys are not asked for a password: every user of this machine can connect to {} \
             and read the log (standby_password = \"FILE\" asks them)",
            mirror.listen
        )),
    }
    let folder = config.data_dir.ancestors().find(|folder| folder.exists());
    let Some(disk) = folder.and_then(|folder| rustix::fs::statvfs(folder).ok()) else { return };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    let wanted = mirror.spool_bytes_max;
    let megabytes = |bytes: u64| bytes >> 20;
    if free < wanted {
        findings.warning(
            format!(
                "{} MB are free under data_dir, and spool_size allows {} MB",
                megabytes(free),
                megabytes(wanted)
            ),
            "Lower spool_size, or point data_dir at a larger disk. A full disk holds up commits \
             that wait for this mirror",
        );
    } else {
        findings.note(format!("{} MB are free for the spool", megabytes(free)));
    }
    if mirror.standby.is_none() {
        findings.note("mirror promote needs --standby: no standby is named here");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_node_tells_of_a_promotion_is_taken_apart() {
        let told = |error: Option<&str>| {
            let report = MirrorReport {
                name: "dr".into(),
                error: error.map(str::to_owned),
                ..MirrorReport::default()
            };
            promoted(&[report], "dr")
        };
        assert_eq!(told(None), None);
        assert_eq!(told(Some("the principal keeps 3 GB for it")), None);
        let error = format!(
            "the principal keeps 3 GB for it. site \"far\" {HAS_PROMOTED}, or is about to: nothing \
             more is carried. Take it out; and drop the slot"
        );
        let (what, remedy) = told(Some(&error)).unwrap();
        assert!(what.starts_with("site \"far\" has promoted") && what.ends_with("carried"));
        assert_eq!(remedy, "Take it out; and drop the slot");
    }
}
