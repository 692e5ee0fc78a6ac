// The page: the site's state as it comes by server-sent events, one view at a time.

import { h, morph, chart, topology } from "/draw.js";
import { bytes, count, perSecond, milliseconds, seconds, drain, clock, commands, leg } from "/format.js";
import { browser, conflicts } from "/browse.js";
import "/actions.js";

const $ = (id) => document.getElementById(id);
const RECENT = 180; // looks kept for the charts of the last minutes, while sites are small
const RECENT_OBJECTS = 20000; // objects in all of them
const SHOWN = 24; // subscriptions of one publication in the picture
const ROWS = 100; // subscriptions in the table, until all are asked for
let showsAll = false;
const WORST_FIRST = { critical: 0, warning: 1, good: 2 };

let status = null;
const recent = []; // [seconds, status]

// ---- judgement ----

const stateOf = (object) => object.health;

const worstFirst = (objects) => [...objects].sort((a, b) => WORST_FIRST[stateOf(a)] - WORST_FIRST[stateOf(b)]);

const badge = (state, text) => h("span", { class: `badge ${state}` }, text);
const stateBadge = (object) => badge(stateOf(object), object.state);

const href = (kind, name) => `#/${kind}/${encodeURIComponent(name)}`;
const link = (kind, name) => h("a", { href: href(kind, name) }, name);

// ---- parts of views ----

function figures(list) {
  return h("dl", { class: "figures" }, list.filter(Boolean).map(([name, value, more]) =>
    h("div", { class: "figure" }, h("dt", {}, name), h("dd", {}, value, more && h("span", { class: "more" }, more)))));
}

function table(label, heads, rows) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label },
    h("table", {},
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell, at) => h("td", { class: at === 0 ? "left wrap" : null }, cell)))))));
}

function trouble(object) {
  return [
    object.error && h("div", { class: "card error", role: "alert" }, object.error),
    object.reason && object.reason !== object.state && object.reason !== `${object.state} with an error` && h("div", { class: "card reason" }, object.reason),
  ];
}

const action = (kind, name, text, preset) =>
  h("button", { type: "button", "data-action": kind, "data-name": name, "data-preset": preset }, text);

function recentChart(title, value, show) {
  return chart(title, recent.map(([time, status]) => [time, value(status)]), show);
}

// The last thirty hours of what is shown, as last read: {key, at, fields, points}.
let kept = null;

async function readHistory(kind, name) {
  const key = `${kind}/${name}`;
  if (kept && kept.key === key && Date.now() - kept.at < 60000) return;
  kept = kept && kept.key === key ? { ...kept, at: Date.now() } : { key, at: Date.now(), fields: [], points: [] };
  try {
    const response = await fetch(`/api/v1/${kind}s/${encodeURIComponent(name)}/history`);
    const { fields, points } = await response.json();
    if (response.ok && kept.key === key) { kept.fields = fields; kept.points = withGaps(points); render(); }
  } catch { /* the line above says whether the node answers */ }
}

// A point without values wherever minutes are not known, so that no line leads over them.
function withGaps(points) {
  return points.flatMap((point, at) => (at > 0 && point[0] - points[at - 1][0] > 90 ? [[points[at - 1][0] + 60], point] : [point]));
}

function hours(kind, name, charts) {
  readHistory(kind, name);
  if (!kept || kept.points.length < 2) return h("p", { class: "quiet" }, "History: a point a minute is kept, for thirty hours; there is none yet.");
  return [h("h2", {}, "The last hours"), h("div", { class: "charts" },
    charts.map(([title, field, show]) => {
      const at = kept.fields.indexOf(field) + 1;
      return chart(title, kept.points.map((point) => [point[0], point[at]]), show);
    }))];
}

const rates = (kind, name) => status.rates[kind][name] || {};

// What the publisher keeps for the slot, or since when that is not known.
function keptByPublisher(p) {
  if (p.upstream) return "–";
  if (p.unacknowledged_bytes !== null) return bytes(p.unacknowledged_bytes);
  return p.heard_at === null ? "unknown" : `unknown since ${clock(p.heard_at)}`;
}

// ---- overview ----

