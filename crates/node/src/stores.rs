//! The stores of a site's publications.

use crate::config::{self, SiteConfig};
use crate::operate::unknown;
use crate::site::SiteError;
use crate::sites::serve::cursor_of;
use farshore_apply::{cursor_owner, is_of_copy};
use farshore_store::segmented::{Options, SegmentedStore};
use farshore_store::{LogStore, StoreError};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Opens the store of a publication, of this site or received, where no node runs, if there is one.
pub(crate) fn open_existing(
    config: &SiteConfig,
    name: &str,
) -> Result<Arc<SegmentedStore>, String> {
    let (folder, log) = match (config.publication(name), config.sites.received(name)) {
        (Some(publication), _) => (folder(config, publication), &publication.log),
        (None, Some(received)) => match config.sites.upstream(&received.upstream) {
            Some(upstream) => (received_folder(config, name), &upstream.log),
            None => return Err(unknown("publication", name)),
        },
        (None, None) => return Err(unknown("publication", name)),
    };
    if !folder.is_dir() {
        let folder = folder.display();
        return Err(format!(
            "publication \"{name}\" has no store in {folder} yet. Run the node first"
        ));
    }
    open_at(&folder, name, log).map_err(|error| error.to_string())
}

fn folder(config: &SiteConfig, publication: &config::Publication) -> PathBuf {
    config.data_dir.join("publications").join(&publication.spec.name)
}

/// Opens a publication's store, creating it if it is not there. Blocks on the disk.
pub(crate) fn open(
    config: &SiteConfig,
    publication: &config::Publication,
) -> Result<Arc<SegmentedStore>, SiteError> {
    open_at(&folder(config, publication), &publication.spec.name, &publication.log)
}

/// The folder of a received publication's store.
pub(crate) fn received_folder(config: &SiteConfig, name: &str) -> PathBuf {
    config.data_dir.join("received").join(name.replace('/', "+"))
}

/// A verb without a node has a store open for a moment: so long it is waited for.
const OPEN_WITHIN: Duration = Duration::from_secs(10);

/// Opens the store of a publication in this folder, creating it if it is not there.
pub(crate) fn open_at(
    folder: &Path,
    name: &str,
    log: &config::LogSettings,
) -> Result<Arc<SegmentedStore>, SiteError> {
    std::fs::create_dir_all(folder).map_err(|error| SiteError::DataDir {
        action: "create",
        path: folder.to_owned(),
        error,
    })?;
    let options = Options { segment_bytes: log.segment_bytes, ..Options::default() };
    let until = Instant::now() + OPEN_WITHIN;
    loop {
        match SegmentedStore::open(folder, options.clone()) {
            Ok((store, _recovery)) => return Ok(store),
            Err(StoreError::Locked { .. }) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(100));
            }
            Err(error) => return Err(SiteError::Store { publication: name.to_owned(), error }),
        }
    }
}

/// Whose cursor it is, for people.
pub(crate) fn reader_of(cursor: &str) -> String {
    match cursor.strip_prefix('@') {
        Some(site) => format!("downstream site {site}"),
        None if is_of_copy(cursor) => {
            format!("a copy of tables of subscription {}", cursor_owner(cursor))
        }
        None => format!("subscription {cursor}"),
    }
}

/// What becomes of whom retention took log from that it still needed.
pub(crate) fn without_its_log(cursor: &str) -> &'static str {
    if is_of_copy(cursor) {
        "tables whose copy was begun start over"
    } else {
        "it must be copied anew"
    }
}

/// A subscription that left the site file claims its log no longer.
pub(crate) fn drop_cursors_of_removed<'a>(
    publications: impl Iterator<Item = (&'a str, &'a SegmentedStore)>,
    config: &SiteConfig,
) {
    for (publication, store) in publications {
        for cursor in store.cursors() {
            let subscribed = config
                .subscriptions
                .iter()
                .any(|s| s.publication == publication && s.spec.name == cursor_owner(&cursor.name));
            let granted = config.sites.downstreams.iter().any(|site| {
                cursor_of(&site.site) == cursor.name
                    && site.publications.iter().any(|granted| granted == publication)
            });
            if subscribed || granted {
                continue;
            }
            tracing::warn!(
                %publication,
                reader = %reader_of(&cursor.name),
                "no longer in the site file: its claim on the log is given up"
            );
            if let Err(error) = store.drop_cursor(&cursor.name) {
                tracing::warn!(%publication, "{error}");
            }
        }
    }
}
