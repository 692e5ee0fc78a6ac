//! The stores of a site's publications.

use crate::config::{self, SiteConfig};
use crate::site::SiteError;
use farshore_apply::cursor_owner;
use farshore_store::LogStore;
use farshore_store::segmented::{Options, SegmentedStore};
use std::path::PathBuf;
use std::sync::Arc;

/// Opens a publication's store where no node runs, if there is one.
pub(crate) fn open_existing(
    config: &SiteConfig,
    publication: &config::Publication,
) -> Result<Arc<SegmentedStore>, String> {
    let folder = folder(config, publication);
    if !folder.is_dir() {
        let name = &publication.spec.name;
        let folder = folder.display();
        return Err(format!(
            "publication \"{name}\" has no store in {folder} yet. Run the node first"
        ));
    }
    open(config, publication).map_err(|error| error.to_string())
}

fn folder(config: &SiteConfig, publication: &config::Publication) -> PathBuf {
    config.data_dir.join("publications").join(&publication.spec.name)
}

/// Opens a publication's store, creating it if it is not there. Blocks on the disk.
pub(crate) fn open(
    config: &SiteConfig,
    publication: &config::Publication,
) -> Result<Arc<SegmentedStore>, SiteError> {
    let name = &publication.spec.name;
    let folder = folder(config, publication);
    std::fs::create_dir_all(&folder).map_err(|error| SiteError::DataDir {
        action: "create",
        path: folder.clone(),
        error,
    })?;
    let options = Options { segment_bytes: publication.segment_bytes, ..Options::default() };
    let (store, _recovery) = SegmentedStore::open(&folder, options)
        .map_err(|error| SiteError::Store { publication: name.clone(), error })?;
    Ok(store)
}

/// A subscription that left the site file claims its log no longer.
pub(crate) fn drop_cursors_of_removed<'a>(
    publications: impl Iterator<Item = (&'a str, &'a SegmentedStore)>,
    config: &SiteConfig,
) {
    for (publication, store) in publications {
        for cursor in store.cursors() {
            let configured = config
                .subscriptions
                .iter()
                .any(|s| s.publication == publication && s.spec.name == cursor_owner(&cursor.name));
            if configured {
                continue;
            }
            tracing::warn!(
                %publication,
                subscription = %cursor.name,
                "no longer in the site file: its claim on the log is given up"
            );
            if let Err(error) = store.drop_cursor(&cursor.name) {
                tracing::warn!(%publication, "{error}");
            }
        }
    }
}
