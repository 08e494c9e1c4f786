"use strict";
// Releases, filtered by range, case and behaviour.

const parts = (version) =>
  version
    .split(/[.+-]/)
    .map(Number)
    .filter((part) => !Number.isNaN(part));
function compare(one, other) {
  const [left, right_] = [parts(one), parts(other)];
  for (let at = 0; at < Math.min(left.length, right_.length); at += 1)
    if (left[at] !== right_[at]) return left[at] - right_[at];
  return 0; // 0.18 stands for every 0.18.x
}
function filterReleases() {
  const [from, to, kind] = ["release-from", "release-to", "release-kind"].map((id) => byId(id).value.trim());
  const words = byId("release-case").value.toLowerCase().split(/\s+/).filter(Boolean);
  let count = 0;
  for (const node of all("table.releases")) {
    const columns = [...node.tHead.rows[0].cells]
      .slice(1)
      .map((head) => words.every((word) => head.dataset.case.toLowerCase().includes(word)));
    [...node.tHead.rows[0].cells].slice(1).forEach((head, at) => {
      head.hidden = !columns[at];
    });
    for (const row of node.tBodies[0].rows) {
      const version = row.dataset.release;
      const tds = [...row.cells].slice(1);
      const unusable = tds[0]?.colSpan > 1;
      if (!unusable)
        tds.forEach((td, at) => {
          td.hidden = !columns[at];
        });
      const behaves = !kind || tds.some((td) => !td.hidden && td.dataset.kind === kind);
      row.hidden = !(
        behaves &&
        columns.some(Boolean) &&
        (!from || compare(version, from) >= 0) &&
        (!to || compare(version, to) <= 0)
      );
      count += row.hidden ? 0 : 1;
    }
  }
  byId("release-said").textContent = `${count} releases`;
}

function setUpReleases() {
  if (!byId("release-from")) return;
  ["release-from", "release-to", "release-case"].forEach((id) => byId(id).addEventListener("input", filterReleases));
  byId("release-kind").addEventListener("change", filterReleases);
}
