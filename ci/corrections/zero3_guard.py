"""Guards user code that touches a ZeRO-3 parameter outside the forward pass of the module that owns it.

Cause. ZeRO-3 keeps `[0]` in place of a parameter's elements except while a module that holds it runs.
`ZeROOrderedDict.__getitem__` (deepspeed/runtime/zero/parameter_offload.py) gathers on attribute access (`m.weight`);
iterating `.parameters()`, as in `sum(p.sum() for p in module.parameters()) * 0.0`, by-passes it. What is read then is
empty, and if autograd sees it backward fails at a place that no longer knows the line, with `[0]` against `[N]`.
GatheredParameters only moves the failure: backward finds the parameter partitioned again.

Releases. All from 0.14.4 to at least 0.19.8; 0.16.3 (deepspeedai/DeepSpeed#6773, which no longer keeps AccumulateGrad
nodes) changed the messages. Reports: modelscope/ms-swift#3262, deepspeedai/DeepSpeed#7078,
huggingface/transformers#36387.

What it does, in every forward pass of a DeepSpeedEngine at ZeRO-3, by the environment variable ZERO3_GUARD:
    gather (the default): a parameter that is away is gathered at its first touch, and registered as an external
        parameter of the module that runs at that moment, as attribute access does; the prefetching trace, which did not
        know of it, is recorded anew. From then on forward and backward find it gathered. Touches inside
        GatheredParameters are registered too; what is being prefetched at its entry is waited for, and what a running
        module holds is left gathered at its end.
    raise: PartitionedParameterError at the user's own line, naming operation, parameter and remedy. The user's line is
        that of the innermost frame that is not of the standard library, torch, deepspeed, transformers, accelerate,
        peft, trl or this file. A frozen parameter has no gradient to break: its plain sum, the keep-alive, is warned
        of; whatever else reads it raises, since it reads nothing.

Every rank must touch the same parameters in the same order, as with every collective of ZeRO-3. A rank that touches
alone is told so after PATIENCE_S instead of hanging.

Limits. It sees operations with the parameter (or a list that holds it) among their arguments, through
`__torch_function__`, and DeepSpeed's own linear function. It does not see: other autograd functions' `apply`; shape and
numel(), which stay those of `[0]`; a loss put together outside the engine's forward pass; a model called by-passing
the engine; compiled code. A value carried out of a module otherwise than by its output may still meet the parameter
partitioned in backward.

Proof: tests/stack/test_correction_guard.py, and the cells of the ledger entries zero3-* of matrix.yaml that name
`zero3_guard`, run with `--corrections both`. To use it: copy or import this file before deepspeed.initialize, or
`swift rlhf --external_plugins zero3_guard.py`.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import linear, parameter_offload, partition_parameters, partitioned_param_coordinator
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch.overrides import TorchFunctionMode

CLAIMS = ">=0.14.4"
VARIABLE = "ZERO3_GUARD"
MODES = ("gather", "raise")
PATIENCE_S = 60
"""How long a rank waits for the others to touch the same parameter."""

LOG = logging.getLogger("corrections.zero3_guard")
LIBRARIES = frozenset({"torch", "deepspeed", "transformers", "accelerate", "peft", "trl"})
STANDARD_LIBRARY = frozenset(getattr(sys, "stdlib_module_names", ())) - {"__main__"}

READS_NOTHING = frozenset(
    {
        *(
            "__set__",
            "__delete__",
            "__hash__",
            "__repr__",
            "__str__",
            "__format__",
            "__len__",
            "__dir__",
            "__contains__",
        ),
        *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "element_size", "get_device"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_pinned", "is_shared", "is_inference"),
        *("data_ptr", "storage", "untyped_storage", "type", "has_names", "requires_grad_", "record_stream"),
        *("register_hook", "register_post_accumulate_grad_hook", "is_same_size", "is_set_to"),
        *("new_tensor", "new_empty", "new_zeros", "new_ones", "new_full", "result_type", "can_cast", "promote_types"),
    }
)
"""Operations that read no element. `__get__` reads where it is one of GIVES_ELEMENTS."""
GIVES_ELEMENTS = frozenset({"data", "T", "mT", "H", "mH", "real", "imag"})
KEEPS_NOTHING = frozenset({"sum", "mean", "view", "reshape", "flatten", "ravel", "detach", "clone", "to", "float"})
"""Operations whose backward does not look at the parameter's elements again."""


