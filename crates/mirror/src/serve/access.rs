//! Who may stream a mirror's log: what the site file asks for, and how a connection shows it.
//!
//! On loopback nothing is asked for, unless a password is named. An address that others reach has
//! to ask for a password (SCRAM-SHA-256), and what comes from another machine has to come by TLS:
//! the log holds all data of the cluster.

use super::scram::{self, Challenged, Denied, Verifier};
use super::session::{Reader, Refusal, SessionError, say_goodbye, write};
use bytes::{Bytes, BytesMut};
use farshore_wire::server::{self, Opening};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

/// Longest password, in bytes: a walreceiver's whole `primary_conninfo` has room for 1,023.
const PASSWORD_BYTES_MAX: usize = 256;

/// Whoever was wrong about the password waits so long for the answer: guessing takes time.
const DENIED_AFTER: Duration = Duration::from_secs(1);

/// What is asked of those who connect, as the site file has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Access {
    /// File with the password; nobody but its owner may read it, or root and a group.
    pub password: Option<PathBuf>,
    /// Certificate chain and key, PEM.
    pub tls: Option<(PathBuf, PathBuf)>,
}

impl Access {
    /// The addresses that `listen` (`host:port`) stands for, if what is asked there is enough.
    ///
    /// # Errors
    /// What is wrong or missing, for a person.
    pub fn addresses(&self, listen: &str) -> Result<Vec<SocketAddr>, String> {
        let resolved: Vec<SocketAddr> = listen
            .to_socket_addrs()
            .map_err(|error| format!("it is no host:port ({error})"))?
            .collect();
        let Some(open) = resolved.iter().find(|address| !address.ip().is_loopback()) else {
            return Ok(resolved);
        };
        let missing = match (&self.password, &self.tls) {
            (Some(_), Some(_)) => return Ok(resolved),
            (None, Some(_)) => "standby_password",
            (Some(_), None) => "standby_certificate and standby_key",
            (None, None) => "standby_password, standby_certificate and standby_key",
        };
        Err(format!(
            "{} is reached from other machines, and the log holds all the data of the cluster. \
             Name {missing} too, or listen on 127.0.0.1 or [::1]",
            open.ip()
        ))
    }

    /// The password in the file.
    ///
    /// # Errors
    /// What is wrong with the file, for a person.
    pub fn read_password(&self) -> Result<Option<String>, String> {
        let Some(path) = &self.password else { return Ok(None) };
        let wrong = |what: String| format!("standby_password {}: {what}", path.display());
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        belongs_to_owner(path).map_err(wrong)?;
        let password = text.trim_end_matches(['\r', '\n']);
        let is_plain = password.bytes().all(|byte| (b' '..=b'~').contains(&byte));
        // Other characters have several spellings, which SCRAM makes one of (SASLprep).
        if password.is_empty() || password.len() > PASSWORD_BYTES_MAX || !is_plain {
            return Err(wrong(format!(
                "it has to hold one line of 1 to {PASSWORD_BYTES_MAX} printable ASCII characters. \
                 For instance: openssl rand -base64 24"
            )));
        }
        Ok(Some(password.to_owned()))
    }

    /// Reads the files, and says whether clients can bind their password to the certificate (SCRAM's
    /// channel binding): there is one, and its signature has a hash that both ends know.
    ///
    /// # Errors
    /// What is wrong with one of them, for a person.
    pub fn check(&self) -> Result<bool, String> {
        self.load().map(|door| door.verifier.is_some() && door.end_point.is_some())
    }

