"""Tolerances from clean repeats: what the errors of a lane's cells are when nothing is wrong.

Four times the largest error of at least thirty repeats, each with new seeds for weights and data, per group of cases
(trainer, ZeRO stages, dtype, accumulation). Where repeats agree to the last bit the tolerance is the floor of the
dtype: an error below one rounding of the numbers that were computed with cannot be called a fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ci.checks import MEASURED, Missing, measure
from ci.entries import Check, CheckTolerance, Job, Matrix
from ci.evidence import Evidence
from ci.plan import Cell

FACTOR = 4.0
STAGE_GROUPS: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "bf16": ((0,), (1, 2), (3,)),
    "fp32": ((0,), (1, 2), (3,)),
    # Through the engine ZeRO-0 is frozen in fp16 on every release since 0.18.3, so that nothing clean can be repeated
    # there: it shares the tolerance of the other stages, which compute the same products.
    "fp16": ((0, 1, 2, 3),),
}
TRAINERS: Mapping[str, tuple[str, ...]] = {
    # TRL's forward pass has other shapes than the reference's, hence sums in another order, than a bare engine's.
    # ms-swift's GRPO trainer is a subclass of TRL's.
    "trl": ("trl", "ms-swift"),
}
"""Trainers with tolerances of their own, and who else is held to them; all others share the job's."""
FLOORS: Mapping[str, Mapping[str, float]] = {
    # Half a unit in the last place of the dtype that the forward pass is computed in: 2^-24, 2^-11, 2^-9; fp32's own
    # sums in another order differ by more, hence 1e-6 for everything that is accumulated in fp32.
    "forward": {"fp32": 1e-6, "fp16": 2.0**-11, "bf16": 2.0**-9},
    "reported_norm": {"fp32": 1e-6, "fp16": 1e-6, "bf16": 1e-6},
    "gradient_used": {"fp32": 1e-6, "fp16": 1e-6, "bf16": 1e-6},
}


@dataclass(frozen=True, order=True)
class Group:
    """Cases that share a tolerance."""

    job: str
    trainers: tuple[str, ...]
    stages: tuple[int, ...]
    dtype: str
    accumulation: int


@dataclass(frozen=True)
class Largest:
    """The largest error of a check in a group; where no repeat has numbers (a norm that is None) there is none."""

    error: float
    repeats: int
    cell: str


def group_of(cell: Cell, job: Job) -> Group:
    """The group whose tolerance judges this cell; its stages are those that the job has."""
    stage = int(cell.case["zero_stage"])
    together = next(group for group in STAGE_GROUPS[str(cell.case["dtype"])] if stage in group)
    stages = tuple(each for each in together if each in job.keys["zero_stage"].values)
    return Group(
        job=cell.job,
        trainers=TRAINERS.get(str(cell.case.get("trainer")), ()),
        stages=stages,
        dtype=str(cell.case["dtype"]),
        accumulation=int(cell.case.get("gradient_accumulation_steps", 1)),
    )


def largest(
    cells: Mapping[str, Cell], jobs: Mapping[str, Job], repeats: Iterable[tuple[str, Evidence]]
) -> dict[Group, dict[str, Largest]]:
    """Per group and check, the largest error over (cell id, evidence) of all repeats; overflow steps do not count."""
    found: dict[Group, dict[str, Largest]] = {}
    counted: dict[Group, dict[str, int]] = {}
    for cell_id, evidence in repeats:
        group = group_of(cells[cell_id], jobs[cells[cell_id].job])
        of_group = found.setdefault(group, {})
        counted.setdefault(group, {}).setdefault(cell_id, 0)
        counted[group][cell_id] += 1
        for step in evidence.steps:
            for name in MEASURED:
                if name in step.not_judged:
                    continue
                try:
                    error = measure(name, step, 0.0).error
                except Missing:
                    continue
                if error is None or not math.isfinite(error):
                    continue
                known = of_group.get(name)
                if known is None or error > known.error:
                    of_group[name] = Largest(error, 0, evidence.cell)
    return {
        group: {
            name: Largest(entry.error, min(counted[group].values()), entry.cell) for name, entry in of_group.items()
        }
        for group, of_group in found.items()
    }


