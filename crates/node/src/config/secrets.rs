//! Files with secrets that everybody on the machine may read. Keys and passwords that have files of
//! their own are refused then by whoever reads them; what is looked at here is used all the same, as
//! it was before anybody looked.

use super::typed;
use farshore_pg::Config;
use farshore_pg::config::Environment;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// A file with a secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretFile {
    /// The file.
    pub path: PathBuf,
    /// What it holds, in words.
    pub holds: &'static str,
}

/// A file that everybody may read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenSecret {
    pub what: String,
    pub remedy: String,
}

/// Those that a site file at `path` names, and itself if there are passwords in it.
pub(super) fn files(folder: &Path, path: &Path, typed: &typed::SiteFile) -> Vec<SecretFile> {
    let sources = typed.publication.values().map(|publication| publication.source.as_str());
    let targets = typed.subscription.values().map(|subscription| subscription.target.as_str());
    let mirrors = typed.mirror.values();
    let principals = mirrors.clone().filter_map(|mirror| mirror.principal.as_deref());
    let standbys = mirrors.filter_map(|mirror| mirror.standby.as_deref());
    let mut servers = sources.chain(targets).chain(principals).chain(standbys);
    let own = match (servers.any(has_password), &typed.site.webhook) {
        (true, _) => Some("a server's password"),
        // Whoever knows such a path may post there.
        (false, Some(_)) => Some("the webhook's address"),
        (false, None) => None,
    };
    let own = own.map(|holds| SecretFile { path: path.to_owned(), holds });
    let beside = |path: &Option<PathBuf>, holds| {
        path.as_ref().map(|path| SecretFile { path: folder.join(path), holds })
    };
    let token = beside(&typed.site.monitor_token, "the monitor's token");
    let key = beside(&typed.site.monitor_key, "the monitor's key");
    [own, token, key].into_iter().flatten().collect()
}

/// Whether the text itself says a password, wherever else one may come from.
fn has_password(server: &str) -> bool {
    // Without a user there would be none to take from the environment.
    let nothing = Environment::default().with("LOGNAME", "nobody");
    Config::parse_in(server, &nothing).is_ok_and(|config| config.password.is_some())
}

/// Those of them that everybody may read. Looks at the file system.
pub(crate) fn open_to_all(files: &[SecretFile]) -> Vec<OpenSecret> {
    let open = files.iter().filter(|file| is_open(&file.path));
    let told = |file: &SecretFile| {
        let path = file.path.display();
        OpenSecret {
            what: format!("every user of this machine can read {path}, which holds {}", file.holds),
            remedy: format!("chmod o-rwx {path}"),
        }
    };
    open.map(told).collect()
}

/// One in a folder that they may not enter is closed to them, whatever its own rights are.
fn is_open(path: &Path) -> bool {
    let lets_others = |path: &Path, right: u32| {
        std::fs::metadata(path).is_ok_and(|found| found.permissions().mode() & right != 0)
    };
    let Ok(path) = path.canonicalize() else { return false };
    lets_others(&path, 0o004) && path.ancestors().skip(1).all(|above| lets_others(above, 0o001))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;
    use std::fs::{Permissions, set_permissions};

    #[test]
    fn passwords_are_found_in_every_form() {
        for server in [
            "postgres://a:secret@h/d",
            "postgres://a@h/d?password=secret",
            "host=h user=a password=secret",
            "password='with space' host=h",
        ] {
            assert!(has_password(server), "{server}");
        }
        for server in ["postgres://a@h/d", "host=h dbname=password", "service=s", "host="] {
            assert!(!has_password(server), "{server}");
        }
    }

    #[test]
    fn what_everybody_may_read_is_said_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let site = folder.path().join("site.toml");
        let text = |server: &str| {
            format!(
                "[site]\nname = \"s\"\ndata_dir = \"data\"\nmonitor = \"127.0.0.1:0\"\n\
                 monitor_token = \"token\"\n[publication.p]\nsource = \"{server}\"\n\
                 tables = [\"*.*\"]\n"
            )
        };
        let (with, without) = (text("postgres://a:secret@h/d"), text("postgres://a@h/d"));
        let found = |text: &str, [of_site, of_token, of_folder]: [u32; 3]| -> Vec<String> {
            std::fs::write(&site, text).unwrap();
            std::fs::write(folder.path().join("token"), "0123456789abcdef").unwrap();
            for (path, mode) in [
                (site.clone(), of_site),
                (folder.path().join("token"), of_token),
                (folder.path().to_owned(), of_folder),
            ] {
                set_permissions(path, Permissions::from_mode(mode)).unwrap();
            }
            let config = config::load(&site).unwrap();
            open_to_all(&config.secret_files).into_iter().map(|open| open.what).collect()
        };
        let all = found(&with, [0o644, 0o604, 0o755]);
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].contains("site.toml, which holds a server's password"), "{all:?}");
        assert!(all[1].contains("token, which holds the monitor's token"), "{all:?}");
        assert!(all.iter().all(|what| !what.contains("secret")), "{all:?}");
        assert_eq!(found(&with, [0o640, 0o600, 0o755]), [""; 0]);
        assert_eq!(found(&without, [0o644, 0o640, 0o755]), [""; 0]);
        // Nobody else gets there.
        assert_eq!(found(&with, [0o644, 0o644, 0o750]), [""; 0]);
    }
}
