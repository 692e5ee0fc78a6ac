//! What a site file says of mirrors: those whose near end is here, and those whose far end is.

use super::typed;
use super::{SiteConfig, check_name, parse_bytes};
use farshore_mirror::receive::Promise;
use farshore_mirror::relay::compression::{Compression, LEVEL_MAX, Method};
use farshore_mirror::serve::Access;
use farshore_mirror::spool::SlotName;
use farshore_model::nearest;
use farshore_pg::config::{Address, Host};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// Section and what is wrong in it.
type Wrong = (String, String);

/// A far end keeps this much log by default, and more as long as a standby's slot needs it.
const SPOOL_BYTES: u64 = 4 << 30;
/// A mirror that is further behind is worth a word.
const WARN_BEHIND_BYTES: u64 = 1 << 30;
/// Less would drop a mirror at its first hiccup.
const DROP_BEHIND_BYTES_MIN: u64 = 256 << 20;
/// Less would be forgotten before a new standby has come.
const SPOOL_BYTES_MIN: u64 = 64 << 20;

/// The mirrors that have an end here.
#[derive(Clone, Debug, Default)]
pub struct MirrorsConfig {
    /// Those whose principal is streamed from here.
    pub near: Vec<NearMirror>,
    /// Those whose log is kept here.
    pub far: Vec<FarMirror>,
}

/// A mirror whose near end is here.
#[derive(Clone, Debug)]
pub struct NearMirror {
    /// Its name, at both ends.
    pub name: String,
    /// The server that is mirrored.
    pub principal: farshore_pg::Config,
    /// Its slot there.
    pub slot: String,
    /// What `synchronous_standby_names` calls it.
    pub application_name: String,
    /// What a flush promises.
    pub promise: Promise,
    /// How log is packed.
    pub compression: Compression,
    /// Bytes of log that are not at the far end beyond which `status` warns.
    pub warn_behind: u64,
    /// Bytes of log that the principal keeps for it beyond which its slot is dropped.
    pub drop_behind: Option<u64>,
    /// Its far end is here too.
    pub direct: bool,
}

/// A mirror whose far end is here.
#[derive(Clone, Debug)]
pub struct FarMirror {
    /// Its name, at both ends.
    pub name: String,
    /// The site of its near end. Without one the mirror is direct: its near end is here too.
    pub upstream: Option<String>,
    /// Where its standbys connect.
    pub listen: String,
    /// What they are asked for there.
    pub access: Access,
    /// Whole segments that no standby needs are removed beyond this size, in bytes.
    pub spool_bytes_max: u64,
    /// Bytes of log that a standby's slot keeps beyond which `status` warns.
    pub warn_behind: u64,
    /// Bytes of log beyond which none is kept for any standby; at least `spool_bytes_max`.
    pub drop_behind: Option<u64>,
    /// The standby that would take over, as `mirror promote` reaches it.
    pub standby: Option<farshore_pg::Config>,
}

impl MirrorsConfig {
    /// The mirror whose standbys connect where this one has its principal: its log comes from that
    /// one's spool, here. By what is written, which may be wrong.
    pub(crate) fn streamed_by(&self, near: &NearMirror) -> Option<&FarMirror> {
        self.spool_at(&near.principal, &near.name)
    }

    /// The mirror whose standbys connect there, if it is not `own`.
    pub(crate) fn spool_at(&self, server: &farshore_pg::Config, own: &str) -> Option<&FarMirror> {
        let mut others = self.far.iter().filter(|far| far.name != own);
        others.find(|far| server.hosts.iter().all(|host| leads_to(host, &far.listen)))
    }
}

