use super::ConfigError;
use super::keywords::Keywords;
use std::collections::HashMap;
use std::path::PathBuf;

/// The environment variables and the home directory that fill in a connection's parameters.
///
/// A value, so that tests need not change the process's own.
#[derive(Debug, Clone, Default)]
pub struct Environment {
    variables: HashMap<String, String>,
}

/// PostgreSQL docs: "34.15. Environment Variables".
const VARIABLES: &[(&str, &str)] = &[
    ("PGHOST", "host"),
    ("PGHOSTADDR", "hostaddr"),
    ("PGPORT", "port"),
    ("PGDATABASE", "dbname"),
    ("PGUSER", "user"),
    ("PGPASSWORD", "password"),
    ("PGPASSFILE", "passfile"),
    ("PGREQUIREAUTH", "require_auth"),
    ("PGCHANNELBINDING", "channel_binding"),
    ("PGOPTIONS", "options"),
    ("PGAPPNAME", "application_name"),
    ("PGSSLMODE", "sslmode"),
    ("PGSSLNEGOTIATION", "sslnegotiation"),
    ("PGSSLCERT", "sslcert"),
    ("PGSSLKEY", "sslkey"),
    ("PGSSLROOTCERT", "sslrootcert"),
    ("PGSSLCRL", "sslcrl"),
    ("PGSSLCRLDIR", "sslcrldir"),
    ("PGSSLSNI", "sslsni"),
    ("PGGSSENCMODE", "gssencmode"),
    ("PGCONNECT_TIMEOUT", "connect_timeout"),
    ("PGTARGETSESSIONATTRS", "target_session_attrs"),
];

impl Environment {
    /// The process's own.
    pub fn of_process() -> Environment {
        let mut environment = Environment::default();
        let others = ["PGSERVICE", "PGSERVICEFILE", "PGSYSCONFDIR", "HOME", "USER", "LOGNAME"];
        for name in VARIABLES.iter().map(|(name, _)| *name).chain(others) {
            if let Ok(value) = std::env::var(name) {
                environment = environment.with(name, &value);
            }
        }
        if environment.operating_system_user().is_none()
            && let Some(name) = account_name()
        {
            environment = environment.with("LOGNAME", &name);
        }
        environment
    }

    /// The same with one more variable; an empty value counts as not set, as in libpq.
    pub fn with(mut self, name: &str, value: &str) -> Environment {
        if value.is_empty() {
            self.variables.remove(name);
        } else {
            self.variables.insert(name.to_owned(), value.to_owned());
        }
        self
    }

    pub(super) fn variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).cloned()
    }

    pub(super) fn home(&self) -> Option<PathBuf> {
        self.variable("HOME").map(PathBuf::from)
    }

    /// The operating system's name for whoever runs us, as far as the environment tells.
    pub(super) fn operating_system_user(&self) -> Option<String> {
        self.variable("USER").or_else(|| self.variable("LOGNAME"))
    }

    pub(super) fn keywords(&self) -> Result<Keywords, ConfigError> {
        let mut keywords = Keywords::default();
        for (variable, keyword) in VARIABLES {
            if let Some(value) = self.variable(variable) {
                keywords.set(keyword, value)?;
            }
        }
        Ok(keywords)
    }
}

/// What the operating system calls the account that we run as: a service manager or a container may
/// set no variable that says it.
fn account_name() -> Option<String> {
    const BYTES_MAX: usize = 1 << 16;
    let mut buffer: Vec<libc::c_char> = vec![0; BYTES_MAX];
    // SAFETY: all bytes zero is a value of this plain C struct.
    let mut account: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    // SAFETY: every pointer is to memory of ours that outlives the call, and the buffer's length is
    // as said.
    let failed = unsafe {
        libc::getpwuid_r(
            libc::geteuid(),
            &raw mut account,
            buffer.as_mut_ptr(),
            buffer.len(),
            &raw mut found,
        )
    };
    if failed != 0 || found.is_null() || account.pw_name.is_null() {
        return None;
    }
    // SAFETY: of an account that was found, the name is a string that ends in the buffer, which
    // still lives.
    let name = unsafe { std::ffi::CStr::from_ptr(account.pw_name) };
    name.to_str().ok().filter(|name| !name.is_empty()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_account_has_the_name_that_id_prints() {
        let printed = std::process::Command::new("id").arg("-un").output();
        let printed = String::from_utf8(printed.expect("id runs").stdout).expect("a name");
        assert_eq!(super::account_name().as_deref(), Some(printed.trim()));
    }
}
