// What takes a disk or a server to tell, asked for by hand: stored transactions, and conflicts that
// are recorded on a target.

import { h } from "/draw.js";

// What was told last, by what was asked: {path, told} or {path, error}.
const told = new Map();

async function ask(key, path, show) {
  let answer;
  try {
    const response = await fetch(path);
    const body = await response.json();
    answer = response.ok ? { told: body } : { error: body.error };
  } catch (error) {
    answer = { error: `No answer from the node: ${error.message}` };
  }
  // One answer of each kind is kept, so that the page's memory is bounded.
  const kind = key.split(" ", 1)[0];
  for (const other of told.keys()) if (other.startsWith(`${kind} `)) told.delete(other);
  told.set(key, answer);
  show();
}

// Buttons by what they ask; the page is drawn anew by `show` when the answer is here.
const asking = new Map();
const button = (id, text, key, path, show) => {
  asking.set(id, () => ask(key, path, show));
  return h("button", { type: "button", "data-ask": id }, text);
};
document.addEventListener("click", (event) => {
  const pressed = event.target.closest("button[data-ask]");
  if (pressed) asking.get(pressed.dataset.ask)?.();
});

const refused = (error) => h("div", { class: "card error", role: "alert" }, error);

// Stored transactions of a publication, some at a time.
export function browser(name, show) {
  const key = `changes ${name}`;
  const path = `/api/v1/publications/${encodeURIComponent(name)}/changes`;
  const answer = told.get(key);
  const list = answer && answer.told && answer.told.transactions;
  const next = answer && answer.told && answer.told.next;
  return [
    h("h2", {}, "Stored commands"),
    h("p", { class: "quiet" }, "What the store holds, in commit order; values are row values of the publisher."),
    answer && answer.error && refused(answer.error),
    list && list.length === 0 && h("p", {}, "The store holds no transaction from here on."),
    list && list.map((transaction) => h("div", { class: "card stored" },
      h("h3", {}, `${transaction.lsn} · ${transaction.what}`),
      h("ol", {}, transaction.changes.map((change) => h("li", {}, change))))),
    answer && answer.told && answer.told.is_cut && h("p", { class: "quiet" }, `This transaction goes on: farshore browse site.toml --publication ${name} --from ${list[0].lsn} --to ${list[0].lsn} --limit 0`),
    h("div", { class: "buttons" },
      button("changes", "From the log's start", key, path, show),
      next && button("changes-next", "Next", key, `${path}?from=${encodeURIComponent(next)}`, show)),
  ];
}

const REMEDY = {
  skipped: "Left out: the target lacks it. Put the row right by hand, or copy the table anew.",
  overwritten: "The publisher's row won: nothing is to be done, unless the target's row was wanted.",
};

// Conflicts that a subscription's target has recorded, the newest first.
export function conflicts(sub, show) {
  const key = `conflicts ${sub.name}`;
  const answer = told.get(key);
  const list = answer && answer.told && answer.told.conflicts;
  return [
    h("h2", {}, "Conflicts"),
    answer && answer.error && refused(answer.error),
    list && list.length === 0 && h("p", {}, "The target has recorded none for this subscription."),
    list && list.map((conflict) => h("div", { class: "card stored" },
      h("h3", {}, `${conflict.recorded_at} · ${conflict.operation} ${conflict.table || ""} · ${conflict.action} · transaction ${conflict.lsn}`),
      h("p", {}, conflict.reason, conflict.sqlstate && ` (${conflict.sqlstate})`),
      h("ol", {}, [["key", conflict.key], ["publisher before", conflict.old_row], ["publisher after", conflict.new_row], ["target", conflict.existing_row]]
        .filter(([, row]) => row !== null).map(([what, row]) => h("li", {}, `${what}: ${row}`))),
      h("p", { class: "quiet" }, REMEDY[conflict.action] || ""))),
    h("div", { class: "buttons" }, button("conflicts", "Show what the target has recorded", key, `/api/v1/subscriptions/${encodeURIComponent(sub.name)}/conflicts`, show)),
  ];
}
