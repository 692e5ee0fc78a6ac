//! The metrics, in Prometheus' text format. Base units, `_total` for what only grows; labels are
//! names of the site file alone, so there are as many series as the site file has objects.

use crate::Health;
use crate::report::MirrorReport;
use crate::sample::Snapshot;
use std::fmt::Write as _;

/// The format's content type.
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// One label and its value.
type Label<'a> = (&'static str, &'a str);

/// Writes one family after the other.
struct Text(String);

impl Text {
    /// A family: its samples are labels and a value; absent values are left out.
    fn family<'a, const N: usize>(
        &mut self,
        (name, kind): (&str, &str),
        help: &str,
        samples: impl Iterator<Item = ([Label<'a>; N], Option<f64>)>,
    ) {
        let _ = write!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
        for (labels, value) in samples {
            let Some(value) = value else { continue };
            self.0.push_str(name);
            for (at, (label, text)) in labels.iter().enumerate() {
                self.0.push(if at == 0 { '{' } else { ',' });
                let _ = write!(self.0, "{label}=\"{}\"", escaped(text));
            }
            if N > 0 {
                self.0.push('}');
            }
            let _ = writeln!(self.0, " {value}");
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn milliseconds(value: Option<f64>) -> Option<f64> {
    value.map(|ms| ms / 1_000.0)
}

fn flag(is: bool) -> Option<f64> {
    Some(f64::from(u8::from(is)))
}

const GAUGE: &str = "gauge";
const COUNTER: &str = "counter";

/// All families, documented in `docs/metrics.md`.
pub fn render(snapshot: &Snapshot) -> String {
    let mut out = Text(String::new());
    site(&mut out, snapshot);
    publications(&mut out, snapshot);
    subscriptions(&mut out, snapshot);
    downstreams(&mut out, snapshot);
    mirrors(&mut out, snapshot);
    health(&mut out, snapshot);
    out.0
}

fn health(out: &mut Text, snapshot: &Snapshot) {
    let report = &snapshot.report;
    let publications = report.publications.iter().map(|p| ("publication", &p.name, p.health));
    let subscriptions = report.subscriptions.iter().map(|s| ("subscription", &s.name, s.health));
    let mirrors = report.mirrors.iter().map(|m| ("mirror", &m.name, m.health));
    let all = publications.chain(subscriptions).chain(mirrors);
    out.family(
        ("farshore_health", GAUGE),
        "0 good, 1 warning, 2 critical, by the agent's state and the site file's thresholds.",
        all.map(|(kind, name, health)| {
            let value = f64::from(u8::from(health >= Health::Warning))
                + f64::from(u8::from(health == Health::Critical));
            ([("kind", kind), ("name", name.as_str())], Some(value))
        }),
    );
}

fn site(out: &mut Text, snapshot: &Snapshot) {
    let labels = [("site", snapshot.report.site.as_str()), ("version", env!("CARGO_PKG_VERSION"))];
    out.family(
        ("farshore_build_info", GAUGE),
        "Version of the node, as a label; always 1.",
        std::iter::once((labels, Some(1.0))),
    );
    out.family(
        ("farshore_uptime_seconds", GAUGE),
        "Time since the node started.",
        std::iter::once(([], Some(snapshot.report.uptime_seconds as f64))),
    );
    out.family(
        ("farshore_certificate_remaining_seconds", GAUGE),
        "Time until the certificate that this site shows other sites expires; less than 0 once it \
         has.",
        std::iter::once(([], snapshot.report.certificate_seconds_left)),
    );
    out.family(
        ("farshore_sample_timestamp_seconds", GAUGE),
        "When the figures were taken, since 1970.",
        std::iter::once(([], Some(snapshot.sampled_at))),
    );
}

fn publications(out: &mut Text, snapshot: &Snapshot) {
    let all = &snapshot.report.publications;
    let mut family = |name: &str, kind, help: &str, value: &dyn Fn(&_) -> Option<f64>| {
        let samples = all.iter().map(|p| ([("publication", p.name.as_str())], value(p)));
        out.family((name, kind), help, samples);
    };
    family("farshore_publication_up", GAUGE, "1 while its changes come in.", &|p| {
        flag(p.state == "streaming" || p.state == "receiving")
    });
    family(
        "farshore_publication_capture_behind_bytes",
        GAUGE,
        "Bytes of the publisher's log that were not taken from the stream yet.",
        &|p| p.upstream.is_none().then_some(p.capture_behind_bytes as f64),
    );
    family(
        "farshore_publication_store_behind_bytes",
        GAUGE,
        "Bytes of the publisher's log that came in and are not durable in the store yet.",
        &|p| Some(p.store_behind_bytes as f64),
    );
    family(
        "farshore_publication_unacknowledged_bytes",
        GAUGE,
        "Bytes of log that the publisher's slot keeps because it was not told of them yet; absent \
         while nothing is heard of the publisher.",
        &|p| p.unacknowledged_bytes.map(|bytes| bytes as f64),
    );
    family(
        "farshore_publication_heard_timestamp_seconds",
        GAUGE,
        "When anything was last heard of the publisher, since 1970.",
        &|p| p.heard_at,
    );
    family(
        "farshore_publication_capture_latency_seconds",
        GAUGE,
        "Leg capture: commit on the publisher to received, of the newest transaction, by two clocks.",
        &|p| milliseconds(p.capture_ms),
    );
    family(
        "farshore_publication_store_latency_seconds",
        GAUGE,
        "Leg store: received to durable, of the newest transaction or of what waits longest.",
        &|p| milliseconds(p.store_ms),
    );
    family("farshore_publication_commands_total", COUNTER, "Commands handed to the store.", &|p| {
        p.upstream.is_none().then_some(p.commands as f64)
    });
    family(
        "farshore_publication_changes_total",
        COUNTER,
        "Row changes taken from the stream; begins anew with each connection.",
        &|p| p.upstream.is_none().then_some(p.changes as f64),
    );
    family(
        "farshore_publication_received_bytes_total",
        COUNTER,
        "Bytes of messages taken from the stream or the link; begins anew with each connection.",
        &|p| Some(p.wire_bytes as f64),
    );
    family(
        "farshore_publication_payload_bytes_total",
        COUNTER,
        "Bytes appended to the store, before compression.",
        &|p| Some(p.payload_bytes as f64),
    );
    family(
        "farshore_publication_stored_bytes_total",
        COUNTER,
        "Bytes that those took on disk.",
        &|p| Some(p.stored_bytes as f64),
    );
    family("farshore_publication_syncs_total", COUNTER, "fdatasync calls of the store.", &|p| {
        Some(p.syncs as f64)
    });
    family(
        "farshore_publication_restarts_total",
        COUNTER,
        "Times that what fills the store was started again after an error.",
        &|p| Some(p.restarts as f64),
    );
    family("farshore_publication_store_bytes", GAUGE, "Bytes of the store on disk.", &|p| {
        Some(p.store_bytes as f64)
    });
}

fn subscriptions(out: &mut Text, snapshot: &Snapshot) {
    let all = &snapshot.report.subscriptions;
    let rates = &snapshot.rates.subscriptions;
    let mut family = |name: &str, kind, help: &str, value: &dyn Fn(&_) -> Option<f64>| {
        let samples = all.iter().map(|s| {
            let labels =
                [("subscription", s.name.as_str()), ("publication", s.publication.as_str())];
            (labels, value(s))
        });
        out.family((name, kind), help, samples);
    };
    family("farshore_subscription_up", GAUGE, "1 while it copies or applies.", &|s| {
        flag(matches!(s.state.as_str(), "copying" | "catching-up" | "streaming"))
    });
    family("farshore_subscription_paused", GAUGE, "1 while an operator has paused it.", &|s| {
        flag(s.state == "paused")
    });
    family(
        "farshore_subscription_behind_bytes",
        GAUGE,
        "Bytes of the publisher's log between what is durable in the store and what is applied.",
        &|s| Some(s.behind_bytes as f64),
    );
    family(
        "farshore_subscription_behind_commands",
        GAUGE,
        "Commands that the store has and the target has not, counted or estimated; absent if neither.",
        &|s| s.behind_commands.map(|commands| commands as f64),
    );
    family(
        "farshore_subscription_behind_commands_estimated",
        GAUGE,
        "1 while the number of commands is an estimate, not a count.",
        &|s| flag(s.behind_commands_estimated),
    );
    family(
        "farshore_subscription_upstream_latency_seconds",
        GAUGE,
        "All legs before apply: commit on the publisher to durable here, by two clocks.",
        &|s| milliseconds(s.upstream_ms),
    );
    family(
        "farshore_subscription_apply_latency_seconds",
        GAUGE,
        "Leg apply: durable here to committed on the target, of the newest or of what waits longest.",
        &|s| milliseconds(s.apply_ms),
    );
    family(
        "farshore_subscription_latency_seconds",
        GAUGE,
        "Age of the oldest transaction that is not committed on the target; absent if not known.",
        &|s| milliseconds(s.latency_ms),
    );
    family(
        "farshore_subscription_tracer_seconds",
        GAUGE,
        "Commit to commit of the newest tracer token on the target; absent before the first.",
        &|s| milliseconds(s.tracer_ms),
    );
    family(
        "farshore_subscription_drain_seconds",
        GAUGE,
        "Time until nothing is left to apply if all goes on as now; absent while it falls behind.",
        &|s| rates.get(&s.name).and_then(|rates| rates.drain_seconds),
    );
    family(
        "farshore_subscription_transactions_total",
        COUNTER,
        "Source transactions applied.",
        &|s| Some(s.transactions as f64),
    );
    family(
        "farshore_subscription_changes_total",
        COUNTER,
        "Row changes applied; begins anew with each connection.",
        &|s| Some(s.changes as f64),
    );
    family(
        "farshore_subscription_target_commits_total",
        COUNTER,
        "Transactions committed on the target.",
        &|s| Some(s.target_commits as f64),
    );
    family(
        "farshore_subscription_conflicts_total",
        COUNTER,
        "Changes recorded in farshore.conflicts.",
        &|s| Some(s.conflicts as f64),
    );
    family(
        "farshore_subscription_restarts_total",
        COUNTER,
        "Times that it was started again after an error.",
        &|s| Some(s.restarts as f64),
    );
    family(
        "farshore_subscription_copy_ranges",
        GAUGE,
        "Ranges of the copy that is under way, of all its tables.",
        &|s| Some(s.copies.iter().map(|copy| copy.ranges).sum::<u64>() as f64),
    );
    family("farshore_subscription_copy_ranges_done", GAUGE, "How many of them are done.", &|s| {
        Some(s.copies.iter().map(|copy| copy.ranges_done).sum::<u64>() as f64)
    });
}

fn downstreams(out: &mut Text, snapshot: &Snapshot) {
    let all = &snapshot.report.downstreams;
    let mut family = |name: &str, kind, help: &str, value: &dyn Fn(&_) -> Option<f64>| {
        let samples = all.iter().map(|d| {
            ([("site", d.site.as_str()), ("publication", d.publication.as_str())], value(d))
        });
        out.family((name, kind), help, samples);
    };
    family("farshore_downstream_connected", GAUGE, "1 while the site is connected.", &|d| {
        flag(d.connected)
    });
    family(
        "farshore_downstream_behind_bytes",
        GAUGE,
        "Bytes of the publisher's log between what is durable here and there.",
        &|d| Some(d.behind_bytes as f64),
    );
    family(
        "farshore_downstream_behind_commands",
        GAUGE,
        "Commands that are durable here and not there; absent if not known.",
        &|d| d.behind_commands.map(|commands| commands as f64),
    );
    family(
        "farshore_downstream_link_latency_seconds",
        GAUGE,
        "Leg link: durable here to told durable there, of the newest or of what waits longest.",
        &|d| milliseconds(d.link_ms),
    );
    family(
        "farshore_downstream_sent_bytes_total",
        COUNTER,
        "Bytes sent, as they crossed; begins anew with each connection.",
        &|d| Some(d.sent_bytes as f64),
    );
}

fn mirrors(out: &mut Text, snapshot: &Snapshot) {
    let all = &snapshot.report.mirrors;
    let mut family = |name: &str, kind, help: &str, value: &dyn Fn(&_) -> Option<f64>| {
        let samples =
            all.iter().map(|m| ([("mirror", m.name.as_str()), ("end", m.end.as_str())], value(m)));
        out.family((name, kind), help, samples);
    };
    family("farshore_mirror_up", GAUGE, "1 while log flows.", &|m| {
        flag(m.state == "streaming" || m.state == "receiving")
    });
    family(
        "farshore_mirror_dropped",
        GAUGE,
        "1 while it was dropped for being too far behind and nobody has resumed it; at the near \
         end, and of a direct mirror.",
        &|m| if m.end == "near" || m.direct { flag(m.state == "dropped") } else { None },
    );
    family(
        "farshore_mirror_kept_bytes",
        GAUGE,
        "At the near end, bytes of log that the principal keeps for the mirror's slot; at the far \
         end, the most that the spool keeps for a standby's slot.",
        &|m| m.kept_bytes.map(|bytes| bytes as f64),
    );
    family(
        "farshore_mirror_principal_kept_bytes",
        GAUGE,
        "Of a direct mirror, bytes of log that the principal keeps for its slot.",
        &|m| m.principal_kept_bytes.map(|bytes| bytes as f64),
    );
    family("farshore_mirror_log_bytes_total", COUNTER, "Bytes of log carried.", &|m| {
        Some(m.log_bytes as f64)
    });
    family(
        "farshore_mirror_link_bytes_total",
        COUNTER,
        "Bytes that they took on the link.",
        &|m| (!m.direct).then_some(m.link_bytes as f64),
    );
    family(
        "farshore_mirror_send_queue_bytes",
        GAUGE,
        "Bytes of log that the near end, or the principal of a direct mirror, has and the far end \
         has not written.",
        &|m| Some(m.send_queue_bytes as f64),
    );
    family(
        "farshore_mirror_redo_queue_bytes",
        GAUGE,
        "Bytes of log that are durable at the far end and that its standbys have not replayed.",
        &|m| m.redo_queue_bytes.map(|bytes| bytes as f64),
    );
    family("farshore_mirror_spool_bytes", GAUGE, "Bytes of the spool on disk.", &|m| {
        (m.end == "far").then_some(m.spool_bytes as f64)
    });
    family("farshore_mirror_syncs_total", COUNTER, "fdatasync calls at the far end.", &|m| {
        (m.end == "far").then_some(m.syncs as f64)
    });
    family(
        "farshore_mirror_harden_seconds",
        GAUGE,
        "Mean time from a group's first write to the end of its fdatasync.",
        &|m| milliseconds(m.harden_ms),
    );
    let near = |m: &MirrorReport, ms: u64| (m.end == "near").then_some(ms as f64 / 1_000.0);
    family(
        "farshore_mirror_packing_seconds_total",
        COUNTER,
        "Time that packing took; at the near end.",
        &|m| near(m, m.packing_ms),
    );
    family(
        "farshore_mirror_flow_control_seconds_total",
        COUNTER,
        "Time that packed log waited for the link; at the near end.",
        &|m| near(m, m.flow_control_ms),
    );
    family(
        "farshore_mirror_apply_bytes_per_second",
        GAUGE,
        "Log that the standby furthest behind replayed per second lately; at the far end.",
        &|m| m.apply_bytes_per_s.map(|bytes| bytes as f64),
    );
}
