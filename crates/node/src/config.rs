//! The site file: parsed as typed ([`typed`]), then resolved once into what it means.

pub mod mirrors;
mod monitor;
pub mod secrets;
pub mod sites;
mod thresholds;
pub mod typed;

use farshore_apply::postgres::follow_ddl::FollowDdl;
use farshore_apply::postgres::initial_copy::CopySettings;
use farshore_apply::postgres::lanes::Streams;
use farshore_apply::postgres::schema::SchemaSettings;
use farshore_apply::scheduler::{Batches, GroupLimits};
use farshore_apply::{ConflictPolicy, Initialise, OnConflict, SubscriptionSpec};
use farshore_capture::publication::{Article, PublicationSpec, TableName, TablePattern};
use farshore_capture::schema::NameMap;
use farshore_model::nearest;
use farshore_store::Retention;
use mirrors::MirrorsConfig;
use secrets::SecretFile;
use sites::SitesConfig;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A site, as meant.
#[derive(Clone, Debug)]
pub struct SiteConfig {
    /// The site's name.
    pub name: String,
    /// Where everything durable is kept.
    pub data_dir: PathBuf,
    /// Publications by name.
    pub publications: Vec<Publication>,
    /// Subscriptions by name.
    pub subscriptions: Vec<Subscription>,
    /// What other sites have to do with this one.
    pub sites: SitesConfig,
    /// Mirrors with an end here.
    pub mirrors: MirrorsConfig,
    /// The monitor, if there is one.
    pub monitor: Option<farshore_monitor::Settings>,
    /// How often the monitor posts a tracer token of each publication.
    pub tracer_every: Option<Duration>,
    /// From when on something is worth a warning, or critical.
    pub limits: farshore_monitor::Limits,
    /// Files with secrets whose rights are looked at nowhere else.
    pub secret_files: Vec<SecretFile>,
}

impl SiteConfig {
    /// The publication of that name.
    pub fn publication(&self, name: &str) -> Option<&Publication> {
        self.publications.iter().find(|publication| publication.spec.name == name)
    }

    /// The subscription of that name.
    pub fn subscription(&self, name: &str) -> Option<&Subscription> {
        self.subscriptions.iter().find(|subscription| subscription.spec.name == name)
    }
}

/// A publication with its store's settings.
#[derive(Clone, Debug)]
pub struct Publication {
    /// What is published.
    pub spec: PublicationSpec,
    /// How its log is kept.
    pub log: LogSettings,
}

/// How a log is kept.
#[derive(Clone, Debug)]
pub struct LogSettings {
    /// How long.
    pub retention: Retention,
    /// Bytes per segment.
    pub segment_bytes: u64,
}

/// A subscription and the publication it follows.
#[derive(Clone, Debug)]
pub struct Subscription {
    /// Publication on this site.
    pub publication: String,
    /// What is applied, and to where.
    pub spec: SubscriptionSpec,
}

/// Why a site file cannot be used. Says where, what, and what would be right.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read site file {path}: {error}")]
    Read {
        /// Path.
        path: PathBuf,
        /// Reason.
        error: std::io::Error,
    },
    /// It is not TOML, or has keys or types that no site file has.
    #[error("site file {path}: {error}")]
    Parse {
        /// Path.
        path: PathBuf,
        /// Position, reason, and what was probably meant.
        error: String,
    },
    /// It parses but means nothing.
    #[error("site file {path}, {section}: {what}")]
    Meaning {
        /// Path.
        path: PathBuf,
        /// For instance `[publication.sales]`.
        section: String,
        /// What is wrong and what would be right.
        what: String,
    },
}

/// The parser's words, and the key that was probably meant.
fn explain(error: &toml::de::Error) -> String {
    let text = without_secrets(&error.to_string(), error.message());
    let message = error.message();
    let mut quoted = message.split('`').skip(1).step_by(2);
    let (true, Some(typed)) = (message.starts_with("unknown field"), quoted.next()) else {
        return text;
    };
    match nearest(typed, quoted) {
        Some(near) => format!("{}. Did you mean `{near}`?", text.trim_end()),
        None => text,
    }
}

