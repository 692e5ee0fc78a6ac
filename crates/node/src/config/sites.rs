//! What a site file says of other sites: who may have what from here, and what is received.

use super::typed;
use super::{LogSettings, SiteConfig, check_name, parse_bytes, resolve_log};
use farshore_link::{IdentityFiles, Rate, RateWindow, Rates};
use farshore_model::nearest;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};

/// Section and what is wrong in it.
type Wrong = (String, String);

/// What other sites have to do with this one.
#[derive(Clone, Debug, Default)]
pub struct SitesConfig {
    /// Who this site is to others; there if it has to do with any.
    pub identity: Option<IdentityFiles>,
    /// Where a list of revocations is, or is looked for.
    pub revocations: PathBuf,
    /// Where downstream sites connect, `host:port`.
    pub listen: Option<String>,
    /// Sites that may have publications from here.
    pub downstreams: Vec<Downstream>,
    /// Sites that publications are received from.
    pub upstreams: Vec<Upstream>,
    /// Publications that are received, because a subscription or a downstream site follows them.
    pub received: Vec<Received>,
}

/// A site that may have publications from here.
#[derive(Clone, Debug)]
pub struct Downstream {
    /// Its name, which its certificate proves.
    pub site: String,
    /// Publications that it may have: names of this site, or `upstream/publication`.
    pub publications: Vec<String>,
    /// Mirrors that it may have.
    pub mirrors: Vec<String>,
    /// How much may go there per second.
    pub rates: Rates,
    /// zstd level of what crosses; 0: as it is stored.
    pub compression: i32,
}

/// A site that publications are received from.
#[derive(Clone, Debug)]
pub struct Upstream {
    /// Its name, which its certificate proves.
    pub site: String,
    /// `host:port`.
    pub address: String,
    /// Connections side by side.
    pub connections: usize,
    /// How what is received is kept.
    pub log: LogSettings,
}

/// A publication of another site whose log is kept here too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// `upstream/publication`: its name here.
    pub name: String,
    /// The site it comes from.
    pub upstream: String,
    /// Its name there.
    pub publication: String,
}

/// Connections to a site by default: with stock socket limits one of them carries 27 MB/s at a
/// round trip of 77 ms.
const CONNECTIONS: usize = 4;

impl SitesConfig {
    /// The received publication of that name.
    pub fn received(&self, name: &str) -> Option<&Received> {
        self.received.iter().find(|received| received.name == name)
    }

    /// The upstream site of that name.
    pub fn upstream(&self, site: &str) -> Option<&Upstream> {
        self.upstreams.iter().find(|upstream| upstream.site == site)
    }

    /// The downstream site of that name.
    pub fn downstream(&self, site: &str) -> Option<&Downstream> {
        self.downstreams.iter().find(|downstream| downstream.site == site)
    }

    pub(crate) fn unknown_upstream(&self, site: &str) -> String {
        let known: Vec<&str> = self.upstreams.iter().map(|up| up.site.as_str()).collect();
        let there = if known.is_empty() {
            "there is none".to_owned()
        } else {
            format!("there are: {}", known.join(", "))
        };
        let guess = nearest(site, known.into_iter())
            .map_or_else(String::new, |near| format!(". Did you mean \"{near}\"?"));
        format!(
            "upstream site \"{site}\" is not configured here ({there}){guess}. Add \
             [upstream.{site}] with its address"
        )
    }
}

/// Resolves everything about other sites.
pub(super) fn resolve(folder: &Path, typed: &typed::SiteFile) -> Result<SitesConfig, Wrong> {
    let mut sites = SitesConfig { listen: typed.site.listen.clone(), ..SitesConfig::default() };
    for (site, upstream) in &typed.upstream {
        let section = format!("[upstream.{site}]");
        let resolved = resolve_upstream(site, upstream).map_err(|what| (section, what))?;
        sites.upstreams.push(resolved);
    }
    for (site, downstream) in &typed.downstream {
        let section = format!("[downstream.{site}]");
        let resolved = resolve_downstream(site, downstream).map_err(|what| (section, what))?;
        sites.downstreams.push(resolved);
    }
    let own = &typed.site.name;
    if sites.upstream(own).is_some() || sites.downstream(own).is_some() {
        let what = format!("\"{own}\" is this site itself");
        return Err(("[site] name".to_owned(), what));
    }
    if let Some(listen) = &sites.listen {
        check_address(listen).map_err(|what| ("[site]".to_owned(), format!("listen: {what}")))?;
        if sites.downstreams.is_empty() {
            let what = "listen is set, and nobody may connect. Add [downstream.SITE] with the \
                        publications or mirrors that the site may have";
            return Err(("[site]".to_owned(), what.to_owned()));
        }
    } else if let Some(downstream) = sites.downstreams.first() {
        let what = "downstream sites have nowhere to connect. Add listen = \"host:port\" to [site]";
        return Err((format!("[downstream.{}]", downstream.site), what.to_owned()));
    }
    let wanted = typed
        .subscription
        .values()
        .map(|subscription| &subscription.publication)
        .chain(sites.downstreams.iter().flat_map(|downstream| &downstream.publications));
    for name in wanted {
        let Some((upstream, publication)) = name.split_once('/') else { continue };
        for part in publication.split('/') {
            check_name(part).map_err(|what| (format!("publication \"{name}\""), what))?;
        }
        if sites.received(name).is_none() && sites.upstream(upstream).is_some() {
            sites.received.push(Received {
                name: name.clone(),
                upstream: upstream.to_owned(),
                publication: publication.to_owned(),
            });
        }
    }
    if sites.listen.is_some() || !sites.upstreams.is_empty() {
        (sites.identity, sites.revocations) = identity(folder, &typed.site);
    }
    Ok(sites)
}

