//! The data directory that is being made: whether it may be, what is there, and what must go.

use super::CHUNK_BYTES;
use super::message::{DIGEST_BYTES, DIGESTS_MAX, FromTaker};
use super::take::SeedError;
use ring::digest::{SHA256, digest};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Says that the directory is being seeded.
pub const MARKER: &str = "farshore.seeding";
/// Without it no server starts; it comes last.
pub const CONTROL: &str = "global/pg_control";
/// Threads that look at what is there, at most: a disk is faster than one SHA-256.
const DIGESTING_MAX: usize = 4;

/// A data directory that may be written to.
#[derive(Debug)]
pub struct Directory {
    pub root: PathBuf,
    /// Who is to own what is made, if not who makes it.
    pub owner: Option<(u32, u32)>,
    /// There may be files of an earlier run, or of a server that was.
    has_files: bool,
    /// The control file that was there: no server starts without one.
    control: Option<Vec<u8>>,
}

/// Looks whether a directory could be written to, and changes nothing.
///
/// # Errors
/// Why not.
pub fn look(root: &Path, overwrite: bool) -> Result<(), SeedError> {
    let refuse = |what: String| SeedError::Directory { path: root.to_owned(), what };
    if !root.exists() {
        return Ok(());
    }
    let has_files = std::fs::read_dir(root).map_err(SeedError::io("list", root))?.count() > 0;
    let pid_file = root.join("postmaster.pid");
    match std::fs::read_to_string(&pid_file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(SeedError::io("read", &pid_file)(error)),
        Ok(text) => {
            return Err(refuse(match server_of(&text) {
                Some(pid) => {
                    format!("has a server: process {pid}, as postmaster.pid says. Stop it first")
                }
                None => {
                    "has the postmaster.pid of a server that was killed, or that runs in another \
                         container. If none runs (pg_ctl status, there), remove that file"
                        .to_owned()
                }
            }));
        }
    }
    if has_files && !root.join(MARKER).exists() && !overwrite {
        return Err(refuse(
            "is not empty. Name an empty or new directory; or, if it is a data directory of the \
             same cluster that may be written over, say so with --overwrite"
                .to_owned(),
        ));
    }
    let there = Directory { root: root.to_owned(), owner: None, has_files, control: None };
    there.check_links()
}

/// The process that a postmaster.pid names, if it is there. On another machine's disk it is never.
fn server_of(postmaster_pid: &str) -> Option<&str> {
    let pid = postmaster_pid.lines().next()?.trim();
    let is_there = pid.parse::<u32>().is_ok() && Path::new("/proc").join(pid).exists();
    is_there.then_some(pid)
}

/// Looks whether a directory may be written to, and makes it where there is none. What is in it stays
/// as it is until it is [claimed](Directory::claim): a server that could start there still can.
pub fn prepare(root: &Path, system_id: &str, overwrite: bool) -> Result<Directory, SeedError> {
    let refuse = |what: String| SeedError::Directory { path: root.to_owned(), what };
    if !root.exists() {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(root)
            .map_err(SeedError::io("create", root))?;
    }
    let entries = std::fs::read_dir(root).map_err(SeedError::io("list", root))?;
    let has_files = entries.count() > 0;
    look(root, overwrite)?;
    if has_files && !root.join(MARKER).exists() {
        let found = control_system_id(&root.join(CONTROL))?;
        if found.to_string() != system_id {
            return Err(refuse(format!(
                "is of cluster {found}, and the mirror's is {system_id}: it is not written over"
            )));
        }
    }
    let there = root.metadata().map_err(SeedError::io("look at", root))?;
    // Not told by the marker: where an earlier run made it, it is the owner's already.
    let owner = (there.uid() != own_user()).then(|| (there.uid(), there.gid()));
    let control = control_file(root)?;
    Ok(Directory { root: root.to_owned(), owner, has_files, control })
}

/// What is in the control file, if there is one.
fn control_file(root: &Path) -> Result<Option<Vec<u8>>, SeedError> {
    let path = root.join(CONTROL);
    match std::fs::read(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(SeedError::io("read", &path)(error)),
    }
}

