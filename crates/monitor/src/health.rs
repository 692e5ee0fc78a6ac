//! Good, warning or critical, and why: what operators should look at, in what order.

use crate::report::SiteReport;
use farshore_model::Lsn;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How it goes with something.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Health {
    /// As it should.
    #[default]
    Good,
    /// Somebody should know.
    Warning,
    /// Somebody should act.
    Critical,
}

impl Health {
    /// One word.
    pub fn word(self) -> &'static str {
        match self {
            Health::Good => "good",
            Health::Warning => "warning",
            Health::Critical => "critical",
        }
    }
}

/// From which value on something is worth a warning, and from which it is critical.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Worth a warning.
    pub warning: f64,
    /// Critical.
    pub critical: f64,
}

impl Bounds {
    fn judge(self, value: f64) -> Health {
        if value >= self.critical {
            Health::Critical
        } else if value >= self.warning {
            Health::Warning
        } else {
            Health::Good
        }
    }
}

/// What one object is measured by; nothing by what is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Thresholds {
    /// Latency of a subscription, milliseconds.
    pub latency_ms: Option<Bounds>,
    /// Log that a subscription lacks, bytes.
    pub behind_bytes: Option<Bounds>,
    /// Log that the publisher keeps for a publication, bytes.
    pub unacknowledged_bytes: Option<Bounds>,
    /// A publication's store, bytes.
    pub store_bytes: Option<Bounds>,
    /// A mirror's send queue, bytes.
    pub send_queue_bytes: Option<Bounds>,
}

impl Thresholds {
    /// Of these, and where they say nothing, of `others`.
    pub fn or(self, others: Thresholds) -> Thresholds {
        Thresholds {
            latency_ms: self.latency_ms.or(others.latency_ms),
            behind_bytes: self.behind_bytes.or(others.behind_bytes),
            unacknowledged_bytes: self.unacknowledged_bytes.or(others.unacknowledged_bytes),
            store_bytes: self.store_bytes.or(others.store_bytes),
            send_queue_bytes: self.send_queue_bytes.or(others.send_queue_bytes),
        }
    }
}

/// What all objects of a site are measured by, by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Limits {
    /// Publications.
    pub publications: BTreeMap<String, Thresholds>,
    /// Subscriptions.
    pub subscriptions: BTreeMap<String, Thresholds>,
    /// Mirrors.
    pub mirrors: BTreeMap<String, Thresholds>,
    /// Sizes beyond which publications' stores drop what is still needed, bytes.
    pub retention_bytes: BTreeMap<String, u64>,
}

/// Bytes of log kept for a site that is away, from which on that is worth a word: less is had in a cut
/// that nobody need look at.
const KEPT_FOR_WHO_IS_AWAY: u64 = 256 << 20;

/// Parts of its retention limit that a store may use before it is worth a warning, or critical.
const RETENTION: Bounds = Bounds { warning: 0.80, critical: 0.95 };

/// The worst of what was found.
#[derive(Default)]
struct Verdict {
    health: Health,
    reasons: Vec<String>,
}

impl Verdict {
    fn find(&mut self, health: Health, reason: impl FnOnce() -> String) {
        if health == Health::Good {
            return;
        }
        if health > self.health {
            self.health = health;
            self.reasons.insert(0, reason());
        } else {
            self.reasons.push(reason());
        }
    }

    fn agent(&mut self, state: &str, error: Option<&str>) {
        match (state, error) {
            ("stopped", _) => self.find(Health::Critical, || "stopped".to_owned()),
            ("dropped", _) => self.find(Health::Critical, || "dropped".to_owned()),
            ("out of room" | "disk error", _) => self.find(Health::Critical, || state.to_owned()),
            (_, Some(_)) => self.find(Health::Warning, || format!("{state} with an error")),
            ("paused", None) => self.find(Health::Warning, || "paused by an operator".to_owned()),
            ("waiting", None) => {
                self.find(Health::Warning, || "waiting for its far end".to_owned())
            }
            _ => {}
        }
    }

    /// Of what goes over a link: what this site shows other sites.
    fn certificate(&mut self, ends: Option<f64>) {
        match ends {
            Some(..0.0) => self.find(Health::Critical, || {
                "this site's certificate has expired: other sites refuse it".to_owned()
            }),
            Some(left) => self.find(Health::Warning, || {
                format!("this site's certificate expires in {}", days_left(left))
            }),
            None => {}
        }
    }

