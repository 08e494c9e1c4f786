"""ZeRO-3: a parameter without a gradient in a step is no longer updated with its gradient of an earlier step.

Cause: deepspeed/runtime/zero/stage3.py, `DeepSpeedZeroOptimizer_Stage3.partition_grads` writes a parameter's gradient
into a buffer that lives as long as the optimizer, and only when the parameter got one; nothing ever empties it.
`independent_gradient_partition_epilogue` hands all buffers to the step, so a parameter that got no gradient is
updated (and counted in the norm) with what an earlier step left. From the second micro-batch on the write adds, so a
parameter first used there gets the old gradient on top. With the optimizer offloaded to the CPU the buffers are copied
to the fp32 gradients only by a write in the last micro-batch: a parameter used in earlier ones alone loses its
gradient as well.
Releases: DeepSpeed 0.14.4 and newer, the newest included.
Upstream: none known; the symptom is described nowhere but in this project's ledger (zero3-stale-gradient).

What it does: notes which parameters were written since the last step. After each backward pass it empties the buffers
of all others, before anybody reads or adds to them; where the optimizer is offloaded to the CPU it also brings those
fp32 gradients up to date that the last micro-batch did not write. No collective is added: each rank looks after its
own partition. Parameters that do get a gradient are handled by DeepSpeed's own code, untouched.
Left alone, since their code does not pass here: optimizers swapped to NVMe (said once in the log), ZenFlow,
SuperOffload, and DeepCompile. A parameter used on some ranks only still makes DeepSpeed's collectives disagree.

Proof: tests/stack/test_corrections_zero.py and, under `--corrections both`, the ledger entry's cells
(zero3-custom-adapter, user_code=used-in-some-steps).
"""

from __future__ import annotations

import functools
import logging
import os
import types
from collections.abc import Iterable
from typing import Any

import deepspeed
from packaging.specifiers import SpecifierSet
from packaging.version import Version

NAME = "zero3_stale_gradient"
CLAIMS = ">=0.14.4"
_MARK = "_corrected_zero3_stale_gradient"
_WINDOW = "_zero3_stale_gradient_window"
_BUFFERS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
# What the methods must take and use for this file's picture of them to be true.
_EXPECTED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "partition_grads": (("self", "params_to_release", "grad_partitions"), (_BUFFERS, "micro_step_id", "ds_id")),
    "independent_gradient_partition_epilogue": (("self",), (_BUFFERS, "averaged_gradients", "offload_optimizer")),
    "zero_grad": (("self", "set_to_none"), ("micro_step_id", "fp16_groups")),
    "step": (("self", "closure"), ("_pre_step",)),
    "complete_grad_norm_calculation_for_cpu_offload": (("self", "params"), ("norm_for_param_grads", "get_param_id")),
    "set_grad_positions": (("self",), ("grad_position", "partition_numel")),
    "_swappable_optimizer_subgroup": (("self", "sub_group_id"), ()),
    "_constant_buffered_norm2": (("self", "input", "buffer_size"), ()),
    "get_param_id": (("self", "param"), ()),
}


class CannotCorrect(RuntimeError):
    """The installed DeepSpeed is not what this correction was written for; nothing has been changed."""


class _Window:
    """What one optimizer has seen since its last step, by ds_id.

    written: got a gradient. copied: and DeepSpeed itself has copied it to the offloaded fp32 gradient.
    over: the next write begins a new window. warned: NVMe has been spoken of. (No dataclass: those need their module
    to be registered, and this file must run however it is loaded.)
    """

    def __init__(self) -> None:
        self.written: set[int] = set()
        self.copied: set[int] = set()
        self.over = False
        self.warned = False

    def begin_if_over(self) -> None:
        if self.over:
            self.written, self.copied, self.over = set(), set(), False


def _say(message: str, *arguments: object) -> None:
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(f"corrections.{NAME}").warning(message, *arguments)


def _innermost(method: Any) -> types.FunctionType | None:
    """The function below DeepSpeed's decorators, which do not say what they wrap."""
    while method is not None:
        inner = getattr(method, "__wrapped__", None)
        for cell in getattr(method, "__closure__", None) or ():
            if inner is None and isinstance(cell.cell_contents, types.FunctionType):
                inner = cell.cell_contents
        if inner is None:
            break
        method = inner
    return method if isinstance(method, types.FunctionType) else None


