//! Threads that unpack files as they come, write and check them, and make them durable: each does its
//! part while the others do theirs.

use super::QUEUE_MESSAGES_MAX;
use super::directory::{CONTROL, Directory, MARKER, remove, sync};
use super::durable::Durable;
use super::manifest;
use super::message::FromGiver;
use super::take::{Progress, SeedError};
use crate::relay::compression::Unpacker;
use crate::relay::message::Packing;
use ring::digest::{Context, SHA256};
use std::collections::{HashMap, HashSet};
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use tokio::sync::{mpsc, watch};

/// Longest manifest that is taken: of some ten million files.
const MANIFEST_BYTES_MAX: usize = 1 << 30;
const MANIFEST: &str = "backup_manifest";
const AUTO_CONF: &str = "postgresql.auto.conf";

pub struct Writer {
    directory: Directory,
    tablespaces: Vec<(u32, PathBuf)>,
    progress: watch::Sender<Progress>,
    current: Option<Current>,
    written: Written,
    manifest: Option<Vec<u8>>,
    durable: Durable,
}

/// The file that is being written.
struct Current {
    relative: String,
    path: PathBuf,
    file: File,
    mode: u32,
    bytes: u64,
    at: u64,
    sum: Context,
}

/// Size and checksum of each file, and the directories.
#[derive(Default)]
struct Written {
    files: HashMap<String, (u64, String)>,
    directories: HashSet<String>,
}

/// All files are there; they have not been compared with the manifest yet.
pub struct Complete {
    directory: Directory,
    written: Written,
    manifest: Vec<u8>,
}

impl Writer {
    pub fn new(
        directory: Directory,
        tablespaces: Vec<(u32, PathBuf)>,
        progress: watch::Sender<Progress>,
    ) -> Writer {
        Writer {
            directory,
            tablespaces,
            progress,
            current: None,
            written: Written::default(),
            manifest: None,
            durable: Durable::start(),
        }
    }

    /// Takes in what comes, until no more does.
    pub fn run(self, messages: mpsc::Receiver<FromGiver>) -> Result<Complete, SeedError> {
        let (queue, unpacked) = mpsc::channel(QUEUE_MESSAGES_MAX);
        let (root, progress) = (self.directory.root.clone(), self.progress.clone());
        thread::scope(|threads| {
            let unpacking = threads.spawn(move || {
                unpack(messages, &queue, &progress)
                    .map_err(SeedError::io("unpack files into", &root))
            });
            let written = self.write(unpacked);
            // Where it failed it has told the writer no more, who found a file cut off by that.
            let unpacked =
                unpacking.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            unpacked.and(written)
        })
    }

    fn write(mut self, mut messages: mpsc::Receiver<FromGiver>) -> Result<Complete, SeedError> {
        self.place_tablespaces()?;
        while let Some(message) = messages.blocking_recv() {
            match message {
                FromGiver::File { path, mode, bytes } => self.begin(path, mode, bytes)?,
                FromGiver::Directory { path, mode } => {
                    self.end()?;
                    self.make_directory(&path, mode)?;
                }
                FromGiver::Data { packed, .. } => self.data(&packed)?,
                FromGiver::Same { bytes } => self.same(bytes)?,
                FromGiver::Manifest => {
                    self.end()?;
                    self.manifest = Some(Vec::new());
                }
                // Not handed on to here.
                FromGiver::End { .. } | FromGiver::Failed { .. } => {}
            }
        }
        self.end()?;
        self.durable.finish()?;
        let Writer { directory, written, manifest, .. } = self;
        Ok(Complete { directory, written, manifest: manifest.unwrap_or_default() })
    }

    fn place_tablespaces(&mut self) -> Result<(), SeedError> {
        for (oid, here) in &self.tablespaces {
            if let Some(parent) = here.parent() {
                std::fs::create_dir_all(parent).map_err(SeedError::io("create", parent))?;
            }
            if !here.is_dir() {
                let made = DirBuilder::new().mode(0o700).create(here);
                made.map_err(SeedError::io("create", here))?;
            }
            self.directory.owned(here)?;
            let links = self.directory.root.join("pg_tblspc");
            std::fs::create_dir_all(&links).map_err(SeedError::io("create", &links))?;
            self.directory.owned(&links)?;
            let link = links.join(oid.to_string());
            let is_placed = std::fs::read_link(&link).is_ok_and(|to| to == *here);
            if !is_placed {
                remove(&link)?;
                let entries = std::fs::read_dir(here).map_err(SeedError::io("list", here))?;
                if entries.count() > 0 {
                    return Err(SeedError::Directory {
                        path: here.clone(),
                        what: format!(
                            "is to hold tablespace {oid} and is not empty. Put it elsewhere with \
                             --tablespace OLD=NEW"
                        ),
                    });
                }
                std::os::unix::fs::symlink(here, &link).map_err(SeedError::io("link", &link))?;
                self.directory.owned(&link)?;
            }
            self.written.directories.insert(format!("pg_tblspc/{oid}"));
        }
        Ok(())
    }