class CannotCorrect(RuntimeError):
    """The installed DeepSpeed is not what this file was written for, or its mode is not one of MODES."""


class PartitionedParameterError(RuntimeError):
    """The user's code touched a parameter that ZeRO-3 keeps partitioned there, or will when backward comes."""


class Guard(TorchFunctionMode):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """Watches the operations of one engine's forward passes."""

    def __init__(self, engine: Any, mode: str) -> None:
        super().__init__()
        self._raises = mode == "raise"
        self._root: torch.nn.Module = engine.module
        # The optimizer of a training engine owns the offload; without an optimizer the offload stands in its place.
        self._offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
        self._warned: set[int] = set()
        self.ran: set[int] = set()
        """Parameters (by id) whose module's forward pass is over, in this forward pass of the model."""
        self.by_hand: set[int] = set()
        """Parameters (by id) inside a GatheredParameters of this forward pass."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not torch.compiler.is_compiling():
            self.look(func, args)
            if kwargs:
                self.look(func, kwargs.values())
        return func(*args, **(kwargs or {}))

    def look(self, func: Callable[..., Any], values: Iterable[Any]) -> None:
        """Check the arguments of an operation before it runs."""
        for value in values:
            if value.__class__ is list or value.__class__ is tuple:
                self.look(func, value)
            elif getattr(value, "ds_status", None) is not None:
                operation = _reads(func)
                if operation is not None:
                    self._touch(operation, value)

    def _touch(self, operation: str, parameter: Any) -> None:
        status = parameter.ds_status.name
        if status == "AVAILABLE" and not self._left_behind(operation, parameter):
            return
        if parameter.ds_numel == 0:
            return
        frame = _users_frame()
        if frame is None:
            return
        if not self._raises:
            self._bring(operation, parameter, frame)
        elif parameter.requires_grad or operation != "sum":
            raise PartitionedParameterError(self._message(operation, parameter, frame, status))
        elif id(parameter) not in self._warned:
            self._warned.add(id(parameter))
            LOG.warning(self._message(operation, parameter, frame, status))

    def _left_behind(self, operation: str, parameter: Any) -> bool:
        """Whether a parameter that is gathered now may be partitioned when backward comes to what is done with it."""
        if not torch.is_grad_enabled() or not parameter.requires_grad or _held(parameter):
            return False
        if parameter.ds_persist and self._coordinator().is_complete_trace():
            return False  # after the first step nothing partitions it any more
        if not self._raises:
            return True
        if id(parameter) not in self.ran:
            return True
        # Its module ran before. What that keeps for its own backward outlasts this; what was gathered by hand does not.
        return id(parameter) in self.by_hand and operation not in KEEPS_NOTHING

    def _bring(self, operation: str, parameter: Any, frame: FrameType) -> None:
        module = parameter_offload.FWD_MODULE_STACK[-1]
        with torch.no_grad():
            self.wait_for(parameter)
            if id(parameter) not in getattr(module, "_external_params", {}):
                coordinator = self._coordinator()
                if coordinator.is_complete_trace():
                    # The recorded order of parameters lacks this one, and fetching insists on that order.
                    coordinator._invalidate_trace()
                partition_parameters.register_external_parameter(module, parameter)
            if parameter.ds_status.name == "NOT_AVAILABLE":
                _agree(parameter, f"{operation} on {self._name(parameter)} at {_place(frame)}")
                parameter.all_gather()
        if parameter.ds_status.name != "AVAILABLE":
            raise PartitionedParameterError(self._message(operation, parameter, frame, parameter.ds_status.name))

    def wait_for(self, parameter: Any) -> None:
        """Take a parameter that is being prefetched out of flight."""
        if parameter.ds_status.name == "INFLIGHT":
            flights = self._root.ds_inflight_param_registry
            if isinstance(flights, dict):  # up to 0.15.3 one for training, one for evaluation
                flights = flights[self._root.training]
            if parameter in flights:
                flights.pop(parameter).wait()

    def gathering_by_hand(self, parameters: Sequence[Any], *, writes: bool) -> list[Any]:
        """Before GatheredParameters enters; returns what it shall gather, and partition when it is left.

        DeepSpeed refuses what is in flight at that moment, and at the end what a running module holds. writes: whether
        the context is to write back what the user changes, for which it needs them all.
        """
        flying = [parameter for parameter in parameters if parameter.ds_status.name == "INFLIGHT"]
        frame = _users_frame() if flying else None
        if frame is not None and self._raises:
            raise PartitionedParameterError(self._message("GatheredParameters", flying[0], frame, "INFLIGHT"))
        if frame is not None:
            with torch.no_grad():
                for parameter in flying:
                    self.wait_for(parameter)
        if self._raises or writes:
            return list(parameters)
        return [p for p in parameters if not (p.ds_status.name == "AVAILABLE" and p.ds_active_sub_modules)]

    def _coordinator(self) -> Any:
        find = self._offload.get_param_coordinator
        if "training" in inspect.signature(find).parameters:  # up to 0.15.3
            return find(training=self._root.training)
        return find()

    def _name(self, parameter: Any) -> str:
        names = (name for name, other in self._root.named_parameters() if other is parameter)
        return next(names, "a parameter")

    def _message(self, operation: str, parameter: Any, frame: FrameType, status: str) -> str:
        name = self._name(parameter)
        attribute = f"model.{name}" if name != "a parameter" else "module.weight"
        if status == "AVAILABLE":
            trouble = "partitioned again when backward needs it: it is gathered for the moment, and not registered"
        elif operation == "GatheredParameters":
            trouble = "in flight there: it is being prefetched for its module"
        else:
            trouble = "partitioned away there: iterating .parameters() does not gather"
        return (
            f"{_place(frame)}: {operation} on {name}, shape {tuple(parameter.ds_shape)}, which ZeRO-3 has {trouble}. "
            f"Write {attribute} instead (attribute access gathers and registers it), or call "
            "deepspeed.zero.register_external_parameter(model, parameter) once after deepspeed.initialize. To keep a "
            "module in the graph, add module(dummy_input).sum() * 0 to the loss"
        )


def _reads(func: Callable[..., Any]) -> str | None:
    """Name of an operation that reads elements, or None."""
    name = getattr(func, "__name__", "") or "an operation"
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        return attribute if attribute in GIVES_ELEMENTS else None
    return None if name in READS_NOTHING else name.strip("_")


def _held(parameter: Any) -> bool:
    """Whether a module whose forward pass is not over holds the parameter, and will have it in backward."""
    if parameter.ds_active_sub_modules:
        return True
    for module in reversed(parameter_offload.FWD_MODULE_STACK):
        if id(parameter) in getattr(module, "_external_params", {}):
            return True
        # The values of ZeROOrderedDict do not pass by its look-up, which would gather.
        if any(own is parameter for own in module._parameters.values()):
            return True
        if getattr(parameter, "ds_z3_leaf_module", None) is module:
            return True
    return False


def _users_frame() -> FrameType | None:
    """The user's innermost frame, or None where DeepSpeed's own code does what is being looked at."""
    frame: FrameType | None = sys._getframe(1)
    called = False
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        library = module.partition(".")[0]
        passes_on = (
            frame.f_code.co_filename == __file__
            or library == "torch"
            or library in STANDARD_LIBRARY
            or module == linear.__name__
        )
        if not passes_on:
            if library == "deepspeed" and not called:
                return None
            called = True
            if library not in LIBRARIES:
                return frame
        frame = frame.f_back
    return None


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


_MEETINGS: dict[tuple[int, ...], int] = {}


def _agree(parameter: Any, what: str) -> None:
    """Make sure that every rank is here for the same parameter, by the store: a gather alone would hang.

    Happens at the first touch of each parameter, not in every step. Raises PartitionedParameterError.
    """
    ranks = tuple(torch.distributed.get_process_group_ranks(parameter.ds_process_group))
    store = torch.distributed.distributed_c10d._get_default_store()
    number = _MEETINGS[ranks] = _MEETINGS.get(ranks, 0) + 1
    meeting = f"zero3_guard/{'-'.join(map(str, ranks))}/{number}"
    store.set(f"{meeting}/{torch.distributed.get_rank()}", what)
    if store.add(f"{meeting}/{what}", 1) == len(ranks):
        store.set(f"{meeting}/all", "here")
    try:
        store.wait([f"{meeting}/all"], datetime.timedelta(seconds=PATIENCE_S))
    except RuntimeError as error:
        for rank in ranks:
            arrived = store.check([f"{meeting}/{rank}"])
            theirs = store.get(f"{meeting}/{rank}").decode() if arrived else "something else"
            if theirs != what:
                raise PartitionedParameterError(
                    f"{what}: rank {rank} did {theirs} for {PATIENCE_S} s; a partitioned parameter can only be touched "
                    "by all ranks together"
                ) from error
        raise


_ACTIVE: list[Guard] = []
"""Guards of the forward passes that are running, the innermost last."""


def _guard_of(engine: Any, mode: str) -> Guard | None:
    """The engine's guard, or None where there is nothing to watch."""
    if engine.zero_optimization_stage() != 3 or getattr(engine, "is_compiled", False):
        return None
    guard: Guard | None = engine.__dict__.get("_zero3_guard")
    if guard is None:
        guard = engine.__dict__["_zero3_guard"] = Guard(engine, mode)
    return guard


