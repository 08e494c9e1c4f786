"""Tolerances from clean repeats: what the errors of a lane's cells are when nothing is wrong.

Four times the largest error of at least thirty repeats, each with new seeds for weights and data, per group of cases
(trainer, ZeRO stages, dtype, accumulation). Where repeats agree to the last bit the tolerance is the floor of the
dtype: an error below one rounding of the numbers that were computed with cannot be called a fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ci.checks import MEASURED, Missing, measure
from ci.entries import Job
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


def as_yaml(found: Mapping[Group, Mapping[str, Largest]]) -> str:
    """The `tolerances:` section of matrix.yaml, the number that each tolerance was made from beside it."""
    lines = ["tolerances:"]
    for group in sorted(found):
        stages = ", ".join(map(str, group.stages))
        lines += [
            f"  - job: {group.job}",
            *([f"    trainers: [{', '.join(group.trainers)}]"] if group.trainers else []),
            f"    stages: [{stages}]",
            f"    dtype: {group.dtype}",
            f"    gradient_accumulation_steps: [{group.accumulation}]",
            "    checks:",
        ]
        for name in MEASURED:
            # A library that reports None (fp32 at ZeRO-0) leaves the norm of the gradient used to go by.
            entry = found[group].get(name) or found[group].get("gradient_used")
            if entry is None:
                continue
            allowed = tolerance(name, group.dtype, entry.error)
            lines.append(
                f"      {name}: {{tolerance: {allowed:.2g}, largest: {entry.error:.3g}, repeats: {entry.repeats}}}"
            )
    return "\n".join(lines) + "\n"


def replaced(text: str, section: str) -> str:
    """matrix.yaml's text with its `tolerances:` section replaced; everything else stays byte for byte."""
    lines = text.splitlines(keepends=True)
    start = next(index for index, line in enumerate(lines) if line.startswith("tolerances:"))
    end = start + 1
    while end < len(lines) and (lines[end].startswith((" ", "-")) or not lines[end].strip()):
        end += 1
    return "".join(lines[:start]) + section + "\n" + "".join(lines[end:])
