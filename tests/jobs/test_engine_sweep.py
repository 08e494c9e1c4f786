"""The job engine-sweep, engine configurations that nobody wrote a case for.

One item a cell; the numbers are judged by ci.judge.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.jobs.evidence import Evidence
from tests.jobs.order import Cell

JOB = "engine-sweep"


def test_cell(cell: Cell, run_cell: Callable[[Cell], Evidence]) -> None:
    """Evidence of one cell, complete."""
    recorded = run_cell(cell)
    assert recorded.exception is not None or len(recorded.steps) == recorded.steps_expected
