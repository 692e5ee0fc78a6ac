//! Copies of a cluster: backups to go back to, and standbys.

use super::cluster::{Cluster, StopMode};
use super::template::copy_tree;
use crate::wan::Namespace;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};

/// A data directory as it was when the server was stopped.
#[derive(Debug)]
pub struct Backup {
    directory: PathBuf,
}

impl Cluster {
    /// Stops the server, copies its data directory, and starts it again.
    ///
    /// # Errors
    /// When the server does not stop or start, or there is no room.
    pub fn back_up(&mut self) -> Result<Backup> {
        self.stop(StopMode::Fast)?;
        let name = format!("backup-{}", rand::random::<u32>());
        let directory = self.data_dir().with_file_name(name);
        copy_tree(&self.data_dir(), &directory)?;
        self.start()?;
        Ok(Backup { directory })
    }

    /// Stops the server, puts the backup in place of its data, and starts it again.
    ///
    /// # Errors
    /// When the server does not stop or start, or there is no room.
    pub fn restore(&mut self, backup: &Backup) -> Result<()> {
        self.stop(StopMode::Fast)?;
        std::fs::remove_dir_all(self.data_dir()).context("remove the data directory")?;
        copy_tree(&backup.directory, &self.data_dir())?;
        self.start()
    }

    /// A server, not started, on a data directory that something else has made, which is moved to
    /// a place of the test kit's. It gets a port of its own.
    ///
    /// # Errors
    /// When the directory cannot be moved or written to.
    pub fn adopt(&self, data_dir: &Path) -> Result<Cluster> {
        let adopted = self.without_copy()?;
        std::fs::rename(data_dir, adopted.data_dir()).context("move the data directory")?;
        adopted.configure_again()?;
        Ok(adopted)
    }

    /// A physical standby, started, that follows this server through its slot `standby`, which is
    /// made. This server is stopped for a moment. `without` names logical slots that the standby
    /// does not get with the copy; others it keeps as slots of its own.
    ///
    /// # Errors
    /// When a server does not stop or start, or there is no room.
    pub fn standby(&mut self, settings: &[(&str, &str)], without: &[&str]) -> Result<Cluster> {
        let place = self.place().cloned();
        self.standby_in(place, settings, without)
    }

    /// As [`Cluster::standby`], in a network namespace of its own.
    ///
    /// # Errors
    /// As [`Cluster::standby`].
    pub fn standby_in(
        &mut self,
        place: Option<Namespace>,
        settings: &[(&str, &str)],
        without: &[&str],
    ) -> Result<Cluster> {
        self.execute_script("SELECT pg_create_physical_replication_slot('standby', true)")?;
        self.stop(StopMode::Fast)?;
        let source = format!(
            "host=127.0.0.1 port={} user=postgres dbname=postgres application_name=standby",
            self.port()
        );
        let mut all = vec![
            ("primary_conninfo", source.as_str()),
            ("primary_slot_name", "standby"),
            ("hot_standby_feedback", "on"),
        ];
        all.extend(settings);
        let mut standby = self.stopped_copy_in(place, &all)?;
        for slot in without.iter().chain(&["standby"]) {
            let directory = standby.data_dir().join("pg_replslot").join(slot);
            ensure!(directory.is_dir(), "{} is no slot", directory.display());
            std::fs::remove_dir_all(directory)?;
        }
        standby.write_as_server(Path::new("standby.signal"), "")?;
        self.start()?;
        standby.start()?;
        Ok(standby)
    }
}
