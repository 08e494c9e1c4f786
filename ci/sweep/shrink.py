"""From a failing case to the smallest one that fails in the same way.

Greedy and in rounds, because a start of the ranks costs more than a cell: all simplifications of one key are asked
for at once, and those that keep the failure are then tried together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ci import cases
from ci.cases import Case
from ci.entries import Job, Scalar
from ci.sweep.draw import changed, fitted, simpler


@dataclass(frozen=True)
class Shrunk:
    """How far a shrink has come. wanted: cases that must run before it can go on; empty when nothing is simpler."""

    case: Mapping[str, Scalar]
    wanted: tuple[Mapping[str, Scalar], ...] = ()


def shrink(job: Job, case: Case, same: Callable[[Case], bool], known: Callable[[Case], bool]) -> Shrunk:
    """The smallest case reached with what is known so far.

    known: whether a case has run. same: whether a case that has run fails in the same way.
    """
    current: Case = case
    while True:
        simplified = simpler(job, current)
        unknown = [each for each in simplified if not known(each)]
        if unknown:
            return Shrunk(current, tuple(unknown))
        kept = [each for each in simplified if same(each)]
        if not kept:
            return Shrunk(current)
        together = _together(job, current, kept)
        if together is not None and not known(together):
            return Shrunk(current, (together,))
        current = together if together is not None and same(together) else kept[0]


def _together(job: Job, current: Case, kept: list[dict[str, Scalar]]) -> dict[str, Scalar] | None:
    """All simplifications that keep the failure at once; of several of one key the first, which is the simplest."""
    changes: dict[str, Scalar] = {}
    for each in kept:
        for name, value in changed(current, each).items():
            changes.setdefault(name, value)
    whole = fitted(job, current, changes) if len(kept) > 1 else None
    return None if whole is None or cases.name(job, whole) == cases.name(job, current) else whole
