use crate::{SiteCertAction, output};
use farshore_node::certificates::{Authority, CertificatesError};
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;

/// Makes or revokes sites' certificates.
pub fn site_cert(action: &SiteCertAction) -> ExitCode {
    let mut told = String::new();
    let done = match action {
        SiteCertAction::Issue { dir, days, sites } => issue(dir, *days, sites, &mut told),
        SiteCertAction::Revoke { dir, sites } => revoke(dir, sites, &mut told),
    };
    // Also what was done before something failed.
    let printed = output::print(&told);
    match done {
        Ok(()) => printed.or_failure(ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("farshore: {error}");
            ExitCode::FAILURE
        }
    }
}

fn issue(
    folder: &Path,
    days: u32,
    sites: &[String],
    told: &mut String,
) -> Result<(), CertificatesError> {
    let authority = if folder.join("ca.crt").exists() {
        Authority::open(folder)?
    } else {
        let authority = Authority::create(folder)?;
        let _ = writeln!(
            told,
            "made an authority: {} (keep ca.key here)",
            authority.certificate().display()
        );
        authority
    };
    for site in sites {
        let made = authority.issue(site, days, folder)?;
        let _ = writeln!(
            told,
            "site \"{site}\": {} and {}, valid for {days} days; the site needs them and {}",
            made.certificate.display(),
            made.key.display(),
            authority.certificate().display()
        );
    }
    Ok(())
}

fn revoke(folder: &Path, sites: &[String], told: &mut String) -> Result<(), CertificatesError> {
    let authority = Authority::open(folder)?;
    for site in sites {
        for revoked in authority.revoke(site)? {
            let _ = writeln!(
                told,
                "site \"{}\": certificate {} is revoked",
                revoked.site, revoked.serial
            );
        }
    }
    let _ = writeln!(
        told,
        "copy {} to every site (as [site] revoked says, or beside its site file): a node that runs \
         uses it within half a minute",
        authority.revoked().display()
    );
    Ok(())
}