/// The parser shows the line that it stumbled over. Its value may be a password, or a URL that holds
/// one, unless it is of a key that is known to hold another type.
fn without_secrets(shown: &str, message: &str) -> String {
    const LEFT_OUT: &str = " …";
    let tells = |text: &str| {
        let text = text.to_lowercase();
        ["://", "passw", "secret", "token"].iter().any(|sign| text.contains(sign))
    };
    let of_a_type = ["invalid type", "invalid length", "unknown variant", "missing field"];
    let is_known = of_a_type.iter().any(|kind| message.starts_with(kind));
    // Numbers, truth values and lists are none.
    let may_be_secret = |typed: &str| {
        let value = typed.split_once('=').map_or("", |(_, value)| value.trim_start());
        let is_plain = |value: &str| value.starts_with(|c: char| c.is_ascii_digit() || c == '[');
        tells(typed) || !(is_known || is_plain(value) || ["true", "false"].contains(&value))
    };
    let mut lines: Vec<String> = shown.lines().map(str::to_owned).collect();
    for line in &mut lines {
        let Some((number, typed)) = line.split_once(" | ") else { continue };
        if number.trim().parse::<usize>().is_err() || !may_be_secret(typed) {
            continue;
        }
        match typed.split_once('=') {
            Some((key, _)) => *line = format!("{number} | {key}={LEFT_OUT}"),
            None if tells(typed) => *line = format!("{number} |{LEFT_OUT}"),
            None => {}
        }
    }
    // What comes after the line, and its marks, repeats a value of another type.
    if tells(message)
        && message.starts_with("invalid type: string")
        && let Some((_, expected)) = message.rsplit_once(", expected ")
    {
        let kept = lines.len().saturating_sub(message.lines().count());
        lines.truncate(kept);
        lines.push(format!("invalid type: string, expected {expected}"));
    }
    lines.join("\n")
}

/// Names that become file names, slot names and SQL identifiers.
const NAME_CHARS_MAX: usize = 40;

/// Reads and resolves a site file.
pub fn load(path: &Path) -> Result<SiteConfig, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| ConfigError::Read { path: path.to_owned(), error })?;
    parse(&text, path)
}

/// Resolves a site file's text; `path` is for messages and relative paths.
pub fn parse(text: &str, path: &Path) -> Result<SiteConfig, ConfigError> {
    let mut typed: typed::SiteFile = toml::from_str(text)
        .map_err(|error| ConfigError::Parse { path: path.to_owned(), error: explain(&error) })?;
    let meaning = |section: &str, what: String| ConfigError::Meaning {
        path: path.to_owned(),
        section: section.to_owned(),
        what,
    };
    check_name(&typed.site.name).map_err(|what| meaning("[site] name", what))?;
    let folder = path.parent().unwrap_or(Path::new("."));
    let mut site = SiteConfig {
        name: typed.site.name.clone(),
        data_dir: folder.join(&typed.site.data_dir),
        publications: Vec::new(),
        subscriptions: Vec::new(),
        sites: SitesConfig::default(),
        mirrors: MirrorsConfig::default(),
        monitor: monitor::resolve(folder, &typed.site)
            .map_err(|(section, what)| meaning(section, what))?,
        tracer_every: monitor::tracer_every(&typed.site)
            .map_err(|(section, what)| meaning(section, what))?,
        limits: farshore_monitor::Limits::default(),
        secret_files: secrets::files(folder, path, &typed),
    };
    let thresholds = typed.take_thresholds();
    let sites = sites::resolve(folder, &typed);
    site.sites = sites.map_err(|(section, what)| meaning(&section, what))?;
    for (name, publication) in typed.publication {
        let section = format!("[publication.{name}]");
        site.publications
            .push(resolve_publication(&name, publication).map_err(|what| meaning(&section, what))?);
    }
    for (name, subscription) in typed.subscription {
        let section = format!("[subscription.{name}]");
        let resolved = resolve_subscription(&site, &name, subscription)
            .and_then(|resolved| refuse_twins(&site, &resolved).map(|()| resolved));
        site.subscriptions.push(resolved.map_err(|what| meaning(&section, what))?);
    }
    sites::check_grants(&site).map_err(|(section, what)| meaning(&section, what))?;
    let mirrors = mirrors::resolve(folder, &site, &typed.mirror);
    site.mirrors = mirrors.map_err(|(section, what)| meaning(&section, what))?;
    let limits = thresholds::resolve(&site, &thresholds);
    site.limits = limits.map_err(|(section, what)| meaning(&section, what))?;
    let has_mirrors = !site.mirrors.near.is_empty() || !site.mirrors.far.is_empty();
    if site.publications.is_empty() && site.sites.received.is_empty() && !has_mirrors {
        let what = "no publication is configured, so there is nothing to do. Add \
                    [publication.NAME] with source and tables";
        return Err(meaning("[site]", what.to_owned()));
    }
    let mut slots = BTreeMap::new();
    for publication in &site.publications {
        let slot = (publication.spec.source.redacted(), publication.spec.slot_name());
        if let Some(other) = slots.insert(slot, publication.spec.name.clone()) {
            let section = format!("[publication.{}]", publication.spec.name);
            let what = format!(
                "it would use replication slot \"{}\", as publication \"{other}\" does. Rename \
                 one of the two",
                publication.spec.slot_name()
            );
            return Err(meaning(&section, what));
        }
    }
    Ok(site)
}

