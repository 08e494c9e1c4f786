"""docs/repeats.json: the repeats that machines before this one counted; each session adds to them.

Only what is counted is kept: seeds, what was red, each check's largest share of its tolerance. A row holds for the
releases and the tolerances it was judged by, and is left out where either is another now.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from ci.errors import UsageError
from ci.evidence import Record
from ci.matrix import Matrix
from ci.plan import Cell
from ci.repeats import Tally


class Row(Record):
    """One cell. seeds: first and last of each unbroken range. tolerances: by check, those it was judged by."""

    seeds: tuple[tuple[int, int], ...]
    red: tuple[str, ...] = ()
    largest: dict[str, float] = Field(default_factory=dict)
    tolerances: dict[str, float] = Field(default_factory=dict)


class Tallied(Record):
    """What was counted so far. pins: of the stack, by package; cells: by id."""

    pins: dict[str, str] = Field(default_factory=dict)
    cells: dict[str, Row] = Field(default_factory=dict)


def read(path: Path) -> Tallied:
    """The file; an empty one where nothing was counted yet."""
    try:
        return Tallied.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Tallied()
    except (OSError, ValidationError) as error:
        raise UsageError(f"{path}: expected what `python -m ci repeats --write` wrote: {error}") from error


def holding(tallied: Tallied, cells: Iterable[Cell], matrix: Matrix, pins: Mapping[str, str]) -> tuple[Tally, ...]:
    """The rows that still hold, as tallies."""
    if tallied.pins != pins:
        return ()
    rows = ((cell, tallied.cells.get(cell.id)) for cell in cells)
    return tuple(
        Tally(cell, frozenset(_each(row.seeds)), row.red, row.largest)
        for cell, row in rows
        if row is not None and row.tolerances == _tolerances(matrix, cell)
    )


def text(found: Iterable[Tally], matrix: Matrix, pins: Mapping[str, str]) -> str:
    """The file's content."""
    rows = {
        tally.cell.id: Row(
            seeds=_ranges(sorted(tally.seeds)),
            red=tally.red,
            # Four digits tell a share well, and keep the file readable.
            largest={name: float(f"{share:.4g}") for name, share in tally.largest.items()},
            tolerances=_tolerances(matrix, tally.cell),
        )
        for tally in found
        if tally.seeds
    }
    return Tallied(pins=dict(pins), cells=rows).model_dump_json(indent=1, exclude_defaults=True) + "\n"


def _tolerances(matrix: Matrix, cell: Cell) -> dict[str, float]:
    return {name: entry.tolerance for name, entry in matrix.tolerances_for(cell.job, cell.case).items()}


def _each(ranges: Iterable[tuple[int, int]]) -> Iterable[int]:
    return (seed for first, last in ranges for seed in range(first, last + 1))


def _ranges(seeds: Sequence[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for seed in seeds:
        if found and found[-1][1] == seed - 1:
            found[-1] = (found[-1][0], seed)
        else:
            found.append((seed, seed))
    return tuple(found)