fn identity(folder: &Path, site: &typed::Site) -> (Option<IdentityFiles>, PathBuf) {
    let beside = |typed: &Option<std::path::PathBuf>, default: String| {
        folder.join(typed.clone().unwrap_or_else(|| default.into()))
    };
    let revoked = beside(&site.revoked, "revoked.crl".to_owned());
    let files = IdentityFiles {
        certificate: beside(&site.certificate, format!("{}.crt", site.name)),
        key: beside(&site.key, format!("{}.key", site.name)),
        authorities: beside(&site.ca, "ca.crt".to_owned()),
        // One that was named must be there.
        revoked: (site.revoked.is_some() || revoked.exists()).then(|| revoked.clone()),
    };
    (Some(files), revoked)
}

fn resolve_upstream(site: &str, typed: &typed::Upstream) -> Result<Upstream, String> {
    check_name(site)?;
    check_address(&typed.address).map_err(|what| format!("address: {what}"))?;
    let connections = typed.connections.unwrap_or(CONNECTIONS);
    if !(1..=16).contains(&connections) {
        return Err("connections: must be from 1 to 16".to_owned());
    }
    let log = resolve_log(
        typed.retention_age.as_deref(),
        typed.retention_size.as_deref(),
        typed.segment_size.as_deref(),
    )?;
    Ok(Upstream { site: site.to_owned(), address: typed.address.clone(), connections, log })
}

fn resolve_downstream(site: &str, typed: &typed::Downstream) -> Result<Downstream, String> {
    check_name(site)?;
    if typed.publications.is_empty() && typed.mirrors.is_empty() {
        return Err("publications or mirrors: name at least one that the site may have".to_owned());
    }
    let usual = typed.bandwidth.as_deref().map(parse_rate).transpose();
    let usual = usual.map_err(|what| format!("bandwidth: {what}"))?.flatten();
    let mut windows = Vec::new();
    for (span, rate) in &typed.bandwidth_at {
        let wrong = |what: String| format!("bandwidth_at: {what}");
        let (from_minute, to_minute) = parse_span(span).map_err(wrong)?;
        let rate = parse_rate(rate).map_err(wrong)?;
        windows.push(RateWindow { from_minute, to_minute, rate });
    }
    let rates = Rates::new(usual, windows).map_err(|error| format!("bandwidth: {error}"))?;
    let compression = typed.compression.unwrap_or(1);
    if !(0..=19).contains(&compression) {
        return Err("compression: must be from 0 (as it is stored) to 19".to_owned());
    }
    let publications = typed.publications.clone();
    let (site, mirrors) = (site.to_owned(), typed.mirrors.clone());
    Ok(Downstream { site, publications, mirrors, rates, compression })
}

/// `20MB` or `20MB/s`.
fn parse_rate(text: &str) -> Result<Rate, String> {
    let bytes = parse_bytes(text.strip_suffix("/s").unwrap_or(text))?;
    match NonZeroU64::new(bytes) {
        Some(bytes) => Ok(Some(bytes)),
        None => Err("must be more than nothing".to_owned()),
    }
}

/// `08:00-18:00`: minutes of the day.
fn parse_span(text: &str) -> Result<(u16, u16), String> {
    let wrong = || format!("\"{text}\" is not a time of day such as 08:00-18:00");
    let minute = |text: &str| -> Option<u16> {
        let (hours, minutes) = text.trim().split_once(':')?;
        let (hours, minutes): (u16, u16) = (hours.parse().ok()?, minutes.parse().ok()?);
        (hours < 24 && minutes < 60).then_some(hours * 60 + minutes)
    };
    let (from, to) = text.split_once('-').ok_or_else(wrong)?;
    let until = |text: &str| if text.trim() == "24:00" { Some(0) } else { minute(text) };
    let span = minute(from).zip(until(to)).filter(|(from, to)| from != to);
    span.ok_or_else(wrong)
}

fn check_address(address: &str) -> Result<(), String> {
    let is_address = address
        .rsplit_once(':')
        .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if is_address {
        Ok(())
    } else {
        Err(format!("\"{address}\" is not an address such as tukwila.example.com:7432"))
    }
}

