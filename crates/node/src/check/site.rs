//! The data folder.

use super::{Findings, Severity};
use crate::config::{SiteConfig, secrets};
use crate::{control, mirrors};
use farshore_capture::publication::PublicationSpec;
use farshore_capture::slot::{self, Begun};
use farshore_capture::taken_out;
use farshore_monitor::Settings;
use farshore_pg::Connection;
use farshore_store::segmented::read_notes;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

/// Longest path of a Unix socket, in bytes: `sun_path` (unix(7)) and its end.
const SOCKET_PATH_MAX: usize = 107;

/// Less free space than this is worth a word, in bytes.
const FREE_MIN: u64 = 1 << 30;

/// What this site has done with the publication's slot before.
pub fn begun(config: &SiteConfig, publication: &str, findings: &mut Findings) -> Begun {
    let folder = config.data_dir.join("publications").join(publication);
    match read_notes(&folder) {
        Ok(notes) => {
            let note = |key: &str| notes.get(key).cloned();
            let own = config.publication(publication);
            if let Some(lost) = own.and_then(|own| slot::noted_loss(&own.spec, note)) {
                findings.agent_error(&lost, false);
            }
            slot::begun(note)
        }
        Err(error) => {
            findings.agent_error(&error, false);
            Begun::Making
        }
    }
}

/// Warns of tables that are out of an adopted publication, as the node noted.
pub async fn check_taken_out(
    config: &SiteConfig,
    spec: &PublicationSpec,
    sql: &mut Connection,
    findings: &mut Findings,
) {
    let folder = config.data_dir.join("publications").join(&spec.name);
    // That they cannot be read is told elsewhere.
    let Ok(notes) = read_notes(&folder) else { return };
    match taken_out::told(spec, sql, |key| notes.get(key).cloned()).await {
        Ok(told) => {
            for out in told {
                findings.warning(out.what, out.remedy);
            }
        }
        Err(error) => findings.cannot_look("publisher", &error, error.is_transient()),
    }
}

/// Looks at the folder and the disk that it is on. `published_bytes` are in the published tables of
/// publishers that answer, where that could be seen.
pub fn check(config: &SiteConfig, published_bytes: Option<u64>, findings: &mut Findings) {
    let folder = &config.data_dir;
    let present = nearest_present(folder);
    if !present.is_dir() {
        findings.error(
            format!(
                "data_dir {} cannot be made: {} is not a folder",
                folder.display(),
                present.display()
            ),
            "Correct data_dir in the site file",
        );
        return;
    }
    if let Err(error) = rustix::fs::access(&present, rustix::fs::Access::WRITE_OK) {
        let (what, remedy) = not_writable(folder, &present, &error);
        findings.error(what, remedy);
        return;
    }
    let is_open =
        std::fs::metadata(folder).is_ok_and(|found| found.permissions().mode() & 0o007 != 0);
    if is_open {
        findings.note(format!(
            "every user of this machine may enter data_dir {0}. What a node writes there from now on \
             is closed to them; files of earlier versions are not (chmod -R o-rwx {0})",
            folder.display()
        ));
    }
    let socket = control::socket_path(folder);
    if socket.as_os_str().len() > SOCKET_PATH_MAX {
        findings.error(
            format!(
                "data_dir {} is too long: a node listens at {}, and a Unix socket's path has {} bytes \
                 at most",
                folder.display(),
                socket.display(),
                SOCKET_PATH_MAX
            ),
            "Give data_dir a shorter path, or a symbolic link to it",
        );
    }
    check_left_behind(config, findings);
    check_received_before(config, findings);
    check_ports(config, findings);
    if let Some(Err(error)) = config.monitor.as_ref().map(Settings::check_files) {
        findings.warning(
            format!("there will be no monitor: {error}"),
            "Correct [site] monitor_token, monitor_certificate or monitor_key, or the file",
        );
    }
    for open in secrets::open_to_all(&config.secret_files) {
        findings.warning(open.what, open.remedy);
    }
    for left in mirrors::left_behind(config) {
        findings.warning(left.what, left.remedy);
    }
    let Ok(disk) = rustix::fs::statvfs(&present) else { return };
    let free = disk.f_bavail.saturating_mul(disk.f_frsize);
    let room = format!("{} are free under data_dir {}", bytes(free), folder.display());
    let own = config.publications.iter().map(|p| &p.log);
    let received = config.sites.received.iter();
    let received = received.filter_map(|r| config.sites.upstream(&r.upstream)).map(|up| &up.log);
    let logs: Vec<_> = own.chain(received).collect();
    let limits: Vec<u64> = logs.iter().filter_map(|log| log.retention.bytes_max).collect();
    let wanted: u64 = limits.iter().sum();
    if free < FREE_MIN {
        findings.warning(
            format!("only {room}: a subscriber that is away fills that soon, and a full disk stops capture"),
            "Make room, or point data_dir at a larger disk",
        );
    } else if wanted > free {
        findings.warning(
            format!("{room}, and retention_size allows {}", bytes(wanted)),
            "Lower retention_size, or point data_dir at a larger disk",
        );
    } else {
        let published = match published_bytes {
            Some(published_bytes) => format!("published tables hold {}", bytes(published_bytes)),
            None => "how much published tables hold could not be seen (as said above, or they are \
                     another site's, or a session has one of them locked: check again later)"
                .to_owned(),
        };
        findings.note(format!(
            "{room}; {published}; whether the targets' disks have room for that cannot be seen from \
             here"
        ));
    }
    if limits.len() < logs.len() {
        findings.note(
            "without retention_size a subscriber that stays away fills the disk under data_dir",
        );
    }
}

