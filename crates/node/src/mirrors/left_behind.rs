//! What is left of mirrors that the site file does not name any more: a spool takes room here, and a
//! slot keeps log at its principal for nobody.

use super::note::{Note, SLOT};
use crate::config::SiteConfig;
use farshore_pg::Config;

/// Something that nobody uses.
pub(crate) struct LeftBehind {
    pub what: String,
    pub remedy: String,
}

/// Blocks on the disk.
pub(crate) fn left_behind(config: &SiteConfig) -> Vec<LeftBehind> {
    let folder = config.data_dir.join("mirrors");
    let mut all = Vec::new();
    let Ok(entries) = std::fs::read_dir(&folder) else { return all };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    for file in names {
        let path = folder.join(&file);
        let unnamed_slot = file
            .strip_suffix(SLOT)
            .filter(|name| !config.mirrors.near.iter().any(|mirror| mirror.name == *name));
        if path.is_dir() && !config.mirrors.far.iter().any(|mirror| mirror.name == file) {
            // The other way round under the same name: the slot that it would be asked to drop is
            // this site's own now.
            if config.mirrors.near.iter().any(|mirror| mirror.name == file) {
                all.push(LeftBehind {
                    what: format!(
                        "data_dir holds a spool of mirror \"{file}\" from when this site was its far \
                         end, which nobody uses any more"
                    ),
                    remedy: format!("Remove {}", path.display()),
                });
                continue;
            }
            all.push(LeftBehind {
                what: format!(
                    "data_dir holds the spool of mirror \"{file}\", which the site file does not \
                     name; the slot of its near end may still keep log at the principal"
                ),
                remedy: format!(
                    "Name it again; or drop that slot (farshore_mirror_{}, if no other was \
                     named), and remove {}",
                    file.replace('-', "_"),
                    path.display()
                ),
            });
        } else if let Some(name) = unnamed_slot {
            let noted = Note::slot(&config.data_dir, name).read().unwrap_or_default();
            // One that cannot be read names no slot.
            let Some((slot, principal)) = noted.split_once('\n') else { continue };
            let there = Config::parse(principal).ok();
            if config.mirrors.near.iter().any(|near| {
                near.slot == slot && is_there(&near.principal, principal, there.as_ref())
            }) {
                continue;
            }
            let keeps = format!(
                "\"{slot}\" on {principal} keeps the log there, without bound, if it was not dropped"
            );
            // Of a spool here nobody can ask that by SQL.
            let of = name.split_once('.').map_or(name, |(mirror, _)| mirror);
            let spool = there.as_ref().and_then(|there| config.mirrors.spool_at(there, of));
            let drop = match spool {
                Some(spool) => {
                    format!("here, farshore mirror drop-slot SITE.toml {} {slot}", spool.name)
                }
                None => format!("on that server, SELECT pg_drop_replication_slot('{slot}')"),
            };
            let drop = format!("{drop}, and remove {}", path.display());
            // A mirror's name has no dot.
            all.push(match name.split_once('.') {
                None => LeftBehind {
                    what: format!(
                        "mirror \"{name}\" was carried from here, and the site file does not name \
                         it: its slot {keeps}"
                    ),
                    remedy: format!("Name it again; or, {drop}"),
                },
                Some((mirror, _)) => LeftBehind {
                    what: format!("mirror \"{mirror}\" had another slot before: {keeps}"),
                    remedy: format!("Name it again (slot = \"{slot}\"); or, {drop}"),
                },
            });
        }
    }
    all
}

