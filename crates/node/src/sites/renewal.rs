//! Certificates and lists of revocations that are replaced while the node runs are used from then
//! on: a certificate lasts for some time, and a node may run longer.

use farshore_link::{Dialer, Identity, IdentityFiles, Listener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// The files are looked at this often.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// All that shows this site's certificate, or judges others'.
pub(crate) struct Renewal {
    /// Where they are.
    pub files: IdentityFiles,
    /// Where a list of revocations may come to be.
    pub revocations: PathBuf,
    /// As the files were seen before they were loaded.
    pub loaded: Seen,
    /// Who this is.
    pub site: String,
    /// To upstream sites.
    pub dialers: Vec<Dialer>,
    /// For downstream sites.
    pub listener: Option<Arc<Listener>>,
}

/// What is seen of the files from outside.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Seen {
    own: [Option<(SystemTime, u64)>; 2],
    /// What stands in them: a list that was written again as it was ends no sessions.
    judging: [Option<Vec<u8>>; 2],
}

impl Seen {
    /// Blocks on the disk.
    pub fn look(files: &IdentityFiles, revocations: &Path) -> Seen {
        let IdentityFiles { certificate, key, authorities, .. } = files;
        Seen {
            own: [seen(certificate), seen(key)],
            judging: [std::fs::read(authorities).ok(), std::fs::read(revocations).ok()],
        }
    }
}

fn seen(path: &Path) -> Option<(SystemTime, u64)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.modified().ok()?, metadata.len()))
}

impl Renewal {
    /// Looks again and again.
    pub async fn watch(self) {
        let (mut used, mut tried, mut before) =
            (self.loaded.clone(), self.loaded.clone(), self.loaded.clone());
        loop {
            tokio::time::sleep(LOOK_EVERY).await;
            let now = Seen::look(&self.files, &self.revocations);
            // Who replaces several files is let finish.
            let is_settled = now == before;
            before = now.clone();
            if now == tried || !is_settled {
                continue;
            }
            // What could not be used changes nothing: a revocation that came with it is still to end
            // sessions when it can.
            if self.take(&now, &used) {
                used = now.clone();
            }
            tried = now;
        }
    }

    /// Whether they can be used.
    fn take(&self, now: &Seen, before: &Seen) -> bool {
        let certificate = self.files.certificate.display();
        let mut files = self.files.clone();
        if self.revocations.exists() {
            files.revoked = Some(self.revocations.clone());
        }
        let identity = match Identity::load(&files) {
            Ok(identity) if identity.site() == self.site => Arc::new(identity),
            Ok(identity) => {
                tracing::error!(
                    "the certificate {certificate} was replaced by one for site \"{}\": going on \
                     with the one from before",
                    identity.site()
                );
                return false;
            }
            Err(error) => {
                tracing::error!(
                    "certificates were replaced and cannot be used: {error}. Going on with those \
                     from before"
                );
                return false;
            }
        };
        for dialer in &self.dialers {
            if let Err(error) = dialer.set_identity(&identity) {
                tracing::error!("certificates were replaced and cannot be used: {error}");
                return false;
            }
        }
        if let Some(listener) = &self.listener {
            if now.judging == before.judging {
                listener.set_identity(identity);
            } else {
                // Ends all sessions; who is still trusted is back in a moment.
                listener.judge_anew(identity);
            }
        }
        tracing::info!("certificates were replaced: {certificate} and its authorities are used");
        true
    }
}
