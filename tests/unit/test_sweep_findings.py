"""From failing cells to findings: made-up libraries that fail in known ways are shrunk to exactly that, once each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ci import cases
from ci.matrix import Job, Scalar, load
from ci.runrecord import CellRecord, Verdict
from ci.sweep import draw
from ci.sweep.findings import Finding, Fold, contains
from ci.sweep.signature import Outcome

Case = Mapping[str, Scalar]
Library = Callable[[Case], set[str]]
"""What a made-up library gets wrong in a configuration."""


@functools.cache
def job() -> Job:
    return load(Path(__file__).parents[2] / "matrix.yaml").jobs["engine-sweep"]


def case(**given: Scalar) -> dict[str, Scalar]:
    return cases.resolve(job(), {"zero_stage": 2, "dtype": "bf16", **given})


def wrong_in(wrong: set[str]) -> Outcome:
    record = CellRecord(id="x", stack="s", job="j", case={}, verdict=Verdict.OK, world_size=2, command="")
    return Outcome("failure" if wrong else "ok", record, frozenset(wrong))


def swept(library: Library, drawn: list[dict[str, Scalar]]) -> tuple[list[Finding], int]:
    """(findings, rounds) once nothing more is wanted."""
    fold = Fold(job())
    for each in drawn:
        fold.ran(each, wrong_in(library(each)))
        fold.drawn(each)
    rounds = 0
    while wanted := [dict(each) for each in fold.wanted()]:
        rounds += 1
        assert rounds < 30
        names = [cases.name(job(), each) for each in wanted]
        assert len(set(names)) == len(names)
        assert not set(names) & fold.outcomes.keys(), "a cell is asked for that has run"
        for each in wanted:
            assert draw.allowed(job(), each)
            fold.ran(each, wrong_in(library(each)))
    return fold.findings, rounds


def two_calls(values: Case) -> set[str]:
    return {"gradient_used"} if values["backward_calls"] == 2 and values["zero_stage"] == 2 else set()


def offload(values: Case) -> set[str]:
    stage = values["zero_stage"] == 2
    return {"update"} if stage and values["offload"] != "none" and values["gradient_accumulation_steps"] != 1 else set()


BUSY: dict[str, Scalar] = {
    "gradient_accumulation_steps": 4,
    "optimizer": "adamw",
    "world_size": 3,
    "backward_calls": 2,
    "parameters": "tied",
    "weight_decay": 0.1,
    "resume": True,
    "steps": 5,
}


def test_a_failure_is_shrunk_to_the_keys_that_cause_it() -> None:
    findings, rounds = swept(two_calls, [case(**BUSY)])
    (found,) = findings
    assert cases.name(job(), found.case) == "zero2-fp32-backward2"
    assert found.settled
    assert rounds <= 4


def test_a_smaller_number_is_found_where_the_default_does_not_fail() -> None:
    (found,), _ = swept(offload, [case(**BUSY, offload="optimizer")])
    assert cases.name(job(), found.case) == "zero2-fp32-gas2-offload-optimizer"


def test_many_failures_of_one_cause_are_one_finding() -> None:
    drawn = [case(**{**BUSY, "world_size": ranks}) for ranks in (1, 2, 3, 4)]
    (found,), _ = swept(two_calls, [*drawn, case()])
    assert len(found.drawn) == len(drawn)


def test_two_causes_in_one_cell_and_alone_are_two_findings() -> None:
    def both(values: Case) -> set[str]:
        return two_calls(values) | offload(values)

    alone = case(gradient_accumulation_steps=4, offload="optimizer", steps=5)
    findings, _ = swept(both, [case(**BUSY), alone, case(**BUSY, offload="optimizer")])
    assert sorted(cases.name(job(), found.case) for found in findings) == [
        "zero2-fp32-backward2",
        "zero2-fp32-gas2-offload-optimizer",
    ]


def test_a_failure_that_needs_a_pair_of_keys_keeps_both() -> None:
    def pair(values: Case) -> set[str]:
        return {"consistency"} if values["resume"] and values["param_groups"] == 2 and values["zero_stage"] else set()

    (found,), _ = swept(pair, [case(**BUSY, param_groups=2)])
    assert cases.name(job(), found.case) == "zero1-fp32-groups2-resume"


def test_keys_of_which_one_is_enough_do_not_both_go() -> None:
    """Each alone may go, together they may not: the round that tries both must not lose the failure."""

    def either(values: Case) -> set[str]:
        return {"forward"} if values["resume"] or values["param_groups"] == 2 else set()

    (found,), _ = swept(either, [case(resume=True, param_groups=2)])
    assert cases.name(job(), found.case) in ("zero0-fp32-resume", "zero0-fp32-groups2")


def test_no_failure_no_finding() -> None:
    assert swept(lambda values: set(), [case(**BUSY), case()]) == ([], 0)


@pytest.mark.parametrize(
    ("given", "inside"),
    [({}, False), ({"backward_calls": 2}, True), ({"backward_calls": 2, "resume": True}, True)],
)
def test_a_case_contains_what_has_all_its_special_keys(given: dict[str, Scalar], inside: bool) -> None:
    assert contains(job(), case(**given), case(backward_calls=2)) is inside
