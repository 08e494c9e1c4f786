"""What a sweep found, in words: each finding as a case ready to add, its numbers, the command that repeats it."""

from __future__ import annotations

from collections.abc import Iterator

from ci import cases
from ci.cases import Case
from ci.entries import Job, Matrix, Scalar
from ci.runrecord import CellRecord, StepRecord
from ci.sweep.findings import Finding, Fold
from ci.sweep.run import cell_of


def as_yaml(job: Job, case: Case) -> str:
    """The case as a pattern of a lane."""

    def plain(value: Scalar) -> str:
        return cases.text(value)

    return "{" + ", ".join(f"{name}: {plain(case[name])}" for name in cases.shown(job, case)) + "}"


def report(matrix: Matrix, stack: str, fold: Fold) -> Iterator[str]:
    """The lines of the whole report."""
    counts = ", ".join(f"{number} {kind}" for kind, number in sorted(fold.count().items()))
    yield f"{stack}: {sum(fold.count().values())} configurations ran: {counts or 'none'}"
    for reason, number in fold.refusals().items():
        yield f"  refused ({number}): {reason[:200]}"
    for entry, number in fold.entries().items():
        yield f"  in the ledger ({number}): {entry}"
    for number, finding in enumerate(fold.findings, 1):
        yield from _finding(matrix, stack, fold, finding, number)
    if not fold.findings:
        yield "no failure that the ledger does not explain"


def _finding(matrix: Matrix, stack: str, fold: Fold, finding: Finding, number: int) -> Iterator[str]:
    outcome = fold.outcomes[cases.name(fold.job, finding.case)]
    size = "" if finding.settled else " (not yet the smallest)"
    stages = ", ".join(sorted({name.partition("-")[0] for name in finding.drawn}))
    yield f"finding {number}, seen in {len(finding.drawn)} drawn configurations ({stages}){size}:"
    yield f"  - {as_yaml(fold.job, finding.case)}"
    yield from (f"    {part}" for part in sorted(finding.signature))
    yield from (f"    {line}" for line in numbers(outcome.record))
    if outcome.record.wrapper:
        yield f"    optimizer wrapper: {outcome.record.wrapper}"
    yield f"    repeat: {cell_of(matrix, stack, finding.case).command}"


def numbers(record: CellRecord) -> Iterator[str]:
    """The exception, and the steps in which something is wrong with their numbers."""
    exception = record.exception
    if exception is not None:
        yield f"{exception.where}: {exception.type}: {exception.message.partition(chr(10))[0][:300]}"
    for position, step in enumerate(record.steps):
        wrong = [check for check in step.checks if check.ok is False]
        if wrong:
            yield f"step {position + 1}: {', '.join(check.name for check in wrong)}: {_step(step)}"


def _step(step: StepRecord) -> str:
    reported = step.grad_norm_reported[0] if step.grad_norm_reported else None
    parts = [
        f"reported {_number(reported)}, true {_number(step.grad_norm_true)}",
        f"used {_number(step.grad_norm_used)}, wanted {_number(step.grad_norm_wanted)}",
        f"gradient error {_number(step.gradient_error)}, update error {_number(step.update_error)}",
    ]
    if step.loss_scale_before is not None:
        parts.append(
            f"scale {_number(step.loss_scale_before)} -> {_number(step.loss_scale_after)}"
            f" (expected {_number(step.loss_scale_expected)})"
        )
    return "; ".join([*parts, *step.consistency[:3]])


def _number(value: float | None) -> str:
    return "None" if value is None else f"{value:.6g}"
