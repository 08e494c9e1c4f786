"""What a cell opens to: its record, the end of its log, the stacks of its ranks, and its plots."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from ci.page.history import History, Point
from ci.page.packed import Blocks
from ci.page.plots import Plot, Series, draw
from ci.runrecord import Verdict
from ci.shown import Cell, Number, Run, finite

TAIL = 4096
"""Bytes of a log, and of a rank's stack, in the page; the whole file lies beside it."""
PLAIN = (Verdict.OK, Verdict.NOT_RUN)
"""Verdicts of cells without plots and log."""
PLOTTED = 500
"""At most so many cells have plots, in the report's order."""
REFERENCE = "reference"


class RankStack(Struct, frozen=True):
    rank: str
    text: str


class Detail(Struct, frozen=True, omit_defaults=True):
    """A cell as the page's script gets it. log: the address of the whole log, relative to the page, if it has one."""

    run: int
    cell: Cell
    log: str | None = None
    tail: str | None = None
    cut: bool = False
    stacks: tuple[RankStack, ...] = ()


class Drawn(Struct, frozen=True):
    title: str
    svg: str
    legend: tuple[tuple[str, str], ...]
    missing: tuple[str, ...]


Group = tuple[object, ...]


@dataclass(frozen=True)
class Norms:
    """Of one cell, over its steps."""

    stage: str
    reported: tuple[Number, ...]
    used: tuple[Number, ...]


@dataclass(frozen=True)
class Wanted:
    """What the plots of a cell that is not ok need besides the norms of its group."""

    number: int
    group: Group
    true: tuple[Number, ...]
    wanted: tuple[Number, ...]
    checks: tuple[Series, ...]
    scale: tuple[Series, ...]


@dataclass
class Details:
    """Takes the cells of a report one by one; keeps of each what the plots need."""

    runs: Sequence[Run]
    out: Path
    cells: Blocks = field(default_factory=Blocks)
    _norms: dict[Group, dict[str, Norms]] = field(default_factory=dict)
    _wanted: list[Wanted] = field(default_factory=list)

    def take(self, number: int, run: int, cell: Cell) -> None:
        """A cell with its number and the position of its run."""
        folder = self.runs[run].folder
        plain = cell.verdict in PLAIN
        log = None if cell.log is None else _inside(folder, cell.log)
        tail, cut = ("", False) if plain or log is None else _tail(log)
        detail = Detail(
            run=run,
            cell=cell,
            log=None if log is None else _address(log, self.out),
            tail=tail or None,
            cut=cut,
            stacks=() if plain or log is None else _stacks(log),
        )
        self.cells.add(msgspec.json.encode(detail))
        if not cell.steps:
            return
        case = tuple(sorted((key, str(value)) for key, value in cell.case.items() if key != "zero_stage"))
        group: Group = (run, cell.stack, cell.job, cell.corrections, case)
        stage = f"ZeRO-{cell.case['zero_stage']}" if "zero_stage" in cell.case else "found"
        reported = tuple(step.grad_norm_reported[0] if step.grad_norm_reported else None for step in cell.steps)
        used = tuple(step.grad_norm_used for step in cell.steps)
        self._norms.setdefault(group, {})[stage] = Norms(stage, reported, used)
        if not plain and len(self._wanted) < PLOTTED:
            self._wanted.append(_wanted(number, group, cell))

    def plots(self, history: History) -> tuple[Blocks, dict[int, tuple[int, ...]]]:
        """All plots, and which of them belong to a cell. Cells that differ only in their ZeRO stage share two."""
        blocks = Blocks()
        shared: dict[Group, tuple[int, ...]] = {}
        of_cell = {}
        for wanted in self._wanted:
            if wanted.group not in shared:
                shared[wanted.group] = _add(blocks, self._shared(wanted))
            own = [
                draw("error of each check over what is allowed (above 1: fails)", wanted.checks, limit=1.0),
                draw("loss scale", wanted.scale) if wanted.scale else None,
                _over_runs(history.entries[wanted.number].points),
            ]
            of_cell[wanted.number] = (*shared[wanted.group], *_add(blocks, own))
        self.cells.flush()
        blocks.flush()
        return blocks, of_cell

    def _shared(self, wanted: Wanted) -> list[Plot | None]:
        norms = [self._norms[wanted.group][stage] for stage in sorted(self._norms[wanted.group])]
        return [
            draw(
                "gradient norm: reported at each ZeRO stage, and of the reference",
                [*(Series(each.stage, each.reported) for each in norms), Series(REFERENCE, wanted.true, dashed=True)],
            ),
            draw(
                "gradient norm: used by the optimizer at each ZeRO stage, and wanted",
                [*(Series(each.stage, each.used) for each in norms), Series("wanted", wanted.wanted, dashed=True)],
            ),
        ]


