//! TLS as `sslmode` asks for it (PostgreSQL docs: "34.19. SSL Support").

mod end_point;

pub use end_point::hash as end_point_hash;

use crate::Error;
use crate::config::{Address, Config, Host, SslMode};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// What is known once TLS is up.
pub(crate) struct Established {
    pub(crate) stream: TlsStream<TcpStream>,
    /// For SCRAM's channel binding `tls-server-end-point`; `None` if the certificate's signature
    /// algorithm defines no hash for it.
    pub(crate) end_point: Option<Vec<u8>>,
}

/// Negotiates TLS on a stream whose server has agreed to it.
pub(crate) async fn handshake(
    config: &Config,
    host: &Host,
    server: &str,
    tcp: TcpStream,
) -> Result<Established, Error> {
    let failed = |reason: String| Error::Tls { server: server.to_owned(), reason };
    let client = client_config(config).map_err(failed)?;
    let name = server_name(config, host, &tcp).map_err(failed)?;
    let stream = TlsConnector::from(Arc::new(client)).connect(name, tcp).await.map_err(
        |error| match error.get_ref().and_then(|e| e.downcast_ref::<rustls::Error>()) {
            Some(tls) => failed(explained(tls, config, host)),
            None => Error::Io { server: server.to_owned(), source: error },
        },
    )?;
    let certificates = stream.get_ref().1.peer_certificates().unwrap_or_default();
    let end_point = certificates.first().and_then(|leaf| end_point::hash(leaf));
    Ok(Established { stream, end_point })
}

/// What to do about a refused certificate.
fn explained(error: &rustls::Error, config: &Config, host: &Host) -> String {
    let hint = match error {
        rustls::Error::InvalidCertificate(
            CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
        ) => format!(
            "the server's certificate is not for \"{}\"; connect by a name in its \
             subjectAltName, or use sslmode=verify-ca",
            match &host.address {
                Address::Tcp(name) => name.clone(),
                Address::Unix(path) => path.display().to_string(),
            }
        ),
        rustls::Error::InvalidCertificate(CertificateError::UnknownIssuer) => {
            let roots = config.sslrootcert.as_deref().map_or_else(
                || "the system's root certificates".to_owned(),
                |path| format!("sslrootcert {}", path.display()),
            );
            format!("no authority in {roots} signed the server's certificate")
        }
        rustls::Error::InvalidCertificate(CertificateError::Expired) => {
            "the server's certificate has expired".to_owned()
        }
        _ => return error.to_string(),
    };
    format!("{hint} ({error})")
}

fn server_name(
    config: &Config,
    host: &Host,
    tcp: &TcpStream,
) -> Result<ServerName<'static>, String> {
    let Address::Tcp(name) = &host.address else {
        return Err("TLS is not used through Unix sockets".to_owned());
    };
    match ServerName::try_from(name.clone()) {
        Ok(name) => Ok(name),
        Err(_) if config.sslmode == SslMode::VerifyFull => {
            Err(format!("\"{name}\" is not a name that a certificate can carry"))
        }
        // Nothing will be compared with it.
        Err(_) => {
            tcp.peer_addr().map(|peer| ServerName::from(peer.ip())).map_err(|e| e.to_string())
        }
    }
}

fn client_config(config: &Config) -> Result<ClientConfig, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = CertificateCheck::new(config, &provider)?;
    let builder = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|e| e.to_string())?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(verifier));
    let mut client = match (&config.sslcert, &config.sslkey) {
        (Some(certificates), Some(key)) => {
            check_key_permissions(key)?;
            let chain = read_certificates(certificates)?;
            let key = PrivateKeyDer::from_pem_file(key)
                .map_err(|e| format!("sslkey {}: {e}", key.display()))?;
            builder.with_client_auth_cert(chain, key).map_err(|e| format!("sslcert: {e}"))?
        }
        (Some(certificates), None) => {
            return Err(format!("sslcert {} needs an sslkey", certificates.display()));
        }
        (None, _) => builder.with_no_client_auth(),
    };
    client.enable_sni = config.sslsni;
    client.alpn_protocols = vec![b"postgresql".to_vec()];
    Ok(client)
}

fn read_certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, String> {
    let failed = |error: &dyn std::fmt::Display| format!("{}: {error}", path.display());
    let certificates: Vec<_> =
        CertificateDer::pem_file_iter(path).and_then(Iterator::collect).map_err(|e| failed(&e))?;
    if certificates.is_empty() {
        return Err(failed(&"no certificate in PEM form"));
    }
    Ok(certificates)
}

/// As libpq: a key belongs to its owner alone, or to root and a group that may read it.
fn check_key_permissions(path: &Path) -> Result<(), String> {
    let metadata =
        std::fs::metadata(path).map_err(|e| format!("sslkey {}: {e}", path.display()))?;
    let mode = metadata.permissions().mode() & 0o777;
    let forbidden = if metadata.uid() == 0 { 0o027 } else { 0o077 };
    if mode & forbidden != 0 {
        return Err(format!(
            "sslkey {}: its mode {mode:04o} lets others at it; run: chmod 0600 {}",
            path.display(),
            path.display()
        ));
    }
    Ok(())
}

fn roots(config: &Config) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    match &config.sslrootcert {
        Some(path) => {
            for certificate in read_certificates(path)? {
                roots
                    .add(certificate)
                    .map_err(|e| format!("sslrootcert {}: {e}", path.display()))?;
            }
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            roots.add_parsable_certificates(found.certs);
            if roots.is_empty() {
                return Err(format!(
                    "the system has no root certificates (sslrootcert names a file of your own): \
                     {:?}",
                    found.errors
                ));
            }
        }
    }
    Ok(roots)
}

/// Checks of a server's certificate what `sslmode` asks for. That the peer holds the certificate's
/// key is always checked.
#[derive(Debug)]
struct CertificateCheck {
    provider: Arc<CryptoProvider>,
    /// `None`: any certificate will do.
    chain: Option<Arc<WebPkiServerVerifier>>,
    name: bool,
}

impl CertificateCheck {
    fn new(config: &Config, provider: &Arc<CryptoProvider>) -> Result<CertificateCheck, String> {
        let chain = match config.sslmode {
            SslMode::VerifyCa | SslMode::VerifyFull => true,
            // As libpq: whoever has a root certificate wants it used.
            SslMode::Require => config.sslrootcert.is_some(),
            SslMode::Disable | SslMode::Allow | SslMode::Prefer => false,
        };
        let chain = if chain {
            let roots = Arc::new(roots(config)?);
            let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
                .build()
                .map_err(|e| e.to_string())?;
            Some(verifier)
        } else {
            None
        };
        let name = config.sslmode == SslMode::VerifyFull;
        Ok(CertificateCheck { provider: provider.clone(), chain, name })
    }
}

impl ServerCertVerifier for CertificateCheck {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Some(chain) = &self.chain else { return Ok(ServerCertVerified::assertion()) };
        match chain.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The chain is verified before the name is looked at.
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.name => Ok(ServerCertVerified::assertion()),
            verdict => verdict,
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
