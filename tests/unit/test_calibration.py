"""Tolerances: what repeats make of them, and that the shipped ones are nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import calibration
from ci.matrix import load

REPEATS = 30


def test_shipped_tolerances_are_what_thirty_repeats_gave() -> None:
    for group in load().tolerances:
        for name, entry in group.checks.items():
            assert entry.repeats >= REPEATS, (group.job, group.stages, name)
            expected = calibration.tolerance(name, group.dtype, entry.largest)
            assert entry.tolerance == pytest.approx(expected, rel=0.03), (group.job, group.stages, name)


@pytest.mark.parametrize(
    ("name", "dtype", "error", "expected"),
    [
        ("gradient_used", "bf16", 0.003, 0.012),
        ("gradient_used", "fp32", 1e-7, 1e-6),  # the floor
        ("forward", "bf16", 0.0, 2.0**-9),
        ("reported_norm", "fp32", 2.61e-6, 1.1e-5),  # rounded up, never down
    ],
)
def test_a_tolerance_is_four_times_the_largest_error_and_at_least_the_floor(
    name: str, dtype: str, error: float, expected: float
) -> None:
    found = calibration.tolerance(name, dtype, error)
    assert found == pytest.approx(expected, rel=0.03)
    assert found >= 4 * error


def test_only_the_tolerances_section_is_replaced() -> None:
    text = Path("matrix.yaml").read_text(encoding="utf-8")
    changed = calibration.replaced(text, "tolerances:\n  - none\n")
    head, _, rest = text.partition("\ntolerances:")
    assert changed.startswith(head + "\ntolerances:\n  - none\n\n")
    assert changed.endswith(rest[rest.index("\n# Ledger") :])
