"""One real run of the pull-request lane over every shipped CPU stack, claimed cells with and without corrections."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import pytest

from ci import evidence, runrecord
from ci.claims import affects
from ci.entries import Defect
from ci.judge import judge_run
from ci.matrix import Matrix, load
from ci.runrecord import CellRecord, RunRecord, SavedPlan

ROOT = Path(__file__).resolve().parents[2]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run", type=Path, help="judge this run's folder again instead of running the lane")


@dataclass(frozen=True)
class Families:
    """A run over all stacks: its exit code, its plan and its evidence, judged with any matrix."""

    folder: Path
    code: int
    plan: SavedPlan
    reading: evidence.Reading

    def judged(self, matrix: Matrix, cells: Collection[str] | None = None) -> RunRecord:
        """The run, or these cells of it, judged with this matrix.yaml instead of the shipped one."""
        wanted = tuple(cell for cell in self.plan.cells if cells is None or cell.id in cells)
        return judge_run(self.plan.model_copy(update={"cells": wanted}), self.reading, matrix, None)


def within_reach(matrix: Matrix) -> list[Defect]:
    """Entries that affect a shipped stack; a unit test looks that a survey of releases shows the others."""
    pinned = [stack.pins for stack in matrix.stacks.values() if stack.backend == "cpu"]
    return [entry for entry in matrix.defects if any(affects(entry, pins) for pins in pinned)]


@pytest.fixture(scope="session")
def matrix() -> Matrix:
    return load(ROOT / "matrix.yaml")


@pytest.fixture(scope="session")
def families(request: pytest.FixtureRequest, matrix: Matrix, tmp_path_factory: pytest.TempPathFactory) -> Families:
    given: Path | None = request.config.getoption("--run")
    if given is None:
        out = tmp_path_factory.mktemp("families")
        stacks = [word for name in sorted(_cpu_stacks(matrix)) for word in ("--stack", name)]
        command = [sys.executable, "-m", "ci", "run", "--runtime", "venv", "--corrections", "both", *stacks]
        command += ["--out", str(out)]
        code = subprocess.run(command, cwd=ROOT, timeout=3600, check=False).returncode
        folder = (out / "latest").resolve()
    else:
        folder, code = given, int(runrecord.read_run(given).exit_code())
    return Families(folder, code, runrecord.read_plan(folder), evidence.read(folder / runrecord.EVIDENCE))


@pytest.fixture(scope="session")
def record(families: Families, matrix: Matrix) -> RunRecord:
    return families.judged(matrix)


@pytest.fixture(scope="session")
def cells(record: RunRecord) -> dict[str, CellRecord]:
    """The cells by id without the backend: "report-a/grpo-lora/zero0-bf16"."""
    return {cell.id.removeprefix("cpu/"): cell for cell in record.cells}


def _cpu_stacks(matrix: Matrix) -> list[str]:
    return [name for name in matrix.lanes["nightly"].stacks if matrix.stacks[name].backend == "cpu"]
