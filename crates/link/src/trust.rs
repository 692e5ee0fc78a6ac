//! How a peer's certificate is judged, and how a judgement is put into words.

use crate::site_name::site_of;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{
    AlertDescription, CertificateError, DigitallySignedStruct, OtherError, SignatureScheme,
};
use std::io;
use std::sync::Arc;

/// A dialer's check of the listener's certificate: signed by a trusted authority, valid now, not
/// revoked, and naming the expected site.
#[derive(Debug)]
pub(crate) struct PeerCheck {
    chain: Arc<WebPkiServerVerifier>,
    provider: Arc<CryptoProvider>,
    expected: String,
}

/// Why a certificate that is good in itself is not the right one.
#[derive(Debug, thiserror::Error)]
enum WrongSite {
    #[error(
        "it is site {found}'s, and site {expected} was expected. Check the address, or the name of the upstream"
    )]
    Another { expected: String, found: String },
    #[error("{0}")]
    Unnamed(String),
}

impl PeerCheck {
    pub(crate) fn new(
        chain: Arc<WebPkiServerVerifier>,
        provider: Arc<CryptoProvider>,
        expected: &str,
    ) -> PeerCheck {
        PeerCheck { chain, provider, expected: expected.to_owned() }
    }

    /// Judges a certificate and those between it and an authority's.
    pub(crate) fn judge(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<(), rustls::Error> {
        let nobody = ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into());
        self.verify_server_cert(end_entity, intermediates, &nobody, &[], now).map(drop)
    }

    fn check_site(&self, certificate: &CertificateDer<'_>) -> Result<(), WrongSite> {
        let found = site_of(certificate).map_err(WrongSite::Unnamed)?;
        if found == self.expected {
            return Ok(());
        }
        Err(WrongSite::Another { expected: self.expected.clone(), found })
    }
}

impl ServerCertVerifier for PeerCheck {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.chain.verify_server_cert(
            end_entity,
            intermediates,
            server_name,
            ocsp_response,
            now,
        ) {
            // The chain is verified before the name is looked at, and sites are not named by DNS.
            Ok(_)
            | Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) => {}
            Err(error) => return Err(error),
        }
        match self.check_site(end_entity) {
            Ok(()) => Ok(ServerCertVerified::assertion()),
            Err(wrong) => Err(CertificateError::Other(OtherError(Arc::new(wrong))).into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// The TLS error inside of an IO error.
pub(crate) fn tls_error(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// What is wrong with a peer's certificate, and what to do; `None` if the error is another one.
pub(crate) fn why_untrusted(error: &rustls::Error) -> Option<String> {
    let rustls::Error::InvalidCertificate(error) = error else {
        return matches!(error, rustls::Error::NoCertificatesPresented)
            .then(|| "it showed no certificate".to_owned());
    };
    Some(match error {
        CertificateError::Expired => {
            "it has expired. Make that site another with `farshore site-cert`".to_owned()
        }
        CertificateError::ExpiredContext { time, not_after } => format!(
            "it expired {} ago. Make that site another with `farshore site-cert`",
            span(time.as_secs().saturating_sub(not_after.as_secs()))
        ),
        CertificateError::NotValidYet => {
            "it is not valid yet. Check the clocks of both machines".to_owned()
        }
        CertificateError::NotValidYetContext { time, not_before } => format!(
            "it will be valid in {} only. Check the clocks of both machines",
            span(not_before.as_secs().saturating_sub(time.as_secs()))
        ),
        CertificateError::Revoked => {
            "it has been revoked. If that site is still to be trusted, make it another with \
             `farshore site-cert`"
                .to_owned()
        }
        CertificateError::UnknownIssuer => {
            "no authority that this site trusts has signed it. Compare the authorities' \
             certificates (ca.crt) of both sites; that of an authority between the two has to stand \
             in that site's certificate file, behind its own"
                .to_owned()
        }
        CertificateError::Other(other) => other.to_string(),
        other => other.to_string(),
    })
}

/// What a peer holds against our certificate, and what to check; `None` if it is about something
/// else. TLS sends no more than a number; the peer's own log has the words.
pub(crate) fn why_rejected(alert: AlertDescription) -> Option<&'static str> {
    Some(match alert {
        AlertDescription::CertificateExpired => {
            "to it, ours is expired or not valid yet. Check its dates and the clocks of both machines"
        }
        AlertDescription::CertificateRevoked => {
            "it has been revoked. Make this site another with `farshore site-cert`"
        }
        AlertDescription::UnknownCA => {
            "no authority that it trusts has signed ours. Compare the authorities' certificates \
             (ca.crt) of both sites; that of an authority between the two has to stand in our \
             certificate file, behind our own"
        }
        AlertDescription::CertificateRequired => "it got none. Check [site] certificate and key",
        AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::DecryptError
        | AlertDescription::AccessDenied => {
            "it does not accept ours. Check what its log says, and what ours is"
        }
        _ => return None,
    })
}

/// Seconds in words.
fn span(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} seconds"),
        120..7_200 => format!("{} minutes", seconds / 60),
        7_200..172_800 => format!("{} hours", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}
