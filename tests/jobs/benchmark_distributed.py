"""The ranks of an order's cells through DeepSpeed's own DistributedExec, for `nox -s bench -- --deepspeed-tests`.

Run by pytest with the folder `tests` of a checkout of DeepSpeed on PYTHONPATH; appends a line of JSON for each cell.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import benchmark, bodies, cells
from tests.jobs.launcher import Launcher, RankContext
from tests.jobs.order import Order

RESULT = "distributed.jsonl"

common = importlib.import_module("unit.common")


class Case(common.DistributedExec):  # type: ignore[misc,name-defined]  # reason: a checkout's, unknown to mypy
    """The ranks of one cell; `told` and `workdir` travel to them with the instance."""

    init_distributed = False
    requires_cuda_env = False
    told: Mapping[str, Any]
    workdir: Path

    def run(self) -> None:
        """What each rank runs, in a process that has imported nothing else."""
        benchmark.without_preload()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        bodies.train(RankContext(rank, size, self.workdir, self.told, {}, self.workdir / "log"))


def test_cells(request: pytest.FixtureRequest, ordered: Order, tmp_path: Path) -> None:
    """Every cell once."""
    results: Path = request.config.getoption("--results")
    for number, cell in enumerate(ordered.cells):
        case = Case()
        case.world_size = cell.world_size
        case.workdir = tmp_path / str(number)
        case.workdir.mkdir()
        # Not the warm server: multiprocessing has one for a whole process, and theirs would profit from it.
        clip, _ = cells.clipping(cell, Launcher("spawn"), ordered, case.workdir, case.workdir / "log")
        case.told = cells.payload(cell, ordered, clip)
        began = time.monotonic()
        case(request)
        seconds = time.monotonic() - began
        assert all((case.workdir / f"rank{rank}.pt").exists() for rank in range(cell.world_size))
        with (results / RESULT).open("a") as stream:
            stream.write(json.dumps({"cell": cell.id, "way": "distributed", "ranks_s": seconds}) + "\n")
