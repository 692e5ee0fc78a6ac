//! What is told of a site whose node does not run.

use crate::config;
use crate::report::{MirrorReport, PublicationReport, SiteReport, SubscriptionReport};

/// The report of a site whose node does not run: what the site file names.
pub fn offline_report(config: &config::SiteConfig) -> SiteReport {
    let offline = || "not running".to_owned();
    SiteReport {
        site: config.name.clone(),
        publications: config
            .publications
            .iter()
            .map(|p| PublicationReport {
                name: p.spec.name.clone(),
                state: offline(),
                ..PublicationReport::default()
            })
            .chain(config.sites.received.iter().map(|received| PublicationReport {
                name: received.name.clone(),
                upstream: Some(received.upstream.clone()),
                state: offline(),
                ..PublicationReport::default()
            }))
            .collect(),
        subscriptions: config
            .subscriptions
            .iter()
            .map(|s| SubscriptionReport {
                name: s.spec.name.clone(),
                publication: s.publication.clone(),
                state: offline(),
                ..SubscriptionReport::default()
            })
            .collect(),
        mirrors: offline_mirrors(config),
        ..SiteReport::default()
    }
}

fn offline_mirrors(config: &config::SiteConfig) -> Vec<MirrorReport> {
    let report = |name: &str, end: &str, site: Option<String>| MirrorReport {
        name: name.to_owned(),
        end: end.to_owned(),
        site,
        state: "not running".to_owned(),
        ..MirrorReport::default()
    };
    let near = config.mirrors.near.iter().filter(|mirror| !mirror.direct);
    let near = near.map(|mirror| report(&mirror.name, "near", None));
    let far = config.mirrors.far.iter();
    let far = far.map(|mirror| MirrorReport {
        direct: mirror.upstream.is_none(),
        ..report(&mirror.name, "far", mirror.upstream.clone())
    });
    near.chain(far).collect()
}