/// Two subscriptions must not bring the same publication to the same database.
fn refuse_twins(site: &SiteConfig, subscription: &Subscription) -> Result<(), String> {
    let target = subscription.spec.target.redacted();
    let twin = site.subscriptions.iter().find(|other| {
        other.publication == subscription.publication
            && other.spec.target.is_same_place(&subscription.spec.target)
    });
    match twin {
        None => Ok(()),
        Some(twin) => Err(format!(
            "subscription \"{}\" brings publication \"{}\" to {target} already. Remove one of the \
             two",
            twin.spec.name, twin.publication
        )),
    }
}

pub(crate) fn check_name(name: &str) -> Result<(), String> {
    let fits = !name.is_empty()
        && name.len() <= NAME_CHARS_MAX
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_-".contains(c));
    if fits {
        return Ok(());
    }
    Err(format!(
        "\"{name}\" cannot be a name: use 1 to {NAME_CHARS_MAX} lower-case letters, digits, _ \
         and -, beginning with a letter"
    ))
}

fn resolve_publication(name: &str, typed: typed::Publication) -> Result<Publication, String> {
    check_name(name)?;
    let source =
        farshore_pg::Config::parse(&typed.source).map_err(|error| format!("source: {error}"))?;
    if typed.tables.is_empty() && typed.adopt_publication.is_none() {
        return Err("tables: name at least one table, schema.* or *.*".to_owned());
    }
    if typed.adopt_publication.is_some() && typed.publish_via_partition_root {
        return Err("publish_via_partition_root belongs to publications that Farshore makes; an \
                    adopted one is as it is"
            .to_owned());
    }
    if typed.adopt_publication.is_some() && !typed.article.is_empty() {
        return Err("articles belong to publications that Farshore makes; an adopted one has its \
                    own filters and columns"
            .to_owned());
    }
    let tables = typed
        .tables
        .iter()
        .map(|text| TablePattern::parse(text).map_err(|what| format!("tables: {what}")))
        .collect::<Result<Vec<_>, _>>()?;
    let mut articles = BTreeMap::new();
    for (table, article) in typed.article {
        let table = TableName::parse(&table).map_err(|what| format!("article: {what}"))?;
        articles
            .insert(table, Article { columns: article.columns, row_filter: article.row_filter });
    }
    let log = resolve_log(
        typed.retention_age.as_deref(),
        typed.retention_size.as_deref(),
        typed.segment_size.as_deref(),
    )?;
    Ok(Publication {
        spec: PublicationSpec {
            name: name.to_owned(),
            source,
            tables,
            articles,
            via_partition_root: typed.publish_via_partition_root,
            adopt_publication: typed.adopt_publication,
            adopt_slot: typed.adopt_slot,
        },
        log,
    })
}

fn resolve_log(
    retention_age: Option<&str>,
    retention_size: Option<&str>,
    segment_size: Option<&str>,
) -> Result<LogSettings, String> {
    let age_max = match retention_age {
        None => None,
        Some(text) => Some(parse_duration(text).map_err(|what| format!("retention_age: {what}"))?),
    };
    let bytes_max = match retention_size {
        None => None,
        Some(text) => Some(parse_bytes(text).map_err(|what| format!("retention_size: {what}"))?),
    };
    // Nobody could read anything of a log that keeps nothing.
    let nothing = |key| {
        format!("{key}: it must be more than nothing; leave it out to keep all that is needed")
    };
    if age_max.is_some_and(|age| age.is_zero()) {
        return Err(nothing("retention_age"));
    }
    if bytes_max == Some(0) {
        return Err(nothing("retention_size"));
    }
    let segment_bytes = match segment_size {
        None => 64 << 20,
        Some(text) => parse_bytes(text).map_err(|what| format!("segment_size: {what}"))?,
    };
    if !((64 << 10)..=(4 << 30)).contains(&segment_bytes) {
        return Err("segment_size: must be from 64KB to 4GB".to_owned());
    }
    Ok(LogSettings { retention: Retention { age_max, bytes_max }, segment_bytes })
}

