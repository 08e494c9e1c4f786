"""Several runs as one: for each cell the newest record, and what it was in every run before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ci.runrecord import Verdict
from ci.shown import Cell, Known, Number, Run, norm_ratio


@dataclass(frozen=True)
class Point:
    """A cell in one run. run: its position, oldest first. ratio: reported over true norm where furthest from 1."""

    run: int
    verdict: Verdict
    defects: tuple[str, ...]
    ratio: float | None
    duration_s: Number
    peak_memory_mb: Number


@dataclass(frozen=True)
class Entry:
    """A cell of the report; its number is its position in `History.entries`. points: oldest first."""

    id: str
    verdict: Verdict
    defects: tuple[str, ...]
    fixed: tuple[str, ...]
    corrections: tuple[str, ...]
    reason: str | None
    command: str
    points: tuple[Point, ...]

    @property
    def backend(self) -> str:
        return self.id.split("/", 3)[0]

    @property
    def stack(self) -> str:
        return self.id.split("/", 3)[1]

    @property
    def job(self) -> str:
        return self.id.split("/", 3)[2]

    @property
    def name(self) -> str:
        """Its case, as in the id."""
        return self.id.split("/", 3)[3]

    @property
    def run(self) -> int:
        """The newest run that planned it."""
        return self.points[-1].run

    @property
    def before(self) -> Point | None:
        """The run before, where its verdict or its defects were others."""
        if len(self.points) < 2:
            return None
        earlier, now = self.points[-2:]
        return earlier if (earlier.verdict, set(earlier.defects)) != (now.verdict, set(now.defects)) else None


@dataclass(frozen=True)
class History:
    """runs: oldest first. entries: the newest record of each cell, those of the newest run first."""

    runs: tuple[Run, ...]
    entries: tuple[Entry, ...]
    ledger: dict[str, Known]

    def pins(self, entry: Entry) -> dict[str, str]:
        return self.runs[entry.run].head.stacks.get(entry.stack, {})


def ordered(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Oldest first; a folder given twice counts once."""
    once = {run.folder.resolve(): run for run in runs}
    return tuple(sorted(once.values(), key=lambda run: (run.head.started, run.folder.name)))


def merge(runs: Sequence[Run], take: Callable[[int, int, Cell], None]) -> History:
    """Runs, oldest first, as one history. take: gets number, run and record of each newest cell, which is not kept."""
    numbers: dict[str, int] = {}
    points: list[list[Point]] = []
    entries: list[Entry] = []
    ledger: dict[str, Known] = {}
    for position in reversed(range(len(runs))):
        ledger = {**runs[position].head.ledger, **ledger}
        for cell in runs[position].cells_or_past(numbers):
            point = Point(
                run=position,
                verdict=cell.verdict,
                defects=cell.defects,
                ratio=norm_ratio(cell.steps),
                duration_s=cell.duration_s,
                peak_memory_mb=cell.peak_memory_mb,
            )
            if isinstance(cell, Cell):
                numbers[cell.id] = len(entries)
                entries.append(
                    Entry(
                        id=cell.id,
                        verdict=cell.verdict,
                        defects=cell.defects,
                        fixed=cell.fixed,
                        corrections=cell.corrections,
                        reason=cell.reason,
                        command=cell.command,
                        points=(),
                    )
                )
                points.append([point])
                take(numbers[cell.id], position, cell)
            else:
                points[numbers[cell.id]].append(point)
    whole = tuple(
        dataclasses.replace(entry, points=tuple(reversed(found))) for entry, found in zip(entries, points, strict=True)
    )
    return History(tuple(runs), whole, ledger)
