//! Sites whose certificates an authority between them and the trusted one has signed.

mod sites;

use anyhow::{Context, Result, ensure};
use farshore_link::{Dialer, Identity, IdentityFiles, LinkOptions, Listener};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, IsCa, Issuer,
    KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams, SanType, SerialNumber,
};
use sites::{open, options, soon};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tempfile::TempDir;
use time::OffsetDateTime;

/// An authority, and its certificate.
struct Signer {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// An authority that sites trust, and one that it has signed, which signs the sites' certificates.
struct Chain {
    folder: TempDir,
    root: Signer,
    between: Signer,
}

fn authority(name: &str, days: i64) -> Result<(CertificateParams, KeyPair)> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.not_before = OffsetDateTime::now_utc() - time::Duration::days(1);
    params.not_after = OffsetDateTime::now_utc() + time::Duration::days(days);
    Ok((params, KeyPair::generate()?))
}

impl Chain {
    /// The one between is valid for so many days.
    fn new(days: i64) -> Result<Chain> {
        let folder = tempfile::tempdir()?;
        let (params, key) = authority("the root", 900)?;
        let pem = params.self_signed(&key)?.pem();
        let root = Signer { issuer: Issuer::new(params, key), pem };
        fs::write(folder.path().join("ca.crt"), &root.pem)?;
        let (params, key) = authority("between", days)?;
        let pem = params.signed_by(&key, &root.issuer)?.pem();
        let between = Signer { issuer: Issuer::new(params, key), pem };
        Ok(Chain { folder, root, between })
    }

    /// A site's certificate, with what `behind` holds in its file too, and the root alone trusted.
    fn files(&self, site: &str, behind: &[&str]) -> Result<IdentityFiles> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, site);
        params.subject_alt_names = vec![SanType::URI(format!("farshore:site:{site}").try_into()?)];
        params.serial_number = Some(SerialNumber::from_slice(site.as_bytes()));
        params.not_before = OffsetDateTime::now_utc() - time::Duration::days(1);
        params.not_after = OffsetDateTime::now_utc() + time::Duration::days(300);
        let pair = KeyPair::generate()?;
        let own = params.signed_by(&pair, &self.between.issuer)?.pem();
        let at = |name: &str| -> PathBuf { self.folder.path().join(name) };
        let (certificate, key) = (at(&format!("{site}.crt")), at(&format!("{site}.key")));
        fs::write(&certificate, format!("{own}{}", behind.concat()))?;
        fs::write(&key, pair.serialize_pem())?;
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
        Ok(IdentityFiles { certificate, key, authorities: at("ca.crt"), revoked: None })
    }

    fn identity(&self, site: &str, behind: &[&str]) -> Result<Arc<Identity>> {
        Ok(Arc::new(Identity::load(&self.files(site, behind)?)?))
    }

    /// A list of one authority, in which a site's certificate stands, if one is named.
    fn list(&self, of: &Signer, site: Option<&str>) -> Result<PathBuf> {
        let now = OffsetDateTime::now_utc();
        let revoked = site.map(|site| RevokedCertParams {
            serial_number: SerialNumber::from_slice(site.as_bytes()),
            revocation_time: now,
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: now - time::Duration::hours(1),
            next_update: now + time::Duration::days(30),
            crl_number: SerialNumber::from(1),
            issuing_distribution_point: None,
            revoked_certs: revoked.into_iter().collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let path = self.folder.path().join("revoked.crl");
        fs::write(&path, list.signed_by(&of.issuer)?.pem()?)?;
        Ok(path)
    }
}

#[tokio::test]
async fn a_peer_needs_the_root_alone() -> Result<()> {
    let chain = Chain::new(600)?;
    let (between, root) = (chain.between.pem.as_str(), chain.root.pem.as_str());
    // Some give the root along with the rest.
    for (near, far) in [(&[between][..], &[between, root][..]), (&[between, root], &[between])] {
        let (near, far) = (chain.identity("near", near)?, chain.identity("far", far)?);
        ensure!(near.doubt().is_none() && far.doubt().is_none(), "{:?}", far.doubt());
        let listener = Listener::bind("127.0.0.1:0", near, options(2)).await?;
        let address = listener.local_address().to_string();
        let opened = soon("a session", open(&listener, &address, &far, options(2))).await?;
        let (dialed, accepted) = opened?;
        ensure!(dialed.peer_site() == "near" && accepted.peer_site() == "far");
    }
    Ok(())
}

/// Whoever gives his own certificate alone is told so, before a peer refuses it.
#[tokio::test]
async fn without_the_one_between_it_is_said_where_that_has_to_stand() -> Result<()> {
    let chain = Chain::new(600)?;
    let near = chain.identity("near", &[&chain.between.pem])?;
    let far = chain.identity("far", &[])?;
    let (doubt, _) = far.doubt().context("no doubt")?;
    ensure!(doubt.contains("behind its own"), "{doubt}");
    let listener = Listener::bind("127.0.0.1:0", near, options(2)).await?;
    let address = listener.local_address().to_string();
    let dialer = Dialer::new(&address, "near", &far, LinkOptions::default())?;
    let refused = soon("an answer", dialer.open(b"hello")).await?;
    let refused = refused.err().context("it got in")?.to_string();
    ensure!(refused.contains("behind our own"), "{refused}");
    Ok(())
}

/// Peers refuse all that it has signed from then on.
#[test]
fn what_expires_first_counts() -> Result<()> {
    let chain = Chain::new(100)?;
    let day = Duration::from_secs(86_400);
    let left = |behind: &[&str]| -> Result<u64> {
        let identity = chain.identity("far", behind)?;
        let left = identity.expires().duration_since(SystemTime::now())? + Duration::from_secs(60);
        Ok(left.as_secs() / day.as_secs())
    };
    ensure!(left(&[&chain.between.pem])? == 100, "the one between");
    // A peer has its own copy of the root, whose dates nobody looks at.
    let short_root = {
        let (params, key) = authority("a root that expires soon", 10)?;
        params.self_signed(&key)?.pem()
    };
    ensure!(left(&[&chain.between.pem, &short_root])? == 100, "a root");
    ensure!(left(&[])? == 300, "its own");
    Ok(())
}

#[tokio::test]
async fn lists_of_either_authority_count() -> Result<()> {
    let chain = Chain::new(600)?;
    for (of, revoked, gets_in) in [
        (&chain.between, None, true),
        (&chain.root, None, true),
        (&chain.between, Some("far"), false),
    ] {
        let mut near = chain.files("near", &[&chain.between.pem])?;
        near.revoked = Some(chain.list(of, revoked)?);
        let near = Arc::new(Identity::load(&near)?);
        let far = chain.identity("far", &[&chain.between.pem])?;
        let listener = Listener::bind("127.0.0.1:0", near, options(2)).await?;
        let address = listener.local_address().to_string();
        if gets_in {
            soon("a session", open(&listener, &address, &far, options(2))).await??;
            continue;
        }
        let dialer = Dialer::new(&address, "near", &far, LinkOptions::default())?;
        let refused = soon("an answer", dialer.open(b"hello")).await?;
        let refused = refused.err().context("it got in")?.to_string();
        ensure!(refused.contains("revoked"), "{refused}");
    }
    Ok(())
}