/// Whether who connects to `host` gets to what listens at `listen`. A loopback address does where
/// that listens at one, or at all.
fn leads_to(host: &Host, listen: &str) -> bool {
    let (at, port) = listen.rsplit_once(':').unwrap_or((listen, ""));
    let at = at.trim_start_matches('[').trim_end_matches(']');
    let Address::Tcp(name) = &host.address else { return false };
    if port.parse() != Ok(host.port) {
        return false;
    }
    let name = host.ip.map_or_else(|| name.clone(), |ip| ip.to_string());
    let is_localhost = |name: &str| name.eq_ignore_ascii_case("localhost");
    match (name.parse::<IpAddr>(), at.parse::<IpAddr>()) {
        (Ok(to), Ok(at)) => {
            let is_heard = at.is_unspecified() && (at.is_ipv6() || to.is_ipv4());
            to == at || (to.is_loopback() && is_heard)
        }
        (Err(_), Ok(at)) => is_localhost(&name) && (at.is_loopback() || at.is_unspecified()),
        (Ok(to), Err(_)) => is_localhost(at) && to.is_loopback(),
        (Err(_), Err(_)) => name.eq_ignore_ascii_case(at),
    }
}

/// A mirror's name as part of another: PostgreSQL's slots have no hyphens.
fn derived(prefix: &str, name: &str) -> String {
    format!("{prefix}{}", name.replace('-', "_"))
}

/// Resolves every mirror.
pub(super) fn resolve(
    folder: &Path,
    site: &SiteConfig,
    typed: &std::collections::BTreeMap<String, typed::Mirror>,
) -> Result<MirrorsConfig, Wrong> {
    let mut mirrors = MirrorsConfig::default();
    for (name, mirror) in typed {
        let section = format!("[mirror.{name}]");
        let wrong = |what: String| (section.clone(), what);
        check_name(name).map_err(wrong)?;
        match (&mirror.principal, &mirror.upstream) {
            (Some(principal), None) => {
                let near = resolve_near(site, name, principal, mirror).map_err(wrong)?;
                refuse_twin(&mirrors, &near).map_err(wrong)?;
                if near.direct {
                    let far = resolve_far((folder, site), name, None, mirror).map_err(wrong)?;
                    refuse_taken_address(site, &mirrors, &far).map_err(wrong)?;
                    mirrors.far.push(far);
                }
                mirrors.near.push(near);
            }
            (None, Some(upstream)) => {
                refuse_near_keys(mirror).map_err(wrong)?;
                if site.sites.upstream(upstream).is_none() {
                    return Err(wrong(site.sites.unknown_upstream(upstream)));
                }
                let far =
                    resolve_far((folder, site), name, Some(upstream), mirror).map_err(wrong)?;
                refuse_taken_address(site, &mirrors, &far).map_err(wrong)?;
                mirrors.far.push(far);
            }
            (Some(_), Some(_)) => {
                return Err(wrong(
                    "it has a principal and an upstream: the near end names the principal, the \
                     far end the upstream site. Remove one of the two"
                        .to_owned(),
                ));
            }
            (None, None) => {
                return Err(wrong(
                    "set principal = \"postgres://…\" if the server to be mirrored is near this \
                     site, or upstream = \"SITE\" if its log is to be kept here; principal and \
                     listen if both are so"
                        .to_owned(),
                ));
            }
        }
    }
    for downstream in &site.sites.downstreams {
        for name in &downstream.mirrors {
            match mirrors.near.iter().find(|near| near.name == *name) {
                Some(near) if near.direct => {
                    let what = format!(
                        "mirrors: \"{name}\" has its far end here too, as listen says, and no other \
                         site can have it"
                    );
                    return Err((format!("[downstream.{}]", downstream.site), what));
                }
                Some(_) => continue,
                None => {}
            }
            let known = mirrors.near.iter().map(|near| near.name.as_str());
            let guess = nearest(name, known)
                .map_or_else(String::new, |near| format!(". Did you mean \"{near}\"?"));
            let what = format!("mirrors: \"{name}\" has no near end here{guess}");
            return Err((format!("[downstream.{}]", downstream.site), what));
        }
    }
    Ok(mirrors)
}

