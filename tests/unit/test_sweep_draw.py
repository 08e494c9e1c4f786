"""What the sweep draws: every pair that can meet, nothing excluded, the same for the same seed; and what is simpler."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path

from ci import cases
from ci.matrix import Job, Scalar, load
from ci.sweep import draw

ROOT = Path(__file__).parents[2]


@functools.cache
def job() -> Job:
    return load(ROOT / "matrix.yaml").jobs["engine-sweep"]


@functools.cache
def array() -> tuple[dict[str, Scalar], ...]:
    return tuple(draw.covering(job(), random.Random(0)))


def case(**given: Scalar) -> dict[str, Scalar]:
    return cases.resolve(job(), {"zero_stage": 2, "dtype": "fp32", **given})


def name(values: dict[str, Scalar]) -> str:
    return cases.name(job(), values)


def test_no_drawn_case_is_excluded_and_every_key_has_a_value_of_its_own() -> None:
    for each in [*array(), *itertools.islice(draw.draws(job(), 1), 100)]:
        assert draw.allowed(job(), each)
        assert list(each) == list(job().ordered_keys)
        assert all(job().keys[key].accepts(value) for key, value in each.items())


def test_the_array_covers_every_pair_that_random_cases_have() -> None:
    covered = set().union(*(draw.pairs(each) for each in array()))
    rng = random.Random(5)
    for _ in range(300):
        drawn = draw.complete(job(), {}, rng)
        assert drawn is not None
        assert draw.pairs(drawn) <= covered


def test_every_value_of_every_key_is_drawn() -> None:
    for key, values in draw.domain(job()).items():
        assert {cases.text(each[key]) for each in array()} == {cases.text(value) for value in values}


def test_the_same_seed_draws_the_same_and_none_twice() -> None:
    first = [name(each) for each in itertools.islice(draw.draws(job(), 3), 80)]
    assert first == [name(each) for each in itertools.islice(draw.draws(job(), 3), 80)]
    assert len(set(first)) == len(first)
    assert first != [name(each) for each in itertools.islice(draw.draws(job(), 4), 80)]


def test_simpler_changes_one_key_to_its_default_or_to_a_smaller_number() -> None:
    found = draw.simpler(job(), case(zero_stage=1, gradient_accumulation_steps=4, parameters="tied"))
    assert [name(each) for each in found] == [
        "zero0-fp32-gas4-params-tied",
        "zero1-fp32-params-tied",
        "zero1-fp32-gas2-params-tied",
        "zero1-fp32-gas4",
    ]
    assert draw.simpler(job(), case(zero_stage=0)) == []


def test_simpler_takes_a_key_along_that_the_simpler_value_forbids() -> None:
    fp16 = case(dtype="fp16", loss_scale="dynamic-window2")
    names = [name(each) for each in draw.simpler(job(), fp16)]
    assert "zero2-fp32" in names
    assert "zero2-bf16" in names
    assert "zero2-fp16" in names