/// Whether a principal is the server that a note names: slots are of no one database.
fn is_there(principal: &Config, noted: &str, there: Option<&Config>) -> bool {
    principal.redacted() == noted
        || there.is_some_and(|there| {
            let dbname = principal.dbname.clone();
            principal.is_same_place(&Config { dbname, ..there.clone() })
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config;

    #[test]
    fn what_the_site_file_names_is_not_left_behind() {
        let folder = tempfile::tempdir().unwrap();
        let site = |mirror: &str| {
            let text = format!(
                "[site]\nname = \"s\"\ndata_dir = {:?}\n[mirror.{mirror}]\n\
                 principal = \"postgres://a@b/c\"\nlisten = \"127.0.0.1:5433\"\n",
                folder.path()
            );
            config::parse(&text, &folder.path().join("site.toml")).unwrap()
        };
        assert!(left_behind(&site("dr")).is_empty());
        std::fs::create_dir_all(folder.path().join("mirrors/dr")).unwrap();
        Note::slot(folder.path(), "dr").write("farshore_mirror_dr\npostgres://a@b/c").unwrap();
        Note::dropped(folder.path(), "dr").write("too far behind").unwrap();
        assert!(left_behind(&site("dr")).is_empty());
        let left = left_behind(&site("other"));
        let [spool, slot] = &left[..] else { panic!("{} are left behind", left.len()) };
        assert!(spool.what.contains("the spool of mirror \"dr\""), "{}", spool.what);
        assert!(slot.what.contains("\"farshore_mirror_dr\" on postgres://a@b/c"), "{}", slot.what);
        assert!(slot.remedy.contains("pg_drop_replication_slot('farshore_mirror_dr')"));
        // The other end of it now.
        let turned = "[site]\nname = \"s\"\nlisten = \"127.0.0.1:1\"\n\
             [mirror.dr]\nprincipal = \"postgres://a@b/c\"\n[downstream.far]\nmirrors = [\"dr\"]\n"
            .replace("[mirror", &format!("data_dir = {:?}\n[mirror", folder.path()));
        let left = left_behind(&config::parse(&turned, &folder.path().join("site.toml")).unwrap());
        let [spool] = &left[..] else { panic!("{} are left behind", left.len()) };
        assert!(spool.what.contains("from when this site was its far end"), "{}", spool.what);
        assert_eq!(spool.remedy, format!("Remove {}", folder.path().join("mirrors/dr").display()));
        Note::earlier_slot(folder.path(), "dr", "old").write("old\npostgres://a@b/c").unwrap();
        let left = left_behind(&site("dr"));
        let [slot] = &left[..] else { panic!("{} are left behind", left.len()) };
        assert!(
            slot.what.starts_with("mirror \"dr\" had another slot before: \"old\" on postgres")
        );
        assert!(slot.remedy.contains("pg_drop_replication_slot('old')"), "{}", slot.remedy);
    }

    #[test]
    fn a_slot_in_use_is_not_left_behind_and_one_of_a_spool_is_dropped_there() {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "[site]\nname = \"s\"\ndata_dir = {:?}\n[mirror.dr]\n\
             principal = \"postgres://a@b/c\"\nlisten = \"127.0.0.1:5433\"\nslot = \"b\"\n\
             [mirror.dr2]\nprincipal = \"postgres://x@B:5432/other\"\n\
             listen = \"127.0.0.1:5434\"\nslot = \"a\"\n",
            folder.path()
        );
        let site = config::parse(&text, &folder.path().join("site.toml")).unwrap();
        std::fs::create_dir_all(folder.path().join("mirrors")).unwrap();
        Note::earlier_slot(folder.path(), "dr", "a").write("a\npostgres://a@b:5432/c").unwrap();
        assert!(left_behind(&site).is_empty());
        // The same name elsewhere is another slot.
        Note::earlier_slot(folder.path(), "dr", "a").write("a\npostgres://a@d:5432/c").unwrap();
        assert_eq!(left_behind(&site).len(), 1);
        Note::earlier_slot(folder.path(), "dr", "a").remove().unwrap();
        Note::slot(folder.path(), "gone").write("g\npostgres://a@127.0.0.1:5434/c").unwrap();
        let left = left_behind(&site);
        let [slot] = &left[..] else { panic!("{} are left behind", left.len()) };
        assert!(slot.remedy.contains("drop-slot SITE.toml dr2 g"), "{}", slot.remedy);
    }
}
