//! Where a server is and how to talk to it: URLs, keyword/value strings, service files, password
//! files and environment variables, as libpq understands them (PostgreSQL docs: "34.1. Database
//! Connection Control Functions").

mod conninfo;
mod environment;
mod keywords;
mod password_file;
mod service_file;

pub use environment::Environment;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long [`Connection::connect`](crate::Connection::connect) may take per host when nothing
/// else is said.
pub const CONNECT_TIMEOUT_DEFAULT: Duration = Duration::from_secs(10);

/// A secret: never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    /// Wraps a secret.
    pub fn new(secret: impl Into<String>) -> Password {
        Password(secret.into())
    }

    /// The secret itself, for the one place that needs it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("(hidden)")
    }
}

/// `sslmode`: whether TLS is used and what is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SslMode {
    /// Never TLS.
    Disable,
    /// Without TLS if the server lets us, else with.
    Allow,
    /// With TLS if the server can, else without.
    Prefer,
    /// Always TLS. Nothing is checked, unless there is a root certificate file: then as
    /// `VerifyCa`, as in libpq.
    Require,
    /// TLS, and a trusted authority signed the server's certificate.
    VerifyCa,
    /// As `VerifyCa`, and the certificate carries the host's name or address.
    VerifyFull,
}

/// `channel_binding`: whether SCRAM is tied to the TLS channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ChannelBinding {
    /// Not.
    Disable,
    /// If the server offers it.
    Prefer,
    /// Or refuse to talk.
    Require,
}

/// `target_session_attrs`: which of several hosts will do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TargetSession {
    /// Any.
    Any,
    /// One whose sessions may write by default.
    ReadWrite,
    /// One whose sessions may not.
    ReadOnly,
    /// One that is not in recovery.
    Primary,
    /// One that is.
    Standby,
}

/// How to reach a server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// By name or IP address.
    Tcp(String),
    /// Through a Unix socket in this directory.
    Unix(PathBuf),
}

/// One server to try.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Where it is. The name is also what `verify-full` checks.
    pub address: Address,
    /// The IP address to use instead of looking the name up.
    pub ip: Option<std::net::IpAddr>,
    /// Its port.
    pub port: u16,
}

impl Host {
    /// Whether both are one server, by what is written: not by a socket on one side and a port on the
    /// other, which may lead anywhere.
    fn is_same(&self, other: &Host) -> bool {
        let is_here = |name: &str| {
            matches!(name, "127.0.0.1" | "::1") || name.eq_ignore_ascii_case("localhost")
        };
        self.port == other.port
            && match (&self.address, &other.address) {
                (Address::Tcp(one), Address::Tcp(two)) => {
                    let one = self.ip.map_or_else(|| one.clone(), |ip| ip.to_string());
                    let two = other.ip.map_or_else(|| two.clone(), |ip| ip.to_string());
                    one.eq_ignore_ascii_case(&two) || (is_here(&one) && is_here(&two))
                }
                (one, two) => one == two,
            }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.address {
            Address::Tcp(name) if name.contains(':') => write!(f, "[{name}]:{}", self.port),
            Address::Tcp(name) => write!(f, "{name}:{}", self.port),
            Address::Unix(directory) => {
                write!(f, "{}", directory.join(format!(".s.PGSQL.{}", self.port)).display())
            }
        }
    }
}

/// TCP's own idea of when the peer is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// Whether to probe at all.
    pub enabled: bool,
    /// Silence before the first probe.
    pub idle: Duration,
    /// Between probes.
    pub interval: Duration,
    /// Unanswered probes before the connection is given up.
    pub count: u32,
    /// Longest time that sent data may stay unacknowledged; zero leaves it to the kernel.
    pub user_timeout: Duration,
}

impl Default for Keepalive {
    /// Shorter than Linux's two hours: a replication stream must notice a dead peer by itself.
    fn default() -> Keepalive {
        Keepalive {
            enabled: true,
            idle: Duration::from_secs(30),
            interval: Duration::from_secs(10),
            count: 6,
            user_timeout: Duration::from_secs(120),
        }
    }
}

