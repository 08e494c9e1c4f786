"""What a drawn cell shows: refusals, what the ledger knows of other jobs' cases, and failures with their signature."""

from __future__ import annotations

import math

import pytest

from ci.evidence import ExceptionRecord
from ci.matrix import Defect, Scalar
from ci.plan import Cell
from ci.sweep.signature import factor, outcome, refused, views
from tests.jobs import evidence as jobs
from tests.unit import synthetic
from tests.unit.synthetic import Faults

CASE: dict[str, Scalar] = {
    "zero_stage": 0,
    "dtype": "bf16",
    "gradient_accumulation_steps": 1,
    "gradient_clipping": "unset",
    "optimizer": "sgd",
    "world_size": 2,
    "loss_scale": "none",
    "parameters": "plain",
}


def cell(**changes: Scalar) -> Cell:
    return synthetic.cell_of("engine-sweep", {**CASE, **changes})


def entry(check: str = "reported_norm", /, **where: Scalar) -> Defect:
    return Defect.model_validate(
        {
            "id": f"{check}-doubled",
            "title": "doubled",
            "upstream": [],
            "where": where,
            "affects": {"deepspeed": ">=0.17"},
            "symptom": {check: {"times": 2.0}},
            "advice": "none",
        }
    )


def test_a_clean_cell_is_ok() -> None:
    assert outcome(cell(), synthetic.evidence(cell()), synthetic.matrix()).kind == "ok"


def test_an_entry_of_another_job_claims_the_same_configuration_here() -> None:
    defect = entry(job="grpo-lora", trainer="engine", zero_stage=0, dtype="bf16")
    found = outcome(cell(), synthetic.evidence(cell(), faults=Faults([defect])), synthetic.matrix([defect]))
    assert (found.kind, found.entries) == ("known", (defect.id,))


@pytest.mark.parametrize(
    "where",
    [{"zero_stage": 1}, {"trainer": "trl"}, {"job": "fp16-optimizers", "zero_stage": 0}, {"num_iterations": 2}],
)
def test_an_entry_that_would_not_claim_it_there_does_not_claim_it_here(where: dict[str, Scalar]) -> None:
    """An entry of the fp16 job leaves the dtype out: its job has no other."""
    defect = entry("reported_norm", **where)
    found = outcome(cell(), synthetic.evidence(cell(), faults=Faults([defect])), synthetic.matrix([defect]))
    assert (found.kind, found.signature) == ("failure", frozenset({"reported_norm x 2^1"}))


def test_what_the_ledger_explains_is_no_part_of_the_signature() -> None:
    known, new = entry(job="grpo-lora", zero_stage=0), entry("gradient_used", zero_stage=3)
    found = outcome(cell(), synthetic.evidence(cell(), faults=Faults([known, new])), synthetic.matrix([known, new]))
    assert (found.kind, found.signature) == ("failure", frozenset({"gradient_used x 2^1"}))


def test_a_symptom_that_moved_is_a_failure_again() -> None:
    defect = entry(job="grpo-lora", zero_stage=0)
    faults = Faults([defect], moved={"reported_norm": 0.1})
    found = outcome(cell(), synthetic.evidence(cell(), faults=faults), synthetic.matrix([defect]))
    assert (found.kind, found.signature) == ("failure", frozenset({"reported_norm x another"}))


def test_an_exception_is_known_by_its_type_its_phase_and_its_words_without_numbers() -> None:
    recorded = synthetic.recorded(cell(), "0.19.8", Faults(raises="3 != 4 cannot be"))
    found = outcome(cell(), synthetic.read(recorded), synthetic.matrix())
    assert (found.kind, found.signature) == ("failure", frozenset({"RuntimeError in backward: N != N cannot be"}))


def test_evidence_that_is_not_whole_is_a_failure() -> None:
    recorded = jobs.Evidence("x", {}, "cpu", "cpu", 2, problem="rank 1 hung for 120 s")
    found = outcome(cell(), synthetic.read(recorded), synthetic.matrix())
    assert (found.kind, found.signature) == ("failure", frozenset({"no whole evidence: rank N hung for N s"}))


@pytest.mark.parametrize(
    ("kind", "message", "where", "refusal"),
    [
        ("NotImplementedError", "unsupported mix of model_dtype and grad_accum_dtype", "setup", True),
        ("AssertionError", "zero stage 1 requires an optimizer", "setup", True),
        ("AssertionError", "", "setup", False),
        ("AttributeError", "'NoneType' object has no attribute 'numel'", "setup", False),
        ("NotImplementedError", "unsupported mix of model_dtype and grad_accum_dtype", "step, step 1", False),
    ],
)
def test_a_refusal_says_at_set_up_and_in_words_that_this_is_not_done(
    kind: str, message: str, where: str, refusal: bool
) -> None:
    assert refused(ExceptionRecord(type=kind, message=message, where=where)) is refusal


@pytest.mark.parametrize(
    ("value", "expected", "word"),
    [
        (65536.0, 1.0, "2^16"),
        (0.5, 1.0, "2^-1"),
        (0.0, 1.0, "0"),
        (None, 1.0, "None"),
        (math.inf, 1.0, "inf"),
        (0.7, 1.0, "another"),
        (1.01, 1.0, "another"),
    ],
)
def test_a_factor_is_a_power_of_two_or_another(value: float | None, expected: float, word: str) -> None:
    assert factor(value, expected) == word


def test_fp16_configurations_are_also_cases_of_the_fp16_job() -> None:
    found = dict(views(cell(dtype="fp16", loss_scale="overflow")))
    assert found["fp16-optimizers"]["optimizer"] == "unfused"
    assert "grpo-lora" not in found
    assert dict(views(cell()))["grpo-lora"]["trainer"] == "engine"
    stage3 = dict(views(cell(zero_stage=3, parameters="used-in-some-steps")))
    assert stage3["zero3-custom-adapter"]["user_code"] == "used-in-some-steps"
