"""ci/corrections/loss_scale.py and moe_clip_norm.py on the stack's own DeepSpeed, where it shows their defects.

Corrected cells pass every check in every step, cells that no correction concerns are bitwise as they were, and what
no cell can show (accumulation in fp16, experts of two ranks, checkpoints, releases, unknown code) has a body of its
own. Other releases are covered by the ledger's cells under `--corrections both`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import cells
from tests.jobs.evidence import Evidence
from tests.jobs.launcher import Launcher
from tests.jobs.order import Cell, Order
from tests.stack import fp16_correction_bodies as bodies
from tests.stack.given import CPU

ORDER = Order(backend=CPU, stack="tests", pins={}, check_pins=False, cells=())
FP16: dict[str, Any] = {
    "zero_stage": 0,
    "dtype": "fp16",
    "gradient_clipping": "unset",
    "optimizer": "unfused",
    "world_size": 2,
    "path": "direct",
    "step_method": "step",
    "loss_scale": "dynamic-window2",
    "experts": False,
}
GRPO: dict[str, Any] = {
    "trainer": "engine",
    "zero_stage": 0,
    "dtype": "bf16",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "unset",
    "optimizer": "sgd",
    "world_size": 2,
    "num_iterations": 1,
    "beta": 0,
    "lora_b": "seeded",
}
NORM, GRADIENT, UPDATE = 0.00036, 0.0015, 1e-6
"""Tolerances of the job in matrix.yaml."""

RunCell = Callable[..., Evidence]
RunBody = Callable[..., None]


@pytest.fixture
def run_cell(launcher: Launcher, tmp_path: Path) -> RunCell:
    """Runs a case with corrections and returns its evidence, which is whole."""

    def run(job: str, base: dict[str, Any], corrections: tuple[str, ...], **changes: Any) -> Evidence:
        cell = Cell(f"cpu/tests/{job}/case", job, {**base, **changes}, 2, 0, 120.0, corrections, None, None)
        recorded = cells.run(cell, ORDER, launcher, tmp_path)
        assert recorded.problem is None and recorded.exception is None, recorded
        assert len(recorded.steps) == recorded.steps_expected
        assert recorded.corrections == corrections
        return recorded

    return run


@pytest.fixture
def run_body(launcher: Launcher, tmp_path: Path) -> RunBody:
    """Runs a body in ranks; what it raises fails the test."""

    def run(body: bodies.Body, world_size: int = 1, **payload: Any) -> None:
        workdir = tmp_path / "work"
        workdir.mkdir()
        log = tmp_path / "log"
        ended = launcher.run(body, world_size=world_size, workdir=workdir, log=log, timeout_s=120.0, payload=payload)
        assert ended.problem is None, f"{ended.problem}\n{log.read_text()[-3000:]}"

    return run


def wrong(recorded: Evidence) -> list[str]:
    """The checks that fail, by step."""
    found = []
    for step in _steps(recorded):
        if step["loss_scale_after"] != step["loss_scale_expected"]:
            found.append(f"{step['index']}: loss scale {step['loss_scale_after']}")
        if step["consistency"]:
            found.append(f"{step['index']}: {step['consistency']}")
        if step["overflow"]:
            continue
        true, used, wanted = step["grad_norm_true"], step["grad_norm_used"], step["grad_norm_wanted"]
        for reported in step["grad_norm_reported"]:
            if not abs(reported - true) <= NORM * true:
                found.append(f"{step['index']}: reports {reported}, true {true}")
        if not (abs(used - wanted) <= GRADIENT * wanted and step["gradient_error"] <= GRADIENT):
            found.append(f"{step['index']}: uses {used}, wanted {wanted}, error {step['gradient_error']}")
        if not step["update_error"] <= UPDATE:
            found.append(f"{step['index']}: update error {step['update_error']}")
    return found


def _steps(recorded: Evidence) -> list[dict[str, Any]]:
    return [step if isinstance(step, dict) else dataclasses.asdict(step) for step in recorded.steps]


SCALE = ("loss_scale",)


@pytest.mark.parametrize(
    ("corrections", "changes"),
    [
        (SCALE, {"loss_scale": "static-128"}),
        (SCALE, {"loss_scale": "init4-window1", "gradient_clipping": 0.75}),
        (SCALE, {"step_method": "legacy", "gradient_clipping": 0.75}),
        (SCALE, {"path": "engine", "gradient_clipping": 0.5}),
        (SCALE, {"path": "engine", "loss_scale": "overflow"}),
        (SCALE, {"optimizer": "fused"}),
        (SCALE, {"optimizer": "fused", "step_method": "legacy", "gradient_clipping": 0.75}),
        (SCALE, {"optimizer": "fused", "path": "engine", "gradient_clipping": 0.75}),
        (SCALE, {"zero_stage": 1, "path": "engine", "gradient_clipping": 0.75}),
        (SCALE, {"zero_stage": 2, "path": "engine", "loss_scale": "overflow"}),
        (SCALE, {"zero_stage": 3, "path": "engine", "gradient_clipping": 0.75}),
        (("loss_scale", "moe_clip_norm"), {"experts": True, "gradient_clipping": 0.75}),
        (("moe_clip_norm", "loss_scale"), {"experts": True, "gradient_clipping": 0.5, "step_method": "legacy"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "+".join(value),
)
def test_a_corrected_cell_is_right_in_every_step(
    run_cell: RunCell, corrections: tuple[str, ...], changes: dict[str, Any]
) -> None:
    """Each of these is wrong without the correction: the cells of the ledger say how."""
    assert wrong(run_cell("fp16-optimizers", FP16, corrections, **changes)) == []


@pytest.mark.parametrize(
    ("job", "base", "changes"),
    [
        ("grpo-lora", GRPO, {}),
        ("grpo-lora", GRPO, {"zero_stage": 2}),
        ("fp16-optimizers", FP16, {"optimizer": "fused", "loss_scale": "static-128"}),
        ("fp16-optimizers", FP16, {"zero_stage": 3, "path": "engine", "loss_scale": "static-128"}),
    ],
    ids=["bf16-zero0", "bf16-zero2", "fp16-fused-static", "fp16-zero3-static"],
)
def test_a_cell_not_concerned_is_bitwise_as_it_was(
    run_cell: RunCell, job: str, base: dict[str, Any], changes: dict[str, Any]
) -> None:
    plain = run_cell(job, base, (), **changes)
    corrected = run_cell(job, base, ("loss_scale", "moe_clip_norm"), **changes)
    assert _steps(corrected) == _steps(plain)


@pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
def test_the_loss_is_scaled_for_every_micro_batch(run_body: RunBody, fused: bool) -> None:
    run_body(bodies.accumulates_scaled, fused=fused, corrections=["loss_scale"])


@pytest.mark.parametrize("corrections", [["moe_clip_norm"], ["loss_scale", "moe_clip_norm"]], ids="+".join)
def test_experts_of_every_rank_count(run_body: RunBody, corrections: list[str]) -> None:
    run_body(bodies.experts_of_each_rank, world_size=2, corrections=corrections)


def test_a_bf16_checkpoint_brings_no_scale(run_body: RunBody) -> None:
    run_body(bodies.bf16_checkpoint, corrections=["loss_scale"])


def test_each_keeps_to_its_releases_and_applies_once(run_body: RunBody) -> None:
    run_body(bodies.keeps_to_its_releases)


def test_unknown_code_is_refused_before_anything_is_patched(run_body: RunBody) -> None:
    unfused = ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer")
    fused = ("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer")
    run_body(
        bodies.refuses,
        methods=[
            *[("loss_scale", *unfused, name) for name in ("step", "step_fused_lamb", "unscale_and_clip_grads")],
            ("loss_scale", *unfused, "load_state_dict"),
            *[("loss_scale", *fused, name) for name in ("step", "step_fused_adam")],
            ("loss_scale", "deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer", "step"),
            ("loss_scale", "deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3", "_update_scale"),
            ("loss_scale", "deepspeed.runtime.engine", "DeepSpeedEngine", "backward"),
            *[("moe_clip_norm", *unfused, name) for name in ("step", "step_fused_lamb", "unscale_and_clip_grads")],
        ],
    )
