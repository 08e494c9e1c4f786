"""Records what one rank saw of every optimizer step: batches, losses, masters, what the inner optimizer was handed.

It listens where the training code calls (`engine.step`, the inner optimizer's `step`) and changes nothing. What it
keeps is saved as one file per rank; the reference reads those files in a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from tests.jobs import masters
from tests.jobs.plain_optimizer import MOMENTS

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclasses.dataclass
class Piece:
    """A fragment's numbers in one step, each [numel] fp32. used is None where the optimizer was handed no gradient.

    moments: as the optimizer was handed them. state_after: the moments it holds once the step is over.
    """

    name: str
    start: int
    master_before: torch.Tensor
    master_after: torch.Tensor
    used: torch.Tensor | None
    moments: dict[str, torch.Tensor]
    state_after: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class MicroBatch:
    """One forward pass: its inputs (CPU tensors and plain values), its loss, its per-token log-probabilities."""

    inputs: dict[str, Any]
    loss: float
    logprobs: torch.Tensor | None


@dataclasses.dataclass
class StepRecord:
    """One optimizer step of one rank. weights: {name: (start, [numel] in the training dtype)} after the step."""

    micro_batches: list[MicroBatch]
    pieces: list[Piece]
    weights: dict[str, tuple[int, torch.Tensor]]
    grad_norm_reported: float | None
    loss_scale_before: float | None
    loss_scale_after: float | None
    inner_steps: int
    violations: list[str]


@dataclasses.dataclass
class RankRecord:
    """Everything one rank recorded; saved with torch.save, read by the reference.

    dtypes: in which the engine holds each trainable parameter and each buffer.
    unfinished: the forward passes of a step that training did not finish.
    """

    rank: int
    wrapper: str
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    steps: list[StepRecord]
    training_s: float
    device: str
    shims: list[tuple[str, str]]
    facts: dict[str, Any]
    unfinished: list[MicroBatch] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Handed:
    gradient: torch.Tensor | None
    moments: dict[str, torch.Tensor]
    times: int


class InnerSpy:
    """What the inner optimizer is handed, by the identity of the tensor it updates, since the last `take`."""

    def __init__(self, inner: Any) -> None:
        self._handed: dict[int, _Handed] = {}
        self._calls = 0
        self._original = inner.step
        self._inner = inner

        @functools.wraps(inner.step)
        def step(*args: Any, **kwargs: Any) -> Any:
            return self._step(*args, **kwargs)

        inner.step = step

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        scale = float(kwargs.get("scale") or 1.0)
        grads = kwargs.get("grads")
        for group_index, group in enumerate(self._inner.param_groups):
            for index, tensor in enumerate(group["params"]):
                gradient = tensor.grad
                if grads is not None:
                    # The legacy fused paths pass their gradients, still scaled, beside the scale to divide by.
                    given = grads[group_index]
                    gradient = given[index] if isinstance(given, (list, tuple)) else given
                    gradient = gradient.float() / scale
                self._note(tensor, gradient)
        return self._original(*args, **kwargs)

    def _note(self, tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
        before = self._handed.get(id(tensor))
        self._handed[id(tensor)] = _Handed(
            None if gradient is None else gradient.detach().float().clone(),
            {key: moment.detach().clone() for key, moment in self.state(tensor).items()},
            1 if before is None else before.times + 1,
        )

    def state(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The moments that the optimizer holds of a tensor now, by name; not copies."""
        held = self._inner.state.get(tensor, {})
        return {key: held[key] for key in MOMENTS if isinstance(held.get(key), torch.Tensor)}

    def take(self) -> tuple[dict[int, _Handed], int]:
        """(what was handed by tensor identity, number of inner steps) since the last take."""
        handed, calls = self._handed, self._calls
        self._handed, self._calls = {}, 0
        return handed, calls


class RecordingFault(BaseException):
    """A fault of this recorder. Not an Exception: what catches training's exceptions as evidence must let it pass."""