/// Everything needed to connect. [`Config::parse`] makes one.
#[derive(Clone, PartialEq, Eq)]
pub struct Config {
    /// Servers, in the order in which to try them; never empty.
    pub hosts: Vec<Host>,
    /// The role.
    pub user: String,
    /// Its password, if known already. Otherwise `passfile` is searched when connecting.
    pub password: Option<Password>,
    /// `.pgpass`, if there is one.
    pub passfile: Option<PathBuf>,
    /// The database.
    pub dbname: String,
    /// Whether TLS is used and what is checked.
    pub sslmode: SslMode,
    /// Trusted authorities (PEM); `None` means those of the system.
    pub sslrootcert: Option<PathBuf>,
    /// Our certificate chain (PEM).
    pub sslcert: Option<PathBuf>,
    /// Its key (PEM).
    pub sslkey: Option<PathBuf>,
    /// Whether to name the host in the TLS handshake.
    pub sslsni: bool,
    /// Whether SCRAM is tied to the TLS channel.
    pub channel_binding: ChannelBinding,
    /// Which of several hosts will do.
    pub target_session: TargetSession,
    /// `application_name`: what `pg_stat_activity` shows.
    pub application_name: String,
    /// Settings for the session, as on a server's command line: `-c work_mem=64MB`.
    pub options: Option<String>,
    /// Longest time to connect to one host, TLS and authentication included; never zero.
    pub connect_timeout: Duration,
    /// TCP's own idea of when the peer is gone.
    pub keepalive: Keepalive,
}

impl Config {
    /// Understands a URL (`postgres://user@host:5432/db?sslmode=verify-full`, also
    /// `?host=/socket/dir`), a keyword/value string (`host=h dbname='my db'`) or `service=name`,
    /// and fills in what it leaves open from, in this order: the service file, the `PG*`
    /// environment variables, and libpq's defaults. The password file is searched when connecting.
    ///
    /// # Errors
    /// Names the parameter that is unknown, not supported or wrong; never shows a password.
    pub fn parse(text: &str) -> Result<Config, ConfigError> {
        Config::parse_in(text, &Environment::of_process())
    }

    /// As [`Config::parse`], in another environment than the process's.
    ///
    /// # Errors
    /// As [`Config::parse`].
    pub fn parse_in(text: &str, environment: &Environment) -> Result<Config, ConfigError> {
        let mut keywords = conninfo::parse(text)?;
        let service = keywords.get("service").map(str::to_owned);
        if let Some(service) = service.or_else(|| environment.variable("PGSERVICE")) {
            keywords.fill_from(service_file::find(
                &service,
                keywords.get("servicefile"),
                environment,
            )?);
        }
        keywords.fill_from(environment.keywords()?);
        keywords.resolve(environment)
    }

    /// The same server under another `application_name`.
    pub fn with_application_name(mut self, name: &str) -> Config {
        name.clone_into(&mut self.application_name);
        self
    }

    /// As a URL without secrets: `postgres://user@host:port/db`.
    pub fn redacted(&self) -> String {
        self.redacted_hosts(&self.hosts)
    }

    /// Whether both name the same database of the same servers, however they are spelled.
    pub fn is_same_place(&self, other: &Config) -> bool {
        let are_among = |some: &[Host], all: &[Host]| {
            some.iter().all(|host| all.iter().any(|other| host.is_same(other)))
        };
        self.dbname == other.dbname
            && are_among(&self.hosts, &other.hosts)
            && are_among(&other.hosts, &self.hosts)
    }

    /// As [`Config::redacted`], for one of the hosts.
    pub(crate) fn redacted_host(&self, host: &Host) -> String {
        self.redacted_hosts(std::slice::from_ref(host))
    }