fn resolve_near(
    site: &SiteConfig,
    name: &str,
    principal: &str,
    typed: &typed::Mirror,
) -> Result<NearMirror, String> {
    let direct = typed.listen.is_some();
    let far_keys = [
        (typed.spool_size.is_some(), "spool_size"),
        (typed.standby.is_some(), "standby"),
        (typed.standby_password.is_some(), "standby_password"),
        (typed.standby_certificate.is_some(), "standby_certificate"),
        (typed.standby_key.is_some(), "standby_key"),
    ];
    let packing_keys = [
        (typed.compression.is_some(), "compression"),
        (typed.compression_level.is_some(), "compression_level"),
    ];
    for (is_set, key) in if direct { &packing_keys[..] } else { &far_keys[..] } {
        if *is_set && direct {
            return Err(format!(
                "{key}: principal and listen make this mirror direct: its log crosses no link, and \
                 is not packed"
            ));
        }
        if *is_set {
            return Err(format!(
                "{key}: belongs to the far end, and this is the near end. (If it is both, set \
                 listen.)"
            ));
        }
    }
    let takers =
        site.sites.downstreams.iter().filter(|down| down.mirrors.iter().any(|m| m == name));
    match takers.count() {
        // Those that name it are told by who looks at them.
        _ if direct => {}
        0 => {
            return Err(format!(
                "no site may have it. Name it in one: [downstream.SITE] mirrors = [\"{name}\"]"
            ));
        }
        1 => {}
        _ => {
            return Err(
                "several downstream sites name it, and synchronous_standby_names could not tell \
                 them apart. Give each site a mirror of its own"
                    .to_owned(),
            );
        }
    }
    let principal =
        farshore_pg::Config::parse(principal).map_err(|error| format!("principal: {error}"))?;
    let slot = typed.slot.clone().unwrap_or_else(|| derived("farshore_mirror_", name));
    if SlotName::new(&slot).is_none() {
        return Err(format!(
            "slot: \"{slot}\" cannot be a slot's name: use 1 to 63 lower-case letters, digits \
             and _"
        ));
    }
    let application_name =
        typed.application_name.clone().unwrap_or_else(|| derived("farshore_", name));
    let fits = (1..=63).contains(&application_name.len())
        && application_name.bytes().all(|byte| (b' '..=b'~').contains(&byte));
    if !fits {
        return Err("application_name: use 1 to 63 printable ASCII characters, as PostgreSQL does"
            .to_owned());
    }
    let compression =
        if direct { Compression::Fixed(Method::Off) } else { resolve_compression(typed)? };
    let (warn_behind, drop_behind) = resolve_behind(typed)?;
    if drop_behind.is_some_and(|bytes| bytes < DROP_BEHIND_BYTES_MIN) {
        return Err("drop_behind: must be at least 256MB".to_owned());
    }
    let promise = match typed.mode.unwrap_or_default() {
        typed::MirrorMode::Far => Promise::Far,
        typed::MirrorMode::FarSync => Promise::FarSync,
        typed::MirrorMode::FarApplied => Promise::FarApplied,
        typed::MirrorMode::Async => Promise::Async,
    };
    Ok(NearMirror {
        name: name.to_owned(),
        principal,
        slot,
        application_name,
        promise,
        compression,
        warn_behind,
        drop_behind,
        direct,
    })
}

/// `warn_behind` and `drop_behind`, in bytes.
fn resolve_behind(typed: &typed::Mirror) -> Result<(u64, Option<u64>), String> {
    let bytes = |text: &Option<String>, key: &str| {
        let parsed = text.as_deref().map(parse_bytes).transpose();
        parsed.map_err(|what| format!("{key}: {what}"))
    };
    let warn_behind = bytes(&typed.warn_behind, "warn_behind")?.unwrap_or(WARN_BEHIND_BYTES);
    Ok((warn_behind, bytes(&typed.drop_behind, "drop_behind")?))
}

