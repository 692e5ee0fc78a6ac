use crate::output::Printed;
use crate::sparkline::Trends;
use crate::{load, output, runtime};
use farshore_node::report::{Health, MirrorReport, PublicationReport, SiteReport};
use farshore_node::{control, site};
use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Exit status when the node does not run.
pub(crate) const EXIT_NOT_RUNNING: u8 = 3;
/// Exit status when something is worth a warning, and nothing worse.
const EXIT_WARNING: u8 = 4;
/// Exit status when an agent has stopped or keeps failing.
const EXIT_TROUBLE: u8 = 1;

/// Shows a site's state once or again and again. The exit status says whether all is well.
pub fn status(site: &Path, watch: bool, json: bool) -> ExitCode {
    let config = match load(site) {
        Ok(config) => config,
        Err(code) => return code,
    };
    let runtime = match runtime() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("farshore: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let mut trends = Trends::default();
    loop {
        let asked = runtime.block_on(control::status(&config.data_dir));
        let (report, running) = match asked {
            Ok(Some(report)) => (report, true),
            Ok(None) => (site::offline_report(&config), false),
            Err(error) => {
                let data_dir = &config.data_dir;
                let why = control::cannot_ask(data_dir, &error, control::WHO_MAY_ASK);
                eprintln!("farshore: {why}");
                return ExitCode::FAILURE;
            }
        };
        let text = if json {
            let text = if watch {
                serde_json::to_string(&report)
            } else {
                serde_json::to_string_pretty(&report)
            };
            match text {
                Ok(text) => text + "\n",
                Err(error) => {
                    eprintln!("farshore: {error}");
                    String::new()
                }
            }
        } else {
            if watch && running {
                trends.note(&report);
            }
            let text = render(&report, running, &trends);
            // Home, then clear what is below: no flicker.
            if watch { format!("\x1b[H\x1b[J{text}") } else { text }
        };
        let printed = output::print(&text);
        if !watch || printed != Printed::Whole {
            return printed.or_failure(exit_code(&report, running));
        }
        // The timer is made within the runtime.
        runtime.block_on(async { tokio::time::sleep(Duration::from_secs(1)).await });
    }
}

fn exit_code(report: &SiteReport, running: bool) -> ExitCode {
    if !running {
        return ExitCode::from(EXIT_NOT_RUNNING);
    }
    let health = report.health();
    if report.has_trouble() || health == Health::Critical {
        ExitCode::from(EXIT_TROUBLE)
    } else if health == Health::Warning {
        ExitCode::from(EXIT_WARNING)
    } else {
        ExitCode::SUCCESS
    }
}

fn render(report: &SiteReport, running: bool, trends: &Trends) -> String {
    let mut out = String::new();
    let uptime = if running {
        format!("pid {}, up {}", report.pid, seconds(report.uptime_seconds))
    } else {
        "not running".to_owned()
    };
    let _ = writeln!(out, "site {} ({uptime})", report.site);
    for p in &report.publications {
        let _ = writeln!(out, "\npublication {}: {}", p.name, p.state);
        if let Some(error) = &p.error {
            let _ = writeln!(out, "  error      {error}");
        }
        judged(&mut out, p.health, p.reason.as_deref());
        if running && p.upstream.is_some() {
            let _ = writeln!(
                out,
                "  positions  received {}  durable {}  acknowledged {}",
                p.received, p.durable, p.acknowledged
            );
            let _ = writeln!(
                out,
                "  store      {} on disk; {} on the link, {} stored as {}",
                bytes(p.store_bytes),
                bytes(p.wire_bytes),
                bytes(p.payload_bytes),
                bytes(p.stored_bytes)
            );
        } else if running {
            let _ = writeln!(
                out,
                "  positions  publisher {}  received {}  durable {}  acknowledged {}",
                p.publisher_end, p.received, p.durable, p.acknowledged
            );
            let _ = writeln!(
                out,
                "  store      {} on disk; {} changes, {} on the wire, {} stored as {}",
                bytes(p.store_bytes),
                p.changes,
                bytes(p.wire_bytes),
                bytes(p.payload_bytes),
                bytes(p.stored_bytes)
            );
            legs(&mut out, &[("capture", p.capture_ms), ("store", p.store_ms)]);
            kept(&mut out, p);
        }
    }
    for d in &report.downstreams {
        let state = if d.connected { "connected" } else { "away" };
        let _ = writeln!(out, "\ndownstream {} ← {}: {state}", d.site, d.publication);
        let _ = writeln!(
            out,
            "  durable    {} ({}{} behind the store)  {} sent",
            d.durable,
            bytes(d.behind_bytes),
            commands(d.behind_commands, false),
            bytes(d.sent_bytes)
        );
        if let Some(error) = &d.error {
            let _ = writeln!(out, "  error      the log cannot be sent to it: {error}");
        }
        if let Some(begins) = &d.dropped_before {
            let _ = writeln!(out, "  dropped    what it still needed; the log begins at {begins}");
        }
        legs(&mut out, &[("link", d.link_ms)]);
    }
    for s in &report.subscriptions {
        let _ = writeln!(out, "\nsubscription {} ← {}: {}", s.name, s.publication, s.state);
        if let Some(error) = &s.error {
            let _ = writeln!(out, "  error      {error}");
        }
        judged(&mut out, s.health, s.reason.as_deref());
        if !running {
            continue;
        }
        let _ = writeln!(
            out,
            "  applied    {} ({}{} behind the store)  {} transactions in {} commits",
            s.applied,
            bytes(s.behind_bytes),
            commands(s.behind_commands, s.behind_commands_estimated),
            s.transactions,
            s.target_commits
        );
        if !trends.show(&mut out, &s.name)
            && let Some(latency_ms) = s.latency_ms
        {
            let _ = writeln!(out, "  latency    {latency_ms:.0} ms");
        }
        legs(&mut out, &[("before apply", s.upstream_ms), ("apply", s.apply_ms)]);
        if s.conflicts > 0 {
            let _ = writeln!(out, "  conflicts  {} recorded in farshore.conflicts", s.conflicts);
        }
        if let (Some(p50), Some(p99), Some(max)) = (s.lag_p50_ms, s.lag_p99_ms, s.lag_max_ms) {
            let _ = writeln!(out, "  lag        p50 {p50:.1} ms  p99 {p99:.1} ms  max {max:.1} ms");
        }
        if s.state == "copying" {
            for copy in &s.copies {
                let percent = 100 * copy.ranges_done / copy.ranges.max(1);
                let _ = writeln!(
                    out,
                    "  copy       {:3} % {}  {} of {} ranges, {} rows, {} of {}",
                    percent,
                    copy.table,
                    copy.ranges_done,
                    copy.ranges,
                    copy.rows,
                    bytes(copy.bytes),
                    bytes(copy.bytes_total)
                );
            }
        }
    }
    for m in &report.mirrors {
        mirror(&mut out, m, running);
    }
    out
}

/// How long each leg takes, as far as it is known.
fn legs(out: &mut String, legs: &[(&str, Option<f64>)]) {
    let known = legs.iter().filter_map(|(leg, ms)| ms.map(|ms| format!("{leg} {ms:.1} ms")));
    let known: Vec<String> = known.collect();
    if !known.is_empty() {
        let _ = writeln!(out, "  legs       {}", known.join("  "));
    }
}

/// What the publisher keeps for us, or since when that is not known.
fn kept(out: &mut String, p: &PublicationReport) {
    let _ = match (p.unacknowledged_bytes, p.heard_at) {
        (Some(kept), _) => writeln!(out, "  kept       {} at the publisher", bytes(kept)),
        (None, Some(heard_at)) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            let silent = (now.as_secs_f64() - heard_at).max(0.0) as u64;
            writeln!(
                out,
                "  kept       unknown: nothing was heard of the publisher for {}",
                seconds(silent)
            )
        }
        (None, None) => Ok(()),
    };
}

