"use strict";
// The page's behaviour. All text of a run is set as text, never as markup; plots were drawn when the page was made.
(async () => {
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

  const BLOCK = 32;
  const blocks = { cells: all(".cells-packed"), plots: all(".plots-packed") };
  const opened = new Map();
  async function item(kind, number) {
    const node = blocks[kind][Math.floor(number / BLOCK)];
    if (!opened.has(node)) opened.set(node, unpacked(node));
    return (await opened.get(node))[number % BLOCK];
  }

  const index = await unpacked(byId("index"));
  const cells = index.cells.map(([id, verdict, text, plots, points]) => {
    const [backend, stack, job] = id.split("/", 3);
    return { id, verdict, text, plots, points, backend, stack, job, name: id.split("/").slice(3).join("/") };
  });
  const numbers = new Map(cells.map((cell, number) => [cell.id, number]));

  function mark(verdict, briefly = false) {
    const [word, kind, sign] = index.verdicts[verdict];
    return element("span", { class: `verdict ${kind}` }, element("span", { "aria-hidden": "true" }, sign),
      briefly ? element("span", { class: "hidden" }, word) : ` ${word}`);
  }
  const figure = (value) => typeof value === "number" ? String(Number(value.toPrecision(6))) : value === null || value === undefined ? "None" : value;
  const small = (value) => typeof value === "number" ? value.toPrecision(2).replace(/\.?0+(e|$)/, "$1") : value ?? "";
  const address = (id) => `#cell=${encodeURIComponent(id).replace(/%2F/g, "/").replace(/%2B/g, "+").replace(/%3D/g, "=").replace(/%2C/g, ",")}`;
  const when = (run) => index.runs[run].started.slice(0, 16).replace("T", " ");
  const seconds = (value) => typeof value === "number" ? `${value.toFixed(1)} s` : "";
  const megabytes = (value) => typeof value === "number" ? `${Math.round(value)} MB` : "";
  const link = (cell) => element("a", { href: address(cell.id) }, cell.id);

  function table(heads, rows, name) {
    const body = rows.map((row) => element("tr", {}, row.map((value, at) =>
      value instanceof Element && (value.tagName === "TD" || value.tagName === "TH") ? value
        : element(at ? "td" : "th", at ? {} : { scope: "row" }, value ?? ""))));
    return element("div", { class: "scroll", role: "region", "aria-label": name, tabindex: "0" },
      element("table", { class: "plain" }, element("thead", {}, element("tr", {}, heads.map((head) => element("th", { scope: "col" }, head)))),
        element("tbody", {}, body)));
  }
  const right = (value, kind = "") => element("td", { class: `number ${kind}` }, value);

  // Tabs
  const tabs = all("[role=tab]");
  const prepare = { time: showTime };
  function choose(tab, focus) {
    for (const each of tabs) {
      const chosen = each === tab;
      each.setAttribute("aria-selected", chosen);
      each.tabIndex = chosen ? 0 : -1;
      byId(each.getAttribute("aria-controls")).hidden = !chosen;
    }
    prepare[tab.getAttribute("aria-controls")]?.();
    if (focus) tab.focus();
  }
  tabs.forEach((tab, at) => {
    tab.addEventListener("click", () => choose(tab, false));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose(tabs[(to + tabs.length) % tabs.length], true);
    });
  });

  // The grid: one cell is in the tab order, arrow keys move it.
  const grids = all("table.cells").map((node) => {
    const rows = all("tbody tr", node).map((row) => ({ node: row, cells: [...row.cells].slice(1).map((td) => ({ td, link: td.firstElementChild?.tagName === "A" ? td.firstElementChild : null })) }));
    return { node, section: node.closest(".job"), heads: [...node.tHead.rows[0].cells].slice(1), rows };
  });
  let current = null;
  function reach(next, focus) {
    if (current) current.tabIndex = -1;
    current = next;
    if (!current) return;
    current.tabIndex = 0;
    if (focus) current.focus();
  }
  const usable = (cell) => cell.link && !cell.td.hidden && !cell.td.parentElement.hidden && !cell.td.classList.contains("out");
  function firstCell() {
    for (const grid of grids) for (const row of grid.rows) for (const cell of row.cells) if (usable(cell)) return cell.link;
    return null;
  }
  function along(cells, from, step) {
    for (let at = from + step; at >= 0 && at < cells.length; at += step) if (usable(cells[at])) return cells[at].link;
    return null;
  }
  document.querySelector("#grid").addEventListener("keydown", (event) => {
    if (!(event.target instanceof Element) || !event.target.matches(".cells td a")) return;
    const td = event.target.parentElement;
    const at = grids.findIndex((each) => each.node.contains(td));
    const grid = grids[at];
    const row = grid.rows.findIndex((each) => each.node === td.parentElement);
    const column = grid.rows[row].cells.findIndex((each) => each.td === td);
    const across = grid.rows[row].cells;
    const down = grids.flatMap((each) => each.rows.map((each_row) => each_row.cells[Math.min(column, each_row.cells.length - 1)]));
    const here = grids.slice(0, at).reduce((sum, each) => sum + each.rows.length, 0) + row;
    const next = {
      ArrowRight: () => along(across, column, 1), ArrowLeft: () => along(across, column, -1),
      ArrowDown: () => along(down, here, 1), ArrowUp: () => along(down, here, -1),
      Home: () => along(across, -1, 1), End: () => along(across, across.length, -1),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    const found = next();
    if (found) reach(found, true);
  });
  document.querySelector("#grid").addEventListener("focusin", (event) => {
    if (event.target.matches?.(".cells td a")) reach(event.target, false);
  });

  // Filter
  const searched = cells.map((cell) => `${cell.id} ${index.verdicts[cell.verdict][0]} ${cell.text} ${Object.entries(index.runs[cell.points.at(-1)[0]].stacks[cell.stack] ?? {}).map((pin) => pin.join(" ")).join(" ")}`.toLowerCase());
  function filter() {
    const words = byId("filter-text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kinds = new Set(all("input[name=verdict]:checked").map((box) => box.value));
    const shown = cells.map((cell, number) => kinds.has(index.verdicts[cell.verdict][1]) && words.every((word) => searched[number].includes(word)));
    for (const grid of grids) {
      const used = grid.heads.map(() => false);
      for (const row of grid.rows) {
        let some = false;
        row.cells.forEach((cell, column) => {
          const inside = cell.link !== null && shown[Number(cell.link.dataset.n)];
          cell.td.classList.toggle("out", cell.link !== null && !inside);
          if (inside) { used[column] = true; some = true; }
        });
        row.node.hidden = !some;
      }
      grid.heads.forEach((head, column) => { head.hidden = !used[column]; });
      for (const row of grid.rows) row.cells.forEach((cell, column) => { cell.td.hidden = !used[column]; });
      grid.section.hidden = !used.some(Boolean);
    }
    const count = shown.filter(Boolean).length;
    byId("filter-said").textContent = count === cells.length ? `${count} cells` : `${count} of ${cells.length} cells`;
    reach(firstCell(), false);
  }
  let waiting = 0;
  byId("filter-text").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(filter, 120); });
  all("input[name=verdict]").forEach((box) => box.addEventListener("change", filter));
  all("form").forEach((form) => form.addEventListener("submit", (event) => event.preventDefault()));

  // Copying: the clipboard where the browser lets us, else a selection.
  async function copy(text, button) {
    let done = true;
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = element("textarea", { class: "hidden", readonly: "" });
      area.value = text;
      button.after(area);
      area.select();
      done = document.execCommand("copy");
      area.remove();
      button.focus();
    }
    const before = button.dataset.word ?? button.textContent;
    button.dataset.word = before;
    button.textContent = done ? "Copied" : "Select and copy it by hand";
    setTimeout(() => { button.textContent = before; }, 2000);
  }
  const copyButton = (word, text) => {
    const button = element("button", { type: "button", class: "button", "aria-live": "polite", onclick: () => copy(text(), button) }, word);
    return button;
  };

  // A cell
  const dialog = byId("cell");
  const section = (title, ...content) => content.flat().some(Boolean) ? element("section", {}, element("h3", {}, title), ...content) : null;
  const facts = (pairs) => element("dl", { class: "facts" }, pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));

  function checks(record) {
    const rows = record.steps.flatMap((step, at) => (step.checks ?? []).map((check) => {
      const judged = check.ok === null ? "not judged" : check.ok ? "holds" : "fails";
      const why = check.ok === null ? check.reason ?? "" : check.defects?.length ? `as ${check.defects.join(", ")}${check.predicted === undefined ? "" : `, predicted ${figure(check.predicted)}`}` : check.reason ?? "";
      const blank = check.ok === null;
      const ratio = typeof check.value === "number" && typeof check.expected === "number" && check.expected !== 0 ? figure(Number((check.value / check.expected).toPrecision(5))) : "";
      return [String(at + 1), element("td", {}, check.name), element("td", { class: check.ok === false ? "fails" : "" }, judged), right(blank ? "" : figure(check.value)), right(blank ? "" : figure(check.expected)), right(ratio), right(small(check.error)), right(small(check.tolerance)), why];
    }));
    return rows.length ? table(["step", "check", "result", "found", "expected", "ratio", "error", "allowed", "why"], rows, "Checks") : null;
  }
  function tensors(record) {
    const bad = record.steps.findIndex((step) => (step.checks ?? []).some((check) => check.ok === false));
    return record.steps.map((step, at) => step.tensors?.length ? element("details", { open: at === Math.max(bad, 0) && bad >= 0 ? "" : null },
      element("summary", {}, `step ${at + 1}, worst first`),
      table(["tensor", "gradient error", "update error"], step.tensors.map((each) => [each.name, right(small(each.gradient_error)), right(small(each.update_error))]), `Worst tensors of step ${at + 1}`)) : null).filter(Boolean);
  }
  function scale(record) {
    const told = record.steps.some((step) => step.loss_scale_expected !== undefined || step.overflow || step.loss_scale_before !== step.loss_scale_after);
    return told ? table(["step", "used by backward", "after the step", "expected", "overflow"], record.steps.map((step, at) => [String(at + 1), right(figure(step.loss_scale_before)), right(figure(step.loss_scale_after)), right(figure(step.loss_scale_expected)), step.overflow ? "yes" : "no"]), "Loss scale") : null;
  }
  function defect(name) {
    const known = index.ledger[name];
    if (!known) return element("li", {}, element("code", {}, name));
    return element("li", {}, element("code", {}, name), `: ${known.title}. `,
      Object.entries(known.affects).map(([package_, bounds]) => `${package_} ${bounds}. `),
      known.links.map(([to, text]) => [to ? element("a", { href: to, rel: "noreferrer" }, text) : text, " "]),
      known.advice && element("div", {}, `Advice: ${known.advice}.`),
      known.correction && element("div", {}, "Makes it right: ", element("code", {}, known.correction), " of ci/corrections; --corrections both shows it."));
  }
  function plot(drawn) {
    const svg = document.importNode(new DOMParser().parseFromString(drawn.svg, "image/svg+xml").documentElement, true);
    svg.setAttribute("class", "plot");
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", `${drawn.title}; the numbers are in the table below`);
    const key = drawn.legend.map(([kind, name]) => {
      const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      line.setAttribute("viewBox", "0 0 28 10");
      line.setAttribute("aria-hidden", "true");
      path.setAttribute("d", "M0,5 H28");
      path.setAttribute("class", kind);
      line.append(path);
      return element("li", {}, line, name);
    });
    return element("figure", {}, element("figcaption", {}, drawn.title), svg, element("ul", { class: "key" }, key),
      drawn.missing.length ? element("p", { class: "why" }, `Not on the axis: ${drawn.missing.join("; ")}.`) : null);
  }
  function past(cell) {
    return table(["run", "release", "verdict", "norm reported / true", "duration", "peak memory"], cell.points.map(([run, verdict, ratio, duration, memory]) => {
      const pins = index.runs[run].stacks[cell.stack] ?? {};
      return [when(run), `DeepSpeed ${pins.deepspeed ?? "?"}, transformers ${pins.transformers ?? "?"}`, element("td", {}, mark(verdict)), right(ratio === null ? "" : figure(ratio)), right(seconds(duration)), right(megabytes(memory))];
    }), "History");
  }

  async function show(number) {
    const cell = cells[number];
    const detail = await item("cells", number);
    const plots = await Promise.all(cell.plots.map((each) => item("plots", each)));
    const record = { steps: [], defects: [], fixed: [], corrections: [], shims: [], notes: [], ...detail.cell };
    const run = index.runs[detail.run];
    const failed = record.exception;
    const elsewhere = cells.filter((other) => other !== cell && other.job === cell.job && (other.name === cell.name || other.name === `${cell.name}+corrected`));
    const body = [
      element("div", { class: "top" }, element("h2", { id: "cell-title" }, mark(cell.verdict), " ", cell.id),
        copyButton("Copy link", () => location.href), element("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Close")),
      record.reason && element("p", {}, record.reason),
      failed && element("section", {}, element("p", { class: "fails" }, `rank ${failed.rank ?? 0}${failed.where ? ` in ${failed.where}` : ""}: ${failed.type}: ${failed.message}`),
        failed.user_frame && element("p", {}, "at ", element("code", {}, failed.user_frame)), failed.remedy && element("p", {}, "write instead: ", element("code", {}, failed.remedy))),
      section("Repeat it", element("div", { class: "command" }, element("code", {}, record.command), copyButton("Copy command", () => record.command))),
      section("Known defects", record.defects.length ? element("ul", {}, record.defects.map(defect)) : null),
      section("Claimed, and not there", record.fixed.length ? element("ul", {}, record.fixed.map(defect)) : null),
      section("Over steps", plots.length ? element("div", { class: "plots" }, plots.map(plot)) : null),
      section("What was checked", checks(record)),
      section("Loss scale", scale(record)),
      section("Worst tensors", tensors(record)),
      section("Consistency", record.steps.some((step) => step.consistency?.length) ? element("ul", {}, record.steps.flatMap((step, at) => (step.consistency ?? []).map((line) => element("li", {}, `step ${at + 1}: ${line}`)))) : null),
      section("Notes", record.notes.length ? element("ul", {}, record.notes.map((note) => element("li", {}, note))) : null),
      section("The case, its pins and the hardware", facts([
        ...Object.entries(record.case).map(([key, value]) => [key, String(value)]),
        ["pins", Object.entries(run.stacks[cell.stack] ?? {}).map((pin) => pin.join(" ")).join(", ")],
        ["corrections", record.corrections.join(", ")], ["optimizer wrapper", record.wrapper], ["adapter", record.adapter], ["DeepSpeed configuration", record.ds_config],
        ["world size", String(record.world_size)], ["duration", seconds(record.duration_s)], ["peak memory of a rank", megabytes(record.peak_memory_mb)],
        ["hardware", Object.entries(run.hardware).map(([key, value]) => `${key.replace(/_/g, " ")} ${value}`).join(", ")],
        ["where", [run.backend, run.runtime, run.image].filter(Boolean).join(", ")], ["run", `${when(detail.run)}: ${run.command}`], ["commit", run.commit],
        ["shims", record.shims.length ? element("ul", {}, record.shims.map((shim) => element("li", {}, `${shim.name}: ${shim.reason}`))) : ""],
      ])),
      section("The same case elsewhere", elsewhere.length ? element("ul", { class: "list" }, elsewhere.map((other) => element("li", {}, mark(other.verdict), " ", link(other)))) : null),
      section("Its history", past(cell)),
      detail.stacks && section("Where each rank was", detail.stacks.map((each) => [element("p", {}, each.rank), element("pre", { tabindex: "0" }, each.text)])),
      section("Log", detail.log ? element("p", {}, element("a", { href: detail.log }, "the whole log"), ", beside this page", detail.cut && "; here is its end") : null, detail.tail ? element("pre", { tabindex: "0" }, detail.tail) : null),
    ];
    byId("cell-body").replaceChildren(...body.filter(Boolean));
    if (!dialog.open) dialog.showModal();
    dialog.scrollTop = 0;
  }

  let opener = null;
  async function follow() {
    const found = /^#cell=(.*)$/.exec(location.hash);
    if (!found) { if (dialog.open) dialog.close(); return; }
    let id = found[1];
    try { id = decodeURIComponent(id); } catch { /* not ours: looked up as it stands */ }
    const number = numbers.get(id);
    if (number === undefined) {
      byId("cell-body").replaceChildren(element("div", { class: "top" }, element("h2", { id: "cell-title" }, `No cell ${id} in this report`), element("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Close")));
      if (!dialog.open) dialog.showModal();
      return;
    }
    if (!dialog.open) opener = document.activeElement;
    await show(number);
  }
  dialog.addEventListener("close", () => {
    if (location.hash.startsWith("#cell=")) history.replaceState(null, "", location.pathname + location.search);
    opener?.focus?.();
  });
  window.addEventListener("hashchange", follow);

  // Over time: made when it is first looked at; a page of rows at a time.
  const PAGE = 200;
  let limit = PAGE;
  function showTime() {
    const onlyChanged = byId("time-changed").checked;
    const turns = (cell) => cell.points.some((point, at) => at > 0 && point[1] !== cell.points[at - 1][1]);
    const found = cells.filter((cell) => !onlyChanged || turns(cell)).sort((one, other) => Number(turns(other)) - Number(turns(one)));
    const ends = (cell, at, said) => {
      const values = cell.points.map((point) => point[at]).filter((value) => typeof value === "number");
      if (!values.length) return "";
      const [first, last] = [said(values[0]), said(values.at(-1))];
      return first === last ? first : `${first} → ${last}`;
    };
    const rows = found.slice(0, limit).map((cell) => [link(cell), element("td", {}, element("ul", { class: "marks" }, cell.points.map(([run, verdict, ratio]) => {
      const pins = index.runs[run].stacks[cell.stack] ?? {};
      const [word, kind, sign] = index.verdicts[verdict];
      const said = `${when(run)}, DeepSpeed ${pins.deepspeed ?? "?"}: ${word}${ratio === null ? "" : `, norm x${figure(ratio)}`}`;
      return element("li", { class: kind, title: said }, element("span", { "aria-hidden": "true" }, sign), element("span", { class: "hidden" }, said));
    }))), right(ends(cell, 2, figure)), right(ends(cell, 3, seconds)), right(ends(cell, 4, megabytes))]);
    const more = found.length > limit ? element("button", { type: "button", class: "button", onclick: () => { limit += PAGE; showTime(); } }, `Show more of ${found.length} cells`) : null;
    byId("time-table").replaceChildren(...[rows.length ? table(["cell", "verdicts, oldest first", "norm reported / true", "duration", "peak memory"], rows, "Cells over time").firstElementChild : element("p", {}, "No verdict changed."), more].filter(Boolean));
  }
  byId("time-changed").addEventListener("change", showTime);

  // Releases
  const parts = (version) => version.split(/[.+-]/).map(Number).filter((part) => !Number.isNaN(part));
  function compare(one, other) {
    const [left, right_] = [parts(one), parts(other)];
    for (let at = 0; at < Math.min(left.length, right_.length); at += 1) if (left[at] !== right_[at]) return left[at] - right_[at];
    return 0; // 0.18 stands for every 0.18.x
  }
  function filterReleases() {
    const [from, to, kind] = ["release-from", "release-to", "release-kind"].map((id) => byId(id).value.trim());
    const words = byId("release-case").value.toLowerCase().split(/\s+/).filter(Boolean);
    let count = 0;
    for (const node of all("table.releases")) {
      const columns = [...node.tHead.rows[0].cells].slice(1).map((head) => words.every((word) => head.dataset.case.toLowerCase().includes(word)));
      [...node.tHead.rows[0].cells].slice(1).forEach((head, at) => { head.hidden = !columns[at]; });
      for (const row of node.tBodies[0].rows) {
        const version = row.dataset.release;
        const tds = [...row.cells].slice(1);
        const unusable = tds[0]?.colSpan > 1;
        if (!unusable) tds.forEach((td, at) => { td.hidden = !columns[at]; });
        const behaves = !kind || tds.some((td) => !td.hidden && td.dataset.kind === kind);
        row.hidden = !(behaves && columns.some(Boolean) && (!from || compare(version, from) >= 0) && (!to || compare(version, to) <= 0));
        count += row.hidden ? 0 : 1;
      }
    }
    byId("release-said").textContent = `${count} releases`;
  }
  if (byId("release-from")) {
    ["release-from", "release-to", "release-case"].forEach((id) => byId(id).addEventListener("input", filterReleases));
    byId("release-kind").addEventListener("change", filterReleases);
  }

  filter();
  await follow();
  document.documentElement.dataset.ready = "yes";
})();
