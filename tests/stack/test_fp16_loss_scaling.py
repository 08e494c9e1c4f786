"""The rules by which a loss scale moves, step by step against tables written out by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from tests.jobs import loss_scaling
from tests.jobs.loss_scaling import Rule

STAGE_0 = "FP16_UnfusedOptimizer"
ZERO = "DeepSpeedZeroOptimizer_Stage3"
OLD, NEW = "0.15.4", "0.19.8"


def trajectory(rule: Rule, initial: float, overflows: Sequence[bool]) -> list[float]:
    """The scale after each step."""
    scales = []
    scale = initial
    for step in range(len(overflows)):
        scale = rule.after(scale, overflows[: step + 1])
        scales.append(scale)
    return scales


def of_case(kind: str, wrapper: str, version: str) -> list[float]:
    """The scales of a whole case, from its own section."""
    case = {"dtype": "fp16", "loss_scale": kind}
    overflows = [loss_scaling.overflows_at(case, step) for step in range(loss_scaling.STEPS[kind])]
    initial = 2.0 ** loss_scaling.SECTIONS[kind]["initial_scale_power"]
    return trajectory(loss_scaling.rule(case, wrapper, version), initial, overflows)


@pytest.mark.parametrize(
    ("kind", "wrapper", "version", "scales"),
    [
        ("dynamic-window2", STAGE_0, OLD, [128, 128, 256, 256, 512]),
        ("dynamic-window2", "FP16_Optimizer", NEW, [128, 128, 256, 256, 512]),
        ("dynamic-window2", ZERO, NEW, [128, 128, 256, 256, 512]),
        ("dynamic-window2", ZERO, OLD, [128, 256, 256, 512, 512]),
        ("init4-window1", STAGE_0, NEW, [4, 8, 16, 32]),
        ("init4-window1", ZERO, NEW, [4, 8, 16, 32]),
        ("init4-window1", ZERO, OLD, [8, 16, 32, 64]),
        # Two overflows: stage 0 halves at once and is stopped by the minimum, ZeRO's hysteresis lets one pass.
        ("overflow", STAGE_0, NEW, [128, 64, 64, 64, 64, 128]),
        ("overflow", "DeepSpeedZeroOptimizer", NEW, [128, 128, 64, 64, 64, 128]),
        ("overflow", "DeepSpeedZeroOptimizer", OLD, [128, 128, 64, 64, 128, 128]),
    ],
)
def test_a_cases_scales(kind: str, wrapper: str, version: str, scales: list[float]) -> None:
    assert of_case(kind, wrapper, version) == scales


def test_window_counts_from_the_last_overflow() -> None:
    rule = Rule(window=3, minimum=1, hysteresis=1, counts_the_step=False)
    assert trajectory(rule, 64, [False, False, True] + [False] * 7) == [64, 64, 32, 32, 32, 32, 64, 64, 64, 128]


def test_hysteresis_is_counted_over_clean_steps_and_anew_after_a_rise() -> None:
    rule = Rule(window=2, minimum=1, hysteresis=2, counts_the_step=True)
    assert trajectory(rule, 64, [True, False, True, False, False, True]) == [64, 64, 32, 32, 64, 64]


def test_never_below_the_minimum() -> None:
    rule = Rule(window=1000, minimum=16, hysteresis=1, counts_the_step=False)
    assert trajectory(rule, 64, [True] * 4) == [32, 16, 16, 16]


def test_a_wrong_scale_before_is_not_carried_on() -> None:
    """The rule starts from the scale that backward used, so that one wrong step is one finding."""
    rule = Rule(window=1, minimum=1, hysteresis=1, counts_the_step=False)
    assert rule.after(1000, [False, False]) == 2000


def test_static_scale_stays_and_other_dtypes_have_none() -> None:
    static = {"dtype": "fp16", "loss_scale": "static-128"}
    assert loss_scaling.expected(static, STAGE_0, 128.0, [False]) == 128
    assert loss_scaling.expected(static, STAGE_0, 64.0, [True]) == 128
    assert loss_scaling.expected({"dtype": "bf16"}, STAGE_0, 65536.0, [False]) is None
    assert loss_scaling.fp16_section({"dtype": "bf16"}) is None


def test_a_dynamic_case_must_see_the_scale_move() -> None:
    dynamic = {"dtype": "fp16", "loss_scale": "init4-window1"}
    assert loss_scaling.never_moved(dynamic, [(4, 4), (4, 4)])
    assert not loss_scaling.never_moved(dynamic, [(4, 4), (4, 8)])
    assert not loss_scaling.never_moved({"dtype": "fp16", "loss_scale": "static-128"}, [(128, 128)])


@pytest.mark.parametrize("kind", [kind for kind in loss_scaling.SECTIONS if kind != "static-128"])
@pytest.mark.parametrize("wrapper", [STAGE_0, ZERO])
@pytest.mark.parametrize("version", [OLD, NEW])
def test_every_dynamic_case_raises_its_scale_at_least_once(kind: str, wrapper: str, version: str) -> None:
    """A step at which the scale rises tells the scale before from the scale after; nothing else does."""
    scales = of_case(kind, wrapper, version)
    assert any(after > before for before, after in itertools.pairwise(scales))
