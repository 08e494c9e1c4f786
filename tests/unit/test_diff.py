"""What `diff` says changed, and what it keeps quiet about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ci import runrecord
from ci.commands import diff as diff_command
from ci.diff import diff
from ci.errors import ExitCode
from ci.evidence import Reading
from ci.judge import judge_run
from ci.runrecord import RunRecord, SavedPlan
from tests.unit import synthetic
from tests.unit.synthetic import TOLERANCE, Faults
from tests.unit.test_judge import CRASH, NORM


def run(
    faults: Faults | None = None, deepspeed: str = "0.17.6", stack: str = "made-up", stages: tuple[int, ...] = (0, 2)
) -> RunRecord:
    cells = tuple(synthetic.cell(stack=stack, zero_stage=stage, dtype="bf16") for stage in stages)
    plan = SavedPlan(
        command="c",
        backend="cpu",
        runtime="venv",
        started="now",
        stacks={stack: {"deepspeed": deepspeed}},
        cells=cells,
    )
    evidence = {
        cell.id: synthetic.evidence(cell, deepspeed, faults if faults and cell is cells[0] else None) for cell in cells
    }
    shown = (CRASH,) if faults and faults.raises else faults.defects if faults else ()
    ledger = [entry.model_copy(update={"where": {"zero_stage": stages[0]}}) for entry in shown]
    return judge_run(plan, Reading(evidence), synthetic.matrix(ledger), 1.0)


def whats(before: RunRecord, after: RunRecord) -> list[str]:
    return [change.what for change in diff(before, after)]


def edited(record: RunRecord, **fields: Any) -> RunRecord:
    """The run with fields of its first cell replaced."""
    return record.model_copy(update={"cells": (record.cells[0].model_copy(update=fields), *record.cells[1:])})


def test_a_run_does_not_differ_from_itself_or_from_one_within_tolerance() -> None:
    assert diff(run(), run()) == []
    for share in (0.5, 0.9):
        moved = _value(run(), "reported_norm", 1 + share * TOLERANCE)
        assert diff(run(), moved) == []
        assert diff(moved, run()) == []


def _value(record: RunRecord, name: str, factor: float, position: int = 0) -> RunRecord:
    steps = list(record.cells[0].steps)
    checks = tuple(
        check.model_copy(update={"value": (check.value or 0.0) * factor}) if check.name == name else check
        for check in steps[position].checks
    )
    steps[position] = steps[position].model_copy(update={"checks": checks})
    return edited(record, steps=tuple(steps))


def test_a_value_beyond_tolerance_is_named_with_step_and_check_even_where_the_verdict_stays() -> None:
    (change,) = diff(run(), _value(run(), "reported_norm", 1 + 2 * TOLERANCE, position=1))
    assert change.what == "step 2 reported_norm"
    assert change.cell == run().cells[0].id
    assert change.before.endswith("(holds)") and change.after.endswith("(holds)") and change.before != change.after


def test_a_defect_that_appears_shows_in_verdict_defects_and_each_check() -> None:
    changes = diff(run(), run(Faults([NORM])))
    steps = [f"step {number} reported_norm" for number in (1, 2, 3)]
    assert [change.what for change in changes if change.what != "reason"] == ["verdict", "defects", *steps]
    by_what = {change.what: change for change in changes}
    assert (by_what["verdict"].before, by_what["verdict"].after) == ("ok", "known defect")
    assert (by_what["defects"].before, by_what["defects"].after) == ("none", NORM.id)
    assert by_what["step 1 reported_norm"].before.endswith("(holds)")
    assert by_what["step 1 reported_norm"].after.endswith("(fails)")


def test_an_exception_and_missing_steps_are_differences() -> None:
    assert {"exception", "steps", "verdict"} <= set(whats(run(), run(Faults(raises="got [0]"))))


def test_none_nan_and_a_check_no_longer_judged_are_differences() -> None:
    record = run()
    for update in ({"value": None}, {"value": float("nan")}, {"ok": None, "reason": "overflow"}):
        steps = list(record.cells[0].steps)
        checks = tuple(
            check.model_copy(update=update) if check.name == "update" else check for check in steps[0].checks
        )
        steps[0] = steps[0].model_copy(update={"checks": checks})
        other = edited(record, steps=tuple(steps))
        assert whats(record, other) == ["step 1 update"], update
        assert whats(other, other) == []


def test_a_users_own_file_is_said_although_the_cell_has_the_same_id() -> None:
    (change,) = diff(run(), edited(run(), adapter="mine.py:Mine"))
    assert (change.what, change.before, change.after) == ("adapter", "the shipped one", "mine.py:Mine")
    (change,) = diff(edited(run(), ds_config="a.json"), edited(run(), ds_config="b.json"))
    assert (change.what, change.before, change.after) == ("ds_config", "a.json", "b.json")


def test_cells_of_one_run_only_are_named() -> None:
    changes = diff(run(stages=(0, 2)), run(stages=(0, 3)))
    assert [(change.what, change.before, change.after) for change in changes] == [
        ("cell", "ok", "absent"),
        ("cell", "absent", "ok"),
    ]


def test_two_backends_are_compared_by_what_they_test() -> None:
    record = run()
    cells = tuple(cell.model_copy(update={"id": cell.id.replace("cpu/", "cuda/")}) for cell in record.cells)
    other = record.model_copy(update={"backend": "cuda", "cells": cells})
    assert diff(record, other) == []
    (change,) = diff(record, _value(other, "gradient_used", 2.0))
    assert change.cell == f"{record.cells[0].id} -> {cells[0].id}"


def test_two_single_stacks_are_compared_case_by_case_with_their_pins() -> None:
    changes = diff(run(deepspeed="0.17.6", stack="old"), run(deepspeed="0.19.8", stack="new"))
    assert [(change.cell, change.what, change.before, change.after) for change in changes] == [
        ("stack old -> new", "deepspeed", "0.17.6", "0.19.8")
    ]


def test_the_command_prints_each_difference_and_ends_like_diff(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, record in (("one", run()), ("two", run(Faults([NORM])))):
        (tmp_path / name).mkdir()
        runrecord.write_run(tmp_path / name, record)
    assert diff_command.main(str(tmp_path / "one"), str(tmp_path / "one")) == ExitCode.OK
    assert "nothing changed" in capsys.readouterr().out
    assert diff_command.main(str(tmp_path / "one"), str(tmp_path / "two")) == ExitCode.FAILED
    shown = capsys.readouterr().out
    assert "  verdict: ok -> known defect\n" in shown
    assert f"  defects: none -> {NORM.id}\n" in shown
