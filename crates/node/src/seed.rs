//! `farshore mirror seed`: the data directory of a new standby, made by who calls it. The node that
//! runs keeps the log for it, and need not be allowed to write there.

use crate::config::SiteConfig;
use crate::config::mirrors::FarMirror;
use crate::control::{self, Asked, Request, ask};
use crate::mirrors::{NearAgent, NearSide};
use crate::report::MirrorReport;
use crate::sites::{self, protocol::Wanted};
use farshore_link::Identity;
use farshore_mirror::seed::{Progress, SeedRequest, Seeded, Take};
use farshore_model::Lsn;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// A node that is being started answers within this time.
const NODE_WITHIN: Duration = Duration::from_secs(5);
/// How often it is asked until then.
const ASK_AGAIN: Duration = Duration::from_millis(100);
/// A spool follows its principal to another timeline within this time, or is kept from it.
const FOLLOWS_WITHIN: Duration = Duration::from_secs(10);

/// Who may talk to the node and write for another user.
const WHO_MAY_SEED: &str = "root, on a directory that belongs to the standby's user (install -d -o \
     postgres -g postgres -m 0700 PGDATA): what is written there is given to that user";

/// What is wanted, as typed.
#[derive(Clone, Debug)]
pub struct SeedOptions {
    /// Which mirror.
    pub mirror: String,
    /// The data directory to be.
    pub pgdata: PathBuf,
    /// The slot in the spool; `standby_` and the mirror's name by default.
    pub slot: Option<String>,
    /// At most so many kilobytes per second are read from the principal.
    pub max_rate_kb: Option<u32>,
    /// A data directory of the same cluster may be written over.
    pub overwrite: bool,
    /// Directories of tablespaces: as on the principal, and here.
    pub tablespaces: Vec<(PathBuf, PathBuf)>,
}

/// The node keeps log for a standby.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Reserved {
    /// The cluster whose log it is.
    pub system_id: String,
    /// From here on.
    pub kept_from: u64,
    /// The spool's timeline.
    pub timeline: u32,
    /// Why the mirror takes nothing in, where it does not.
    pub trouble: Option<String>,
}

/// Makes the data directory, and says how far it is on `progress`. What it gives is for a person.
///
/// # Errors
/// Why not, for a person.
pub async fn seed(
    config: &SiteConfig,
    options: &SeedOptions,
    progress: &watch::Sender<Progress>,
) -> Result<String, String> {
    let name = &options.mirror;
    let mirror = config.mirrors.far.iter().find(|mirror| mirror.name == *name);
    let mirror = mirror.ok_or_else(|| {
        format!("the site file has no far end of a mirror \"{name}\": run this at its far site")
    })?;
    // Before a slot is made, which keeps log from then on.
    mirror.access.check()?;
    farshore_mirror::seed::look(&options.pgdata, options.overwrite).map_err(|e| e.to_string())?;
    let slot = options.slot.clone();
    let slot = slot.unwrap_or_else(|| format!("standby_{}", name.replace('-', "_")));
    let reserved = reserve(config, name, &slot).await?;
    take(config, options, mirror, &slot, reserved, progress).await.map_err(|why| {
        format!(
            "{why}. The spool keeps log for the slot \"{slot}\" until this is run again. If it is \
             given up: farshore mirror drop-slot SITE.toml {name} {slot}"
        )
    })
}

/// Has the node keep log for the slot; it may be asked again.
async fn reserve(config: &SiteConfig, mirror: &str, slot: &str) -> Result<Reserved, String> {
    let request = Request::Reserve { mirror: mirror.to_owned(), slot: slot.to_owned() };
    match ask_soon(config, &request).await {
        Ok(Asked::Done(text)) => serde_json::from_str(&text)
            .map_err(|error| format!("the node answered what cannot be read ({error})")),
        Ok(Asked::Refused(why)) => Err(why),
        Ok(Asked::NotRunning) => {
            Err("no node runs here: start it (farshore run), so that the log \
                                      that the standby needs is kept from now on"
                .to_owned())
        }
        Err(error) => Err(control::cannot_ask(&config.data_dir, &error, WHO_MAY_SEED)),
    }
}

