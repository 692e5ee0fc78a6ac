use super::{Address, Host, Password};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// The directories for which the password file says `localhost`, as libpq's default is.
const DEFAULT_SOCKET_DIRECTORIES: &[&str] = &["/var/run/postgresql", "/run/postgresql", "/tmp"];

/// Looks a password up in `.pgpass` (PostgreSQL docs: "34.16. The Password File"). Lines are
/// tried in order, and for each all names of the database.
///
/// The second value says why the file could not be used, for the message about a missing password.
pub(super) fn find(
    path: &Path,
    host: &Host,
    databases: &[&str],
    user: &str,
) -> (Option<Password>, Option<String>) {
    let unusable = |reason: String| {
        let note = format!("password file {} was ignored: {reason}", path.display());
        tracing::warn!("{note}");
        (None, Some(note))
    };
    let metadata = match std::fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return (None, None),
        Err(error) => return unusable(error.to_string()),
    };
    if !metadata.is_file() {
        return unusable("it is not a plain file".into());
    }
    let mode = metadata.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return unusable(format!(
            "its mode {mode:04o} lets others read it; run: chmod 0600 {}",
            path.display()
        ));
    }
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) => return unusable(error.to_string()),
    };
    let host_names = match &host.address {
        Address::Tcp(name) => vec![name.clone()],
        Address::Unix(directory) => {
            let directory = directory.display().to_string();
            let default = DEFAULT_SOCKET_DIRECTORIES.contains(&directory.as_str());
            let alias = default.then(|| "localhost".to_owned());
            std::iter::once(directory).chain(alias).collect()
        }
    };
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let fields = split_line(line);
        let [line_host, line_port, line_database, line_user, password] = &fields[..] else {
            continue;
        };
        let is = |field: &Field, value: &str| field.any || field.text == value;
        if host_names.iter().any(|name| is(line_host, name))
            && is(line_port, &host.port.to_string())
            && databases.iter().any(|database| is(line_database, database))
            && is(line_user, user)
        {
            return (Some(Password::new(password.text.clone())), None);
        }
    }
    (None, Some(format!("password file {} has no matching line", path.display())))
}

struct Field {
    text: String,
    /// A bare `*`.
    any: bool,
}

/// `host:port:database:user:password`, with `\` before `:` and `\` within a field. The password
/// goes on to the end of the line.
fn split_line(line: &str) -> Vec<Field> {
    let mut fields = vec![Field { text: String::new(), any: false }];
    let mut raw_start = 0;
    let mut characters = line.char_indices();
    while let Some((at, c)) = characters.next() {
        let count = fields.len();
        let Some(field) = fields.last_mut() else { break };
        match c {
            '\\' => field.text.extend(characters.next().map(|(_, escaped)| escaped)),
            ':' if count < 5 => {
                field.any = &line[raw_start..at] == "*";
                raw_start = at + 1;
                fields.push(Field { text: String::new(), any: false });
            }
            c => field.text.push(c),
        }
    }
    fields
}
