"""ci/corrections/zero3_guard.py on the stack's own DeepSpeed: served, stopped at the line, or bitwise left alone.

What the job's user code does not do (a touch when the order of parameters is recorded already, in a module, through
torch's helpers, DeepSpeed's linear function, on one rank alone) has a body of its own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import cells
from tests.jobs.evidence import Evidence
from tests.jobs.launcher import Launcher
from tests.jobs.order import Cell, Order
from tests.stack import guard_bodies as bodies
from tests.stack.given import CPU

ORDER = Order(backend=CPU, stack="tests", pins={}, check_pins=False, cells=())
JOB = "zero3-custom-adapter"
CASE: dict[str, Any] = {
    "zero_stage": 3,
    "dtype": "fp32",
    "gradient_accumulation_steps": 1,
    "world_size": 2,
    "user_code": "plain",
    "checkpointing": "none",
    "frozen": False,
    "init": "disabled",
}
FP32 = 1e-5
"""Error of fp32 rounding, far below what a missing parameter makes."""
MESSAGE = re.compile(
    r"^(\S+:\d+): (\S+) on group_decode_adapter\.linear\.(weight|bias), shape \([\d, ]+\), which ZeRO-3 has "
)
GATHER, RAISE = "zero3_guard=gather", "zero3_guard=raise"

RunCell = Callable[..., Evidence]
RunBody = Callable[..., None]


@pytest.fixture
def run_cell(launcher: Launcher, tmp_path: Path) -> RunCell:
    """Runs a case with or without the guard and returns its evidence."""

    def run(correction: str | None, **changes: Any) -> Evidence:
        corrections = (correction,) if correction else ()
        cell = Cell(f"cpu/tests/{JOB}/case", JOB, {**CASE, **changes}, 2, 0, 120.0, corrections, None, None)
        recorded = cells.run(cell, ORDER, launcher, tmp_path)
        assert recorded.problem is None, recorded.problem
        assert recorded.corrections == corrections
        return recorded

    return run


@pytest.fixture
def run_body(launcher: Launcher, tmp_path: Path) -> RunBody:
    """Runs a body in ranks; what it raises fails the test."""

    def run(body: Callable[[Any], None], world_size: int = 1, **payload: Any) -> None:
        workdir = tmp_path / "work"
        workdir.mkdir()
        log = tmp_path / "log"
        ended = launcher.run(body, world_size=world_size, workdir=workdir, log=log, timeout_s=120.0, payload=payload)
        assert ended.problem is None, f"{ended.problem}\n{log.read_text()[-3000:]}"

    return run


def steps(recorded: Evidence) -> list[dict[str, Any]]:
    """The steps as plain data."""
    return [step if isinstance(step, dict) else dataclasses.asdict(step) for step in recorded.steps]


@pytest.mark.parametrize(
    "user_code", ["keepalive-before", "l2-after", "detached-norm", "gathered-sum-l2", "gathered-sum-some-steps"]
)
def test_served_the_user_s_code_is_right_in_every_step(run_cell: RunCell, user_code: str) -> None:
    """Each of these is wrong, or raises, without the guard: the cells of the ledger say how."""
    recorded = run_cell(GATHER, user_code=user_code)
    assert recorded.exception is None and len(recorded.steps) == recorded.steps_expected
    for step in steps(recorded):
        true, used, wanted = step["grad_norm_true"], step["grad_norm_used"], step["grad_norm_wanted"]
        assert step["loss_error"] <= FP32 and step["gradient_error"] <= FP32 and step["update_error"] <= 1e-6
        assert step["grad_norm_reported"] == pytest.approx([true, true], rel=FP32)
        assert used == pytest.approx(wanted, rel=FP32) and step["consistency"] in ((), [])


@pytest.mark.parametrize(
    ("user_code", "operation", "source"),
    [
        ("keepalive-after", "sum", "return sum(p.sum() for p in self.group_decode_adapter.parameters()) * 0.0"),
        ("gathered-sum-l2", "pow", "return sum((p**2).sum() for p in self.group_decode_adapter.parameters()) * 0.05"),
        (
            "gathered-sum-some-steps",
            "GatheredParameters",
            "with deepspeed.zero.GatheredParameters(list(self.group_decode_adapter.parameters())):",
        ),
    ],
)
def test_stopped_the_message_and_the_traceback_name_the_user_s_own_line(
    run_cell: RunCell, user_code: str, operation: str, source: str
) -> None:
    error = run_cell(RAISE, user_code=user_code).exception
    assert error is not None and error.type == "PartitionedParameterError" and (error.where or "").startswith("forward")
    found = MESSAGE.match(error.message)
    assert found is not None and found[2] == operation, error.message
    assert error.user_frame is not None
    assert error.user_frame.startswith(f"{found[1]} in ") and error.user_frame.endswith(f": {source}")
    for remedy in (
        "Write model.group_decode_adapter.linear.",
        "register_external_parameter",
        "(dummy_input).sum() * 0",
    ):
        assert remedy in error.message


@pytest.mark.parametrize(
    ("modes", "changes"),
    [
        ((GATHER, RAISE), {"user_code": "keepalive-attribute-some-steps", "checkpointing": "reentrant"}),
        ((GATHER, RAISE), {"user_code": "keepalive-after", "frozen": True}),
        # Gathered by hand and right all the same, as its module ran before and a sum keeps nothing for backward.
        ((RAISE,), {"user_code": "gathered-sum"}),
    ],
    ids=lambda value: value["user_code"] if isinstance(value, dict) else "",
)
def test_what_is_right_already_stays_bitwise_the_same(
    run_cell: RunCell, modes: tuple[str, ...], changes: dict[str, Any]
) -> None:
    plain = run_cell(None, **changes)
    assert plain.exception is None and len(plain.steps) == plain.steps_expected
    for mode in modes:
        guarded = run_cell(mode, **changes)
        assert guarded.exception is None and steps(guarded) == steps(plain)


def test_what_no_cell_does_trains_like_plain_torch(run_body: RunBody) -> None:
    run_body(
        bodies.trains_like_plain_torch,
        world_size=2,
        codes=["late", "vector", "list", "data", "functional", "in-a-module"],
    )


def test_what_no_cell_does_is_stopped_at_its_line(run_body: RunBody) -> None:
    run_body(
        bodies.stops_at_the_line,
        world_size=2,
        codes=[
            ("late", "pow", "extra = sum((p**2).sum() for p in self.side.parameters())"),
            ("vector", "view", "extra = torch.nn.utils.parameters_to_vector(self.side.parameters()).pow(2).sum()"),
            ("list", "cat", "extra = torch.cat([bias, bias]).exp().sum()"),
            ("data", "data", "extra = self.head.bias.sum() * next(iter(self.side.parameters())).data.norm()"),
            ("functional", "linear", "side = torch.nn.functional.linear(hidden, weight, bias)"),
            (
                "in-a-module",
                "pow",
                "return y * sum((p**2).sum() for p in self._others[0].parameters()) if penalize else y",
            ),
        ],
    )


def test_a_rank_that_touches_alone_is_told_so(run_body: RunBody) -> None:
    run_body(bodies.touches_alone, world_size=2)


def test_it_keeps_to_its_releases_and_applies_once(run_body: RunBody) -> None:
    run_body(bodies.keeps_to_its_releases)


def test_unknown_code_and_modes_are_refused_before_anything_is_patched(run_body: RunBody) -> None:
    zero = "deepspeed.runtime.zero"
    run_body(
        bodies.refuses,
        code=[
            (f"{zero}.parameter_offload", "DeepSpeedZeRoOffload", "post_sub_module_forward_function"),
            (f"{zero}.parameter_offload", None, "FWD_MODULE_STACK"),
            (f"{zero}.partition_parameters", "GatheredParameters", "__enter__"),
            (f"{zero}.partition_parameters", None, "register_external_parameter"),
            (f"{zero}.linear", None, "LinearFunctionForZeroStage3"),
        ],
    )
