"""Verdicts and their precedence, check by check, on made-up evidence."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from ci.checks import gradient_error, predict, relative
from ci.entries import Backend, Devices
from ci.evidence import Evidence, Gram, Reading
from ci.judge import judge_cell, judge_run
from ci.matrix import Defect
from ci.runrecord import CellRecord, Check, SavedPlan, Verdict
from tests.jobs import evidence as jobs
from tests.jobs.evidence import Probe
from tests.unit import synthetic
from tests.unit.synthetic import TOLERANCE, Faults

CELL = synthetic.cell(zero_stage=0, dtype="bf16", gradient_accumulation_steps=4)


def defect(id_: str = "made-up-defect", affects: str = ">=0.17.6,<0.18.3", **fields: Any) -> Defect:
    given: dict[str, Any] = {
        "title": "a defect",
        "upstream": (),
        "where": {"zero_stage": 0},
        "symptom": {"reported_norm": {"times": "loss_scale"}},
        "advice": "update",
    }
    return Defect(id=id_, affects={"deepspeed": affects}, **(given | fields))


NORM = defect()
FROZEN = defect("frozen", symptom={"gradient_used": {"times": "1/loss_scale"}})
CRASH = defect("crash", symptom={"raises": r"got \[0\]"})


def judged(
    *ledger: Defect,
    faults: Faults | None = None,
    deepspeed: str = "0.17.6",
    step: dict[str, Any] | None = None,
    **fields: Any,
) -> CellRecord:
    """The verdict on made-up evidence; `step` replaces fields of every step, `fields` those of the evidence."""
    record = synthetic.recorded(CELL, deepspeed, faults)
    steps = tuple(dataclasses.replace(each, **(step or {})) for each in record.steps)
    record = dataclasses.replace(record, **({"steps": steps} | fields))
    return judge_cell(CELL, synthetic.read(record), synthetic.matrix(ledger))


def check(cell: CellRecord, name: str, position: int = 0) -> Check:
    return next(found for found in cell.steps[position].checks if found.name == name)


def test_clean_evidence_that_nothing_claims_is_ok_and_every_check_stands_in_the_record() -> None:
    cell = judged()
    assert (cell.verdict, cell.reason, cell.defects) == (Verdict.OK, None, ())
    for step in cell.steps:
        assert [found.name for found in step.checks] == list(jobs.CHECKS)
        assert all(found.ok for found in step.checks)


def test_the_defect_that_shows_is_known_and_its_prediction_stands_beside_the_check() -> None:
    cell = judged(NORM, faults=Faults([NORM]))
    assert (cell.verdict, cell.defects, cell.fixed) == (Verdict.KNOWN_DEFECT, (NORM.id,), ())
    norm = check(cell, "reported_norm")
    assert norm.ok is False and norm.defects == (NORM.id,)
    assert norm.value == pytest.approx(65536 * (norm.expected or 0))
    assert norm.predicted == pytest.approx(norm.value)


def test_a_defect_that_nobody_claims_is_a_regression() -> None:
    cell = judged(faults=Faults([NORM]))
    assert cell.verdict is Verdict.REGRESSION
    assert cell.reason and cell.reason.startswith("step 1 reported_norm: found ")


def test_a_claiming_entry_without_its_symptom_is_fixed_upstream() -> None:
    cell = judged(NORM)
    assert (cell.verdict, cell.fixed, cell.defects) == (Verdict.FIXED_UPSTREAM, (NORM.id,), ())
    assert cell.reason == (
        f"{NORM.id} claims this cell (deepspeed >=0.17.6,<0.18.3) and its symptom is not there: move its bound"
    )


@pytest.mark.parametrize(
    ("deepspeed", "verdict"),
    [
        ("0.17.5", Verdict.REGRESSION),
        ("0.17.6", Verdict.KNOWN_DEFECT),
        ("0.18.2", Verdict.KNOWN_DEFECT),
        ("0.18.3", Verdict.REGRESSION),
        ("0.18.0rc1", Verdict.KNOWN_DEFECT),
        ("0.18.2+local.build", Verdict.KNOWN_DEFECT),
    ],
)
def test_the_bounds_of_an_entry_are_versions_not_text(deepspeed: str, verdict: Verdict) -> None:
    assert judged(NORM, faults=Faults([NORM]), deepspeed=deepspeed).verdict is verdict


def test_an_entry_claims_by_job_and_by_negation() -> None:
    for where, claimed in [
        ({"job": "grpo-lora"}, True),
        ({"job": "fp16-optimizers"}, False),
        ({"dtype": "not-fp32"}, True),
        ({"dtype": "not-bf16"}, False),
        ({"optimizer": "not-fused"}, False),  # the case has no such key
        ({"gradient_accumulation_steps": (1, 4)}, True),
    ]:
        entry = defect(where=where)
        expected = Verdict.KNOWN_DEFECT if claimed else Verdict.REGRESSION
        assert judged(entry, faults=Faults([entry])).verdict is expected, where


def test_two_defects_of_one_check_compose_equals_first_then_times() -> None:
    accumulated = defect("accumulated", symptom={"reported_norm": {"equals": "all_steps_so_far"}})
    cell = judged(NORM, accumulated, faults=Faults([NORM, accumulated]))
    assert (cell.verdict, cell.defects) == (Verdict.KNOWN_DEFECT, (NORM.id, "accumulated"))
    alone = judged(accumulated, faults=Faults([NORM, accumulated]))
    assert alone.verdict is Verdict.REGRESSION


def test_of_two_claiming_entries_the_one_that_does_not_show_is_fixed() -> None:
    cell = judged(NORM, FROZEN, faults=Faults([FROZEN]))
    assert (cell.verdict, cell.defects, cell.fixed) == (Verdict.FIXED_UPSTREAM, ("frozen",), (NORM.id,))


def test_entries_that_cannot_be_told_apart_are_said_to_be() -> None:
    one = defect("one", symptom={"gradient_used": {"equals": "unclipped"}})
    cell = judged(one, faults=Faults())  # nothing is clipped: unclipped is the truth
    assert cell.verdict is Verdict.FIXED_UPSTREAM and "same with and without" in (cell.reason or "")


def test_entries_that_contradict_each_other_explain_nothing_together() -> None:
    last = defect("last", symptom={"reported_norm": {"equals": "last_micro_batch"}})
    previous = defect("previous", symptom={"reported_norm": {"equals": "previous_step"}})
    cell = judged(last, previous, faults=Faults([last]))
    assert (cell.verdict, cell.defects, cell.fixed) == (Verdict.FIXED_UPSTREAM, ("last",), ("previous",))
    effects = [last.symptom.effects["reported_norm"], previous.symptom.effects["reported_norm"]]
    for shown, alone in zip((last, previous), effects, strict=True):
        step = synthetic.evidence(CELL, faults=Faults([shown])).steps[0]
        assert predict("reported_norm", [alone], step, TOLERANCE).ok
        assert not predict("reported_norm", effects, step, TOLERANCE).ok


def test_the_largest_set_that_explains_is_taken() -> None:
    """Two defects that cancel: right numbers, and right only together (correcting one makes the other wrong)."""
    doubled = defect("doubled", symptom={"gradient_used": {"times": 2.0}})
    halved = defect("halved", symptom={"gradient_used": {"times": 0.5}})
    cell = judged(doubled, halved)
    assert (cell.verdict, cell.defects) == (Verdict.KNOWN_DEFECT, ("doubled", "halved"))


def test_a_symptom_that_shows_in_one_step_too_few_is_a_regression() -> None:
    late = defect("late", symptom={"reported_norm": {"times": "loss_scale"}, "steps": "from:2"})
    first = defect("first", symptom={"reported_norm": {"times": "loss_scale"}, "steps": "first"})
    assert judged(late, faults=Faults([late])).verdict is Verdict.KNOWN_DEFECT
    assert judged(first, faults=Faults([first])).verdict is Verdict.KNOWN_DEFECT
    assert judged(late, faults=Faults([first])).verdict is Verdict.REGRESSION
    assert judged(first, faults=Faults([late])).verdict is Verdict.REGRESSION
    assert judged(late, faults=Faults([NORM])).verdict is Verdict.REGRESSION


def test_a_scale_raise_symptom_shows_on_the_steps_that_raise_the_scale_only() -> None:
    halved = defect(
        "halved",
        symptom={"gradient_used": {"equals": "unclipped", "times": "scale_before/scale_after"}, "steps": "scale_raise"},
    )
    always = halved.model_copy(update={"symptom": halved.symptom.model_copy(update={"steps": "all"})})
    cell = judged(halved, faults=Faults([halved], dynamic=True))
    assert cell.verdict is Verdict.KNOWN_DEFECT
    assert [check(cell, "gradient_used", position).ok for position in range(3)] == [True, False, True]
    assert judged(halved, faults=Faults([always], dynamic=True)).verdict is Verdict.KNOWN_DEFECT  # factor 1 elsewhere
    assert judged(halved, faults=Faults(dynamic=True)).verdict is Verdict.FIXED_UPSTREAM


def test_clipping_between_the_halved_and_the_true_norm_is_unclipped_times_the_ratio() -> None:
    halved = defect("halved", symptom={"gradient_used": {"times": "scale_before/scale_after"}, "steps": "scale_raise"})
    unclipped = defect(
        "unclipped",
        symptom={"gradient_used": {"equals": "unclipped", "times": "scale_before/scale_after"}, "steps": "scale_raise"},
    )
    faults = Faults([unclipped], clip=0.5, dynamic=True)
    assert judged(unclipped, faults=faults).verdict is Verdict.KNOWN_DEFECT
    assert judged(halved, faults=faults).verdict is Verdict.REGRESSION


def test_none_and_inf_are_symptoms_of_their_own() -> None:
    for value, name in [(None, "none"), (math.inf, "inf")]:
        entry = defect("odd", symptom={"reported_norm": {"equals": name}})
        cell = judged(entry, step={"grad_norm_reported": (value, value)})
        assert cell.verdict is Verdict.KNOWN_DEFECT
        assert judged(step={"grad_norm_reported": (value, value)}).verdict is Verdict.REGRESSION
        assert judged(entry, step={"grad_norm_reported": (value, 1.0)}).verdict is Verdict.REGRESSION
    assert check(judged(step={"grad_norm_reported": (None, None)}), "ranks_agree").ok is None


def test_an_alternative_that_a_step_does_not_record_changes_nothing_there() -> None:
    stale = defect("stale", symptom={"gradient_used": {"equals": "previous_step"}})
    record = synthetic.recorded(CELL, "0.17.6", Faults([stale]))
    clean = synthetic.recorded(CELL, "0.17.6").steps[0]
    without = {name: value for name, value in clean.alternatives.items() if name != "previous_step"}
    first = dataclasses.replace(clean, alternatives=without)
    assert judged(stale, steps=(first, *record.steps[1:])).verdict is Verdict.KNOWN_DEFECT
    lost = dataclasses.replace(record.steps[0], alternatives=without)
    assert judged(stale, steps=(lost, *record.steps[1:])).verdict is Verdict.REGRESSION


def test_a_number_may_be_a_factor() -> None:
    entry = defect(symptom={"reported_norm": {"times": 0.5}})
    other = defect(symptom={"reported_norm": {"times": 0.51}})
    assert judged(entry, faults=Faults([entry])).verdict is Verdict.KNOWN_DEFECT
    assert judged(other, faults=Faults([entry])).verdict is Verdict.REGRESSION


def test_a_factor_of_a_scale_that_the_step_does_not_have_explains_nothing() -> None:
    step = {"loss_scale_before": None, "not_judged": {"loss_scale": "bf16 has no loss scale"}}
    assert judged(NORM, faults=Faults([NORM]), step=step).verdict is Verdict.REGRESSION


NAN = math.nan
WRONG: dict[str, dict[str, Any]] = {
    "forward": {"logprob_error": 2 * TOLERANCE},
    "forward nan": {"loss_error": NAN},
    "reported_norm": {"grad_norm_reported": (1e9, 1e9)},
    "reported_norm nan": {"grad_norm_reported": (NAN, NAN)},
    "reported_norm none": {"grad_norm_reported": (None, None)},
    "reported_norm one rank": {"grad_norm_reported": (None, 1.0)},
    "gradient_used": {"gradient_error": 2 * TOLERANCE},
    "gradient_used nan": {"gradient_error": NAN},
    "gradient_used norm": {"grad_norm_used": 1e9},
    "gradient_used zero": {"grad_norm_used": 0.0},
    "update": {"update_error": 2e-6},
    "update nan": {"update_error": NAN},
    "loss_scale": {"loss_scale_after": 32768.0},
    "loss_scale none": {"loss_scale_after": None},
    "consistency": {"consistency": ("layer.weight",)},
}


@pytest.mark.parametrize("name", WRONG)
def test_each_check_that_fails_alone_is_a_regression_that_names_it(name: str) -> None:
    cell = judged(step=WRONG[name])
    assert cell.verdict is Verdict.REGRESSION
    assert cell.reason and f" {name.split()[0]}: " in cell.reason
    failing = {found.name for step in cell.steps for found in step.checks if found.ok is False}
    assert name.split()[0] in failing and failing <= {name.split()[0], "ranks_agree"}


def test_ranks_that_disagree_fail_even_within_the_norms_tolerance() -> None:
    norm = synthetic.step(0, Faults()).grad_norm_true or 0.0
    record = synthetic.recorded(CELL, "0.19.8")
    steps = (dataclasses.replace(record.steps[0], grad_norm_reported=(norm, norm * (1 + 1e-5))), *record.steps[1:])
    cell = judged(steps=steps)
    assert cell.verdict is Verdict.REGRESSION
    assert check(cell, "reported_norm").ok and check(cell, "ranks_agree").ok is False


def test_one_rank_has_nobody_to_agree_with() -> None:
    norm = synthetic.step(0, Faults()).grad_norm_true
    assert (
        check(judged(step={"grad_norm_reported": (norm,)}), "ranks_agree").reason,
        check(judged(step={"grad_norm_reported": (norm,)}), "ranks_agree").ok,
    ) == ("one rank", None)


@pytest.mark.parametrize("share", [0.99, 1.01])
def test_tolerances_are_the_boundary(share: float) -> None:
    verdict = Verdict.OK if share < 1 else Verdict.REGRESSION
    assert judged(faults=Faults(moved={"reported_norm": share * TOLERANCE})).verdict is verdict
    assert judged(step={"logprob_error": share * TOLERANCE}).verdict is verdict
    assert judged(step={"gradient_error": share * TOLERANCE}).verdict is verdict
    assert judged(step={"update_error": share * 1e-6}).verdict is verdict


MISSING: dict[str, dict[str, Any]] = {
    "forward": {"loss_error": None, "logprob_error": None},
    "reported_norm": {"grad_norm_reported": ()},
    "reported_norm true": {"grad_norm_true": None},
    "reported_norm reference": {"grad_norm_true": NAN},
    "gradient_used": {"gradient_error": None},
    "gradient_used used": {"grad_norm_used": None},
    "gradient_used wanted": {"grad_norm_wanted": None},
    "gradient_used reference": {"grad_norm_wanted": math.inf},
    "update": {"update_error": None},
    "loss_scale": {"loss_scale_expected": None},
}


@pytest.mark.parametrize("name", MISSING)
def test_a_check_without_numbers_is_an_error_unless_the_step_declares_why(name: str) -> None:
    cell = judged(step=MISSING[name])
    assert cell.verdict is Verdict.ERROR
    assert cell.reason and cell.reason.startswith(f"step 1 {name.split()[0]}: ")
    declared = {"reported_norm", "gradient_used"} if "grad_norm_true" in MISSING[name] else {name.split()[0]}
    also = {"ranks_agree"} if name == "reported_norm" else set()
    excused = judged(step={**MISSING[name], "not_judged": dict.fromkeys(declared | also, "overflow")})
    assert excused.verdict is Verdict.OK
    assert check(excused, name.split()[0]).reason == "overflow" and check(excused, name.split()[0]).ok is None


def test_a_case_without_a_tolerance_in_the_matrix_is_an_error() -> None:
    cell = dataclasses.replace(CELL, case={**CELL.case, "zero_stage": 4})
    found = judge_cell(cell, synthetic.evidence(cell), synthetic.matrix())
    assert found.verdict is Verdict.ERROR and "no tolerance of forward" in (found.reason or "")


def test_no_evidence_is_an_error() -> None:
    assert judge_cell(CELL, None, synthetic.matrix()).verdict is Verdict.ERROR


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"problem": "killed after 60 s"}, "killed after 60 s"),
        ({"steps_expected": 4}, "3 of 4 steps recorded"),
        ({"accelerator": "cuda"}, "ran on accelerator cuda, expected cpu"),
        ({"world_size": 1}, "ran with 1 ranks, expected 2"),
        ({"probe": Probe("cuda", "nccl", 2, ("A800",) * 2, {}, 3.0)}, "ran on accelerator cuda, expected cpu"),
    ],
)
def test_incomplete_evidence_is_an_error_before_anything_else(fields: dict[str, Any], words: str) -> None:
    cell = judged(NORM, faults=Faults([NORM], moved={"forward": 1.0}), **fields)
    assert cell.verdict is Verdict.ERROR and words in (cell.reason or "")
    assert check(cell, "forward").ok is False  # what was measured can still be read


def test_without_a_probe_a_backend_with_devices_has_shown_nothing() -> None:
    backend = Backend(
        accelerator="cpu",
        communication="gloo",
        start_method="spawn",
        devices=Devices(visible="X", tool="nvidia-smi", gpus=True),
    )
    matrix = synthetic.matrix().model_copy(update={"backends": {"cpu": backend}})
    seen = Probe("cpu", "gloo", 2, ("A800",) * 2, {"driver": "535.146.02"}, 3.0)
    for probe, verdict in ((None, Verdict.ERROR), (seen, Verdict.OK)):
        recorded = synthetic.read(dataclasses.replace(synthetic.recorded(CELL, "0.19.8"), probe=probe))
        assert judge_cell(CELL, recorded, matrix).verdict is verdict


def test_steps_out_of_order_are_an_error() -> None:
    steps = synthetic.recorded(CELL, "0.19.8").steps
    assert judged(steps=(steps[0], steps[0], steps[1])).verdict is Verdict.ERROR


def test_other_versions_than_the_stacks_pins_are_an_error() -> None:
    matrix, evidence = synthetic.matrix(), synthetic.evidence(CELL, "0.19.8")
    for pins, verdict in [
        ({"deepspeed": "0.19.8"}, Verdict.OK),
        ({"DeepSpeed": "0.19.8", "torch": "2.13+cpu"}, Verdict.OK),
        ({"torch": "2.13.0"}, Verdict.OK),
        ({"torch": "2.13.0+cu130"}, Verdict.ERROR),
        ({"deepspeed": "0.19.7"}, Verdict.ERROR),
        ({"peft": "0.17.1"}, Verdict.ERROR),
        (None, Verdict.OK),
    ]:
        assert judge_cell(CELL, evidence, matrix, pins).verdict is verdict, pins


def test_an_exception_that_an_entry_expects_is_a_known_defect() -> None:
    cell = judged(CRASH, faults=Faults(raises="expected [96], got [0]"))
    assert (cell.verdict, cell.defects) == (Verdict.KNOWN_DEFECT, ("crash",))
    assert cell.exception is not None


@pytest.mark.parametrize("steps", ["all", "first"])
@pytest.mark.parametrize("where", ["setup", "setup, rank 1"])
def test_an_exception_before_training_is_nobodys_symptom_whatever_it_says(where: str, steps: str) -> None:
    entry = defect("crash", symptom={"raises": r"got \[0\]", "steps": steps})
    record = jobs.ExceptionRecord("RuntimeError", "got [0]", where=where)
    assert judged(entry, exception=record, steps=()).verdict is Verdict.REGRESSION


@pytest.mark.parametrize(
    ("steps", "where", "explained"),
    [
        ("all", "backward", True),
        ("all", "forward, step 2, micro-batch 0", True),
        ("first", "forward, step 0, micro-batch 1", True),
        ("first", "backward, step 1, micro-batch 0", False),
        ("first", "step, step 2", False),
        ("first", "backward", False),
        ("from:2", "step, step 0", False),
        ("from:2", "step 1", True),
        ("from:2", "step, step 10", True),
        ("scale_raise", "step, step 1", False),
    ],
)
def test_an_exception_is_explained_in_the_steps_of_its_entry_only(steps: str, where: str, explained: bool) -> None:
    entry = defect("crash", symptom={"raises": r"got \[0\]", "steps": steps})
    record = jobs.ExceptionRecord("RuntimeError", "got [0]", where=where)
    verdict = judged(entry, exception=record, steps=()).verdict
    assert verdict is (Verdict.KNOWN_DEFECT if explained else Verdict.REGRESSION)


def test_any_other_exception_is_a_regression() -> None:
    for ledger in ((), (CRASH,), (NORM,), (NORM, CRASH)):
        cell = judged(*ledger, faults=Faults(raises="out of range"))
        assert cell.verdict is Verdict.REGRESSION and "out of range" in (cell.reason or "")


def test_an_expected_exception_that_does_not_come_is_fixed_upstream() -> None:
    cell = judged(CRASH)
    assert cell.verdict is Verdict.FIXED_UPSTREAM and "move its bound" in (cell.reason or "")


def test_wrong_numbers_instead_of_the_expected_exception_are_a_regression() -> None:
    assert judged(CRASH, faults=Faults([NORM])).verdict is Verdict.REGRESSION


def test_an_expected_exception_hides_defects_of_numbers_without_calling_them_fixed() -> None:
    cell = judged(CRASH, NORM, faults=Faults(raises="got [0]"))
    assert (cell.verdict, cell.defects, cell.fixed) == (Verdict.KNOWN_DEFECT, ("crash",), ())
    assert "could not be seen" in (cell.reason or "")


def test_steps_before_an_expected_exception_are_still_judged() -> None:
    steps = (synthetic.step(0, Faults([NORM])),)
    record = jobs.ExceptionRecord("RuntimeError", "got [0]")
    assert judged(CRASH, exception=record, steps=steps).verdict is Verdict.REGRESSION
    assert judged(CRASH, NORM, exception=record, steps=steps).defects == ("crash", NORM.id)


CORRECTED = defect(correction="norm_by_scale")


def test_a_correction_that_works_is_corrected_and_its_entry_claims_no_more() -> None:
    cell = judged(CORRECTED, corrections=("norm_by_scale",))
    assert (cell.verdict, cell.defects, cell.fixed) == (Verdict.CORRECTED, (), ())


def test_a_correction_that_does_not_work_is_a_regression() -> None:
    assert judged(CORRECTED, faults=Faults([CORRECTED]), corrections=("norm_by_scale",)).verdict is Verdict.REGRESSION


def test_an_entry_without_a_correction_may_still_show_beside_a_correction() -> None:
    cell = judged(CORRECTED, FROZEN, faults=Faults([FROZEN]), corrections=("norm_by_scale",))
    assert (cell.verdict, cell.defects) == (Verdict.CORRECTED, ("frozen",))


def test_a_correction_of_something_else_leaves_the_claim() -> None:
    cell = judged(CORRECTED, faults=Faults([CORRECTED]), corrections=("another",))
    assert (cell.verdict, cell.defects) == (Verdict.CORRECTED, (CORRECTED.id,))


def test_a_correction_asked_for_and_not_applied_is_an_error() -> None:
    cell = dataclasses.replace(CELL, corrections=("norm_by_scale",))
    assert judge_cell(cell, synthetic.evidence(cell), synthetic.matrix()).verdict is Verdict.ERROR


def test_a_gated_cell_is_not_run_with_its_reason_whatever_else_is_there() -> None:
    cell = dataclasses.replace(CELL, gated="needs deepspeed >=0.18")
    found = judge_cell(cell, synthetic.evidence(cell), synthetic.matrix([NORM]))
    assert (found.verdict, found.reason) == (Verdict.NOT_RUN, "needs deepspeed >=0.18")


def test_an_entrys_own_tolerance_replaces_the_checks() -> None:
    wide = defect(tolerance=0.1)
    moved = Faults([NORM], moved={"reported_norm": 0.05})
    assert judged(NORM, faults=moved).verdict is Verdict.REGRESSION
    assert judged(wide, faults=moved).verdict is Verdict.KNOWN_DEFECT


def test_a_run_is_judged_in_the_plans_order_with_installed_versions_and_the_entries_it_names() -> None:
    other = synthetic.cell(zero_stage=3, dtype="bf16")
    gated = synthetic.cell(zero_stage=1, dtype="bf16", gated="no")
    plan = SavedPlan(
        command="c",
        backend="cpu",
        runtime="venv",
        started="now",
        stacks={"made-up": {"deepspeed": "0.17.6"}},
        cells=(CELL, gated, other),
    )
    evidence = {
        each.id: synthetic.evidence(each, "0.17.6", Faults([NORM] if each is CELL else [])) for each in (other, CELL)
    }
    run = judge_run(plan, Reading(evidence, ("line 3",)), synthetic.matrix([NORM, FROZEN]), 12.0)
    assert [cell.id for cell in run.cells] == [CELL.id, gated.id, other.id]
    assert run.stacks["made-up"] == {"deepspeed": "0.17.6", "torch": "2.13.0+cpu"}
    assert run.incomplete == ("line 3",) and run.duration_s == 12.0
    # FROZEN claims the cell too and does not show: named, because a bound must move.
    assert list(run.ledger) == [NORM.id, "frozen"]
    assert run.exit_code() == 1
    unplanned: Evidence = evidence[CELL.id].model_copy(update={"pins": {"deepspeed": "0.18.0", "torch": "2.13.0+cpu"}})
    again = judge_run(plan, Reading({CELL.id: unplanned}), synthetic.matrix([NORM]))
    assert again.cells[0].verdict is Verdict.ERROR
    free = judge_run(
        plan.model_copy(update={"unchecked": ("made-up",)}), Reading({CELL.id: unplanned}), synthetic.matrix([NORM])
    )
    assert free.cells[0].verdict is Verdict.KNOWN_DEFECT


@pytest.mark.parametrize(
    ("gram", "says"),
    [((math.nan, math.nan, 1.0), "a gradient that is nan"), ((1.0, 1.0, -1.0), "squares below zero")],
)
def test_numbers_that_are_no_squares_never_fit_a_prediction(gram: tuple[float, float, float], says: str) -> None:
    assert math.isnan(gradient_error({"weight": Gram(gg=gram[0], gr=gram[1], rr=gram[2])}, 1.0)), says


def test_a_reference_below_zero_hides_no_error() -> None:
    assert relative(5.0, -1.0) == 6.0
