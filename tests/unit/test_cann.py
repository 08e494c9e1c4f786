"""CANN and torch-npu: a pair outside the published table is refused with the row that would fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.cann import mismatch
from ci.errors import MatrixError, UsageError
from ci.matrix import load
from ci.plan import Selection, make_plan
from ci.provision.recipe import recipe_for
from tests.unit.small_matrix import TEXT, write

ROOT = Path(__file__).parents[2]
TABLE = {"8.5.0": ("2.8.0.post2", "2.9.0"), "9.0.0": ("2.9.0.post2", "2.10.0")}
WITH_CANN = TEXT.replace(
    "start_method: spawn, unavailable: no image yet}", 'start_method: spawn, base_image: "cann:{cann}-py{python}"}'
).replace("backends:\n", "cann: {8.5.0: [2.8.0.post2, 2.9.0], 9.0.0: [2.9.0.post2]}\nbackends:\n")
GOOD = "pins: {deepspeed: 0.18.9, torch: 2.9.0, torch-npu: 2.9.0.post2}"


def small(pins: str = GOOD, cann: str = "cann: 9.0.0") -> str:
    """The small matrix whose backend npu has an image of CANN."""
    return WITH_CANN.replace("    pins: {deepspeed: 0.18.9}", f"    {cann}\n    {pins}".replace("    \n", ""))


@pytest.mark.parametrize(
    ("cann", "pins", "said"),
    [
        ("9.0.0", {"torch": "2.9.0", "torch-npu": "2.9.0.post2"}, None),
        ("9.0.0", {"torch": "2.9.0+cpu", "torch-npu": "2.9.0.post2"}, None),
        ("9.0.0", {"torch": "2.9.0"}, None),
        (
            "9.0.0",
            {"torch": "2.9.0", "torch-npu": "2.9.0"},
            ("torch-npu 2.9.0 with CANN 9.0.0", "one of its row, 2.9.0.post2, 2.10.0, or CANN 8.5.0 for it"),
        ),
        (
            "9.0.0",
            {"torch": "2.9.0", "torch-npu": "2.1.0"},
            ("torch-npu 2.1.0 with CANN 9.0.0", "one of its row, 2.9.0.post2, 2.10.0"),
        ),
        ("7.0.0", {"torch-npu": "2.9.0"}, ("CANN 7.0.0", "a CANN of the table: 8.5.0, 9.0.0")),
        (
            "9.0.0",
            {"torch": "2.10.0", "torch-npu": "2.9.0.post2"},
            ("torch 2.10.0 with torch-npu 2.9.0.post2", "torch 2.9.0, which it is compiled against"),
        ),
    ],
)
def test_a_pair_and_what_would_fit(cann: str, pins: dict[str, str], said: tuple[str, str] | None) -> None:
    assert mismatch(TABLE, cann, pins) == said


@pytest.mark.parametrize(
    ("text", "found", "expected"),
    [
        (small(GOOD.replace("post2", "post9")), "torch-npu 2.9.0.post9 with CANN 9.0.0", "one of its row, 2.9.0.post2"),
        (small(cann="cann: 7.0.0"), "CANN 7.0.0", "8.5.0, 9.0.0"),
        (small(cann=""), "no cann", "the CANN of its base image: 8.5.0, 9.0.0"),
        (
            WITH_CANN.replace('    python: "3.11"\n', '    python: "3.11"\n    cann: 9.0.0\n', 1),
            "'9.0.0'",
            "has no CANN",
        ),
    ],
)
def test_a_stack_outside_the_table_is_refused_with_its_line(
    tmp_path: Path, text: str, found: str, expected: str
) -> None:
    with pytest.raises(MatrixError) as caught:
        load(write(tmp_path, text=text))
    assert found in caught.value.found and expected in caught.value.expected
    assert caught.value.line is not None and "stacks" in caught.value.message


def test_a_stack_of_the_table_is_taken_and_its_image_is_that_of_its_cann(tmp_path: Path) -> None:
    matrix = load(write(tmp_path, text=small()))
    assert matrix.stacks["on-npu"].cann == "9.0.0"
    shipped = recipe_for(load(ROOT / "matrix.yaml"), "newest-npu", ROOT)
    assert shipped.base_image == "quay.io/ascend/cann:9.0.0-910b-ubuntu22.04-py3.11"


def test_a_replacement_outside_the_table_is_refused_before_anything_is_made() -> None:
    matrix = load(ROOT / "matrix.yaml")
    with pytest.raises(UsageError, match=r"--with: stack newest-npu: found torch-npu 2\.8\.0\.post2 with CANN 9\.0\.0"):
        make_plan(matrix, Selection(backend="npu", replacements=("torch-npu=2.8.0.post2",)))
    fitting = Selection(backend="npu", replacements=("torch-npu=2.10.0", "torch=2.10.0"))
    assert make_plan(matrix, fitting).stacks["newest-npu"].pins["torch-npu"] == "2.10.0"