/// Whether the spool takes in the log of the files' timeline. A principal that was promoted a moment
/// ago is followed soon, if it is at all.
async fn follows(
    config: &SiteConfig,
    (mirror, slot): (&str, &str),
    timeline: u32,
) -> Result<(), String> {
    let begun = tokio::time::Instant::now();
    loop {
        let Reserved { timeline: spools, trouble, .. } = reserve(config, mirror, slot).await?;
        if spools == timeline {
            return Ok(());
        }
        if begun.elapsed() >= FOLLOWS_WITHIN {
            let trouble = trouble.map(|why| format!(" ({why})")).unwrap_or_default();
            return Err(format!(
                "the principal is on timeline {timeline}, and the spool of mirror \"{mirror}\" on \
                 {spools}{trouble}: a standby made of these files would find no log there. Nothing was \
                 written over. See to the mirror first: farshore status says how it is"
            ));
        }
        tokio::time::sleep(ASK_AGAIN).await;
    }
}

async fn take(
    config: &SiteConfig,
    options: &SeedOptions,
    mirror: &FarMirror,
    slot: &str,
    reserved: Reserved,
    progress: &watch::Sender<Progress>,
) -> Result<String, String> {
    let take = Take {
        pgdata: options.pgdata.clone(),
        overwrite: options.overwrite,
        tablespaces: options.tablespaces.clone(),
        system_id: reserved.system_id,
        kept_from: Lsn(reserved.kept_from),
        conninfo: conninfo(mirror, slot)?,
        slot: slot.to_owned(),
    };
    let request = SeedRequest {
        mirror: options.mirror.clone(),
        max_rate_kb: options.max_rate_kb,
        slot: Some(slot.to_owned()),
    };
    let near_side = near_side(config, mirror)?;
    let names = (options.mirror.as_str(), slot);
    let follows = async |timeline| follows(config, names, timeline).await;
    let run = |session| take.run(session, follows, progress);
    let seeded = near_side.talk(Wanted::Seed(request), run).await;
    let seeded = seeded.map_err(|error| error.to_string())?.map_err(|error| error.to_string())?;
    let kept = still_kept(config, options, slot, (seeded.start, seeded.end)).await?;
    Ok(format!("{}{kept}", said(&seeded, options, slot)))
}

/// `primary_conninfo` of a standby on this machine. As `pg_basebackup -R` does, it writes the
/// password down, into a file that others than its owner read only where they read the data.
fn conninfo(mirror: &FarMirror, slot: &str) -> Result<String, String> {
    let (host, port) = mirror.listen.rsplit_once(':').unwrap_or((&mirror.listen, "5432"));
    let host = match host.trim_matches(['[', ']']) {
        "0.0.0.0" => "127.0.0.1",
        "::" => "::1",
        host => host,
    };
    let mut text = format!("host={host} port={port} user=standby application_name={slot}");
    if mirror.access.check()? {
        // Nobody who takes this address while the node is down is told the password.
        text.push_str(" sslmode=require channel_binding=require");
    }
    if let Some(password) = mirror.access.read_password()? {
        let quoted = password.replace('\\', "\\\\").replace('\'', "\\'");
        text.push_str(&format!(" password='{quoted}'"));
    }
    Ok(text)
}

fn near_side(config: &SiteConfig, mirror: &FarMirror) -> Result<NearSide, String> {
    let Some(upstream) = &mirror.upstream else {
        let near = config.mirrors.near.iter().find(|near| near.name == mirror.name);
        let near = near.ok_or_else(|| format!("mirror \"{}\" has no near end", mirror.name))?;
        let near = Arc::new(NearAgent::new(near, &config.data_dir));
        return Ok(NearSide::Direct { near, site: config.name.clone() });
    };
    let identity = config.sites.identity.as_ref().map(Identity::load).transpose();
    let identity = identity.map_err(|error| error.to_string())?;
    let dialer = identity.as_ref().map(|own| sites::dialer(&config.sites, upstream, own));
    let dialer = dialer.transpose().map_err(|error| error.to_string())?.flatten();
    dialer.map(NearSide::Link).ok_or_else(|| config.sites.unknown_upstream(upstream))
}

/// A slot that kept too much while the files came is lost, and with it what the standby needs; and a
/// mirror that has stopped does not bring the log up to where it can be read. Gives a word on it if
/// nobody can tell.
async fn still_kept(
    config: &SiteConfig,
    options: &SeedOptions,
    slot: &str,
    needs: (Lsn, Lsn),
) -> Result<String, String> {
    let report = match control::status(&config.data_dir).await {
        Ok(Some(report)) => report,
        Ok(None) | Err(_) => {
            let word = ". The node does not answer any more: whether the slot is still there shows \
                        in farshore status once it runs";
            return Ok(word.to_owned());
        }
    };
    let mirror = report.mirrors.iter().find(|m| m.name == options.mirror && m.end == "far");
    match lacks(mirror, slot, needs) {
        None => Ok(String::new()),
        Some(why) => Err(format!(
            "{} has all its files, but {why}, and run this again with --overwrite: files that are \
             still the same are not sent again",
            options.pgdata.display()
        )),
    }
}