def _recording(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Turn any exception of the recorder's own code into a RecordingFault."""

    @functools.wraps(method)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            raise RecordingFault(f"{method.__name__}: {type(error).__name__}: {error}") from error

    return guarded


class Recorder:
    """Attached to a DeepSpeed engine it turns training into `StepRecord`s."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.steps: list[StepRecord] = []
        self.facts: dict[str, Any] = {}
        self.training_s = 0.0
        self._open: list[MicroBatch] = []
        self._engine: Any = None
        self._spy: InnerSpy | None = None
        self._fragments: list[masters.Fragment] = []
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._before: list[torch.Tensor] = []
        self._scale_at_backward: float | None = None
        self._frozen: dict[str, torch.Tensor] = {}

    @_recording
    def attach(self, engine: Any) -> None:
        """Listen to `engine` from now on. Its optimizer must be the one it will train with."""
        self._engine = engine
        optimizer = engine.optimizer
        self._parameters = {n: p for n, p in engine.module.named_parameters() if p.requires_grad}
        self._frozen = {
            name: _weights(parameter, self.rank)[1]
            for name, parameter in engine.module.named_parameters()
            if not parameter.requires_grad
        }
        self._spy = InnerSpy(getattr(optimizer, "optimizer", optimizer))
        self._fragments = masters.fragments(optimizer, self._parameters, self.rank)
        self._before = [fragment.read(fragment.master) for fragment in self._fragments]
        step, backward = engine.step, engine.backward

        @functools.wraps(backward)
        def recorded_backward(*args: Any, **kwargs: Any) -> Any:
            self._scale_at_backward = masters.loss_scale(optimizer)
            return backward(*args, **kwargs)

        @functools.wraps(step)
        def recorded_step(*args: Any, **kwargs: Any) -> Any:
            boundary = engine.is_gradient_accumulation_boundary()
            result = step(*args, **kwargs)
            if boundary:
                with self.untimed():
                    self._close()
            return result

        engine.step, engine.backward = recorded_step, recorded_backward

    @contextlib.contextmanager
    def untimed(self) -> Iterator[None]:
        """Time spent inside is recording, not training."""
        began = time.perf_counter()
        yield
        self.training_s -= time.perf_counter() - began

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Time spent inside is the case's own training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.training_s += time.perf_counter() - began

    @_recording
    def micro_batch(self, inputs: Mapping[str, Any], loss: torch.Tensor, logprobs: torch.Tensor | None) -> None:
        """One forward pass. loss is before any division by the accumulation steps."""
        kept = {k: v.detach().cpu().clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        self._open.append(
            MicroBatch(
                kept, float(loss.detach()), None if logprobs is None else logprobs.detach().float().cpu().clone()
            )
        )

    @_recording
    def _close(self) -> None:
        assert self._spy is not None
        handed, calls = self._spy.take()
        after = [fragment.read(fragment.master) for fragment in self._fragments]
        violations = [
            f"{fragment.name}: the inner optimizer stepped it {handed[id(fragment.master)].times} times"
            for fragment in self._fragments
            if id(fragment.master) in handed and handed[id(fragment.master)].times != 1
        ]
        pieces = []
        for fragment, before, now in zip(self._fragments, self._before, after, strict=True):
            given = handed.get(id(fragment.master))
            used = given.gradient if given is not None else None
            pieces.append(
                Piece(
                    fragment.name,
                    fragment.start,
                    before,
                    now,
                    None if used is None else fragment.read(used),
                    {} if given is None else {k: fragment.read(v) for k, v in given.moments.items()},
                    {k: fragment.read(v) for k, v in self._spy.state(fragment.master).items()},
                )
            )
        for master, mask in masters.padding(self._fragments).values():
            given = handed.get(id(master))
            if given is not None and given.gradient is not None and given.gradient.reshape(-1).cpu()[mask].any():
                violations.append("padding of a flat partition was handed a gradient that is not 0")
        for name, parameter in self._engine.module.named_parameters():
            if name in self._frozen and not torch.equal(_weights(parameter, self.rank)[1], self._frozen[name]):
                violations.append(f"{name}: frozen, and not bitwise as it was")
        self.steps.append(
            StepRecord(
                self._open,
                pieces,
                {name: _weights(parameter, self.rank) for name, parameter in self._parameters.items()},
                _number(self._engine.get_global_grad_norm()),
                self._scale_at_backward,
                masters.loss_scale(self._engine.optimizer),
                calls,
                sorted(set(violations)),
            )
        )
        self._open = []
        self._before = after

    def save(self, path: Path, *, device: str, shims: list[tuple[str, str]]) -> None:
        """Write this rank's record; complete up to the last finished step."""
        shapes = {n: tuple(getattr(p, "ds_shape", p.shape)) for n, p in self._parameters.items()}
        wrapper = type(self._engine.optimizer).__name__ if self._engine is not None else ""
        dtypes = {} if self._engine is None else {n: b.dtype for n, b in self._engine.module.named_buffers()}
        dtypes |= {name: _local(parameter).dtype for name, parameter in self._parameters.items()}
        record = RankRecord(
            self.rank, wrapper, shapes, dtypes, self.steps, self.training_s, device, shims, self.facts, self._open
        )
        torch.save(record, path)


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _local(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this rank holds of a parameter: its partition under ZeRO-3, all of it otherwise."""
    held = getattr(parameter, "ds_tensor", None)
    return (parameter.data if held is None else held.data).detach().cpu()


def _weights(parameter: torch.nn.Parameter, rank: int) -> tuple[int, torch.Tensor]:
    """(start, [numel]) of the 16-bit (or fp32) weight this rank computes with."""
    if not hasattr(parameter, "ds_tensor"):
        return 0, parameter.detach().reshape(-1).cpu().clone()
    start = rank * parameter.ds_tensor.ds_numel
    numel = max(0, min(parameter.ds_tensor.ds_numel, parameter.ds_numel - start))
    return start, _local(parameter).reshape(-1)[:numel].clone()