/// A data folder that this user may not write, or may not make where `present` ends, and what to do.
fn not_writable(folder: &Path, present: &Path, error: &dyn std::fmt::Display) -> (String, String) {
    // Behind a folder that this user may not enter it may be there, and another's.
    let (is_there, folder) = (folder.try_exists(), folder.display());
    if let Err(hidden) = is_there {
        return (
            format!("this user cannot see whether data_dir {folder} is there: {hidden}"),
            "Ask as the user that the node runs as (sudo -u …), or correct data_dir in the site file"
                .to_owned(),
        );
    }
    if is_there.is_ok_and(|is_there| is_there) {
        let what = format!("data_dir {folder} cannot be written: {error}");
        return (what, format!("Correct data_dir in the site file, or give this user {folder}"));
    }
    // What is above it belongs to others, and stays theirs.
    let user = std::fs::metadata("/proc/self").map_or("USER".to_owned(), |me| me.uid().to_string());
    (
        format!(
            "data_dir {folder} is not there, and this user may not make it in {}: {error}",
            present.display()
        ),
        format!(
            "Correct data_dir in the site file, or make it as root: install -d -o {user} -m 0700 \
             {folder} (a service's StateDirectory is made when that first starts)"
        ),
    )
}

/// Addresses that cannot be listened on. While this site's own node runs, it does.
fn check_ports(config: &SiteConfig, findings: &mut Findings) {
    if UnixStream::connect(control::socket_path(&config.data_dir)).is_ok() {
        return;
    }
    if let Some(address) = &config.sites.listen
        && let Some(refusal) = refusal(address)
    {
        refusal.tell(findings, &format!("[site] listen: {address}"), "", Severity::Error);
    }
    if let Some(monitor) = &config.monitor
        && let Some(refusal) = refusal(&monitor.address.to_string())
    {
        let what = format!("[site] monitor: {}", monitor.address);
        refusal.tell(findings, &what, ", so there will be no monitor", Severity::Warning);
    }
    for mirror in &config.mirrors.far {
        if let Some(refusal) = refusal(&mirror.listen) {
            let what = format!("[mirror.{}] listen: {}", mirror.name, mirror.listen);
            refusal.tell(findings, &what, ", so no standby could connect", Severity::Error);
        }
    }
}

/// Why an address cannot be listened on.
struct Refusal {
    is_in_use: bool,
    is_of_rights: bool,
    error: std::io::Error,
}

fn refusal(address: &str) -> Option<Refusal> {
    let error = TcpListener::bind(address).err()?;
    let is = |kind| error.kind() == kind;
    let (is_in_use, is_of_rights) = (is(ErrorKind::AddrInUse), is(ErrorKind::PermissionDenied));
    Some(Refusal { is_in_use, is_of_rights, error })
}

impl Refusal {
    fn tell(&self, findings: &mut Findings, what: &str, so: &str, severity: Severity) {
        let error = &self.error;
        let (what, severity, remedy) = if self.is_in_use {
            (
                format!("{what} is in use{so}: {error}"),
                severity,
                "Stop what listens there (ss -ltnp shows it), or choose another address",
            )
        } else if self.is_of_rights {
            (
                format!("{what} cannot be listened on by this user: {error}"),
                // The node may run as another one.
                Severity::Warning,
                "Let the node's user do so (for a service: AmbientCapabilities=CAP_NET_BIND_SERVICE), \
                 or choose a port above 1023",
            )
        } else {
            (
                format!("{what} cannot be listened on{so}: {error}"),
                severity,
                "Choose an address of this machine (ip address shows them)",
            )
        };
        findings.add(severity, what, Some(remedy.to_owned()));
    }
}

/// Folders of logs of publications that the site file does not name any more: name, folder, and the
/// slot that fed it.
fn left_behind(config: &SiteConfig) -> Vec<(String, PathBuf, String)> {
    let folders = std::fs::read_dir(config.data_dir.join("publications"));
    let folders = folders.into_iter().flatten().flatten();
    let left = folders.filter_map(|folder| {
        let name = folder.file_name().into_string().ok()?;
        if config.publication(&name).is_some() {
            return None;
        }
        let notes = read_notes(&folder.path()).unwrap_or_default();
        let slot = slot::noted_slot(|key| notes.get(key).cloned())?;
        Some((name, folder.path(), slot))
    });
    left.collect()
}

