"""What a drawn cell shows: nothing, a refusal, what the ledger knows already, or a failure with a signature.

The ledger's entries are written for the cases of the other jobs. Here each is asked whether it would claim this
configuration if it were one of its own job's, so that what is known already is not found again.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ci import claims, ledger
from ci.cases import Case, matches
from ci.entries import CHECKS, Defect, Matrix, Scalar, Where
from ci.evidence import Evidence, ExceptionRecord
from ci.judge import judge_cell
from ci.ledger import Measured
from ci.matrix import Check as Name
from ci.plan import Cell
from ci.runrecord import CellRecord, Check, Verdict

Kind = Literal["ok", "refused", "known", "failure"]

REFUSALS = ("AssertionError", "DeepSpeedConfigError", "NotImplementedError", "ValueError", "ZeRORuntimeException")
"""Exceptions with which a library says no; any other one at set-up is an accident."""
WORDS_OF_A_REASON = 3
VARIES = "another"
"""The factor of a check that is off by no power of two, or not by the same in every step."""
EXACT = 1e-3

AS_ANOTHER_JOB: Mapping[str, tuple[Where, Case]] = {
    "fp16-optimizers": ({"dtype": "fp16"}, {"path": "engine", "step_method": "step", "experts": False}),
    "grpo-lora": (
        {"dtype": ("bf16", "fp32")},
        {"trainer": "engine", "num_iterations": 1, "beta": 0, "lora_b": "seeded"},
    ),
    "zero3-custom-adapter": ({"zero_stage": (2, 3)}, {"init": "disabled"}),
}
"""By job: which configurations could be its cases, and what its other keys would be."""


@dataclass(frozen=True)
class Outcome:
    """What a cell shows. signature: of a failure, equal for two cells that fail in the same way."""

    kind: Kind
    record: CellRecord
    signature: frozenset[str] = frozenset()
    entries: tuple[str, ...] = ()
    reason: str = ""


def outcome(cell: Cell, evidence: Evidence, matrix: Matrix) -> Outcome:
    """The outcome of one cell that ran."""
    entries = claiming(matrix.defects, cell, evidence)
    record = judge_cell(cell, evidence, matrix.model_copy(update={"defects": entries}))
    exception = evidence.exception
    if record.verdict is Verdict.ERROR:
        reason = record.reason or ""
        return Outcome("failure", record, frozenset({f"no whole evidence: {_plain(reason)}"}), reason=reason)
    if exception is not None and refused(exception):
        return Outcome("refused", record, reason=f"{exception.type}: {exception.message}")
    if record.verdict is Verdict.KNOWN_DEFECT or (record.verdict is Verdict.FIXED_UPSTREAM and record.defects):
        return Outcome("known", record, entries=record.defects)
    if record.verdict in (Verdict.OK, Verdict.FIXED_UPSTREAM):
        return Outcome("ok", record)
    signature = _signature(record, evidence, entries)
    if not signature:
        return Outcome("known", record, entries=tuple(entry.id for entry in entries))
    return Outcome("failure", record, signature, reason=record.reason or "")


def refused(exception: ExceptionRecord) -> bool:
    """Whether the library said at set-up, in words, that it does not do this."""
    where = exception.where or ""
    return (
        where.startswith("setup") and exception.type in REFUSALS and len(exception.message.split()) >= WORDS_OF_A_REASON
    )


def claiming(defects: Sequence[Defect], cell: Cell, evidence: Evidence) -> tuple[Defect, ...]:
    """The entries that would claim this configuration in any job, as entries that claim this very cell."""
    return tuple(
        defect.model_copy(update={"where": {}})
        for defect in defects
        if any(claims.claims(defect, job, view, evidence.pins) for job, view in views(cell))
    )


def views(cell: Cell) -> Iterator[tuple[str, dict[str, Scalar]]]:
    """The configuration as a case of its own job, and of each job that could have it."""
    yield cell.job, dict(cell.case)
    kind = cell.case.get("parameters")
    for job, (condition, implied) in AS_ANOTHER_JOB.items():
        if not matches(condition, cell.case):
            continue
        view = {**cell.case, **implied}
        view["user_code"] = kind if kind == "used-in-some-steps" else "plain"
        view["frozen"] = kind == "frozen"
        if job == "fp16-optimizers" and view["optimizer"] != "fused":
            view["optimizer"] = "unfused"
        yield job, view


def _signature(record: CellRecord, evidence: Evidence, entries: Sequence[Defect]) -> frozenset[str]:
    """What the entries leave unexplained: failed checks, with the factor they are off by, and the exception's text."""
    parts = set()
    exception = evidence.exception
    if exception is not None and not _raised(exception, entries):
        phase = (exception.where or "").partition(",")[0].partition(" ")[0]
        parts.add(f"{exception.type} in {phase}: {_plain(exception.message)}")
    checks = tuple(
        {name: check for name in CHECKS for check in step.checks if check.name == name} for step in record.steps
    )
    measured = Measured(evidence.steps, checks, None)
    for name in CHECKS:
        wrong = [of_step[name] for of_step in checks if name in of_step and of_step[name].ok is False]
        if wrong and not _explained(name, entries, measured):
            parts.add(_part(name, wrong))
    return frozenset(parts)


def _raised(exception: ExceptionRecord, entries: Sequence[Defect]) -> bool:
    return any(entry.symptom.raises and re.search(entry.symptom.raises, exception.message) for entry in entries)


def _explained(name: Name, entries: Sequence[Defect], measured: Measured) -> bool:
    """Whether some of the entries together predict this check in every step."""
    speaking = [entry for entry in entries if name in entry.symptom.effects]
    for size in range(1, len(speaking) + 1):
        for subset in itertools.combinations(speaking, size):
            if all(_predicted(name, subset, measured, position) for position in range(len(measured.steps))):
                return True
    return False


def _predicted(name: Name, subset: Sequence[Defect], measured: Measured, position: int) -> bool:
    check = measured.checks[position].get(name)
    if check is None or check.ok is None:
        return True
    predicted = ledger.prediction(name, subset, position, measured.steps[position], check)
    return bool(check.ok) if predicted is None else predicted[0].ok


def _part(name: Name, wrong: Sequence[Check]) -> str:
    if name == "consistency":
        said = {
            _plain(message.partition(": ")[2] or message) for c in wrong for message in (c.reason or "").split("; ")
        }
        return f"consistency: {', '.join(sorted(said))}"
    if name not in ("reported_norm", "gradient_used"):
        return name
    factors = {factor(check.value, check.expected) for check in wrong}
    return f"{name} x {factors.pop()}" if len(factors) == 1 else f"{name} x {VARIES}"


def factor(value: float | None, expected: float | None) -> str:
    """value / expected where it is a power of two, 0 or no number: what a loss scale or a lost rank makes of it."""
    if value is None:
        return "None"
    if not math.isfinite(value) or not expected:
        return str(value)
    ratio = value / expected
    if ratio == 0:
        return "0"
    exponent = round(math.log2(ratio)) if ratio > 0 else 0
    return f"2^{exponent}" if exponent and abs(ratio / 2.0**exponent - 1) < EXACT else VARIES


def _plain(message: str) -> str:
    """A message without its numbers and dtypes, so that two sizes are one symptom."""
    first = message.strip().partition("\n")[0]
    return re.sub(r"\d+", "N", re.sub(r"\b(BFloat16|Half|Float|bfloat16|float16|float32)\b", "DTYPE", first))[:200]
