"""The ZeRO corrections on the stack's own DeepSpeed, where it shows their defects; stand-ins where it does not.

Corrected cells pass every check in every step, cells that no correction concerns are bitwise as they were, and what
no cell can show has a body of its own. Other releases are covered by the ledger's cells under `--corrections both`.
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
from tests.stack import zero_correction_bodies as bodies
from tests.stack.given import CPU

ORDER = Order(backend=CPU, stack="tests", pins={}, check_pins=False, cells=())
ADAPTER: dict[str, Any] = {
    "zero_stage": 3,
    "dtype": "fp32",
    "gradient_accumulation_steps": 1,
    "world_size": 2,
    "user_code": "used-in-some-steps",
    "checkpointing": "none",
    "frozen": False,
    "init": "disabled",
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
NORM, GRADIENT, UPDATE = {"fp32": 2e-6, "bf16": 3e-4}, {"fp32": 3e-6, "bf16": 8.2e-3}, 1e-6
"""Tolerances of the jobs in matrix.yaml, the widest of each dtype here."""
FILES = ("fp32_zero0_norm", "unfused_dummy_step", "zero3_stale_gradient")
"""Those that the stack's release needs; zero2_micro_batches claims older ones."""

RunCell = Callable[..., Evidence]
RunBody = Callable[..., None]


@pytest.fixture
def run_cell(launcher: Launcher, tmp_path: Path) -> RunCell:
    """Runs a case with corrections and returns its evidence, which is whole."""

    def run(job: str, case: dict[str, Any], corrections: tuple[str, ...]) -> Evidence:
        cell = Cell(f"cpu/tests/{job}/case", job, case, 2, 0, 120.0, corrections, None, None)
        recorded = cells.run(cell, ORDER, launcher, tmp_path)
        assert recorded.problem is None and recorded.exception is None, recorded
        assert len(recorded.steps) == recorded.steps_expected
        assert recorded.corrections == corrections
        return recorded

    return run


@pytest.fixture
def run_body(launcher: Launcher, tmp_path: Path) -> RunBody:
    """Runs a body in ranks; what it raises fails the test."""

    def run(body: Callable[[Any], None], world_size: int = 1, **payload: Any) -> None:
        log = tmp_path / "log"
        ended = launcher.run(body, world_size=world_size, workdir=tmp_path, log=log, timeout_s=120.0, payload=payload)
        assert ended.problem is None, f"{ended.problem}\n{log.read_text()[-3000:]}"

    return run


def _steps(recorded: Evidence) -> list[dict[str, Any]]:
    return [step if isinstance(step, dict) else dataclasses.asdict(step) for step in recorded.steps]


def wrong(recorded: Evidence, dtype: str) -> list[str]:
    """The checks that fail, by step."""
    found = []
    for step in _steps(recorded):
        true, used, wanted = step["grad_norm_true"], step["grad_norm_used"], step["grad_norm_wanted"]
        for reported in step["grad_norm_reported"]:
            if reported is None or not abs(reported - true) <= NORM[dtype] * true:
                found.append(f"{step['index']}: reports {reported}, true {true}")
        if not (abs(used - wanted) <= GRADIENT[dtype] * wanted and step["gradient_error"] <= GRADIENT[dtype]):
            found.append(f"{step['index']}: uses {used}, wanted {wanted}, error {step['gradient_error']}")
        if not step["update_error"] <= UPDATE:
            found.append(f"{step['index']}: update error {step['update_error']}")
        if step["consistency"]:
            found.append(f"{step['index']}: {step['consistency']}")
    return found


@pytest.mark.parametrize(
    ("correction", "job", "case"),
    [
        ("zero3_stale_gradient", "zero3-custom-adapter", ADAPTER),
        ("unfused_dummy_step", "grpo-lora", {**GRPO, "optimizer": "adamw"}),
        ("fp32_zero0_norm", "grpo-lora", {**GRPO, "dtype": "fp32", "gradient_clipping": "binding"}),
        ("fp32_zero0_norm", "grpo-lora", {**GRPO, "dtype": "fp32", "gradient_clipping": 0}),
    ],
    ids=["zero3-stale", "unfused-dummy", "fp32-norm-binding", "fp32-norm-no-clip"],
)
def test_a_corrected_cell_is_right_in_every_step(
    run_cell: RunCell, correction: str, job: str, case: dict[str, Any]
) -> None:
    """Each of these is wrong without the correction: the cells of the ledger say how."""
    assert wrong(run_cell(job, case, (correction,)), case["dtype"]) == []


