// Looks at a monitor in Debian's Chromium and prints what it found as one JSON object:
//   node look.mjs MODULES URL PICTURES SUBSCRIPTION PUBLICATION
// MODULES has playwright-core and axe-core. Pictures go to the folder PICTURES.
//
// On every view, at phone and desktop width, light and dark: errors on the console, what axe-core
// finds serious, whether the page is wider than the screen. Then the page is used by keyboard.

import { createRequire } from "node:module";
import { mkdirSync, readFileSync } from "node:fs";

const [modules, url, pictures, subscription, publication] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");
mkdirSync(pictures, { recursive: true });

const found = { errors: [], serious: [], wide: [], foreign: [], figures: {}, overview: [] };
const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox"] });
const views = { overview: "#/", subscription: `#/subscription/${encodeURIComponent(subscription)}`, publication: `#/publication/${encodeURIComponent(publication)}` };
const widths = { phone: { width: 390, height: 844 }, desktop: { width: 1280, height: 900 } };

async function open(options) {
  // The page's policy forbids what axe needs to be put in; it is not what is looked at here.
  const context = await browser.newContext({ ...options, bypassCSP: true });
  const page = await context.newPage();
  page.on("console", (message) => { if (["error", "warning"].includes(message.type())) found.errors.push(message.text()); });
  page.on("pageerror", (error) => found.errors.push(String(error)));
  page.on("request", (request) => { if (!request.url().startsWith(url)) found.foreign.push(request.url()); });
  page.on("dialog", (dialog) => { found.errors.push(`a script ran: ${dialog.message()}`); dialog.dismiss(); });
  return page;
}

async function settle(page, hash) {
  await page.goto(`${url}/${hash}`);
  await page.waitForSelector("main h1");
  // The second look brings rates.
  const first = await page.textContent("#node");
  await page.waitForFunction((first) => document.getElementById("node").textContent !== first, first);
}

for (const [size, viewport] of Object.entries(widths)) {
  for (const colorScheme of ["light", "dark"]) {
    const page = await open({ viewport, colorScheme });
    for (const [view, hash] of Object.entries(views)) {
      const name = `${view}-${size}-${colorScheme}`;
      await settle(page, hash);
      await page.evaluate(axe);
      const { violations } = await page.evaluate(() => globalThis.axe.run());
      for (const violation of violations.filter((v) => ["serious", "critical"].includes(v.impact))) {
        found.serious.push(`${name}: ${violation.id}: ${violation.nodes.map((node) => node.html).join(" | ").slice(0, 400)}`);
      }
      const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      if (wide > 0) found.wide.push(`${name}: ${wide} pixels`);
      await page.screenshot({ path: `${pictures}/${name}.png`, fullPage: true });
    }
    await page.context().close();
  }
}

// What is said, and what can be done by keyboard alone, under the page's own policy.
const context = await browser.newContext({ viewport: widths.desktop });
const page = await context.newPage();
page.on("console", (message) => { if (message.type() === "error") found.errors.push(message.text()); });
page.on("pageerror", (error) => found.errors.push(String(error)));
const figures = () => page.$$eval(".figure", (all) => Object.fromEntries(all.map((one) => [one.querySelector("dt").textContent, one.querySelector("dd").firstChild.textContent])));
await settle(page, views.overview);
found.overview = await page.$$eval("main td:first-child", (cells) => cells.map((cell) => cell.textContent));
await settle(page, views.subscription);
found.figures = await figures();
found.state = await page.textContent("main h1 .badge");
const press = async (label) => {
  for (let tabs = 0; tabs < 60; tabs += 1) {
    await page.keyboard.press("Tab");
    const text = await page.evaluate(() => document.activeElement.textContent);
    if (text === label) { await page.keyboard.press("Enter"); return; }
  }
  throw new Error(`${label} cannot be reached by keyboard`);
};
const confirm = async () => {
  await page.focus("#dialog-go");
  await page.keyboard.press("Enter");
  await page.waitForFunction(() => !["", "under way …"].includes(document.getElementById("dialog-outcome").textContent));
  const outcome = await page.textContent("#dialog-outcome");
  await page.keyboard.press("Escape");
  return outcome;
};
const other = ["paused", "stopped"].includes(found.state) ? "Resume" : "Pause";
await press(other);
await page.screenshot({ path: `${pictures}/dialog-desktop-light.png` });
found.outcome = await confirm();
await page.waitForFunction((before) => document.querySelector("main h1 .badge").textContent !== before, found.state);
found.after = await page.textContent("main h1 .badge");
await browser.close();
console.log(JSON.stringify(found));