/// Downstream sites can be given only what there is.
pub(super) fn check_grants(site: &SiteConfig) -> Result<(), Wrong> {
    for downstream in &site.sites.downstreams {
        for name in &downstream.publications {
            if site.publication(name).is_some() || site.sites.received(name).is_some() {
                continue;
            }
            let section = format!("[downstream.{}]", downstream.site);
            if let Some((upstream, _)) = name.split_once('/') {
                return Err((section, site.sites.unknown_upstream(upstream)));
            }
            let known = site.publications.iter().map(|p| p.spec.name.as_str());
            let guess = nearest(name, known)
                .map_or_else(String::new, |near| format!(". Did you mean \"{near}\"?"));
            let what = format!("publications: \"{name}\" is not configured here{guess}");
            return Err((section, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::config::{SiteConfig, parse};
    use std::num::NonZeroU64;
    use std::path::Path;

    const UP: &str = r#"
[site]
name = "tukwila"
data_dir = "data"
listen = "0.0.0.0:7432"
[publication.sales]
source = "postgres://farshore@db1/sales"
tables = ["public.orders"]
[downstream.dublin]
publications = ["sales"]
bandwidth = "20MB"
[downstream.dublin.bandwidth_at]
"22:00-06:30" = "100MB"
"#;

    const DOWN: &str = r#"
[site]
name = "dublin"
data_dir = "data"
listen = "0.0.0.0:7432"
ca = "/etc/ca.pem"
[upstream.tukwila]
address = "tukwila.example.com:7432"
retention_size = "50GB"
[downstream.galway]
publications = ["tukwila/sales"]
[subscription.local]
publication = "tukwila/sales"
target = "postgres://farshore@localhost/sales"
[subscription.other]
publication = "tukwila/stock"
target = "postgres://farshore@localhost/stock"
"#;

    fn parsed(text: &str) -> Result<SiteConfig, String> {
        parse(text, Path::new("/etc/farshore/site.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn sites_are_resolved() {
        let up = parsed(UP).unwrap();
        let dublin = up.sites.downstream("dublin").unwrap();
        let at = |hour: u16| dublin.rates.at(hour * 60).map(NonZeroU64::get);
        assert_eq!((at(23), at(6), at(7)), (Some(100 << 20), Some(100 << 20), Some(20 << 20)));
        let files = up.sites.identity.as_ref().unwrap();
        assert_eq!(files.certificate, Path::new("/etc/farshore/tukwila.crt"));
        assert!(up.sites.received.is_empty());

        let down = parsed(DOWN).unwrap();
        let names: Vec<&str> = down.sites.received.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["tukwila/sales", "tukwila/stock"]);
        assert_eq!(down.subscriptions[0].spec.publication, "tukwila/sales");
        assert_eq!(down.sites.upstream("tukwila").unwrap().connections, 4);
        assert_eq!(down.sites.identity.unwrap().authorities, Path::new("/etc/ca.pem"));
    }

    #[test]
    fn wrong_input_about_sites_says_what_is_wrong() {
        for (good, from, to, said) in [
            (UP, "publications = [\"sales\"]", "publications = [\"sale\"]", "mean \"sales\"?"),
            (UP, "publications = [\"sales\"]", "publications = []", "at least one"),
            (UP, "listen = \"0.0.0.0:7432\"\n", "", "nowhere to connect"),
            (UP, "0.0.0.0:7432", "7432", "not an address"),
            (UP, "22:00-06:30", "22-06", "time of day"),
            (UP, "\"20MB\"", "\"20 things\"", "bandwidth: "),
            (UP, "\"20MB\"", "\"0MB\"", "more than nothing"),
            (UP, "name = \"tukwila\"", "name = \"dublin\"", "this site itself"),
            (
                DOWN,
                "publication = \"tukwila/stock\"",
                "publication = \"tukwilla/stock\"",
                "mean \"tukwila\"?",
            ),
            (
                DOWN,
                "publications = [\"tukwila/sales\"]",
                "publications = [\"x/sales\"]",
                "Add [upstream.x]",
            ),
            (
                DOWN,
                "address = \"tukwila.example.com:7432\"",
                "address = \"tukwila\"",
                "not an address",
            ),
            (
                DOWN,
                "retention_size",
                "conections = 4\nretention_size",
                "Did you mean `connections`?",
            ),
            (DOWN, "\"tukwila/stock\"", "\"tukwila/Stock\"", "lower-case letters"),
            (DOWN, "\"tukwila/stock\"", "\"tukwila/\"", "cannot be a name"),
            (DOWN, "retention_size", "connections = 40\nretention_size", "from 1 to 16"),
            (
                DOWN,
                "[downstream.galway]\npublications = [\"tukwila/sales\"]\n",
                "",
                "nobody may connect",
            ),
        ] {
            let text = good.replacen(from, to, 1);
            assert_ne!(text, good, "{from}");
            let error = parsed(&text).expect_err(to);
            assert!(error.contains(said), "{to}: {error}");
        }
    }
}
