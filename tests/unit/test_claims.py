"""Which entries claim a case, which corrections that calls for, and how corrected cells are planned and judged."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ci import claims
from ci.errors import MatrixError
from ci.judge import judge_cell
from ci.matrix import Correction, Corrections, Defect, load
from ci.plan import Plan, Selection, make_plan
from ci.runrecord import CellRecord, Verdict
from tests.jobs import evidence as jobs
from tests.unit import small_matrix, synthetic

GUARD = Correction.model_validate({"about": "a guard", "modes": {"gather": {}, "raise": {"raises": "outside its"}}})


def entry(id_: str, correction: str | tuple[str, ...] | None, **where: Any) -> Defect:
    return Defect.model_validate(
        {
            "id": id_,
            "title": "a defect",
            "upstream": [],
            "where": where or {"zero_stage": 0},
            "affects": {"deepspeed": ">=0.17.6,<0.18.3"},
            "symptom": {"reported_norm": {"times": "loss_scale"}},
            "correction": correction,
            "advice": "update",
        }
    )


@pytest.mark.parametrize(
    ("named", "applied", "right"),
    [
        (None, ("fix",), False),
        ("fix", (), False),
        ("fix", ("fix",), True),
        ("fix", ("other",), False),
        ("guard", ("guard=gather",), True),
        ("guard", ("guard=raise",), True),
        ("guard=raise", ("guard=raise",), True),
        ("guard=raise", ("guard=gather",), False),
        (("fix", "also"), ("fix",), False),
        (("fix", "also"), ("also", "fix"), True),
    ],
)
def test_an_entry_is_right_where_its_correction_was_applied(
    named: str | tuple[str, ...] | None, applied: tuple[str, ...], right: bool
) -> None:
    assert claims.corrected_by(entry("a", named), applied) is right


def test_an_entry_claims_by_release_and_case_until_it_is_corrected() -> None:
    found = entry("a", "fix")
    case = {"zero_stage": 0}
    assert claims.claims(found, "grpo-lora", case, {"deepspeed": "0.18.2"})
    assert claims.claims(found, "grpo-lora", case, {"deepspeed": "0.18.2+local"})
    assert not claims.claims(found, "grpo-lora", case, {"deepspeed": "0.18.3"})
    assert not claims.claims(found, "grpo-lora", {"zero_stage": 1}, {"deepspeed": "0.18.2"})
    assert not claims.claims(found, "grpo-lora", case, {"deepspeed": "0.18.2"}, ("fix",))


def test_corrections_without_modes_make_one_cell_and_each_mode_one_of_its_own() -> None:
    def found(*named: str | tuple[str, ...] | None) -> dict[str, tuple[str, ...]]:
        entries = [entry(str(index), name) for index, name in enumerate(named)]
        return {variant.suffix: variant.corrections for variant in claims.variants(entries, {"guard": GUARD})}

    assert found(None) == {}
    assert found("fix", None, "also", "fix") == {"corrected": ("fix", "also")}
    assert found("fix", "guard") == {
        "corrected": ("fix", "guard=gather"),
        "corrected-raise": ("fix", "guard=raise"),
    }
    assert found(("fix", "also"), "more") == {"corrected": ("fix", "also", "more")}
    assert found("guard=raise") == {"corrected-raise": ("guard=raise",)}


def planned(tmp_path: Path, corrections: Corrections) -> Plan:
    matrix = load(small_matrix.write(tmp_path))
    return make_plan(matrix, Selection(stacks=("old",), jobs=("adapter",), lane="nightly", corrections=corrections))


def test_claimed_cells_are_planned_as_they_are_corrected_or_both(tmp_path: Path) -> None:
    def ids(corrections: Corrections) -> list[str]:
        return [cell.id.rpartition("/")[2] for cell in planned(tmp_path, corrections).cells]

    assert ids(Corrections.OFF) == ["plain", "keepalive"]
    assert ids(Corrections.ON) == ["plain", "keepalive+corrected"]
    assert ids(Corrections.BOTH) == ["plain", "keepalive", "keepalive+corrected"]


def test_a_corrected_cell_is_repeated_with_its_corrections_and_its_twin_without(tmp_path: Path) -> None:
    _, plain, corrected = planned(tmp_path, Corrections.BOTH).cells
    assert (plain.corrections, corrected.corrections) == ((), ("fix_b",))
    assert corrected.command == f"{plain.command} --corrections on"


def test_a_mode_that_the_correction_does_not_have_is_a_mistake_in_the_matrix(tmp_path: Path) -> None:
    path = small_matrix.write(tmp_path, "correction: fix_b", "correction: fix_b=loudly")
    with pytest.raises(MatrixError) as caught:
        load(path)
    assert "unknown mode of fix_b 'loudly'" in caught.value.message


def test_modes_of_a_correction_that_no_entry_names_are_a_mistake(tmp_path: Path) -> None:
    path = small_matrix.write(tmp_path, "defects:", "corrections:\n  fix_c: {about: x, modes: {a: {}}}\ndefects:")
    with pytest.raises(MatrixError) as caught:
        load(path)
    assert "fix_c" in caught.value.message


CELL = dataclasses.replace(synthetic.cell(zero_stage=0, dtype="bf16"), corrections=("guard=raise",))
RAISED = jobs.ExceptionRecord(
    "PartitionedParameterError",
    "sum of model.a.weight outside its module at model.py:12: write ...",
    user_frame="model.py:12 in term: return sum(p.sum() for p in parameters)",
    where="forward, step 0, micro-batch 0",
)


def stopped(exception: jobs.ExceptionRecord | None, *steps: jobs.Step) -> CellRecord:
    matrix = synthetic.matrix([entry("a", "guard")]).model_copy(update={"corrections": {"guard": GUARD}})
    record = dataclasses.replace(
        synthetic.recorded(CELL, "0.17.6"), exception=exception, corrections=("guard=raise",), steps=steps
    )
    if exception is None:
        record = dataclasses.replace(record, steps=synthetic.recorded(CELL, "0.17.6").steps)
    return judge_cell(CELL, synthetic.read(record), matrix)


def test_a_correction_that_stops_holds_when_message_and_line_are_right() -> None:
    assert stopped(RAISED).verdict is Verdict.CORRECTED


@pytest.mark.parametrize(
    ("exception", "says"),
    [
        (None, "nothing was raised"),
        (dataclasses.replace(RAISED, message="got [0]"), "expected a message that matches 'outside its'"),
        (dataclasses.replace(RAISED, user_frame="model.py:13 in term: x"), "not at the line that it names"),
        (dataclasses.replace(RAISED, user_frame="model.py:1 in term: x"), "not at the line that it names"),
        (dataclasses.replace(RAISED, user_frame=None), "raised at no line of the user's"),
    ],
)
def test_a_correction_that_stops_elsewhere_or_not_at_all_is_a_regression(
    exception: jobs.ExceptionRecord | None, says: str
) -> None:
    found = stopped(exception)
    assert found.verdict is Verdict.REGRESSION
    assert says in (found.reason or "")


def test_a_correction_that_stops_too_late_is_a_regression() -> None:
    wrong = synthetic.step(0, synthetic.Faults([entry("a", None)]))
    found = stopped(RAISED, wrong)
    assert found.verdict is Verdict.REGRESSION
    assert "was wrong before the message came" in (found.reason or "")
