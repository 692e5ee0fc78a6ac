use super::ConfigError;
use super::keywords::Keywords;

/// Either form of a connection string (PostgreSQL docs: "34.1.1. Connection Strings").
pub(super) fn parse(text: &str) -> Result<Keywords, ConfigError> {
    match text.strip_prefix("postgresql://").or_else(|| text.strip_prefix("postgres://")) {
        Some(rest) => parse_url(rest),
        None if begins_with_scheme(text) => Err(malformed("a URL must begin with postgres://")),
        None => parse_keyword_values(text),
    }
}

/// Whether this is another kind of URL (RFC 3986, 3.1). A value, a password say, may hold `://` too.
fn begins_with_scheme(text: &str) -> bool {
    let in_scheme = |b: u8| b.is_ascii_alphanumeric() || b"+-.".contains(&b);
    text.split_once("://").is_some_and(|(scheme, _)| scheme.trim_start().bytes().all(in_scheme))
}

const ESCAPES: &str =
    "in a password or a name, / is written as %2F, ? as %3F, # as %23 and @ as %40";

fn malformed(reason: impl Into<String>) -> ConfigError {
    ConfigError::Malformed(reason.into())
}

/// `[user[:password]@][host[:port]][,…][/dbname][?name=value[&…]]`
fn parse_url(text: &str) -> Result<Keywords, ConfigError> {
    let mut keywords = Keywords::default();
    let (text, query) = text.split_once('?').map_or((text, None), |(t, q)| (t, Some(q)));
    let (authority, dbname) = text.split_once('/').map_or((text, None), |(a, d)| (a, Some(d)));
    // Of a password with a / in it, what is behind that would count as something else, and be shown.
    if dbname.is_some_and(|dbname| dbname.contains('@')) {
        return Err(malformed(format!("an \"@\" in the name of a database; {ESCAPES}")));
    }
    // A password may hold an unescaped '@': the last one ends it.
    let (credentials, hosts) =
        authority.rsplit_once('@').map_or((None, authority), |(c, h)| (Some(c), h));

    if let Some(credentials) = credentials {
        let (user, password) =
            credentials.split_once(':').map_or((credentials, None), |(u, p)| (u, Some(p)));
        keywords.set("user", percent_decoded(user, "user")?)?;
        if let Some(password) = password {
            keywords.set("password", percent_decoded(password, "password")?)?;
        }
    }
    let (mut names, mut ports) = (Vec::new(), Vec::new());
    for host in hosts.split(',').filter(|_| !hosts.is_empty()) {
        let (name, port) = split_host(host)?;
        // It may be a password, with a / or a ? in it, or without a host.
        if credentials.is_none() && !port.bytes().all(|b| b.is_ascii_digit()) {
            return Err(malformed(format!("the port is not a number; {ESCAPES}")));
        }
        names.push(percent_decoded(name, "host")?);
        ports.push(percent_decoded(port, "port")?);
    }
    if names.iter().any(|name| !name.is_empty()) {
        keywords.set("host", names.join(","))?;
    }
    if ports.iter().any(|port| !port.is_empty()) {
        keywords.set("port", ports.join(","))?;
    }
    if let Some(dbname) = dbname.filter(|dbname| !dbname.is_empty()) {
        keywords.set("dbname", percent_decoded(dbname, "dbname")?)?;
    }
    for parameter in query.unwrap_or_default().split('&').filter(|p| !p.is_empty()) {
        let (name, value) = parameter.split_once('=').ok_or_else(|| {
            malformed(format!("URL parameter \"{}\" has no value", name_only(parameter)))
        })?;
        let name = percent_decoded(name, "parameter name")?;
        let value = percent_decoded(value, &name)?;
        match (name.as_str(), value.as_str()) {
            // JDBC's spelling, which libpq accepts too.
            ("ssl", "true") => keywords.set("sslmode", "require".into())?,
            _ => keywords.set(&name, value)?,
        }
    }
    Ok(keywords)
}

/// `name`, `name:port`, `[ipv6]` or `[ipv6]:port`.
fn split_host(host: &str) -> Result<(&str, &str), ConfigError> {
    let Some(bracketed) = host.strip_prefix('[') else {
        return Ok(host.split_once(':').unwrap_or((host, "")));
    };
    let (name, rest) = bracketed
        .split_once(']')
        .ok_or_else(|| malformed("an IPv6 address lacks its closing \"]\""))?;
    match rest.strip_prefix(':') {
        Some(port) => Ok((name, port)),
        None if rest.is_empty() => Ok((name, "")),
        None => Err(malformed("after an IPv6 address's \"]\" only \":port\" may follow")),
    }
}

fn percent_decoded(text: &str, what: &str) -> Result<String, ConfigError> {
    let invalid = || malformed(format!("the {what} has an invalid %-escape"));
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, after @ ..] = rest else { return Err(invalid()) };
        let digit = |b: u8| char::from(b).to_digit(16).ok_or_else(invalid);
        let byte = (digit(*high)? << 4 | digit(*low)?) as u8;
        if byte == 0 {
            return Err(malformed(format!("the {what} contains %00")));
        }
        bytes.push(byte);
        rest = after;
    }
    String::from_utf8(bytes).map_err(|_| invalid())
}

/// What may be shown of a piece that could hold a secret.
fn name_only(piece: &str) -> &str {
    piece.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next().unwrap_or_default()
}

/// `name = value …`, values in single quotes where they hold spaces, `\` before `'` and `\`.
fn parse_keyword_values(text: &str) -> Result<Keywords, ConfigError> {
    let mut keywords = Keywords::default();
    let mut characters = text.chars().peekable();
    loop {
        while characters.next_if(|c| c.is_whitespace()).is_some() {}
        if characters.peek().is_none() {
            return Ok(keywords);
        }
        let mut name = String::new();
        while let Some(c) = characters.next_if(|c| *c != '=' && !c.is_whitespace()) {
            name.push(c);
        }
        while characters.next_if(|c| c.is_whitespace()).is_some() {}
        if characters.next() != Some('=') {
            let name = name_only(&name);
            return Err(malformed(format!("\"=\" expected after \"{name}\"")));
        }
        while characters.next_if(|c| c.is_whitespace()).is_some() {}
        let mut value = String::new();
        if characters.next_if_eq(&'\'').is_some() {
            loop {
                match characters.next() {
                    None => {
                        return Err(malformed(format!("the quoted value of {name} has no end")));
                    }
                    Some('\'') => break,
                    Some('\\') => value.extend(characters.next()),
                    Some(c) => value.push(c),
                }
            }
        } else {
            while let Some(c) = characters.next_if(|c| !c.is_whitespace()) {
                match c {
                    '\\' => value.extend(characters.next()),
                    c => value.push(c),
                }
            }
        }
        keywords.set(&name, value)?;
    }
}
