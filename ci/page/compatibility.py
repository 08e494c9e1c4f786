"""The page's second tab: how each release behaves in each case, from docs/survey-*.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import survey
from ci.probe import Outcome
from ci.survey import Survey

DOCS = Path("docs")


@dataclass(frozen=True)
class Behaviour:
    """A case at a release. kind: a word to filter by, from the verdict."""

    kind: str
    words: str


@dataclass(frozen=True)
class Release:
    version: str
    unusable: str | None
    cells: tuple[Behaviour | None, ...]


@dataclass(frozen=True)
class Table:
    """A package's releases, newest first, in the cases of its survey."""

    package: str
    about: str
    cases: tuple[tuple[str, str], ...]
    releases: tuple[Release, ...]


def tables(docs: Path = DOCS) -> tuple[Table, ...]:
    """A table for each survey there is; none where there is none."""
    return tuple(_table(survey.read(path)) for path in sorted(docs.glob("survey-*.json")))


def kinds(found: Sequence[Table]) -> tuple[str, ...]:
    """Every word that a cell can be filtered by."""
    cells = (cell for table in found for release in table.releases for cell in release.cells if cell is not None)
    return tuple(sorted({cell.kind for cell in cells}))


def _table(found: Survey) -> Table:
    pins = ", ".join(f"{name} {version}" for name, version in sorted(found.pins.items()))
    return Table(
        package=found.package,
        about=f"{len(found.rows)} releases, measured up to {found.date} on stack {found.stack}: {pins}",
        cases=tuple((case.job, case.name) for case in found.cases),
        releases=tuple(
            Release(
                version=row.version,
                unusable=None if row.unusable is None else survey.described(row.unusable),
                cells=tuple(
                    _behaviour(row.outcomes[case.id]) if case.id in row.outcomes else None for case in found.cases
                ),
            )
            for row in reversed(found.rows)
        ),
    )


def _behaviour(outcome: Outcome) -> Behaviour:
    kind = str(outcome.verdict) if outcome.counts and outcome.verdict is not None else str(outcome.kind)
    return Behaviour(kind, survey.described(outcome, briefly=True))