/// Behind a number of bytes.
fn commands(commands: Option<u64>, estimated: bool) -> String {
    let about = if estimated { "about " } else { "" };
    commands.map_or(String::new(), |commands| format!(", {about}{commands} commands"))
}

fn judged(out: &mut String, health: Health, reason: Option<&str>) {
    if let Some(reason) = reason {
        let _ = writeln!(out, "  {:<10} {reason}", health.word());
    }
}

fn mirror(out: &mut String, m: &MirrorReport, running: bool) {
    let site = m.site.as_deref().unwrap_or("its far end");
    let _ = match (m.end.as_str(), m.direct) {
        ("near", _) => writeln!(out, "\nmirror {} → {site}: {}", m.name, m.state),
        (_, true) => writeln!(out, "\nmirror {} ← its principal, direct: {}", m.name, m.state),
        (_, false) => writeln!(out, "\nmirror {} ← {site}: {}", m.name, m.state),
    };
    if let Some(error) = &m.error {
        let _ = writeln!(out, "  error      {error}");
    }
    judged(out, m.health, m.reason.as_deref());
    if !running {
        return;
    }
    let _ = writeln!(
        out,
        "  positions  principal {}  received {}  durable {}  applied {}  acknowledged {}",
        m.principal_end, m.received, m.durable, m.applied, m.acknowledged
    );
    let ratio = m.ratio.map_or(String::new(), |ratio| format!(" ({ratio:.1}:1)"));
    let method = m.compression.as_ref().map_or(String::new(), |method| format!(", {method}"));
    let (log, queue) = (bytes(m.log_bytes), bytes(m.send_queue_bytes));
    let _ = if m.direct {
        writeln!(out, "  log        {log} as it is; {queue} to come")
    } else {
        let link = bytes(m.link_bytes);
        writeln!(out, "  log        {log} as {link} on the link{ratio}{method}; {queue} to be sent")
    };
    let at_the_principal =
        if m.direct { m.principal_kept_bytes } else { m.kept_bytes.filter(|_| m.end == "near") };
    if let Some(kept) = at_the_principal {
        let _ = writeln!(out, "  kept       {} at the principal", bytes(kept));
    }
    if m.end == "near" {
        let _ = writeln!(
            out,
            "  time       {} ms packing, {} ms waiting for the link",
            m.packing_ms, m.flow_control_ms
        );
    }
    if let Some(redo_queue) = m.redo_queue_bytes {
        let rate = m.apply_bytes_per_s.map_or(String::new(), |rate| format!(", {}/s", bytes(rate)));
        let _ = writeln!(out, "  redo       {} to be replayed{rate}", bytes(redo_queue));
    }
    if let Some(harden_ms) = m.harden_ms {
        let _ = writeln!(
            out,
            "  spool      {} on disk; {} times made durable, {harden_ms:.2} ms each",
            bytes(m.spool_bytes),
            m.syncs
        );
    }
    for slot in &m.slots {
        let keeps = match &slot.restart {
            Some(restart) => format!("keeps {} from {restart} on", bytes(slot.kept_bytes)),
            None if slot.lost => "lost".to_owned(),
            None => "keeps nothing yet".to_owned(),
        };
        let user = if slot.in_use { "in use" } else { "nobody streams by it" };
        let _ = writeln!(out, "  slot       {}  {keeps}, {user}", slot.name);
    }
    for s in &m.standbys {
        let _ = writeln!(
            out,
            "  standby    {} at {}  sent {}  flushed {}  applied {}",
            s.application_name, s.peer, s.sent, s.flushed, s.applied
        );
    }
}

pub(crate) fn bytes(bytes: u64) -> String {
    let (mut value, mut unit) = (bytes as f64, "B");
    for next in ["KB", "MB", "GB", "TB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") }
}

fn seconds(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3_600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3_600, seconds % 3_600 / 60),
    }
}
