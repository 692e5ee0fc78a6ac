//! Who this site is, and whom it trusts.

use crate::site_name::{last_second_of_signer, site_of, validity_of};
use crate::trust::{PeerCheck, why_untrusted};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{CertificateError, ClientConfig, RootCertStore, ServerConfig};
use std::fmt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// So that two services that trust the same authority cannot be mistaken for each other.
const ALPN: &[u8] = b"farshore-link";

/// That long before a certificate expires it is to be told; of one that lasts for less than three
/// times as long, in its last third.
const TOLD_BEFORE: Duration = Duration::from_secs(30 * 24 * 3_600);

/// Where a site's identity is kept; all PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdentityFiles {
    /// This site's certificate, then any that lie between it and the authority's.
    pub certificate: PathBuf,
    /// The certificate's key, readable by its owner alone.
    pub key: PathBuf,
    /// Certificates of the authorities whose sites may connect.
    pub authorities: PathBuf,
    /// Certificates that their authorities have revoked (a CRL).
    pub revoked: Option<PathBuf>,
}

/// Why an identity cannot be used. Each message names the file.
#[derive(Clone, Debug, thiserror::Error)]
pub enum IdentityError {
    /// The operating system refused.
    #[error(
        "cannot read {what} {path}: {error}. Make one with `farshore site-cert`, or correct the path"
    )]
    Unreadable {
        /// What the file is for.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        error: String,
    },
    /// The file does not hold what it should.
    #[error("{what} {path} cannot be used: {why}")]
    Unusable {
        /// What the file is for.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        why: String,
    },
}

/// This site's certificate and key, and the authorities it trusts.
pub struct Identity {
    site: String,
    certificates: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
    expires: SystemTime,
    expires_soon_from: SystemTime,
    provider: Arc<CryptoProvider>,
    chain: Arc<WebPkiServerVerifier>,
    server: Arc<ServerConfig>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Never the key.
        f.debug_struct("Identity").field("site", &self.site).finish_non_exhaustive()
    }
}

impl Identity {
    /// Reads the files. A certificate outside its validity is loaded with a warning: what counts
    /// is the peer's clock.
    pub fn load(files: &IdentityFiles) -> Result<Identity, IdentityError> {
        let certificates = certificates("the site's certificate", &files.certificate)?;
        let unusable =
            |what, path: &Path, why| IdentityError::Unusable { what, path: path.to_owned(), why };
        let own = |why| unusable("the site's certificate", &files.certificate, why);
        let site = site_of(&certificates[0]).map_err(own)?;
        let (not_before, not_after) = validity_of(&certificates[0]).map_err(own)?;
        warn_if_invalid_now(&files.certificate, not_before, not_after);

        check_key_permissions(&files.key)?;
        let key = PrivateKeyDer::from_pem_slice(&read("the site's key", &files.key)?)
            .map_err(|error| unusable("the site's key", &files.key, format!("{error}")))?;

        let authorities = |why| unusable("the authorities' certificate", &files.authorities, why);
        let mut roots = RootCertStore::empty();
        for certificate in self::certificates("the authorities' certificate", &files.authorities)? {
            roots.add(certificate).map_err(|error| authorities(error.to_string()))?;
        }
        let roots = Arc::new(roots);
        let revoked = files.revoked.as_deref().map(revoked).transpose()?.unwrap_or_default();
        let revoked_failed = |error: &dyn fmt::Display| {
            let path = files.revoked.as_ref().unwrap_or(&files.authorities);
            unusable("the list of revoked certificates", path, error.to_string())
        };

        let provider = Arc::new(rustls::crypto::ring::default_provider());
        // A site of another authority than the list's is judged by its certificate alone.
        let chain = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
            .with_crls(revoked.clone())
            .allow_unknown_revocation_status()
            .build()
            .map_err(|error| revoked_failed(&error))?;
        let clients = WebPkiClientVerifier::builder_with_provider(roots, provider.clone())
            .with_crls(revoked)
            .allow_unknown_revocation_status()
            .build()
            .map_err(|error| revoked_failed(&error))?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(|error| own(error.to_string()))?
            .with_client_cert_verifier(clients)
            .with_single_cert(certificates.clone(), key.clone_key())
            .map_err(|error| own(mismatch(&error, &files.key)))?;
        server.alpn_protocols = vec![ALPN.to_vec()];
        // A resumed session would not look at revocations made since.
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        let seconds =
            |seconds: i64| Duration::from_secs(u64::try_from(seconds).unwrap_or_default());
        // What an authority in between has signed is refused once its own certificate has expired.
        let of_between =
            certificates[1..].iter().filter_map(|signer| last_second_of_signer(signer));
        let last_second = of_between.fold(not_after, i64::min);
        let expires = UNIX_EPOCH + seconds(last_second);
        let a_third = seconds(last_second.saturating_sub(not_before)) / 3;
        let expires_soon_from = expires.checked_sub(TOLD_BEFORE.min(a_third)).unwrap_or(expires);
        let server = Arc::new(server);
        Ok(Identity {
            site,
            certificates,
            key,
            expires,
            expires_soon_from,
            provider,
            chain,
            server,
        })
    }

