//! Publications from site to site.
//!
//! ```text
//! protocol   what is asked for when a session is opened, and what its messages are
//! receive    at the downstream site: a publication's log from its upstream site into a store here
//! serve      at the upstream site: sessions of downstream sites, and what they may have
//! crossing   a log's blocks as they cross
//! packing    blocks that cross several at a time, while the line is what is waited for
//! renewal    certificates that are replaced while the node runs
//! channel    a session, as what a far subscription asks its publisher through
//! measure    what the line between two sites can carry
//! ```
//!
//! A log crosses once, whoever applies it there, as its blocks are stored. An upstream store keeps
//! what a downstream site does not hold durably: its cursor there moves on [`protocol::FromDownstream::Durable`]
//! and on nothing else.

mod channel;
mod crossing;
pub(crate) mod measure;
mod packing;
pub(crate) mod protocol;
pub(crate) mod receive;
pub(crate) mod renewal;
pub(crate) mod serve;

pub(crate) use channel::SourceOpener;

use crate::config::sites::SitesConfig;
use farshore_link::{Dialer, Identity, LinkError, LinkOptions};
use farshore_store::StoreError;

/// A dialer for an upstream site; `None` if the site file names none of that name.
pub(crate) fn dialer(
    sites: &SitesConfig,
    site: &str,
    identity: &Identity,
) -> Result<Option<Dialer>, LinkError> {
    let Some(upstream) = sites.upstream(site) else { return Ok(None) };
    let options = LinkOptions { connections: upstream.connections, ..LinkOptions::default() };
    Dialer::new(&upstream.address, site, identity, options).map(Some)
}

/// Reads or writes a store where that may wait for the disk.
async fn on_disk<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, StoreError> + Send + 'static,
) -> Result<T, StoreError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(_) => Err(StoreError::Unknown("thread to read or write it by any more".to_owned())),
    }
}