function picture() {
  const nodes = [];
  const edges = [];
  for (const p of status.publications) {
    const rate = rates("publications", p.name);
    const origin = p.upstream ? `u:${p.upstream}` : `o:${p.name}`;
    if (!nodes.some((node) => node.id === origin)) {
      nodes.push(p.upstream
        ? { id: origin, column: 0, title: `site ${p.upstream}`, note: "upstream site" }
        : { id: origin, column: 0, title: `publisher of ${p.name}`, note: `log at ${p.publisher_end}` });
    }
    nodes.push({ id: `p:${p.name}`, column: 1, title: p.name, note: `${p.state}, ${bytes(p.store_bytes)} stored`, state: stateOf(p), href: href("publication", p.name) });
    edges.push({ from: origin, to: `p:${p.name}`, label: perSecond(rate.wire_bytes_per_second, bytes), moving: rate.wire_bytes_per_second > 0 });
    const followers = status.subscriptions.filter((sub) => sub.publication === p.name);
    const shown = worstFirst(followers).slice(0, SHOWN);
    for (const sub of shown) {
      const rate = rates("subscriptions", sub.name);
      nodes.push({ id: `s:${sub.name}`, column: 2, title: sub.name, note: `${sub.state}, ${bytes(sub.behind_bytes)} behind`, state: stateOf(sub), href: href("subscription", sub.name) });
      edges.push({ from: `p:${p.name}`, to: `s:${sub.name}`, label: `${perSecond(rate.changes_per_second)} changes`, moving: rate.changes_per_second > 0 });
    }
    if (followers.length > shown.length) {
      nodes.push({ id: `m:${p.name}`, column: 2, title: `${followers.length - shown.length} more`, note: "see the table below" });
      edges.push({ from: `p:${p.name}`, to: `m:${p.name}`, label: "", moving: false });
    }
    for (const d of status.downstreams.filter((d) => d.publication === p.name)) {
      const rate = rates("downstreams", `${d.site} ${d.publication}`);
      const id = `d:${d.site} ${d.publication}`;
      nodes.push({ id, column: 2, title: `site ${d.site}`, note: `${downstreamState(d)[1]}, ${bytes(d.behind_bytes)} behind`, state: downstreamState(d)[0] });
      edges.push({ from: `p:${p.name}`, to: id, label: perSecond(rate.sent_bytes_per_second, bytes), moving: rate.sent_bytes_per_second > 0 });
    }
  }
  for (const m of status.mirrors) {
    const rate = rates("mirrors", m.name);
    const id = `x:${m.name}`;
    const other = m.direct ? "principal" : m.site ? `site ${m.site}` : "its far end";
    nodes.push({ id, column: 1, title: `mirror ${m.name}`, note: `${m.state}, ${m.direct ? "direct" : `${m.end} end`}`, state: stateOf(m), href: href("mirror", m.name) });
    const [left, right] = m.end === "near" ? ["principal", other] : [other, `${m.standbys.length} standbys`];
    nodes.push({ id: `xl:${m.name}`, column: 0, title: left, note: `log at ${m.principal_end}` });
    nodes.push({ id: `xr:${m.name}`, column: 2, title: right, note: `durable ${m.durable}` });
    edges.push({ from: `xl:${m.name}`, to: id, label: perSecond(rate.log_bytes_per_second, bytes), moving: rate.log_bytes_per_second > 0 });
    edges.push({ from: id, to: `xr:${m.name}`, label: perSecond(m.direct ? rate.log_bytes_per_second : rate.link_bytes_per_second, bytes), moving: rate.log_bytes_per_second > 0 });
  }
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Topology" }, topology(nodes, edges));
}

