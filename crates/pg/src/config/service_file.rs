use super::keywords::Keywords;
use super::{ConfigError, Environment, existing};
use std::path::{Path, PathBuf};

/// Finds a service (PostgreSQL docs: "34.17. The Connection Service File") in the user's file,
/// then in the system's.
pub(super) fn find(
    service: &str,
    named_file: Option<&str>,
    environment: &Environment,
) -> Result<Keywords, ConfigError> {
    let own = match named_file.map(str::to_owned).or_else(|| environment.variable("PGSERVICEFILE"))
    {
        // A file that was named must be there.
        Some(named) => Some(PathBuf::from(named)),
        None => environment.home().map(|home| home.join(".pg_service.conf")).and_then(existing),
    };
    let system = environment
        .variable("PGSYSCONFDIR")
        .map(|directory| PathBuf::from(directory).join("pg_service.conf"))
        .and_then(existing);
    let mut searched = Vec::new();
    for path in own.into_iter().chain(system) {
        if let Some(keywords) = find_in(&path, service)? {
            return Ok(keywords);
        }
        searched.push(path.display().to_string());
    }
    let searched = if searched.is_empty() {
        "any service file: there is no ~/.pg_service.conf, and PGSERVICEFILE is not set".to_owned()
    } else {
        searched.join(" or ")
    };
    Err(ConfigError::UnknownService { name: service.to_owned(), searched })
}

fn find_in(path: &Path, service: &str) -> Result<Option<Keywords>, ConfigError> {
    let file = |reason: String| ConfigError::File { path: path.display().to_string(), reason };
    let text = std::fs::read_to_string(path).map_err(|e| file(e.to_string()))?;
    let mut found: Option<Keywords> = None;
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            if found.is_some() {
                break;
            }
            if name == service {
                found = Some(Keywords::default());
            }
            continue;
        }
        let Some(keywords) = &mut found else { continue };
        let number = number + 1;
        let Some((name, value)) = line.split_once('=') else {
            return Err(file(format!("line {number}: expected name=value")));
        };
        let name = name.trim();
        if name == "service" || name == "servicefile" {
            return Err(file(format!("line {number}: a service cannot refer to another one")));
        }
        keywords
            .set(name, value.trim().to_owned())
            .map_err(|error| file(format!("line {number}: {error}")))?;
    }
    Ok(found)
}
