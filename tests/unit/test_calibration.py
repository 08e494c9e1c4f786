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


def test_what_is_shipped_is_written_as_it_stands() -> None:
    text = Path("matrix.yaml").read_text(encoding="utf-8")
    assert calibration.replaced(text, calibration.as_yaml(calibration.shipped(load()))) == text


def test_a_group_is_measured_by_all_of_its_cells_or_not_written() -> None:
    matrix = load()
    lane = make_plan(matrix, Selection(lane="calibration")).runnable
    fp16 = {cell.id: cell for cell in lane if cell.job == "engine-sweep" and cell.case["dtype"] == "fp16"}
    first, *others = (each for each, cell in fp16.items() if cell.case["gradient_accumulation_steps"] == 1)
    left_out = calibration.partly_selected(lane, {first}, matrix.jobs)
    assert list(left_out.values()) == [tuple(others)]
    assert others
    assert calibration.partly_selected(lane, fp16.keys(), matrix.jobs) == {}


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
    shipped = list(calibration.shipped(matrix))
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
