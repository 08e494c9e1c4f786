"""Mutants at work: every case once as it is and once with each fault, in one start of the ranks, all judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from ci import evidence as evidence_lines
from ci import order, workers
from ci.evidence import Evidence
from ci.interrupts import Interrupts
from ci.judge import judge_cell
from ci.matrix import Matrix
from ci.mutants.table import Mutant, places
from ci.mutants.verdict import Ran, Shown, Sound, shown
from ci.plan import Cell, PlannedStack
from ci.progress import ProgressView
from ci.provision.runtime import Environment, Runtime
from ci.runrecord import EVIDENCE, CellRecord
from ci.stackrun import StackOrder, run_stack

BACKEND = "cpu"
MARK = "+mutant-"


@dataclass(frozen=True)
class Planted:
    """One cell to run: a case with a fault, or without one."""

    cell: Cell
    mutant: Mutant | None
    clean: str


def planted(mutants: Sequence[Mutant], matrix: Matrix, stack: str, *, first_only: bool) -> tuple[Planted, ...]:
    """The cells, each case without a fault before those with one. first_only: a mutant's first case and no other."""
    clean: dict[str, Planted] = {}
    faulty = []
    for mutant in mutants:
        for place in list(places(mutant, matrix))[: 1 if first_only else None]:
            suffix = "+corrected" if place.corrections else ""
            cell = Cell(
                id=f"{BACKEND}/{stack}/{place.job}/{place.name}{suffix}",
                backend=BACKEND,
                stack=stack,
                job=place.job,
                case=dict(place.case),
                world_size=int(place.case["world_size"]),
                timeout_s=matrix.jobs[place.job].timeout_s,
                gated=None,
                command=f"nox -s mutants -- --stack {stack} --mutant {mutant.id}",
                corrections=place.corrections,
            )
            clean.setdefault(cell.id, Planted(cell, None, cell.id))
            faulty.append(Planted(replace(cell, id=f"{cell.id}{MARK}{mutant.id}"), mutant, cell.id))
    return (*clean.values(), *faulty)


@dataclass(frozen=True)
class Place:
    """Where the cells run and where their evidence is kept."""

    runtime: Runtime
    environment: Environment
    stack: PlannedStack
    folder: Path


def run(
    wanted: Sequence[Planted], matrix: Matrix, place: Place, interrupts: Interrupts, console: Console
) -> tuple[list[Sound], list[Shown]]:
    """(the cases without a fault, the cases with one), as judged."""
    cells = [each.cell for each in wanted]
    ordered = order.build(BACKEND, matrix.backends[BACKEND], place.stack, cells)
    for entry, each in zip(ordered["cells"], wanted, strict=True):
        entry["mutant"] = None if each.mutant is None else each.mutant.id
    order_file = place.folder / "order.json"
    order.write(order_file, ordered)
    (place.folder / EVIDENCE).unlink(missing_ok=True)
    by_id = {cell.id: cell for cell in cells}

    def judge(evidence: Evidence) -> CellRecord:
        return judge_cell(by_id[evidence.cell], evidence, matrix, place.stack.pins)

    chosen = workers.choose(
        [cell.world_size for cell in cells], cores=workers.cores(), free_mb=workers.free_memory_mb()
    )
    what = StackOrder(place.environment, cells, order_file, place.folder, chosen.count)
    with ProgressView(console, place.stack.id, [cell.job for cell in cells], chosen.count) as view:
        reason = run_stack(what, place.runtime, view, interrupts, judge, lambda _: None)
    kept: Mapping[str, Evidence] = evidence_lines.read(place.folder / EVIDENCE).by_cell
    ran = {
        each.cell.id: Ran(judge_cell(each.cell, kept.get(each.cell.id), matrix, place.stack.pins), _planted(kept, each))
        for each in wanted
    }
    sound = [Sound(each.cell.id, ran[each.cell.id].record, reason) for each in wanted if each.mutant is None]
    return sound, [shown(each.mutant, ran[each.cell.id], ran[each.clean]) for each in wanted if each.mutant is not None]


def _planted(kept: Mapping[str, Evidence], each: Planted) -> str | None:
    evidence = kept.get(each.cell.id)
    return None if evidence is None else evidence.mutant
