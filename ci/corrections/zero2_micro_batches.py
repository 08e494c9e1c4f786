"""ZeRO-2: every micro-batch of an accumulated step counts, not the last one (or the first and the last) alone.

Cause, in deepspeed/runtime/zero/stage_1_and_2.py:
- `DeepSpeedZeroOptimizer.independent_gradient_partition_epilogue` runs after each backward pass. Since the gradients
  wait in `all_grad_tensors` until the last micro-batch it should add to those; it looks at `averaged_gradients`
  instead, which are empty until then, and so starts anew every time. A further backward pass after the last
  micro-batch (several in one step) ends in a TypeError. DeepSpeed 0.17.6 to 0.18.2.
- with the optimizer offloaded to the CPU, `async_accumulate_grad_in_cpu_via_gpu` adds what waits in host memory to the
  new gradient and does not put the sum back: with three micro-batches or more, all between the first and the last
  are lost. DeepSpeed 0.15.2 to 0.18.9.
Upstream: https://github.com/deepspeedai/DeepSpeed/issues/7718, came with #7509, went with #7665 (0.18.3); the second
went with #7967 and #7981 (0.19.0).

What it does: what `get_all_grad_tensors` collects in the epilogue is added to what waits there already, in the
configured gradient accumulation dtype; gradients already prepared for the step are added to. When offloading, the
sum is put back. ZeRO-1 accumulates in the parameters and is not touched. Not corrected: Muon where a backward pass
follows the last micro-batch (its update is no sum), and several backward calls in a step with an offloaded optimizer.

Proof: tests/stack/test_corrections_zero.py and, under `--corrections both`, the cells of the ledger entries
zero2-last-micro-batch-only and zero2-offload-first-and-last-micro-batch.
"""

from __future__ import annotations

import functools
import logging
import os
import types
from typing import Any

import deepspeed
from packaging.specifiers import SpecifierSet
from packaging.version import Version

NAME = "zero2_micro_batches"
CLAIMS = {"kept": ">=0.17.6,<0.18.3", "offloaded": ">=0.15.2,<0.19"}
"""By where the gradients wait: on the device, or in host memory with the optimizer."""
_MARK = "_corrected_zero2_micro_batches"
_INSIDE = "_zero2_micro_batches_in_epilogue"
# By part: what the methods must take and use for this file's picture of them to be true.
_EXPECTED: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "kept": {
        "independent_gradient_partition_epilogue": (
            ("self",),
            ("all_grad_tensors", "averaged_gradients", "get_all_grad_tensors", "params_in_partition", "cpu_offload"),
        ),
        "get_all_grad_tensors": (("self", "tensor_list", "dtype"), ("get_param_gradient_attribute",)),
    },
    "offloaded": {
        "async_accumulate_grad_in_cpu_via_gpu": (
            ("self", "param"),
            ("accumulated_grads_in_cpu", "micro_step_id", "grad_position", "get_param_id"),
        ),
        "get_param_gradient_attribute": (("self", "param"), ()),
    },
}


class CannotCorrect(RuntimeError):
    """The installed DeepSpeed is not what this correction was written for; nothing has been changed."""


