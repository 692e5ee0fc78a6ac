//! A private authority for the sites of one installation, kept in a folder.
//!
//! | file | what |
//! | --- | --- |
//! | `ca.crt` | the authority's certificate; every site gets a copy |
//! | `ca.key` | its key, mode 0600; never leaves this folder |
//! | `revoked.crl` | certificates revoked; every site gets a copy when it changes |
//! | `issued` | one line per certificate issued: serial, site, last day, and when it was revoked |
//!
//! Keys are ECDSA P-256. Nothing is overwritten but `revoked.crl` and `issued`, each as a whole.

use crate::site_name::{SITE_URI, check_site_name};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName,
    DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SanType, SerialNumber,
};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt::{self, Write as _};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use time::{Duration, OffsetDateTime};

/// How long an authority's certificate is valid.
const AUTHORITY_DAYS: i64 = 20 * 365;

/// Longest validity of a site's certificate.
pub const VALID_DAYS_MAX: u32 = 10 * 365;

/// Clocks of sites may differ by so much.
const CLOCK_SKEW: Duration = Duration::days(1);

const SERIAL_BYTES: usize = 16;

/// Why an authority could not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum CertificatesError {
    /// A file that must not be overwritten is there.
    #[error("{path} exists already and is not overwritten. {remedy}")]
    Exists {
        /// The file.
        path: PathBuf,
        /// What to do.
        remedy: &'static str,
    },
    /// The operating system refused.
    #[error("cannot {action} {path}: {error}")]
    Io {
        /// Verb phrase.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What it said.
        error: io::Error,
    },
    /// A file is not what it should be.
    #[error("{path} is not usable: {what}. Restore it from a copy")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The folder holds no authority.
    #[error("{0} holds no authority (no ca.crt). Make one first, or name the right folder")]
    NoAuthority(PathBuf),
    /// An argument is out of bounds.
    #[error("{0}")]
    Argument(String),
    /// No certificate of this site or serial that could be revoked.
    #[error("no certificate of {0:?} is in force: give a site's name or a serial as listed in {1}")]
    Unknown(String, PathBuf),
    /// Making keys or signing failed.
    #[error("cannot {action}: {error}")]
    Crypto {
        /// Verb phrase.
        action: &'static str,
        /// What the library said.
        error: String,
    },
}

/// One certificate that an authority has issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// Its serial number.
    pub serial: Serial,
    /// The site it names.
    pub site: String,
    /// Until when it is valid, in seconds of Unix time.
    pub expires: i64,
    /// When it was revoked, if it was, in seconds of Unix time.
    pub revoked: Option<i64>,
}

/// A certificate's serial number; written as 32 hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Serial([u8; SERIAL_BYTES]);

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Serial {
    fn parse(text: &str) -> Option<Serial> {
        // Of that length and form, since `from_str_radix` also takes a sign.
        if text.len() != SERIAL_BYTES * 2 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        Some(Serial(u128::from_str_radix(text, 16).ok()?.to_be_bytes()))
    }
}

/// The files of one site, made by [`Authority::issue`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteFiles {
    /// `<site>.crt`.
    pub certificate: PathBuf,
    /// `<site>.key`, mode 0600.
    pub key: PathBuf,
    /// What was issued.
    pub issued: Issued,
}

/// An authority in its folder. One process at a time may change it.
pub struct Authority {
    folder: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Never the key.
        f.debug_struct("Authority").field("folder", &self.folder).finish_non_exhaustive()
    }
}

