"""The grid: a table per job, stacks down and cases across."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ci.page.answer import short_pins
from ci.page.history import Entry, History


@dataclass(frozen=True)
class Row:
    """A stack. cells: the number of an entry for each case, None where no run planned it."""

    backend: str
    stack: str
    pins: str
    cells: tuple[int | None, ...]


@dataclass(frozen=True)
class Grid:
    job: str
    cases: tuple[str, ...]
    rows: tuple[Row, ...]


def grids(history: History) -> tuple[Grid, ...]:
    """One grid per job, by name; stacks by backend and name, cases as the runs have them."""
    jobs: dict[str, list[tuple[int, Entry]]] = {}
    for number, entry in enumerate(history.entries):
        jobs.setdefault(entry.job, []).append((number, entry))
    return tuple(_grid(history, job, jobs[job]) for job in sorted(jobs))


def _grid(history: History, job: str, entries: Sequence[tuple[int, Entry]]) -> Grid:
    columns = {name: position for position, name in enumerate(dict.fromkeys(entry.name for _, entry in entries))}
    rows: dict[tuple[str, str], list[int | None]] = {}
    pins: dict[tuple[str, str], str] = {}
    for number, entry in entries:
        key = entry.backend, entry.stack
        rows.setdefault(key, [None] * len(columns))[columns[entry.name]] = number
        pins.setdefault(key, short_pins(history.pins(entry)))
    return Grid(job, tuple(columns), tuple(Row(*key, pins[key], tuple(rows[key])) for key in sorted(rows)))
