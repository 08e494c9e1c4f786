"""The numbers of one check of one step: measured against the truth, or against what known defects predict.

Everything here is arithmetic on recorded evidence; which defects are asked about, and what follows, is ci/judge.py's.
`error` is always what is compared with the tolerance, so that a reader can redo the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ci.evidence import Alternative, Gram, Step
from ci.matrix import Alternative as AlternativeName
from ci.matrix import Check as Name
from ci.matrix import Effect
from ci.runrecord import Check

FIXED_TOLERANCES: Mapping[Name, float] = {"update": 1e-6, "ranks_agree": 1e-6, "loss_scale": 0.0, "consistency": 0.0}
"""Exact rules of the contract: not measured by repeats, hence not in matrix.yaml."""

MEASURED: tuple[Name, ...] = ("forward", "reported_norm", "gradient_used")
"""Checks whose tolerance comes from clean repeats, in matrix.yaml."""


class Missing(Exception):
    """Numbers that a check needs are not in the evidence, and the step does not say why."""


@dataclass(frozen=True)
class Prediction:
    """What a set of defects makes of a check: whether the measurement is that, and the value it had to have."""

    ok: bool
    value: float | None


def relative(value: float | None, expected: float) -> float:
    """|value - expected| / |expected|, inf where the library reported None, nan where a number is nan."""
    if value is None:
        return math.inf
    if value == expected:
        return 0.0
    if not math.isfinite(value) or not math.isfinite(expected):
        return math.nan if math.isnan(value) or math.isnan(expected) else math.inf
    return abs(value - expected) / abs(expected) if expected else math.inf


def _root(squares: float) -> float:
    """The norm that a sum of squares is of; nan where it is none, so that whatever is compared with it fails."""
    return math.sqrt(squares) if squares >= 0 else math.nan


def _within(error: float, tolerance: float) -> bool:
    return error <= tolerance  # False for nan


def worst(errors: Iterable[float]) -> float:
    """The largest error; nan wins, since it hides any other."""
    found = list(errors)
    return math.nan if any(math.isnan(error) for error in found) else max(found, default=0.0)


def _farthest(reported: Sequence[float | None], expected: float) -> tuple[float | None, float]:
    """The reported value that is farthest from the expected one, and its error."""
    errors = [relative(value, expected) for value in reported]
    index = max(range(len(errors)), key=lambda i: math.inf if math.isnan(errors[i]) else errors[i])
    return reported[index], errors[index]


def gradient_error(gradient: dict[str, Gram], factor: float) -> float:
    """Largest per-tensor error of the measured gradient against factor x the recorded one.

    The denominator of each tensor is max(|r|, |r_all| / sqrt(number of tensors)), so that a tensor that is nearly zero
    does not decide.
    """
    if not gradient:
        return math.nan
    whole = _root(sum(gram.rr for gram in gradient.values())) / math.sqrt(len(gradient))
    errors = []
    for gram in gradient.values():
        squares = gram.gg - 2 * factor * gram.gr + factor * factor * gram.rr
        difference = 0.0 if squares < 0 else _root(squares)  # below zero by rounding; nan stays nan
        size = abs(factor) * worst((_root(gram.rr), whole))
        errors.append(difference / size if size else (math.inf if difference else 0.0))
    return worst(errors)


def _need(*numbers: float | None) -> list[float]:
    if any(number is None for number in numbers):
        raise Missing
    return [number for number in numbers if number is not None]


def _finite_reference(name: str, number: float) -> float:
    if not math.isfinite(number):
        raise Missing(f"the reference's own {name} is {number}")
    return number


def _of_error(name: Name, error: float, tolerance: float) -> Check:
    """A check whose measured value is an error, and 0 when all is well."""
    return _of_value(name, error, 0.0, error, tolerance)


def _of_value(name: Name, value: float | None, expected: float, error: float, tolerance: float) -> Check:
    return Check(
        name=name, ok=_within(error, tolerance), value=value, expected=expected, tolerance=tolerance, error=error
    )


def _forward(step: Step, tolerance: float) -> Check:
    errors = [number for number in (step.loss_error, step.logprob_error) if number is not None]
    if not errors:
        raise Missing
    error = worst(errors)
    return Check(
        name="forward", ok=_within(error, tolerance), value=error, expected=0.0, tolerance=tolerance, error=error
    )


def _reported_norm(step: Step, tolerance: float) -> Check:
    if not step.grad_norm_reported:
        raise Missing
    (true,) = _need(step.grad_norm_true)
    _finite_reference("norm", true)
    value, error = _farthest(step.grad_norm_reported, true)
    return _of_value("reported_norm", value, true, error, tolerance)


def _gradient_used(step: Step, tolerance: float) -> Check:
    tensors, used, wanted = _need(step.gradient_error, step.grad_norm_used, step.grad_norm_wanted)
    _finite_reference("wanted norm", wanted)
    error = worst((tensors, relative(used, wanted)))
    return Check(
        name="gradient_used",
        ok=_within(error, tolerance),
        value=used,
        expected=wanted,
        tolerance=tolerance,
        error=error,
    )


def _update(step: Step, tolerance: float) -> Check:
    (error,) = _need(step.update_error)
    return Check(
        name="update", ok=_within(error, tolerance), value=error, expected=0.0, tolerance=tolerance, error=error
    )


def _ranks_agree(step: Step, tolerance: float) -> Check:
    reported = step.grad_norm_reported
    if not reported:
        raise Missing
    if len(reported) == 1:
        return Check(name="ranks_agree", ok=None, reason="one rank")
    if all(value is None for value in reported):
        return Check(name="ranks_agree", ok=None, reason="the library reported no norm on any rank")
    if all(value is not None and math.isnan(value) for value in reported):
        spread = 0.0
    else:
        first = reported[0]
        spread = math.inf if first is None else worst(relative(value, first) for value in reported[1:])
    return _of_error("ranks_agree", spread, tolerance)


def _loss_scale(step: Step, tolerance: float) -> Check:
    (expected,) = _need(step.loss_scale_expected)
    error = relative(step.loss_scale_after, expected)
    return _of_value("loss_scale", step.loss_scale_after, expected, error, tolerance)


def _consistency(step: Step, tolerance: float) -> Check:
    found = float(len(step.consistency))
    return Check(
        name="consistency",
        ok=not step.consistency,
        value=found,
        expected=0.0,
        tolerance=tolerance,
        error=found,
        reason="; ".join(step.consistency) or None,
    )


_MEASURE: Mapping[Name, Callable[[Step, float], Check]] = {
    "forward": _forward,
    "reported_norm": _reported_norm,
    "gradient_used": _gradient_used,
    "update": _update,
    "ranks_agree": _ranks_agree,
    "loss_scale": _loss_scale,
    "consistency": _consistency,
}


def measure(name: Name, step: Step, tolerance: float) -> Check:
    """One check against the truth. Missing where its numbers are not there and the step does not declare why."""
    declared = step.not_judged.get(name)
    if declared is not None:
        return Check(name=name, ok=None, reason=declared)
    return _MEASURE[name](step, tolerance)


def _factor(effects: Sequence[Effect], step: Step) -> float | None:
    """The product of the effects' factors; None where the step lacks the scale that one of them names."""
    product = 1.0
    before, after = step.loss_scale_before, step.loss_scale_after
    for effect in effects:
        match effect.times:
            case None:
                continue
            case "loss_scale":
                factor = before
            case "1/loss_scale":
                factor = 1 / before if before else None
            case "scale_before/scale_after":
                factor = before / after if before is not None and after else None
            case number:
                factor = float(number)
        if factor is None:
            return None
        product *= factor
    return product


