// Elements, pictures, and bringing what is shown up to what it should be. Text always goes in as
// text: names and messages come from databases.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

export const h = (name, attributes, ...children) =>
  fill(document.createElement(name), attributes, children);

export const s = (name, attributes, ...children) =>
  fill(document.createElementNS(SVG, name), attributes, children);

// Makes `old` what `fresh` is, touching only what differs: focus, selection and scrolling stay.
export function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  const now = [...old.childNodes];
  const wanted = [...fresh.childNodes];
  wanted.forEach((node, at) => { if (now[at]) morph(now[at], node); else old.append(node); });
  now.slice(wanted.length).forEach((node) => node.remove());
}

const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// A line over time: points are [seconds, value or null]. The vertical axis begins at 0.
export function chart(title, points, show) {
  const known = points.filter(([, value]) => value !== null && value !== undefined);
  const now = known.length ? show(known[known.length - 1][1]) : "–";
  const most = Math.max(...known.map(([, value]) => value), 0);
  const [first, last] = points.length ? [points[0][0], points[points.length - 1][0]] : [0, 1];
  const x = (time) => (300 * (time - first)) / Math.max(last - first, 1e-9);
  const y = (value) => 90 - (most > 0 ? (80 * value) / most : 0);
  const lines = [];
  let line = [];
  for (const [time, value] of points) {
    if (value === null || value === undefined) { if (line.length) lines.push(line); line = []; }
    else line.push(`${x(time).toFixed(1)},${y(value).toFixed(1)}`);
  }
  if (line.length) lines.push(line);
  return h("div", { class: "chart card" },
    h("h3", {}, h("span", { class: "now" }, now), title),
    s("svg", { viewBox: "0 0 300 96", preserveAspectRatio: "none", role: "img", "aria-label": `${title}: now ${now}, at most ${show(most)}` },
      s("line", { class: "grid", x1: 0, x2: 300, y1: 90, y2: 90 }),
      s("line", { class: "grid", x1: 0, x2: 300, y1: 10, y2: 10 }),
      lines.map((points) => s("polyline", { class: "spark", points: points.join(" "), "vector-effect": "non-scaling-stroke" }))),
    h("span", { class: "quiet" }, `top line ${show(most)}, over ${spanText(last - first)}`));
}

function spanText(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
}

const WIDTH = 210;
const HEIGHT = 46;
const GAP = 14;

// Boxes in columns, joined by edges. Nodes: {id, column, title, note, state, href}; edges:
// {from, to, label, moving}.
export function topology(nodes, edges) {
  const columns = [[], [], []];
  nodes.forEach((node) => columns[node.column].push(node));
  const rows = Math.max(...columns.map((column) => column.length), 1);
  const height = rows * (HEIGHT + GAP) + GAP;
  const place = new Map();
  columns.forEach((column, c) => {
    const top = (height - column.length * (HEIGHT + GAP) + GAP) / 2;
    column.forEach((node, r) => place.set(node.id, [10 + c * 390, top + r * (HEIGHT + GAP)]));
  });
  const drawn = edges.filter((edge) => place.has(edge.from) && place.has(edge.to));
  return s("svg", { viewBox: `0 0 1010 ${height}`, width: 1010, height, role: "group", "aria-label": "Where changes flow" },
    drawn.map(({ from, to, label, moving }) => {
      const [x1, y1, x2, y2] = [place.get(from)[0] + WIDTH, place.get(from)[1] + HEIGHT / 2, place.get(to)[0], place.get(to)[1] + HEIGHT / 2];
      const middle = (x1 + x2) / 2;
      return s("g", {},
        s("path", { class: moving ? "edge moving" : "edge", d: `M${x1} ${y1} C${middle} ${y1} ${middle} ${y2} ${x2} ${y2}` }),
        s("text", { class: "small", x: x2 - 8, y: y2 - 6, "text-anchor": "end" }, label));
    }),
    nodes.map((node) => {
      const [x, y] = place.get(node.id);
      const title = s("text", { x: x + 12, y: y + 19 }, short(node.title, 26));
      return s("g", {},
        s("title", {}, `${node.title}: ${node.note}`),
        s("rect", { class: `box ${node.state || ""}`, x, y, width: WIDTH, height: HEIGHT, rx: 7 }),
        node.href ? s("a", { href: node.href }, title) : title,
        s("text", { class: "small", x: x + 12, y: y + 36 }, short(node.note, 32)));
    }));
}
