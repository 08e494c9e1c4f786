"use strict";
// Over time: made when it is first looked at; a page of rows at a time.
const PAGE = 200;
let limit = PAGE;
function showTime() {
  const onlyChanged = byId("time-changed").checked;
  const turns = (cell) => cell.points.some((point, at) => at > 0 && point[1] !== cell.points[at - 1][1]);
  const found = cells
    .filter((cell) => !onlyChanged || turns(cell))
    .sort((one, other) => Number(turns(other)) - Number(turns(one)));
  const ends = (cell, at, said) => {
    const values = cell.points.map((point) => point[at]).filter((value) => typeof value === "number");
    if (!values.length) return "";
    const [first, last] = [said(values[0]), said(values.at(-1))];
    return first === last ? first : `${first} → ${last}`;
  };
  const rows = found.slice(0, limit).map((cell) => [
    link(cell),
    element(
      "td",
      {},
      element(
        "ul",
        { class: "marks" },
        cell.points.map(([run, verdict, ratio, took, memory]) => {
          const pins = index.runs[run].stacks[cell.stack] ?? {};
          const [word, kind, sign] = index.verdicts[verdict];
          const measured = [
            typeof ratio === "number" ? `norm x${figure(ratio)}` : "",
            seconds(took),
            megabytes(memory),
          ];
          const said = [`${when(run)}, DeepSpeed ${pins.deepspeed ?? "?"}: ${word}`, ...measured.filter(Boolean)].join(", ");
          return element(
            "li",
            { class: kind, title: said },
            element("span", { "aria-hidden": "true" }, sign),
            element("span", { class: "hidden" }, said),
          );
        }),
      ),
    ),
    right(ends(cell, 2, figure)),
    right(ends(cell, 3, seconds)),
    right(ends(cell, 4, megabytes)),
  ]);
  const more =
    found.length > limit
      ? element(
          "button",
          {
            type: "button",
            class: "button",
            onclick: () => {
              limit += PAGE;
              showTime();
            },
          },
          `Show more of ${found.length} cells`,
        )
      : null;
  byId("time-table").replaceChildren(
    ...[
      rows.length
        ? table(
            ["cell", "verdicts, oldest first", "norm reported / true", "duration", "peak memory"],
            rows,
            "Cells over time",
          ).firstElementChild
        : element("p", {}, "No verdict changed."),
      more,
    ].filter(Boolean),
  );
}

function setUpTime() {
  byId("time-changed").addEventListener("change", showTime);
}
