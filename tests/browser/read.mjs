// Reads views of a monitor in Debian's Chromium and prints what they say as one JSON object:
//   node read.mjs MODULES URL PICTURES VIEWS
// VIEWS is JSON, a list of {name, hash, press, await}: a view of the page, a button to press there
// (or none), and a text to wait for (or none). Each is read at desktop width, and looked at in light
// and dark, at phone and desktop width: errors on the console, what axe-core finds serious, whether
// it is wider than the screen, a picture.

import { createRequire } from "node:module";
import { mkdirSync, readFileSync } from "node:fs";

const [modules, url, pictures, wanted] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
mkdirSync(pictures, { recursive: true });

const found = { errors: [], serious: [], wide: [], foreign: [], views: {} };
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox"] });
const looks = [
  { look: "desktop-light", viewport: { width: 1280, height: 900 }, colorScheme: "light" },
  { look: "phone-dark", viewport: { width: 390, height: 844 }, colorScheme: "dark" },
];

function read() {
  const cells = (row) => [...row.querySelectorAll("td")].map((cell) => cell.textContent);
  const all = (selector) => [...document.querySelectorAll(selector)];
  return {
    state: document.querySelector("main h1 .badge")?.textContent ?? null,
    figures: Object.fromEntries(all(".figure").map((one) => [one.querySelector("dt").textContent, one.querySelector("dd").firstChild.textContent])),
    tables: Object.fromEntries(all("main .scroll").filter((one) => one.querySelector("tbody")).map((one) => [one.getAttribute("aria-label"), [...one.querySelectorAll("tbody tr")].map(cells)])),
    legs: all(".legs li").map((leg) => leg.textContent),
    cards: all(".card.stored, .card.error, .card.reason").map((card) => card.textContent),
  };
}

for (const { look, ...options } of looks) {
  // The page's policy forbids what axe needs to be put in; look.mjs uses the page under it.
  const context = await browser.newContext({ ...options, bypassCSP: true });
  const page = await context.newPage();
  page.on("console", (message) => { if (["error", "warning"].includes(message.type())) found.errors.push(message.text()); });
  page.on("pageerror", (error) => found.errors.push(String(error)));
  page.on("request", (request) => { if (!request.url().startsWith(url)) found.foreign.push(request.url()); });
  page.on("dialog", (dialog) => { found.errors.push(`a script ran: ${dialog.message()}`); dialog.dismiss(); });
  for (const view of JSON.parse(wanted)) {
    await page.goto(`${url}/${view.hash}`);
    await page.waitForSelector("main h1");
    const first = await page.textContent("#node");
    await page.waitForFunction((first) => document.getElementById("node").textContent !== first, first);
    if (view.press) await page.getByRole("button", { name: view.press, exact: true }).click();
    if (view.await) await page.waitForFunction((text) => document.querySelector("main").textContent.includes(text), view.await);
    if (look === looks[0].look) found.views[view.name] = await page.evaluate(read);
    await page.evaluate(axe);
    const { violations } = await page.evaluate(() => globalThis.axe.run());
    for (const violation of violations.filter((v) => ["serious", "critical"].includes(v.impact))) {
      found.serious.push(`${view.name}-${look}: ${violation.id}: ${violation.nodes.map((node) => node.html).join(" | ").slice(0, 400)}`);
    }
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    if (wide > 0) found.wide.push(`${view.name}-${look}: ${wide} pixels`);
    await page.screenshot({ path: `${pictures}/${view.name}-${look}.png`, fullPage: true });
  }
  await context.close();
}
await browser.close();
console.log(JSON.stringify(found));