function overview() {
  const parts = [h("h1", {}, `Site ${status.site}`), picture()];
  if (status.publications.length) {
    parts.push(h("h2", {}, "Publications"), table("Publications",
      ["Publication", "State", "Changes", "Capture leg", "Store leg", "From the stream", "To capture", "To store", "Kept by the publisher", "Store"],
      status.publications.map((p) => {
        const rate = rates("publications", p.name);
        return [link("publication", p.name), stateBadge(p), perSecond(rate.changes_per_second), leg(p.capture_ms), leg(p.store_ms), perSecond(rate.wire_bytes_per_second, bytes), p.upstream ? "–" : bytes(p.capture_behind_bytes), bytes(p.store_behind_bytes), keptByPublisher(p), bytes(p.store_bytes)];
      })));
  }
  if (status.subscriptions.length) {
    const shown = showsAll ? status.subscriptions : worstFirst(status.subscriptions).slice(0, ROWS);
    const more = status.subscriptions.length - shown.length;
    parts.push(h("h2", {}, "Subscriptions"), table("Subscriptions",
      ["Subscription", "Publication", "State", "Latency", "Before apply", "Apply leg", "To apply", "Commands", "Caught up in", "Changes", "Conflicts"],
      shown.map((sub) => {
        const rate = rates("subscriptions", sub.name);
        return [link("subscription", sub.name), link("publication", sub.publication), stateBadge(sub), milliseconds(sub.latency_ms), leg(sub.upstream_ms), leg(sub.apply_ms), bytes(sub.behind_bytes), commands(sub), drain(rate.drain_seconds, sub.behind_bytes), perSecond(rate.changes_per_second), count(sub.conflicts)];
      })));
    if (more > 0) parts.push(h("div", { class: "buttons" }, h("button", { type: "button", id: "all" }, `Show ${count(more)} more that are no worse`)));
  }
  if (status.downstreams.length) {
    parts.push(h("h2", {}, "Downstream sites"), table("Downstream sites",
      ["Site", "Publication", "State", "Link leg", "To send", "Commands", "There in", "On the link", "Sent"],
      status.downstreams.map((d) => {
        const rate = rates("downstreams", `${d.site} ${d.publication}`);
        return [d.site, link("publication", d.publication), badge(...downstreamState(d)), leg(d.link_ms), bytes(d.behind_bytes), commands(d), drain(rate.drain_seconds, d.behind_bytes), perSecond(rate.sent_bytes_per_second, bytes), bytes(d.sent_bytes)];
      })));
  }
  if (status.mirrors.length) {
    parts.push(h("h2", {}, "Mirrors"), table("Mirrors",
      ["Mirror", "End", "State", "Log", "On the link", "Ratio", "Send queue", "Redo queue", "Harden"],
      status.mirrors.map((m) => [link("mirror", m.name), m.direct ? "direct" : m.end, stateBadge(m), bytes(m.log_bytes), m.direct ? "–" : bytes(m.link_bytes), m.ratio ? `${m.ratio.toFixed(1)}:1` : "–", bytes(m.send_queue_bytes), bytes(m.redo_queue_bytes), m.harden_ms === null ? "–" : milliseconds(m.harden_ms)])));
  }
  return parts;
}

// ---- one publication ----

function downstreamState(d) {
  if (d.dropped_before) return ["critical", "cannot go on"];
  return d.connected ? ["good", "connected"] : ["warning", "away"];
}

function tracers(p) {
  const posted = status.tracers.filter((tracer) => tracer.publication === p.name);
  if (!posted.length) return null;
  const between = (from, to) => (from === null || to === null ? "–" : milliseconds(Math.max(to - from, 0)));
  const rows = posted.slice(0, 10).flatMap((t) => [
    ...t.subscriptions.map((a) => [t, `subscription ${a.name}`, "apply", a]),
    ...t.downstreams.map((a) => [t, `site ${a.name}`, "link", a]),
  ]);
  return [h("h2", {}, "Tracer tokens"), table("Tracer tokens",
    ["Posted", "To", "Capture", "Store", "Link", "Apply", "Total"],
    rows.map(([t, to, kind, a]) => [clock(t.posted_at), to, between(0, t.received_ms), between(t.received_ms, t.durable_ms), kind === "link" ? between(t.durable_ms, a.arrived_ms) : "", kind === "apply" ? between(t.durable_ms, a.arrived_ms) : "", a.arrived_ms === null ? `not in time (${a.state})` : milliseconds(a.arrived_ms)]))];
}