/// The slots that publications of the site file name, or that a log here is told of as left behind.
pub fn known_slots(config: &SiteConfig) -> BTreeSet<String> {
    let named = config.publications.iter().map(|publication| publication.spec.slot_name());
    named.chain(left_behind(config).into_iter().map(|(_, _, slot)| slot)).collect()
}

/// Logs of publications that the site file does not name any more: their slots keep the publisher's
/// log for nobody.
fn check_left_behind(config: &SiteConfig, findings: &mut Findings) {
    for (name, folder, slot) in left_behind(config) {
        findings.warning(
            format!(
                "data_dir holds the log of publication \"{name}\", which the site file does not \
                 name: its slot \"{slot}\" keeps the log of its publisher, without bound"
            ),
            format!(
                "Name it again; or, on its publisher, SELECT pg_drop_replication_slot('{slot}'), and \
                 remove {}",
                folder.display()
            ),
        );
    }
}

/// Logs that were received from another site, and that nothing in the site file follows any more:
/// that site, which nobody tells, keeps its log for this one.
fn check_received_before(config: &SiteConfig, findings: &mut Findings) {
    let folders = std::fs::read_dir(config.data_dir.join("received"));
    for folder in folders.into_iter().flatten().flatten() {
        let Ok(name) = folder.file_name().into_string().map(|name| name.replace('+', "/")) else {
            continue;
        };
        let Some((site, publication)) = name.split_once('/') else { continue };
        if config.sites.received(&name).is_some() {
            continue;
        }
        findings.warning(
            format!(
                "data_dir holds the log of publication \"{name}\", which nothing in the site file \
                 follows: site \"{site}\" keeps its own for this site all the same, without bound \
                 where it has no retention_size"
            ),
            format!(
                "Follow it again; or, at site \"{site}\", take \"{publication}\" out of `publications` \
                 under [downstream.{}] and start its node again, and here remove {}",
                config.name,
                folder.path().display()
            ),
        );
    }
}

fn nearest_present(path: &Path) -> PathBuf {
    let here = if path.is_absolute() {
        path.to_owned()
    } else {
        std::env::current_dir().unwrap_or_default().join(path)
    };
    here.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/")).to_owned()
}

fn bytes(bytes: u64) -> String {
    let units = [("TB", 40), ("GB", 30), ("MB", 20), ("KB", 10)];
    match units.into_iter().find(|(_, shift)| bytes >> shift > 0) {
        Some((unit, shift)) => format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::{Findings, check_received_before, nearest_present, not_writable};

    #[test]
    fn a_received_log_that_nothing_follows_is_told_of() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["up+p", "up+far+q"] {
            std::fs::create_dir_all(folder.path().join("data/received").join(name)).unwrap();
        }
        let text = "[site]\nname = \"x\"\ndata_dir = \"data\"\ncertificate = \"c\"\nkey = \"k\"\n\
            ca = \"a\"\n[upstream.up]\naddress = \"up:1\"\n[subscription.s]\n\
            publication = \"up/p\"\ntarget = \"postgres://u@h/d\"\n";
        let config = crate::config::parse(text, &folder.path().join("site.toml")).unwrap();
        let mut findings = Findings::publication("p");
        check_received_before(&config, &mut findings);
        let [found] = &findings.all[..] else { panic!("{:?}", findings.all) };
        let said = found.to_string();
        assert!(
            said.contains("publication \"up/far/q\"") && said.contains("[downstream.x]"),
            "{said}"
        );
    }

    #[test]
    fn nobody_is_told_to_give_away_what_is_above_a_folder_that_is_not_there() {
        let above = tempfile::tempdir().unwrap();
        let folder = above.path().join("state").join("farshore");
        let (what, remedy) = not_writable(&folder, &nearest_present(&folder), &"denied");
        let (folder_text, above_text) = (folder.display(), above.path().display());
        let denied = format!("is not there, and this user may not make it in {above_text}: denied");
        assert!(what.ends_with(&denied), "{what}");
        assert!(remedy.contains(&format!(" -m 0700 {folder_text} ")), "{remedy}");
        assert!(
            remedy.contains("install -d -o ") && !remedy.contains("give this user"),
            "{remedy}"
        );
        std::fs::create_dir_all(&folder).unwrap();
        let (what, remedy) = not_writable(&folder, &nearest_present(&folder), &"denied");
        assert_eq!(what, format!("data_dir {folder_text} cannot be written: denied"));
        assert!(remedy.ends_with(&format!("give this user {folder_text}")), "{remedy}");
    }
}