def _add(blocks: Blocks, plots: Sequence[Plot | None]) -> tuple[int, ...]:
    return tuple(
        blocks.add(msgspec.json.encode(Drawn(plot.title, plot.svg, plot.legend, plot.missing)))
        for plot in plots
        if plot is not None
    )


def _wanted(number: int, group: Group, cell: Cell) -> Wanted:
    """Errors are drawn as multiples of what is allowed, so that all checks fit on one axis."""
    errors: dict[str, list[Number]] = {}
    for position, step in enumerate(cell.steps):
        for check in step.checks:
            error, allowed = finite(check.error), finite(check.tolerance)
            if error and allowed:
                errors.setdefault(check.name, [0.0] * len(cell.steps))[position] = error / allowed
    before = tuple(step.loss_scale_before for step in cell.steps)
    after = tuple(step.loss_scale_after for step in cell.steps)
    expected = tuple(step.loss_scale_expected for step in cell.steps)
    moves = len({*before, *after} - {None}) > 1
    scale = (Series("used by backward", before), Series("after the step", after), Series("expected", expected, True))
    return Wanted(
        number=number,
        group=group,
        true=tuple(step.grad_norm_true for step in cell.steps),
        wanted=tuple(step.grad_norm_wanted for step in cell.steps),
        checks=tuple(Series(name, tuple(values)) for name, values in errors.items()),
        scale=scale if moves else (),
    )


def _over_runs(points: Sequence[Point]) -> Plot | None:
    """A cell's history; None where it ran once."""
    if len(points) < 2:
        return None
    series = (
        Series("norm reported / true", tuple(point.ratio for point in points)),
        Series("duration, s", tuple(point.duration_s for point in points)),
        Series("peak memory, MB", tuple(point.peak_memory_mb for point in points)),
    )
    return draw("over runs, oldest first", series, along="run")


def _inside(folder: Path, name: str) -> Path | None:
    """A file of a run, by the name that its record has for it; None where it is gone, or not in the run's folder."""
    path = folder / name
    return path if path.is_file() and path.resolve().is_relative_to(folder.resolve()) else None


def _address(path: Path, out: Path) -> str | None:
    """From the page to a file in its own folder or in one beside it; None for others, which do not move with it."""
    if not path.resolve().is_relative_to(out.resolve().parent):
        return None
    return urllib.parse.quote(os.path.relpath(path.resolve(), out.resolve()).replace(os.sep, "/"))


def _tail(path: Path) -> tuple[str, bool]:
    """The end of a file, and whether something was cut."""
    with path.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - TAIL))
        return stream.read().decode(errors="replace"), size > TAIL


def _stacks(log: Path) -> tuple[RankStack, ...]:
    """The Python stack of each rank that hung or crashed: NAME.rank0.stack beside NAME.log."""
    found = sorted(log.parent.glob(f"{_literal(log.stem)}.*.stack"))
    return tuple(RankStack(path.name[len(log.stem) + 1 : -len(".stack")], _tail(path)[0]) for path in found)


def _literal(name: str) -> str:
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
