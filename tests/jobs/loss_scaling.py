"""The loss scale of a case: its fp16 section, and by which rule the scale must move.

The rules are written from what each wrapper documents, not read from it: a wrapper that moves its scale at another
step, by another factor or below its minimum must show. No torch here: the rules are tested as rules.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from packaging.version import Version

FACTOR = 2.0
"""By which every wrapper of DeepSpeed raises and lowers a dynamic scale; no key of the configuration changes it."""

OVERFLOW_STEPS = (1, 2)
"""Steps (from 0) of a `loss_scale: overflow` case whose gradients overflow: two, so that hysteresis 2 is used up."""

SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "static-128": {"loss_scale": 128},
    # Starting low enough that the gradients of the case stay far from fp16's 65504 however often the scale rises.
    "dynamic-window2": {
        "loss_scale": 0,
        "initial_scale_power": 7,
        "loss_scale_window": 2,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "init4-window1": {
        "loss_scale": 0,
        "initial_scale_power": 2,
        "loss_scale_window": 1,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    # The second overflow meets the minimum where there is no hysteresis; the last step raises the scale again.
    "overflow": {
        "loss_scale": 0,
        "initial_scale_power": 7,
        "loss_scale_window": 2,
        "hysteresis": 2,
        "min_loss_scale": 64,
    },
}

STEPS: Mapping[str, int] = {"static-128": 3, "dynamic-window2": 5, "init4-window1": 4, "overflow": 6}
"""Optimizer steps that each case needs for its scale to do all that the case is about."""

ZERO_LEAVES_OUT_THE_STEP_SINCE = "0.17.1"
"""First release in which ZeRO's scaler leaves the step itself out when it counts steps since the last overflow.

Before, the window was full with the step that filled it; since, with the step after, as in FP16_Optimizer
(deepspeedai/DeepSpeed#6976, "Improve overflow handling in ZeRO").
"""


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a wrapper moves a dynamic scale.

    hysteresis: overflows until the scale falls, counted anew after each rise; 1 where every overflow lowers it.
    counts_the_step: whether the step that fills the window raises the scale, or the one after it.
    """

    window: int
    minimum: float
    hysteresis: int
    counts_the_step: bool

    def after(self, scale_before: float, overflows: Sequence[bool]) -> float:
        """The scale after the step that `overflows[-1]` belongs to; overflows: all steps so far, oldest first."""
        left = self.hysteresis
        clean = 0
        scale = scale_before
        for overflow in overflows:
            scale = scale_before
            if overflow:
                clean = 0
                if left == 1:
                    scale = max(scale_before / FACTOR, self.minimum)
                else:
                    left -= 1
                continue
            counted = clean + 1 if self.counts_the_step else clean
            clean += 1
            if counted and counted % self.window == 0:
                scale = scale_before * FACTOR
                left = self.hysteresis
        return scale


def fp16_section(case: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keys of DeepSpeed's fp16 section for the case's `loss_scale`; None leaves ms-swift's own section."""
    kind = case.get("loss_scale", "none")
    return None if kind == "none" else dict(SECTIONS[kind])


def overflows_at(case: Mapping[str, Any], step: int) -> bool:
    """Whether the case makes the gradients of this step (from 0) overflow."""
    return case.get("loss_scale") == "overflow" and step in OVERFLOW_STEPS


def dynamic(case: Mapping[str, Any]) -> bool:
    """Whether the case's loss scale is a dynamic one, in DeepSpeed's words: `loss_scale` 0."""
    section = fp16_section(case)
    return section is not None and section["loss_scale"] == 0


def rule(case: Mapping[str, Any], wrapper: str, deepspeed_version: str) -> Rule:
    """The rule of a dynamic case. wrapper: class name of DeepSpeed's optimizer; ZeRO's alone know hysteresis."""
    section = SECTIONS[case["loss_scale"]]
    zero = "Zero" in wrapper
    release = Version(Version(deepspeed_version).base_version)
    return Rule(
        window=section["loss_scale_window"],
        minimum=float(section["min_loss_scale"]),
        hysteresis=section["hysteresis"] if zero else 1,
        counts_the_step=zero and release < Version(ZERO_LEAVES_OUT_THE_STEP_SINCE),
    )


def expected(
    case: Mapping[str, Any], wrapper: str, scale_before: float | None, overflows: Sequence[bool]
) -> float | None:
    """The scale after the step that `overflows[-1]` belongs to, or None where the dtype has no loss scale.

    overflows: for each step so far, oldest first, whether it overflowed. scale_before: the scale backward used.
    """
    if case.get("dtype") != "fp16" or scale_before is None or fp16_section(case) is None:
        return None
    if not dynamic(case):
        return float(SECTIONS[case["loss_scale"]]["loss_scale"])
    return rule(case, wrapper, importlib.metadata.version("deepspeed")).after(scale_before, overflows)


def never_moved(case: Mapping[str, Any], scales: Sequence[tuple[float | None, float | None]]) -> list[str]:
    """What to say of a finished dynamic case whose scale stood still; scales: (before, after) of every step.

    With a scale that stands still the scale before and after a step are one number, and a wrapper that takes the
    wrong one of them looks right.
    """
    if not dynamic(case) or any(before != after for before, after in scales):
        return []
    return ["the loss scale never moved in this dynamic case, which cannot judge it"]
