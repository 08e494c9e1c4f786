"""Which ledger entries claim a cell, and which set of them explains what was measured.

Several defects may meet in one cell, so the question is never "does entry X match" but "do these entries together
predict every number". An entry that is not needed for that prediction has no symptom here, and its bound is wrong.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ci.checks import Prediction, predict
from ci.claims import claims
from ci.evidence import ExceptionRecord, Step
from ci.matrix import Check as Name
from ci.matrix import Defect
from ci.plan import Cell
from ci.runrecord import Check


@dataclass(frozen=True)
class Measured:
    """A cell's numbers: the steps, each with its checks against the truth, and the exception that ended it."""

    steps: tuple[Step, ...]
    checks: tuple[Mapping[Name, Check], ...]
    exception: ExceptionRecord | None = None


@dataclass(frozen=True)
class Explanation:
    """The set of entries that explains a cell.

    shown: every one of them is needed. absent: entries that claim the cell and whose symptom is not there.
    ambiguous: those of `absent` that would explain the numbers just as well (indistinguishable here).
    hidden: entries about numbers that an explained exception kept from being measured.
    """

    shown: tuple[Defect, ...]
    absent: tuple[Defect, ...] = ()
    ambiguous: tuple[Defect, ...] = ()
    hidden: tuple[Defect, ...] = ()


def claiming(
    defects: Iterable[Defect], cell: Cell, pins: Mapping[str, str], corrections: Sequence[str]
) -> tuple[Defect, ...]:
    """The entries that claim the cell and that none of the corrections applied makes right."""
    return tuple(defect for defect in defects if claims(defect, cell.job, cell.case, pins, corrections))


def active(defect: Defect, position: int, step: Step) -> bool:
    """Whether the symptom shows in this step; positions count from 0, `from:N` counts from 1 as reports do."""
    when = defect.symptom.steps
    if when == "first":
        return position == 0
    if when == "scale_raise":
        before, after = step.loss_scale_before, step.loss_scale_after
        return before is not None and after is not None and after > before
    if when.startswith("from:"):
        return position + 1 >= int(when.removeprefix("from:"))
    return True


def _speaks(defect: Defect, name: Name, position: int, step: Step) -> bool:
    """Whether the entry says anything about this check of this step.

    An alternative that the step does not record does not exist there (no earlier step, a single micro-batch, every
    parameter with a gradient), so that a defect that equals it has nothing to change.
    """
    effect = defect.symptom.effects.get(name)
    if effect is None or not active(defect, position, step):
        return False
    return effect.equals in (None, "none", "inf") or effect.equals in step.alternatives


def prediction(
    name: Name, entries: Sequence[Defect], position: int, step: Step, check: Check
) -> tuple[Prediction, tuple[Defect, ...]] | None:
    """What the entries make of this check and which of them do; None where none of them says anything about it."""
    about = tuple(entry for entry in entries if _speaks(entry, name, position, step))
    if not about:
        return None
    usual = check.tolerance or 0.0
    tolerance = max(usual if entry.tolerance is None else entry.tolerance for entry in about)
    return predict(name, [entry.symptom.effects[name] for entry in about], step, tolerance), about


def _raised_here(defect: Defect, exception: ExceptionRecord, steps: Sequence[Step]) -> bool:
    """Whether the exception came where the symptom's `steps` allow it; `where` counts its steps from 0.

    What goes wrong before the first step is no defect of training, whatever its message says.
    """
    where = exception.where or ""
    if where.startswith("setup"):
        return False
    if defect.symptom.steps == "all":
        return True
    number = re.search(r"\bstep (\d+)", where)
    if number is None:
        return False
    position = int(number[1])
    recorded = next((step for step in steps if step.index == position), Step(index=position))
    return active(defect, position, recorded)


def _exception_explained(
    entries: Sequence[Defect], exception: ExceptionRecord | None, steps: Sequence[Step] = ()
) -> bool:
    raising = [entry for entry in entries if entry.symptom.raises is not None]
    if exception is None:
        return not raising
    return bool(raising) and all(
        re.search(entry.symptom.raises or "", exception.message) and _raised_here(entry, exception, steps)
        for entry in raising
    )


def explains(entries: Sequence[Defect], measured: Measured) -> bool:
    """Whether every check of every step, and the exception or its absence, is what the entries together predict."""
    if not _exception_explained(entries, measured.exception, measured.steps):
        return False
    for position, (step, checks) in enumerate(zip(measured.steps, measured.checks, strict=True)):
        for name, check in checks.items():
            if check.ok is None:
                continue
            predicted = prediction(name, entries, position, step, check)
            if not (check.ok if predicted is None else predicted[0].ok):
                return False
    return True


def explain(entries: Sequence[Defect], measured: Measured) -> Explanation | None:
    """The largest set of entries that explains the cell and needs each of its members; None where none does."""
    verdicts: dict[tuple[str, ...], bool] = {}

    def holds(subset: tuple[Defect, ...]) -> bool:
        key = tuple(entry.id for entry in subset)
        if key not in verdicts:
            verdicts[key] = explains(subset, measured)
        return verdicts[key]

    for size in range(len(entries), -1, -1):
        for subset in itertools.combinations(entries, size):
            if holds(subset) and not any(holds(_without(subset, entry)) for entry in subset):
                return _sorted_out(entries, subset, measured, holds)
    return None


def _without(subset: tuple[Defect, ...], entry: Defect) -> tuple[Defect, ...]:
    return tuple(other for other in subset if other is not entry)


def _testable(entry: Defect, measured: Measured) -> bool:
    """Whether anything that was measured could have shown the entry's symptom."""
    return entry.symptom.raises is not None or any(
        check.ok is not None and _speaks(entry, name, position, step)
        for position, (step, checks) in enumerate(zip(measured.steps, measured.checks, strict=True))
        for name, check in checks.items()
    )


def _sorted_out(
    entries: Sequence[Defect],
    shown: tuple[Defect, ...],
    measured: Measured,
    holds: Callable[[tuple[Defect, ...]], bool],
) -> Explanation:
    rest = tuple(entry for entry in entries if entry not in shown)
    # A crash leaves numbers unmeasured; what they would have shown is not known, so it is not called mended.
    hidden = tuple(entry for entry in rest if measured.exception is not None and not _testable(entry, measured))
    absent = tuple(entry for entry in rest if entry not in hidden)
    ambiguous = tuple(
        entry for entry in absent if holds(tuple(other for other in entries if other in shown or other is entry))
    )
    return Explanation(shown, absent, ambiguous, hidden)
