"use strict";
// The data of the page, and what makes elements of it. All text of a run is set as text, never as markup.

const byId = (id) => document.getElementById(id);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// element("td", {class: "number"}, "1") or with nodes; what is null or false is left out.
function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "onclick") made.addEventListener("click", value);
    else if (value !== null && value !== false) made.setAttribute(key, value);
  }
  made.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

// What ci/page/packed.py wrote.
async function unpacked(node) {
  const bytes = Uint8Array.from(atob(node.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).json();
}

let index; // ci/page/build.py: Index
let cells;
let numbers;
async function load() {
  index = await unpacked(byId("index"));
  cells = index.cells.map(([id, verdict, text, plots, points]) => {
    const [backend, stack, job] = id.split("/", 3);
    return { id, verdict, text, plots, points, backend, stack, job, name: id.split("/").slice(3).join("/") };
  });
  numbers = new Map(cells.map((cell, number) => [cell.id, number]));
}

const blocks = { cells: all(".cells-packed"), plots: all(".plots-packed") };
const opened = new Map();
async function item(kind, number) {
  const node = blocks[kind][Math.floor(number / index.block)];
  if (!opened.has(node)) opened.set(node, unpacked(node));
  return (await opened.get(node))[number % index.block];
}

function mark(verdict, briefly = false) {
  const [word, kind, sign] = index.verdicts[verdict];
  return element(
    "span",
    { class: `verdict ${kind}` },
    element("span", { "aria-hidden": "true" }, sign),
    briefly ? element("span", { class: "hidden" }, word) : ` ${word}`,
  );
}
const figure = (value) =>
  typeof value === "number"
    ? String(Number(value.toPrecision(6)))
    : value === null || value === undefined
      ? "None"
      : value;
const small = (value) => (typeof value === "number" ? value.toPrecision(2).replace(/\.?0+(e|$)/, "$1") : (value ?? ""));
const address = (id) =>
  `#cell=${encodeURIComponent(id).replace(/%2F/g, "/").replace(/%2B/g, "+").replace(/%3D/g, "=").replace(/%2C/g, ",")}`;
const when = (run) => index.runs[run].started.slice(0, 16).replace("T", " ");
const seconds = (value) => (typeof value === "number" ? `${value.toFixed(1)} s` : "");
const megabytes = (value) => (typeof value === "number" ? `${Math.round(value)} MB` : "");
const link = (cell) => element("a", { href: address(cell.id) }, cell.id);

function table(heads, rows, name) {
  const body = rows.map((row) =>
    element(
      "tr",
      {},
      row.map((value, at) =>
        value instanceof Element && (value.tagName === "TD" || value.tagName === "TH")
          ? value
          : element(at ? "td" : "th", at ? {} : { scope: "row" }, value ?? ""),
      ),
    ),
  );
  return element(
    "div",
    { class: "scroll", role: "region", "aria-label": name, tabindex: "0" },
    element(
      "table",
      { class: "plain" },
      element(
        "thead",
        {},
        element(
          "tr",
          {},
          heads.map((head) => element("th", { scope: "col" }, head)),
        ),
      ),
      element("tbody", {}, body),
    ),
  );
}
const right = (value, kind = "") => element("td", { class: `number ${kind}` }, value);
