"""The judge as a function: of the evidence and the ledger alone, in whatever order they come, by one table."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from ci.evidence import Evidence, Reading
from ci.judge import judge_cell, judge_run
from ci.matrix import Defect, Symptom
from ci.runrecord import SavedPlan, Verdict
from tests.unit import synthetic
from tests.unit.fuzz import EXAMPLES
from tests.unit.synthetic import TOLERANCE, Faults

CELL = synthetic.cell(zero_stage=0, dtype="bf16", gradient_accumulation_steps=4)
ABOUT: dict[str, Any] = {"title": "x", "upstream": (), "advice": "x", "affects": {"deepspeed": ">=0.17,<0.19"}}


def entry(id_: str, symptom: Mapping[str, Any], correction: str | None = None) -> Defect:
    where = {"zero_stage": 0}
    return Defect(id=id_, symptom=Symptom.model_validate(symptom), correction=correction, where=where, **ABOUT)


LEDGER = (
    entry("forward", {"forward": {"equals": "step_count_plus_one"}}, "fix_forward"),
    entry("gradient", {"gradient_used": {"equals": "last_micro_batch"}}),
    entry("norm", {"reported_norm": {"times": "loss_scale"}}, "fix_norm"),
    entry("update", {"update": {"equals": "previous_step"}}),
)
"""One entry a check, so that each can be there or not by itself; two of them have a correction."""

CHECK = {"forward": "forward", "gradient": "gradient_used", "norm": "reported_norm", "update": "update"}
FIXED = {"update": 1e-6}


@dataclasses.dataclass(frozen=True)
class Situation:
    """What can be true of a cell. shows: defects in the numbers. claims: what is in the ledger. moved: a check."""

    gated: bool
    problem: bool
    shows: frozenset[str]
    claims: frozenset[str]
    corrected: bool
    moved: str | None


def by_the_contract(of: Situation) -> Verdict:
    """The contract's table, from the top, said once more and without the judge."""
    if of.gated:
        return Verdict.NOT_RUN
    if of.problem:
        return Verdict.ERROR
    claiming = {name for name in of.claims if not (of.corrected and name in ("forward", "norm"))}
    if of.moved is not None or of.shows - claiming:
        return Verdict.REGRESSION
    if of.corrected:
        return Verdict.CORRECTED
    if claiming - of.shows:
        return Verdict.FIXED_UPSTREAM
    return Verdict.KNOWN_DEFECT if claiming else Verdict.OK


names = st.frozensets(st.sampled_from([defect.id for defect in LEDGER]))
situations = st.builds(
    Situation,
    gated=st.sampled_from((False, False, False, True)),
    problem=st.sampled_from((False, False, False, True)),
    shows=names,
    claims=names,
    corrected=st.booleans(),
    moved=st.sampled_from((None, None, None, "forward", "gradient", "norm", "update", "ranks")),
)


def evidence(of: Situation) -> Evidence:
    faults = Faults(
        defects=[defect for defect in LEDGER if defect.id in of.shows],
        moved={CHECK[of.moved]: 5 * FIXED.get(of.moved, TOLERANCE)} if of.moved in CHECK else {},
    )
    record = synthetic.recorded(CELL, "0.18.0", faults)
    if of.moved == "ranks":
        steps = tuple(
            dataclasses.replace(step, grad_norm_reported=(*step.grad_norm_reported[:1], -7.0)) for step in record.steps
        )
        record = dataclasses.replace(record, steps=steps)
    corrections = ("fix_forward", "fix_norm") if of.corrected else ()
    problem = "killed" if of.problem else None
    return synthetic.read(dataclasses.replace(record, corrections=corrections, problem=problem))


def ledger(of: Situation) -> list[Defect]:
    return [defect for defect in LEDGER if defect.id in of.claims]


@settings(max_examples=EXAMPLES)
@given(situations)
def test_the_verdict_is_the_tables(of: Situation) -> None:
    cell = dataclasses.replace(CELL, gated="needs more" if of.gated else None)
    judged = judge_cell(cell, evidence(of), synthetic.matrix(ledger(of)))
    assert judged.verdict == by_the_contract(of), judged.reason
    if judged.verdict in (Verdict.KNOWN_DEFECT, Verdict.CORRECTED):
        assert set(judged.defects) == {defect.id for defect in ledger(of)} & of.shows
    if judged.verdict == Verdict.FIXED_UPSTREAM:
        assert set(judged.fixed) == of.claims - of.shows


@given(situations)
def test_no_evidence_at_all_is_an_error_unless_the_cell_was_gated(of: Situation) -> None:
    cell = dataclasses.replace(CELL, gated="needs more" if of.gated else None)
    wanted = Verdict.NOT_RUN if of.gated else Verdict.ERROR
    assert judge_cell(cell, None, synthetic.matrix(ledger(of))).verdict == wanted


@given(situations, st.randoms(use_true_random=False))
def test_the_same_evidence_and_ledger_give_the_same_record_and_are_not_touched(of: Situation, chance: Any) -> None:
    measured, entries = evidence(of), ledger(of)
    before = copy.deepcopy((measured, entries))
    first = judge_cell(CELL, measured, synthetic.matrix(entries))
    assert judge_cell(CELL, measured, synthetic.matrix(entries)) == first
    assert (measured, entries) == before
    chance.shuffle(entries)
    again = judge_cell(CELL, measured, synthetic.matrix(entries))
    assert (again.verdict, set(again.defects), set(again.fixed)) == (
        first.verdict,
        set(first.defects),
        set(first.fixed),
    )


@given(st.lists(situations, min_size=2, max_size=4), st.randoms(use_true_random=False))
def test_a_run_is_judged_cell_by_cell_whatever_the_order_of_its_evidence(of: list[Situation], chance: Any) -> None:
    cells = tuple(dataclasses.replace(CELL, id=f"{CELL.id}-{number}") for number in range(len(of)))
    found = {cell.id: evidence(one).model_copy(update={"cell": cell.id}) for cell, one in zip(cells, of, strict=True)}
    matrix = synthetic.matrix(ledger(of[0]))
    plan = SavedPlan(command="x", backend="cpu", runtime="venv", started="x", unchecked=("made-up",), cells=cells)
    order = list(found)
    chance.shuffle(order)
    record = judge_run(plan, Reading({cell: found[cell] for cell in order}), matrix)
    assert record == judge_run(plan, Reading(found), matrix)
    for cell, judged in zip(cells, record.cells, strict=True):
        assert judged == judge_cell(cell, found[cell.id], matrix)
