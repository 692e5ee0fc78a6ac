//! A peer that says what no farshore would: TLS as it should be or not, then any bytes.

use anyhow::{Result, ensure};
use farshore_link::IdentityFiles;
use farshore_link::frame::{self, Header};
use farshore_link::handshake::{
    ANSWER_BYTES, Answer, AnswerHead, Hello, VERSION_MAX, VERSION_MIN, WINDOW_BYTES_MIN,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Does not care whom it talks to.
#[derive(Debug)]
struct Anyone;

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        default_provider().signature_verification_algorithms.supported_schemes()
    }
}

pub struct Raw(pub TlsStream<TcpStream>);

impl Raw {
    /// With the certificate in these files, or none.
    pub async fn connect(address: SocketAddr, files: Option<&IdentityFiles>) -> Result<Raw> {
        let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Anyone));
        let config = match files {
            Some(files) => builder.with_client_auth_cert(
                vec![CertificateDer::from_pem_file(&files.certificate)?],
                PrivateKeyDer::from_pem_file(&files.key)?,
            )?,
            None => builder.with_no_client_auth(),
        };
        let tcp = TcpStream::connect(address).await?;
        let name = ServerName::try_from("anyone.internal")?;
        Ok(Raw(TlsConnector::from(Arc::new(config)).connect(name, tcp).await?))
    }

    pub async fn say(&mut self, bytes: &[u8]) -> Result<()> {
        self.0.write_all(bytes).await?;
        Ok(self.0.flush().await?)
    }

    pub async fn answer(&mut self) -> Result<Answer> {
        let mut head = [0; ANSWER_BYTES];
        self.0.read_exact(&mut head).await?;
        let head = AnswerHead::decode(&head)?;
        let mut words = vec![0; head.words_bytes];
        self.0.read_exact(&mut words).await?;
        Ok(head.complete(&words)?)
    }

    /// The next frame of this kind.
    pub async fn frame(&mut self, kind: frame::Kind) -> Result<(Header, Vec<u8>)> {
        loop {
            let mut head = [0; frame::HEADER_BYTES];
            self.0.read_exact(&mut head).await?;
            let announced = frame::Announced::decode(&head)?;
            let mut payload = vec![0; announced.header.payload_bytes as usize];
            self.0.read_exact(&mut payload).await?;
            announced.check(&payload)?;
            if announced.header.kind == kind {
                return Ok((announced.header, payload));
            }
        }
    }

    /// Everything until the end, or the error that ends it.
    pub async fn end(&mut self) -> Result<()> {
        let mut rest = Vec::new();
        self.0.read_to_end(&mut rest).await?;
        ensure!(rest.is_empty(), "bytes came: {rest:02x?}");
        Ok(())
    }
}

/// A hello that any listener would accept.
pub fn hello() -> Hello {
    Hello {
        version_min: VERSION_MIN,
        version_max: VERSION_MAX,
        stripe: 0,
        stripes: 1,
        session: [1; 16],
        window_bytes: WINDOW_BYTES_MIN,
        request: b"please".to_vec(),
    }
}
