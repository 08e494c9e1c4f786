"use strict";
// The grid: one cell is in the tab order, arrow keys move it; and its filter.

const grids = all("table.cells").map((node) => {
  const rows = all("tbody tr", node).map((row) => ({
    node: row,
    cells: [...row.cells]
      .slice(1)
      .map((td) => ({ td, link: td.firstElementChild?.tagName === "A" ? td.firstElementChild : null })),
  }));
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
const usable = (cell) =>
  cell.link && !cell.td.hidden && !cell.td.parentElement.hidden && !cell.td.classList.contains("out");
function firstCell() {
  for (const grid of grids)
    for (const row of grid.rows) for (const cell of row.cells) if (usable(cell)) return cell.link;
  return null;
}
function along(cells, from, step) {
  for (let at = from + step; at >= 0 && at < cells.length; at += step) if (usable(cells[at])) return cells[at].link;
  return null;
}

let searched; // of each cell, what the search looks at
function filter() {
  const words = byId("filter-text").value.toLowerCase().split(/\s+/).filter(Boolean);
  const kinds = new Set(all("input[name=verdict]:checked").map((box) => box.value));
  const shown = cells.map(
    (cell, number) =>
      kinds.has(index.verdicts[cell.verdict][1]) && words.every((word) => searched[number].includes(word)),
  );
  for (const grid of grids) {
    const used = grid.heads.map(() => false);
    for (const row of grid.rows) {
      let some = false;
      row.cells.forEach((cell, column) => {
        const inside = cell.link !== null && shown[Number(cell.link.dataset.n)];
        cell.td.classList.toggle("out", cell.link !== null && !inside);
        if (inside) {
          used[column] = true;
          some = true;
        }
      });
      row.node.hidden = !some;
    }
    grid.heads.forEach((head, column) => {
      head.hidden = !used[column];
    });
    for (const row of grid.rows)
      row.cells.forEach((cell, column) => {
        cell.td.hidden = !used[column];
      });
    grid.section.hidden = !used.some(Boolean);
  }
  const count = shown.filter(Boolean).length;
  byId("filter-said").textContent = count === cells.length ? `${count} cells` : `${count} of ${cells.length} cells`;
  reach(firstCell(), false);
}

function setUpGrid() {
  searched = cells.map((cell) =>
    `${cell.id} ${index.verdicts[cell.verdict][0]} ${cell.text} ${Object.entries(
      index.runs[cell.points.at(-1)[0]].stacks[cell.stack] ?? {},
    )
      .map((pin) => pin.join(" "))
      .join(" ")}`.toLowerCase(),
  );
  document.querySelector("#grid").addEventListener("keydown", (event) => {
    if (!(event.target instanceof Element) || !event.target.matches(".cells td a")) return;
    const td = event.target.parentElement;
    const at = grids.findIndex((each) => each.node.contains(td));
    const grid = grids[at];
    const row = grid.rows.findIndex((each) => each.node === td.parentElement);
    const column = grid.rows[row].cells.findIndex((each) => each.td === td);
    const across = grid.rows[row].cells;
    const down = grids.flatMap((each) =>
      each.rows.map((each_row) => each_row.cells[Math.min(column, each_row.cells.length - 1)]),
    );
    const here = grids.slice(0, at).reduce((sum, each) => sum + each.rows.length, 0) + row;
    const next = {
      ArrowRight: () => along(across, column, 1),
      ArrowLeft: () => along(across, column, -1),
      ArrowDown: () => along(down, here, 1),
      ArrowUp: () => along(down, here, -1),
      Home: () => along(across, -1, 1),
      End: () => along(across, across.length, -1),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    const found = next();
    if (found) reach(found, true);
  });
  document.querySelector("#grid").addEventListener("focusin", (event) => {
    if (event.target.matches?.(".cells td a")) reach(event.target, false);
  });
  let waiting = 0;
  byId("filter-text").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(filter, 120);
  });
  all("input[name=verdict]").forEach((box) => box.addEventListener("change", filter));
  filter();
}