impl Authority {
    /// Makes an authority in `folder`, which is made too if it is not there. Fails if one is there.
    pub fn create(folder: &Path) -> Result<Authority, CertificatesError> {
        let made = DirBuilder::new().recursive(true).mode(0o700).create(folder);
        made.map_err(|error| io_error("make", folder, error))?;
        let remedy = "Use it as it is, or choose another folder";
        for name in ["ca.crt", "ca.key", "issued", "revoked.crl"] {
            let path = folder.join(name);
            if path.exists() {
                return Err(CertificatesError::Exists { path, remedy });
            }
        }
        let key = KeyPair::generate().map_err(crypto("make a key"))?;
        let now = OffsetDateTime::now_utc();
        let serial = random_serial()?;
        let mut params = CertificateParams::default();
        params.not_before = now - CLOCK_SKEW;
        params.not_after = now + Duration::days(AUTHORITY_DAYS);
        params.serial_number = Some(SerialNumber::from_slice(&serial.0));
        params.distinguished_name = DistinguishedName::new();
        // Another name for every authority: a site may trust two, and tells them apart by it.
        let name = format!("Farshore sites {serial}");
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).map_err(crypto("sign"))?;
        write_new(&folder.join("ca.key"), &key.serialize_pem(), 0o600, remedy)?;
        let authority = Authority { folder: folder.to_owned(), issuer: Issuer::new(params, key) };
        authority.write_issued(&[])?;
        authority.write_revoked(&[])?;
        // Last: where it is, the rest is.
        write_new(&folder.join("ca.crt"), &certificate.pem(), 0o644, remedy)?;
        Ok(authority)
    }

    /// Opens the authority in `folder`.
    pub fn open(folder: &Path) -> Result<Authority, CertificatesError> {
        let (certificate, key) = (folder.join("ca.crt"), folder.join("ca.key"));
        if !certificate.exists() {
            return Err(CertificatesError::NoAuthority(folder.to_owned()));
        }
        let damaged = |path: &Path, error: rcgen::Error| CertificatesError::Damaged {
            path: path.to_owned(),
            what: error.to_string(),
        };
        let pair = KeyPair::from_pem(&read(&key)?).map_err(|error| damaged(&key, error))?;
        let issuer = Issuer::from_ca_cert_pem(&read(&certificate)?, pair)
            .map_err(|error| damaged(&certificate, error))?;
        let authority = Authority { folder: folder.to_owned(), issuer };
        authority.issued()?;
        Ok(authority)
    }

    /// Issues a certificate that names `site` and is valid for `valid_days` from now (1 to 3,650),
    /// and writes it and its new key into `folder`, which must exist. A site may have several in
    /// force, to change them without a gap.
    pub fn issue(
        &self,
        site: &str,
        valid_days: u32,
        folder: &Path,
    ) -> Result<SiteFiles, CertificatesError> {
        if !(1..=VALID_DAYS_MAX).contains(&valid_days) {
            return Err(CertificatesError::Argument(format!(
                "a certificate can be valid for 1 to {VALID_DAYS_MAX} days, not {valid_days}"
            )));
        }
        let now = OffsetDateTime::now_utc();
        let not_after = now + Duration::days(valid_days.into());
        self.issue_between(site, now - CLOCK_SKEW, not_after, folder)
    }

    /// As [`Authority::issue`], for any time: tests need certificates that have expired.
    #[doc(hidden)]
    pub fn issue_between(
        &self,
        site: &str,
        not_before: OffsetDateTime,
        not_after: OffsetDateTime,
        folder: &Path,
    ) -> Result<SiteFiles, CertificatesError> {
        check_site_name(site).map_err(CertificatesError::Argument)?;
        let remedy = "Move it away: in another folder there would be another authority";
        let (certificate, key) =
            (folder.join(format!("{site}.crt")), folder.join(format!("{site}.key")));
        for path in [&certificate, &key] {
            if path.exists() {
                return Err(CertificatesError::Exists { path: path.clone(), remedy });
            }
        }
        let (pair, serial) = (KeyPair::generate().map_err(crypto("make a key"))?, random_serial()?);
        let mut params = CertificateParams::default();
        params.not_before = not_before;
        params.not_after = not_after;
        params.serial_number = Some(SerialNumber::from_slice(&serial.0));
        let uri = format!("{SITE_URI}{site}").try_into().map_err(crypto("name the site"))?;
        params.subject_alt_names = vec![SanType::URI(uri)];
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("Farshore site {site}"));
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        let signed = params.signed_by(&pair, &self.issuer).map_err(crypto("sign"))?;

        // In the list before it is in the world: what is not listed could not be revoked.
        let expires = not_after.unix_timestamp();
        let issued = Issued { serial, site: site.to_owned(), expires, revoked: None };
        let mut all = self.issued()?;
        all.push(issued.clone());
        self.write_issued(&all)?;
        write_new(&key, &pair.serialize_pem(), 0o600, remedy)?;
        write_new(&certificate, &signed.pem(), 0o644, remedy)?;
        Ok(SiteFiles { certificate, key, issued })
    }

    /// Revokes every certificate of a site, or the one of this serial, and writes `revoked.crl`
    /// anew. Takes effect at a site when it loads that file. Returns what was revoked.
    pub fn revoke(&self, site_or_serial: &str) -> Result<Vec<Issued>, CertificatesError> {
        let serial = Serial::parse(site_or_serial);
        let now = OffsetDateTime::now_utc().unix_timestamp();
        let mut all = self.issued()?;
        let mut revoked = Vec::new();
        for issued in &mut all {
            let is_meant = issued.site == site_or_serial || Some(issued.serial) == serial;
            if is_meant && issued.revoked.is_none() {
                issued.revoked = Some(now);
                revoked.push(issued.clone());
            }
        }
        if revoked.is_empty() {
            let list = self.folder.join("issued");
            return Err(CertificatesError::Unknown(site_or_serial.to_owned(), list));
        }
        self.write_issued(&all)?;
        self.write_revoked(&all)?;
        Ok(revoked)
    }

    /// All certificates issued, oldest first.
    pub fn issued(&self) -> Result<Vec<Issued>, CertificatesError> {
        let path = self.folder.join("issued");
        let text = read(&path)?;
        text.lines()
            .enumerate()
            .map(|(at, line)| {
                parse_issued(line).ok_or_else(|| CertificatesError::Damaged {
                    path: path.clone(),
                    what: format!("line {} is not \"serial site expires revoked\"", at + 1),
                })
            })
            .collect()
    }

    /// The authority's certificate.
    pub fn certificate(&self) -> PathBuf {
        self.folder.join("ca.crt")
    }

    /// The list of revoked certificates.
    pub fn revoked(&self) -> PathBuf {
        self.folder.join("revoked.crl")
    }

    fn write_issued(&self, all: &[Issued]) -> Result<(), CertificatesError> {
        let mut text = String::new();
        for Issued { serial, site, expires, revoked } in all {
            let revoked = revoked.map_or("-".to_owned(), |at| at.to_string());
            // Writing to a string does not fail.
            let _ = writeln!(text, "{serial} {site} {expires} {revoked}");
        }
        replace(&self.folder.join("issued"), &text)
    }

    fn write_revoked(&self, all: &[Issued]) -> Result<(), CertificatesError> {
        let now = OffsetDateTime::now_utc();
        let revoked_certs: Vec<_> = all
            .iter()
            .filter_map(|issued| {
                let at = OffsetDateTime::from_unix_timestamp(issued.revoked?).ok()?;
                Some(RevokedCertParams {
                    serial_number: SerialNumber::from_slice(&issued.serial.0),
                    revocation_time: at,
                    reason_code: None,
                    invalidity_date: None,
                })
            })
            .collect();
        let number = (revoked_certs.len() as u64 + 1).to_be_bytes();
        let list = CertificateRevocationListParams {
            this_update: now,
            // Sites do not refuse a list for its age: nothing renews it while nothing changes.
            next_update: now + Duration::days(AUTHORITY_DAYS),
            crl_number: SerialNumber::from_slice(&number),
            issuing_distribution_point: None,
            revoked_certs,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let signed = list.signed_by(&self.issuer).map_err(crypto("sign"))?;
        replace(&self.revoked(), &signed.pem().map_err(crypto("write the list"))?)
    }
}

