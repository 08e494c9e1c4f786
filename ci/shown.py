"""run.json as the reports need it: read cell by cell, only the fields that are shown.

At ten thousand cells a run.json has a hundred megabytes. Reading it into the models of ci.runrecord takes a gigabyte;
here it stays bytes, and a cell is decoded when its turn comes. The structs name a part of those models' fields, which
a test holds together.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, field

from ci.errors import ExitCode, UsageError
from ci.runrecord import FAILING, RUN, SCHEMA, RunRecord, Verdict

Number = float | str | None
"""As in run.json: nan and inf are strings, null means that the library reported None."""


class Shown(Struct, frozen=True, omit_defaults=True):
    """Base of what goes into a page as it was read, without what is empty."""


class Check(Shown, frozen=True):
    name: str
    ok: bool | None
    value: Number = None
    expected: Number = None
    tolerance: Number = None
    error: Number = None
    predicted: Number = None
    defects: tuple[str, ...] = ()
    reason: str | None = None


class Tensor(Shown, frozen=True):
    name: str
    gradient_error: Number = None
    update_error: Number = None


class Step(Shown, frozen=True):
    loss_scale_before: Number = None
    loss_scale_after: Number = None
    loss_scale_expected: Number = None
    overflow: bool = False
    grad_norm_reported: tuple[Number, ...] = ()
    grad_norm_true: Number = None
    grad_norm_used: Number = None
    grad_norm_wanted: Number = None
    consistency: tuple[str, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    checks: tuple[Check, ...] = ()


class Shim(Shown, frozen=True):
    name: str
    reason: str


class Raised(Shown, frozen=True):
    type: str
    message: str
    user_frame: str | None = None
    remedy: str | None = None
    where: str | None = None
    rank: int = 0


class Cell(Shown, frozen=True):
    id: str
    stack: str
    job: str
    case: dict[str, str | int | float | bool | None]
    verdict: Verdict
    world_size: int
    command: str
    defects: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    corrections: tuple[str, ...] = ()
    shims: tuple[Shim, ...] = ()
    reason: str | None = None
    exception: Raised | None = None
    log: str | None = None
    adapter: str | None = None
    ds_config: str | None = None
    wrapper: str | None = None
    duration_s: Number = None
    peak_memory_mb: Number = None
    notes: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()


class Known(Shown, frozen=True):
    """A ledger entry as the run kept it."""

    title: str
    upstream: tuple[str, ...] = ()
    advice: str | None = None
    correction: str | None = None
    affects: dict[str, str] = {}


class Head(Struct, frozen=True):
    """A run without its cells, which stay bytes."""

    command: str
    backend: str
    runtime: str
    started: str
    schema: int = SCHEMA
    commit: str | None = None
    image: str | None = None
    hardware: dict[str, str | int | float | None] = {}
    stacks: dict[str, dict[str, str]] = {}
    duration_s: Number = None
    ledger: dict[str, Known] = {}
    unavailable: dict[str, str] = {}
    incomplete: tuple[str, ...] = ()
    cells: tuple[Raw, ...] = field(default=())


class PastCheck(Struct, frozen=True):
    name: str
    value: Number = None
    expected: Number = None


class PastStep(Struct, frozen=True):
    checks: tuple[PastCheck, ...] = ()


class Id(Struct, frozen=True):
    id: str


class Judged(Struct, frozen=True):
    verdict: Verdict


class Past(Struct, frozen=True):
    """A cell of an earlier run: what its history shows."""

    id: str
    verdict: Verdict
    defects: tuple[str, ...] = ()
    duration_s: Number = None
    peak_memory_mb: Number = None
    steps: tuple[PastStep, ...] = ()


T = TypeVar("T")

_HEAD = msgspec.json.Decoder(Head)
_ID = msgspec.json.Decoder(Id)
_JUDGED = msgspec.json.Decoder(Judged)
_CELL = msgspec.json.Decoder(Cell)
_PAST = msgspec.json.Decoder(Past)


@dataclass(frozen=True)
class Run:
    """A run and its folder."""

    folder: Path
    head: Head

    def cells(self) -> Iterator[Cell]:
        """Every cell."""
        for _, raw in self._known():
            yield _decoded(_CELL, raw, self.folder)

    def cells_or_past(self, seen: Container[str]) -> Iterator[Cell | Past]:
        """Every cell; of those whose id was seen before only what a history needs."""
        for id_, raw in self._known():
            yield (_decoded(_PAST, raw, self.folder) if id_ in seen else _decoded(_CELL, raw, self.folder))

    def exit_code(self) -> ExitCode:
        """As RunRecord.exit_code."""
        failed = any(_decoded(_JUDGED, raw, self.folder).verdict in FAILING for raw in self.head.cells)
        return ExitCode.FAILED if failed else ExitCode.OK

    def _known(self) -> Iterator[tuple[str, Raw]]:
        """The ids, which have their four parts, and the cells' bytes."""
        for raw in self.head.cells:
            id_ = _decoded(_ID, raw, self.folder).id
            if id_.count("/") < 3:
                raise UsageError(f"{self.folder / RUN}: cell {id_!r}: expected backend/stack/job/case")
            yield id_, raw


def _decoded(decoder: msgspec.json.Decoder[T], raw: bytes | Raw, folder: Path) -> T:
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder / RUN}: {error}") from error


def read(folder: Path) -> Run:
    """The run in a folder; its cells are looked at when they are asked for."""
    path = folder / RUN
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}. Expected the folder of a run, with its {RUN}.") from None
    head = _decoded(_HEAD, content, folder)
    if head.schema != SCHEMA:
        raise UsageError(f"{path}: schema {head.schema}, expected {SCHEMA}: show it with the version that wrote it")
    return Run(folder, head)


def of(record: RunRecord, folder: Path) -> Run:
    """A run that was just judged, whether or not its folder could be written."""
    return Run(folder, _decoded(_HEAD, record.model_dump_json(by_alias=True).encode(), folder))


def finite(value: Number) -> float | None:
    """A number that can be drawn; None for what is missing, nan or infinite."""
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def norm_ratio(steps: Sequence[PastStep | Step]) -> float | None:
    """Reported over true norm, of the step in which it is furthest from 1; None where no step has both."""
    worst: float | None = None
    for step in steps:
        for check in step.checks:
            value, expected = finite(check.value), finite(check.expected)
            if check.name != "reported_norm" or not value or not expected or value < 0 or expected < 0:
                continue
            ratio = value / expected
            if worst is None or abs(math.log(ratio)) > abs(math.log(worst)):
                worst = ratio
    return worst