@pytest.mark.parametrize(
    ("job", "case"),
    [
        ("zero3-custom-adapter", {**ADAPTER, "user_code": "plain"}),
        ("grpo-lora", GRPO),
        ("grpo-lora", {**GRPO, "zero_stage": 2, "dtype": "fp32"}),
    ],
    ids=["zero3", "bf16-zero0", "fp32-zero2"],
)
def test_a_cell_not_concerned_is_bitwise_as_it_was(run_cell: RunCell, job: str, case: dict[str, Any]) -> None:
    assert _steps(run_cell(job, case, FILES)) == _steps(run_cell(job, case, ()))


CPU_OPTIMIZER = {"offload_optimizer": {"device": "cpu"}, "sub_group_size": 20}


@pytest.mark.parametrize(
    ("payload", "schedule"),
    [
        # First never used, then used, then not; two backward passes that use one branch each.
        ({"zero": {"stage": 3, "sub_group_size": 20}, "clip": 0.3}, [["a"], ["abc"], ["b"], ["b"], ["abc"]]),
        # Used in the first micro-batch alone, or in the last alone.
        ({"zero": {"stage": 3}, "accumulation": 3}, [["abc", "abc", "abc"], ["ab", "a", "a"], ["a", "ac", "ab"]]),
        ({"zero": {"stage": 3, **CPU_OPTIMIZER}}, [["abc"], ["a"], ["bc"], ["abc"]]),
        (
            {"zero": {"stage": 3, **CPU_OPTIMIZER}, "accumulation": 3},
            [["abc", "abc", "abc"], ["ab", "a", "a"], ["a", "ac", "ab"], ["a", "a", "ab"]],
        ),
    ],
    ids=["clip", "accumulation", "offloaded", "offloaded-accumulation"],
)
def test_zero3_follows_plain_training_with_parameters_that_are_used_at_times(
    run_body: RunBody, payload: dict[str, Any], schedule: list[list[str]]
) -> None:
    calls = [[[used] for used in micro_batches] for micro_batches in schedule]
    run_body(
        bodies.follows_plain_training, world_size=2, corrections=["zero3_stale_gradient"], schedule=calls, **payload
    )


def test_every_optimizer_begins_as_if_it_had_never_stepped(run_body: RunBody) -> None:
    run_body(bodies.begins_as_if_never_stepped, corrections=["unfused_dummy_step"])


def test_zero2_adds_up_micro_batches(run_body: RunBody) -> None:
    run_body(bodies.adds_up_micro_batches)


def test_zero2_adds_up_offloaded_micro_batches(run_body: RunBody) -> None:
    run_body(bodies.adds_up_offloaded_micro_batches)


def test_the_norm_counts_every_expert_once(run_body: RunBody) -> None:
    run_body(bodies.norm_counts_every_expert_once, world_size=2)


def test_each_keeps_to_its_releases_and_applies_once(run_body: RunBody) -> None:
    run_body(bodies.keeps_to_its_releases)


def test_unknown_code_is_refused_before_anything_is_patched(run_body: RunBody) -> None:
    zero3 = ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3")
    zero2 = ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer")
    unfused = ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer")
    run_body(
        bodies.refuses,
        methods=[
            *[
                ("zero3_stale_gradient", None, *zero3, name)
                for name in ("partition_grads", "independent_gradient_partition_epilogue", "zero_grad", "step")
            ],
            ("unfused_dummy_step", None, *unfused, "initialize_optimizer_states"),
            ("fp32_zero0_norm", None, "deepspeed.runtime.engine", "DeepSpeedEngine", "_take_model_step"),
            ("zero2_micro_batches", "0.18.2", *zero2, "independent_gradient_partition_epilogue"),
            ("zero2_micro_batches", "0.15.4", *zero2, "async_accumulate_grad_in_cpu_via_gpu"),
        ],
    )
