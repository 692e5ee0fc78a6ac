//! A disk that a test can fill.

use anyhow::{Context, Result, ensure};
use farshore_testkit::skip::{skipped, this_test};
use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tmpfs mounted over a directory; gone when dropped, unless a site has taken it over
/// ([`Site::small_disk`](crate::Site::small_disk)). Needs root.
#[derive(Debug)]
pub struct SmallDisk {
    path: PathBuf,
    mount: Option<Mount>,
}

/// Unmounts when dropped: before the directory around it is removed, which could not be otherwise.
#[derive(Debug)]
pub(crate) struct Mount(PathBuf);

impl SmallDisk {
    /// Mounts `megabytes` at `path`, which is made if it is not there and belongs to whom it
    /// belonged. `None`, with the test told as skipped, where that is not allowed.
    ///
    /// # Errors
    /// When the directory cannot be made or `mount` cannot be run.
    pub fn mount(path: &Path, megabytes: u32) -> Result<Option<SmallDisk>> {
        std::fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))?;
        let owner = std::fs::metadata(path)?;
        let (uid, gid) = {
            use std::os::unix::fs::MetadataExt;
            (owner.uid(), owner.gid())
        };
        let options = format!("size={megabytes}m,uid={uid},gid={gid},mode=0700");
        let mount = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "none"])
            .arg(path)
            .output()
            .context("run mount")?;
        if !mount.status.success() {
            let said = String::from_utf8_lossy(&mount.stderr);
            skipped(&this_test(), &format!("a small disk cannot be mounted here: {said}"));
            return Ok(None);
        }
        let mount = Some(Mount(path.to_owned()));
        Ok(Some(SmallDisk { path: path.to_owned(), mount }))
    }

    /// Whoever takes the mount unmounts it.
    pub(crate) fn take_mount(&mut self) -> Option<Mount> {
        self.mount.take()
    }

    fn filler(&self) -> PathBuf {
        self.path.join("filler")
    }

    /// Leaves no byte free.
    ///
    /// # Errors
    /// When something else than a full disk is in the way.
    pub fn fill(&self) -> Result<()> {
        let mut file = File::options().create(true).append(true).open(self.filler())?;
        let mut block = vec![1; 64 << 10];
        while !block.is_empty() {
            match file.write(&block) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::StorageFull => {
                    block.truncate(block.len() / 2);
                }
                Err(error) => return Err(error).context("fill the disk"),
            }
        }
        Ok(())
    }

    /// Frees what [`SmallDisk::fill`] took.
    ///
    /// # Errors
    /// When it was not filled.
    pub fn free(&self) -> Result<()> {
        std::fs::remove_file(self.filler()).context("free the disk")?;
        ensure!(!self.filler().exists(), "the filler is still there");
        Ok(())
    }
}

impl SmallDisk {
    /// Gives the disk this size.
    ///
    /// # Errors
    /// When `mount` cannot be run, or refuses.
    pub fn resize(&self, megabytes: u32) -> Result<()> {
        let mount = Command::new("mount")
            .args(["-o", &format!("remount,size={megabytes}m")])
            .arg(&self.path)
            .output()
            .context("run mount")?;
        ensure!(mount.status.success(), "{}", String::from_utf8_lossy(&mount.stderr));
        Ok(())
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazily: a server may still have files open.
        let unmounted = Command::new("umount").arg("-l").arg(&self.0).status();
        if !unmounted.is_ok_and(|status| status.success()) {
            eprintln!("still mounted: {}", self.0.display());
        }
    }
}