    pub(super) fn load(&self) -> Result<Door, String> {
        let mut salt = scram::Salt::default();
        random(&mut salt)?;
        let verifier =
            self.read_password()?.map(|password| Verifier::new(password.as_bytes(), salt));
        let Some((certificate, key)) = &self.tls else {
            return Ok(Door { verifier, tls: None, end_point: None });
        };
        let wrong = |path: &Path, what: &dyn fmt::Display| {
            format!("standby_certificate or standby_key {}: {what}", path.display())
        };
        let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(certificate)
            .and_then(Iterator::collect)
            .map_err(|error| wrong(certificate, &error))?;
        let Some(first) = chain.first() else {
            return Err(wrong(certificate, &"there is no certificate in this file"));
        };
        let end_point = farshore_pg::end_point_hash(first);
        let secret = PrivateKeyDer::from_pem_file(key).map_err(|error| wrong(key, &error))?;
        belongs_to_owner(key).map_err(|what| wrong(key, &what))?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, secret))
            .map_err(|error| wrong(certificate, &error))?;
        Ok(Door { verifier, tls: Some(TlsAcceptor::from(Arc::new(config))), end_point })
    }
}

/// As libpq has it for keys: the owner's alone, or root's and a group's that may read it.
fn belongs_to_owner(path: &Path) -> Result<(), String> {
    let metadata = std::fs::metadata(path).map_err(|error| error.to_string())?;
    let mode = metadata.permissions().mode() & 0o777;
    let forbidden = if metadata.uid() == 0 { 0o027 } else { 0o077 };
    if mode & forbidden == 0 {
        return Ok(());
    }
    Err(format!("its mode {mode:04o} lets others at it; run: chmod 0600 {}", path.display()))
}

fn random(bytes: &mut [u8]) -> Result<(), String> {
    SystemRandom::new().fill(bytes).map_err(|_| "the system has no random bytes".to_owned())
}

/// What a connection has to pass.
pub(super) struct Door {
    verifier: Option<Verifier>,
    tls: Option<TlsAcceptor>,
    /// For SCRAM's channel binding; `None` where the certificate's signature defines no hash.
    end_point: Option<Vec<u8>>,
}

impl Door {
    /// Whoever comes in has shown that he knows a password.
    pub fn asks_password(&self) -> bool {
        self.verifier.is_some()
    }
}

impl fmt::Debug for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Never what the password is checked with.
        f.debug_struct("Door").field("tls", &self.tls.is_some()).finish_non_exhaustive()
    }
}

/// Somebody who was let in.
pub(super) struct Guest {
    pub reader: Reader,
    pub writer: Box<dyn AsyncWrite + Send + Unpin>,
    /// What came behind the startup packet and what authentication took.
    pub buffer: BytesMut,
    /// `user`, `database`, `replication` and settings.
    pub parameters: Vec<(String, String)>,
    /// What is still to be written: AuthenticationOk.
    pub out: BytesMut,
}

impl Door {
    /// From a connection's first byte to AuthenticationOk; `None` if it was about something else.
    /// Whoever is not let in is told why.
    pub(super) async fn admit(
        &self,
        mut socket: TcpStream,
        peer: SocketAddr,
    ) -> Result<Option<Guest>, SessionError> {
        let mut buffer = BytesMut::with_capacity(8 << 10);
        loop {
            match next_opening(&mut socket, &mut buffer).await? {
                None | Some(Opening::CancelRequest) => return Ok(None),
                Some(opening @ (Opening::SslRequest | Opening::GssEncryptionRequest)) => {
                    // Bytes behind the request would be taken for the session's: an injection.
                    if !buffer.is_empty() {
                        return Err(SessionError::OutOfPlace(
                            "bytes behind a request for encryption",
                        ));
                    }
                    if let (Opening::SslRequest, Some(tls)) = (opening, &self.tls) {
                        socket.write_all(b"S").await?;
                        let stream = tls.accept(socket).await?;
                        return self.admit_by_tls(stream, buffer).await;
                    }
                    socket.write_all(b"N").await?;
                }
                Some(Opening::Startup { minor, parameters }) => {
                    let mut out = BytesMut::new();
                    if let Err(refusal) = self.check_plain(peer) {
                        return Err(refuse(&mut socket, &mut out, refusal).await);
                    }
                    negotiate(&mut out, minor, &parameters);
                    self.authenticate(&mut socket, &mut buffer, &mut out, None).await?;
                    let (reader, writer) = socket.into_split();
                    let (reader, writer) = (Reader::Plain(reader), Box::new(writer));
                    return Ok(Some(Guest { reader, writer, buffer, parameters, out }));
                }
            }
        }
    }