fn resolve_compression(typed: &typed::Mirror) -> Result<Compression, String> {
    use typed::{CompressionMethod, MirrorCompression};
    let level = typed.compression_level;
    let zstd = |level: i32| match level {
        1..=LEVEL_MAX => Ok(Compression::Fixed(Method::Zstd(level))),
        _ => Err(format!("compression_level: must be from 1 to {LEVEL_MAX}")),
    };
    let method = match typed.compression {
        None => return zstd(level.unwrap_or(1)),
        Some(MirrorCompression::Method(method)) => method,
        Some(MirrorCompression::Level(0)) => CompressionMethod::Off,
        Some(MirrorCompression::Level(level)) => {
            return zstd(level).map_err(|_| {
                format!("compression: a number is zstd's level, from 0 (none) to {LEVEL_MAX}")
            });
        }
    };
    match (method, level) {
        (CompressionMethod::Zstd, level) => zstd(level.unwrap_or(1)),
        (_, Some(_)) => Err("compression_level: only zstd has levels".to_owned()),
        (CompressionMethod::Lz4, None) => Ok(Compression::Fixed(Method::Lz4)),
        (CompressionMethod::Off, None) => Ok(Compression::Fixed(Method::Off)),
        (CompressionMethod::Auto, None) => Ok(Compression::Auto),
    }
}

/// Two mirrors of one server must be told apart by it.
fn refuse_twin(mirrors: &MirrorsConfig, near: &NearMirror) -> Result<(), String> {
    let server = near.principal.redacted();
    for other in mirrors.near.iter().filter(|other| other.principal.redacted() == server) {
        if other.slot == near.slot {
            return Err(format!("slot: mirror \"{}\" uses \"{}\" already", other.name, near.slot));
        }
        if other.application_name.eq_ignore_ascii_case(&near.application_name) {
            return Err(format!(
                "application_name: mirror \"{}\" is \"{}\" already, and synchronous_standby_names \
                 would take the two for one",
                other.name, near.application_name
            ));
        }
    }
    Ok(())
}

/// Each mirror's standbys connect to an address of their own.
fn refuse_taken_address(
    site: &SiteConfig,
    mirrors: &MirrorsConfig,
    far: &FarMirror,
) -> Result<(), String> {
    let taken = |by: &str| {
        Err(format!("listen: {by} listens at {} already. Name another port", far.listen))
    };
    if let Some(other) = mirrors.far.iter().find(|other| other.listen == far.listen) {
        return taken(&format!("mirror \"{}\"", other.name));
    }
    if site.sites.listen.as_ref() == Some(&far.listen) {
        return taken("the site itself");
    }
    Ok(())
}

/// At a far end that is no near end.
fn refuse_near_keys(typed: &typed::Mirror) -> Result<(), String> {
    for (is_set, key) in [
        (typed.slot.is_some(), "slot"),
        (typed.application_name.is_some(), "application_name"),
        (typed.mode.is_some(), "mode"),
        (typed.compression.is_some(), "compression"),
        (typed.compression_level.is_some(), "compression_level"),
    ] {
        if is_set {
            return Err(format!("{key}: belongs to the near end, and this is the far end"));
        }
    }
    Ok(())
}

fn resolve_far(
    site: (&Path, &SiteConfig),
    name: &str,
    upstream: Option<&str>,
    typed: &typed::Mirror,
) -> Result<FarMirror, String> {
    let listen = typed.listen.clone().ok_or_else(|| {
        "standbys have nowhere to connect. Set listen, for instance \"127.0.0.1:5433\"".to_owned()
    })?;
    let access = resolve_access(site, &listen, typed)?;
    let spool_bytes_max = match &typed.spool_size {
        None => SPOOL_BYTES,
        Some(text) => parse_bytes(text).map_err(|what| format!("spool_size: {what}"))?,
    };
    if spool_bytes_max < SPOOL_BYTES_MIN {
        return Err("spool_size: must be at least 64MB".to_owned());
    }
    let (warn_behind, drop_behind) = resolve_behind(typed)?;
    if drop_behind.is_some_and(|bytes| bytes < spool_bytes_max) {
        return Err(
            "drop_behind: must be at least spool_size, up to which log is kept anyway".to_owned()
        );
    }
    let standby = typed.standby.as_deref().map(farshore_pg::Config::parse).transpose();
    let standby = standby.map_err(|error| format!("standby: {error}"))?;
    let upstream = upstream.map(str::to_owned);
    let name = name.to_owned();
    Ok(FarMirror {
        name,
        upstream,
        listen,
        access,
        spool_bytes_max,
        warn_behind,
        drop_behind,
        standby,
    })
}

