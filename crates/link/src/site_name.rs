//! Names of sites, and where a certificate carries one.

use rustls::pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

/// A certificate names its site by a subject alternative name of type URI: this, then the name.
pub const SITE_URI: &str = "farshore:site:";

/// Most characters of a site's name.
pub const SITE_NAME_MAX: usize = 40;

/// Whether a site may have this name: 1 to 40 lower-case letters, digits, `_` and `-`, first a
/// letter. The error says what is wrong.
pub fn check_site_name(name: &str) -> Result<(), String> {
    let starts = name.starts_with(|c: char| c.is_ascii_lowercase());
    let rest = name.chars().all(|c| matches!(c, 'a'..='z' | '0'..='9' | '_' | '-'));
    if starts && rest && name.len() <= SITE_NAME_MAX {
        return Ok(());
    }
    Err(format!(
        "{name:?} is not a name for a site: 1 to {SITE_NAME_MAX} lower-case letters, digits, \
         '_' and '-', first a letter"
    ))
}

/// The site that a certificate names. It must name exactly one.
pub(crate) fn site_of(certificate: &CertificateDer<'_>) -> Result<String, String> {
    let (_, parsed) = X509Certificate::from_der(certificate)
        .map_err(|error| format!("it cannot be read: {error}"))?;
    let names = parsed
        .subject_alternative_name()
        .map_err(|error| format!("its subjectAltName cannot be read: {error}"))?;
    let names = names.map_or(&[][..], |extension| &extension.value.general_names[..]);
    let mut sites = names.iter().filter_map(|name| match name {
        GeneralName::URI(uri) => uri.strip_prefix(SITE_URI),
        _ => None,
    });
    match (sites.next(), sites.next()) {
        (Some(site), None) => {
            check_site_name(site)?;
            Ok(site.to_owned())
        }
        (None, _) => Err(format!(
            "it names no site (a subjectAltName URI:{SITE_URI}<name>); make one with \
             `farshore site-cert`"
        )),
        (Some(_), Some(_)) => Err("it names more than one site".to_owned()),
    }
}

/// From when to when a certificate is valid, in seconds of Unix time.
pub(crate) fn validity_of(certificate: &CertificateDer<'_>) -> Result<(i64, i64), String> {
    let (_, parsed) = X509Certificate::from_der(certificate)
        .map_err(|error| format!("it cannot be read: {error}"))?;
    let validity = parsed.validity();
    Ok((validity.not_before.timestamp(), validity.not_after.timestamp()))
}

/// Until when the certificate of an authority between a site and the trusted one is valid, in seconds
/// of Unix time; `None` of one that has signed itself, whose dates a peer does not look at, and of one
/// that cannot be read.
pub(crate) fn last_second_of_signer(certificate: &CertificateDer<'_>) -> Option<i64> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let is_root = parsed.subject() == parsed.issuer();
    (!is_root).then(|| parsed.validity().not_after.timestamp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked() {
        for good in ["a", "tukwila", "eu-west_1", &"a".repeat(40)] {
            assert_eq!(check_site_name(good), Ok(()));
        }
        for bad in ["", "1a", "-a", "A", "ä", "a b", "a.b", "a/b", &"a".repeat(41)] {
            assert!(check_site_name(bad).is_err(), "{bad}");
        }
    }
}
