//! Certificates and lists of revocations that are replaced while the node runs are used from then
//! on: a certificate lasts for some time, and a node may run longer.

use crate::agents::lock;
use farshore_link::{Dialer, Identity, IdentityFiles, Listener};
use farshore_model::PgTime;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use tokio::time::Instant;

/// The files are looked at this often.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// A certificate that expires soon is told of in the log this often.
const TELL_EVERY: Duration = Duration::from_secs(24 * 3_600);

/// What to do in time.
pub(crate) const RENEW: &str = "Make another by the same authority (farshore site-cert issue --dir \
     DIR, after the old one was moved out of DIR) and put it, with its key, where that one is: it is \
     used within half a minute, without a restart";

/// How long the certificate that is used lasts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lifetime {
    expires: SystemTime,
    soon_from: SystemTime,
}

impl Lifetime {
    /// Of this one's.
    pub fn of(identity: &Identity) -> Lifetime {
        Lifetime { expires: identity.expires(), soon_from: identity.expires_soon_from() }
    }

    /// Seconds that are left; less than zero once it has expired.
    pub fn seconds_left(self, now: SystemTime) -> f64 {
        match self.expires.duration_since(now) {
            Ok(left) => left.as_secs_f64(),
            Err(expired) => -expired.duration().as_secs_f64(),
        }
    }

    /// Whether somebody should know.
    pub fn ends_soon(self, now: SystemTime) -> bool {
        now >= self.soon_from
    }

    /// When it ends, for people; nothing while that is far away.
    pub fn warning(self, now: SystemTime) -> Option<String> {
        if !self.ends_soon(now) {
            return None;
        }
        let (left, at) = (self.seconds_left(now), PgTime::from(self.expires));
        Some(match left {
            ..0.0 => format!("expired at {at}: other sites refuse it"),
            _ => format!(
                "expires in {}, at {at}: other sites will refuse it then",
                farshore_monitor::days_left(left)
            ),
        })
    }
}

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
    /// Of the certificate that they show.
    pub lifetime: Arc<Mutex<Lifetime>>,
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
        let (mut used, mut before) = (self.loaded.clone(), self.loaded.clone());
        let mut told_at: Option<Instant> = None;
        // Why those that are there cannot be used, as it was said last.
        let mut refused: Option<String> = None;
        loop {
            if told_at.is_none_or(|told| told.elapsed() >= TELL_EVERY)
                && let Some(ends) = lock(&self.lifetime).warning(SystemTime::now())
            {
                let certificate = self.files.certificate.display();
                tracing::warn!("the site's certificate {certificate} {ends}. {RENEW}");
                told_at = Some(Instant::now());
            }
            tokio::time::sleep(LOOK_EVERY).await;
            let now = Seen::look(&self.files, &self.revocations);
            // Who replaces several files is let finish.
            let is_settled = now == before;
            before = now.clone();
            if now == used {
                refused = None;
                continue;
            }
            if !is_settled {
                continue;
            }
            // Tried at each look until they can be used: what is mended may not show in what is seen,
            // as with their permissions. Until then nothing changes: a revocation that came with
            // them is still to end sessions when it can.
            match self.take(&now, &used) {
                Ok(()) => (used, refused) = (now, None),
                Err(why) if refused.as_ref() == Some(&why) => {}
                Err(why) => {
                    tracing::error!("{why}. Going on with those from before");
                    refused = Some(why);
                }
            }
        }
    }

    /// Uses them.
    ///
    /// # Errors
    /// Why they cannot be used; then those from before are.
    fn take(&self, now: &Seen, before: &Seen) -> Result<(), String> {
        let certificate = self.files.certificate.display();
        let mut files = self.files.clone();
        if self.revocations.exists() {
            files.revoked = Some(self.revocations.clone());
        }
        let unusable = |error: &dyn std::error::Error| {
            format!("certificates were replaced and cannot be used: {error}")
        };
        let identity = Identity::load(&files).map_err(|error| unusable(&error))?;
        let identity = Arc::new(identity);
        if identity.site() != self.site {
            return Err(format!(
                "the certificate {certificate} was replaced by one for site \"{}\"",
                identity.site()
            ));
        }
        for dialer in &self.dialers {
            dialer.set_identity(&identity).map_err(|error| unusable(&error))?;
        }
        *lock(&self.lifetime) = Lifetime::of(&identity);
        if let Some(listener) = &self.listener {
            if now.judging == before.judging {
                listener.set_identity(identity);
            } else {
                // Ends all sessions; who is still trusted is back in a moment.
                listener.judge_anew(identity);
            }
        }
        tracing::info!("certificates were replaced: {certificate} and its authorities are used");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use farshore_link::certificates::Authority;
    use std::fs::{Permissions, rename, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    /// A mode that was mended shows in neither time nor length.
    #[tokio::test(start_paused = true)]
    async fn certificates_that_could_not_be_used_are_once_that_is_mended() {
        let folder = tempfile::tempdir().unwrap();
        let authority = Authority::create(&folder.path().join("authority")).unwrap();
        let made = authority.issue("here", 30, folder.path()).unwrap();
        let files = IdentityFiles {
            certificate: made.certificate.clone(),
            key: made.key.clone(),
            authorities: authority.certificate(),
            revoked: None,
        };
        let revocations = folder.path().join("revoked.crl");
        let loaded = Seen::look(&files, &revocations);
        let lifetime = Arc::new(Mutex::new(Lifetime::of(&Identity::load(&files).unwrap())));
        let expires = || lock(&lifetime).expires;
        let before = expires();
        let renewal = Renewal {
            files,
            revocations,
            loaded,
            site: "here".to_owned(),
            dialers: Vec::new(),
            listener: None,
            lifetime: lifetime.clone(),
        };
        tokio::spawn(renewal.watch());
        let newer = folder.path().join("newer");
        std::fs::create_dir(&newer).unwrap();
        let newer = authority.issue("here", 60, &newer).unwrap();
        set_permissions(&newer.key, Permissions::from_mode(0o644)).unwrap();
        rename(&newer.key, &made.key).unwrap();
        rename(&newer.certificate, &made.certificate).unwrap();
        tokio::time::sleep(4 * LOOK_EVERY).await;
        assert_eq!(expires(), before);
        set_permissions(&made.key, Permissions::from_mode(0o600)).unwrap();
        tokio::time::sleep(4 * LOOK_EVERY).await;
        assert!(expires() > before);
    }

    #[test]
    fn the_end_of_a_certificate_is_told_in_time() {
        let day = Duration::from_secs(24 * 3_600);
        let expires = SystemTime::UNIX_EPOCH + 1_000 * day;
        let lifetime = Lifetime { expires, soon_from: expires - 30 * day };
        assert_eq!(lifetime.warning(expires - 31 * day), None);
        let soon = lifetime.warning(expires - 12 * day).unwrap();
        assert!(soon.starts_with("expires in 12 days, at 1972-09-27"), "{soon}");
        let late = lifetime.warning(expires + day).unwrap();
        assert!(late.starts_with("expired at 1972-09-27"), "{late}");
        assert!(lifetime.seconds_left(expires + day) < 0.0);
    }
}
