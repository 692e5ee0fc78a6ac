//! From when on something is worth a warning, and from when it is critical.

use super::{SiteConfig, parse_bytes, parse_duration, typed};
use farshore_monitor::{Bounds, Limits, Thresholds};
use std::collections::BTreeMap;

/// Section and what is wrong in it.
type Wrong = (String, String);

/// Resolves `[thresholds]`, and those of single objects.
pub(super) fn resolve(
    site: &SiteConfig,
    typed: &typed::ThresholdSections,
) -> Result<Limits, Wrong> {
    let whole = thresholds(&typed.site).map_err(|what| ("[thresholds]".to_owned(), what))?;
    let own =
        |kind: &str, typed: &BTreeMap<String, typed::Thresholds>, name: &str, keys: &[&str]| {
            let Some(typed) = typed.get(name) else { return Ok(whole) };
            let section = || format!("[{kind}.{name}.thresholds]");
            let foreign = typed.given().into_iter().find(|key| !keys.contains(key));
            if let Some(key) = foreign {
                let what =
                    format!("{key} is nothing that a {kind} has (there are: {})", keys.join(", "));
                return Err((section(), what));
            }
            let own = thresholds(typed).map_err(|what| (section(), what))?;
            Ok(own.or(whole))
        };
    let mut limits = Limits::default();
    let publications = site.publications.iter().map(|p| (p.spec.name.as_str(), Some(&p.log)));
    let received = site.sites.received.iter().map(|received| {
        let upstream = site.sites.upstream(&received.upstream);
        (received.name.as_str(), upstream.map(|upstream| &upstream.log))
    });
    for (name, log) in publications.chain(received) {
        let keys = ["unacknowledged", "store"];
        let own = own("publication", &typed.publications, name, &keys)?;
        limits.publications.insert(name.to_owned(), own);
        if let Some(bytes) = log.and_then(|log| log.retention.bytes_max) {
            limits.retention_bytes.insert(name.to_owned(), bytes);
        }
    }
    for subscription in &site.subscriptions {
        let name = &subscription.spec.name;
        let own = own("subscription", &typed.subscriptions, name, &["latency", "behind"])?;
        limits.subscriptions.insert(name.clone(), own);
    }
    let near = site.mirrors.near.iter().map(|mirror| &mirror.name);
    for name in near.chain(site.mirrors.far.iter().map(|mirror| &mirror.name)) {
        let own = own("mirror", &typed.mirrors, name, &["send_queue"])?;
        limits.mirrors.insert(name.clone(), own);
    }
    Ok(limits)
}

fn thresholds(typed: &typed::Thresholds) -> Result<Thresholds, String> {
    let milliseconds =
        |text: &str| parse_duration(text).map(|duration| duration.as_secs_f64() * 1_000.0);
    let size = |text: &str| parse_bytes(text).map(|bytes| bytes as f64);
    Ok(Thresholds {
        latency_ms: bounds("latency", &typed.latency, milliseconds)?,
        behind_bytes: bounds("behind", &typed.behind, size)?,
        unacknowledged_bytes: bounds("unacknowledged", &typed.unacknowledged, size)?,
        store_bytes: bounds("store", &typed.store, size)?,
        send_queue_bytes: bounds("send_queue", &typed.send_queue, size)?,
    })
}

fn bounds(
    key: &str,
    typed: &Option<[String; 2]>,
    parse: impl Fn(&str) -> Result<f64, String>,
) -> Result<Option<Bounds>, String> {
    let Some([warning, critical]) = typed else { return Ok(None) };
    let parse = |text: &str| parse(text).map_err(|what| format!("{key}: {what}"));
    let bounds = Bounds { warning: parse(warning)?, critical: parse(critical)? };
    if bounds.warning > bounds.critical {
        return Err(format!(
            "{key}: the first is for a warning and cannot be larger than the second, which is \
             critical"
        ));
    }
    Ok(Some(bounds))
}
