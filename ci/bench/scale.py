"""Plan, judge and report over many cells: the time a cell may not grow with their number."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console

from ci import report, shown
from ci.bench.figure import Figure
from ci.evidence import Evidence, Reading
from ci.judge import judge_run
from ci.matrix import Matrix
from ci.plan import Plan, Selection, make_plan
from ci.runrecord import RunRecord, SavedPlan

SIZES = (100, 1_000, 10_000)
LANE = "pull-request"
ALLOWED = 1.5
"""Linear: a cell among ten thousand may take so many times what it takes among a thousand; the rest is noise."""


@dataclass(frozen=True)
class _Times:
    """Seconds for so many cells."""

    plan: float
    judge: float
    report: float


def figures(matrix: Matrix, stack: str, evidence: Mapping[str, Evidence]) -> list[Figure]:
    """evidence: of the lane on `stack`, as it was just measured; its cells are copied to make up the numbers."""
    found = {size: _measured(matrix, stack, evidence, size) for size in SIZES}
    few, many = SIZES[-2:]
    lines = []
    for step in ("plan", "judge", "report"):
        of_a_cell = {size: getattr(times, step) / size for size, times in found.items()}
        note = ", ".join(f"{size:,} cells {1000 * seconds:.2g} ms each" for size, seconds in of_a_cell.items())
        name = f"{step}, a cell of {many:,} over a cell of {few:,}"
        lines.append(Figure(name, of_a_cell[many] / of_a_cell[few], "x", ALLOWED, note=note))
    return lines


def _clocked(action: Callable[[], object]) -> float:
    """Processor time: nothing here waits for anything, and other processes must not count."""
    began = time.process_time()
    action()
    return time.process_time() - began


def _measured(matrix: Matrix, stack: str, evidence: Mapping[str, Evidence], size: int) -> _Times:
    wide, names = _widened(matrix, stack, size)
    plans: list[Plan] = []
    plan_s = _clocked(lambda: plans.append(make_plan(wide, Selection(lane=LANE))))
    cells = tuple(islice(plans[0].cells, size))
    saved = SavedPlan(
        command="bench",
        backend=plans[0].backend,
        runtime="venv",
        started="",
        stacks={name: dict(matrix.stacks[stack].pins) for name in names},
        cells=cells,
    )
    known = {cell.id: evidence.get(cell.id.replace(f"/{cell.stack}/", f"/{stack}/", 1)) for cell in cells}
    reading = Reading({name: each.model_copy(update={"cell": name}) for name, each in known.items() if each})
    records: list[RunRecord] = []
    judge_s = _clocked(lambda: records.append(judge_run(saved, reading, matrix)))
    out = Console(file=io.StringIO(), width=report.WIDTH)
    report_s = _clocked(lambda: report.print_run(shown.of(records[0], Path()), out))
    return _Times(plan_s * size / len(plans[0].cells), judge_s, report_s)


def _widened(matrix: Matrix, stack: str, size: int) -> tuple[Matrix, tuple[str, ...]]:
    """The matrix with as many copies of the stack as make up the cells, and their names."""
    lane = matrix.lanes[LANE]
    once = len(make_plan(matrix, Selection(lane=LANE, stacks=(stack,))).cells)
    names = tuple(f"copy-{index:05d}" for index in range(-(-size // once)))
    copies = dict.fromkeys(names, matrix.stacks[stack])
    wide = matrix.model_copy(update={"stacks": copies, "lanes": {LANE: lane.model_copy(update={"stacks": names})}})
    return wide, names