def _say(message: str, *arguments: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(f"corrections.{NAME}").warning(message, *arguments)


def _names(code: types.CodeType) -> set[str]:
    """Every attribute and global that a function's code uses, comprehensions and inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(_names(constant) for constant in inner))


def _check(owner: type, part: str) -> None:
    where = f"{owner.__module__}.{owner.__qualname__} of DeepSpeed {deepspeed.__version__}"
    for name, (parameters, uses) in _EXPECTED[part].items():
        function = vars(owner).get(name)
        if not isinstance(function, types.FunctionType):
            raise CannotCorrect(f"{NAME}: expected a method {name} in {where}")
        found = function.__code__.co_varnames[: function.__code__.co_argcount]
        if found != parameters:
            raise CannotCorrect(f"{NAME}: expected {name}{parameters} in {where}, found {name}{found}")
        missing = sorted(set(uses) - _names(function.__code__))
        if missing:
            raise CannotCorrect(f"{NAME}: expected {name} to use {', '.join(missing)} in {where}")


def _patch_kept(owner: Any) -> None:
    epilogue, get_all_grad_tensors = owner.independent_gradient_partition_epilogue, owner.get_all_grad_tensors

    @functools.wraps(get_all_grad_tensors)
    def adding_get_all_grad_tensors(self: Any, tensor_list: Any, dtype: Any) -> Any:
        new = get_all_grad_tensors(self, tensor_list, dtype)
        if not getattr(self, _INSIDE, False):
            return new
        group = next(i for i, tensors in enumerate(self.params_in_partition) if tensors is tensor_list)
        waiting = self.all_grad_tensors.get(group)
        if waiting is None:
            return new
        # The gradients are in the parameters' dtype; a sum of several belongs in that of the accumulation.
        waiting = [gradient.to(dtype) for gradient in waiting]
        for gradient, further in zip(waiting, new, strict=True):
            gradient.add_(further)
        return waiting

    @functools.wraps(epilogue)
    def adding_epilogue(self: Any) -> Any:
        if not self.partition_gradients or self.cpu_offload:
            return epilogue(self)
        ready: dict[int, Any] = {}
        if "muon" not in type(self.optimizer).__name__.lower():
            ready = {group: found for group, found in self.averaged_gradients.items() if found is not None}
        for group in ready:
            self.averaged_gradients[group] = None
        setattr(self, _INSIDE, True)
        try:
            result = epilogue(self)
        finally:
            setattr(self, _INSIDE, False)
        for group, earlier in ready.items():
            for gradient, further in zip(earlier, self.averaged_gradients.get(group) or (), strict=False):
                gradient.add_(further)
            self.averaged_gradients[group] = earlier
        return result

    owner.get_all_grad_tensors = adding_get_all_grad_tensors
    owner.independent_gradient_partition_epilogue = adding_epilogue


def _patch_offloaded(owner: Any) -> None:
    accumulate = owner.async_accumulate_grad_in_cpu_via_gpu

    @functools.wraps(accumulate)
    def storing_accumulate(self: Any, param: Any) -> Any:
        result = accumulate(self, param)
        if self.partition_gradients and self.micro_step_id > 0:
            key = self.get_param_id(param)
            waiting, total = self.accumulated_grads_in_cpu[key], self.get_param_gradient_attribute(param).detach()
            # With low precision masters this rank's part alone waits, in the place of the master's gradient.
            _, offset, _, numel = self.grad_position[key]
            whole = waiting.numel() == total.numel()
            waiting.view(-1).copy_(total.reshape(-1) if whole else total.reshape(-1).narrow(0, offset, numel))
        return result

    owner.async_accumulate_grad_in_cpu_via_gpu = storing_accumulate


def apply() -> bool:
    """Correct this process where the installed release is claimed; True if it is corrected now."""
    release = Version(Version(deepspeed.__version__).base_version)
    parts = [part for part, claimed in CLAIMS.items() if release in SpecifierSet(claimed)]
    if not parts:
        return False
    from deepspeed.runtime.zero import stage_1_and_2

    owner = stage_1_and_2.DeepSpeedZeroOptimizer
    if _MARK not in vars(owner):
        for part in parts:
            _check(owner, part)
        for part in parts:
            {"kept": _patch_kept, "offloaded": _patch_offloaded}[part](owner)
        setattr(owner, _MARK, True)
        _say(
            "%s: on DeepSpeed %s ZeRO-2 adds up its micro-batches (gradients %s)",
            NAME,
            deepspeed.__version__,
            " and ".join({"kept": "on the device", "offloaded": "in host memory"}[part] for part in parts),
        )
    return True


APPLIED = apply()
