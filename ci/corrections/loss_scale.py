"""Gradients are unscaled, clipped and reported by the loss scale that backward used, and by no other.

Cause, in DeepSpeed (paths below deepspeed/runtime):
- The wrappers move a dynamic loss scale as soon as they know that nothing overflowed, and unscale with it afterwards:
  fp16/unfused_optimizer.py `step` and `step_fused_lamb`, fp16/fused_optimizer.py `step` and `step_fused_adam`,
  zero/stage_1_and_2.py `step`, zero/stage3.py `step`. Whenever the scale rises the gradients are halved, and a clip
  between half the norm and the norm does not bind; but for ZeRO-1/2 and the unfused wrapper the report is halved too.
- `FP16_UnfusedOptimizer` reports the norm of gradients that are still scaled.
- Since 0.18.3 engine.py `backward` scales the loss for ZeRO's optimizers alone, while `step` at ZeRO-0 divides as
  before: true gradient / scale, so that training stands still.
- 0.17.6 - 0.18.5 run bf16 at ZeRO-0 in `FP16_UnfusedOptimizer` with fp16's loss scale, 65536 (wrong report up to
  0.18.2, frozen update from 0.18.3), and engine.py `_take_model_step` never clears its gradients.
- 0.17.6 - 0.18.1: `FP16_Optimizer.step` returns after its overflow check, whatever that found.
- Before 0.17.1 engine.py builds `FP16_Optimizer` without timers where the scale is static, and its `step` calls them.
Halves of this are wrong alone: a loss that is scaled where `step` does not divide, or the other way round.

Releases: DeepSpeed 0.14.4 and newer; which part concerns which is in `CLAIMS`. Not touched: bf16 where it is right
(up to 0.17.5 and, but for the loading of checkpoints, from 0.18.6), ZenFlow's and SuperOffload's own steps, and
`override_loss_scale`.
Upstream: DeepSpeed #8588 (unscaling, report; open), #8393 (loss not scaled; open), #7837 and #7839 (bf16),
#7645 (steps that return), #7330 (timers); ms-swift #6815.

What it does: while one of these steps runs, a scale that is to rise is remembered and moved when the step is over,
so that all that follows the overflow check sees the scale of the backward pass. An overflow moves it at once, as
nothing follows. Then the unfused wrapper's report is divided by that same scale, `DeepSpeedEngine.backward` scales
the loss for both fp16 wrappers, and bf16 has the scale 1, also in a checkpoint that was saved with another. Where
`FP16_Optimizer.step` returns early the overflow check is made before it, and a step without overflow goes on.

Import this file before deepspeed.initialize: `import loss_scale`, or `swift rlhf --external_plugins loss_scale.py`.
Proof: tests/stack/test_corrections_fp16.py, and under `--corrections both` the cells of all ledger entries with
`correction: loss_scale`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils.timer import NoopTimer
from packaging.specifiers import SpecifierSet
from packaging.version import Version

NAME = "loss_scale"
CLAIMS = {
    "scale of backward": ">=0.14.4",
    "engine scales the loss": ">=0.18.3",
    "bf16 without a scale": ">=0.17.6,<0.18.6",
    "bf16 checkpoints": ">=0.17.6",
    "fused steps": ">=0.17.6,<0.18.2",
    "fused timers": ">=0.14.4,<0.17.1",
}
_MARK = "_corrected_loss_scale"
_PENDING = "_loss_scale_updates_pending"
_STEPS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (FP16_UnfusedOptimizer, ("step", "step_fused_lamb")),
    (FP16_Optimizer, ("step", "step_fused_adam")),
    (DeepSpeedZeroOptimizer, ("step",)),
    (DeepSpeedZeroOptimizer_Stage3, ("step",)),
)


class CannotCorrect(RuntimeError):
    """The installed DeepSpeed is not what this correction was written for; nothing has been changed."""


def apply() -> bool:
    """Correct this process where its DeepSpeed release needs it; True if it is corrected now."""
    release = Version(Version(deepspeed.__version__).base_version)
    parts = [part for part, specifier in CLAIMS.items() if SpecifierSet(specifier).contains(release)]
    if not parts:
        return False
    if _MARK in vars(FP16_UnfusedOptimizer):
        return True
    _check(parts)
    for cls, names in _STEPS:
        for name in names:
            setattr(cls, name, _moving_the_scale_last(getattr(cls, name)))
        cls._update_scale = _remembering(cls._update_scale)  # type: ignore[attr-defined]  # reason: every one has it
    if "fused steps" in parts:
        FP16_Optimizer.step = _going_on(FP16_Optimizer.step)
    if "fused timers" in parts:
        FP16_Optimizer.__init__ = _followed_by(FP16_Optimizer.__init__, _give_timers)
    if "engine scales the loss" in parts:
        DeepSpeedEngine.backward = _scaling_the_loss(DeepSpeedEngine.backward)
    if "bf16 without a scale" in parts:
        FP16_UnfusedOptimizer.__init__ = _followed_by(FP16_UnfusedOptimizer.__init__, _without_a_scale)
        FP16_UnfusedOptimizer.step = _followed_by(FP16_UnfusedOptimizer.step, _clear_bf16)
    if "bf16 checkpoints" in parts:
        FP16_UnfusedOptimizer.load_state_dict = _followed_by(FP16_UnfusedOptimizer.load_state_dict, _without_a_scale)
    setattr(FP16_UnfusedOptimizer, _MARK, True)
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(f"corrections.{NAME}").warning("DeepSpeed %s: corrected %s", release, ", ".join(parts))
    return True


# What follows the overflow check sees the scale of the backward pass.


def _moving_the_scale_last(step: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper's step, after which the loss scale moves. One of these calls another: the outermost counts."""

    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _PENDING in vars(self):
            return step(self, *args, **kwargs)
        pending: list[Callable[[], None]] = []
        setattr(self, _PENDING, pending)
        try:
            result = step(self, *args, **kwargs)
            _unscale_the_report(self)
            return result
        finally:
            delattr(self, _PENDING)
            for update in pending:
                update()

    return stepped


