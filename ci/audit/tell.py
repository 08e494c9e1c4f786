"""What an audit looked at, what it found and what the ledger says to it, in words."""

from __future__ import annotations

import math
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from ci import advice
from ci.advice import PACKAGE
from ci.audit.findings import ENOUGH
from ci.audit.fold import Comparison, Run, Values
from ci.audit.look import Answered, Audit, Log
from ci.known_defects import releases
from ci.matrix import Matrix


def lines(audit: Audit, matrix: Matrix) -> Iterator[str]:
    """The whole answer."""
    for log in audit.logs:
        yield from _looked_at(log)
    if audit.comparison is not None:
        yield from _compared(audit.comparison)
    yield ""
    told: set[str] = set()
    for number, answered in enumerate(audit.answered, 1):
        yield f"{number}. {answered.finding.text}"
        yield from _entries(answered, told)
        yield ""
    if not audit.answered:
        yield from _nothing(audit)
    yield from _beyond(audit, matrix)


def _looked_at(log: Log) -> Iterator[str]:
    run = log.run
    yield f"{log.name}: {_count(run.steps, 'training record')}{_numbers(run)}"
    if run.steps:
        yield f"  loss {_course(run.loss)}; grad_norm {_extent(run.norm)}"
    if run.scales is not None or run.overflows:
        extent = "" if run.scales is None else f"loss scale {run.scales[0]:g} to {run.scales[1]:g}, "
        yield f"  {extent}{_count(run.overflows, 'overflow')}"
    if run.releases:
        yield "  the log names " + ", ".join(f"{name} {' and '.join(each)}" for name, each in run.releases.items())
    if PACKAGE not in log.pins:
        yield f"  no version of {PACKAGE} is known; --versions {PACKAGE}=VERSION narrows what the ledger answers"
    if run.settings:
        yield "  " + ", ".join(f"{key} {value}" for key, value in run.settings.items())
    if run.unread:
        yield f"  {_count(run.unread, 'record')} could not be read (cut short, or no JSON), and left out"


def _numbers(run: Run) -> str:
    if not run.steps:
        return ""
    if not run.numbered:
        return ", without step numbers: counted"
    return f", step {run.first}" if run.steps == 1 else f", steps {run.first} to {run.last}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _course(values: Values) -> str:
    if values.first is None or values.last is None:
        return "in none of them" if not values.count else "never finite"
    return f"{values.first:g}" if values.count == 1 else f"{values.first:g} to {values.last:g}"


def _extent(values: Values) -> str:
    if not values.count:
        return "in none of them"
    if math.isinf(values.least):
        return "never finite"
    extent = f"between {values.least:.6g} and {values.greatest:.6g}" if values.count > 1 else f"{values.least:.9g}"
    return extent + (f", missing in {values.missing}" if values.missing else "")


def _compared(comparison: Comparison) -> Iterator[str]:
    if not comparison.pairs:
        yield "nothing to compare: no step is in both"
        return
    yield (
        f"compared: {_count(comparison.pairs, 'step')} in both, {comparison.with_norms} with a norm in both,"
        f" {comparison.equal_losses} with equal losses"
    )


def _entries(answered: Answered, told: set[str]) -> Iterator[str]:
    """The likeliest entry, in full where it was not told before, and the names of the others."""
    for entry in answered.entries[:1]:
        if entry.defect.id in told:
            yield f"   {entry.defect.id}, as above"
        else:
            told.add(entry.defect.id)
            yield from (f"   {line}" for line in advice.lines(entry))
    others = ", ".join(entry.defect.id for entry in answered.entries[1:])
    if others:
        yield f"   or, each in a configuration of its own (docs/known-defects.md): {others}"
    if answered.elsewhere and not answered.entries:
        named = ", ".join(f"{entry.defect.id} ({releases(entry.defect)})" for entry in answered.elsewhere)
        yield f"   the ledger knows no such defect of this release and these settings; of others: {named}"


def _nothing(audit: Audit) -> Iterator[str]:
    looked = ["nan and inf", "a norm that is missing, 0, growing with the step or never below the clip value"]
    looked += ["a loss scale at its minimum", "exceptions that the ledger knows"]
    if audit.comparison is not None:
        looked += ["norms apart by a power of two", "equal losses with different norms"]
    yield "nothing found; looked at: " + ", ".join(looked)
    if any(log.run.norm.count < ENOUGH for log in audit.logs):
        yield f"with fewer than {ENOUGH} norms nothing can be said about their course"


def _beyond(audit: Audit, matrix: Matrix) -> Iterator[str]:
    """What the ledger knows of these releases, whether or not a log shows it."""
    for pinned in dict.fromkeys(str(log.pins[PACKAGE]) for log in audit.logs if PACKAGE in log.pins):
        count = len(advice.advise(matrix, {PACKAGE: SpecifierSet(pinned)}).affected)
        yield (
            f"{_count(count, 'known defect')} of {PACKAGE} {pinned.removeprefix('==')} in all, of which a log may show"
            f" nothing: python -m ci advice --versions '{PACKAGE}{pinned}'"
        )