function publication(p) {
  const rate = rates("publications", p.name);
  const of = (status) => status.publications.find((other) => other.name === p.name) || {};
  const rateOf = (status) => status.rates.publications[p.name] || {};
  return [
    h("h1", {}, `Publication ${p.name} `, stateBadge(p)),
    trouble(p),
    h("ol", { class: "legs", "aria-label": "Legs" },
      !p.upstream && h("li", {}, h("b", {}, "1 · capture"), `${leg(p.capture_ms)}, ${bytes(p.capture_behind_bytes)} to take`),
      h("li", {}, h("b", {}, p.upstream ? "1 · link and store" : "2 · store"), `${p.upstream ? "" : `${leg(p.store_ms)}, `}${bytes(p.store_behind_bytes)} to make durable`),
      status.downstreams.filter((d) => d.publication === p.name).map((d) => h("li", {}, h("b", {}, `link to ${d.site}`), `${leg(d.link_ms)}, ${bytes(d.behind_bytes)} to send`)),
      status.subscriptions.filter((sub) => sub.publication === p.name).slice(0, SHOWN).map((sub) => h("li", {}, h("b", {}, "apply: ", link("subscription", sub.name)), `${leg(sub.apply_ms)}, ${bytes(sub.behind_bytes)} to apply`))),
    h("h2", {}, "Now"),
    figures([
      !p.upstream && ["Changes", perSecond(rate.changes_per_second), `${count(p.changes)} on this connection`],
      [p.upstream ? "From the link" : "From the stream", perSecond(rate.wire_bytes_per_second, bytes), `${bytes(p.wire_bytes)} on this connection`],
      ["Publisher's log made durable", perSecond(rate.log_bytes_per_second, bytes)],
      ["Written by the store", perSecond(rate.stored_bytes_per_second, bytes), `${bytes(p.payload_bytes)} as ${bytes(p.stored_bytes)}, ${count(p.syncs)} syncs`],
      ["Store on disk", bytes(p.store_bytes), `from ${p.store_start}`],
      ["Restarts", count(p.restarts), "after an error"],
      !p.upstream && ["Kept by the publisher", keptByPublisher(p), "log that the slot was not told of"],
    ]),
    h("h2", {}, "Positions"),
    figures([!p.upstream && ["Publisher", p.publisher_end], ["Received", p.received], ["Durable", p.durable], ["Acknowledged", p.acknowledged]]),
    h("h2", {}, "The last minutes"),
    h("div", { class: "charts" },
      recentChart(p.upstream ? "From the link" : "From the stream", (status) => rateOf(status).wire_bytes_per_second, (v) => perSecond(v, bytes)),
      recentChart("Log made durable", (status) => rateOf(status).log_bytes_per_second, (v) => perSecond(v, bytes)),
      recentChart("Store on disk", (status) => of(status).store_bytes, bytes)),
    hours("publication", p.name, [["Changes", "mean_changes_per_second", perSecond], ["Log made durable", "mean_log_bytes_per_second", (v) => perSecond(v, bytes)], ["To capture", "capture_behind_bytes", bytes], ["Store on disk", "store_bytes", bytes], ["Leg capture", "capture_ms", milliseconds], ["Leg store", "store_ms", milliseconds], ...(status.downstreams.some((d) => d.publication === p.name) ? [["Leg link, to the slowest site", "link_ms", milliseconds]] : [])]),
    tracers(p),
    browser(p.name, render),
    h("div", { class: "buttons" },
      !p.upstream && action("tracer", p.name, "Post a tracer token"),
      p.state !== "streaming" && p.state !== "receiving" && action("resume-publication", p.name, "Resume")),
  ];
}

// ---- one subscription ----

function copies(sub) {
  if (sub.state !== "copying" && sub.copies.every((copy) => copy.ranges_done === copy.ranges)) return null;
  return [h("h2", {}, "Copy"), table("Copy, by table", ["Table", "Done", "Ranges", "Rows", "Bytes"],
    sub.copies.map((copy) => [copy.table, h("progress", { max: Math.max(copy.ranges, 1), value: copy.ranges_done, "aria-label": `copy of ${copy.table}` }), `${copy.ranges_done} of ${copy.ranges}`, count(copy.rows), `${bytes(copy.bytes)} of ${bytes(copy.bytes_total)}`]))];
}

// Where a stopped subscription stands, as its error names it.
function lsnIn(error) {
  const found = /committed at ([0-9A-F]{1,8}\/[0-9A-F]{1,8})/.exec(error || "");
  return found ? found[1] : "";
}

