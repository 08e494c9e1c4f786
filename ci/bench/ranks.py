"""What the ranks of a case cost in warm forks and in fresh processes, and where the time of a case goes.

Measured by tests/jobs/benchmark.py inside a stack, on the engine cases of the lane `repeats`.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci import order
from ci.bench.figure import Figure, Part
from ci.errors import EnvironmentUnavailable
from ci.matrix import Matrix
from ci.plan import Cell, Selection, make_plan

LANE = "repeats"
LIMIT_S = 600
GROUPS: Mapping[str, tuple[tuple[int, ...], float]] = {"stages 0-2": ((0, 1, 2), 8.0), "stage 3": ((3,), 3.0)}
"""ZeRO stages, and how many times as many cases a minute are promised."""


@dataclass(frozen=True)
class Stack:
    """A stack made by ci.provision. environment: what its interpreter is started with."""

    id: str
    python: str
    environment: Mapping[str, str]
    root: Path


def figures(matrix: Matrix, stack: Stack, folder: Path, checkout: Path | None) -> tuple[list[Figure], list[Part]]:
    """checkout: of DeepSpeed, whose own way of starting ranks is measured too."""
    every = _engine_cases(matrix, stack.id)
    few = [cell for cell in every if cell.job == "engine-sweep" and cell.case["dtype"] == "bf16"]
    few_file = _order(matrix, stack.id, few, folder / "order.few.json")
    warm = _inside(stack, few_file, "warm", repeats=5)
    fresh = _inside(stack, few_file, "fresh", repeats=2)
    lines = _compared(few, warm, fresh, "a process for each rank")
    if checkout is not None:
        lines += _compared(few, warm, _distributed(stack, few_file, folder, checkout), "DeepSpeed's DistributedExec")
    every_file = _order(matrix, stack.id, every, folder / "order.every.json")
    return lines, _parts(_inside(stack, every_file, "parts", repeats=1))


def _engine_cases(matrix: Matrix, stack: str) -> list[Cell]:
    """Engine cases of every job and stage, in the dtypes that people train in."""
    plan = make_plan(matrix, Selection(lane=LANE, stacks=(stack,)))
    return [
        cell for cell in plan.runnable if cell.case.get("trainer") != "trl" and cell.case["dtype"] in ("bf16", "fp16")
    ]


def _order(matrix: Matrix, stack: str, cells: Sequence[Cell], file: Path) -> Path:
    plan = make_plan(matrix, Selection(lane=LANE, stacks=(stack,)))
    order.write(file, order.build(plan.backend, matrix.backends[plan.backend], plan.stacks[stack], cells))
    return file


def _inside(stack: Stack, order_file: Path, way: str, *, repeats: int) -> list[dict[str, Any]]:
    """What tests/jobs/benchmark.py measured."""
    command = [stack.python, "-m", "tests.jobs.benchmark", str(order_file), way, "--repeats", str(repeats)]
    return _lines(_run(stack, command, stack.environment))


def _distributed(stack: Stack, order_file: Path, folder: Path, checkout: Path) -> list[dict[str, Any]]:
    paths = os.pathsep.join([str(stack.root), str(checkout.resolve() / "tests")])
    # LOCAL_SIZE: how many devices DeepSpeed's CPU accelerator says there are.
    environment = {**stack.environment, "PYTHONPATH": paths, "LOCAL_SIZE": "2"}
    command = [stack.python, "-m", "pytest", "tests/jobs/benchmark_distributed.py", "-q", "-p", "no:cacheprovider"]
    _run(stack, [*command, "--order", str(order_file), "--results", str(folder)], environment)
    return _lines((folder / "distributed.jsonl").read_text(encoding="utf-8"))


def _run(stack: Stack, command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command, env=environment, cwd=stack.root, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).rpartition("\n")[2]
        raise EnvironmentUnavailable(f"{' '.join(command[1:4])} ended with exit code {done.returncode}: {said}")
    return done.stdout


def _lines(text: str) -> list[dict[str, Any]]:
    """The measurements among what was printed; libraries print too."""
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"cell"')]


def _compared(
    cells: Sequence[Cell], warm: Iterable[Mapping[str, Any]], others: Iterable[Mapping[str, Any]], what: str
) -> list[Figure]:
    """Cases a minute through the launcher over those another way, the same bodies in both."""
    ours, whole, theirs = _medians(warm, "ranks_s"), _medians(warm, "whole_s"), _medians(others, "ranks_s")
    found = []
    for name, (stages, promised) in GROUPS.items():
        ids = [cell.id for cell in cells if cell.case["zero_stage"] in stages]
        a, b, c = (statistics.mean(each[cell] for cell in ids) for each in (ours, theirs, whole))
        note = f"{60 / a:.0f} cases a minute instead of {60 / b:.1f}; with reference and evidence {60 / c:.0f}"
        found.append(Figure(f"ranks in warm forks, over {what}, {name}", b / a, "x", promised, "at least", note))
    return found


def _medians(measured: Iterable[Mapping[str, Any]], key: str) -> dict[str, float]:
    by_cell: dict[str, list[float]] = defaultdict(list)
    for each in measured:
        by_cell[each["cell"]].append(float(each[key]))
    return {cell: statistics.median(times) for cell, times in by_cell.items()}


def _parts(measured: Sequence[Mapping[str, Any]]) -> list[Part]:
    """Means over all cases, the largest first within ranks and reference."""
    names = dict.fromkeys(name for each in measured for name in each["parts"])
    means = [Part(name, sum(each["parts"].get(name, 0.0) for each in measured) / len(measured)) for name in names]
    return sorted(means, key=lambda part: (part.name.partition(":")[0], -part.seconds))
