"""One log or two, from files to a frozen `Audit`: what they say, what is odd about it, what the ledger answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.specifiers import SpecifierSet

from ci.advice import PACKAGE, Affected
from ci.audit import findings, known
from ci.audit.findings import Finding
from ci.audit.fold import Comparison, Run, compare, fold
from ci.audit.read import records
from ci.errors import UsageError
from ci.matrix import Matrix


@dataclass(frozen=True)
class Log:
    """One log: the name it was given by, what it says, and the releases that it was written by, as far as known."""

    name: str
    run: Run
    pins: Mapping[str, SpecifierSet]


@dataclass(frozen=True)
class Answered:
    """A finding with the ledger's entries that look like it: in the releases and settings of the log, and elsewhere."""

    finding: Finding
    entries: tuple[Affected, ...]
    elsewhere: tuple[Affected, ...]


@dataclass(frozen=True)
class Audit:
    """The whole answer. comparison: None for one log. answered: those about both logs first, as they say more."""

    logs: tuple[Log, ...]
    comparison: Comparison | None
    answered: tuple[Answered, ...]


def look(files: Sequence[Path], matrix: Matrix, given: Mapping[str, SpecifierSet], clip: float | None) -> Audit:
    """Read one or two files, each once. given: releases, before those that a log names; clip likewise.

    Raises UsageError where a file cannot be read or holds nothing of a training log.
    """
    runs: tuple[Run, ...]
    comparison: Comparison | None = None
    if len(files) == 2:
        *both, comparison = compare(*map(records, files))
        runs = tuple(both)
    else:
        runs = tuple(fold(records(file)) for file in files)
    for file, run in zip(files, runs, strict=True):
        if not (run.steps or run.raised or run.overflows):
            raise UsageError(
                f"{file}: found no training record; expected logging.jsonl of ms-swift, trainer_state.json, or terminal"
                " output with lines such as {'loss': 1.5, 'grad_norm': 0.25}"
            )
    logs = tuple(Log(str(file), run, {**known.pins(run), **given}) for file, run in zip(files, runs, strict=True))
    found = _found(matrix, logs, comparison, clip)
    return Audit(logs, comparison, tuple(_answered(matrix, logs, finding) for finding in found))


def _found(matrix: Matrix, logs: Sequence[Log], comparison: Comparison | None, clip: float | None) -> Iterator[Finding]:
    if comparison is not None:
        yield from findings.of_comparison(comparison, (logs[0].name, logs[1].name))
    for position, log in enumerate(logs):
        yield from findings.of_run(log.run, position, log.name, clip)
        yield from known.exceptions(matrix, log.run, position, log.name)


def _answered(matrix: Matrix, logs: Sequence[Log], finding: Finding) -> Answered:
    entries: dict[str, Affected] = {}
    elsewhere: dict[str, Affected] = {}
    for position, signature in finding.suspects:
        log = logs[position]
        for affected in known.entries(matrix, signature, log.pins, log.run.settings):
            entries.setdefault(affected.defect.id, affected)
        if PACKAGE in log.pins:
            for affected in known.entries(matrix, signature, {}, log.run.settings):
                elsewhere.setdefault(affected.defect.id, affected)
    return Answered(finding, tuple(entries.values()), tuple(elsewhere.values()))