function subscription(sub) {
  const rate = rates("subscriptions", sub.name);
  const of = (status) => status.subscriptions.find((other) => other.name === sub.name) || {};
  const rateOf = (status) => status.rates.subscriptions[sub.name] || {};
  return [
    h("h1", {}, `Subscription ${sub.name} `, stateBadge(sub)),
    trouble(sub),
    h("p", { class: "quiet" }, "follows ", link("publication", sub.publication)),
    figures([
      ["Latency", milliseconds(sub.latency_ms), sub.state === "streaming" ? "oldest transaction that is not there" : "at most"],
      ["Before apply", leg(sub.upstream_ms), "commit to durable here, by two clocks"],
      ["Apply", leg(sub.apply_ms), "durable here to committed on the target"],
      ["To apply", bytes(sub.behind_bytes), "of the publisher's log"],
      ["Commands to apply", commands(sub), sub.behind_commands === null ? "nothing to estimate from yet" : sub.behind_commands_estimated ? "an estimate" : "counted, up to a batch too many"],
      ["Caught up in", drain(rate.drain_seconds, sub.behind_bytes), "if all goes on as now"],
      ["Transactions", perSecond(rate.transactions_per_second), `${count(sub.transactions)} in ${count(sub.target_commits)} commits`],
      ["Changes", perSecond(rate.changes_per_second), `${count(sub.changes)} on this connection`],
      ["Publisher's log applied", perSecond(rate.log_bytes_per_second, bytes), `up to ${sub.applied}`],
      ["Commit to commit", sub.lag_p50_ms === null ? "–" : milliseconds(sub.lag_p50_ms), sub.lag_p50_ms === null ? null : `median; p99 ${milliseconds(sub.lag_p99_ms)}, max ${milliseconds(sub.lag_max_ms)}`],
      sub.tracer_ms !== null && ["Last tracer token", milliseconds(sub.tracer_ms), "by two clocks: the publisher's and this site's"],
      ["Conflicts", count(sub.conflicts), "rows of farshore.conflicts on the target"],
      ["Restarts", count(sub.restarts), "after an error"],
    ]),
    copies(sub),
    conflicts(sub, render),
    h("h2", {}, "The last minutes"),
    h("div", { class: "charts" },
      recentChart("Latency", (status) => of(status).latency_ms, milliseconds),
      recentChart("To apply", (status) => of(status).behind_bytes, bytes),
      recentChart("Changes", (status) => rateOf(status).changes_per_second, perSecond)),
    hours("subscription", sub.name, [["Latency, largest of each minute", "latency_ms", milliseconds], ["Before apply", "upstream_ms", milliseconds], ["Leg apply", "apply_ms", milliseconds], ["To apply", "behind_bytes", bytes], ["Commands to apply", "behind_commands", (v) => count(v)], ["Changes", "mean_changes_per_second", perSecond], ["Tracer tokens", "tracer_ms", milliseconds]]),
    h("div", { class: "buttons" },
      sub.state === "paused" || sub.state === "stopped" ? action("resume", sub.name, "Resume") : action("pause", sub.name, "Pause"),
      action("resync", sub.name, "Copy a table anew"),
      action("skip", sub.name, "Skip one transaction", lsnIn(sub.error))),
  ];
}

// ---- one mirror ----

// How fast standbys replay, and how long what waits takes at that rate.
function redo(m) {
  if (!m.apply_bytes_per_s) return "durable there, not replayed";
  const left = m.redo_queue_bytes / m.apply_bytes_per_s;
  return `replayed at ${perSecond(m.apply_bytes_per_s, bytes)}, about ${seconds(left)} left`;
}

function mirror(m) {
  const rate = rates("mirrors", m.name);
  const of = (status) => status.mirrors.find((other) => other.name === m.name) || {};
  const rateOf = (status) => status.rates.mirrors[m.name] || {};
  return [
    h("h1", {}, `Mirror ${m.name} `, stateBadge(m)),
    trouble(m),
    h("p", { class: "quiet" }, m.direct ? "direct: log comes straight from the principal" : `${m.end} end`, m.site ? `, with site ${m.site}` : "", m.mode ? `, mode ${m.mode}` : "", `, timeline ${m.timeline}`),
    figures([
      ["Log", perSecond(rate.log_bytes_per_second, bytes), `${bytes(m.log_bytes)} since the node started`],
      !m.direct && ["On the link", perSecond(rate.link_bytes_per_second, bytes), `${bytes(m.link_bytes)} since the node started`],
      !m.direct && ["Ratio", m.ratio ? `${m.ratio.toFixed(2)}:1` : "–", "log to bytes on the link"],
      (m.end === "near" || m.direct) && ["Send queue", bytes(m.send_queue_bytes), drain(rate.drain_seconds, m.send_queue_bytes)],
      m.end === "near" && m.kept_bytes !== undefined && ["Kept", bytes(m.kept_bytes), "at the principal"],
      m.direct && m.principal_kept_bytes !== undefined && ["Kept", bytes(m.principal_kept_bytes), "at the principal"],
      m.redo_queue_bytes !== null && ["Redo queue", bytes(m.redo_queue_bytes), redo(m)],
      m.end === "far" && ["Harden", m.harden_ms === null ? "–" : milliseconds(m.harden_ms), `${count(m.syncs)} syncs`],
      m.end === "far" && ["Spool", bytes(m.spool_bytes)],
    ]),
    h("h2", {}, "Positions"),
    figures([["Principal", m.principal_end], ["Received", m.received], ["Written", m.written], ["Durable", m.durable], ["Applied", m.applied], ["Acknowledged", m.acknowledged]]),
    m.slots.length > 0 && [h("h2", {}, "Slots"), table("Slots", ["Slot", "Keeps", "From", "Standby"],
      m.slots.map((slot) => [slot.name, slot.lost ? "lost" : bytes(slot.kept_bytes), slot.restart || "–", slot.in_use ? "streams" : "nobody streams by it"]))],
    m.standbys.length > 0 && [h("h2", {}, "Standbys"), table("Standbys", ["Standby", "From", "Sent", "Flushed", "Applied"],
      m.standbys.map((standby) => [standby.application_name, standby.peer, standby.sent, standby.flushed, standby.applied]))],
    h("h2", {}, "The last minutes"),
    h("div", { class: "charts" },
      recentChart("Log", (status) => rateOf(status).log_bytes_per_second, (v) => perSecond(v, bytes)),
      !m.direct && recentChart("On the link", (status) => rateOf(status).link_bytes_per_second, (v) => perSecond(v, bytes)),
      (m.end === "near" || m.direct) && recentChart("Send queue", (status) => of(status).send_queue_bytes, bytes)),
    hours("mirror", m.name, [["Log", "mean_log_bytes_per_second", (v) => perSecond(v, bytes)], ...(m.direct ? [] : [["On the link", "mean_link_bytes_per_second", (v) => perSecond(v, bytes)]]), ["Send queue", "send_queue_bytes", bytes], ["Redo queue", "redo_queue_bytes", bytes], ["Harden", "harden_ms", milliseconds]]),
  ];
}