/// What standbys are asked for. Where others reach the address, a site that has a certificate for
/// its links shows that one, unless another is named.
fn resolve_access(
    (folder, site): (&Path, &SiteConfig),
    listen: &str,
    typed: &typed::Mirror,
) -> Result<Access, String> {
    let beside = |path: &PathBuf| folder.join(path);
    let tls = match (&typed.standby_certificate, &typed.standby_key) {
        (Some(certificate), Some(key)) => Some((beside(certificate), beside(key))),
        (None, None) => None,
        (Some(_), None) => {
            return Err("standby_certificate without standby_key: name it too".to_owned());
        }
        (None, Some(_)) => {
            return Err("standby_key without standby_certificate: name it too".to_owned());
        }
    };
    if tls.is_some() && typed.standby_password.is_none() {
        return Err("standby_certificate without standby_password: TLS by itself asks nobody who \
                    he is. Name it too"
            .to_owned());
    }
    let mut access = Access { password: typed.standby_password.as_ref().map(beside), tls };
    if access.tls.is_none() && access.addresses(listen).is_err() {
        let own = site.sites.identity.as_ref();
        access.tls = own.map(|own| (own.certificate.clone(), own.key.clone()));
    }
    access.addresses(listen).map_err(|what| format!("listen: \"{listen}\": {what}"))?;
    Ok(access)
}

#[cfg(test)]
mod tests {
    use crate::config::{SiteConfig, parse};
    use farshore_mirror::receive::Promise;
    use farshore_mirror::relay::compression::{Compression, Method};
    use farshore_mirror::serve::Access;
    use std::path::Path;

    const NEAR: &str = r#"
[site]
name = "tukwila"
data_dir = "data"
listen = "0.0.0.0:7432"
[mirror.dr-1]
principal = "postgres://farshore@db1/postgres"
mode = "far-applied"
compression = 3
[mirror.other]
principal = "postgres://farshore@db1/postgres"
[downstream.dublin]
mirrors = ["dr-1"]
[downstream.galway]
mirrors = ["other"]
"#;

    const FAR: &str = r#"
[site]
name = "dublin"
data_dir = "data"
[upstream.tukwila]
address = "tukwila.example.com:7432"
[mirror.dr-1]
upstream = "tukwila"
listen = "127.0.0.1:5433"
spool_size = "10GB"
"#;