    /// Log crosses a network only by TLS, where there is TLS at all.
    fn check_plain(&self, peer: SocketAddr) -> Result<(), Refusal> {
        if self.tls.is_none() || peer.ip().to_canonical().is_loopback() {
            return Ok(());
        }
        let message = format!("{} has to connect by TLS", peer.ip());
        Err(Refusal::new("28000", message)
            .hint("Set sslmode=require and channel_binding=require in primary_conninfo."))
    }

    async fn admit_by_tls(
        &self,
        mut stream: tokio_rustls::server::TlsStream<TcpStream>,
        mut buffer: BytesMut,
    ) -> Result<Option<Guest>, SessionError> {
        match next_opening(&mut stream, &mut buffer).await? {
            None | Some(Opening::CancelRequest) => Ok(None),
            Some(Opening::SslRequest | Opening::GssEncryptionRequest) => {
                Err(SessionError::OutOfPlace("a request for encryption within TLS"))
            }
            Some(Opening::Startup { minor, parameters }) => {
                let mut out = BytesMut::new();
                negotiate(&mut out, minor, &parameters);
                let end_point = self.end_point.as_deref();
                self.authenticate(&mut stream, &mut buffer, &mut out, end_point).await?;
                let (reader, writer) = tokio::io::split(stream);
                let (reader, writer) = (Reader::Tls(Box::new(reader)), Box::new(writer));
                Ok(Some(Guest { reader, writer, buffer, parameters, out }))
            }
        }
    }

    /// Has the client show that it knows the password, and shows it that we do. Leaves
    /// AuthenticationOk in `out`.
    async fn authenticate(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
        buffer: &mut BytesMut,
        out: &mut BytesMut,
        end_point: Option<&[u8]>,
    ) -> Result<(), SessionError> {
        let Some(verifier) = &self.verifier else {
            server::authentication_ok(out);
            return Ok(());
        };
        let offered = [scram::PLUS, scram::PLAIN];
        server::authentication_sasl(out, &offered[usize::from(end_point.is_none())..]);
        write(stream, out).await?;
        let first = next_authentication(stream, buffer).await?;
        let (mechanism, first) = server::sasl_initial_response(first)?;
        let mut nonce = scram::Nonce::default();
        random(&mut nonce).map_err(std::io::Error::other)?;
        let (challenged, answer): (Challenged, String) =
            match scram::challenge(verifier, &mechanism, &first, end_point, &nonce) {
                Ok(challenged) => challenged,
                Err(denied) => return Err(deny(stream, out, denied).await),
            };
        server::authentication_sasl_continue(out, answer.as_bytes());
        write(stream, out).await?;
        let last = next_authentication(stream, buffer).await?;
        match challenged.prove(verifier, &last) {
            Ok(proof) => server::authentication_sasl_final(out, proof.as_bytes()),
            Err(denied) => return Err(deny(stream, out, denied).await),
        }
        server::authentication_ok(out);
        Ok(())
    }
}

/// This server speaks 3.0 and knows no protocol options.
fn negotiate(out: &mut BytesMut, minor: u16, parameters: &[(String, String)]) {
    let names = parameters.iter().map(|(name, _)| name.as_str());
    let options: Vec<&str> = names.filter(|name| name.starts_with("_pq_.")).collect();
    if minor > 0 || !options.is_empty() {
        server::negotiate_protocol_version(out, &options);
    }
}

async fn next_opening(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut BytesMut,
) -> Result<Option<Opening>, SessionError> {
    loop {
        if let Some(opening) = server::split_opening(buffer)? {
            return Ok(Some(opening));
        }
        if stream.read_buf(buffer).await? == 0 {
            return Ok(None);
        }
    }
}

async fn next_authentication(
    stream: &mut (impl AsyncRead + Unpin),
    buffer: &mut BytesMut,
) -> Result<Bytes, SessionError> {
    loop {
        if let Some(body) = server::split_authentication(buffer)? {
            return Ok(body);
        }
        if stream.read_buf(buffer).await? == 0 {
            // libpq without a password hangs up here, and comes again with one.
            return Err(SessionError::TurnedAway("it gave no password".to_owned()));
        }
    }
}