def _remembering(update_scale: Callable[..., None]) -> Callable[..., None]:
    """`_update_scale(overflow)`, which during a step without overflow waits for its end."""

    @functools.wraps(update_scale)
    def updated(self: Any, overflow: Any = False) -> None:
        pending = vars(self).get(_PENDING)
        if pending is None or overflow:
            update_scale(self, overflow)
        else:
            pending.append(functools.partial(_update_now, self, update_scale, overflow))

    return updated


def _update_now(optimizer: Any, update_scale: Callable[..., None], overflow: Any) -> None:
    """ZeRO++'s error feedback is kept scaled; ZeRO-3's step has asked it to follow a scale that had not moved yet."""
    error_feedback = getattr(optimizer, "_loco_err_buf_update", None)
    before = optimizer.loss_scale if error_feedback is not None else None
    update_scale(optimizer, overflow)
    if error_feedback is not None and optimizer.loss_scale != before:
        error_feedback(False, optimizer.loss_scale / before)


def _unscale_the_report(optimizer: Any) -> None:
    """Only the unfused wrapper reports the norm as it came out of backward. On overflow it is the one of before."""
    if not isinstance(optimizer, FP16_UnfusedOptimizer) or optimizer.overflow or optimizer.custom_loss_scaler:
        return
    scale = _holder(optimizer).cur_scale
    if scale != 1:
        optimizer._global_grad_norm = optimizer._global_grad_norm / scale


def _holder(optimizer: Any) -> Any:
    """Where a ZeRO-0 wrapper keeps its scale: itself up to 0.18.5, its LossScaleConfig from 0.18.6."""
    return getattr(optimizer, "loss_scale_config", optimizer)


# The engine scales the loss.