    fn make_directory(&mut self, relative: &str, mode: u32) -> Result<(), SeedError> {
        let path = self.directory.root.join(relative);
        if !path.is_dir() {
            std::fs::create_dir_all(&path).map_err(SeedError::io("create", &path))?;
        }
        let permissions = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&path, permissions).map_err(SeedError::io("create", &path))?;
        self.directory.owned(&path)?;
        self.written.directories.insert(relative.to_owned());
        Ok(())
    }

    fn begin(&mut self, relative: String, mode: u32, bytes: u64) -> Result<(), SeedError> {
        self.end()?;
        // No server starts before it has its name.
        let name = if relative == CONTROL { unfinished_control() } else { relative.clone() };
        let path = self.directory.root.join(name);
        if let Some(parent) = path.parent().filter(|parent| !parent.is_dir()) {
            std::fs::create_dir_all(parent).map_err(SeedError::io("create", parent))?;
            self.directory.owned(parent)?;
        }
        let open = || {
            OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .mode(mode)
                // A link that was put there meanwhile is not followed.
                .custom_flags(libc::O_NOFOLLOW)
                .open(&path)
        };
        let opened = open().or_else(|error| {
            if error.kind() != std::io::ErrorKind::PermissionDenied {
                return Err(error);
            }
            // One of an earlier run or server that nobody may write to (a key): it may be written
            // over all the same.
            std::fs::set_permissions(&path, Permissions::from_mode(0o600))?;
            open()
        });
        let file = opened.map_err(SeedError::io("create", &path))?;
        self.directory.owned(&path)?;
        let sum = Context::new(&SHA256);
        self.current = Some(Current { relative, path, file, mode, bytes, at: 0, sum });
        Ok(())
    }

    fn data(&mut self, data: &[u8]) -> Result<(), SeedError> {
        if let Some(manifest) = &mut self.manifest {
            if manifest.len() + data.len() > MANIFEST_BYTES_MAX {
                return Err(differs(MANIFEST, "it has more than 1 GiB"));
            }
            manifest.extend_from_slice(data);
            return Ok(());
        }
        let Some(current) = &mut self.current else {
            return Err(differs("?", "its bytes came without a name"));
        };
        current
            .file
            .write_all_at(data, current.at)
            .map_err(SeedError::io("write", &current.path))?;
        current.sum.update(data);
        current.at += data.len() as u64;
        self.progress.send_modify(|progress| progress.done += data.len() as u64);
        Ok(())
    }

    /// What is there is read again: it is part of what is checked at the end.
    fn same(&mut self, bytes: u64) -> Result<(), SeedError> {
        let Some(current) = &mut self.current else {
            return Err(differs("?", "its bytes came without a name"));
        };
        let (mut buffer, mut left) = (vec![0; 256 << 10], bytes);
        while left > 0 {
            let here = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let piece = &mut buffer[..here];
            current
                .file
                .read_exact_at(piece, current.at)
                .map_err(SeedError::io("read", &current.path))?;
            current.sum.update(piece);
            current.at += here as u64;
            left -= here as u64;
        }
        self.progress.send_modify(|progress| {
            progress.done += bytes;
            progress.same += bytes;
        });
        Ok(())
    }

    fn end(&mut self) -> Result<(), SeedError> {
        let Some(current) = self.current.take() else { return Ok(()) };
        if current.at != current.bytes {
            let what = format!("{} bytes came of {}", current.at, current.bytes);
            return Err(differs(&current.relative, &what));
        }
        let ended = current.file.set_len(current.bytes);
        ended.map_err(SeedError::io("write", &current.path))?;
        // One that was there has the mode that it had.
        let set = current.file.set_permissions(Permissions::from_mode(current.mode & 0o777));
        set.map_err(SeedError::io("change the mode of", &current.path))?;
        let sum = manifest::hex(current.sum.finish().as_ref());
        self.written.files.insert(current.relative, (current.bytes, sum));
        self.durable.take(current.path, current.file)
    }
}

