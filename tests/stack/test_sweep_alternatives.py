"""What the reference records beside the truth for defects of older releases, broken here on purpose on any release."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launcher import Launcher
from tests.stack import sweep_mutants as mutants
from tests.stack.test_sweep import TOLERANCE, run

BF16 = TOLERANCE["bf16"]


def error(step: dict[str, Any], name: str) -> float:
    """How far the gradient used is from an alternative, over its norm; inf where the step has no such alternative."""
    if name not in step["alternatives"]:
        return math.inf
    grams = step["alternatives"][name]["gradient"].values()
    apart = sum(max(0.0, gram["gg"] - 2 * gram["gr"] + gram["rr"]) for gram in grams)
    return math.sqrt(apart / sum(gram["rr"] for gram in grams))


def test_the_first_and_the_last_micro_batch(launcher: Launcher, tmp_path: Path) -> None:
    case = {"zero_stage": 2, "dtype": "fp32", "gradient_accumulation_steps": 4}
    ran = run(launcher, tmp_path, mutants.keeps_first_and_last, case)
    assert "gradient_used" in ran.wrong()
    for step in ran.steps:
        assert error(step, "first_and_last_micro_batch") < TOLERANCE["fp32"] < error(step, "last_micro_batch")
        reported = step["alternatives"]["first_and_last_micro_batch"]["reported_norm"]
        assert step["grad_norm_reported"] == pytest.approx([reported, reported], rel=TOLERANCE["fp32"])


def test_two_micro_batches_have_nothing_between_them(launcher: Launcher, tmp_path: Path) -> None:
    case = {"zero_stage": 2, "dtype": "fp32", "gradient_accumulation_steps": 2}
    ran = run(launcher, tmp_path, mutants.keeps_first_and_last, case)
    assert not ran.wrong()
    assert all("first_and_last_micro_batch" not in step["alternatives"] for step in ran.steps)


def test_masters_that_a_checkpoint_did_not_bring_back(launcher: Launcher, tmp_path: Path) -> None:
    case = {"zero_stage": 0, "dtype": "bf16", "resume": True}
    ran = run(launcher, tmp_path, mutants.keeps_its_own_masters, case)
    assert {"forward", "gradient_used", "consistency"} <= ran.wrong()
    before, after = ran.steps[:2], ran.steps[2:]
    assert all("masters_not_restored" not in step["alternatives"] for step in (*before, *after[1:]))
    found = after[0]["alternatives"]["masters_not_restored"]
    assert found["forward_error"] <= 2e-3 < after[0]["loss_error"]
    assert after[0]["consistency"] and found["consistency"] == []
    assert error(after[0], "masters_not_restored") < BF16 < error(after[0], "truth")
    assert "all_steps_so_far" not in after[0]["alternatives"]
    assert error(after[1], "truth") < BF16


def test_nothing_is_excused_where_masters_are_neither_saved_nor_fresh(launcher: Launcher, tmp_path: Path) -> None:
    case = {"zero_stage": 0, "dtype": "bf16", "resume": True}
    ran = run(launcher, tmp_path, mutants.loads_other_masters, case)
    found = ran.steps[2]["alternatives"]["masters_not_restored"]
    assert len(found["consistency"]) == len(ran.steps[2]["consistency"]) > 0
