//! The authority's folder, and identities read from it.

mod sites;

use anyhow::Result;
use farshore_link::certificates::{Authority, CertificatesError, VALID_DAYS_MAX};
use farshore_link::{Identity, IdentityFiles};
use sites::Sites;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

fn mode(path: &Path) -> Result<u32> {
    Ok(fs::metadata(path)?.permissions().mode() & 0o777)
}

#[test]
fn an_authority_is_found_again_and_never_overwritten() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let folder = folder.path().join("new/authority");
    let error = Authority::open(&folder).unwrap_err();
    assert!(error.to_string().contains("holds no authority"), "{error}");
    let made = Authority::create(&folder)?;
    assert_eq!((mode(&folder)?, mode(&folder.join("ca.key"))?), (0o700, 0o600));
    let first = made.issue("first", 30, &folder)?;
    assert_eq!(mode(&first.key)?, 0o600);

    let error = Authority::create(&folder).unwrap_err();
    assert!(matches!(&error, CertificatesError::Exists { path, .. } if path.ends_with("ca.crt")));
    let opened = Authority::open(&folder)?;
    let second = opened.issue("second", 30, &folder)?;
    assert_eq!(opened.issued()?, [first.issued.clone(), second.issued.clone()]);

    for (files, site) in [(&first, "first"), (&second, "second")] {
        let identity = Identity::load(&IdentityFiles {
            certificate: files.certificate.clone(),
            key: files.key.clone(),
            authorities: opened.certificate(),
            revoked: Some(opened.revoked()),
        })?;
        assert_eq!(identity.site(), site);
        let left = identity.expires().duration_since(SystemTime::now())?;
        assert!(
            left > Duration::from_secs(29 * 86_400) && left <= Duration::from_secs(30 * 86_400)
        );
        // It lasts less than three times the usual notice.
        let notice = identity.expires().duration_since(identity.expires_soon_from())?;
        assert!(
            notice > Duration::from_secs(9 * 86_400) && notice < Duration::from_secs(11 * 86_400),
            "{notice:?}"
        );
    }
    let error = opened.issue("first", 30, &folder).unwrap_err();
    assert!(error.to_string().contains("first.crt exists already"), "{error}");
    assert_eq!(opened.issued()?.len(), 2);
    Ok(())
}

#[test]
fn a_site_or_one_certificate_of_it_is_revoked_once() -> Result<()> {
    let sites = Sites::new()?;
    let authority = &sites.authority;
    let before = fs::read(authority.revoked())?;
    let first = authority.issue("a", 30, &sites.folder("one")?)?.issued;
    let second = authority.issue("a", 30, &sites.folder("two")?)?.issued;
    let third = authority.issue("a", 30, &sites.folder("three")?)?.issued;
    let other = authority.issue("b", 30, &sites.folder("one")?)?.issued;

    let revoked = authority.revoke(&second.serial.to_string())?;
    assert_eq!(revoked.iter().map(|r| r.serial).collect::<Vec<_>>(), [second.serial]);
    let after_one = fs::read(authority.revoked())?;
    assert_ne!(before, after_one);
    let revoked = authority.revoke("a")?;
    assert_eq!(revoked.iter().map(|r| r.serial).collect::<Vec<_>>(), [first.serial, third.serial]);
    for gone in ["a", &first.serial.to_string(), "c", "00"] {
        let error = authority.revoke(gone).unwrap_err();
        assert!(matches!(error, CertificatesError::Unknown(..)), "{error}");
    }
    let listed = authority.issued()?;
    assert!(listed.iter().all(|issued| issued.revoked.is_some() == (issued.site == "a")));
    assert!(listed.contains(&other));
    Ok(())
}

#[test]
fn arguments_and_files_that_do_not_do() -> Result<()> {
    let sites = Sites::new()?;
    let folder = sites.folder("out")?;
    for (site, days) in [("Bad", 30), ("", 30), ("a", 0), ("a", VALID_DAYS_MAX + 1)] {
        let error = sites.authority.issue(site, days, &folder).unwrap_err();
        assert!(matches!(error, CertificatesError::Argument(_)), "{error}");
    }
    assert_eq!(fs::read_dir(&folder)?.count(), 0);

    let authority = sites.authority.certificate();
    let list = authority.with_file_name("issued");
    fs::write(&list, "nonsense\n")?;
    let error = Authority::open(&sites.folder("authority")?).unwrap_err();
    assert!(error.to_string().contains("issued is not usable: line 1"), "{error}");
    Ok(())
}

#[test]
fn an_identity_that_cannot_be_used_names_the_file() -> Result<()> {
    let sites = Sites::new()?;
    let (good, other) = (sites.files("good")?, sites.files("other")?);
    let missing = sites.folder("none")?.join("gone.pem");
    let empty = sites.folder("none")?.join("empty.pem");
    fs::write(&empty, "")?;
    let open_key = sites.folder("none")?.join("open.key");
    fs::copy(&good.key, &open_key)?;
    fs::set_permissions(&open_key, fs::Permissions::from_mode(0o644))?;
    let authority = sites.authority.certificate();
    for (files, file, words) in [
        (
            IdentityFiles { certificate: missing.clone(), ..good.clone() },
            &missing,
            "cannot read the site's certificate",
        ),
        (
            IdentityFiles { certificate: empty.clone(), ..good.clone() },
            &empty,
            "holds no certificate",
        ),
        (
            IdentityFiles { certificate: authority.clone(), ..good.clone() },
            &authority,
            "names no site",
        ),
        (
            IdentityFiles { certificate: other.certificate.clone(), ..good.clone() },
            &other.certificate,
            "does not belong to the key",
        ),
        (IdentityFiles { key: missing.clone(), ..good.clone() }, &missing, "the site's key"),
        (IdentityFiles { key: open_key.clone(), ..good.clone() }, &open_key, "chmod 0600"),
        (
            IdentityFiles { authorities: empty.clone(), ..good.clone() },
            &empty,
            "the authorities' certificate",
        ),
        (IdentityFiles { revoked: Some(empty.clone()), ..good.clone() }, &empty, "holds no list"),
        (
            IdentityFiles { revoked: Some(missing.clone()), ..good.clone() },
            &missing,
            "the list of revoked certificates",
        ),
    ] {
        let error = Identity::load(&files).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
        assert!(error.contains(&file.display().to_string()), "{error}");
    }
    Identity::load(&IdentityFiles { revoked: None, ..good })?;
    Ok(())
}
