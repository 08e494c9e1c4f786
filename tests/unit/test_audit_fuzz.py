"""Readers of training logs over input that nobody wrote: no traceback, nothing lost, nothing invented."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ci.audit import findings, fold
from ci.audit.read import of_chunks
from ci.audit.records import Record, Step, Unread
from tests.unit.fuzz import EXAMPLES

numbers = st.floats(width=32) | st.just(0.0)
steps = st.lists(st.builds(Step, st.integers(1, 10**6), numbers, numbers), max_size=6)

NOISE = (
    "  5%|▌         | 5/100 [00:02<03:20]",
    "训练日志没有",
    "[INFO:swift] {a} }{",
    "",
    "\x1b[2K",
    "x" * 300,
    "{'",
    '{"a',
)
"""Lines between records; the last two would swallow a record that follows, were they not given up in time."""

FRAGMENTS = (
    *(
        b"{",
        b"}",
        b"'",
        b'"',
        b"{'loss': 1.0",
        b'{"loss": 1.0',
        b", 'grad_norm': ",
        b"nan",
        b"1e999",
        b"tensor(",
        b"\x1b[",
    ),
    *(b"\r", b"\n", b"\\", b"[", b'{"log_history": [', b"loss scale", b" grad norm: ", b"Skipping step", b"OVERFLOW!"),
    *(
        b"iteration 99999999999999999999999",
        b"DeepSpeed info: version=",
        b"0.17.6",
        b"==",
        b"Error: ",
        b"\xff\xfe",
        b"16",
    ),
    *(b"'step': '5/9'", b'"step": 5', b"stage", b"clipping ..... 1.0", b"Reducing dynamic loss scale from 4e+e to 2."),
)
"""What readers look for, in pieces."""

bytes_of_logs = st.lists(st.sampled_from(FRAGMENTS) | st.binary(max_size=8), max_size=30).map(b"".join)


def read(data: bytes, size: int | None = None) -> list[Record]:
    chunks = [data[start : start + size] for start in range(0, len(data), size)] if size else [data]
    return list(of_chunks(chunks[0] if chunks else b"", chunks[1:]))


def same(found: Sequence[Record], expected: Sequence[Step]) -> bool:
    """Equality for which nan is nan."""
    return list(map(repr, found)) == list(map(repr, expected))


def as_dict(step: Step) -> str:
    return f"{{'loss': {step.loss}, 'grad_norm': {step.grad_norm}, 'step': {step.number}, 'note': 'a, b'}}"


def as_json(step: Step) -> str:
    return json.dumps({"loss": step.loss, "grad_norm": step.grad_norm, "step": step.number, "note": "}{ 损失"})


def as_state(found: list[Step], indent: int | None = 2) -> str:
    return json.dumps(
        {"best": None, "log_history": [json.loads(as_json(each)) for each in found], "x": {}}, indent=indent
    )


@settings(max_examples=EXAMPLES)
@given(data=bytes_of_logs, size=st.integers(1, 64))
@example(data=b"{'loss': 1" + b"\n" * 3, size=64)
@example(data=b'{"loss": 1' * 200, size=7)
def test_any_bytes_are_read_folded_and_judged(data: bytes, size: int) -> None:
    for found in (read(data), read(data, size)):
        run = fold.fold(found)
        assert all(finding.text for finding in findings.of_run(run, 0, "log", None))
    one, other, comparison = fold.compare(read(data), read(data, size))
    assert comparison.pairs <= min(one.steps, other.steps)
    assert all(finding.text for finding in findings.of_comparison(comparison, ("a", "b")))


@settings(max_examples=EXAMPLES)
@given(found=steps, noise=st.lists(st.sampled_from(NOISE[:-2]), min_size=7, max_size=7), size=st.integers(30, 200))
def test_records_are_found_among_anything_else(found: list[Step], noise: list[str], size: int) -> None:
    for form in (as_dict, as_json):
        rows = [line for each, before in zip(found, noise, strict=False) for line in (before, form(each))]
        data = "\n".join(["first line", *rows, noise[-1]]).encode()
        assert same(read(data), found)
        assert same(read(data, size), found), "chunks"
    for indent in (None, 2):
        data = as_state(found, indent).encode()
        assert same(read(data), found)
        assert same(read(data, size), found), "chunks"


@settings(max_examples=EXAMPLES)
@given(found=steps.filter(bool), broken=st.sampled_from(NOISE[-2:]))
def test_a_beginning_without_an_end_costs_no_other_record(found: list[Step], broken: str) -> None:
    for form in (as_dict, as_json):
        data = "\n".join(["first line", broken, *map(form, found)]).encode()
        assert same([each for each in read(data) if not isinstance(each, Unread)], found)


@settings(max_examples=EXAMPLES)
@given(found=steps.filter(bool), cut=st.integers(0, 2000))
def test_a_log_cut_short_is_a_shorter_log(found: list[Step], cut: int) -> None:
    """No number is taken for another because its last digits are missing."""
    dicts = "first line\n" + "\n".join(map(as_dict, found))
    for text in (dicts, "\n".join(map(as_json, found)) + "\n", as_state(found)):
        read_back = read(text.encode()[:cut])
        whole = [each for each in read_back if not isinstance(each, Unread)]
        assert len(read_back) - len(whole) <= 1
        assert same(whole, found[: len(whole)])


@settings(max_examples=EXAMPLES)
@given(norms=st.lists(st.floats(1e-30, 1e30), min_size=1, max_size=20), power=st.integers(1, 40))
def test_norms_scaled_by_a_power_of_two_are_seen(norms: list[float], power: int) -> None:
    left = [Step(number, 1.0, math.ldexp(norm, power)) for number, norm in enumerate(norms)]
    right = [Step(number, 2.0, norm) for number, norm in enumerate(norms)]
    for pair, names in (((left, right), ("a", "b")), ((right, left), ("b", "a"))):
        *_, comparison = fold.compare(*pair)
        (finding,) = findings.of_comparison(comparison, names)
        assert finding.text.startswith(f"norms apart by 2^{power}: a reports ")