    fn redacted_hosts(&self, hosts: &[Host]) -> String {
        let mut tcp = Vec::new();
        let mut sockets = Vec::new();
        for host in hosts {
            match &host.address {
                Address::Tcp(_) => tcp.push(host.to_string()),
                Address::Unix(directory) => {
                    sockets.push(format!("host={}&port={}", directory.display(), host.port));
                }
            }
        }
        let mut url = format!("postgres://{}@{}/{}", self.user, tcp.join(","), self.dbname);
        if !sockets.is_empty() {
            url.push('?');
            url.push_str(&sockets.join("&"));
        }
        url
    }

    /// The password for `host`: the configured one, or the password file's.
    ///
    /// `database` is what the password file calls it: `replication` for physical replication.
    pub(crate) fn password_for(
        &self,
        host: &Host,
        databases: &[&str],
    ) -> (Option<Password>, Option<String>) {
        match (&self.password, &self.passfile) {
            (Some(password), _) => (Some(password.clone()), None),
            (None, Some(path)) => password_file::find(path, host, databases, &self.user),
            (None, None) => (None, None),
        }
    }
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("url", &self.redacted())
            .field("password", &self.password)
            .field("sslmode", &self.sslmode)
            .field("application_name", &self.application_name)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.redacted())
    }
}

/// Connection parameters that make no sense. Never contains a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Not a URL and not a keyword/value string.
    #[error("malformed connection string: {0}")]
    Malformed(String),
    /// libpq does not know it either.
    #[error("unknown connection parameter \"{name}\"{hint}")]
    UnknownParameter {
        /// The parameter.
        name: String,
        /// What was probably meant; empty if nothing is near.
        hint: String,
    },
    /// libpq knows it, Farshore does not support it.
    #[error("connection parameter \"{name}\" is not supported{hint}")]
    UnsupportedParameter {
        /// The parameter.
        name: String,
        /// What to do instead; empty if there is nothing to say.
        hint: String,
    },
    /// A value that the parameter cannot have.
    #[error("connection parameter \"{name}\" cannot be \"{value}\"; expected {expected}")]
    InvalidValue {
        /// The parameter.
        name: String,
        /// Its value.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// The service is in no service file.
    #[error("no service \"{name}\" in {searched}")]
    UnknownService {
        /// The service.
        name: String,
        /// The files that were searched.
        searched: String,
    },
    /// A file cannot be read or understood.
    #[error("{path}: {reason}")]
    File {
        /// The file.
        path: String,
        /// Why not.
        reason: String,
    },
}

/// What stands for `path` in messages, and whether it is there.
fn existing(path: PathBuf) -> Option<PathBuf> {
    Path::exists(&path).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_the_same_however_it_is_spelled() {
        let config = |text: &str| Config::parse_in(text, &Environment::default()).unwrap();
        let one = config("postgres://a@127.0.0.1:5433/db");
        for same in [
            "postgres://b@localhost:5433/db?sslmode=disable",
            "host=::1 port=5433 dbname=db user=c",
            "host=x hostaddr=127.0.0.1 port=5433 dbname=db user=c",
        ] {
            assert!(one.is_same_place(&config(same)) && config(same).is_same_place(&one), "{same}");
        }
        for other in [
            "postgres://a@127.0.0.1:5433/other",
            "postgres://a@127.0.0.1:5434/db",
            "postgres://a@127.0.0.2:5433/db",
            "postgres://a@db1:5433/db",
            "host=/var/run/postgresql port=5433 dbname=db user=c",
            "host=db1,localhost port=5433 dbname=db user=c",
        ] {
            assert!(!one.is_same_place(&config(other)), "{other}");
        }
        let sockets = ["/cloudsql/a", "/cloudsql/b"]
            .map(|folder| config(&format!("host={folder} dbname=d user=a")));
        assert!(!sockets[0].is_same_place(&sockets[1]) && sockets[0].is_same_place(&sockets[0]));
        let [one, two] =
            ["host=db1,db2 dbname=d user=a", "host=DB2,db1 dbname=d user=b"].map(config);
        assert!(one.is_same_place(&two));
        let (lower, upper) =
            (config("host=db1 dbname=d user=a"), config("host=DB1 dbname=d user=a"));
        assert!(lower.is_same_place(&upper));
    }
}
