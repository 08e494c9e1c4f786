"""Names of cases are addresses: one case, one name, and what a user types finds it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci import cases
from ci.errors import UsageError
from ci.matrix import CASE_KEYS, CaseKey, Job, Scalar, Where, load

JOBS = load(Path(__file__).parents[2] / "matrix.yaml").jobs


def value_of(key: CaseKey) -> st.SearchStrategy[Scalar]:
    """Any value that a case may have for this key."""
    found: list[st.SearchStrategy[Scalar]] = []
    for known in key.allowed:
        if known == "integer":
            found.append(st.integers(1, 64))
        elif known == "number":
            found.append(st.sampled_from([0, 0.04, 0.5, 0.75, 1, 2.5, 1e-3, 100]))
        else:
            found.append(st.just(known))
    return st.one_of(found)


@st.composite
def resolved(draw: st.DrawFn, job: Job) -> dict[str, Scalar]:
    """Any case of a job."""
    return cases.resolve(job, {name: draw(value_of(key)) for name, key in job.keys.items()})


@pytest.mark.parametrize("job_id", JOBS)
@given(data=st.data())
def test_two_cases_never_share_a_name(job_id: str, data: st.DataObject) -> None:
    job = JOBS[job_id]
    one, other = data.draw(resolved(job)), data.draw(resolved(job))
    assert (cases.name(job, one) == cases.name(job, other)) == (one == other)


@pytest.mark.parametrize("job_id", JOBS)
@given(data=st.data())
def test_a_case_typed_in_full_is_found_and_nothing_else(job_id: str, data: st.DataObject) -> None:
    job = JOBS[job_id]
    case, other = data.draw(resolved(job)), data.draw(resolved(job))
    typed = ",".join(f"{key}={cases.text(value)}" for key, value in case.items())
    wanted = cases.parse_filter(typed, {job_id: job})[job_id]
    assert wanted == case
    assert cases.matches(wanted, case)
    assert cases.matches(wanted, other) == (case == other)


@pytest.mark.parametrize("job_id", JOBS)
@given(data=st.data())
def test_a_name_leaves_out_what_is_at_its_default(job_id: str, data: st.DataObject) -> None:
    job = JOBS[job_id]
    case = data.draw(resolved(job))
    shown = cases.shown(job, case)
    assert cases.resolve(job, {key: case[key] for key in shown}) == case
    assert list(shown) == [key for key in CASE_KEYS if key in shown]


def test_a_pattern_is_a_product_in_the_contracts_order() -> None:
    pattern: Where = {"dtype": ("bf16", "fp32"), "zero_stage": (0, 1), "beta": 0}
    assert [tuple(case.items()) for case in cases.expand(pattern)] == [
        (("zero_stage", stage), ("dtype", dtype), ("beta", 0))
        for stage, dtype in itertools.product((0, 1), ("bf16", "fp32"))
    ]


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ({}, True),
        ({"zero_stage": 0}, True),
        ({"zero_stage": [1, 2]}, False),
        ({"zero_stage": (0, 2)}, True),
        ({"zero_stage": "not-0"}, False),
        ({"zero_stage": "not-1", "optimizer": "not-fused"}, True),
        ({"optimizer": "not-adamw"}, False),
        ({"zero_stage": ("not-0", 0)}, True),
        ({"frozen": False}, True),
        ({"frozen": 0}, False),  # true and 1, false and 0 are different values
        ({"zero_stage": False}, False),
        ({"frozen": "not-true"}, True),
        ({"experts": False}, False),  # a key that the case does not have never matches
        ({"experts": "not-true"}, False),
        ({"beta": 0.04}, True),
    ],
)
def test_what_where_matches(where: dict[str, Scalar | tuple[Scalar, ...]], holds: bool) -> None:
    case: cases.Case = {"zero_stage": 0, "optimizer": "adamw", "frozen": False, "beta": 0.04}
    wanted = {key: tuple(value) if isinstance(value, list) else value for key, value in where.items()}
    assert cases.matches(wanted, case) is holds


@pytest.mark.parametrize(
    ("key", "value", "written"),
    [
        ("zero_stage", 3, "zero3"),
        ("dtype", "bf16", "bf16"),
        ("gradient_accumulation_steps", 4, "gas4"),
        ("gradient_clipping", 0.75, "clip-0.75"),
        ("world_size", 4, "ws4"),
        ("loss_scale", "static-128", "scale-static-128"),
        ("checkpointing", "reentrant", "ckpt-reentrant"),
        ("init", "outside", "init-outside"),
        ("num_iterations", 2, "iter2"),
        ("beta", 0.04, "beta0.04"),
        ("lora_b", "zero", "b-zero"),
        ("experts", True, "experts"),
        ("frozen", False, "no-frozen"),
        ("path", "engine", "engine"),
    ],
)
def test_how_a_value_is_written(key: str, value: Scalar, written: str) -> None:
    assert cases.part(key, value) == written


def test_a_default_may_depend_on_an_earlier_key() -> None:
    job = JOBS["grpo-lora"]
    base: dict[str, Scalar] = {"zero_stage": 0, "dtype": "bf16"}
    assert cases.resolve(job, base)["optimizer"] == "sgd"
    assert cases.resolve(job, {**base, "trainer": "trl"})["optimizer"] == "adamw"
    assert cases.name(job, cases.resolve(job, {**base, "trainer": "trl", "optimizer": "sgd"})) == "trl-zero0-bf16-sgd"


def test_a_key_without_a_default_must_be_given() -> None:
    with pytest.raises(KeyError, match="dtype"):
        cases.resolve(JOBS["grpo-lora"], {"zero_stage": 0})


@pytest.mark.parametrize(
    ("typed", "key", "value"),
    [
        ("gradient_clipping=0.50", "gradient_clipping", 0.5),
        ("gradient_clipping=1.0", "gradient_clipping", 1),
        ("gradient_clipping=1e-1", "gradient_clipping", 0.1),
        ("gradient_clipping=unset", "gradient_clipping", "unset"),
        (" zero_stage=3 ", "zero_stage", 3),
        ("beta=0.0", "beta", 0),
    ],
)
def test_a_value_has_one_meaning_however_it_is_written(typed: str, key: str, value: Scalar) -> None:
    found = cases.parse_filter(typed, JOBS)["grpo-lora"]
    assert found == {key: value}
    assert type(found[key]) is type(value)  # 1.0 and 1 are equal in Python and not in JSON


def test_a_filter_holds_for_the_jobs_that_have_all_its_keys() -> None:
    assert set(cases.parse_filter("zero_stage=2", JOBS)) == set(JOBS)
    assert set(cases.parse_filter("zero_stage=2,user_code=plain", JOBS)) == {"zero3-custom-adapter"}
    assert cases.parse_filter("frozen=true", JOBS) == {"zero3-custom-adapter": {"frozen": True}}


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("zero_stgae=1", "unknown case key 'zero_stgae'; did you mean zero_stage?"),
        ("user_code=keepalive-afte", "unknown value 'keepalive-afte' of user_code; did you mean keepalive-after?"),
        ("zero_stage=4", "unknown value '4' of zero_stage"),
        ("zero_stage=true", "unknown value 'true' of zero_stage"),
        ("gradient_accumulation_steps=0", "unknown value '0'"),
        ("gradient_clipping=nan", "unknown value 'nan'"),
        ("gradient_clipping=number", "unknown value 'number'"),
        ("gradient_clipping=-1", "unknown value '-1'"),
        ("zero_stage", "expected key=value"),
        ("zero_stage=", "expected key=value"),
        ("zero_stage=1,,dtype=bf16", "expected key=value"),
        ("zero_stage=1,zero_stage=2", "given twice; repeat --case"),
        ("trainer=trl,user_code=plain", "no job has all of these"),
        ("user_code=plain,dtype=fp16", "no job has all of these"),
    ],
)
def test_a_wrong_filter_is_answered_with_the_nearest_match(typed: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        cases.parse_filter(typed, JOBS)
    assert says in caught.value.message
