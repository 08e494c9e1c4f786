"""run.json and plan.json: what a run leaves in its folder, read and written whole or not at all.

plan.json is written before the first case starts (every cell, the gated ones too, with the pins and the command line),
run.json after judging. Together with evidence.jsonl they are all that `python -m ci judge` needs to judge an old run
again, and all that `report` and `diff` read.
"""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field, ValidationError

from ci.errors import ExitCode, UsageError
from ci.evidence import ExceptionRecord, Number, Probe, Record, Shim, StepNumbers
from ci.matrix import Scalar
from ci.plan import Cell

SCHEMA = 1
PLAN = "plan.json"
RUN = "run.json"
EVIDENCE = "evidence.jsonl"


class Verdict(StrEnum):
    """In order of precedence."""

    ERROR = "error"
    REGRESSION = "regression"
    FIXED_UPSTREAM = "fixed upstream"
    KNOWN_DEFECT = "known defect"
    CORRECTED = "corrected"
    OK = "ok"
    NOT_RUN = "not run"


FAILING = frozenset({Verdict.ERROR, Verdict.REGRESSION, Verdict.FIXED_UPSTREAM})


class Check(Record):
    """One check of one step.

    ok: None where it was not judged, and then `reason` says why. error is what was compared with tolerance: relative
    for norms and gradients, in the units of the evidence otherwise. predicted: what the defects named in `defects`
    together say the value must be; only where they explain a check that failed.
    """

    name: str
    ok: bool | None
    value: Number | None = None
    expected: Number | None = None
    tolerance: Number | None = None
    error: Number | None = None
    predicted: Number | None = None
    defects: tuple[str, ...] = ()
    reason: str | None = None


class StepRecord(StepNumbers):
    """A step as measured, without the alternatives (they stay in evidence.jsonl), and its checks."""

    checks: tuple[Check, ...] = ()


class CellRecord(Record):
    """One cell and its verdict. `fixed`: entries that claim the cell and whose symptom is not there.

    adapter, ds_config: the name of a user's own file in place of the shipped one (an adapter with its class).
    """

    id: str
    stack: str
    job: str
    case: dict[str, Scalar]
    verdict: Verdict
    world_size: int
    defects: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    corrections: tuple[str, ...] = ()
    shims: tuple[Shim, ...] = ()
    reason: str | None = None
    exception: ExceptionRecord | None = None
    log: str | None = None
    command: str
    adapter: str | None = None
    ds_config: str | None = None
    wrapper: str | None = None
    duration_s: Number | None = None
    training_s: Number | None = None
    peak_memory_mb: Number | None = None
    notes: tuple[str, ...] = ()
    steps: tuple[StepRecord, ...] = ()


class DefectSummary(Record):
    """What a reader of the run needs of a ledger entry, kept so that an old run reads the same later."""

    title: str
    upstream: tuple[str, ...] = ()
    affects: dict[str, str] = Field(default_factory=dict)
    advice: str | None = None
    correction: str | None = None


class ImageRecord(Record):
    """The image of a stack. id: of its configuration, the same wherever it is carried. digests: the registries' own."""

    tag: str
    id: str
    digests: tuple[str, ...] = ()


class Context(Record):
    """How and where a run was made.

    stacks: the versions that were planned, and after judging those really installed where a case reported them.
    image: the container image's tag, None outside Docker. images: the image of each
    stack. hardware: cores, memory, devices, as the host reports them.
    """

    command: str
    commit: str | None = None
    backend: str
    runtime: str
    image: str | None = None
    images: dict[str, ImageRecord] = Field(default_factory=dict)
    hardware: dict[str, str | int | float | None] = Field(default_factory=dict)
    started: str
    stacks: dict[str, dict[str, str]] = Field(default_factory=dict)


class SavedPlan(Context):
    """plan.json. unchecked: stacks whose installed versions need not equal `stacks` (`current`)."""

    unchecked: tuple[str, ...] = ()
    schema_: int = Field(default=SCHEMA, alias="schema")
    cells: tuple[Cell, ...] = ()


class RunRecord(Context):
    """run.json. incomplete: lines of evidence.jsonl that could not be read.

    unavailable: backends on which this project has never run anything, and why. probes: by stack, what the ranks of
    each pytest worker found before their first case.
    """

    schema_: int = Field(default=SCHEMA, alias="schema")
    duration_s: Number | None = None
    cells: tuple[CellRecord, ...] = ()
    ledger: dict[str, DefectSummary] = Field(default_factory=dict)
    unavailable: dict[str, str] = Field(default_factory=dict)
    probes: dict[str, tuple[Probe, ...]] = Field(default_factory=dict)
    incomplete: tuple[str, ...] = ()

    def exit_code(self) -> ExitCode:
        """0 as expected, 1 a verdict that fails. (Nothing runnable at all is refused earlier, by the plan.)"""
        failed = any(cell.verdict in FAILING for cell in self.cells)
        return ExitCode.FAILED if failed else ExitCode.OK


Model = TypeVar("Model", SavedPlan, RunRecord)


def _write(path: Path, record: Record) -> None:
    """A reader never sees half a file, and a full disk leaves the old one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(record.model_dump_json(by_alias=True, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, model: type[Model]) -> Model:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{path}: not found. Expected the folder of a run, with its {path.name}.") from None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{path}: field {place or '(whole file)'}: {first['msg']}") from error


def write_plan(folder: Path, plan: SavedPlan) -> None:
    _write(folder / PLAN, plan)


def read_plan(folder: Path) -> SavedPlan:
    return _read(folder / PLAN, SavedPlan)


def write_run(folder: Path, run: RunRecord) -> None:
    _write(folder / RUN, run)


def read_run(folder: Path) -> RunRecord:
    return _read(folder / RUN, RunRecord)


def find(run: str, results: Path = Path("results")) -> Path:
    """The folder of a run named by its path, or by its name under results/ (`latest` is one)."""
    for folder in (Path(run), results / run):
        if folder.is_dir():
            return folder
    raise UsageError(f"{run}: no such run; looked for the folder {run} and for {results / run}.")


def schema() -> dict[str, Any]:
    """The JSON schema of run.json, committed in ci/schemas."""
    return RunRecord.model_json_schema(by_alias=True, mode="serialization")
