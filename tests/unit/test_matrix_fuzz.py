"""Whatever stands in matrix.yaml: the answer is a plan, or an error with a line number, never a traceback."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from ci.errors import CiError, MatrixError
from ci.matrix import Matrix, load
from ci.plan import Plan, Selection, make_plan
from tests.unit.fuzz import EXAMPLES, changed, odd, places
from tests.unit.small_matrix import TEXT, write

SMALL = """\
schema: 1
package_indexes: {}
backends:
  cpu: {accelerator: cpu, communication: gloo, start_method: forkserver}
stacks:
  new: {backend: cpu, about: x, python: "3.11", lock: new.txt, pins: {deepspeed: 0.19.8, trl: 1.16.0}, why: {trl: x}}
lanes:
  nightly:
    stacks: [new]
    cases: {lora: [{zero_stage: [0, 1], dtype: [bf16, fp32]}, {zero_stage: 3, dtype: bf16, gradient_clipping: 0.5}]}
    exclude: {lora: [{where: {zero_stage: 1, dtype: fp32}, reason: x}]}
jobs:
  lora:
    about: x
    requires: {deepspeed: ">=0.14.4"}
    case_requires: [{where: {zero_stage: 3}, requires: {trl: ">=0.17"}, reason: x}]
    timeout_s: 90
    keys:
      zero_stage: {values: [0, 1, 3]}
      dtype: {values: [bf16, fp32]}
      gradient_clipping: {default: unset, values: [unset, number]}
      optimizer: {default: sgd, values: [sgd, adamw], default_when: [{where: {zero_stage: 3}, value: adamw}]}
      world_size: {default: 2, values: integer}
    exclude: [{where: {zero_stage: 0, world_size: 1}, reason: x}]
tolerances:
  - stages: [0, 1]
    dtype: bf16
    gradient_accumulation_steps: [1]
    checks: {forward: {tolerance: 1, largest: 0.1, repeats: 1}}
corrections:
  fix_b: {about: x, modes: {usual: {}, raise: {raises: x}}}
