"""What a planted fault came to: killed by which checks, survived, or never put to the test. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ci.mutants.table import Mutant
from ci.runrecord import CellRecord, Verdict

EXCEPTION = "exception"
GREEN = frozenset({Verdict.OK, Verdict.CORRECTED, Verdict.KNOWN_DEFECT})


class End(StrEnum):
    """How a mutant ended in a case."""

    KILLED = "killed"
    JUSTIFIED = "survives, as it must"
    SURVIVED = "survived"
    WRONG_CHECK = "killed by another check"
    UNTRIED = "not tried"


@dataclass(frozen=True)
class Ran:
    """A judged cell, and the fault whose line ran in it."""

    record: CellRecord
    planted: str | None


@dataclass(frozen=True)
class Sound:
    """A case without a fault."""

    cell: str
    record: CellRecord
    missing: str

    @property
    def green(self) -> bool:
        return self.record.verdict in GREEN


@dataclass(frozen=True)
class Shown:
    """A mutant in one case. by: the checks that failed and that no entry of the ledger predicted."""

    mutant: Mutant
    cell: str
    end: End
    by: tuple[str, ...]
    why: str = ""

    @property
    def fine(self) -> bool:
        return self.end in (End.KILLED, End.JUSTIFIED)


def failed(record: CellRecord) -> tuple[str, ...]:
    """The checks of a record that fail and that no entry predicted, in the contract's order, each once."""
    checks = [c.name for step in record.steps for c in step.checks if c.ok is False and not c.defects]
    found = dict.fromkeys(sorted(checks, key=lambda name: [c.name for c in record.steps[0].checks].index(name)))
    return (*found, *((EXCEPTION,) if record.exception is not None else ()))


def shown(mutant: Mutant, faulty: Ran, clean: Ran) -> Shown:
    """Whether the fault was noticed by the check that has to; only where its line ran and the case is green without."""
    by = failed(faulty.record)
    cell = faulty.record.id

    def ended(end: End, why: str = "") -> Shown:
        return Shown(mutant, cell, end, by, why)

    if clean.record.verdict not in GREEN:
        return ended(End.UNTRIED, f"the case is not green without it: {clean.record.verdict}, {clean.record.reason}")
    if faulty.planted != mutant.id:
        return ended(End.UNTRIED, f"its line never ran: {faulty.record.reason or faulty.record.verdict}")
    if faulty.record.verdict in GREEN:
        return ended(End.JUSTIFIED if mutant.survives else End.SURVIVED, mutant.survives or "")
    if mutant.survives:
        return ended(End.SURVIVED, "the table says that no check can notice it; take `survives` out")
    if faulty.record.verdict is not Verdict.REGRESSION or mutant.killed_by not in by:
        return ended(End.WRONG_CHECK, f"{faulty.record.verdict}: {faulty.record.reason}; not by {mutant.killed_by}")
    return ended(End.KILLED)
