"""Which line of the user's own code touched a partitioned ZeRO-3 parameter, and what to write there instead.

Autograd raises in backward, where the traceback holds no line of the user's. So each forward pass is watched: an
operation that the user's code calls itself on a partitioned parameter is remembered, nothing else is done. What
DeepSpeed's own hooks do with such parameters is not the user's. Limit: an autograd function's `apply`
(DeepSpeed's F.linear) does not pass by here; where that fails, the traceback has the line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

HARMLESS = frozenset(
    {
        *("__get__", "__set__", "__delete__", "__hash__", "__repr__", "__len__", "size", "dim", "numel", "nelement"),
        *("stride", "storage_offset", "element_size", "is_contiguous", "is_floating_point", "is_complex", "type"),
        *("data_ptr", "untyped_storage", "requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    }
)
"""Operations that read no element of a tensor. `p.data` is the one `__get__` that does give its elements."""


@dataclasses.dataclass(frozen=True)
class Touch:
    """An operation of the user's on a ZeRO-3 parameter outside its module. line: "file.py:12 in function: source".

    away: its data was partitioned then; otherwise it was gathered, and backward may find it partitioned.
    """

    line: str
    operation: str
    parameter: str
    away: bool


class Watch(TorchFunctionMode):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """Remembers the touches of the forward passes that run inside it."""

    def __init__(self, files: Iterable[Path]) -> None:
        super().__init__()
        self._files = frozenset(str(file) for file in files)
        self._names: dict[int, str] = {}
        self.touches: list[Touch] = []

    def during_forward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """To be entered around a forward pass of `model`; does nothing where no file is the user's."""
        if not self._files:
            return contextlib.nullcontext()
        if not self._names:
            self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        return self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = _reads(func)
        if operation is not None:
            for argument in (*args, *(kwargs or {}).values()):
                if isinstance(argument, torch.nn.Parameter) and hasattr(argument, "ds_status"):
                    self._note(operation, argument)
        return func(*args, **(kwargs or {}))

    def _note(self, operation: str, parameter: torch.nn.Parameter) -> None:
        away = is_away(parameter)
        frame = calling_frame(self._files, direct=not away)
        if frame is None:
            return
        touch = Touch(line_of(frame), operation, self._names.get(id(parameter), "a parameter"), away)
        if touch not in self.touches:
            self.touches.append(touch)

    def note_failure(self, error: BaseException) -> None:
        """An error on a line of the user's whose variables hold parameters that are away is a touch as well."""
        innermost: TracebackType | None = None
        entry = error.__traceback__
        while entry is not None:
            if entry.tb_frame.f_code.co_filename in self._files:
                innermost = entry
            entry = entry.tb_next
        if innermost is None:
            return
        for value in innermost.tb_frame.f_locals.values():
            if isinstance(value, torch.nn.Parameter) and is_away(value):
                name = self._names.get(id(value), "a parameter")
                self.touches.append(Touch(line_of(innermost.tb_frame, innermost.tb_lineno), "call", name, True))

    def culprit(self) -> Touch | None:
        """The first touch of a parameter that was away; failing that, of one that was gathered for the moment."""
        return next((touch for touch in self.touches if touch.away), next(iter(self.touches), None))

    def remedy(self) -> str | None:
        """What to write instead of the culprit's line."""
        culprit = self.culprit()
        if culprit is None:
            return None
        names = self._of_line(culprit.line)
        why = (
            "partitioned there: iterating .parameters() does not gather"
            if culprit.away
            else "gathered there, but not any more where backward needs the same"
        )
        return (
            f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} {why}. Write model.{names[0]} instead (attribute "
            "access gathers and registers it), or call deepspeed.zero.register_external_parameter(model, parameter) "
            "once for each after deepspeed.initialize. To keep a module in the graph, add "
            "module(dummy_input).sum() * 0 to the loss"
        )

    def notes(self) -> list[str]:
        """For each line that read a parameter while it was away, for what no exception tells of."""
        lines = dict.fromkeys(touch.line for touch in self.touches if touch.away)
        return [
            f"{line} reads {', '.join(self._of_line(line))}, partitioned by ZeRO-3 there: the values are missing"
            for line in lines
        ]

    def _of_line(self, line: str) -> list[str]:
        return list(dict.fromkeys(touch.parameter for touch in self.touches if touch.line == line))


def _reads(func: Callable[..., Any]) -> str | None:
    """Name of an operation that reads elements, or None."""
    name = getattr(func, "__name__", "")
    if name == "__get__" and getattr(getattr(func, "__self__", None), "__name__", "") == "data":
        return "data"
    return None if name in HARMLESS else name


def is_away(parameter: torch.nn.Parameter) -> bool:
    """Whether ZeRO-3 holds the parameter's elements elsewhere at this moment."""
    return getattr(getattr(parameter, "ds_status", None), "name", "") == "NOT_AVAILABLE"


def calling_frame(files: frozenset[str], *, direct: bool) -> FrameType | None:
    """The innermost frame of the user's that has called, unless DeepSpeed's code is in between.

    direct: only where the user's code called the operation itself, not through a module or another library.
    A generator expression or comprehension stands for the function that it is written in.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        theirs = frame.f_code.co_filename in files
        if module.partition(".")[0] == "deepspeed" or (direct and not theirs and module not in _DISPATCH):
            return None
        if theirs and not frame.f_code.co_name.startswith("<"):
            return frame
        frame = frame.f_back
    return None


_DISPATCH = frozenset({__name__, "torch.overrides", "torch._tensor", "torch.functional"})
"""Modules whose frames lie between an operation as written and `__torch_function__`."""


def line_of(frame: FrameType, number: int | None = None) -> str:
    """ "file.py:12 in Class.function: source", of the line that the frame is at or of the one given."""
    path, number = frame.f_code.co_filename, number or frame.f_lineno
    return f"{Path(path).name}:{number} in {frame.f_code.co_qualname}: {linecache.getline(path, number).strip()}"