fn resolve_subscription(
    site: &SiteConfig,
    name: &str,
    typed: typed::Subscription,
) -> Result<Subscription, String> {
    check_name(name)?;
    let is_here = site.publications.iter().any(|p| p.spec.name == typed.publication);
    if !is_here && site.sites.received(&typed.publication).is_none() {
        if let Some((upstream, _)) = typed.publication.split_once('/') {
            return Err(site.sites.unknown_upstream(upstream));
        }
        let known: Vec<&str> = site.publications.iter().map(|p| p.spec.name.as_str()).collect();
        let guess = nearest(&typed.publication, known.iter().copied())
            .map_or_else(String::new, |near| format!(". Did you mean \"{near}\"?"));
        let there = match known.join(", ") {
            none if none.is_empty() => "there is none".to_owned(),
            known => format!("there are: {known}"),
        };
        return Err(format!(
            "publication \"{}\" is not configured here ({there}){guess}",
            typed.publication
        ));
    }
    let target =
        farshore_pg::Config::parse(&typed.target).map_err(|error| format!("target: {error}"))?;
    let mut copy = CopySettings::default();
    if let Some(workers) = typed.copy_workers {
        if !(1..=64).contains(&workers) {
            return Err("copy_workers: must be from 1 to 64".to_owned());
        }
        copy.workers = workers;
    }
    if let Some(text) = typed.copy_range {
        let bytes = parse_bytes(&text).map_err(|what| format!("copy_range: {what}"))?;
        copy.range_blocks = (bytes / 8_192).max(1);
    }
    let streams = typed.streams.map_or_else(default_streams, Streams::fixed);
    if !(1..=64).contains(&streams.far) {
        return Err("streams: must be from 1 to 64".to_owned());
    }
    let mut limits = GroupLimits::default();
    if let Some(transactions) = typed.group_transactions {
        if transactions == 0 {
            return Err("group_transactions: must be at least 1".to_owned());
        }
        limits.transactions_max = transactions;
        limits.batch_transactions_max = transactions;
    }
    limits.batches = match typed.batches {
        typed::Batches::Auto => Batches::Auto,
        typed::Batches::Always => Batches::Always,
        typed::Batches::Never => Batches::Never,
    };
    let mut on_conflict =
        ConflictPolicy { default: meant(typed.on_conflict), tables: BTreeMap::new() };
    for (table, policy) in typed.on_conflict_tables {
        let table =
            TableName::parse(&table).map_err(|what| format!("on_conflict_tables: {what}"))?;
        on_conflict.tables.insert(table, meant(policy));
    }
    let sequence_interval = match typed.sequences_every.as_deref() {
        None => Some(Duration::from_secs(10)),
        Some("off") => None,
        Some(text) => match parse_duration(text) {
            Ok(interval) if !interval.is_zero() => Some(interval),
            _ => {
                return Err(format!(
                    "sequences_every: \"{text}\" is not a time such as 10s or 5min, or off"
                ));
            }
        },
    };
    let schema = SchemaSettings {
        create_tables: typed.create_tables.unwrap_or(true),
        names: resolve_names(typed.tables, typed.schemas)?,
    };
    Ok(Subscription {
        publication: typed.publication.clone(),
        spec: SubscriptionSpec {
            name: name.to_owned(),
            // One that is received keeps the name that its own site gave it.
            publication: if is_here {
                format!("{}/{}", site.name, typed.publication)
            } else {
                typed.publication.clone()
            },
            target,
            initialise: match typed.initialise {
                typed::Initialise::Copy => Initialise::Copy,
                typed::Initialise::Backup => Initialise::Backup,
            },
            copy,
            schema,
            sequence_interval,
            limits,
            on_conflict,
            follow_ddl: match typed.follow_ddl {
                typed::FollowDdl::Add => FollowDdl::Add,
                typed::FollowDdl::AddDrop => FollowDdl::AddDrop,
                typed::FollowDdl::Stop => FollowDdl::Stop,
            },
            streams,
        },
    })
}