defects:
  - id: a
    title: x
    upstream: [x#1]
    where: {job: lora, zero_stage: [0, 1], optimizer: not-adamw}
    affects: {deepspeed: ">=0.15,<0.20"}
    symptom: {reported_norm: {equals: previous_step, times: 2}, steps: "from:2"}
    correction: [fix_b=raise]
    advice: x
"""
"""Every section and nearly every field, small enough to be read thousands of times."""

DATA = YAML(typ="safe", pure=True).load(SMALL)
KEYS = tuple(sorted({str(place[-1]) for place in places(DATA)} | {"gpu", "current", "<<", "=", "a b", "job", "fp32"}))


def yaml_text(data: Any) -> str:
    """JSON is YAML, keeps the order of keys, and is written fast."""
    return json.dumps(data, indent=1)


def answer(text: str | bytes) -> Matrix | MatrixError:
    """What the program makes of a file with this content: nothing else may be raised."""
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder))
        path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        try:
            matrix = load(path)
        except MatrixError as error:
            assert error.line is not None and 1 <= error.line <= len(path.read_bytes().splitlines()) + 1, error.message
            assert error.found and error.expected, error.message
            return error
        for lane in matrix.lanes:
            for backend in matrix.backends:
                try:
                    plan = make_plan(matrix, Selection(lane=lane, backend=backend))
                except CiError as error:
                    assert error.message
                else:
                    assert len({cell.id for cell in plan.cells}) == len(plan.cells)
        return matrix


def test_the_small_document_is_whole() -> None:
    assert isinstance(answer(SMALL), Matrix)


@settings(max_examples=EXAMPLES * 2 // 5)
@given(changed(DATA, KEYS))
def test_values_that_do_not_belong(data: Any) -> None:
    answer(yaml_text(data))


TOKENS = (
    *(
        "&a ",
        "*a",
        "<<: *a",
        "!!set",
        "!!python/object:os.system ",
        "!!binary x",
        "!!omap",
        "2026-01-01",
        "0x1F",
        "1_000",
    ),
    *("? ", "- ", ": ", ":", "{", "}", "[", "]", "#", "|", ">", "---\n", "...\n", "%YAML 1.1\n", "\t", "'", '"', "\\"),
    *("~", "null", "yes", "1:30", ".inf", ".nan", "1e999", "\u2028", "\x85", "\ufeff", "\x07", "\n", "\n  ", ","),
)


@st.composite
def edited(draw: st.DrawFn) -> str:
    """The text with a few edits: a line moved, doubled or gone, a token put somewhere, a piece cut out."""
    lines = SMALL.splitlines(keepends=True)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        how = draw(st.sampled_from(("token", "token", "cut", "double", "remove", "move", "text")))
        column = draw(st.integers(0, len(lines[at])))
        if how == "token":
            lines[at] = lines[at][:column] + draw(st.sampled_from(TOKENS)) + lines[at][column:]
        elif how == "text":
            lines[at] = lines[at][:column] + draw(st.text(max_size=8)) + lines[at][column:]
        elif how == "cut":
            lines[at] = lines[at][:column] + lines[at][column + draw(st.integers(1, 12)) :]
        elif how == "double":
            lines.insert(at, lines[at])
        elif how == "move":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
        elif len(lines) > 1:
            del lines[at]
    return "".join(lines)


@settings(max_examples=EXAMPLES * 2 // 5)
@given(edited())
@example(SMALL.replace("reason: x", "reason: \x00", 1))
@example("a: &a [*a]\n")
@example("a: !!python/object:os.system [x]\n")
@example("a: &a {b: 1}\nc: {<<: *a, d: 2}\n")
@example("&a {b: *a}\n")
@example("? [1]\n: 2\n")
@example("schema: 1\n---\nschema: 1\n")
@example("[" * 1000)
@example("schema: 2026-01-01\n")
@example("schema: !!python/object:os.system x\n")
def test_text_that_was_edited_badly(text: str) -> None:
    answer(text)


@settings(max_examples=EXAMPLES // 5)
@given(
    st.recursive(
        odd,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)),
        max_leaves=8,
    )
)
def test_documents_of_another_shape(data: Any) -> None:
    assert isinstance(answer(yaml_text(data)), MatrixError)


@given(st.binary(max_size=60))
def test_bytes(content: bytes) -> None:
    assert isinstance(answer(content), MatrixError)


SORTED = ("package_indexes", "backends", "stacks", "lanes", "jobs", "corrections")
"""Sections whose entries must be sorted by id, which leaves them one order."""


def shuffled(
    data: Any, chance: random.Random, *, lists: tuple[str, ...] = (), here: str = "", fixed: bool = False
) -> Any:
    """The same data with the keys of every mapping in another order, and the lists of these names too."""
    if isinstance(data, Mapping):
        keys = list(data)
        if not fixed:
            chance.shuffle(keys)
        top = here == ""
        return {
            key: shuffled(data[key], chance, lists=lists, here=str(key), fixed=top and key in SORTED) for key in keys
        }
    if isinstance(data, list):
        items = [shuffled(item, chance, lists=lists, here=here or "-") for item in data]
        if here in lists:
            chance.shuffle(items)
        return items
    return data


def plans(text: str) -> dict[str, Plan]:
    with tempfile.TemporaryDirectory() as folder:
        matrix = load(write(Path(folder), text=text))
    return {lane: make_plan(matrix, Selection(lane=lane)) for lane in matrix.lanes}


@settings(max_examples=8)
@given(st.randoms(use_true_random=False))
def test_a_plan_does_not_depend_on_the_order_of_fields(chance: random.Random) -> None:
    data = YAML(typ="safe", pure=True).load(TEXT)
    assert plans(yaml_text(shuffled(data, chance))) == plans(TEXT)


@settings(max_examples=8)
@given(st.randoms(use_true_random=False))
def test_the_order_of_cases_and_values_changes_the_order_of_cells_only(chance: random.Random) -> None:
    data = YAML(typ="safe", pure=True).load(TEXT)
    for lane in data["lanes"].values():
        lane["cases"] = {
            job: shuffled(patterns, chance, lists=(job, "zero_stage", "dtype", "gradient_accumulation_steps"), here=job)
            for job, patterns in lane["cases"].items()
        }
    for lane, plan in plans(yaml_text(data)).items():
        before = plans(TEXT)[lane]
        assert sorted(plan.cells, key=lambda cell: cell.id) == sorted(before.cells, key=lambda cell: cell.id)
