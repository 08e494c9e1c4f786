"""Repeats counted by machines before: they count on, and hold only for what they were judged by."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import repeats, tallied
from ci.errors import UsageError
from ci.matrix import Matrix
from ci.repeats import Repeat, Tally
from tests.unit import synthetic
from tests.unit.test_repeats import ENGINE, MATRIX, PINS, line

COUNTED = Tally(ENGINE, frozenset({1001, 1002, 1003, 1007}), ("seed 1007: error, x",), {"forward": 0.123456})


def again(tally: Tally, matrix: Matrix = MATRIX, pins: dict[str, str] = PINS) -> tuple[Tally, ...]:
    """Written and read."""
    written = tallied.Tallied.model_validate_json(tallied.text([tally], MATRIX, PINS))
    return tallied.holding(written, [ENGINE], matrix, pins)


def test_what_was_counted_is_read_again_with_unbroken_seeds_as_ranges(tmp_path: Path) -> None:
    (found,) = again(COUNTED)
    assert (found.seeds, found.red, found.repeats) == (COUNTED.seeds, COUNTED.red, 4)
    assert found.largest == {"forward": 0.1235}
    assert "1001,\n     1003" in tallied.text([COUNTED], MATRIX, PINS)
    assert tallied.read(tmp_path / "none.json") == tallied.Tallied()


def test_a_row_holds_only_for_the_releases_and_tolerances_it_was_judged_by() -> None:
    assert again(COUNTED, pins={**PINS, "deepspeed": "0.19.9"}) == ()
    assert again(COUNTED, matrix=synthetic.matrix(tolerance=2 * synthetic.TOLERANCE)) == ()


def test_new_repeats_are_added_and_a_seed_counted_before_is_not_counted_twice(tmp_path: Path) -> None:
    file = tmp_path / "evidence.jsonl"
    lines = [
        line(Repeat(ENGINE, 1003), forward=0.9 * synthetic.TOLERANCE),  # counted before: not looked at
        line(Repeat(ENGINE, 1004), reported_norm=0.3 * synthetic.TOLERANCE),
    ]
    file.write_text("\n".join(lines) + "\n")
    (found,) = repeats.tallies([ENGINE], repeats.kept(file), MATRIX, PINS, again(COUNTED))
    assert found.seeds == COUNTED.seeds | {1004}
    assert found.red == COUNTED.red
    assert found.largest["forward"] == 0.1235
    assert found.largest["reported_norm"] == pytest.approx(0.3, rel=1e-6)


def test_another_files_content_is_answered_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "repeats.json"
    path.write_text('{"cells": 1}')
    with pytest.raises(UsageError, match=r"repeats\.json: expected what `python -m ci repeats --write` wrote"):
        tallied.read(path)
