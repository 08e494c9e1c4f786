"""The verdict of every cell: evidence against the truth, and where that fails, against the ledger.

Pure: the same plan, evidence and matrix.yaml give the same verdicts, so an old run can be judged again after a bound
has moved. Jobs never judge, and nothing here runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ci import claims, ledger
from ci.checks import FIXED_TOLERANCES, Missing, measure
from ci.evidence import Evidence, Probe, Reading, Step
from ci.ledger import Explanation, Measured
from ci.matrix import CHECKS, Defect, Matrix
from ci.matrix import Check as Name
from ci.plan import Cell
from ci.runrecord import CellRecord, Check, DefectSummary, RunRecord, SavedPlan, StepRecord, Verdict


@dataclass(frozen=True)
class _Finding:
    """A verdict with what goes beside it."""

    verdict: Verdict
    reason: str | None = None
    defects: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()


def judge_cell(
    cell: Cell, evidence: Evidence | None, matrix: Matrix, pins: Mapping[str, str] | None = None
) -> CellRecord:
    """One cell. pins: the versions that must be installed; None where whatever is installed is what was asked for."""
    if cell.gated is not None:
        return _record(cell, None, _Finding(Verdict.NOT_RUN, cell.gated), ())
    if evidence is None:
        return _record(cell, None, _Finding(Verdict.ERROR, "no evidence: the case ended before it recorded any"), ())
    checks, missing = _measure(cell, evidence, matrix)
    problem = _incomplete(cell, evidence, matrix, pins) or missing
    claiming = ledger.claiming(matrix.defects, cell, evidence.pins, evidence.corrections)
    if problem is not None:
        return _record(cell, evidence, _Finding(Verdict.ERROR, problem), _plain_steps(evidence.steps, checks))
    stop = _stop(evidence, matrix)
    if stop is not None:
        return _record(cell, evidence, _stopped(evidence, stop, checks), _plain_steps(evidence.steps, checks))
    measured = Measured(evidence.steps, checks, evidence.exception)
    explanation = ledger.explain(claiming, measured)
    shown = claiming if explanation is None else explanation.shown
    return _record(
        cell, evidence, _finding(evidence, measured, claiming, explanation), _explained_steps(measured, shown)
    )


def judge_run(plan: SavedPlan, reading: Reading, matrix: Matrix, duration_s: float | None = None) -> RunRecord:
    """Every cell of a plan, in its order."""
    cells = []
    for cell in plan.cells:
        pins = None if cell.stack in plan.unchecked else plan.stacks.get(cell.stack)
        cells.append(judge_cell(cell, reading.by_cell.get(cell.id), matrix, pins))
    named = {entry for cell in cells for entry in (*cell.defects, *cell.fixed)}
    context = plan.model_dump(exclude={"cells", "unchecked", "schema_", "stacks"})
    return RunRecord(
        **context,
        stacks=_installed(plan, reading),
        duration_s=duration_s,
        cells=tuple(cells),
        ledger={
            defect.id: DefectSummary(
                title=defect.title,
                upstream=defect.upstream,
                affects=dict(defect.affects),
                advice=defect.advice,
                correction=", ".join(defect.corrections) or None,
            )
            for defect in matrix.defects
            if defect.id in named
        },
        unavailable={
            name: why for name, backend in matrix.backends.items() if (why := backend.unavailable or backend.never_run)
        },
        probes=_probes(plan, reading),
        incomplete=reading.skipped,
    )


def _probes(plan: SavedPlan, reading: Reading) -> dict[str, tuple[Probe, ...]]:
    """What was found before the first case, by stack: one probe a pytest worker, those that found the same once."""
    found: dict[str, list[Probe]] = {}
    for cell in plan.cells:
        evidence = reading.by_cell.get(cell.id)
        if evidence is not None and evidence.probe is not None:
            of_stack = found.setdefault(cell.stack, [])
            if evidence.probe not in of_stack:
                of_stack.append(evidence.probe)
    return {stack: tuple(probes) for stack, probes in found.items()}


def _installed(plan: SavedPlan, reading: Reading) -> dict[str, dict[str, str]]:
    """What was planned, replaced by what the cases say was installed."""
    stacks = {stack: dict(pins) for stack, pins in plan.stacks.items()}
    for cell in plan.cells:
        evidence = reading.by_cell.get(cell.id)
        if evidence is not None:
            stacks.setdefault(cell.stack, {}).update(evidence.pins)
    return stacks


def _tolerance(name: Name, cell: Cell, matrix: Matrix) -> float | None:
    if name in FIXED_TOLERANCES:
        return FIXED_TOLERANCES[name]
    found = (matrix.tolerances_for(cell.job, cell.case) or {}).get(name)
    return None if found is None else found.tolerance


def _measure(cell: Cell, evidence: Evidence, matrix: Matrix) -> tuple[tuple[dict[Name, Check], ...], str | None]:
    """All checks of all steps, and the first that is missing without a declared reason."""
    missing: str | None = None
    steps = []
    for position, step in enumerate(evidence.steps):
        checks: dict[Name, Check] = {}
        for name in CHECKS:
            tolerance = _tolerance(name, cell, matrix)
            try:
                if tolerance is None and name not in step.not_judged:
                    raise Missing(f"matrix.yaml has no tolerance of {name} for {cell.job} with {_group(cell)}")
                checks[name] = measure(name, step, tolerance or 0.0)
            except Missing as error:
                why = str(error) or "its numbers are not in the evidence, and the case does not declare why"
                checks[name] = Check(name=name, ok=None, reason=why)
                missing = missing or f"step {position + 1} {name}: {why}"
        steps.append(checks)
    return tuple(steps), missing


def _group(cell: Cell) -> str:
    case = cell.case
    return ", ".join(
        f"{key} {case[key]}" for key in ("zero_stage", "dtype", "gradient_accumulation_steps") if key in case
    )


def _incomplete(cell: Cell, evidence: Evidence, matrix: Matrix, pins: Mapping[str, str] | None) -> str | None:
    """Why this evidence is not about this cell as planned, or not whole; None where it is."""
    if evidence.problem is not None:
        return evidence.problem
    backend = matrix.backends.get(cell.backend)
    wanted = cell.backend if backend is None else backend.accelerator
    for found in (evidence.accelerator, *(() if evidence.probe is None else (evidence.probe.accelerator,))):
        if found != wanted:
            return f"ran on accelerator {found}, expected {wanted}"
    if backend is not None and backend.devices is not None and evidence.probe is None:
        return f"no probe before the first case: nothing says that a {wanted} device was there"
    if evidence.world_size != cell.world_size:
        return f"ran with {evidence.world_size} ranks, expected {cell.world_size}"
    packages = {canonicalize_name(package): version for package, version in evidence.pins.items()}
    for package, version in sorted((pins or {}).items()):
        installed = packages.get(canonicalize_name(package))
        if not same_version(installed, version):
            return f"{package} {installed or 'none'} is installed, the stack pins {version}"
    absent = [name for name in cell.corrections if name not in evidence.corrections]
    if absent:
        return f"corrections asked for and not applied: {', '.join(absent)}"
    if evidence.exception is None and len(evidence.steps) < evidence.steps_expected:
        return f"{len(evidence.steps)} of {evidence.steps_expected} steps recorded, and no exception says why"
    first = evidence.steps[0].index if evidence.steps else 0
    if [step.index for step in evidence.steps] != list(range(first, first + len(evidence.steps))):
        return f"steps recorded out of order: {', '.join(str(step.index) for step in evidence.steps)}"
    return None


def same_version(installed: str | None, pinned: str) -> bool:
    """Whether what is installed is what is pinned. Builds (the part after +) count only where the pin names one."""
    try:
        found, wanted = Version(installed or ""), Version(pinned)
    except InvalidVersion:
        return installed == pinned
    return found == wanted or (wanted.local is None and found.public == wanted.public)


def _stop(evidence: Evidence, matrix: Matrix) -> str | None:
    """The message that a correction applied here has to stop the case with, or None where none does."""
    modes = (claims.mode_of(name, matrix.corrections) for name in evidence.corrections)
    return next((mode.raises for mode in modes if mode is not None and mode.raises is not None), None)


def _stopped(evidence: Evidence, pattern: str, checks: Sequence[Mapping[Name, Check]]) -> _Finding:
    """A correction that stops the user's code holds when message and line are right, and all before was.

    The line is known twice: from the traceback (user_frame) and from the message, which the correction wrote itself.
    """
    exception = evidence.exception
    if exception is None:
        return _Finding(Verdict.REGRESSION, f"nothing was raised; expected a message that matches {pattern!r}")
    if not re.search(pattern, exception.message):
        return _Finding(
            Verdict.REGRESSION, f"{exception.type}: {exception.message}; expected a message that matches {pattern!r}"
        )
    line = (exception.user_frame or "").partition(" in ")[0]
    if not line or not re.search(re.escape(line) + r"(?!\d)", exception.message):
        found = exception.user_frame or "no line of the user's"
        return _Finding(Verdict.REGRESSION, f"raised at {found}, not at the line that it names: {exception.message}")
    for position, found_here in enumerate(checks):
        for name, check in found_here.items():
            if check.ok is False:
                return _Finding(Verdict.REGRESSION, f"step {position + 1} {name} was wrong before the message came")
    return _Finding(Verdict.CORRECTED)


def _finding(
    evidence: Evidence, measured: Measured, claiming: Sequence[Defect], explanation: Explanation | None
) -> _Finding:
    if explanation is None:
        return _Finding(Verdict.REGRESSION, _regression_reason(measured, claiming))
    shown = tuple(defect.id for defect in explanation.shown)
    fixed = tuple(defect.id for defect in explanation.absent)
    notes = [_absent_reason(defect, explanation) for defect in explanation.absent]
    notes += [f"{defect.id} could not be seen: the exception came first" for defect in explanation.hidden]
    reason = "; ".join(notes) or None
    if evidence.corrections:
        return _Finding(Verdict.CORRECTED, reason, shown, fixed)
    if fixed:
        return _Finding(Verdict.FIXED_UPSTREAM, reason, shown, fixed)
    return _Finding(Verdict.KNOWN_DEFECT if shown else Verdict.OK, reason, shown)


def _absent_reason(defect: Defect, explanation: Explanation) -> str:
    if defect in explanation.ambiguous:
        return f"{defect.id} claims this cell, but the numbers are the same with and without it: narrow its `where`"
    bounds = ", ".join(f"{package} {specifier}" for package, specifier in defect.affects.items())
    return f"{defect.id} claims this cell ({bounds}) and its symptom is not there: move its bound"


def _regression_reason(measured: Measured, claiming: Sequence[Defect]) -> str:
    """The exception, or the first check that is neither right nor what all claiming entries together predict."""
    claimed = ", ".join(defect.id for defect in claiming)
    exception = measured.exception
    if exception is not None and not any(defect.symptom.raises is not None for defect in claiming):
        return f"{exception.type} that no entry claims: {exception.message}"
    unlike: str | None = None
    for position, (step, checks) in enumerate(zip(measured.steps, measured.checks, strict=True)):
        for name, check in checks.items():
            predicted = ledger.prediction(name, claiming, position, step, check)
            if check.ok is not False and (predicted is None or check.ok is None):
                continue
            if predicted is not None and predicted[0].ok:
                continue
            text = f"step {position + 1} {name}: found {_text(check.value)}, expected {_text(check.expected)}"
            text += f" (error {_text(check.error)}, tolerance {_text(check.tolerance)})"
            if predicted is not None:
                text += f"; {', '.join(entry.id for entry in predicted[1])} predict {_text(predicted[0].value)}"
            if check.ok is False:
                return text
            unlike = unlike or text
    if exception is not None:
        return f"{exception.type}, not what {claimed} predict: {exception.message}"
    return unlike or f"no set of the claiming entries explains the numbers: {claimed}"


def _text(value: float | None) -> str:
    return "None" if value is None else f"{value:.6g}"


def _plain_steps(steps: Sequence[Step], checks: Sequence[Mapping[Name, Check]]) -> tuple[StepRecord, ...]:
    return tuple(
        StepRecord(**step.model_dump(exclude={"alternatives"}), checks=tuple(found.values()))
        for step, found in zip(steps, checks, strict=True)
    )


def _explained_steps(measured: Measured, shown: Sequence[Defect]) -> tuple[StepRecord, ...]:
    """The steps with, beside each failed check, the entries about it and what they predict."""
    explained: list[dict[Name, Check]] = []
    for position, (step, checks) in enumerate(zip(measured.steps, measured.checks, strict=True)):
        found: dict[Name, Check] = {}
        for name, check in checks.items():
            predicted = None if check.ok is not False else ledger.prediction(name, shown, position, step, check)
            if predicted is not None:
                ids = tuple(entry.id for entry in predicted[1])
                check = check.model_copy(update={"predicted": predicted[0].value, "defects": ids})
            found[name] = check
        explained.append(found)
    return _plain_steps(measured.steps, explained)


def _record(cell: Cell, evidence: Evidence | None, finding: _Finding, steps: tuple[StepRecord, ...]) -> CellRecord:
    return CellRecord(
        id=cell.id,
        stack=cell.stack,
        job=cell.job,
        case=dict(cell.case),
        world_size=cell.world_size,
        command=cell.command,
        adapter=cell.adapter,
        ds_config=cell.ds_config,
        verdict=finding.verdict,
        reason=finding.reason,
        defects=finding.defects,
        fixed=finding.fixed,
        corrections=evidence.corrections if evidence else cell.corrections,
        shims=evidence.shims if evidence else (),
        exception=evidence.exception if evidence else None,
        log=evidence.log if evidence else None,
        wrapper=evidence.wrapper if evidence else None,
        duration_s=evidence.duration_s if evidence else None,
        training_s=evidence.training_s if evidence else None,
        peak_memory_mb=evidence.peak_memory_mb if evidence else None,
        notes=evidence.notes if evidence else (),
        steps=steps,
    )