async fn deny(
    stream: &mut (impl AsyncWrite + Unpin),
    out: &mut BytesMut,
    denied: Denied,
) -> SessionError {
    let refusal = match denied {
        Denied::Password => Refusal::new("28P01", "password authentication failed").hint(
            "The password is in the file that standby_password names in the site file of the \
             mirror's far end.",
        ),
        Denied::Malformed(_) | Denied::Binding(_) => {
            Refusal::new("28000", format!("authentication failed: {denied}"))
        }
    };
    tokio::time::sleep(DENIED_AFTER).await;
    match refuse(stream, out, refusal).await {
        SessionError::TurnedAway(_) => denied.into(),
        error => error,
    }
}

/// Tells the client, and gives what ends its session.
pub(super) async fn refuse(
    stream: &mut (impl AsyncWrite + Unpin),
    out: &mut BytesMut,
    refusal: Refusal,
) -> SessionError {
    let hint = refusal.hint.as_deref();
    server::error_response(out, "FATAL", refusal.sqlstate, &refusal.message, hint);
    let written = write(stream, out).await;
    say_goodbye(stream).await;
    match written {
        Ok(()) => SessionError::TurnedAway(refusal.message),
        Err(error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(password: bool, tls: bool) -> Access {
        Access {
            password: password.then(|| "password".into()),
            tls: tls.then(|| ("c.crt".into(), "c.key".into())),
        }
    }

    #[test]
    fn loopback_asks_for_nothing_and_other_addresses_for_both() {
        for address in ["127.0.0.1:5433", "[::1]:5433", "127.8.0.1:0"] {
            assert!(access(false, false).addresses(address).is_ok(), "{address}");
        }
        for address in ["0.0.0.0:5433", "[::]:5433", "192.0.2.1:1"] {
            assert!(access(true, true).addresses(address).is_ok(), "{address}");
            for (password, tls, missing) in [
                (false, false, "standby_password, standby_certificate and standby_key"),
                (true, false, "Name standby_certificate and standby_key too"),
                (false, true, "Name standby_password too"),
            ] {
                let said = access(password, tls).addresses(address).unwrap_err();
                assert!(said.contains(missing), "{said}");
            }
        }
        for address in ["127.0.0.1", "", "127.0.0.1:x"] {
            assert!(access(true, true).addresses(address).is_err(), "{address}");
        }
    }

    #[test]
    fn a_password_is_one_line_that_nobody_else_reads() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("password");
        let access = Access { password: Some(path.clone()), tls: None };
        assert!(access.read_password().unwrap_err().contains("password"), "there is no file");
        let write = |text: &str, mode| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            access.read_password()
        };
        assert_eq!(write("s3cret word\n", 0o600), Ok(Some("s3cret word".to_owned())));
        assert!(write("s3cret\n", 0o644).unwrap_err().contains("chmod 0600"));
        for text in ["", "\n", "two\nlines\n", "schlüssel\n"] {
            assert!(write(text, 0o600).unwrap_err().contains("one line"), "{text:?}");
        }
        assert!(write(&"x".repeat(PASSWORD_BYTES_MAX + 1), 0o600).is_err());
    }

    #[test]
    fn other_machines_come_by_tls_where_there_is_tls() {
        let plain = Door { verifier: None, tls: None, end_point: None };
        let far: SocketAddr = "192.0.2.1:1".parse().unwrap();
        assert!(plain.check_plain(far).is_ok());
        let config = rustls::ServerConfig::builder_with_provider(Arc::new(
            rustls::crypto::ring::default_provider(),
        ))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(rustls::server::ResolvesServerCertUsingSni::new()));
        let tls = TlsAcceptor::from(Arc::new(config));
        let door = Door { verifier: None, tls: Some(tls), end_point: None };
        assert!(door.check_plain(far).is_err());
        for near in ["127.0.0.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert!(door.check_plain(near.parse().unwrap()).is_ok(), "{near}");
        }
    }
}
