"""No run on another accelerator than the backend's: an order for a device that is not here ends as incomplete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.jobs.order import SCHEMA

ROOT = Path(__file__).parents[2]


def test_an_order_for_cuda_never_trains_on_the_cpu(tmp_path: Path) -> None:
    case = {"zero_stage": 3, "dtype": "fp32", "user_code": "plain", "frozen": False, "checkpointing": "none"}
    cell = {"id": "cuda/newest/x/plain", "job": "zero3-custom-adapter", "case": case, "world_size": 2, "timeout_s": 60}
    backend = {"id": "cuda", "accelerator": "cuda", "communication": "nccl", "start_method": "forkserver"}
    devices = {"visible": "CUDA_VISIBLE_DEVICES", "devices": ["0", "1"]}
    order = {
        "schema": SCHEMA,
        "backend": {**backend, **devices},
        "stack": {"id": "newest", "pins": {}, "check_pins": False},
        "cells": [cell],
    }
    (tmp_path / "order.json").write_text(json.dumps(order))
    command = [sys.executable, "-m", "pytest", "tests/jobs", "-p", "no:cacheprovider"]
    command += ["--order", str(tmp_path / "order.json"), "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout + (tmp_path / "evidence.jsonl").read_text()
    (line,) = (tmp_path / "evidence.jsonl").read_text().splitlines()
    evidence = json.loads(line)
    assert evidence["problem"] and not evidence["steps"], evidence
    assert evidence["accelerator"] == "cuda" and not evidence["device"]
