"""What a case recorded, as data: the one schema that jobs write and `ci.judge` reads.

Standard library only, because it is imported inside every stack, the oldest included. One case is one JSON line.
A job records and never judges: no tolerance and no verdict appears here.

Numbers that JSON cannot carry (nan, inf) are written as the strings "nan", "inf" and "-inf"; `None` is written as
null and means that the library itself reported None (a norm) or that the number does not exist for this case.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

SCHEMA = 1

CHECKS = (
    "forward",
    "reported_norm",
    "gradient_used",
    "update",
    "ranks_agree",
    "loss_scale",
    "consistency",
)
"""The checks of one optimizer step, in the order in which they are reported."""

ALTERNATIVES = (
    "last_micro_batch",
    "first_and_last_micro_batch",
    "previous_step",
    "all_steps_so_far",
    "all_steps_so_far_unclipped",
    "step_count_plus_one",
    "without_experts",
    "own_rank_only",
    "masters_not_restored",
    "partitioned_as_empty",
    "bias_added_after_rounding",
    "unclipped",
)
"""What a known defect may make of a step. The reference records each one that exists for the case as it goes."""


@dataclasses.dataclass(frozen=True)
class Shim:
    """A change made to a library so that the case can run here at all; never one that touches the numbers judged."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class ExceptionRecord:
    """An exception that a rank caught in training or user code.

    user_frame: "file.py:123 in function: source line", the innermost frame that is the user's own code (the job's
        model or the file given with --adapter), or None. remedy: what to write instead, or None.
    where: "forward step 0 micro-batch 1", "backward ...", "step ...", "setup".
    """

    type: str
    message: str
    user_frame: str | None = None
    remedy: str | None = None
    where: str | None = None
    rank: int = 0


@dataclasses.dataclass(frozen=True)
class TensorError:
    """Relative error of one parameter's gradient: |g - r| / max(|r|, |r_all| / sqrt(number of tensors))."""

    name: str
    gradient_error: float | None
    update_error: float | None = None


@dataclasses.dataclass(frozen=True)
class Gram:
    """Inner products of one parameter's used gradient g with a wanted gradient r, in float64.

    They let a later judge ask for the error against f * r for any factor f: |g - f r|^2 = gg - 2 f gr + f^2 rr.
    """

    gg: float
    gr: float
    rr: float


@dataclasses.dataclass(frozen=True)
class Alternative:
    """One prediction of what this step would look like; None where the alternative says nothing about a check.

    reported_norm: global L2 norm before clipping. gradient: {parameter: Gram} of the measured used gradient against
    this alternative's used gradient (after clipping as this alternative would clip). forward_error, update_error:
    the measured values' error against this alternative, in the units of Step.loss_error and Step.update_error.
    consistency: what is still not exactly as this alternative says it must be, where it says anything about that.
    """

    reported_norm: float | None = None
    gradient: dict[str, Gram] | None = None
    forward_error: float | None = None
    update_error: float | None = None
    consistency: tuple[str, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer step, measured and referenced.

    loss: mean over ranks and micro-batches. loss_error, logprob_error: largest |measured - reference| over ranks and
        micro-batches, divided by max(1, |reference|).
    lr: the learning rate that the case's configuration gives for this step (never read from the engine).
    loss_scale_before: the scale that backward used; loss_scale_after: the scale after the step;
        loss_scale_expected: what the case's rule says it must be after the step; None where there is no loss scale.
    overflow: whether the case's own gradients overflowed (by the reference, not by the engine's flag).
    grad_norm_reported: what the library reported, one per rank. grad_norm_true: reference, before clipping.
    grad_norm_wanted: true * min(1, clip / (true + 1e-6)). grad_norm_used: what the inner optimizer was handed.
    gradient_error: the largest TensorError.gradient_error.
    update_error: max(0, |measured master - plain optimizer's master| - one ulp of the master), over the largest
        update of the step (plain optimizer); the same of each moment that the optimizer keeps, over that moment's
        largest value; dimensionless.
    consistency: names of what is not exactly as it must be (16-bit weight unlike the cast master, frozen parameter
        moved, state changed by an overflow step, gradient of A not bitwise 0 with B = 0), empty when all is well.
    not_judged: {check: reason} for the checks this step declares not judged.
    tensors: the worst ten. alternatives: by name, those of ALTERNATIVES that exist here, and always "truth".
    """

    index: int
    loss: float | None = None
    loss_error: float | None = None
    logprob_error: float | None = None
    lr: float | None = None
    loss_scale_before: float | None = None
    loss_scale_after: float | None = None
    loss_scale_expected: float | None = None
    overflow: bool = False
    grad_norm_reported: tuple[float | None, ...] = ()
    grad_norm_true: float | None = None
    grad_norm_used: float | None = None
    grad_norm_wanted: float | None = None
    gradient_error: float | None = None
    update_error: float | None = None
    consistency: tuple[str, ...] = ()
    not_judged: dict[str, str] = dataclasses.field(default_factory=dict)
    tensors: tuple[TensorError, ...] = ()
    alternatives: dict[str, Alternative] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Probe:
    """What the ranks of a pytest worker found before its first case, asserted in each of them.

    accelerator: DeepSpeed's name of it. communication: torch.distributed's name of the library that carried the
    collective. world_size: as many ranks as the largest case has. devices: the name of each rank's device.
    versions: of the driver and the toolkit, by the names in matrix.yaml. all_reduce: sum over the ranks of rank + 1, as
    it came back.
    """

    accelerator: str
    communication: str
    world_size: int
    devices: tuple[str, ...]
    versions: dict[str, str]
    all_reduce: float


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Everything a case recorded.

    cell: the cell's id. pins: versions really installed, by distribution name. wrapper: class of the optimizer that
    DeepSpeed chose. steps_expected: how many optimizer steps the case must have recorded unless an exception stopped
    it. problem: why the evidence is incomplete (crash of a process, hang, out of memory, wrong accelerator, pins
    differ), or None. log: path of the case's log, relative to the run's folder. training_s: time in the case's own
    training steps; duration_s: everything. peak_memory_mb: largest resident size of any rank. mutant: the fault that
    was planted on purpose and ran (`nox -s mutants`), None everywhere else. probe: what the ranks found before the
    first case of this pytest worker, None where they could not.
    """

    cell: str
    pins: dict[str, str]
    accelerator: str
    device: str
    world_size: int
    seed: int = 0
    wrapper: str | None = None
    steps_expected: int = 3
    steps: tuple[Step, ...] = ()
    shims: tuple[Shim, ...] = ()
    corrections: tuple[str, ...] = ()
    exception: ExceptionRecord | None = None
    problem: str | None = None
    log: str | None = None
    duration_s: float | None = None
    training_s: float | None = None
    peak_memory_mb: float | None = None
    notes: tuple[str, ...] = ()
    mutant: str | None = None
    probe: Probe | None = None
    schema: int = SCHEMA


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def to_json(evidence: Evidence) -> str:
    """One line of JSON, keys sorted, without a newline at the end."""
    return json.dumps(plain(evidence), allow_nan=False, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def append(path: Path, evidence: Evidence) -> None:
    """Append one line in a single write, synced, so that an interrupt leaves whole lines and workers do not mix."""
    data = (to_json(evidence) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        written = os.write(descriptor, data)
        if written != len(data):
            raise OSError(f"{path}: wrote {written} of {len(data)} bytes of the evidence for {evidence.cell}")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
