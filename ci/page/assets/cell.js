"use strict";
// A cell: opened by its address, in a dialog.

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
  setTimeout(() => {
    button.textContent = before;
  }, 2000);
}
const copyButton = (word, text) => {
  const button = element(
    "button",
    { type: "button", class: "button", "aria-live": "polite", onclick: () => copy(text(), button) },
    word,
  );
  return button;
};

const dialog = byId("cell");
const section = (title, ...content) =>
  content.flat().some(Boolean) ? element("section", {}, element("h3", {}, title), ...content) : null;
const facts = (pairs) =>
  element(
    "dl",
    { class: "facts" },
    pairs
      .filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]),
  );

function checks(record) {
  const rows = record.steps.flatMap((step, at) =>
    (step.checks ?? []).map((check) => {
      const judged = check.ok === null ? "not judged" : check.ok ? "holds" : "fails";
      const why =
        check.ok === null
          ? (check.reason ?? "")
          : check.defects?.length
            ? `as ${check.defects.join(", ")}${check.predicted === undefined ? "" : `, predicted ${figure(check.predicted)}`}`
            : (check.reason ?? "");
      const blank = check.ok === null;
      const ratio =
        typeof check.value === "number" && typeof check.expected === "number" && check.expected !== 0
          ? figure(Number((check.value / check.expected).toPrecision(5)))
          : "";
      return [
        String(at + 1),
        element("td", {}, check.name),
        element("td", { class: check.ok === false ? "fails" : "" }, judged),
        right(blank ? "" : figure(check.value)),
        right(blank ? "" : figure(check.expected)),
        right(ratio),
        right(small(check.error)),
        right(small(check.tolerance)),
        why,
      ];
    }),
  );
  return rows.length
    ? table(["step", "check", "result", "found", "expected", "ratio", "error", "allowed", "why"], rows, "Checks")
    : null;
}
function tensors(record) {
  const bad = record.steps.findIndex((step) => (step.checks ?? []).some((check) => check.ok === false));
  return record.steps
    .map((step, at) =>
      step.tensors?.length
        ? element(
            "details",
            { open: at === Math.max(bad, 0) && bad >= 0 ? "" : null },
            element("summary", {}, `step ${at + 1}, worst first`),
            table(
              ["tensor", "gradient error", "update error"],
              step.tensors.map((each) => [
                each.name,
                right(small(each.gradient_error)),
                right(small(each.update_error)),
              ]),
              `Worst tensors of step ${at + 1}`,
            ),
          )
        : null,
    )
    .filter(Boolean);
}
function scale(record) {
  const told = record.steps.some(
    (step) =>
      step.loss_scale_expected !== undefined || step.overflow || step.loss_scale_before !== step.loss_scale_after,
  );
  return told
    ? table(
        ["step", "used by backward", "after the step", "expected", "overflow"],
        record.steps.map((step, at) => [
          String(at + 1),
          right(figure(step.loss_scale_before)),
          right(figure(step.loss_scale_after)),
          right(figure(step.loss_scale_expected)),
          step.overflow ? "yes" : "no",
        ]),
        "Loss scale",
      )
    : null;
}
function defect(name) {
  const known = index.ledger[name];
  if (!known) return element("li", {}, element("code", {}, name));
  return element(
    "li",
    {},
    element("code", {}, name),
    `: ${known.title}. `,
    Object.entries(known.affects).map(([package_, bounds]) => `${package_} ${bounds}. `),
    known.links.map(([to, text]) => [to ? element("a", { href: to, rel: "noreferrer" }, text) : text, " "]),
    known.advice && element("div", {}, `Advice: ${known.advice}.`),
    known.correction &&
      element(
        "div",
        {},
        "Makes it right: ",
        element("code", {}, known.correction),
        " of ci/corrections; --corrections both shows it.",
      ),
  );
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
  return element(
    "figure",
    {},
    element("figcaption", {}, drawn.title),
    svg,
    element("ul", { class: "key" }, key),
    drawn.missing.length ? element("p", { class: "why" }, `Not on the axis: ${drawn.missing.join("; ")}.`) : null,
  );
}
function past(cell) {
  return table(
    ["run", "release", "verdict", "norm reported / true", "duration", "peak memory"],
    cell.points.map(([run, verdict, ratio, duration, memory]) => {
      const pins = index.runs[run].stacks[cell.stack] ?? {};
      return [
        when(run),
        `DeepSpeed ${pins.deepspeed ?? "?"}, transformers ${pins.transformers ?? "?"}`,
        element("td", {}, mark(verdict)),
        right(ratio === null ? "" : figure(ratio)),
        right(seconds(duration)),
        right(megabytes(memory)),
      ];
    }),
    "History",
  );
}

