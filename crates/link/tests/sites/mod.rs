//! Two sites of one authority, connected over loopback.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod log;
pub mod raw;
pub mod relay;

use anyhow::{Context, Result};
use farshore_link::certificates::Authority;
use farshore_link::{Dialer, Identity, IdentityFiles, LinkOptions, Listener, Session};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;

/// Longer than anything in a test takes, however busy the machine: for "it comes to an end".
pub const LONG: Duration = Duration::from_secs(180);

pub struct Sites {
    folder: TempDir,
    pub authority: Authority,
}

impl Sites {
    pub fn new() -> Result<Sites> {
        let folder = tempfile::tempdir()?;
        let authority = Authority::create(&folder.path().join("authority"))?;
        Ok(Sites { folder, authority })
    }

    /// A folder of its own for each set of files.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.folder.path().join(name);
        std::fs::create_dir_all(&folder)?;
        Ok(folder)
    }

    /// Where a new identity of `site` lies.
    pub fn files(&self, site: &str) -> Result<IdentityFiles> {
        let made = self.authority.issue(site, 30, &self.folder(site)?)?;
        Ok(self.files_of(&made.certificate, &made.key))
    }

    pub fn files_of(&self, certificate: &Path, key: &Path) -> IdentityFiles {
        IdentityFiles {
            certificate: certificate.to_owned(),
            key: key.to_owned(),
            authorities: self.authority.certificate(),
            revoked: Some(self.authority.revoked()),
        }
    }

    pub fn identity(&self, site: &str) -> Result<Arc<Identity>> {
        Ok(Arc::new(Identity::load(&self.files(site)?)?))
    }
}

pub fn options(connections: usize) -> LinkOptions {
    // A busy machine is no silent peer, and no ping shall wake what should have been woken before.
    LinkOptions { connections, keepalive: LONG / 3, dead_after: LONG, ..LinkOptions::default() }
}

/// A listener "near" and an identity "far" that may dial it.
pub async fn near_and_far(options: LinkOptions) -> Result<(Sites, Listener, Arc<Identity>)> {
    let sites = Sites::new()?;
    let listener = Listener::bind("127.0.0.1:0", sites.identity("near")?, options).await?;
    let far = sites.identity("far")?;
    Ok((sites, listener, far))
}

/// The two ends of a session: the dialer's, then the listener's.
pub async fn connected(options: LinkOptions) -> Result<(Session, Session)> {
    let (_sites, listener, far) = near_and_far(options.clone()).await?;
    let address = listener.local_address().to_string();
    open(&listener, &address, &far, options).await
}

/// Opens a session through `address`, which leads to `listener`.
pub async fn open(
    listener: &Listener,
    address: &str,
    far: &Identity,
    options: LinkOptions,
) -> Result<(Session, Session)> {
    let dialer = Dialer::new(address, "near", far, options.clone())?;
    let (dialed, accepted) =
        tokio::join!(dialer.open(b"hello"), async { listener.next().await.accept(options).await });
    Ok((dialed.context("dial")?, accepted.context("accept")?))
}

pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> Result<T> {
    tokio::time::timeout(LONG, future).await.with_context(|| format!("never happened: {what}"))
}
