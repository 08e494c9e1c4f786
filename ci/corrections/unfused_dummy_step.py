"""FP16_UnfusedOptimizer: the step it takes when it is built leaves no trace in the optimizer it wraps.

Cause: deepspeed/runtime/fp16/unfused_optimizer.py, `FP16_UnfusedOptimizer.initialize_optimizer_states` gives every
parameter a gradient of zeros and calls the inner optimizer's `step`, so that its state is allocated before training.
AdamW then counts one step too many (its first update is 0.74 of what it should be), weight decay has moved the
initial master weights away from the model's, and an L2 term has entered the moments.
Releases: DeepSpeed 0.14.4 and newer, the newest included: fp16 at ZeRO-0 with any optimizer that is not FusedAdam, and
bf16 at ZeRO-0 since 0.17.6.
Upstream: https://github.com/deepspeedai/DeepSpeed/issues/5104 (the ledger's unfused-dummy-step and its siblings).

What it does: lets the dummy step run and undoes what it did. That step is there so that memory is taken early, and
DeepSpeed's 1-bit optimizers prepare themselves in it; both are kept. Afterwards
- the master weights are the model's again;
- whatever the step wrote into the parameter groups (a step count, a learning rate of its own) is as before;
- each state is as the optimizer would begin it: step 0, moments 0. torch's Adam, AdamW, Adamax, NAdam, RAdam, RMSprop,
  Adadelta, Rprop, Adafactor and SGD compute the same from such a state as from none. SGD's momentum buffer is taken
  away where there is a dampening, which does not count in the first step;
- a state with anything else in it is dropped, and begun anew by its optimizer in the first real step, as it was in
  the dummy step. The states of DeepSpeed's own optimizers are not dropped: they point into each other.
FP16_Optimizer (with FusedAdam) takes such a step as well; it is not corrected here.

Proof: tests/stack/test_corrections_zero.py and, under `--corrections both`, the cells of the ledger entries
unfused-dummy-step, unfused-dummy-step-decay, unfused-dummy-step-decay-fp16 and unfused-dummy-step-fp16.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import types
from typing import Any

import deepspeed
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

NAME = "unfused_dummy_step"
CLAIMS = ">=0.14.4"
_MARK = "_corrected_unfused_dummy_step"
_BEGIN: dict[str, float] = {
    "step": 0.0,
    "exp_avg": 0.0,
    "exp_avg_sq": 0.0,
    "max_exp_avg_sq": 0.0,
    "exp_inf": 0.0,
    "square_avg": 0.0,
    "grad_avg": 0.0,
    "acc_delta": 0.0,
    "momentum_buffer": 0.0,
    "row_var": 0.0,
    "col_var": 0.0,
    "variance": 0.0,
    "prev": 0.0,
    "mu_product": 1.0,
}
"""What a state entry holds before the first step (torch.optim, and those who name theirs alike)."""
_UNMOVED = ("step_size",)
"""Entries that a gradient of zeros leaves at their first value (Rprop)."""


class CannotCorrect(RuntimeError):
    """The installed DeepSpeed is not what this correction was written for; nothing has been changed."""


def _say(message: str, *arguments: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(f"corrections.{NAME}").warning(message, *arguments)


def _check(owner: type) -> None:
    where = f"{owner.__module__}.{owner.__qualname__} of DeepSpeed {deepspeed.__version__}"
    function = vars(owner).get("initialize_optimizer_states")
    if not isinstance(function, types.FunctionType) or function.__code__.co_argcount != 1:
        raise CannotCorrect(f"{NAME}: expected a method initialize_optimizer_states(self) in {where}")
    missing = sorted({"fp16_groups", "fp32_groups", "optimizer", "step"} - set(function.__code__.co_names))
    if missing:
        raise CannotCorrect(f"{NAME}: expected initialize_optimizer_states to use {', '.join(missing)} in {where}")
    built = inspect.unwrap(vars(owner)["__init__"])  # another correction may have wrapped it
    if not isinstance(built, types.FunctionType) or "initialize_optimizer_states" not in built.__code__.co_names:
        raise CannotCorrect(f"{NAME}: expected __init__ to call initialize_optimizer_states in {where}")


def _begin(state: dict[str, Any], group: dict[str, Any]) -> None:
    """Set what a dummy step left in one parameter's state to what it is before the first step."""
    if group.get("dampening"):
        state.pop("momentum_buffer", None)
    for key, value in state.items():
        if key not in _BEGIN:
            continue
        if isinstance(value, torch.Tensor):
            value.fill_(_BEGIN[key])
        elif value is not None:
            state[key] = type(value)(_BEGIN[key])


def _undo(inner: Any, groups: list[dict[str, Any]]) -> None:
    """groups: the parameter groups' entries before the dummy step, without their parameters."""
    keeps_states = type(inner).__module__.split(".")[0] == "deepspeed"
    for group, before in zip(inner.param_groups, groups, strict=True):
        for key in [key for key in group if key != "params" and key not in before]:
            del group[key]
        for key, value in before.items():
            if isinstance(value, torch.Tensor) and isinstance(group.get(key), torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value
        for parameter in group["params"]:
            state = inner.state.get(parameter)
            if not state:
                continue
            if keeps_states or set(state) <= {*_BEGIN, *_UNMOVED}:
                _begin(state, group)
            else:
                del inner.state[parameter]


def _patch(owner: Any) -> None:
    initialize = owner.initialize_optimizer_states

    @functools.wraps(initialize)
    def traceless_initialize(self: Any) -> Any:
        inner = self.optimizer
        # Built a moment ago from the model's weights, the masters can be had from them again: no copy is needed.
        copies: dict[int, torch.Tensor] = {}
        for halves, masters in zip(self.fp16_groups, self.fp32_groups, strict=True):
            for half, master in zip(halves, masters, strict=True):
                if not torch.equal(half.detach().to(master.dtype), master.detach()):
                    copies[id(master)] = master.detach().clone()
        groups = [
            {
                key: value.detach().clone() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for group in inner.param_groups
        ]
        result = initialize(self)
        with torch.no_grad():
            _undo(inner, groups)
            for halves, masters in zip(self.fp16_groups, self.fp32_groups, strict=True):
                for half, master in zip(halves, masters, strict=True):
                    master.copy_(copies.get(id(master), half))
        return result

    owner.initialize_optimizer_states = traceless_initialize
    setattr(owner, _MARK, True)


def apply() -> bool:
    """Correct this process where the installed release is claimed; True if it is corrected now."""
    if Version(Version(deepspeed.__version__).base_version) not in SpecifierSet(CLAIMS):
        return False
    from deepspeed.runtime.fp16 import unfused_optimizer

    owner = unfused_optimizer.FP16_UnfusedOptimizer
    if _MARK not in vars(owner):
        _check(owner)
        _patch(owner)
        _say("%s: on DeepSpeed %s the dummy step of the unfused wrapper is undone", NAME, deepspeed.__version__)
    return True


APPLIED = apply()