/// Near, as many as there are processors, up to four: the target has its own, but they are unknown
/// here. Far, what keeps a long line full: one connection with Linux's stock limits carries 27 MB/s
/// over 77 ms.
fn default_streams() -> Streams {
    let near = std::thread::available_parallelism().map_or(2, usize::from).clamp(1, 4);
    Streams { near, far: 8 }
}

fn meant(typed: typed::OnConflict) -> OnConflict {
    match typed {
        typed::OnConflict::Stop => OnConflict::Stop,
        typed::OnConflict::Skip => OnConflict::Skip,
        typed::OnConflict::Overwrite => OnConflict::Overwrite,
    }
}

fn resolve_names(
    tables: BTreeMap<String, String>,
    schemas: BTreeMap<String, String>,
) -> Result<NameMap, String> {
    let mut names = NameMap { tables: BTreeMap::new(), schemas };
    for (from, to) in tables {
        let name = |text: &str| TableName::parse(text).map_err(|what| format!("tables: {what}"));
        names.tables.insert(name(&from)?, name(&to)?);
    }
    if let Some((one, other, target)) = names.collision(names.tables.keys()) {
        return Err(format!("tables: {one} and {other} would both be {target}"));
    }
    if names.schemas.iter().any(|(from, to)| from.is_empty() || to.is_empty()) {
        return Err("schemas: a schema's name cannot be empty".to_owned());
    }
    Ok(names)
}

/// `90s`, `15min`, `72h`, `7d`.
fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split_unit(text);
    let seconds = match unit {
        "s" => 1,
        "min" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return Err(format!("\"{text}\" is not a time such as 90s, 15min, 72h or 7d")),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| format!("\"{text}\" is not a time such as 90s, 15min, 72h or 7d"))?;
    Ok(Duration::from_secs(number.saturating_mul(seconds)))
}