/// Hands on what comes, its data as it was before it was packed.
fn unpack(
    mut messages: mpsc::Receiver<FromGiver>,
    queue: &mpsc::Sender<FromGiver>,
    progress: &watch::Sender<Progress>,
) -> std::io::Result<()> {
    let mut unpacker = Unpacker::new()?;
    while let Some(mut message) = messages.blocking_recv() {
        if let FromGiver::Data { bytes, packing, packed } = &mut message {
            let link = packed.len() as u64;
            let was_packed = std::mem::replace(packing, Packing::Plain);
            *packed = unpacker.unpack(was_packed, std::mem::take(packed), *bytes as usize)?;
            progress.send_modify(|progress| progress.packed += link);
        }
        if queue.blocking_send(message).is_err() {
            // The writer has ended, and says why.
            break;
        }
    }
    Ok(())
}

fn unfinished_control() -> String {
    format!("{CONTROL}.seeding")
}

fn differs(path: &str, what: &str) -> SeedError {
    SeedError::Differs { path: path.to_owned(), what: what.to_owned() }
}

impl Complete {
    /// Compares every file with the manifest, removes what is not in it, and makes it a standby's
    /// data directory; how many files.
    pub fn finish(self, conninfo: &str, slot: &str) -> Result<usize, SeedError> {
        let files = self.compare()?;
        self.remove_strangers()?;
        let root = &self.directory.root;
        self.put(MANIFEST, &self.manifest)?;
        self.put("standby.signal", b"")?;
        // What the principal waits for streams from the principal: once this server is promoted,
        // its commits would wait for ever.
        let settings = format!(
            "primary_conninfo = {}\nprimary_slot_name = {}\nsynchronous_standby_names = ''\n",
            quoted(conninfo),
            quoted(slot)
        );
        self.append(AUTO_CONF, settings.as_bytes())?;
        self.directory.all_owned()?;
        for found in self.directory.walk()? {
            if found.is_directory {
                sync(&found.path)?;
            }
        }
        sync(root)?;
        let control = root.join(CONTROL);
        std::fs::rename(root.join(unfinished_control()), &control)
            .map_err(SeedError::io("rename", &control))?;
        sync(&root.join("global"))?;
        remove(&root.join(MARKER))?;
        sync(root)?;
        Ok(files)
    }

    fn compare(&self) -> Result<usize, SeedError> {
        let entries = manifest::read(&self.manifest).map_err(|what| differs(MANIFEST, &what))?;
        let mut known = HashSet::new();
        for entry in &entries {
            let Some(path) = &entry.path else {
                let encoded = entry.encoded_path.as_deref().unwrap_or_default();
                return Err(differs(encoded, "its name is not UTF-8"));
            };
            let Some((bytes, sum)) = self.written.files.get(path) else {
                return Err(differs(path, "it did not come"));
            };
            if *bytes != entry.size {
                return Err(differs(path, &format!("it has {bytes} bytes and not {}", entry.size)));
            }
            if entry.algorithm.as_deref() != Some("SHA256") || entry.checksum.as_ref() != Some(sum)
            {
                return Err(differs(path, "its checksum is another"));
            }
            known.insert(path.as_str());
        }
        match self.written.files.keys().find(|path| !known.contains(path.as_str())) {
            Some(unknown) => Err(differs(unknown, "the manifest does not name it")),
            None => Ok(entries.len()),
        }
    }

    /// Files of an earlier run, or of the server that was there.
    fn remove_strangers(&self) -> Result<(), SeedError> {
        let control = unfinished_control();
        let mut found = self.directory.walk()?;
        // What is in a directory before the directory.
        found.reverse();
        for entry in found {
            let relative = entry.relative.as_str();
            if entry.is_directory {
                let is_link = entry.path.is_symlink();
                if !self.written.directories.contains(relative) && !is_link {
                    // One that holds files that stay, stays.
                    let _ = std::fs::remove_dir(&entry.path);
                } else if !self.written.directories.contains(relative) {
                    remove(&entry.path)?;
                }
            } else if !self.written.files.contains_key(relative)
                && relative != MARKER
                && relative != control
            {
                remove(&entry.path)?;
            }
        }
        Ok(())
    }

    fn put(&self, name: &str, text: &[u8]) -> Result<(), SeedError> {
        let path = self.directory.root.join(name);
        remove(&path)?;
        self.append(name, text)
    }

    fn append(&self, name: &str, text: &[u8]) -> Result<(), SeedError> {
        let path = self.directory.root.join(name);
        let written = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&path)
            .and_then(|mut file| file.write_all(text).and_then(|()| file.sync_all()));
        written.map_err(SeedError::io("write", &path))?;
        self.directory.owned(Path::new(&path))
    }
}

/// A value of postgresql.conf.
fn quoted(text: &str) -> String {
    // A configuration file knows both ways of writing a quote.
    format!("'{}'", text.replace('\\', "\\\\").replace('\'', "''"))
}
