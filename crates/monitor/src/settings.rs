use crate::Webhook;
use std::net::SocketAddr;
use std::path::PathBuf;

/// Where the monitor listens, and who may ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Address and port; port 0 for any.
    pub address: SocketAddr,
    /// File with the token that is asked for; without it whoever reaches the address may ask.
    pub token: Option<PathBuf>,
    /// Certificate chain and key, PEM; without them there is no TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Folder that history is kept in.
    pub history: Option<PathBuf>,
    /// Where changes of health are posted.
    pub webhook: Option<Webhook>,
}

impl Settings {
    /// Refuses an address that others reach unless there is TLS and a token.
    ///
    /// # Errors
    /// What is missing, for a person.
    pub fn check(&self) -> Result<(), String> {
        if self.address.ip().is_loopback() {
            return Ok(());
        }
        let missing = match (&self.tls, &self.token) {
            (Some(_), Some(_)) => return Ok(()),
            (None, None) => "monitor_certificate, monitor_key and monitor_token",
            (None, Some(_)) => "monitor_certificate and monitor_key",
            (Some(_), None) => "monitor_token",
        };
        Err(format!(
            "{} can be reached from other machines, so the monitor needs TLS and a token: name \
             {missing} too, or listen on 127.0.0.1",
            self.address
        ))
    }
}