    fn parsed(text: &str) -> Result<SiteConfig, String> {
        parse(text, Path::new("/etc/farshore/site.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn a_spool_of_this_site_is_known_by_its_address() {
        for (principal, listen, is_known) in [
            ("127.0.0.1:5433", "127.0.0.1:5433", true),
            ("localhost:5433", "127.0.0.1:5433", true),
            ("localhost:5433", "[::1]:5433", true),
            ("127.0.0.1:5433", "localhost:5433", true),
            ("localhost:5433", "0.0.0.0:5433", true),
            ("[::1]:5433", "[::]:5433", true),
            ("[::1]:5433", "0.0.0.0:5433", false),
            ("[::1]:5433", "127.0.0.1:5433", false),
            ("mid.example:5433", "MID.example:5433", true),
            ("10.0.0.5:5433", "10.0.0.5:5433", true),
            ("10.0.0.5:5433", "10.0.0.5:5434", false),
            // That is another server of this machine.
            ("localhost:5433", "10.0.0.5:5433", false),
            ("127.0.0.1:5433", "mid.example:5433", false),
            // Either may answer.
            ("127.0.0.1:5433,db1:5432", "127.0.0.1:5433", false),
            ("127.0.0.1:5433,localhost:5433", "127.0.0.1:5433", true),
        ] {
            let mut mirrors = parsed(FAR).unwrap().mirrors;
            mirrors.far[0].listen = listen.to_owned();
            let url = format!("postgres://any@{principal}/postgres");
            let server = farshore_pg::Config::parse(&url).unwrap();
            let known = mirrors.spool_at(&server, "other").is_some();
            assert_eq!(known, is_known, "{principal} {listen}");
            assert!(mirrors.spool_at(&server, "dr-1").is_none(), "no mirror is its own");
        }
    }

    #[test]
    fn mirrors_are_resolved() {
        let near = parsed(NEAR).unwrap();
        let mirror = &near.mirrors.near[0];
        assert_eq!(mirror.slot, "farshore_mirror_dr_1");
        assert_eq!(mirror.application_name, "farshore_dr_1");
        assert_eq!(mirror.promise, Promise::FarApplied);
        assert_eq!(mirror.compression, Compression::Fixed(Method::Zstd(3)));
        assert_eq!(near.mirrors.near[1].promise, Promise::Far);
        assert!(near.sites.identity.is_some());
        let far = parsed(FAR).unwrap();
        assert_eq!(far.mirrors.far[0].spool_bytes_max, 10 << 30);
        assert_eq!(far.mirrors.far[0].upstream.as_deref(), Some("tukwila"));
        assert_eq!(far.mirrors.far[0].access, Access::default());
    }

    #[test]
    fn a_site_that_others_reach_shows_its_own_certificate_unless_another_is_named() {
        let open = FAR.replace("127.0.0.1:5433\"", "0.0.0.0:5433\"\nstandby_password = \"pw\"");
        let access = |text: &str| parsed(text).unwrap().mirrors.far[0].access.clone();
        let beside = |name: &str| Path::new("/etc/farshore").join(name);
        let own = Some((beside("dublin.crt"), beside("dublin.key")));
        assert_eq!(access(&open), Access { password: Some(beside("pw")), tls: own });
        let named = "standby_certificate = \"s.crt\"\nstandby_key = \"/k/s.key\"\nspool_size";
        let named = access(&open.replace("spool_size", named));
        assert_eq!(named.tls, Some((beside("s.crt"), Path::new("/k/s.key").to_owned())));
        // Between processes of one machine a password is enough.
        let near = access(&open.replace("0.0.0.0", "127.0.0.1"));
        assert_eq!(near, Access { password: Some(beside("pw")), tls: None });
    }

    #[test]
    fn compression_is_a_method_and_perhaps_a_level() {
        for (typed, expected) in [
            ("", Compression::Fixed(Method::Zstd(1))),
            ("compression = 0", Compression::Fixed(Method::Off)),
            ("compression = \"off\"", Compression::Fixed(Method::Off)),
            ("compression = \"lz4\"", Compression::Fixed(Method::Lz4)),
            ("compression = \"zstd\"", Compression::Fixed(Method::Zstd(1))),
            ("compression_level = 7", Compression::Fixed(Method::Zstd(7))),
            ("compression = \"auto\"", Compression::Auto),
        ] {
            let near = parsed(&NEAR.replace("compression = 3", typed)).unwrap();
            assert_eq!(near.mirrors.near[0].compression, expected, "{typed}");
        }
    }

    #[test]
    fn wrong_input_about_mirrors_says_what_is_wrong() {
        for (good, from, to, said) in [
            (NEAR, "mirrors = [\"dr-1\"]", "mirrors = [\"dr-2\"]", "no site may have it"),
            (NEAR, "[\"dr-1\"]", "[\"dr-1\", \"othr\"]", "mean \"other\"?"),
            (NEAR, "[\"other\"]", "[\"other\", \"dr-1\"]", "a mirror of its own"),
            (NEAR, "mirrors = [\"other\"]", "", "at least one"),
            (NEAR, "principal =", "principle =", "Did you mean `principal`?"),
            (
                NEAR,
                "\"far-applied\"",
                "\"far-away\"",
                "expected one of `far`, `far-sync`, `far-applied`, `async`",
            ),
            (NEAR, "compression = 3", "compression = 20", "from 0 (none) to 19"),
            (NEAR, "compression = 3", "drop_behind = \"1MB\"", "at least 256MB"),
            (FAR, "10GB\"", "10GB\"\ndrop_behind = \"9GB\"", "at least spool_size"),
            (NEAR, "compression = 3", "warn_behind = \"much\"", "warn_behind: "),
            (NEAR, "compression = 3", "compression_level = 0", "from 1 to 19"),
            (
                NEAR,
                "compression = 3",
                "compression = \"lz4\"\ncompression_level = 3",
                "only zstd has levels",
            ),
            (NEAR, "compression = 3", "compression = \"gzip\"", "compression"),
            (NEAR, "compression = 3", "slot = \"A\"", "cannot be a slot's name"),
            (NEAR, "compression = 3", "listen = \"127.0.0.1:1\"", "no other site can have it"),
            (NEAR, "compression = 3", "compression = 3\nlisten = \"127.0.0.1:1\"", "not packed"),
            (NEAR, "compression = 3", "spool_size = \"1GB\"", "belongs to the far end"),
            (
                NEAR,
                "compression = 3",
                "application_name = \"farshore_other\"",
                "take the two for one",
            ),
            (NEAR, "compression = 3", "slot = \"farshore_mirror_other\"", "already"),
            (NEAR, "compression = 3", "upstream = \"x\"", "Remove one of the two"),
            (NEAR, "farshore@db1/postgres", "farshore@db1/postgres?sslmod=x", "sslmod"),
            (FAR, "upstream = \"tukwila\"\n", "", "set principal"),
            (FAR, "upstream = \"tukwila\"", "upstream = \"tukwilla\"", "mean \"tukwila\"?"),
            (FAR, "listen = \"127.0.0.1:5433\"\n", "", "nowhere to connect"),
            (FAR, "127.0.0.1:5433", "0.0.0.0:5433", "Name standby_password too"),
            (
                FAR,
                "\"10GB\"",
                "\"10GB\"\n[mirror.dr-2]\nupstream = \"tukwila\"\nlisten = \"127.0.0.1:5433\"",
                "mirror \"dr-1\" listens at 127.0.0.1:5433 already",
            ),
            (FAR, "\"10GB\"", "\"10GB\"\nstandby_key = \"k\"", "without standby_certificate"),
            (FAR, "\"10GB\"", "\"10GB\"\nstandby_certificate = \"c\"", "without standby_key"),
            (
                FAR,
                "\"10GB\"",
                "\"10GB\"\nstandby_certificate = \"c\"\nstandby_key = \"k\"",
                "without standby_password",
            ),
            (FAR, "spool_size", "standby_pasword", "mean `standby_password`"),
            (NEAR, "compression = 3", "standby_password = \"p\"", "belongs to the far end"),
            (FAR, "\"10GB\"", "\"10 things\"", "spool_size: "),
            (FAR, "\"10GB\"", "\"1MB\"", "at least 64MB"),
            (FAR, "spool_size = \"10GB\"", "mode = \"far\"", "belongs to the near end"),
            (FAR, "spool_size = \"10GB\"", "standby = \"postgres://h/x?sslmod=x\"", "standby: "),
            (NEAR, "compression = 3", "standby = \"postgres://h/x\"", "belongs to the far end"),
            (FAR, "[mirror.dr-1]", "[mirror.Dr]", "lower-case letters"),
        ] {
            let text = good.replacen(from, to, 1);
            assert_ne!(text, good, "{from}");
            let error = parsed(&text).expect_err(to);
            assert!(error.contains(said), "{to}: {error}");
        }
    }
}
