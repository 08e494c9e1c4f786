"""Failures folded into findings: one finding is one smallest configuration with one signature.

A failing cell that contains the smallest configuration of a finding, and fails in no other way, is that finding
again. Pure: what has run is a table of outcomes, and what has to run next follows from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ci import cases
from ci.cases import Case
from ci.entries import Job, Scalar, same
from ci.sweep.draw import SIMPLEST_FIRST
from ci.sweep.shrink import shrink
from ci.sweep.signature import Outcome


@dataclass
class Finding:
    """One way to fail. case: the smallest configuration so far. settled: nothing simpler fails in the same way."""

    signature: frozenset[str]
    case: Mapping[str, Scalar]
    drawn: list[str] = field(default_factory=list)
    settled: bool = False


def contains(job: Job, case: Case, smallest: Case) -> bool:
    """Whether the case has all that the smallest one needs: what could not be made simpler, or even more of it."""
    return all(_as_much(name, case[name], smallest[name]) for name in cases.shown(job, smallest))


def _as_much(name: str, value: Scalar, needed: Scalar) -> bool:
    """Of a number that could be made smaller but not the default, a larger one will do as well."""
    order = SIMPLEST_FIRST.get(name)
    if order is None or needed not in order or value not in order:
        return same(value, needed)
    if name in ("dtype", "zero_stage"):
        return same(needed, order[0]) or same(value, needed)
    return order.index(value) >= order.index(needed)


class Fold:
    """Folds the outcomes of drawn cells. outcomes: of every cell that ran, by the case's name."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcomes: dict[str, Outcome] = {}
        self.findings: list[Finding] = []
        self._waiting: list[tuple[Mapping[str, Scalar], Outcome]] = []

    def ran(self, case: Case, outcome: Outcome) -> None:
        """A cell that ran, drawn or on the way of a shrink."""
        self.outcomes[cases.name(self.job, case)] = outcome

    def drawn(self, case: Case) -> None:
        """A drawn case that has run; a failure waits until the findings it may belong to are settled."""
        outcome = self.outcomes[cases.name(self.job, case)]
        if outcome.kind == "failure":
            self._waiting.append((case, outcome))

    def wanted(self) -> list[Mapping[str, Scalar]]:
        """The cases that must run next for the open findings to become smaller; each once."""
        found: dict[str, Mapping[str, Scalar]] = {}
        again = True
        while again:
            again = False
            self._sort_in()
            for finding in self.findings:
                if finding.settled:
                    continue
                shrunk = shrink(self.job, finding.case, self._alike(finding), self._known)
                finding.case = shrunk.case
                if shrunk.wanted:
                    found.update((cases.name(self.job, case), case) for case in shrunk.wanted)
                else:
                    finding.settled = again = True
                    self._merge(finding)
        return list(found.values())

    def _known(self, case: Case) -> bool:
        return cases.name(self.job, case) in self.outcomes

    def _alike(self, finding: Finding) -> _Alike:
        return _Alike(self, finding.signature)

    def _sort_in(self) -> None:
        """Give each waiting failure to the findings that explain it, or make it a finding of its own."""
        still: list[tuple[Mapping[str, Scalar], Outcome]] = []
        for case, outcome in self._waiting:
            name = cases.name(self.job, case)
            inside = [
                each
                for each in self.findings
                if each.settled and each.signature & outcome.signature and contains(self.job, case, each.case)
            ]
            if outcome.signature <= {part for each in inside for part in each.signature}:
                for each in inside:
                    each.drawn.append(name)
            elif any(not each.settled and each.signature & outcome.signature for each in self.findings):
                still.append((case, outcome))
            else:
                self.findings.append(Finding(outcome.signature, case, [name]))
        self._waiting = still

    def _merge(self, finding: Finding) -> None:
        """Two failures that end at one smallest configuration in one way are one finding."""
        for other in self.findings:
            alike = other is not finding and other.settled and other.signature == finding.signature
            if alike and cases.name(self.job, other.case) == cases.name(self.job, finding.case):
                other.drawn += finding.drawn
                self.findings.remove(finding)
                return

    def count(self) -> Mapping[str, int]:
        """How many cells ended how."""
        found: dict[str, int] = {}
        for outcome in self.outcomes.values():
            found[outcome.kind] = found.get(outcome.kind, 0) + 1
        return found

    def refusals(self) -> Mapping[str, int]:
        """What the library refused at set-up, and how often."""
        return _counted(outcome.reason for outcome in self.outcomes.values() if outcome.kind == "refused")

    def entries(self) -> Mapping[str, int]:
        """The ledger's entries that were met, and how often."""
        return _counted(entry for outcome in self.outcomes.values() for entry in outcome.entries)


@dataclass(frozen=True)
class _Alike:
    """Whether a case that has run fails with this signature."""

    fold: Fold
    signature: frozenset[str]

    def __call__(self, case: Case) -> bool:
        outcome = self.fold.outcomes[cases.name(self.fold.job, case)]
        return outcome.kind == "failure" and outcome.signature == self.signature


def _counted(words: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return dict(sorted(found.items()))
