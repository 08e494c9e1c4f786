"""The sweep's loop against a place that makes its evidence up: it finds, shrinks, goes on, and ends in time."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ci import cases
from ci.errors import EnvironmentUnavailable
from ci.interrupts import Interrupts
from ci.matrix import Defect, Matrix, Scalar, load
from ci.plan import PlannedStack
from ci.provision.runtime import Environment
from ci.sweep import run
from ci.sweep.run import JOB, Place, Sweep, cell_of
from ci.sweep.tell import report
from tests.jobs import evidence as jobs
from tests.unit import synthetic
from tests.unit.synthetic import Faults

ROOT = Path(__file__).parents[2]
BROKEN = Defect.model_validate(
    {
        "id": "doubled",
        "title": "doubled",
        "upstream": [],
        "where": {},
        "affects": {"deepspeed": ">=0"},
        "symptom": {"gradient_used": {"times": 2.0}},
        "advice": "none",
    }
)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three drawn configurations, two of them wrong in one way."""
    busy: dict[str, Scalar] = {
        "dtype": "bf16",
        "zero_stage": 2,
        "world_size": 3,
        "parameters": "tied",
        "weight_decay": 0.1,
    }
    drawn = [{**busy, "backward_calls": 2}, busy, {**busy, "backward_calls": 2, "resume": True}]
    monkeypatch.setattr(run, "draws", lambda job, seed: iter([cases.resolve(job, each) for each in drawn]))


@functools.cache
def matrix() -> Matrix:
    """The shipped jobs, no ledger, and tolerances for what is made up."""
    made_up = synthetic.matrix()
    shipped = load(ROOT / "matrix.yaml")
    return made_up.model_copy(update={"jobs": shipped.jobs, "backends": shipped.backends})


class MadeUp:
    """A runtime in which two backward calls at ZeRO-2 double the gradient. silent: it leaves no evidence."""

    id = "venv"

    def __init__(self, silent: bool = False, running: bool = False) -> None:
        self.starts: list[list[str]] = []
        self._silent = silent
        self._running = running

    def start(self, environment: object, order_file: Path, folder: Path, workers: int) -> MadeUp:
        order = json.loads(order_file.read_text())
        self.starts.append([entry["id"] for entry in order["cells"]])
        if not self._silent:
            with (folder / "evidence.jsonl").open("a") as stream:
                stream.writelines(jobs.to_json(self._ran(entry)) + "\n" for entry in order["cells"])
        return self

    def _ran(self, entry: Mapping[str, Any]) -> jobs.Evidence:
        case = entry["case"]
        faults = Faults([BROKEN] if (case["zero_stage"], case["backward_calls"]) == (2, 2) else [])
        return synthetic.recorded(cell_of(matrix(), "newest", case), "0.19.8", faults)

    def poll(self) -> int | None:
        return None if self._running else 0

    def terminate(self) -> None:
        pass


def sweep(folder: Path, place: Any) -> Sweep:
    environment = Environment("venv", "newest", "python", {})
    stack = PlannedStack("newest", {}, None, check_pins=False)
    with Interrupts() as interrupts:
        return Sweep(matrix(), Place(place, environment, stack, folder), interrupts, lambda text: None)


def lines(found: Sweep) -> Sequence[str]:
    return list(report(matrix(), "newest", found.fold))


def test_it_finds_what_is_wrong_makes_it_small_and_says_how_to_repeat_it(tmp_path: Path) -> None:
    found = sweep(tmp_path, MadeUp())
    found.run(seed=0, minutes=1)
    text = "\n".join(lines(found))
    assert len(found.fold.findings) == 1
    assert "  - {zero_stage: 2, dtype: fp32, backward_calls: 2}" in text
    assert "repeat: nox -s sweep -- --stack newest --case zero_stage=2,dtype=fp32,backward_calls=2" in text
    assert "seen in 2 drawn configurations (zero2):" in text


def test_a_second_sweep_runs_nothing_twice(tmp_path: Path) -> None:
    first, second = MadeUp(), MadeUp()
    sweep(tmp_path, first).run(seed=0, minutes=1)
    sweep(tmp_path, second).run(seed=0, minutes=1)
    assert first.starts
    assert second.starts == []


def test_cells_given_are_run_alone(tmp_path: Path) -> None:
    place = MadeUp()
    found = sweep(tmp_path, place)
    found.only([cases.resolve(found.job, {"zero_stage": 2, "dtype": "bf16", "backward_calls": 2})])
    assert place.starts == [[f"cpu/newest/{JOB}/zero2-bf16-backward2"]]
    assert any("finding 1" in line for line in lines(found))


def test_a_place_that_leaves_no_evidence_is_an_error_but_not_when_the_time_is_up(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnavailable, match="no cell left evidence"):
        sweep(tmp_path, MadeUp(silent=True)).run(seed=0, minutes=1)
    cut_off = sweep(tmp_path, MadeUp(silent=True, running=True))
    cut_off.run(seed=0, minutes=0.02)
    assert not cut_off.fold.outcomes
