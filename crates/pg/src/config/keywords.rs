use super::{
    Address, CONNECT_TIMEOUT_DEFAULT, ChannelBinding, Config, ConfigError, Environment, Host,
    Keepalive, Password, SslMode, TargetSession, existing,
};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

/// Parameters as typed, by libpq's names (PostgreSQL docs: "34.1.2. Parameter Key Words").
#[derive(Debug, Default)]
pub(super) struct Keywords(BTreeMap<String, String>);

const SUPPORTED: &[&str] = &[
    "application_name",
    "channel_binding",
    "client_encoding",
    "connect_timeout",
    "dbname",
    "fallback_application_name",
    "gssencmode",
    "host",
    "hostaddr",
    "keepalives",
    "keepalives_count",
    "keepalives_idle",
    "keepalives_interval",
    "options",
    "passfile",
    "password",
    "port",
    "service",
    "servicefile",
    "sslcert",
    "sslcompression",
    "sslkey",
    "sslmode",
    "sslnegotiation",
    "sslrootcert",
    "sslsni",
    "target_session_attrs",
    "tcp_user_timeout",
    "user",
];

/// What libpq knows beyond that, and what we have to say about it.
const UNSUPPORTED: &[(&str, &str)] = &[
    ("gssdelegation", ""),
    ("gsslib", ""),
    ("krbsrvname", ""),
    ("load_balance_hosts", ": hosts are tried in the order given"),
    ("max_protocol_version", ": protocol 3.0 is spoken"),
    ("min_protocol_version", ": protocol 3.0 is spoken"),
    ("oauth_client_id", ""),
    ("oauth_client_secret", ""),
    ("oauth_issuer", ""),
    ("oauth_scope", ""),
    ("replication", ": Farshore sets it itself where it is needed; leave it out"),
    ("require_auth", ": use sslmode=verify-full with channel_binding=require"),
    ("requirepeer", ": use TCP with sslmode=verify-full"),
    ("requiressl", ": use sslmode=require"),
    ("scram_client_key", ""),
    ("scram_server_key", ""),
    ("ssl_max_protocol_version", ": TLS 1.2 and 1.3 are spoken"),
    ("ssl_min_protocol_version", ": TLS 1.2 and 1.3 are spoken"),
    ("sslcertmode", ": a client certificate is used when sslcert names one"),
    ("sslcrl", ""),
    ("sslcrldir", ""),
    ("sslkeylogfile", ""),
    ("sslpassword", ": use a key file without a passphrase, mode 0600"),
    ("authtype", ""),
    ("tty", ""),
];

impl Keywords {
    /// Sets a parameter; the last one wins, as in libpq.
    pub(super) fn set(&mut self, name: &str, value: String) -> Result<(), ConfigError> {
        if SUPPORTED.contains(&name) {
            self.0.insert(name.to_owned(), value);
            return Ok(());
        }
        match UNSUPPORTED.iter().find(|(unsupported, _)| *unsupported == name) {
            Some((_, hint)) => Err(ConfigError::UnsupportedParameter {
                name: name.to_owned(),
                hint: (*hint).to_owned(),
            }),
            None => Err(ConfigError::UnknownParameter {
                name: name.to_owned(),
                hint: farshore_model::nearest(name, SUPPORTED.iter().copied())
                    .map_or_else(String::new, |near| format!("; did you mean \"{near}\"?")),
            }),
        }
    }

