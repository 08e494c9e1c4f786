"""The job grpo-lora, GRPO with LoRA at every ZeRO stage: report A.

One item a cell; the numbers are judged by ci.judge.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.jobs.evidence import Evidence
from tests.jobs.order import Cell

JOB = "grpo-lora"


def test_cell(cell: Cell, run_cell: Callable[[Cell], Evidence]) -> None:
    """Evidence of one cell, complete."""
    recorded = run_cell(cell)
    assert recorded.exception is not None or len(recorded.steps) == recorded.steps_expected