async function show(number) {
  const cell = cells[number];
  const wanted = location.hash;
  const detail = await item("cells", number);
  const plots = await Promise.all(cell.plots.map((each) => item("plots", each)));
  if (location.hash !== wanted) return; // another was asked for meanwhile
  const record = { steps: [], defects: [], fixed: [], corrections: [], shims: [], notes: [], ...detail.cell };
  const run = index.runs[detail.run];
  const failed = record.exception;
  const elsewhere = cells.filter(
    (other) =>
      other !== cell && other.job === cell.job && (other.name === cell.name || other.name === `${cell.name}+corrected`),
  );
  const body = [
    element(
      "div",
      { class: "top" },
      element("h2", { id: "cell-title" }, mark(cell.verdict), " ", cell.id),
      copyButton("Copy link", () => location.href),
      element("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Close"),
    ),
    record.reason && element("p", {}, record.reason),
    failed &&
      element(
        "section",
        {},
        element(
          "p",
          { class: "fails" },
          `rank ${failed.rank ?? 0}${failed.where ? ` in ${failed.where}` : ""}: ${failed.type}: ${failed.message}`,
        ),
        failed.user_frame && element("p", {}, "at ", element("code", {}, failed.user_frame)),
        failed.remedy && element("p", {}, "write instead: ", element("code", {}, failed.remedy)),
      ),
    section(
      "Repeat it",
      element(
        "div",
        { class: "command" },
        element("code", {}, record.command),
        copyButton("Copy command", () => record.command),
      ),
    ),
    section("Known defects", record.defects.length ? element("ul", {}, record.defects.map(defect)) : null),
    section("Claimed, and not there", record.fixed.length ? element("ul", {}, record.fixed.map(defect)) : null),
    section("Over steps and runs", plots.length ? element("div", { class: "plots" }, plots.map(plot)) : null),
    section("What was checked", checks(record)),
    section("Loss scale", scale(record)),
    section("Worst tensors", tensors(record)),
    section(
      "Consistency",
      record.steps.some((step) => step.consistency?.length)
        ? element(
            "ul",
            {},
            record.steps.flatMap((step, at) =>
              (step.consistency ?? []).map((line) => element("li", {}, `step ${at + 1}: ${line}`)),
            ),
          )
        : null,
    ),
    section(
      "Notes",
      record.notes.length
        ? element(
            "ul",
            {},
            record.notes.map((note) => element("li", {}, note)),
          )
        : null,
    ),
    section(
      "The case, its pins and the hardware",
      facts([
        ...Object.entries(record.case).map(([key, value]) => [key, String(value)]),
        [
          "pins",
          Object.entries(run.stacks[cell.stack] ?? {})
            .map((pin) => pin.join(" "))
            .join(", "),
        ],
        ["corrections", record.corrections.join(", ")],
        ["optimizer wrapper", record.wrapper],
        ["adapter", record.adapter],
        ["DeepSpeed configuration", record.ds_config],
        ["world size", String(record.world_size)],
        ["duration", seconds(record.duration_s)],
        ["peak memory of a rank", megabytes(record.peak_memory_mb)],
        [
          "hardware",
          Object.entries(run.hardware)
            .map(([key, value]) => `${key.replace(/_/g, " ")} ${value}`)
            .join(", "),
        ],
        ["where", [run.backend, run.runtime, run.image].filter(Boolean).join(", ")],
        ["run", `${when(detail.run)}: ${run.command}`],
        ["commit", run.commit],
        [
          "shims",
          record.shims.length
            ? element(
                "ul",
                {},
                record.shims.map((shim) => element("li", {}, `${shim.name}: ${shim.reason}`)),
              )
            : "",
        ],
      ]),
    ),
    section(
      "The same case elsewhere",
      elsewhere.length
        ? element(
            "ul",
            { class: "list" },
            elsewhere.map((other) => element("li", {}, mark(other.verdict), " ", link(other))),
          )
        : null,
    ),
    section("Its history", past(cell)),
    detail.stacks &&
      section(
        "Where each rank was",
        detail.stacks.map((each) => [element("p", {}, each.rank), element("pre", { tabindex: "0" }, each.text)]),
      ),
    section(
      "Log",
      detail.log
        ? element(
            "p",
            {},
            element("a", { href: detail.log }, "the whole log"),
            ", beside this page",
            detail.cut && "; here is its end",
          )
        : null,
      detail.tail ? element("pre", { tabindex: "0" }, detail.tail) : null,
    ),
  ];
  byId("cell-body").replaceChildren(...body.filter(Boolean));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}

async function follow() {
  const found = /^#cell=(.*)$/.exec(location.hash);
  if (!found) {
    if (dialog.open) dialog.close();
    return;
  }
  let id = found[1];
  try {
    id = decodeURIComponent(id);
  } catch {
    /* not ours: looked up as it stands */
  }
  const number = numbers.get(id);
  if (number === undefined) {
    byId("cell-body").replaceChildren(
      element(
        "div",
        { class: "top" },
        element("h2", { id: "cell-title" }, `No cell ${id} in this report`),
        element("button", { type: "button", class: "button", onclick: () => dialog.close() }, "Close"),
      ),
    );
    if (!dialog.open) dialog.showModal();
    return;
  }
  await show(number);
}

function setUpCell() {
  dialog.addEventListener("close", () => {
    if (location.hash.startsWith("#cell=")) history.replaceState(null, "", location.pathname + location.search);
  });
  window.addEventListener("hashchange", follow);
}