/// What a standby that needs the log from `start` on, and up to `end` before it can be read, will not
/// have from this mirror, and what to do.
fn lacks(mirror: Option<&MirrorReport>, slot: &str, (start, end): (Lsn, Lsn)) -> Option<String> {
    let kept = mirror.and_then(|mirror| mirror.slots.iter().find(|kept| kept.name == slot));
    let restart = kept.and_then(|kept| kept.restart.as_deref()?.parse::<Lsn>().ok());
    let why = match (kept, restart) {
        (Some(_), Some(restart)) if restart <= start => {
            let stopped = mirror.filter(|mirror| mirror.state == "stopped")?;
            let has_all = stopped.durable.parse().is_ok_and(|durable: Lsn| durable >= end);
            return (!has_all).then(|| {
                format!(
                    "needs the log up to {end} before it can be read, and the spool ends at {}: the \
                     mirror has stopped ({}). See to that first (farshore status)",
                    stopped.durable,
                    stopped.error.as_deref().unwrap_or("farshore status says why")
                )
            });
        }
        (Some(kept), _) if kept.lost => {
            "the slot kept more than drop_behind meanwhile, and was lost. Raise drop_behind"
        }
        (Some(_), _) => "the slot has moved on: another standby uses it. Name another with --slot",
        (None, _) => "the slot was dropped meanwhile. Leave it alone",
    };
    Some(format!("needs the log from {start} on, and the spool may let it go: {why}"))
}

/// A node that was started a moment ago answers soon.
async fn ask_soon(config: &SiteConfig, request: &Request) -> std::io::Result<Asked> {
    let begun = tokio::time::Instant::now();
    loop {
        match ask(&config.data_dir, request, |_| Ok(())).await {
            Ok(Asked::NotRunning) if begun.elapsed() < NODE_WITHIN => {
                tokio::time::sleep(ASK_AGAIN).await;
            }
            asked => return asked,
        }
    }
}

fn said(seeded: &Seeded, options: &SeedOptions, slot: &str) -> String {
    let Seeded { start, end, files, progress } = seeded;
    format!(
        "{} is a standby of mirror \"{}\": {files} files, {} bytes, each checked against the \
         principal's manifest; {} bytes on the link, {} bytes were here already. It needs the log \
         from {start} on, which the spool keeps for slot \"{slot}\", and can be read once it has \
         replayed up to {end}. Its synchronous_standby_names is empty, whatever the principal waits \
         for. Start it: pg_ctl -D {} start",
        options.pgdata.display(),
        options.mirror,
        progress.done,
        progress.packed,
        progress.same,
        options.pgdata.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::SlotReport;

    #[test]
    fn what_a_standby_will_not_have_is_told() {
        let slot = |restart: Option<&str>, lost| SlotReport {
            name: "s".to_owned(),
            restart: restart.map(str::to_owned),
            lost,
            ..SlotReport::default()
        };
        let mirror = |state: &str, durable: &str, slot: SlotReport| MirrorReport {
            state: state.to_owned(),
            error: Some("another log".to_owned()),
            durable: durable.to_owned(),
            slots: vec![slot],
            ..MirrorReport::default()
        };
        let lacks = |mirror: MirrorReport| lacks(Some(&mirror), "s", (Lsn(0x20), Lsn(0x30)));
        let kept = || slot(Some("0/10"), false);
        assert_eq!(lacks(mirror("receiving", "0/25", kept())), None);
        assert_eq!(lacks(mirror("stopped", "0/30", kept())), None);
        let told = lacks(mirror("stopped", "0/25", kept())).unwrap();
        assert!(told.contains("up to 0/30") && told.contains("another log"), "{told}");
        for (slot, what) in [
            (slot(Some("0/21"), false), "moved on"),
            (slot(None, true), "drop_behind"),
            (SlotReport::default(), "dropped meanwhile"),
        ] {
            let told = lacks(mirror("receiving", "0/40", slot)).unwrap();
            assert!(told.contains("may let it go") && told.contains(what), "{told}");
        }
    }
}