fn parse_issued(line: &str) -> Option<Issued> {
    let mut fields = line.split(' ');
    let serial = Serial::parse(fields.next()?)?;
    let site = fields.next().filter(|site| check_site_name(site).is_ok())?.to_owned();
    let expires = fields.next()?.parse().ok()?;
    let revoked = match fields.next()? {
        "-" => None,
        at => Some(at.parse().ok()?),
    };
    fields.next().is_none().then_some(Issued { serial, site, expires, revoked })
}

/// Positive, as serials must be, and of full length.
fn random_serial() -> Result<Serial, CertificatesError> {
    let mut bytes = [0; SERIAL_BYTES];
    SystemRandom::new().fill(&mut bytes).map_err(|error| CertificatesError::Crypto {
        action: "get random numbers",
        error: error.to_string(),
    })?;
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(Serial(bytes))
}

fn crypto(action: &'static str) -> impl Fn(rcgen::Error) -> CertificatesError {
    move |error| CertificatesError::Crypto { action, error: error.to_string() }
}

fn io_error(action: &'static str, path: &Path, error: io::Error) -> CertificatesError {
    CertificatesError::Io { action, path: path.to_owned(), error }
}

fn read(path: &Path) -> Result<String, CertificatesError> {
    fs::read_to_string(path).map_err(|error| io_error("read", path, error))
}

/// Writes a file that must not be there; durable when it returns.
fn write_new(
    path: &Path,
    text: &str,
    mode: u32,
    remedy: &'static str,
) -> Result<(), CertificatesError> {
    let file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    match written {
        Ok(()) => sync_folder_of(path),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(CertificatesError::Exists { path: path.to_owned(), remedy })
        }
        Err(error) => Err(io_error("write", path, error)),
    }
}

/// Replaces a file as a whole; durable when it returns.
fn replace(path: &Path, text: &str) -> Result<(), CertificatesError> {
    let next = path.with_extension("new");
    let written = File::create(&next).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&next, path)
    });
    written.map_err(|error| io_error("write", path, error))?;
    sync_folder_of(path)
}

fn sync_folder_of(path: &Path) -> Result<(), CertificatesError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| io_error("sync", folder, error))
}