    fn bytes(&mut self, what: &str, value: u64, bounds: Option<Bounds>) {
        let Some(bounds) = bounds else { return };
        let health = bounds.judge(value as f64);
        self.find(health, || format!("{what}: {}", bytes(value)));
    }

    fn into_parts(self) -> (Health, Option<String>) {
        let reason = (!self.reasons.is_empty()).then(|| self.reasons.join("; "));
        (self.health, reason)
    }
}

/// Judges every object of a report.
pub fn judge(report: &mut SiteReport, limits: &Limits) {
    let certificate_ends = report.certificate_seconds_left.filter(|_| report.certificate_ends_soon);
    for p in &mut report.publications {
        let mut verdict = Verdict::default();
        verdict.agent(&p.state, p.error.as_deref());
        if let Some(out) = &p.tables_out {
            verdict.find(Health::Warning, || out.clone());
        }
        for site in report.downstreams.iter().filter(|site| site.publication == p.name) {
            if let Some(error) = &site.error {
                verdict.find(Health::Critical, || {
                    format!("the log cannot be sent to site {}: {error}", site.site)
                });
            }
            if let Some(begins) = &site.dropped_before {
                verdict.find(Health::Critical, || {
                    format!(
                        "site {} cannot go on: retention limits dropped what it still needed, and \
                         the log here begins at {begins}",
                        site.site
                    )
                });
            }
        }
        for site in report.downstreams.iter().filter(|site| site.publication == p.name) {
            // Log is kept for a site from its first session on.
            let is_waited_for = site.durable.parse().is_ok_and(|at: Lsn| at > Lsn::ZERO);
            if is_waited_for && !site.connected && site.behind_bytes >= KEPT_FOR_WHO_IS_AWAY {
                verdict.find(Health::Warning, || {
                    format!(
                        "site {0} is away, and {1} of log are kept for it. If it is not to come back: \
                         take [downstream.{0}] out of the site file, and restart this node",
                        site.site,
                        bytes(site.behind_bytes)
                    )
                });
            }
        }
        let is_given = report.downstreams.iter().any(|site| site.publication == p.name);
        if p.upstream.is_some() || is_given {
            verdict.certificate(certificate_ends);
        }
        let thresholds = limits.publications.get(&p.name).copied().unwrap_or_default();
        // While the publisher is not heard it keeps what it kept, and more.
        let (kept, bytes) = match p.unacknowledged_bytes {
            Some(bytes) => ("log kept by the publisher", bytes),
            None => ("log kept by the publisher when it was last heard", p.unacknowledged_last),
        };
        verdict.bytes(kept, bytes, thresholds.unacknowledged_bytes);
        verdict.bytes("store", p.store_bytes, thresholds.store_bytes);
        if let Some(most) = limits.retention_bytes.get(&p.name).filter(|most| **most > 0) {
            let part = p.store_bytes as f64 / *most as f64;
            verdict.find(RETENTION.judge(part), || {
                format!(
                    "the store uses {:.0} % of retention_size; beyond it, what is still needed is \
                     dropped",
                    part * 100.0
                )
            });
        }
        (p.health, p.reason) = verdict.into_parts();
    }
    for s in &mut report.subscriptions {
        let mut verdict = Verdict::default();
        verdict.agent(&s.state, s.error.as_deref());
        // One that is paused, or has stopped for it, says so itself.
        if let Some(begins) = &s.dropped_before
            && !["paused", "stopped"].contains(&s.state.as_str())
        {
            verdict.find(Health::Critical, || {
                format!(
                    "retention limits dropped what it still needed, and the log begins at {begins}: \
                     it has to be copied anew"
                )
            });
        }
        let thresholds = limits.subscriptions.get(&s.name).copied().unwrap_or_default();
        if let (Some(bounds), Some(latency)) = (thresholds.latency_ms, s.latency_ms) {
            verdict.find(bounds.judge(latency), || format!("latency: {:.1} s", latency / 1_000.0));
        }
        verdict.bytes("to apply", s.behind_bytes, thresholds.behind_bytes);
        (s.health, s.reason) = verdict.into_parts();
    }
    for m in &mut report.mirrors {
        let mut verdict = Verdict::default();
        verdict.agent(&m.state, m.error.as_deref());
        if !m.direct {
            verdict.certificate(certificate_ends);
        }
        let thresholds = limits.mirrors.get(&m.name).copied().unwrap_or_default();
        verdict.bytes("send queue", m.send_queue_bytes, thresholds.send_queue_bytes);
        (m.health, m.reason) = verdict.into_parts();
    }
}