    /// The site that our own certificate names.
    pub fn site(&self) -> &str {
        &self.site
    }

    /// When our own certificate stops being valid, or one of those that stand behind it in its file,
    /// if that is sooner.
    pub fn expires(&self) -> SystemTime {
        self.expires
    }

    /// From when on that is to be told, so that another one is made in time.
    pub fn expires_soon_from(&self) -> SystemTime {
        self.expires_soon_from
    }

    /// What a peer that trusts the same authorities would say of our own certificate now, if
    /// anything, and whether every peer would say so.
    pub fn doubt(&self) -> Option<(String, bool)> {
        let check = PeerCheck::new(self.chain.clone(), self.provider.clone(), &self.site);
        let (own, between) = self.certificates.split_first()?;
        let error = check.judge(own, between, UnixTime::now()).err()?;
        let by_all = !matches!(
            error,
            rustls::Error::InvalidCertificate(
                CertificateError::UnknownIssuer | CertificateError::BadSignature
            )
        );
        Some((why_untrusted(&error).unwrap_or_else(|| error.to_string()), by_all))
    }

    /// For a listener.
    pub(crate) fn server(&self) -> Arc<ServerConfig> {
        self.server.clone()
    }

    /// For a dialer that expects `site`.
    pub(crate) fn client(&self, site: &str) -> Result<Arc<ClientConfig>, rustls::Error> {
        let check = PeerCheck::new(self.chain.clone(), self.provider.clone(), site);
        let mut client = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(check))
            .with_client_auth_cert(self.certificates.clone(), self.key.clone_key())?;
        client.alpn_protocols = vec![ALPN.to_vec()];
        client.resumption = Resumption::disabled();
        // Names of sites are nobody else's business.
        client.enable_sni = false;
        Ok(Arc::new(client))
    }
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, IdentityError> {
    std::fs::read(path).map_err(|error| IdentityError::Unreadable {
        what,
        path: path.to_owned(),
        error: error.to_string(),
    })
}

fn certificates(
    what: &'static str,
    path: &Path,
) -> Result<Vec<CertificateDer<'static>>, IdentityError> {
    let unusable = |why| IdentityError::Unusable { what, path: path.to_owned(), why };
    let bytes = read(what, path)?;
    let found: Vec<_> = CertificateDer::pem_slice_iter(&bytes)
        .collect::<Result<_, _>>()
        .map_err(|error| unusable(error.to_string()))?;
    if found.is_empty() {
        return Err(unusable("it holds no certificate in PEM form".to_owned()));
    }
    Ok(found)
}

fn revoked(path: &Path) -> Result<Vec<CertificateRevocationListDer<'static>>, IdentityError> {
    let what = "the list of revoked certificates";
    let unusable = |why| IdentityError::Unusable { what, path: path.to_owned(), why };
    let bytes = read(what, path)?;
    let found: Vec<_> = CertificateRevocationListDer::pem_slice_iter(&bytes)
        .collect::<Result<_, _>>()
        .map_err(|error| unusable(error.to_string()))?;
    if found.is_empty() {
        return Err(unusable("it holds no list (X509 CRL) in PEM form".to_owned()));
    }
    Ok(found)
}

/// A key belongs to its owner alone, or to root and a group that may read it.
fn check_key_permissions(path: &Path) -> Result<(), IdentityError> {
    let what = "the site's key";
    let metadata = std::fs::metadata(path).map_err(|error| IdentityError::Unreadable {
        what,
        path: path.to_owned(),
        error: error.to_string(),
    })?;
    let mode = metadata.permissions().mode() & 0o777;
    let forbidden = if metadata.uid() == 0 { 0o027 } else { 0o077 };
    if mode & forbidden == 0 {
        return Ok(());
    }
    let why = format!("its mode {mode:04o} lets others at it; run: chmod 0600 {}", path.display());
    Err(IdentityError::Unusable { what, path: path.to_owned(), why })
}

fn mismatch(error: &rustls::Error, key: &Path) -> String {
    match error {
        rustls::Error::InconsistentKeys(_) => format!(
            "it does not belong to the key {}; give the two that were made together",
            key.display()
        ),
        _ => error.to_string(),
    }
}

fn warn_if_invalid_now(path: &Path, not_before: i64, not_after: i64) {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = i64::try_from(since_epoch.as_secs()).unwrap_or(i64::MAX);
    let path = path.display();
    if now > not_after {
        let days = (now - not_after) / 86_400;
        tracing::warn!(
            "the site's certificate {path} expired {days} days ago: peers will refuse it. Make \
             another with `farshore site-cert`"
        );
    } else if now < not_before {
        tracing::warn!(
            "the site's certificate {path} is not valid yet: peers will refuse it. Check this \
             machine's clock"
        );
    }
}