def _names(code: types.CodeType) -> set[str]:
    """Every attribute and global that a function's code uses, comprehensions and inner functions included."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*(_names(constant) for constant in inner))


def _check(owner: type) -> None:
    where = f"{owner.__module__}.{owner.__qualname__} of DeepSpeed {deepspeed.__version__}"
    for name, (parameters, uses) in _EXPECTED.items():
        function = _innermost(vars(owner).get(name))
        if function is None:
            raise CannotCorrect(f"{NAME}: expected a method {name} in {where}")
        found = function.__code__.co_varnames[: function.__code__.co_argcount]
        if found != parameters:
            raise CannotCorrect(f"{NAME}: expected {name}{parameters} in {where}, found {name}{found}")
        missing = sorted(set(uses) - _names(function.__code__))
        if missing:
            raise CannotCorrect(f"{NAME}: expected {name} to use {', '.join(missing)} in {where}")


def _at_boundary(optimizer: Any) -> bool:
    """Whether the step follows: an attribute up to 0.18, a method later."""
    value = optimizer.is_gradient_accumulation_boundary
    return bool(value() if callable(value) else value)


def _window(optimizer: Any) -> _Window:
    if _WINDOW not in vars(optimizer):
        setattr(optimizer, _WINDOW, _Window())
    window: _Window = getattr(optimizer, _WINDOW)
    return window


def _passes_here(optimizer: Any, window: _Window) -> bool:
    """Whether this optimizer's gradients come through the `partition_grads` that is listened to.

    ZenFlow puts its own on the instance, SuperOffload in its class; DeepCompile takes the gradient hooks away and
    writes the buffers from compiled code.
    """
    method = type(optimizer).partition_grads
    own = None if hasattr(method, _MARK) else _innermost(method)
    if "partition_grads" in vars(optimizer) or (own is not None and "super" not in own.__code__.co_names):
        return False
    return bool(optimizer._grad_acc_hooks) or (bool(optimizer._leaf_module_hooks) and bool(window.written))


def _parameters(optimizer: Any) -> Iterable[tuple[int, Any]]:
    for sub_group, parameters in enumerate(optimizer.fp16_groups):
        for parameter in parameters:
            yield sub_group, parameter


def _empty_unwritten(optimizer: Any, window: _Window) -> None:
    """After a backward pass: what got no gradient since the last step has none."""
    buffers = getattr(optimizer, _BUFFERS)
    for _, parameter in _parameters(optimizer):
        if parameter.ds_id not in window.written and parameter.ds_id in buffers:
            buffers[parameter.ds_id].zero_()


def _settle_offloaded(optimizer: Any, window: _Window) -> None:
    """Before the step: every offloaded fp32 gradient, and its norm, is that of this step."""
    buffers = getattr(optimizer, _BUFFERS)
    for sub_group, parameter in _parameters(optimizer):
        if parameter.ds_id in window.copied or parameter.ds_id not in buffers:
            continue
        if optimizer._swappable_optimizer_subgroup(sub_group):
            if not window.warned:
                window.warned = True
                _say("%s: an optimizer swapped to NVMe is not corrected", NAME)
            continue
        key = optimizer.get_param_id(parameter)
        _, offset, numel = optimizer.grad_position[key]
        gradient = optimizer.fp32_partitioned_groups_flat[sub_group].grad.narrow(0, offset, numel)
        if parameter.ds_id in window.written:
            gradient.copy_(buffers[parameter.ds_id])
            optimizer.norm_for_param_grads[key] = optimizer._constant_buffered_norm2(buffers[parameter.ds_id])
        else:
            gradient.zero_()
            optimizer.norm_for_param_grads.pop(key, None)


def _patch(owner: Any) -> None:
    partition_grads, epilogue = owner.partition_grads, owner.independent_gradient_partition_epilogue
    zero_grad, step = owner.zero_grad, owner.step
    finalize = vars(owner).get("finalize_gradient_accumulation_boundary")

    @functools.wraps(partition_grads)
    def noting_partition_grads(self: Any, params_to_release: Any, grad_partitions: Any) -> Any:
        window = _window(self)
        window.begin_if_over()
        ids = {parameter.ds_id for parameter in params_to_release}
        result = partition_grads(self, params_to_release, grad_partitions)
        window.written |= ids
        # A later write of a micro-batch that is not the last makes an earlier copy old.
        window.copied = window.copied | ids if _at_boundary(self) else window.copied - ids
        return result

    @functools.wraps(epilogue)
    def emptying_epilogue(self: Any) -> Any:
        result = epilogue(self)
        window = _window(self)
        window.begin_if_over()
        if _passes_here(self, window):
            _empty_unwritten(self, window)
            if self.offload_optimizer and _at_boundary(self):
                _settle_offloaded(self, window)
        return result

    @functools.wraps(zero_grad)
    def ending_zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
        _window(self).over = True
        return zero_grad(self, *args, **kwargs)

    @functools.wraps(step)
    def ending_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return step(self, *args, **kwargs)
        finally:
            _window(self).over = True

    setattr(noting_partition_grads, _MARK, True)
    owner.partition_grads = noting_partition_grads
    owner.independent_gradient_partition_epilogue = emptying_epilogue
    owner.zero_grad = ending_zero_grad
    owner.step = ending_step
    if finalize is not None:

        @functools.wraps(finalize)
        def settling_finalize(self: Any) -> Any:
            """Where the user ends the accumulation, the last micro-batch is known only now."""
            result = finalize(self)
            if self.offload_optimizer and _passes_here(self, _window(self)):
                _settle_offloaded(self, _window(self))
            return result

        owner.finalize_gradient_accumulation_boundary = settling_finalize
    setattr(owner, _MARK, True)


def apply() -> bool:
    """Correct this process where the installed release is claimed; True if it is corrected now."""
    if Version(Version(deepspeed.__version__).base_version) not in SpecifierSet(CLAIMS):
        return False
    from deepspeed.runtime.zero import stage3

    owner = stage3.DeepSpeedZeroOptimizer_Stage3
    if _MARK not in vars(owner):
        _check(owner)
        _patch(owner)
        _say(
            "%s: on DeepSpeed %s ZeRO-3 empties the gradients of parameters that got none", NAME, deepspeed.__version__
        )
    return True


APPLIED = apply()
