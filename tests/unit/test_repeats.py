"""Clean repeats: every case gets its share of new seeds, a false alarm is named, and errors are told as shares."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ci import ledger, repeats
from ci.errors import UsageError
from ci.matrix import Corrections, Matrix, load
from ci.plan import Plan, Selection, make_plan
from ci.repeats import Repeat
from tests.jobs import evidence as jobs
from tests.unit import synthetic
from tests.unit.synthetic import Faults

ENGINE = synthetic.cell(zero_stage=1, dtype="bf16")
TRL = synthetic.cell(trainer="trl", zero_stage=1, dtype="bf16")
PINS = {"deepspeed": "0.19.8", "torch": "2.13.0+cpu"}
MATRIX = synthetic.matrix()


def line(repeat: Repeat, **moved: float) -> str:
    return jobs.to_json(synthetic.recorded(repeat.as_cell, "0.19.8", Faults(moved=moved)))


def tally(*lines: str, folder: Path) -> repeats.Tally:
    file = folder / "evidence.jsonl"
    file.write_text("\n".join(lines) + "\n")
    (found,) = repeats.tallies([ENGINE], repeats.kept(file), MATRIX, PINS)
    return found


@pytest.fixture(scope="module")
def matrix() -> Matrix:
    return load()


@pytest.fixture(scope="module")
def shipped(matrix: Matrix) -> Plan:
    return make_plan(matrix, Selection(lane="repeats", stacks=("newest",), corrections=Corrections.ON))


@pytest.mark.parametrize(("count", "of_trl"), [(1, 1), (20, 1), (21, 2), (200, 10)])
def test_rounds_give_every_case_its_share_and_no_seed_twice(count: int, of_trl: int) -> None:
    found = [repeat for each in repeats.rounds([ENGINE, TRL], count) for repeat in each]
    assert len({repeat.as_cell.id for repeat in found}) == len(found)
    assert sum(repeat.cell is ENGINE for repeat in found) == count
    assert sum(repeat.cell is TRL for repeat in found) == of_trl
    assert min(repeat.seed for repeat in found) == repeats.FIRST_SEED


def test_every_case_has_had_a_round_before_any_has_another() -> None:
    other = synthetic.cell(zero_stage=2, dtype="bf16")
    first, *_ = repeats.rounds([ENGINE, other], 200)
    assert {repeat.cell.id for repeat in first} == {ENGINE.id, other.id}
    assert len(first) == 2 * repeats.ROUND


def test_the_order_has_each_repeat_under_its_own_id_with_its_own_seed(matrix: Matrix, shipped: Plan) -> None:
    cell = shipped.cells[0]
    wanted = [Repeat(cell, 1001), Repeat(cell, 1002)]
    whole = repeats.ordered("cpu", matrix.backends["cpu"], shipped.stacks["newest"], wanted)
    assert [(entry["id"], entry["seed"]) for entry in whole["cells"]] == [
        (f"{cell.id}/seed1001", 1001),
        (f"{cell.id}/seed1002", 1002),
    ]


def test_the_largest_error_is_told_as_a_share_of_its_tolerance(tmp_path: Path) -> None:
    first = line(Repeat(ENGINE, 1001), reported_norm=0.2 * synthetic.TOLERANCE)
    second = line(Repeat(ENGINE, 1002), reported_norm=0.4 * synthetic.TOLERANCE)
    found = tally(first, second, folder=tmp_path)
    assert (found.repeats, found.red, found.clean) == (2, (), True)
    assert found.largest["reported_norm"] == pytest.approx(0.4, rel=1e-6)
    assert "40%" in repeats.table([found]) and "at most 40% of a tolerance (reported_norm)" in repeats.told(found)


def test_more_than_half_of_a_tolerance_is_not_clean(tmp_path: Path) -> None:
    found = tally(line(Repeat(ENGINE, 1001), forward=0.6 * synthetic.TOLERANCE), folder=tmp_path)
    assert found.red == () and not found.clean


def test_a_false_alarm_is_named_with_its_seed(tmp_path: Path) -> None:
    found = tally(
        line(Repeat(ENGINE, 1001)),
        line(Repeat(ENGINE, 1002), gradient_used=2 * synthetic.TOLERANCE),
        folder=tmp_path,
    )
    (red,) = found.red
    assert red.startswith("seed 1002: regression") and not found.clean


def test_a_repeat_that_crashed_is_red_too(tmp_path: Path) -> None:
    crashed = dataclasses.replace(
        synthetic.recorded(Repeat(ENGINE, 1001).as_cell, "0.19.8"), problem="rank 1 ended with signal SIGSEGV", steps=()
    )
    (red,) = tally(jobs.to_json(crashed), folder=tmp_path).red
    assert red.startswith("seed 1001: error") and "SIGSEGV" in red


def test_a_line_cut_short_is_no_repeat_and_a_doubled_one_counts_once(tmp_path: Path) -> None:
    whole = line(Repeat(ENGINE, 1001))
    found = tally(whole, whole, line(Repeat(ENGINE, 1002))[:200], folder=tmp_path)
    assert found.repeats == 1


def test_the_lane_has_one_engine_case_for_each_job_stage_and_dtype_of_the_night(matrix: Matrix, shipped: Plan) -> None:
    def groups(plan: Plan) -> list[tuple[object, ...]]:
        cells = [cell for cell in plan.runnable if cell.case.get("trainer") != "trl"]
        return sorted((cell.job, cell.case["zero_stage"], cell.case["dtype"]) for cell in cells)

    found = groups(shipped)
    assert len(set(found)) == len(found)
    assert set(found) >= set(groups(make_plan(matrix, Selection(lane="nightly", stacks=("newest",)))))


def test_nothing_claims_a_case_of_the_lane_once_it_is_corrected(matrix: Matrix, shipped: Plan) -> None:
    for cell in shipped.cells:
        pins = shipped.stacks[cell.stack].pins
        assert not ledger.claiming(matrix.defects, cell, pins, cell.corrections), cell.id


def test_the_table_replaces_what_is_below_the_last_heading(tmp_path: Path) -> None:
    found = tally(line(Repeat(ENGINE, 1001)), folder=tmp_path)
    page = Path("docs/tolerances.md").read_text(encoding="utf-8")
    changed = repeats.replaced(page, repeats.section([found], "2026-01-02", "newest"))
    assert changed.partition(repeats.MARK)[0] == page.partition(repeats.MARK)[0]
    assert "1 repeats on newest, 0 of them red" in changed.partition(repeats.MARK)[2]
    with pytest.raises(UsageError, match="no heading"):
        repeats.replaced("# Something else\n", "")