// ---- the whole ----

const VIEWS = {
  publication: ["publications", publication],
  subscription: ["subscriptions", subscription],
  mirror: ["mirrors", mirror],
};

function route() {
  const [, kind, name] = /^#\/(\w+)\/(.+)$/.exec(location.hash) || [];
  return VIEWS[kind] ? { kind, name: decodeURIComponent(name) } : null;
}

function view() {
  const here = route();
  if (!here) return overview();
  const [list, show] = VIEWS[here.kind];
  const object = status[list].find((object) => object.name === here.name);
  return object ? show(object) : [h("h1", {}, `There is no ${here.kind} ${here.name}`)];
}

function render() {
  if (!status) return;
  const here = route();
  $("site").textContent = status.site;
  document.title = here ? `${here.name} · ${status.site} · Farshore` : `${status.site} · Farshore`;
  $("node").textContent = `pid ${status.pid}, up ${seconds(status.uptime_seconds)}, as of ${clock(status.sampled_at)}`;
  const objects = [...status.publications, ...status.subscriptions, ...status.mirrors].map(stateOf);
  const worst = ["critical", "warning", "good"].find((state) => objects.includes(state)) || "good";
  const many = objects.filter((state) => state === worst).length;
  $("health").className = `badge ${worst}`;
  $("health").textContent = worst === "good" ? "all well" : `${many} ${worst}`;
  const crumbs = here ? [h("a", { href: "#/" }, `Site ${status.site}`), ` › ${here.kind} ${here.name}`] : [];
  morph($("crumbs"), h("nav", { id: "crumbs", "aria-label": "Where you are" }, crumbs));
  morph($("main"), h("main", { id: "main", tabindex: -1 }, view()));
}

function take(next) {
  status = next;
  recent.push([next.sampled_at, next]);
  const objects = next.publications.length + next.subscriptions.length + next.mirrors.length;
  const most = Math.max(10, Math.min(RECENT, RECENT_OBJECTS / Math.max(objects, 1)));
  while (recent.length > most) recent.shift();
  if (!document.hidden) render();
}

// Only changes are said: screen readers read them out.
function say(text, kind) {
  if ($("live").textContent !== text) $("live").textContent = text;
  $("live").className = kind;
}

const events = new EventSource("/api/v1/events");
events.addEventListener("status", (event) => {
  take(JSON.parse(event.data));
  say("live", "live");
});
events.addEventListener("error", () => {
  const since = status ? ` What is shown is of ${clock(status.sampled_at)}.` : "";
  say(`The node does not answer.${since}`, "live lost");
});

document.addEventListener("click", (event) => {
  if (event.target.id === "all") { showsAll = true; render(); }
});
addEventListener("hashchange", () => { render(); $("main").focus(); });
document.addEventListener("visibilitychange", render);
