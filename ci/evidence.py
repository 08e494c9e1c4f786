"""Reading evidence.jsonl: what the jobs recorded, checked field by field before anything is judged.

The jobs write with the standard library (tests/jobs/evidence.py), inside stacks where Pydantic may be missing; these
models are the other half of that contract. A contract test holds the two together, field by field.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, WithJsonSchema

from ci.errors import UsageError

SCHEMA = 1
NOT_FINITE = ("nan", "inf", "-inf")


def _number(value: Any) -> Any:
    """JSON has no nan or inf, so they travel as strings; any other string, and a boolean, is a mistake."""
    if isinstance(value, bool) or (isinstance(value, str) and value not in NOT_FINITE):
        raise ValueError(f"found {value!r}, expected a number or one of {', '.join(NOT_FINITE)}")
    return value


def _written(value: float) -> float | str:
    """Pydantic would write NaN and Infinity; the jobs, and hence everybody here, write Python's own words."""
    return value if math.isfinite(value) else str(value)


Number = Annotated[
    float,
    BeforeValidator(_number),
    PlainSerializer(_written, when_used="json"),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": list(NOT_FINITE)}]}),
]


class Record(BaseModel):
    """Base of everything read or written here: unchangeable, no unknown field."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Shim(Record):
    name: str
    reason: str


class ExceptionRecord(Record):
    type: str
    message: str
    user_frame: str | None = None
    remedy: str | None = None
    where: str | None = None
    rank: int = 0


class TensorError(Record):
    name: str
    gradient_error: Number | None
    update_error: Number | None = None


class Gram(Record):
    """Inner products of one parameter's used gradient g with a wanted gradient r."""

    gg: Number
    gr: Number
    rr: Number


class Alternative(Record):
    reported_norm: Number | None = None
    gradient: dict[str, Gram] | None = None
    forward_error: Number | None = None
    update_error: Number | None = None
    consistency: tuple[str, ...] | None = None


class StepNumbers(Record):
    """What one optimizer step measured; the meaning and unit of each field stand in tests/jobs/evidence.py."""

    index: int
    loss: Number | None = None
    loss_error: Number | None = None
    logprob_error: Number | None = None
    lr: Number | None = None
    loss_scale_before: Number | None = None
    loss_scale_after: Number | None = None
    loss_scale_expected: Number | None = None
    overflow: bool = False
    grad_norm_reported: tuple[Number | None, ...] = ()
    grad_norm_true: Number | None = None
    grad_norm_used: Number | None = None
    grad_norm_wanted: Number | None = None
    gradient_error: Number | None = None
    update_error: Number | None = None
    consistency: tuple[str, ...] = ()
    not_judged: dict[str, str] = Field(default_factory=dict)
    tensors: tuple[TensorError, ...] = ()


class Step(StepNumbers):
    alternatives: dict[str, Alternative] = Field(default_factory=dict)


class Probe(Record):
    """What the ranks found before the first case; the fields' meaning stands in tests/jobs/evidence.py."""

    accelerator: str
    communication: str
    world_size: int
    devices: tuple[str, ...]
    versions: dict[str, str]
    all_reduce: Number


class Evidence(Record):
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
    duration_s: Number | None = None
    training_s: Number | None = None
    peak_memory_mb: Number | None = None
    notes: tuple[str, ...] = ()
    mutant: str | None = None
    probe: Probe | None = None
    # "schema" is the field's name in the file; BaseModel has an old method of that name, hence the alias.
    schema_: int = Field(default=SCHEMA, alias="schema")


@dataclasses.dataclass(frozen=True)
class Reading:
    """The evidence of a run by cell id, and what could not be read (each with its line number)."""

    by_cell: dict[str, Evidence]
    skipped: tuple[str, ...] = ()


def parse_line(line: str, source: str) -> Evidence:
    """One line; `source` ("FILE:LINE") opens every message. ValueError when the line is not whole JSON."""
    try:
        data = json.loads(line)
    except RecursionError as error:
        raise ValueError("brackets in brackets without an end") from error
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    found = data.get("schema", SCHEMA)
    if found != SCHEMA:
        raise UsageError(
            f"{source}: evidence schema {found!r}, expected {SCHEMA}. "
            "It was written by another version of this project: judge it with that version, or run again."
        )
    try:
        return Evidence.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{source}: evidence for {data.get('cell')!r}, field {place}: {first['msg']}") from error


def read(path: Path, *, refuse_foreign: bool = True) -> Reading:
    """All evidence of a run.

    A line cut short by a crash or a full disk is left out and said so: its cell then has no evidence, which the judge
    calls an error. Of doubled lines the last whole one counts: a repeated case replaces what it recorded before.
    refuse_foreign: whether a whole line of another schema ends everything. At the end of a run it is left out as
    well: one such line must not take the verdicts of all others.
    """
    by_cell: dict[str, Evidence] = {}
    skipped: list[str] = []
    if not path.exists():
        return Reading(by_cell)
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        source = f"{path}:{number}"
        try:
            evidence = parse_line(line.decode(), source)
        except ValueError as error:  # json.JSONDecodeError and UnicodeDecodeError are ValueErrors
            skipped.append(f"{source}: not a whole line of evidence ({error})")
            continue
        except UsageError as error:
            if refuse_foreign:
                raise
            skipped.append(error.message)
            continue
        by_cell[evidence.cell] = evidence
    return Reading(by_cell, tuple(skipped))


def schema() -> dict[str, Any]:
    """The JSON schema of one line of evidence.jsonl, committed in ci/schemas."""
    return Evidence.model_json_schema(by_alias=True)
