"""The job engine-sweep with real engines: a handful of cells is right, and each axis turns red when it is broken."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import bodies
from tests.jobs.launcher import Launcher, Outcome
from tests.stack import sweep_mutants as mutants
from tests.stack.given import CPU

PLAIN: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 0,
    "optimizer": "sgd",
    "world_size": 2,
    "loss_scale": "none",
    "checkpointing": "none",
    "offload": "none",
    "grad_accum_dtype": "unset",
    "backward_calls": 1,
    "parameters": "plain",
    "param_groups": 1,
    "weight_decay": 0,
    "resume": False,
    "steps": 3,
}
TOLERANCE = {"fp32": 1e-5, "bf16": 0.05, "fp16": 0.01}
UPDATE = 1e-6


@dataclasses.dataclass(frozen=True)
class Ran:
    """What a case left: its steps as the reference judged them, its exception, or why it has none."""

    problem: str | None
    exception: dict[str, Any] | None
    steps: list[dict[str, Any]]
    dtype: str

    def wrong(self) -> set[str]:
        """The checks that fail in any step, by the names of the contract."""
        found = {"exception"} if self.exception else set()
        if self.problem:
            found.add("problem")
        for step in self.steps:
            true, wanted = step["grad_norm_true"], step["grad_norm_wanted"]
            errors = {
                "forward": step["loss_error"],
                "gradient_used": max(step["gradient_error"], abs(step["grad_norm_used"] / wanted - 1)),
                "reported_norm": max((abs(n / true - 1) for n in step["grad_norm_reported"] if n), default=0.0),
            }
            found |= {name for name, error in errors.items() if not error <= TOLERANCE[self.dtype]}
            if not step["update_error"] <= UPDATE:
                found.add("update")
            if step["consistency"]:
                found.add("consistency")
        return found


def run(launcher: Launcher, folder: Path, body: Callable[[Any], None], case: dict[str, Any]) -> Ran:
    whole = {**PLAIN, **case}
    told = {
        "cell": "x",
        "job": "engine-sweep",
        "case": whole,
        "seed": 0,
        "world_size": whole["world_size"],
        "backend": CPU,
        "clip": 0.0,
        "corrections": [],
    }

    def launched(what: Callable[[Any], None], ranks: int) -> Outcome:
        return launcher.run(what, world_size=ranks, workdir=folder, log=folder / "log", timeout_s=60, payload=told)

    trained = launched(body, whole["world_size"])
    if trained.problem:
        return Ran(trained.problem, None, [], whole["dtype"])
    refereed = launched(bodies.referee, 1)
    assert refereed.problem is None, (folder / "log").read_text()
    result = json.loads((folder / "steps.json").read_text())
    return Ran(None, result["exception"], result["steps"], whole["dtype"])


@pytest.mark.parametrize(
    "case",
    [
        {"zero_stage": 0, "dtype": "fp32", "parameters": "unused", "world_size": 1},
        {
            "zero_stage": 1,
            "dtype": "bf16",
            "optimizer": "adamw",
            "param_groups": 2,
            "weight_decay": 0.1,
            "resume": True,
        },
        {"zero_stage": 2, "dtype": "fp32", "offload": "optimizer", "gradient_accumulation_steps": 2},
        {"zero_stage": 3, "dtype": "bf16", "parameters": "tied", "checkpointing": "non-reentrant", "world_size": 3},
        {"zero_stage": 2, "dtype": "fp16", "loss_scale": "static-128", "parameters": "frozen", "resume": True},
    ],
    ids=lambda case: "-".join(str(value) for value in case.values()),
)
def test_a_sweep_cell_is_right(launcher: Launcher, tmp_path: Path, case: dict[str, Any]) -> None:
    ran = run(launcher, tmp_path, mutants.clean, case)
    assert not ran.wrong(), ran
    assert len(ran.steps) == (4 if case.get("resume") else 3)
    assert all(math.isfinite(step["grad_norm_true"]) for step in ran.steps)


@pytest.mark.parametrize(
    ("body", "case", "red"),
    [
        (mutants.loses_a_backward_call, {"backward_calls": 2, "zero_stage": 0}, "gradient_used"),
        (mutants.unties, {"parameters": "tied"}, "gradient_used"),
        (mutants.one_learning_rate, {"param_groups": 2}, "update"),
        (mutants.no_decay, {"weight_decay": 0.1}, "update"),
        (mutants.loads_no_optimizer, {"resume": True, "optimizer": "adamw"}, "consistency"),
        (mutants.moves_what_is_frozen, {"parameters": "frozen"}, "consistency"),
        (mutants.trains_what_is_unused, {"parameters": "unused"}, "gradient_used"),
        (mutants.detaches_at_the_checkpoint, {"checkpointing": "non-reentrant"}, "gradient_used"),
        (mutants.scales_offloaded_gradients, {"offload": "optimizer"}, "gradient_used"),
        (mutants.drops_the_accumulation_dtype, {"grad_accum_dtype": "fp32", "dtype": "bf16"}, "problem"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_each_axis_turns_red_when_it_is_broken(
    launcher: Launcher, tmp_path: Path, body: Callable[[Any], None], case: dict[str, Any], red: str
) -> None:
    whole = {"zero_stage": 1, "dtype": "fp32", **case}
    for folder in ("clean", "broken"):
        (tmp_path / folder).mkdir()
    assert not run(launcher, tmp_path / "clean", mutants.clean, whole).wrong()
    assert red in run(launcher, tmp_path / "broken", body, whole).wrong()
