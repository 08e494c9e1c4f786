"""Tolerances: what repeats make of them, and that the shipped ones are nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import calibration
from ci.entries import Scalar
from ci.matrix import load
from ci.plan import Selection, make_plan

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


def test_the_section_names_each_group_of_the_lane_once_and_judges_the_cells_it_was_made_from() -> None:
    matrix = load()
    plan = make_plan(matrix, Selection(lane="calibration"))
    groups = {calibration.group_of(cell, matrix.jobs[cell.job]) for cell in plan.runnable}
    shipped = [
        calibration.Group(
            job=str(group.job),
            trainers=group.trainers or (),
            stages=group.stages,
            dtype=group.dtype,
            accumulation=group.gradient_accumulation_steps[0],
        )
        for group in matrix.tolerances
    ]
    assert shipped == sorted(groups)
    for cell in plan.runnable:
        mine = shipped.index(calibration.group_of(cell, matrix.jobs[cell.job]))
        assert matrix.tolerances_for(cell.job, cell.case) == matrix.tolerances[mine].checks


def test_trl_has_tolerances_of_its_own_and_ms_swift_trains_with_its_trainer() -> None:
    matrix = load()
    case: dict[str, Scalar] = {"zero_stage": 0, "dtype": "bf16", "gradient_accumulation_steps": 4}
    engine, trl, swift = (
        matrix.tolerances_for("grpo-lora", {**case, "trainer": trainer}) for trainer in ("engine", "trl", "ms-swift")
    )
    assert trl == swift != engine