def _patch_engine(mode: str) -> None:
    original = DeepSpeedEngine.forward

    @functools.wraps(original)
    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        guard = _guard_of(self, mode)
        if guard is None:
            return original(self, *inputs, **kwargs)
        guard.ran.clear()
        guard.by_hand.clear()
        _ACTIVE.append(guard)
        try:
            with guard:
                return original(self, *inputs, **kwargs)
        finally:
            _ACTIVE.pop()

    forward._zero3_guard = mode  # type: ignore[attr-defined]  # reason: marks the patch, for a second application
    DeepSpeedEngine.forward = forward


def _patch_offload() -> None:
    """Only to stop at a line it matters whose forward pass is over."""
    offload = parameter_offload.DeepSpeedZeRoOffload
    original = offload.post_sub_module_forward_function

    @functools.wraps(original)
    def post_sub_module_forward_function(self: Any, sub_module: torch.nn.Module) -> Any:
        if _ACTIVE:
            whole = bool(deepspeed.utils.z3_leaf_module(sub_module))
            _ACTIVE[-1].ran.update(id(parameter) for parameter in sub_module.parameters(recurse=whole))
        return original(self, sub_module)

    offload.post_sub_module_forward_function = post_sub_module_forward_function


def _patch_gathered_parameters() -> None:
    context = partition_parameters.GatheredParameters
    original_enter, original_exit = context.__enter__, context.__exit__

    @functools.wraps(original_enter)
    def enter(self: Any) -> Any:
        if not _ACTIVE or not self.enabled:
            return original_enter(self)
        guard, whole = _ACTIVE[-1], self.params
        self.params = guard.gathering_by_hand(whole, writes=self.src_rank is not None)
        self.enabled = bool(self.params)
        self._zero3_guard = (guard, whole)
        entered = original_enter(self)
        guard.by_hand.update(map(id, self.params))
        return entered

    @functools.wraps(original_exit)
    def leave(self: Any, *exc: Any) -> Any:
        guarded = self.__dict__.pop("_zero3_guard", None)
        if guarded is None:
            return original_exit(self, *exc)
        guard, whole = guarded
        guard.by_hand.difference_update(map(id, whole))
        try:
            return original_exit(self, *exc)
        finally:
            self.params, self.enabled = whole, True

    context.__enter__, context.__exit__ = enter, leave