def tolerance(name: str, dtype: str, error: float) -> float:
    """Four times the largest error, rounded up to two digits, and never below the dtype's floor."""
    return _rounded_up(max(FACTOR * error, FLOORS[name][dtype]))


def _rounded_up(value: float) -> float:
    digits = float(f"{value:.1e}")
    exponent = int(f"{value:e}".split("e")[1])
    return digits if digits >= value else float(f"{digits + 10.0 ** (exponent - 1):.1e}")


def tolerances(found: Mapping[Group, Mapping[str, Largest]]) -> dict[Group, dict[Check, CheckTolerance]]:
    """What a gate made from these errors allows, the numbers that it was made from with it."""
    made: dict[Group, dict[Check, CheckTolerance]] = {}
    for group, of_group in found.items():
        for name in MEASURED:
            # A library that reports None (fp32 at ZeRO-0) leaves the norm of the gradient used to go by.
            entry = of_group.get(name) or of_group.get("gradient_used")
            if entry is not None:
                made.setdefault(group, {})[name] = CheckTolerance(
                    tolerance=tolerance(name, group.dtype, entry.error), largest=entry.error, repeats=entry.repeats
                )
    return made


def shipped(matrix: Matrix) -> dict[Group, dict[Check, CheckTolerance]]:
    """The groups of matrix.yaml's own section."""
    return {
        Group(
            job=str(group.job),
            trainers=group.trainers or (),
            stages=group.stages,
            dtype=group.dtype,
            accumulation=group.gradient_accumulation_steps[0],
        ): group.checks
        for group in matrix.tolerances
    }


def as_yaml(groups: Mapping[Group, Mapping[Check, CheckTolerance]]) -> str:
    """The `tolerances:` section of matrix.yaml, the number that each tolerance was made from beside it."""
    lines = ["tolerances:"]
    for group in sorted(groups):
        stages = ", ".join(map(str, group.stages))
        lines += [
            f"  - job: {group.job}",
            *([f"    trainers: [{', '.join(group.trainers)}]"] if group.trainers else []),
            f"    stages: [{stages}]",
            f"    dtype: {group.dtype}",
            f"    gradient_accumulation_steps: [{group.accumulation}]",
            "    checks:",
            *(
                f"      {name}: {{tolerance: {entry.tolerance:.2g}, largest: {entry.largest:.3g},"
                f" repeats: {entry.repeats}}}"
                for name, entry in groups[group].items()
            ),
        ]
    return "\n".join(lines) + "\n"


def partly_selected(
    lane: Iterable[Cell], selected: AbstractSet[str], jobs: Mapping[str, Job]
) -> dict[Group, tuple[str, ...]]:
    """Groups of which cells were selected, but not all; to each the ids of the cells of the lane that were not."""
    cells: dict[Group, list[str]] = {}
    for cell in lane:
        cells.setdefault(group_of(cell, jobs[cell.job]), []).append(cell.id)
    return {
        group: tuple(each for each in ids if each not in selected)
        for group, ids in cells.items()
        if 0 < len(selected & set(ids)) < len(ids)
    }


def replaced(text: str, section: str) -> str:
    """matrix.yaml's text with its `tolerances:` section replaced; everything else stays byte for byte."""
    lines = text.splitlines(keepends=True)
    start = next(index for index, line in enumerate(lines) if line.startswith("tolerances:"))
    end = start + 1
    while end < len(lines) and (lines[end].startswith((" ", "-")) or not lines[end].strip()):
        end += 1
    return "".join(lines[:start]) + section + "\n" + "".join(lines[end:])