/// `512KB`, `64MB`, `50GB`, `2TB`, in powers of 1,024 as in postgresql.conf.
fn parse_bytes(text: &str) -> Result<u64, String> {
    let (number, unit) = split_unit(text);
    let shift = match unit {
        "B" => 0,
        "kB" | "KB" => 10,
        "MB" => 20,
        "GB" => 30,
        "TB" => 40,
        _ => return Err(format!("\"{text}\" is not a size such as 512KB, 64MB, 50GB or 2TB")),
    };
    let number: u64 = number
        .parse()
        .map_err(|_| format!("\"{text}\" is not a size such as 512KB, 64MB, 50GB or 2TB"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("\"{text}\" is too large"))
}

fn split_unit(text: &str) -> (&str, &str) {
    let at = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    (&text[..at], text[at..].trim())
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
[site]
name = "tukwila"
data_dir = "data"
[publication.sales]
source = "postgres://farshore:geheim@db1/sales"
tables = ["public.orders", "audit.*"]
retention_age = "72h"
[publication.sales.article."public.orders"]
columns = ["id", "total"]
where = "region = 'EU'"
[subscription.reporting]
publication = "sales"
target = "postgres://farshore@reports/sales"
on_conflict = "skip"
[subscription.reporting.on_conflict_tables]
"public.orders" = "overwrite"
"#;

    fn parsed(text: &str) -> Result<SiteConfig, String> {
        parse(text, Path::new("/etc/farshore/site.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn a_site_file_is_resolved() {
        let site = parsed(GOOD).unwrap();
        assert_eq!(site.data_dir, Path::new("/etc/farshore/data"));
        let sales = &site.publications[0];
        assert_eq!(sales.spec.slot_name(), "farshore_sales");
        assert_eq!(sales.log.retention.age_max, Some(Duration::from_secs(72 * 3600)));
        assert_eq!(site.subscriptions[0].spec.publication, "tukwila/sales");
        let policy = &site.subscriptions[0].spec.on_conflict;
        assert_eq!(policy.default, OnConflict::Skip);
        let orders = TableName { schema: "public".into(), name: "orders".into() };
        assert_eq!(policy.tables.get(&orders), Some(&OnConflict::Overwrite));
        assert!(!format!("{site:?}").contains("geheim"), "a password must never be shown");
    }

    #[test]
    fn a_password_is_not_shown_with_what_is_wrong() {
        let source = "source = \"postgres://farshore:geheim@db1/sales\"";
        assert!(GOOD.contains(source));
        for wrong in [
            "sorce = \"postgres://farshore:geheim@db1/sales\"",
            "source = \"postgres://farshore:geheim@db1/sales",
            "source = postgres://farshore:geheim@db1/sales\"",
            "source = \"host=db1 password=geheim\"\nsource = \"host=db1 password=geheim\"",
            "source = \"a\"\nretention_size = [\"password=geheim\"]",
            "source = [\"postgres://farshore:geheim@db1/sales\"]",
            "source = \"a\"\narticle = \"postgres://farshore:geheim@db1/sales\"",
            "source = \"\"\"\npostgres://farshore:geheim@db1/sales\\q\"\"\"",
            "source = \"postgres://farshore:geheim/x@db1/sales\"",
            "source = \"postgres://farshore:42/geheim@db1/sales\"",
            "source = \"postgres://farshore:geheim?x@db1/sales\"",
            "source = \"postgres://farshore:x?geheim=x@db1/sales\"",
            "source = \"postgres://farshore:geheim\"",
            "source = \"postgres://farshore:x@y/geheim@db1/sales\"",
        ] {
            let said = parsed(&GOOD.replace(source, wrong)).unwrap_err();
            assert!(!said.contains("geheim"), "{wrong}: {said}");
            assert!(said.contains("line ") || said.contains("[publication.sales]"), "{said}");
        }
        let said = parsed(&GOOD.replace(source, &source.replace("source", "sorce"))).unwrap_err();
        assert!(said.contains("sorce = …") && said.contains("Did you mean `source`?"), "{said}");
    }

    #[test]
    fn wrong_input_says_where_and_what() {
        for (from, to, said) in [
            ("tables =", "table =", "unknown field `table`"),
            ("tables =", "tabels =", "Did you mean `tables`?"),
            ("retention_age", "retention_ages", "Did you mean `retention_age`?"),
            ("publication = \"sales\"", "publication = \"sale\"", "there are: sales"),
            ("\"public.orders\", ", "\"orders\", ", "schema.table, schema.* or *.*"),
            ("\"72h\"", "\"72 parsecs\"", "90s, 15min, 72h or 7d"),
            ("\"72h\"", "\"0s\"", "retention_age: it must be more than nothing"),
            ("retention_age = \"72h\"", "retention_size = \"0GB\"", "more than nothing"),
            ("name = \"tukwila\"", "name = \"Tukwila\"", "lower-case letters"),
            ("name = \"tukwila\"", "name = 7", "expected a string"),
            ("\"skip\"", "\"ignore\"", "expected one of `stop`, `skip`, `overwrite`"),
            ("\"public.orders\" = \"ov", "\"orders\" = \"ov", "on_conflict_tables: "),
            ("[site]", "[sight]", "unknown field `sight`"),
            ("farshore:geheim@db1/sales", "farshore@db1/sales?sslmod=x", "sslmod"),
            (
                "\"data\"",
                "\"data\"\nmonitor = \"0.0.0.0:7480\"",
                "name monitor_certificate, monitor_key",
            ),
            ("\"data\"", "\"data\"\nmonitor = \"7480\"", "such as 127.0.0.1:7480"),
            (
                "[publication.sales]",
                "[thresholds]\nlatency = [\"5\", \"1min\"]\n[publication.sales]",
                "latency: \"5\" is not a time",
            ),
            (
                "[publication.sales]",
                "[thresholds]\nlatency = [\"5min\", \"1min\"]\n[publication.sales]",
                "cannot be larger",
            ),
            (
                "[publication.sales]",
                "[publication.sales.thresholds]\nlatency = [\"1s\", \"1min\"]\n[publication.sales]",
                "there are: unacknowledged, store",
            ),
            ("\"data\"", "\"data\"\nmonitor_token = \"t\"", "without monitor"),
            (
                "\"data\"",
                "\"data\"\nmonitor = \"127.0.0.1:0\"\nmonitor_key = \"k\"",
                "without monitor_certificate",
            ),
        ] {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD, "{from}");
            let error = parsed(&text).expect_err(to);
            assert!(error.contains(said), "{to}: {error}");
            assert!(error.contains("/etc/farshore/site.toml"), "{error}");
        }
    }
}