    /// The value, unless it is empty: libpq treats that as not given.
    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str).filter(|value| !value.is_empty())
    }

    /// Takes from `other` what is not set here.
    pub(super) fn fill_from(&mut self, other: Keywords) {
        for (name, value) in other.0 {
            if self.get(&name).is_none() {
                self.0.insert(name, value);
            }
        }
    }

    fn choice<T: Copy>(
        &self,
        name: &str,
        choices: &[(&str, T)],
        default: T,
    ) -> Result<T, ConfigError> {
        let Some(value) = self.get(name) else { return Ok(default) };
        match choices.iter().find(|(text, _)| *text == value) {
            Some((_, choice)) => Ok(*choice),
            None => {
                let all: Vec<_> = choices.iter().map(|(text, _)| *text).collect();
                Err(self.invalid(name, &format!("one of {}", all.join(", "))))
            }
        }
    }

    fn number<T: FromStr>(&self, name: &str, expected: &str) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        value.trim().parse().map(Some).map_err(|_| self.invalid(name, expected))
    }

    /// A time in seconds; zero or less gives `None`, "as if not set".
    fn seconds(&self, name: &str) -> Result<Option<Duration>, ConfigError> {
        let seconds: Option<i32> = self.number(name, "a whole number of seconds")?;
        Ok(seconds
            .and_then(|seconds| u64::try_from(seconds).ok())
            .filter(|seconds| *seconds > 0)
            .map(Duration::from_secs))
    }

    fn invalid(&self, name: &str, expected: &str) -> ConfigError {
        ConfigError::InvalidValue {
            name: name.to_owned(),
            value: self.get(name).unwrap_or_default().to_owned(),
            expected: expected.to_owned(),
        }
    }

    /// As typed → as meant.
    pub(super) fn resolve(&self, environment: &Environment) -> Result<Config, ConfigError> {
        self.choice("sslnegotiation", &[("postgres", ())], ())?;
        self.choice("gssencmode", &[("disable", ()), ("prefer", ())], ())?;
        self.choice(
            "client_encoding",
            &[("UTF8", ()), ("utf8", ()), ("UTF-8", ()), ("utf-8", ())],
            (),
        )?;
        self.choice("sslcompression", &[("0", ())], ())?;
        let user = match self.get("user") {
            Some(user) => user.to_owned(),
            None => environment.operating_system_user().ok_or_else(|| {
                ConfigError::Malformed(
                    "no user given, neither PGUSER nor USER is set, and the account has no name"
                        .into(),
                )
            })?,
        };
        let in_home = |name: &str| environment.home().map(|home| home.join(name));
        let file_or_default = |keyword: &str, default: &str| match self.get(keyword) {
            Some(path) => Some(PathBuf::from(path)),
            None => in_home(default).and_then(existing),
        };
        let sslmode = self.sslmode()?;
        Ok(Config {
            hosts: self.hosts()?,
            password: self.get("password").map(Password::new),
            passfile: file_or_default("passfile", ".pgpass"),
            dbname: self.get("dbname").unwrap_or(&user).to_owned(),
            user,
            sslmode,
            sslrootcert: match self.get("sslrootcert") {
                Some("system") => None,
                Some(_) | None => file_or_default("sslrootcert", ".postgresql/root.crt"),
            },
            sslcert: file_or_default("sslcert", ".postgresql/postgresql.crt"),
            sslkey: file_or_default("sslkey", ".postgresql/postgresql.key"),
            sslsni: self.choice("sslsni", &[("0", false), ("1", true)], true)?,
            channel_binding: self.choice(
                "channel_binding",
                &[
                    ("disable", ChannelBinding::Disable),
                    ("prefer", ChannelBinding::Prefer),
                    ("require", ChannelBinding::Require),
                ],
                ChannelBinding::Prefer,
            )?,
            target_session: self.choice(
                "target_session_attrs",
                &[
                    ("any", TargetSession::Any),
                    ("read-write", TargetSession::ReadWrite),
                    ("read-only", TargetSession::ReadOnly),
                    ("primary", TargetSession::Primary),
                    ("standby", TargetSession::Standby),
                ],
                TargetSession::Any,
            )?,
            application_name: self
                .get("application_name")
                .or_else(|| self.get("fallback_application_name"))
                .unwrap_or("farshore")
                .to_owned(),
            options: self.get("options").map(str::to_owned),
            connect_timeout: self.seconds("connect_timeout")?.unwrap_or(CONNECT_TIMEOUT_DEFAULT),
            keepalive: self.keepalive()?,
        })
    }

    fn sslmode(&self) -> Result<SslMode, ConfigError> {
        let system_roots = self.get("sslrootcert") == Some("system");
        let default = if system_roots { SslMode::VerifyFull } else { SslMode::Prefer };
        let modes = [
            ("disable", SslMode::Disable),
            ("allow", SslMode::Allow),
            ("prefer", SslMode::Prefer),
            ("require", SslMode::Require),
            ("verify-ca", SslMode::VerifyCa),
            ("verify-full", SslMode::VerifyFull),
        ];
        let mode = self.choice("sslmode", &modes, default)?;
        if system_roots && mode != SslMode::VerifyFull {
            // As libpq: anybody can get a certificate from a public authority.
            return Err(self.invalid("sslmode", "verify-full, because sslrootcert is \"system\""));
        }
        Ok(mode)
    }

    fn keepalive(&self) -> Result<Keepalive, ConfigError> {
        let default = Keepalive::default();
        let count: Option<u32> = self.number("keepalives_count", "a whole number")?;
        let user_timeout: Option<u32> = self.number("tcp_user_timeout", "milliseconds")?;
        Ok(Keepalive {
            enabled: self.choice("keepalives", &[("0", false), ("1", true)], true)?,
            idle: self.seconds("keepalives_idle")?.unwrap_or(default.idle),
            interval: self.seconds("keepalives_interval")?.unwrap_or(default.interval),
            count: count.filter(|count| *count > 0).unwrap_or(default.count),
            user_timeout: user_timeout
                .map_or(default.user_timeout, |ms| Duration::from_millis(ms.into())),
        })
    }

    /// Comma-separated lists, side by side: one port serves all hosts, or each has its own.
    fn hosts(&self) -> Result<Vec<Host>, ConfigError> {
        let list = |name: &str| -> Vec<&str> {
            self.get(name).map_or(Vec::new(), |value| value.split(',').map(str::trim).collect())
        };
        let (names, ips, ports) = (list("host"), list("hostaddr"), list("port"));
        if !names.is_empty() && !ips.is_empty() && names.len() != ips.len() {
            return Err(
                self.invalid("hostaddr", &format!("{} addresses, one per host", names.len()))
            );
        }
        let count = names.len().max(ips.len()).max(1);
        if ports.len() > 1 && ports.len() != count {
            return Err(self.invalid("port", &format!("one port, or {count}, one per host")));
        }
        (0..count)
            .map(|i| {
                let port = match ports.get(i).or(ports.first()).filter(|port| !port.is_empty()) {
                    None => 5432,
                    Some(port) => match port.parse::<u16>() {
                        Ok(port) if port > 0 => port,
                        Ok(_) | Err(_) => return Err(self.invalid("port", "1 to 65535")),
                    },
                };
                let ip: Option<std::net::IpAddr> = match ips.get(i).filter(|ip| !ip.is_empty()) {
                    None => None,
                    Some(ip) => {
                        Some(ip.parse().map_err(|_| self.invalid("hostaddr", "an IP address"))?)
                    }
                };
                let name = names.get(i).copied().filter(|name| !name.is_empty());
                let address = match (name, ip) {
                    (Some(name), _) if name.starts_with('/') => Address::Unix(name.into()),
                    (Some(name), _) if name.starts_with('@') => {
                        return Err(self.invalid(
                            "host",
                            "a name, an address or a directory; abstract sockets are not supported",
                        ));
                    }
                    (Some(name), _) => Address::Tcp(name.to_owned()),
                    (None, Some(ip)) => Address::Tcp(ip.to_string()),
                    (None, None) => default_address(),
                };
                Ok(Host { address, ip, port })
            })
            .collect()
    }
}

/// Where a server of this machine usually listens: Debian's socket directory, PostgreSQL's own
/// one, or else TCP.
fn default_address() -> Address {
    for directory in ["/var/run/postgresql", "/tmp"] {
        let holds_socket = std::fs::read_dir(directory).is_ok_and(|entries| {
            entries.flatten().any(|e| e.file_name().to_string_lossy().starts_with(".s.PGSQL."))
        });
        if holds_socket {
            return Address::Unix(directory.into());
        }
    }
    Address::Tcp("localhost".into())
}