impl SiteReport {
    /// The worst of all objects. Downstream sites are no objects of their own: they may be
    /// away. Of one that cannot go on its publication tells.
    pub fn health(&self) -> Health {
        let publications = self.publications.iter().map(|p| p.health);
        let subscriptions = self.subscriptions.iter().map(|s| s.health);
        let mirrors = self.mirrors.iter().map(|m| m.health);
        let all = publications.chain(subscriptions).chain(mirrors);
        all.max().unwrap_or_default()
    }
}

/// How long something lasts yet, in words.
pub fn days_left(seconds: f64) -> String {
    let hours = (seconds / 3_600.0).max(0.0);
    match hours {
        ..2.0 => format!("{:.0} min", seconds.max(0.0) / 60.0),
        2.0..48.0 => format!("{hours:.0} h"),
        _ => format!("{:.0} days", (hours / 24.0).floor()),
    }
}

fn bytes(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["KB", "MB", "GB", "TB"] {
        if value < 1024.0 {
            break;
        }
        (value, unit) = (value / 1024.0, next);
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{DownstreamReport, MirrorReport, PublicationReport, SubscriptionReport};

    #[test]
    fn a_target_that_is_away_for_longer_than_the_log_is_kept_is_critical() {
        let [_, (health, reason)] = judged(|_, s| {
            (s.state, s.error) = ("retrying".into(), Some("connection refused".into()));
            s.dropped_before = Some("0/1A".into());
        });
        assert_eq!(health, Health::Critical);
        assert!(reason.contains("copied anew"), "{reason}");
    }

    fn judged(
        change: impl FnOnce(&mut PublicationReport, &mut SubscriptionReport),
    ) -> [(Health, String); 2] {
        let mut publication = PublicationReport { name: "p".into(), ..Default::default() };
        let mut subscription = SubscriptionReport { name: "s".into(), ..Default::default() };
        (publication.state, subscription.state) = ("streaming".into(), "streaming".into());
        change(&mut publication, &mut subscription);
        let mut report = SiteReport {
            publications: vec![publication],
            subscriptions: vec![subscription],
            ..SiteReport::default()
        };
        let bounds = |warning, critical| Some(Bounds { warning, critical });
        let own = Thresholds { latency_ms: bounds(1_000.0, 60_000.0), ..Thresholds::default() };
        let site = Thresholds {
            latency_ms: bounds(1.0, 2.0),
            behind_bytes: bounds(1e6, 1e9),
            unacknowledged_bytes: bounds(1e6, 1e9),
            ..Thresholds::default()
        };
        let limits = Limits {
            publications: BTreeMap::from([("p".into(), site)]),
            subscriptions: BTreeMap::from([("s".into(), own.or(site))]),
            retention_bytes: BTreeMap::from([("p".into(), 1_000)]),
            ..Limits::default()
        };
        judge(&mut report, &limits);
        let (p, s) = (&report.publications[0], &report.subscriptions[0]);
        let text = |reason: &Option<String>| reason.clone().unwrap_or_default();
        [(p.health, text(&p.reason)), (s.health, text(&s.reason))]
    }

    #[test]
    fn a_site_that_cannot_go_on_is_told_of_by_its_publication() {
        let site = |dropped_before: Option<&str>| DownstreamReport {
            site: "dublin".into(),
            publication: "p".into(),
            dropped_before: dropped_before.map(str::to_owned),
            ..DownstreamReport::default()
        };
        let publications = ["p", "q"]
            .map(|name| PublicationReport { name: name.into(), ..PublicationReport::default() });
        let mut report = SiteReport {
            publications: publications.to_vec(),
            downstreams: vec![site(None)],
            ..SiteReport::default()
        };
        judge(&mut report, &Limits::default());
        assert_eq!(report.health(), Health::Good);
        report.downstreams.push(site(Some("0/2A")));
        judge(&mut report, &Limits::default());
        let [p, q] = &report.publications[..] else { panic!("two") };
        assert_eq!((p.health, q.health), (Health::Critical, Health::Good));
        let reason = p.reason.as_deref().unwrap_or_default();
        assert!(reason.contains("site dublin") && reason.contains("0/2A"), "{reason}");
    }

    #[test]
    fn a_site_that_stays_away_is_told_of_once_much_is_kept_for_it() {
        let health = |durable: &str, connected, behind_bytes| {
            let site = DownstreamReport {
                site: "dublin".into(),
                publication: "p".into(),
                durable: durable.into(),
                connected,
                behind_bytes,
                ..DownstreamReport::default()
            };
            let p = PublicationReport { name: "p".into(), ..PublicationReport::default() };
            let (publications, downstreams) = (vec![p], vec![site]);
            let mut report = SiteReport { publications, downstreams, ..SiteReport::default() };
            judge(&mut report, &Limits::default());
            let reason = report.publications[0].reason.clone().unwrap_or_default();
            (report.publications[0].health, reason)
        };
        let (found, reason) = health("0/2A", false, 300_000_000);
        assert_eq!(found, Health::Warning);
        assert!(reason.starts_with("site dublin is away, and "), "{reason}");
        for (durable, connected, behind) in
            [("0/2A", true, 300_000_000), ("0/2A", false, 1_000_000), ("0/0", false, 300_000_000)]
        {
            assert_eq!(health(durable, connected, behind).0, Health::Good);
        }
    }

    #[test]
    fn what_goes_over_links_tells_of_a_certificate_that_ends() {
        let publication = |name: &str, upstream: Option<&str>| PublicationReport {
            name: name.into(),
            upstream: upstream.map(str::to_owned),
            ..PublicationReport::default()
        };
        let mirror = |name: &str, direct| MirrorReport {
            name: name.into(),
            direct,
            ..MirrorReport::default()
        };
        let mut report = SiteReport {
            publications: vec![
                publication("own", None),
                publication("given", None),
                publication("up/received", Some("up")),
            ],
            downstreams: vec![DownstreamReport {
                publication: "given".into(),
                ..DownstreamReport::default()
            }],
            mirrors: vec![mirror("direct", true), mirror("far", false)],
            certificate_seconds_left: Some(12.5 * 86_400.0),
            ..SiteReport::default()
        };
        let health = |report: &mut SiteReport| {
            judge(report, &Limits::default());
            let publications = report.publications.iter().map(|p| p.health);
            publications.chain(report.mirrors.iter().map(|m| m.health)).collect::<Vec<_>>()
        };
        assert_eq!(health(&mut report), [Health::Good; 5]);
        report.certificate_ends_soon = true;
        let found = |links| [Health::Good, links, links, Health::Good, links];
        assert_eq!(health(&mut report), found(Health::Warning));
        let reason = report.publications[2].reason.as_deref();
        assert_eq!(reason, Some("this site's certificate expires in 12 days"));
        report.certificate_seconds_left = Some(-1.0);
        assert_eq!(health(&mut report), found(Health::Critical));
    }

    #[test]
    fn the_worst_comes_first_and_says_why() {
        let good = (Health::Good, String::new());
        assert_eq!(judged(|_, _| {}), [good.clone(), good.clone()]);
        let [p, s] = judged(|p, s| {
            p.store_bytes = 850;
            s.latency_ms = Some(1_500.0);
            s.behind_bytes = 2_000_000_000;
        });
        assert_eq!(p.0, Health::Warning);
        assert!(p.1.starts_with("the store uses 85 % of retention_size"), "{}", p.1);
        assert_eq!(s, (Health::Critical, "to apply: 1.9 GB; latency: 1.5 s".to_owned()));
        let [p, _] = judged(|p, _| p.tables_out = Some("t is out".into()));
        assert_eq!(p, (Health::Warning, "t is out".to_owned()));
        let [p, s] = judged(|p, s| {
            (p.state, p.error) = ("retrying".into(), Some("away".into()));
            p.store_bytes = 950;
            (s.state, s.error) = ("stopped".into(), Some("a row".into()));
        });
        assert_eq!(p.0, Health::Critical);
        assert!(p.1.ends_with("; retrying with an error"), "{}", p.1);
        assert_eq!(s, (Health::Critical, "stopped".to_owned()));
        let [_, s] = judged(|_, s| s.state = "paused".into());
        assert_eq!(s, (Health::Warning, "paused by an operator".to_owned()));
        // What is not known is not judged, and copying is as it should be.
        assert_eq!(judged(|_, s| s.state = "copying".into())[1], good);
    }
}
