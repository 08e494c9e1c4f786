"""fp32 at ZeRO-0 reports its gradient norm, which is None otherwise.

Cause: deepspeed/runtime/engine.py, `DeepSpeedEngine._take_model_step` copies `_global_grad_norm` from the optimizer it
has. Every wrapper of DeepSpeed keeps one; in fp32 at ZeRO-0 there is no wrapper, `clip_fp32_gradients` throws away
the norm that it computed, and without clipping nothing computes one.
Releases: DeepSpeed 0.14.4 and newer, the newest included.
Upstream: https://github.com/deepspeedai/DeepSpeed/issues/7255 (the ledger's zero0-fp32-norm-none).

What it does: at the start of an optimizer step, before clipping, takes the 2-norm of all gradients and makes it what
`get_global_grad_norm()` returns after the step (transformers and TRL log it then). Gradients, clipping and update are
untouched. As DeepSpeed's clipping does, a parameter that tensor parallel ranks hold whole is counted on the first of
them; parameters replicated over pipeline stages are counted once; the experts of all expert parallel ranks are
counted (DeepSpeed's clipping takes a mean over ranks instead). Under torch's gradient scaler the norm is that of the
unscaled gradients. Where an optimizer reduces the gradients itself (1-bit) there is no global gradient: still None.

Proof: tests/stack/test_corrections_zero.py and, under `--corrections both`, the cells of the ledger entry
zero0-fp32-norm-none.
"""

from __future__ import annotations

import functools
import logging
import os
import types
from typing import Any

import deepspeed
import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

NAME = "fp32_zero0_norm"
CLAIMS = ">=0.14.4"
_MARK = "_corrected_fp32_zero0_norm"


class CannotCorrect(RuntimeError):
    """The installed DeepSpeed is not what this correction was written for; nothing has been changed."""


def _say(message: str, *arguments: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(f"corrections.{NAME}").warning(message, *arguments)


def _check(owner: type) -> None:
    where = f"{owner.__module__}.{owner.__qualname__} of DeepSpeed {deepspeed.__version__}"
    for name, parameters, uses in (
        ("_take_model_step", ("self", "lr_kwargs"), {"_global_grad_norm", "optimizer", "clip_fp32_gradients"}),
        ("get_global_grad_norm", ("self",), {"_global_grad_norm"}),
    ):
        function = vars(owner).get(name)
        if not isinstance(function, types.FunctionType):
            raise CannotCorrect(f"{NAME}: expected a method {name} in {where}")
        found = function.__code__.co_varnames[: function.__code__.co_argcount]
        if found[: len(parameters)] != parameters:
            raise CannotCorrect(f"{NAME}: expected {name}{parameters} in {where}, found {name}{found}")
        missing = sorted(uses - set(function.__code__.co_names))
        if missing:
            raise CannotCorrect(f"{NAME}: expected {name} to use {', '.join(missing)} in {where}")


def _has_no_wrapper(engine: Any) -> bool:
    """Whether this engine steps a plain optimizer on fp32 gradients."""
    modes = ("zero_optimization", "fp16_enabled", "bfloat16_enabled", "amp_enabled")
    return not hasattr(engine.optimizer, "_global_grad_norm") and not any(
        getattr(engine, mode)() for mode in modes if hasattr(engine, mode)
    )


def _global_norm(engine: Any) -> torch.Tensor | None:
    """The 2-norm of the engine's gradients, a scalar on their device; None where the ranks hold different ones."""
    from deepspeed import comm
    from deepspeed.moe.utils import is_moe_param
    from deepspeed.runtime.constants import PIPE_REPLICATED
    from deepspeed.runtime.utils import is_model_parallel_parameter
    from deepspeed.utils import groups

    if not engine.enable_backward_allreduce and not engine.pipeline_parallelism:
        return None
    mpu = engine.mpu
    whole_counts = mpu is None or mpu.get_model_parallel_rank() == 0
    # Squares by expert group; None for all that is no expert. Every rank has the same groups, in the same order.
    norms: dict[str | None, list[torch.Tensor]] = {None: []}
    for parameter in engine.module.parameters():
        group = parameter.group_name if is_moe_param(parameter) else None
        here = norms.setdefault(group, [])
        gradient = parameter.grad
        if gradient is None or getattr(parameter, PIPE_REPLICATED, False):
            continue
        if whole_counts or is_model_parallel_parameter(parameter):
            values = gradient.detach()
            values = values.coalesce().values() if values.is_sparse else values
            here.append(torch.linalg.vector_norm(values, dtype=torch.float32).to(engine.device))
    total = torch.zeros((), device=engine.device)
    for group, found in norms.items():
        square = torch.stack(found).square().sum() if found else torch.zeros((), device=engine.device)
        if group is not None:
            comm.all_reduce(square, group=groups._get_expert_parallel_group(group))
        total = total + square
    # Once, at the end: pipeline stages may have different expert groups, but all of them come here.
    if mpu is not None:
        comm.all_reduce(total, group=mpu.get_model_parallel_group())
    scaler = getattr(engine, "torch_autocast_z0_gradscaler", None)
    return total.sqrt() / scaler.get_scale() if scaler is not None else total.sqrt()


def _patch(owner: Any) -> None:
    take_model_step = owner._take_model_step

    @functools.wraps(take_model_step)
    def noting_take_model_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _has_no_wrapper(self):
            return take_model_step(self, *args, **kwargs)
        norm = _global_norm(self)
        result = take_model_step(self, *args, **kwargs)
        self._global_grad_norm = norm
        return result

    owner._take_model_step = noting_take_model_step
    setattr(owner, _MARK, True)


def apply() -> bool:
    """Correct this process where the installed release is claimed; True if it is corrected now."""
    if Version(Version(deepspeed.__version__).base_version) not in SpecifierSet(CLAIMS):
        return False
    from deepspeed.runtime import engine

    owner = engine.DeepSpeedEngine
    if _MARK not in vars(owner):
        _check(owner)
        _patch(owner)
        _say("%s: on DeepSpeed %s fp32 at ZeRO-0 reports its gradient norm", NAME, deepspeed.__version__)
    return True


APPLIED = apply()
