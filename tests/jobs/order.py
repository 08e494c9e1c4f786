"""The order: which cells to run, as the host wrote it down. Standard library only."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class Cell:
    """One case to run.

    case: every key of the job resolved. adapter: "FILE.py:Class" or None. ds_config: a user's own, parsed, or None.
    mutant: the fault to plant, or None (see tests/jobs/mutants).
    """

    id: str
    job: str
    case: Mapping[str, Any]
    world_size: int
    seed: int
    timeout_s: float
    corrections: tuple[str, ...]
    adapter: str | None
    ds_config: Mapping[str, Any] | None
    mutant: str | None = None


@dataclasses.dataclass(frozen=True)
class Order:
    """What to run in this stack.

    backend: id, accelerator, communication, start_method, environment; and, where it has devices, their numbers as
    `devices` and the environment variable `visible` that limits a process to some of them.
    """

    backend: Mapping[str, Any]
    stack: str
    pins: Mapping[str, str]
    check_pins: bool
    cells: tuple[Cell, ...]


def own_devices(devices: Sequence[str], worker: int, workers: int) -> tuple[str, ...]:
    """The devices of one pytest worker: no two workers share one."""
    each = len(devices) // workers
    return tuple(devices[worker * each : (worker + 1) * each])


def read(path: Path) -> Order:
    """The order in a file. Raises ValueError that names the file where it is of another schema."""
    data = json.loads(path.read_text())
    if data.get("schema") != SCHEMA:
        raise ValueError(
            f"{path}: order of schema {data.get('schema')!r}, expected {SCHEMA}: written by another release"
        )
    stack = data["stack"]
    cells = tuple(
        Cell(
            id=cell["id"],
            job=cell["job"],
            case=cell["case"],
            world_size=int(cell["world_size"]),
            seed=int(cell.get("seed", 0)),
            timeout_s=float(cell["timeout_s"]),
            corrections=tuple(cell.get("corrections", ())),
            adapter=cell.get("adapter"),
            ds_config=cell.get("ds_config"),
            mutant=cell.get("mutant"),
        )
        for cell in data["cells"]
    )
    return Order(data["backend"], stack["id"], stack["pins"], bool(stack.get("check_pins", True)), cells)
