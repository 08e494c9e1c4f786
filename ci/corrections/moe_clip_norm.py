"""Clipping at ZeRO-0 counts the gradients of experts: in both 16-bit wrappers, over all ranks that hold experts.

Cause, in DeepSpeed (paths below deepspeed/runtime/):
- fp16/unfused_optimizer.py, `FP16_UnfusedOptimizer.step` splits off the experts' gradients and drops them;
  `step_fused_lamb` takes their norm and uses it for the overflow check alone. So they are in neither the norm that
  clips nor the one that is reported, and gradients stay larger than the clip. bf16 at ZeRO-0 runs there from 0.17.6.
- fp16/fused_optimizer.py, `FP16_Optimizer.step` before 0.19.8 hands `get_norm_with_moe_layers` its fp32 weights where
  it means their gradients, so that the size of the experts' weights is counted.
Releases: DeepSpeed 0.14.4 and newer (unfused), 0.14.4 - 0.19.7 (fused); see `CLAIMS`.
Upstream: DeepSpeed #8588 and #8613 (unfused; open), none known for the fused one, fixed in 0.19.8.

What it does: `unscale_and_clip_grads` of the unfused wrapper, where both paths arrive with the norm of the shared
gradients, adds the experts'. Each group of experts is counted as DeepSpeed counts it elsewhere
(`get_global_norm_of_tensors`): summed over its expert-parallel group, so that all ranks clip alike, and over the
model-parallel group where experts are split there too. The fused wrapper gets the gradients of the weights it passes.
`FP16_Optimizer.step_fused_adam` is left alone: it counts experts, but only those of its own rank.

Import this file before deepspeed.initialize: `import moe_clip_norm`. It does not need loss_scale.py, nor mind it.
Proof: tests/stack/test_corrections_fp16.py (two ranks with experts of their own among it), and under
`--corrections both` the cells of all ledger entries with `correction: moe_clip_norm`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime import utils
from deepspeed.runtime.fp16 import fused_optimizer
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import groups
from packaging.specifiers import SpecifierSet
from packaging.version import Version

NAME = "moe_clip_norm"
CLAIMS = {"unfused": ">=0.14.4", "fused": ">=0.14.4,<0.19.8"}
_MARK = "_corrected_moe_clip_norm"


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
    if "unfused" in parts:
        FP16_UnfusedOptimizer.unscale_and_clip_grads = _with_experts(FP16_UnfusedOptimizer.unscale_and_clip_grads)
    if "fused" in parts:
        fused_optimizer.get_norm_with_moe_layers = _of_gradients(fused_optimizer.get_norm_with_moe_layers)
    setattr(FP16_UnfusedOptimizer, _MARK, True)
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(f"corrections.{NAME}").warning("DeepSpeed %s: corrected %s", release, ", ".join(parts))
    return True


def _with_experts(unscale_and_clip: Callable[..., Any]) -> Callable[..., Any]:
    """`unscale_and_clip_grads(total_norm)`, with the norm of all gradients; both norms are still scaled."""

    @functools.wraps(unscale_and_clip)
    def clipped(self: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        norms = [_expert_norm(name, parameters, self.mpu) for name, parameters in _experts(self.fp16_groups)]
        if norms:
            total_norm = math.hypot(float(total_norm), *norms)
            self._global_grad_norm = total_norm
        return unscale_and_clip(self, total_norm, *args, **kwargs)

    return clipped


def _experts(parameter_groups: Iterable[Iterable[Any]]) -> list[tuple[str, list[Any]]]:
    """(expert group, its parameters) in the order of names, which all ranks share. Without a gradient or with one."""
    by_name: dict[str, list[Any]] = {}
    for group in parameter_groups:
        for parameter in group:
            if is_moe_param(parameter):
                by_name.setdefault(parameter.group_name, []).append(parameter)
    return sorted(by_name.items())


def _expert_norm(name: str, parameters: list[Any], mpu: Any) -> float:
    """Norm over the expert-parallel group. inf where DeepSpeed says -1: the norm is no number, nothing may be used."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    # A rank whose experts got no token takes part in the sum all the same.
    tensors = gradients or [torch.zeros(1, device=parameters[0].device)]
    expert_parallel = groups._get_expert_parallel_group(name)
    norm = float(utils.get_global_norm_of_tensors(input_tensors=tensors, mpu=mpu, moe_ep_group=expert_parallel))
    return math.inf if norm < 0 else norm


def _of_gradients(norm_with_experts: Callable[..., Any]) -> Callable[..., Any]:
    """`get_norm_with_moe_layers` as FP16_Optimizer means it: of the gradients of the weights that it passes."""

    @functools.wraps(norm_with_experts)
    def of_gradients(non_expert_norm: Any, mpu: Any, expert_tensors: Mapping[str, list[Any]], **kwargs: Any) -> Any:
        gradients = {
            name: [tensor if tensor.grad is None else tensor.grad for tensor in tensors]
            for name, tensors in expert_tensors.items()
        }
        return norm_with_experts(non_expert_norm, mpu=mpu, expert_tensors=gradients, **kwargs)

    return of_gradients


# Nothing is patched unless all of it is as expected.


def _check(parts: list[str]) -> None:
    if "unfused" in parts:
        for name in ("step", "step_fused_lamb"):
            _expect(FP16_UnfusedOptimizer, name, "self._global_grad_norm = get_global_norm(norm_list=norm_groups)")
            _expect(FP16_UnfusedOptimizer, name, "self.unscale_and_clip_grads(self._global_grad_norm")
        _expect(FP16_UnfusedOptimizer, "unscale_and_clip_grads", "total_norm")
        for name in ("input_tensors", "mpu", "moe_ep_group"):
            if name not in inspect.signature(utils.get_global_norm_of_tensors).parameters:
                raise CannotCorrect(
                    f"deepspeed.runtime.utils.get_global_norm_of_tensors of DeepSpeed {deepspeed.__version__} was "
                    f"expected to take {name!r}; nothing has been changed."
                )
    if "fused" in parts:
        _expect(FP16_Optimizer, "step", "expert_grads_for_norm[param_group['name']].append(self.fp32_groups_flat[i])")
        _expect(FP16_Optimizer, "step", "expert_tensors=expert_grads_for_norm")


def _expect(cls: type, name: str, text: str) -> None:
    """A method, below the wrappers of other corrections, must contain a text."""
    where = f"{cls.__module__}.{cls.__name__}.{name} of DeepSpeed {deepspeed.__version__}"
    try:
        source = inspect.getsource(inspect.unwrap(vars(cls)[name]))
    except (KeyError, TypeError, OSError) as error:
        raise CannotCorrect(
            f"{where} was expected to be a method whose source can be read; nothing has been changed."
        ) from error
    if text not in source:
        raise CannotCorrect(
            f"{where} was expected to contain {text!r}. Either this release needs no correction any more, or {NAME} "
            "has to be written anew for it; nothing has been changed."
        )


APPLIED = apply()