def _scaling_the_loss(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`DeepSpeedEngine.backward` with the scaled loss. What it returns is not scaled, as before."""

    @functools.wraps(backward)
    def scaled(self: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        scale = _scale_for_backward(self.optimizer)
        if scale == 1 or not isinstance(loss, torch.Tensor) or loss.grad_fn is None:
            return backward(self, loss, *args, **kwargs)
        returned = backward(self, loss.float() * scale, *args, **kwargs)
        return (returned / scale).to(loss.dtype) if isinstance(returned, torch.Tensor) else returned

    return scaled


def _scale_for_backward(optimizer: Any) -> float:
    if not isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)) or optimizer.custom_loss_scaler:
        return 1.0
    return float(_holder(optimizer).cur_scale)


# bf16 in the wrapper that was made for fp16, and what kept FP16_Optimizer from stepping.


def _followed_by(method: Callable[..., Any], then: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def both(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        then(self)
        return result

    return both


def _is_bf16(optimizer: Any) -> bool:
    dtypes = {parameter.dtype for group in optimizer.fp16_groups for parameter in group}
    return torch.bfloat16 in dtypes and torch.float16 not in dtypes


def _without_a_scale(optimizer: Any) -> None:
    if _is_bf16(optimizer):
        holder = _holder(optimizer)
        holder.cur_scale, holder.dynamic_loss_scale = 1.0, False


def _clear_bf16(optimizer: Any) -> None:
    if _is_bf16(optimizer):
        optimizer.zero_grad(set_to_none=True)


def _going_on(step: Callable[..., Any]) -> Callable[..., Any]:
    """`FP16_Optimizer.step`, which returns at once where it scales and has looked for overflow, with or without any.

    Without overflow it is told that it does not scale, and the scale moves here.
    """

    @functools.wraps(step)
    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fused_adam_legacy or not self.use_grad_scaling:
            return step(self, *args, **kwargs)
        given = [parameter for group in self.fp16_groups for parameter in group if parameter.grad is not None]
        if self.overflow_checker.has_overflow(given):
            return step(self, *args, **kwargs)
        self.use_grad_scaling = False
        try:
            result = step(self, *args, **kwargs)
        finally:
            self.use_grad_scaling = True
        self._update_scale(False)
        return result

    return stepped


def _give_timers(optimizer: Any) -> None:
    if optimizer.timers is None:
        optimizer.timers = NoopTimer()


# Nothing is patched unless all of it is as expected.


def _check(parts: list[str]) -> None:
    for cls, names in _STEPS:
        for name in (*names, "_update_scale", "unscale_and_clip_grads"):
            _source(cls, name)
    for name in ("step", "step_fused_lamb"):
        _expect(FP16_UnfusedOptimizer, name, "self._global_grad_norm = get_global_norm(norm_list=norm_groups)")
        _expect(FP16_UnfusedOptimizer, name, "self._global_grad_norm /", absent=True)
    for cls, names in _STEPS[:2]:
        for name in names:
            _expect(cls, name, "self._update_scale(")
        _expect(cls, "unscale_and_clip_grads", "cur_scale")
    for name in ("step", "step_fused_adam"):
        _expect(FP16_Optimizer, name, ".cur_scale")
    _expect(DeepSpeedZeroOptimizer, "step", "self._update_scale(self.overflow)")
    _expect(DeepSpeedZeroOptimizer_Stage3, "step", "self._global_grad_norm = scaled_global_grad_norm / self.loss_scale")
    for cls, _ in _STEPS[2:]:
        _expect(cls, "_update_scale", "self.loss_scaler.update_scale(")
        _expect(cls, "unscale_and_clip_grads", "self.loss_scale")
    if "engine scales the loss" in parts:
        _expect(DeepSpeedEngine, "backward", "isinstance(self.optimizer, ZeROOptimizer)")
        for scaled_already in ("self.optimizer.backward(", "FP16_", "cur_scale"):
            _expect(DeepSpeedEngine, "backward", scaled_already, absent=True)
    else:
        _expect(FP16_UnfusedOptimizer, "backward", "cur_scale")
        _expect(FP16_Optimizer, "backward", "cur_scale")
    if "bf16 without a scale" in parts:
        _expect(FP16_UnfusedOptimizer, "__init__", "self.dynamic_loss_scale = ")
        _source(FP16_UnfusedOptimizer, "zero_grad")
    if "bf16 checkpoints" in parts:
        _expect(FP16_UnfusedOptimizer, "load_state_dict", "cur_scale = state_dict['cur_scale']")
    if "fused steps" in parts:
        _expect(FP16_Optimizer, "step", "if self.use_grad_scaling:")
    if "fused timers" in parts:
        _expect(FP16_Optimizer, "step", "self.timers(")


def _expect(cls: type, name: str, text: str, *, absent: bool = False) -> None:
    if (text in _source(cls, name)) == absent:
        raise CannotCorrect(
            f"{cls.__module__}.{cls.__name__}.{name} of DeepSpeed {deepspeed.__version__} was expected "
            f"{'not ' if absent else ''}to contain {text!r}. Either this release needs no correction any more, or "
            f"{NAME} has to be written anew for it; nothing has been changed."
        )


def _source(cls: type, name: str) -> str:
    """The text of a method, below DeepSpeed's NVTX decorator and the wrappers of other corrections."""
    function = vars(cls).get(name)
    while function is not None:
        inner = getattr(function, "__wrapped__", None) or _decorated(function)
        if inner is None:
            break
        function = inner
    try:
        return inspect.getsource(function)  # type: ignore[arg-type]  # reason: None raises the TypeError caught here
    except (TypeError, OSError) as error:
        raise CannotCorrect(
            f"{cls.__module__}.{cls.__name__} of DeepSpeed {deepspeed.__version__} was expected to have a method "
            f"{name} whose source can be read; nothing has been changed."
        ) from error


def _decorated(function: Any) -> Any:
    """What `instrument_w_nvtx` decorates; it does not say so in `__wrapped__`."""
    code = getattr(function, "__code__", None)
    if code is None or "func" not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index("func")].cell_contents


APPLIED = apply()
