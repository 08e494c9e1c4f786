"""Clean repeats: cases in which nothing is wrong, again and again with new seeds. Each that turns red is a false alarm.

All that is kept is evidence: a repeat with evidence is not run again, and a changed tolerance judges every repeat anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ci import order
from ci.errors import UsageError
from ci.evidence import Evidence, parse_line
from ci.judge import judge_cell
from ci.matrix import Backend, Matrix
from ci.plan import Cell, PlannedStack
from ci.runrecord import FAILING, CellRecord

FIRST_SEED = 1001
"""Away from the seeds that tolerances were measured with, which count from 1."""
ROUND = 20
"""Repeats in one start of the ranks; every case has had a round before any has another."""
TRL_SHARE = 20
"""One repeat of a TRL case for so many of an engine case."""
ALLOWED = 0.5
"""How much of its tolerance the largest error may use."""
SEPARATOR = "/seed"


@dataclass(frozen=True)
class Repeat:
    """A cell with a seed for its weights and data."""

    cell: Cell
    seed: int

    @property
    def as_cell(self) -> Cell:
        """The cell under an id of its own."""
        return replace(self.cell, id=f"{self.cell.id}{SEPARATOR}{self.seed}")


@dataclass(frozen=True)
class Tally:
    """The repeats of one cell.

    seeds: one a repeat. red: what failed, with its seed and the reason. largest: by check, the largest error over its
    tolerance; a check that is exact has none.
    """

    cell: Cell
    seeds: frozenset[int]
    red: tuple[str, ...]
    largest: Mapping[str, float]

    @property
    def repeats(self) -> int:
        return len(self.seeds)

    @property
    def clean(self) -> bool:
        return not self.red and all(share <= ALLOWED for share in self.largest.values())


def ordered(backend_id: str, backend: Backend, stack: PlannedStack, repeats: Sequence[Repeat]) -> dict[str, Any]:
    """The order that runs these repeats."""
    whole = order.build(backend_id, backend, stack, [repeat.as_cell for repeat in repeats])
    for entry, repeat in zip(whole["cells"], repeats, strict=True):
        entry["seed"] = repeat.seed
    return whole


def rounds(cells: Sequence[Cell], repeats: int) -> Iterator[list[Repeat]]:
    """What to run, a list for each start of the ranks. repeats: of each engine case."""
    for begin in range(0, repeats, ROUND):
        end = min(begin + ROUND, repeats)
        found = []
        for cell in cells:
            share = TRL_SHARE if cell.case.get("trainer") == "trl" else 1
            found += [Repeat(cell, FIRST_SEED + index) for index in range(-(-begin // share), -(-end // share))]
        yield found


def kept(file: Path) -> Iterator[Evidence]:
    """The evidence of all repeats so far, one at a time: thousands at once would fill the memory."""
    if not file.exists():
        return
    with file.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                yield parse_line(line, f"{file}:{number}")
            except UsageError:
                raise
            except ValueError:  # cut short by an interrupt: the repeat is run again
                continue


def tallies(
    cells: Sequence[Cell],
    evidence: Iterable[Evidence],
    matrix: Matrix,
    pins: Mapping[str, str],
    before: Iterable[Tally] = (),
) -> tuple[Tally, ...]:
    """Every cell with its repeats, judged, on top of those counted before; in the order of `cells`."""
    by_id = {cell.id: cell for cell in cells}
    known = {tally.cell.id: tally for tally in before}
    nothing = {cell.id: Tally(cell, frozenset(), (), {}) for cell in cells}
    start = nothing | {name: tally for name, tally in known.items() if name in nothing}
    seen = {name: set(tally.seeds) for name, tally in start.items()}
    red = {name: list(tally.red) for name, tally in start.items()}
    largest = {name: dict(tally.largest) for name, tally in start.items()}
    for each in evidence:
        cell, _, word = each.cell.rpartition(SEPARATOR)
        seed = int(word) if word.isdecimal() else None
        if seed is None or cell not in by_id or seed in seen[cell]:
            continue
        seen[cell].add(seed)
        record = judge_cell(by_id[cell], each, matrix, pins)
        if record.verdict in FAILING:
            red[cell].append(f"seed {seed}: {record.verdict}, {record.reason}")
        for name, share in _shares(record):
            largest[cell][name] = max(share, largest[cell].get(name, 0.0))
    return tuple(Tally(cell, frozenset(seen[cell.id]), tuple(red[cell.id]), largest[cell.id]) for cell in cells)


def _shares(record: CellRecord) -> Iterator[tuple[str, float]]:
    for step in record.steps:
        for check in step.checks:
            if check.ok and check.tolerance and check.error is not None:
                yield check.name, check.error / check.tolerance


CHECKS = ("forward", "reported_norm", "gradient_used", "update", "ranks_agree")
"""Those with a tolerance; the others are exact, and red as soon as they are off."""


def told(tally: Tally) -> str:
    """One line for a terminal."""
    name = max(tally.largest, key=lambda check: tally.largest[check], default=None)
    used = "" if name is None else f", at most {tally.largest[name]:.0%} of a tolerance ({name})"
    return "\n  ".join([f"{tally.cell.id}: {tally.repeats} repeats, {len(tally.red)} red{used}", *tally.red])


def table(found: Sequence[Tally]) -> str:
    """Markdown: a row a cell, each check's largest error in percent of its tolerance."""
    lines = [
        f"| case | repeats | red | {' | '.join(f'`{check}`' for check in CHECKS)} |",
        f"|---|---|---|{'---|' * len(CHECKS)}",
    ]
    for tally in found:
        shares = " | ".join(f"{tally.largest[check]:.0%}" if check in tally.largest else "" for check in CHECKS)
        lines.append(f"| {tally.cell.id.split('/', 2)[2]} | {tally.repeats} | {len(tally.red)} | {shares} |")
    return "\n".join(lines) + "\n"


def section(found: Sequence[Tally], date: str, stack: str) -> str:
    """The text below the page's last heading."""
    total = sum(tally.repeats for tally in found)
    red = sum(len(tally.red) for tally in found)
    text = [
        f"{total} repeats on {stack}, {red} of them red. Counted {date} by `nox -s repeats -- --write`.",
        "",
        "One case for each job, ZeRO stage and dtype, and TRL's, twice as many side by side as the cores carry, each",
        "repeat with seeds that no tolerance was made with. `+corrected`: without a correction nothing clean is left",
        "of this combination. Each check's largest error is in percent of its tolerance, of which it may use half;",
        "checks that are exact have no column.",
        "",
        table(found),
    ]
    return "\n".join(text)


MARK = "## Clean repeats\n"


def replaced(page: str, section: str) -> str:
    """docs/tolerances.md with everything below its last heading replaced."""
    head, mark, _ = page.partition(MARK)
    if not mark:
        raise UsageError(f"docs/tolerances.md: found no heading {MARK.strip()!r}, under which the table belongs")
    return f"{head}{mark}\n{section}"
