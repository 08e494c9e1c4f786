"""What a run costs, from what runs leave behind. Nothing here is a test: the figures are for people to compare.

The overhead of a case is everything but its own training steps: forks, rendezvous, the engine's construction, the
reference, the evidence.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ci.evidence import Evidence
from ci.matrix import Matrix
from ci.plan import Selection, make_plan


@dataclass(frozen=True)
class Figure:
    """One measured number, and what it should stay under where something is promised."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    note: str = ""


def plan_figure(matrix: Matrix, cells: int = 10_000) -> Figure:
    """Time to plan at least so many cells: the nightly lane over copies of one stack."""
    lane = matrix.lanes["nightly"]
    stack = matrix.stacks[lane.stacks[0]]
    count = len(make_plan(matrix, Selection(lane="nightly", stacks=(lane.stacks[0],))).cells)
    names = tuple(f"copy-{index:05d}" for index in range(-(-cells // count)))
    wide = matrix.model_copy(
        update={"stacks": dict.fromkeys(names, stack), "lanes": {"nightly": lane.model_copy(update={"stacks": names})}}
    )
    began = time.perf_counter()
    planned = len(make_plan(wide, Selection(lane="nightly")).cells)
    return Figure(f"plan over {planned} cells", time.perf_counter() - began, "s", 1.0)


def lane_figures(evidence: Sequence[Evidence], wall_s: float, workers: int) -> list[Figure]:
    """Figures of a lane that just ran warm; wall_s is from command to report."""
    timed = [e for e in evidence if e.duration_s is not None and e.training_s is not None and e.exception is None]
    # The first case of each worker waited for the import of the stack, which is the start-up's and no case's.
    warm = timed[workers:]
    overhead = {e.cell: (e.duration_s or 0.0) - (e.training_s or 0.0) for e in warm}
    slowest = max(overhead, key=lambda cell: overhead[cell])
    own = sum(e.duration_s or 0.0 for e in evidence)
    return [
        Figure(f"lane of {len(evidence)} cells, command to report", wall_s, "s", 240.0),
        Figure("the same over its cases' own time per worker", wall_s / (own / workers), "x", 1.3),
        Figure("overhead of a case beyond its training steps, median", statistics.median(overhead.values()), "s", 1.0),
        Figure("overhead of a case, largest", overhead[slowest], "s", note=slowest),
        Figure("training steps of a case, median", statistics.median(e.training_s or 0.0 for e in warm), "s"),
        Figure("peak memory of a rank", max(e.peak_memory_mb or 0.0 for e in evidence), "MB", 600.0),
    ]


def start_figure(runtime: str, to_first_case_s: float, import_s: float) -> Figure:
    """What an unchanged start pays before its first case beyond the import of the stack."""
    limit = 5.0 if runtime == "docker" else 3.0
    note = f"{to_first_case_s:.1f} s to the first case, import of the stack {import_s:.1f} s"
    return Figure(f"unchanged start beyond the import ({runtime})", to_first_case_s - import_s, "s", limit, note)


def page(figures: Sequence[Figure], hardware: str, date: str, command: str) -> str:
    """docs/benchmarks.md."""
    lines = [
        "# Benchmarks",
        "",
        f"Measured {date} on {hardware} with `{command}`. Times depend on the machine; compare ratios.",
        "",
        "| figure | measured | to stay under | |",
        "|---|---|---|---|",
    ]
    for figure in figures:
        limit = "" if figure.limit is None else f"{figure.limit:g} {figure.unit}"
        met = "" if figure.limit is None else ("met" if figure.value <= figure.limit else "**not met**")
        note = f" ({figure.note})" if figure.note else ""
        lines.append(f"| {figure.name}{note} | {figure.value:.3g} {figure.unit} | {limit} | {met} |")
    return "\n".join(lines) + "\n"
