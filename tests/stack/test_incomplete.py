"""What fails before training is incomplete evidence, never something that training raised, and never another device.

A rank that finds another accelerator than the backend's would train and prove nothing; one whose process group cannot
be made has not reached what is under test.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import cells
from tests.jobs.order import SCHEMA, Cell, Order
from tests.stack.given import CPU, Given

ROOT = Path(__file__).parents[2]

ADAPTER = {"zero_stage": 3, "dtype": "fp32", "user_code": "plain", "frozen": False, "init": "disabled"}
ADAPTER |= {"checkpointing": "none"}
GRPO = {"zero_stage": 0, "dtype": "bf16", "gradient_accumulation_steps": 1, "gradient_clipping": 0, "lora_b": "seeded"}
SWEEP = {"zero_stage": 1, "dtype": "fp32", "gradient_clipping": 0, "gradient_accumulation_steps": 1, "resume": False}
SWEEP_REST = {"offload": "none", "grad_accum_dtype": "unset", "parameters": "plain", "param_groups": 1, "steps": 3}
HAND_MADE = {"zero_stage": 0, "dtype": "fp16", "gradient_clipping": 0, "path": "direct", "loss_scale": "static-128"}


def run(folder: Path, backend: Mapping[str, Any], job: str, case: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence of one cell, run as `python -m ci run` runs it; pytest's own code has to be 1."""
    cell = {"id": f"{backend['id']}/newest/{job}/x", "job": job, "case": case, "world_size": 2, "timeout_s": 120}
    stack = {"id": "newest", "pins": {}, "check_pins": False}
    order = {"schema": SCHEMA, "backend": backend, "stack": stack, "cells": [cell]}
    (folder / "order.json").write_text(json.dumps(order))
    command = [sys.executable, "-m", "pytest", "tests/jobs", "-p", "no:cacheprovider"]
    command += ["--order", str(folder / "order.json"), "--results", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    (line,) = (folder / "evidence.jsonl").read_text().splitlines()
    assert done.returncode == 1, done.stdout + line
    evidence: dict[str, Any] = json.loads(line)
    return evidence


def test_an_order_for_cuda_never_trains_on_the_cpu(tmp_path: Path) -> None:
    cuda = {**CPU, "id": "cuda", "accelerator": "cuda", "communication": "nccl"}
    devices = {"visible": "CUDA_VISIBLE_DEVICES", "devices": ["0", "1"]}
    evidence = run(tmp_path, {**cuda, **devices}, "zero3-custom-adapter", ADAPTER)
    assert evidence["problem"] and not evidence["steps"], evidence
    assert evidence["accelerator"] == "cuda" and not evidence["device"] and evidence["probe"] is None


def test_a_fall_back_to_the_cpu_that_would_train_is_an_error(tmp_path: Path) -> None:
    """Everything here would let DeepSpeed train on the CPU, as it does by itself where it finds no device."""
    silent = {**CPU, "id": "cuda", "accelerator": "cuda", "environment": {"DS_ACCELERATOR": "cpu"}}
    evidence = run(tmp_path, silent, "zero3-custom-adapter", ADAPTER)
    expected = "before the first case: rank 0 raised RuntimeError: wrong accelerator: DeepSpeed chose 'cpu'"
    assert evidence["problem"].startswith(expected) and not evidence["steps"], evidence
    assert "wrong accelerator" in (tmp_path / evidence["log"]).read_text()


@pytest.mark.parametrize(
    ("job", "case"),
    [
        ("zero3-custom-adapter", ADAPTER),
        (
            "engine-sweep",
            {**SWEEP, **SWEEP_REST, "optimizer": "sgd", "backward_calls": 1, "weight_decay": 0, "loss_scale": "none"},
        ),
        ("fp16-optimizers", {**HAND_MADE, "optimizer": "unfused", "step_method": "step", "experts": False}),
        ("grpo-lora", {**GRPO, "trainer": "trl", "optimizer": "adamw", "num_iterations": 1, "beta": 0}),
    ],
    ids=["engine", "sweep", "direct", "trl"],
)
def test_a_process_group_that_cannot_be_made_is_no_exception_of_training(
    tmp_path: Path, job: str, case: dict[str, Any]
) -> None:
    """Past the probe, whose own process group was made."""
    cell = Cell(f"cpu/newest/{job}/x", job, {"world_size": 2, **case}, 2, 0, 120.0, (), None, None)
    order = Order(CPU, "newest", {}, False, (cell,))
    evidence = cells.run(cell, order, Given({"GLOO_SOCKET_IFNAME": "nowhere0"}), tmp_path)
    assert evidence.exception is None and evidence.problem, evidence
    assert "nowhere0" in (tmp_path / str(evidence.log)).read_text()
