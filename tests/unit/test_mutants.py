"""The table of mutants fits the code that plants them, and what counts as noticed."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from ci import cases
from ci.judge import judge_cell
from ci.matrix import Matrix, load
from ci.mutants import page, table
from ci.mutants.run import MARK, planted
from ci.mutants.table import Mutant
from ci.mutants.verdict import End, Ran, failed, shown
from tests.unit import synthetic
from tests.unit.synthetic import Faults

PLANTS = Path("tests/jobs/mutants")
CELL = synthetic.cell(zero_stage=1, dtype="bf16")
FAULT = Mutant(id="norm-off", fault="the norm is off", killed_by="reported_norm", cases=({"zero_stage": 1},))


def ran(faults: Faults | None = None, planted_id: str | None = "norm-off") -> Ran:
    return Ran(judge_cell(CELL, synthetic.evidence(CELL, "0.19.8", faults), synthetic.matrix()), planted_id)


CLEAN = ran(planted_id=None)
NORM_OFF = Faults(moved={"reported_norm": 1.0})


@pytest.fixture(scope="module")
def shipped() -> Matrix:
    return load()


def names_planted() -> list[str]:
    """The names given to Mutant(...) in the code that runs inside a stack, read without its torch."""
    calls = [node for path in PLANTS.glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    return [
        str(node.args[0].value)
        for node in calls
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "Mutant"
        and isinstance(node.args[0], ast.Constant)
    ]


def test_every_mutant_of_the_table_can_be_planted_and_no_other() -> None:
    ids = [mutant.id for mutant in table.load()]
    assert ids == sorted(set(ids))
    assert sorted(names_planted()) == ids
    assert len(ids) >= 40


def test_every_case_of_the_table_is_a_case_of_its_job(shipped: Matrix) -> None:
    for mutant in table.load():
        for place in table.places(mutant, shipped):
            job = shipped.jobs[place.job]
            assert all(job.keys[key].accepts(value) for key, value in place.case.items()), (mutant.id, place)
            excluded = [each.reason for each in job.exclude if cases.matches(each.where, place.case)]
            assert not excluded, (mutant.id, place.name, excluded)
            assert set(place.corrections) <= {path.stem for path in Path("ci/corrections").glob("*.py")}


def test_a_case_runs_once_without_a_fault_and_before_those_with_one(shipped: Matrix) -> None:
    wanted = planted(table.load(), shipped, "newest", first_only=False)
    ids = [each.cell.id for each in wanted]
    assert len(ids) == len(set(ids))
    clean = {each.cell.id for each in wanted if each.mutant is None}
    assert {each.clean for each in wanted} == clean
    first_faulty = next(index for index, each in enumerate(wanted) if each.mutant is not None)
    assert first_faulty == len(clean)
    assert all(each.mutant is None or each.cell.id == f"{each.clean}{MARK}{each.mutant.id}" for each in wanted)


def test_first_only_keeps_every_mutant(shipped: Matrix) -> None:
    wanted = planted(table.load(), shipped, "newest", first_only=True)
    assert [each.mutant for each in wanted if each.mutant is not None] == list(table.load())


def test_a_fault_is_killed_by_the_check_that_has_to_notice_it() -> None:
    result = shown(FAULT, ran(NORM_OFF), CLEAN)
    assert (result.end, result.by, result.fine) == (End.KILLED, ("reported_norm",), True)


def test_a_fault_that_nothing_notices_survives() -> None:
    result = shown(FAULT, ran(), CLEAN)
    assert (result.end, result.fine) == (End.SURVIVED, False)


def test_a_fault_that_another_check_notices_is_not_killed() -> None:
    result = shown(FAULT, ran(Faults(moved={"gradient_used": 1.0})), CLEAN)
    assert (result.end, result.fine) == (End.WRONG_CHECK, False)
    assert "not by reported_norm" in result.why


@pytest.mark.parametrize("planted_id", [None, "another"])
def test_a_fault_whose_line_never_ran_proves_nothing(planted_id: str | None) -> None:
    assert shown(FAULT, ran(NORM_OFF, planted_id), CLEAN).end is End.UNTRIED


def test_a_case_that_is_red_by_itself_proves_nothing() -> None:
    result = shown(FAULT, ran(NORM_OFF), dataclasses.replace(CLEAN, record=ran(NORM_OFF).record))
    assert (result.end, result.fine) == (End.UNTRIED, False)


def test_no_evidence_is_no_kill() -> None:
    nothing = Ran(judge_cell(CELL, None, synthetic.matrix()), FAULT.id)
    assert shown(FAULT, nothing, CLEAN).end is End.WRONG_CHECK


def test_a_justified_survivor_has_to_survive() -> None:
    justified = FAULT.model_copy(update={"survives": "below one rounding"})
    assert shown(justified, ran(), CLEAN).end is End.JUSTIFIED
    noticed = shown(justified, ran(NORM_OFF), CLEAN)
    assert (noticed.end, noticed.fine) == (End.SURVIVED, False)


def test_an_exception_counts_beside_the_checks() -> None:
    assert failed(ran(Faults(raises="lost")).record)[-1] == "exception"


def test_what_is_told_and_what_is_on_the_page() -> None:
    results = [shown(FAULT, ran(NORM_OFF), CLEAN), shown(FAULT, ran(), CLEAN)]
    assert page.told(results)[-1] == "1 killed, 1 survived"
    written = page.page(results, "Measured today")
    assert "| the norm is off (`norm-off`) | reported_norm | 2 | reported_norm 1 |" in written
    assert "## Not noticed" in written and "Measured today: 1 faults planted in 2 cases, 1 of them" in written
    assert "## Not noticed" not in page.page(results[:1], "Measured today")