def _patch_linear() -> None:
    original = linear.LinearFunctionForZeroStage3.apply

    def apply_linear(*args: Any) -> Any:
        if _ACTIVE and not torch.compiler.is_compiling():
            _ACTIVE[-1].look(torch._C._nn.linear, args)
        return original(*args)

    linear.LinearFunctionForZeroStage3.apply = staticmethod(apply_linear)


def _check() -> None:
    """Raise CannotCorrect unless everything that is replaced or relied on is there."""

    def parameters(function: Any) -> list[str]:
        return list(inspect.signature(function).parameters)

    def constants(function: Any) -> frozenset[str]:
        code = inspect.unwrap(function).__code__
        return frozenset([*code.co_names, *(c for c in code.co_consts if isinstance(c, str))])

    engine = "deepspeed/runtime/engine.py: DeepSpeedEngine"
    offload = "deepspeed/runtime/zero/parameter_offload.py"
    partition = "deepspeed/runtime/zero/partition_parameters.py"
    coordinator = "deepspeed/runtime/zero/partitioned_param_coordinator.py: PartitionedParameterCoordinator"
    expectations: list[tuple[str, Callable[[], bool]]] = [
        (f"{engine}.forward", lambda: callable(DeepSpeedEngine.forward)),
        (f"{engine}.zero_optimization_stage", lambda: callable(DeepSpeedEngine.zero_optimization_stage)),
        (f"{offload}: FWD_MODULE_STACK, a list", lambda: isinstance(parameter_offload.FWD_MODULE_STACK, list)),
        (
            f"{offload}: DeepSpeedZeRoOffload.post_sub_module_forward_function(self, sub_module)",
            lambda: (
                parameters(parameter_offload.DeepSpeedZeRoOffload.post_sub_module_forward_function)
                == ["self", "sub_module"]
            ),
        ),
        (
            f"{offload}: DeepSpeedZeRoOffload.get_param_coordinator, ds_inflight_param_registry on the model",
            lambda: (
                callable(parameter_offload.DeepSpeedZeRoOffload.get_param_coordinator)
                and "ds_inflight_param_registry" in constants(parameter_offload.DeepSpeedZeRoOffload.__init__)
            ),
        ),
        (
            f"{partition}: ZeroParamStatus of AVAILABLE, NOT_AVAILABLE, INFLIGHT",
            lambda: (
                {status.name for status in partition_parameters.ZeroParamStatus}
                == {"AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"}
            ),
        ),
        (
            f"{partition}: register_external_parameter(module, parameter) that sets _external_params",
            lambda: (
                parameters(partition_parameters.register_external_parameter) == ["module", "parameter"]
                and "_external_params" in constants(partition_parameters.register_external_parameter)
            ),
        ),
        (
            f"{partition}: GatheredParameters.__enter__ over self.params while self.enabled, src_rank where it writes",
            lambda: (
                {"params", "enabled"} <= constants(partition_parameters.GatheredParameters.__enter__)
                and "src_rank" in constants(partition_parameters.GatheredParameters.__init__)
                and callable(partition_parameters.GatheredParameters.__exit__)
            ),
        ),
        (
            f"{coordinator}.is_complete_trace and _invalidate_trace",
            lambda: all(
                callable(getattr(partitioned_param_coordinator.PartitionedParameterCoordinator, name))
                for name in ("is_complete_trace", "_invalidate_trace")
            ),
        ),
        (
            f"store of the default process group in torch {torch.__version__}",
            lambda: callable(torch.distributed.distributed_c10d._get_default_store),
        ),
        (
            "deepspeed/runtime/zero/linear.py: LinearFunctionForZeroStage3, an autograd function",
            lambda: issubclass(linear.LinearFunctionForZeroStage3, torch.autograd.Function),
        ),
    ]
    for expected, holds in expectations:
        try:
            found = holds()
        except (AttributeError, TypeError, ValueError, IndexError):
            found = False
        if not found:
            raise CannotCorrect(f"DeepSpeed {deepspeed.__version__} has no {expected}; nothing was changed")


def apply() -> bool:
    """Guard every ZeRO-3 engine of this process; False on a release that CLAIMS does not name."""
    mode = os.environ.get(VARIABLE, MODES[0])
    if mode not in MODES:
        raise CannotCorrect(f"{VARIABLE}={mode!r}, expected one of {', '.join(MODES)}; nothing was changed")
    if Version(Version(deepspeed.__version__).base_version) not in SpecifierSet(CLAIMS):
        return False
    before = getattr(DeepSpeedEngine.forward, "_zero3_guard", None)
    if before is not None:
        if before != mode:
            raise CannotCorrect(f"already on with {VARIABLE}={before}, cannot change to {mode}")
        return True
    _check()
    _patch_engine(mode)
    if mode == "raise":
        _patch_offload()
    _patch_gathered_parameters()
    _patch_linear()
    if os.environ.get("RANK", "0") == "0":
        LOG.warning("DeepSpeed %s: forward passes at ZeRO-3 are guarded, mode %s", deepspeed.__version__, mode)
    return True


APPLIED = apply()
