// What operators may do, each after a confirmation.

import { milliseconds } from "/format.js";

const dialog = document.getElementById("dialog");
const part = (name) => document.getElementById(`dialog-${name}`);
let current = null;

const path = (kind, name, verb) => `/api/v1/${kind}/${encodeURIComponent(name)}/${verb}`;

// A token's way, in words.
function way(report) {
  const arrived = (leg, name, at, state) => `${leg} ${name}: ${at === null ? `not in time (${state})` : milliseconds(at)}`;
  return [
    report.received_ms === null ? "It did not come out of the log in time." : `out of the log after ${milliseconds(report.received_ms)}, durable in the store after ${milliseconds(report.durable_ms)}`,
    ...report.subscriptions.map((a) => arrived("subscription", a.name, a.arrived_ms, a.state)),
    ...report.downstreams.map((a) => arrived("site", a.name, a.arrived_ms, a.state)),
  ].join("; ");
}

export const ACTIONS = {
  pause: { title: "Pause subscription", text: "It halts until somebody resumes it, also when the node starts again. Its changes are kept for it, which takes disk.", path: (name) => path("subscriptions", name, "pause") },
  resume: { title: "Resume subscription", text: "It goes on from where it stands.", path: (name) => path("subscriptions", name, "resume") },
  "resume-publication": { title: "Resume publication", text: "Its capture goes on from where it stands.", path: (name) => path("publications", name, "resume") },
  tracer: { title: "Post a tracer token", text: "A transaction without changes is committed on the publisher and timed on every leg, for up to 20 s.", path: (name) => path("publications", name, "tracer"), show: way },
  resync: { title: "Copy a table anew", text: "The table is emptied on the target and copied anew. Readers there see it empty for a while.", ask: "Table, as schema.table", key: "table", path: (name) => path("subscriptions", name, "resync") },
  skip: { title: "Skip one transaction", text: "The target will never have this transaction's changes. It is recorded in farshore.conflicts there.", ask: "End of its commit record (LSN)", key: "lsn", path: (name) => path("subscriptions", name, "skip") },
};

export function open(kind, name, preset) {
  const action = ACTIONS[kind];
  if (!action) return;
  current = { action, name, done: false };
  part("title").textContent = `${action.title}: ${name}`;
  part("text").textContent = action.text;
  part("label").textContent = action.ask || "";
  part("label").hidden = !action.ask;
  part("input").hidden = !action.ask;
  part("input").required = Boolean(action.ask);
  part("input").value = preset || "";
  part("outcome").textContent = "";
  part("go").textContent = action.title;
  part("go").hidden = false;
  part("go").disabled = false;
  part("cancel").textContent = "Cancel";
  dialog.showModal();
}

async function go() {
  const { action, name } = current;
  const body = action.key ? { [action.key]: part("input").value.trim() } : {};
  part("go").disabled = true;
  part("outcome").textContent = "under way …";
  let said;
  try {
    const response = await fetch(action.path(name), {
      method: "POST",
      headers: { "content-type": "application/json", "x-farshore-action": "page" },
      body: JSON.stringify(body),
    });
    const answer = await response.json();
    said = response.ok ? (action.show || String)(answer.done) : `Refused: ${answer.error}`;
    if (response.ok) part("go").hidden = true;
  } catch (error) {
    said = `No answer from the node: ${error.message}`;
  }
  part("outcome").textContent = said;
  part("go").disabled = false;
  part("cancel").textContent = "Close";
  part("cancel").focus();
}

part("cancel").addEventListener("click", () => dialog.close());
part("form").addEventListener("submit", (event) => { event.preventDefault(); go(); });

// Buttons of any view: data-action, data-name, data-preset.
document.addEventListener("click", (event) => {
  const button = event.target.closest("button[data-action]");
  if (button) open(button.dataset.action, button.dataset.name, button.dataset.preset);
});