def _base(effects: Sequence[Effect], step: Step) -> tuple[str, Alternative] | None:
    """The alternative that the effects name, the truth where none does; None where they contradict or it is missing."""
    named = {effect.equals for effect in effects if effect.equals is not None}
    if len(named) > 1:
        return None
    name = named.pop() if named else "truth"
    alternative = step.alternatives.get(name)
    return None if alternative is None else (name, alternative)


def predict(name: Name, effects: Sequence[Effect], step: Step, tolerance: float) -> Prediction:
    """Whether the measurement is what the effects together say: `equals` first, then every `times`."""
    named = {effect.equals for effect in effects}
    if "none" in named or "inf" in named:
        return _predict_no_number(name, named, step)
    base, factor = _base(effects, step), _factor(effects, step)
    if factor is None:
        return Prediction(False, None)
    if name == "loss_scale":
        if step.loss_scale_expected is None or named != {None}:
            return Prediction(False, None)
        value = step.loss_scale_expected * factor
        return Prediction(step.loss_scale_after == value, value)
    if base is None:
        return Prediction(False, None)
    alternative = base[1]
    if name == "reported_norm":
        norm = step.grad_norm_true if base[0] == "truth" else alternative.reported_norm
        if norm is None or not step.grad_norm_reported:
            return Prediction(False, None)
        value = norm * factor
        return Prediction(_within(_farthest(step.grad_norm_reported, value)[1], tolerance), value)
    if name == "gradient_used":
        if not alternative.gradient or step.grad_norm_used is None:
            return Prediction(False, None)
        value = factor * _root(sum(gram.rr for gram in alternative.gradient.values()))
        error = worst((gradient_error(alternative.gradient, factor), relative(step.grad_norm_used, value)))
        return Prediction(_within(error, tolerance), value)
    if factor != 1.0:
        return Prediction(False, None)  # an update, a forward pass or a list is never a multiple of the right one
    if name == "consistency":
        left = alternative.consistency
        return Prediction(left == (), None if left is None else float(len(left)))
    error_there = {"update": alternative.update_error, "forward": alternative.forward_error}.get(name)
    return Prediction(error_there is not None and _within(error_there, tolerance), 0.0)


def _predict_no_number(name: Name, named: set[AlternativeName | None], step: Step) -> Prediction:
    if name != "reported_norm" or len(named - {None}) != 1 or not step.grad_norm_reported:
        return Prediction(False, None)
    if "none" in named:
        return Prediction(all(value is None for value in step.grad_norm_reported), None)
    return Prediction(all(value == math.inf for value in step.grad_norm_reported), math.inf)