/// The log may be kept elsewhere, and tablespaces are.
fn is_own_link(relative: &str) -> bool {
    let tablespace = relative.strip_prefix("pg_tblspc/");
    relative == "pg_wal" || tablespace.is_some_and(|name| !name.contains('/'))
}

/// As who this process makes files.
fn own_user() -> u32 {
    // SAFETY: geteuid has no preconditions.
    unsafe { libc::geteuid() }
}

/// The first thing in a control file.
fn control_system_id(path: &Path) -> Result<u64, SeedError> {
    let mut bytes = [0; 8];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(SeedError::io("read", path))?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Removes a file; that it is gone already is fine.
pub fn remove(path: &Path) -> Result<(), SeedError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(SeedError::io("remove", path)(error))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Makes a file's content, or a directory's names, durable.
pub fn sync(path: &Path) -> Result<(), SeedError> {
    File::open(path).and_then(|file| file.sync_all()).map_err(SeedError::io("sync", path))
}

/// A file or directory below a data directory.
pub struct Found {
    /// As manifests name it.
    pub relative: String,
    pub path: PathBuf,
    pub is_directory: bool,
}

impl Directory {
    /// Marks it, and sees to it that no server starts there until all is there. From here on it is
    /// what is being made, and no other: what speaks against that has been looked at before.
    ///
    /// # Errors
    /// A server has been there since it was looked at; the disk.
    pub fn claim(&self, system_id: &str, overwrite: bool) -> Result<(), SeedError> {
        let root = &self.root;
        look(root, overwrite)?;
        if control_file(root)? != self.control {
            return Err(SeedError::Directory {
                path: root.clone(),
                what:
                    "was written to by a server since it was looked at, and is as that server left \
                       it. Run this again"
                        .to_owned(),
            });
        }
        let marker = root.join(MARKER);
        let text = format!("a standby of {system_id} is being made here by farshore mirror seed\n");
        std::fs::write(&marker, text).map_err(SeedError::io("write", &marker))?;
        self.owned(&marker)?;
        sync(&marker)?;
        let there = root.metadata().map_err(SeedError::io("look at", root))?;
        // A server takes no directory that others can write to.
        if !matches!(there.mode() & 0o777, 0o700 | 0o750) {
            std::fs::set_permissions(root, std::fs::Permissions::from_mode(0o700))
                .map_err(SeedError::io("change the mode of", root))?;
        }
        sync(root)?;
        remove(&root.join(CONTROL))?;
        // Or a power cut would have it back, among other files than its own.
        match root.join(CONTROL).parent() {
            Some(folder) if folder.is_dir() => sync(folder),
            Some(_) | None => Ok(()),
        }
    }

    /// Gives a path to its owner.
    pub fn owned(&self, path: &Path) -> Result<(), SeedError> {
        let Some((user, group)) = self.owner else { return Ok(()) };
        std::os::unix::fs::lchown(path, Some(user), Some(group))
            .map_err(SeedError::io("change the owner of", path))
    }

    /// Gives all that is there to its owner, links themselves too: an earlier run may have ended
    /// between making a thing and giving it away, and this one keeps what is as it should be.
    pub fn all_owned(&self) -> Result<(), SeedError> {
        if self.owner.is_none() {
            return Ok(());
        }
        self.walk()?.iter().try_for_each(|found| self.owned(&found.path))
    }

    /// Refuses what is neither a file nor a directory: what a link leads to is somebody else's.
    /// PostgreSQL's own links, of the log and of tablespaces, may be there.
    fn check_links(&self) -> Result<(), SeedError> {
        for found in self.walk()? {
            let kind = std::fs::symlink_metadata(&found.path);
            let kind = kind.map_err(SeedError::io("look at", &found.path))?.file_type();
            let is_own = kind.is_symlink() && is_own_link(&found.relative);
            if !(kind.is_file() || kind.is_dir() || is_own) {
                return Err(SeedError::Directory {
                    path: self.root.clone(),
                    what: format!(
                        "holds {}, a link or a special file that is not PostgreSQL's. Files are \
                         written over and removed there: take it away first (what a link leads to \
                         stays), or name an empty directory",
                        found.relative
                    ),
                });
            }
        }
        Ok(())
    }

    /// Everything below, each directory before what is in it; into this server's part of
    /// tablespaces too.
    pub fn walk(&self) -> Result<Vec<Found>, SeedError> {
        let (mut found, mut next) = (Vec::new(), 0);
        self.list("", &mut found)?;
        while let Some(entry) = found.get(next) {
            if entry.is_directory {
                let relative = entry.relative.clone();
                self.list(&relative, &mut found)?;
            }
            next += 1;
        }
        Ok(found)
    }

    fn list(&self, relative: &str, found: &mut Vec<Found>) -> Result<(), SeedError> {
        let folder = self.root.join(relative);
        let failed = |error| SeedError::io("list", &folder)(error);
        // A tablespace's directory may have parts of servers of other versions.
        let is_tablespace =
            relative.starts_with("pg_tblspc/") && relative.matches('/').count() == 1;
        let own_part = is_tablespace.then(|| {
            let version = std::fs::read_to_string(self.root.join("PG_VERSION")).unwrap_or_default();
            format!("PG_{}_", version.trim())
        });
        for entry in std::fs::read_dir(&folder).map_err(failed)? {
            let path = entry.map_err(SeedError::io("list", &folder))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            if own_part.as_ref().is_some_and(|own| !name.starts_with(own.as_str())) {
                continue;
            }
            let relative =
                if relative.is_empty() { name.to_owned() } else { format!("{relative}/{name}") };
            // A link that leads nowhere is a name to be removed; so is one that is not the server's.
            let is_directory = path.is_dir() && (!path.is_symlink() || is_own_link(&relative));
            found.push(Found { relative, path, is_directory });
        }
        Ok(())
    }

    /// Tells what is there, on several threads at once: each file's chunks in order, but the files in
    /// none. Ends early when `tell` says that nobody listens.
    pub fn digests(&self, tell: impl Fn(FromTaker) -> bool + Sync) -> Result<(), SeedError> {
        if !self.has_files {
            return Ok(());
        }
        let mut files = self.walk()?;
        // A backup brings no log along. The control file goes before anything comes.
        files.retain(|found| {
            !found.is_directory
                && !found.relative.starts_with("pg_wal/")
                && ![MARKER, CONTROL].contains(&found.relative.as_str())
        });
        let threads = thread::available_parallelism().map_or(1, usize::from).min(DIGESTING_MAX);
        let next = AtomicUsize::new(0);
        let some = || {
            let mut chunk = vec![0; CHUNK_BYTES];
            while let Some(found) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                let told = digests_of(found, &mut chunk, &tell);
                if !matches!(told, Ok(true)) {
                    // The others have no more to do either.
                    next.store(files.len(), Ordering::Relaxed);
                }
                told?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            let digesting: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
            digesting.into_iter().try_for_each(|thread| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
    }
}

/// Tells what is in a file; whether anybody listens.
fn digests_of(
    found: &Found,
    chunk: &mut [u8],
    tell: impl Fn(FromTaker) -> bool,
) -> Result<bool, SeedError> {
    let mut file = File::open(&found.path).map_err(SeedError::io("open", &found.path))?;
    let (mut first, mut digests) = (0, Vec::new());
    loop {
        let read = fill(&mut file, chunk).map_err(SeedError::io("read", &found.path))?;
        let is_last = read < chunk.len();
        if read > 0 {
            let all = digest(&SHA256, &chunk[..read]);
            digests.push(std::array::from_fn(|at| all.as_ref()[at]));
        }
        if digests.len() == DIGESTS_MAX || (is_last && !digests.is_empty()) {
            let count = digests.len() as u32;
            let path = found.relative.clone();
            let digests = std::mem::take(&mut digests);
            if !tell(FromTaker::Has { path, first, digests }) {
                return Ok(false);
            }
            first += count;
        }
        if is_last {
            return Ok(true);
        }
    }
}

const _: () = assert!(DIGEST_BYTES <= 32);

/// Reads until the buffer is full or the file ends.
fn fill(file: &mut File, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..])? {
            0 => break,
            read => filled += read,
        }
    }
    Ok(filled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::os::unix::fs::symlink;
    use std::sync::Mutex;

    #[test]
    fn only_what_may_be_written_to_is() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("new/pgdata");
        let claimed = |root: &Path, overwrite| {
            let directory = prepare(root, "7", overwrite)?;
            directory.claim("7", overwrite)?;
            Ok::<_, SeedError>(directory)
        };
        let directory = claimed(&root, false).unwrap();
        assert_eq!(directory.owner, None);
        // An earlier run's.
        std::fs::create_dir(root.join("global")).unwrap();
        std::fs::write(root.join("base"), vec![1; CHUNK_BYTES + 1]).unwrap();
        let again = prepare(&root, "7", false).unwrap();
        let said = told(&again);
        assert!(matches!(&said[..], [FromTaker::Has { path, first: 0, digests }]
            if path == "base" && digests.len() == 2));
        // Somebody's.
        let other = folder.path().join("other");
        std::fs::create_dir_all(other.join("global")).unwrap();
        std::fs::write(other.join(CONTROL), 7_u64.to_ne_bytes()).unwrap();
        let refused = prepare(&other, "7", false).unwrap_err().to_string();
        assert!(refused.contains("is not empty"), "{refused}");
        let refused = prepare(&other, "8", true).unwrap_err().to_string();
        assert!(refused.contains("is of cluster 7"), "{refused}");
        assert!(other.join(CONTROL).exists());
        for (pid, said) in [
            (std::process::id().to_string(), "has a server: process"),
            // No process has it.
            (u32::MAX.to_string(), "of a server that was killed"),
            ("x".to_owned(), "of a server that was killed"),
        ] {
            std::fs::write(other.join("postmaster.pid"), pid + "\n/data\n").unwrap();
            let refused = prepare(&other, "7", true).unwrap_err().to_string();
            assert!(refused.contains(said), "{refused}");
        }
        std::fs::remove_file(other.join("postmaster.pid")).unwrap();
        // Until it is claimed, a server could start there; and one that did is not written over.
        let directory = prepare(&other, "7", true).unwrap();
        assert!(told(&directory).is_empty());
        let started: Vec<u8> = [7_u64.to_ne_bytes(), 8_u64.to_ne_bytes()].concat();
        std::fs::write(other.join(CONTROL), &started).unwrap();
        let refused = directory.claim("7", true).unwrap_err().to_string();
        assert!(refused.contains("by a server since"), "{refused}");
        assert_eq!(std::fs::read(other.join(CONTROL)).unwrap(), started);
        assert!(!other.join(MARKER).exists());
        claimed(&other, true).unwrap();
        assert!(!other.join(CONTROL).exists());
    }

    /// By a run as root that was killed, and by the next.
    #[test]
    fn all_that_root_makes_is_given_to_the_directorys_owner() {
        const OWNER: (u32, u32) = (12_345, 12_346);
        if own_user() != 0 {
            println!("skipped: only root can give files to another user, and this is not root");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("pgdata");
        std::fs::create_dir(&root).unwrap();
        std::os::unix::fs::chown(&root, Some(OWNER.0), Some(OWNER.1)).unwrap();
        let directory = prepare(&root, "7", false).unwrap();
        assert_eq!(directory.owner, Some(OWNER));
        directory.claim("7", false).unwrap();
        // Made and not given away yet when it was killed.
        let (space, outside) = (folder.path().join("space"), folder.path().join("outside"));
        std::fs::create_dir_all(space.join("PG_15_202209061/5")).unwrap();
        std::fs::write(&outside, "x").unwrap();
        std::fs::create_dir_all(root.join("pg_tblspc")).unwrap();
        std::fs::write(root.join("PG_VERSION"), "15\n").unwrap();
        symlink(&space, root.join("pg_tblspc/16400")).unwrap();
        let again = prepare(&root, "7", false).unwrap();
        assert_eq!(again.owner, Some(OWNER));
        // Nobody's to give away is what a link leads to that is not PostgreSQL's.
        symlink(&outside, root.join("link")).unwrap();
        again.all_owned().unwrap();
        let own = |path: &Path| {
            let there = path.symlink_metadata().unwrap();
            (there.uid(), there.gid()) == OWNER
        };
        let all = ["", MARKER, "PG_VERSION", "pg_tblspc", "pg_tblspc/16400", "link"];
        for path in all.map(|path| root.join(path)) {
            assert!(own(&path), "{}", path.display());
        }
        assert!(own(&space.join("PG_15_202209061/5")));
        assert!(!own(&outside) && !own(&space));
    }

    fn told(directory: &Directory) -> Vec<FromTaker> {
        let said = Mutex::new(Vec::new());
        directory
            .digests(|has| {
                said.lock().unwrap().push(has);
                true
            })
            .unwrap();
        said.into_inner().unwrap()
    }

    /// The other end takes a file's digests from the first on, without a gap.
    #[test]
    fn several_threads_tell_of_each_file_once_and_in_order() {
        let root = tempfile::tempdir().unwrap();
        for file in 0..40 {
            std::fs::write(root.path().join(format!("{file}")), vec![file; 5 + usize::from(file)])
                .unwrap();
        }
        let chunks = DIGESTS_MAX as u64 + 2;
        let large = File::create(root.path().join("large")).unwrap();
        large.set_len(chunks * CHUNK_BYTES as u64).unwrap();
        let directory =
            Directory { root: root.path().to_owned(), owner: None, has_files: true, control: None };
        let mut known: HashMap<String, u64> = HashMap::new();
        for has in told(&directory) {
            let FromTaker::Has { path, first, digests } = has else { panic!("{has:?}") };
            let known = known.entry(path).or_default();
            assert_eq!(*known, u64::from(first));
            *known += digests.len() as u64;
        }
        assert_eq!(known.remove("large"), Some(chunks));
        assert_eq!((known.len(), known.values().sum::<u64>()), (40, 40));
        let calls = AtomicUsize::new(0);
        directory.digests(|_| calls.fetch_add(1, Ordering::Relaxed) > 40).unwrap();
        assert!(calls.into_inner() <= DIGESTING_MAX, "each hears once that nobody listens");
    }

    /// What a link leads to is neither read, nor written over, nor removed.
    #[test]
    fn links_that_are_not_postgresqls_are_refused() {
        let (root, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::write(elsewhere.path().join("precious"), "x").unwrap();
        let path = root.path();
        std::fs::write(path.join("PG_VERSION"), "15\n").unwrap();
        assert!(look(path, false).unwrap_err().to_string().contains("is not empty"));
        symlink(elsewhere.path(), path.join("pg_wal")).unwrap();
        std::fs::create_dir(path.join("pg_tblspc")).unwrap();
        let space = tempfile::tempdir().unwrap();
        let tablespace = space.path().to_owned();
        for part in ["PG_14_202107181/5", "PG_15_202209061/5"] {
            std::fs::create_dir_all(tablespace.join(part)).unwrap();
        }
        symlink(&tablespace, path.join("pg_tblspc/16400")).unwrap();
        look(path, true).unwrap();
        let directory =
            Directory { root: path.to_owned(), owner: None, has_files: true, control: None };
        let found: Vec<String> =
            directory.walk().unwrap().into_iter().map(|f| f.relative).collect();
        assert!(found.contains(&"pg_tblspc/16400/PG_15_202209061/5".to_owned()), "{found:?}");
        assert!(!found.iter().any(|relative| relative.contains("PG_14")), "{found:?}");
        for (link, to) in [("log", elsewhere.path()), ("pg_wal/archive", Path::new("/"))] {
            let link = path.join(link);
            symlink(to, &link).unwrap();
            let refused = look(path, true).unwrap_err().to_string();
            assert!(refused.contains("a link or a special file"), "{refused}");
            std::fs::remove_file(link).unwrap();
        }
        assert!(elsewhere.path().join("precious").exists());
    }
}
