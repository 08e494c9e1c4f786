"""What the ledger says about pins, exact ones and ranges, and what a requirements file asks for."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ci import advice, requirements_file
from ci.advice import Advice
from ci.errors import UsageError
from ci.matrix import Defect, Matrix, load
from tests.unit import small_matrix, test_claims

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    return load(small_matrix.write(tmp_path))


def told(matrix: Matrix, **pins: str) -> Advice:
    return advice.advise(matrix, {name: SpecifierSet(specifier) for name, specifier in pins.items()})


def ids(found: Advice) -> list[str]:
    return [affected.defect.id for affected in found.affected]


def test_an_exact_pin_meets_the_entries_that_affect_it(matrix: Matrix) -> None:
    assert ids(told(matrix, deepspeed="==0.15.4")) == ["a-norm", "b-raise"]
    assert ids(told(matrix, deepspeed="==0.16.5")) == ["b-raise"]
    assert ids(told(matrix, deepspeed="==0.13.0")) == []


def test_a_range_is_looked_at_where_something_changes(matrix: Matrix) -> None:
    found = told(matrix, deepspeed=">=0.15.2")
    assert found.looked_at["deepspeed"] == tuple(map(Version, ("0.15.2", "0.15.4", "0.16", "0.18.9", "0.19.8")))
    norm = found.affected[0]
    assert (norm.defect.id, norm.whole) == ("a-norm", False)
    assert norm.releases == (Version("0.15.2"), Version("0.15.4"))
    assert found.affected[1].whole


def test_the_releases_to_move_to_say_what_is_left_behind_and_what_is_met() -> None:
    early, late = (
        test_claims.entry(name, None).model_copy(update={"affects": {"deepspeed": affects}})
        for name, affects in (("early", ">=0.17,<0.18"), ("late", ">=0.18,<0.19"))
    )
    shipped = load(ROOT / "matrix.yaml").model_copy(update={"defects": (early, late)})
    moves = {str(move.release): (move.leaves, move.meets) for move in told(shipped, deepspeed="==0.17.3").moves}
    assert moves == {"0.18": (("early",), ("late",)), "0.19": (("early",), ())}
    assert told(shipped, deepspeed="==0.19.1").moves == ()


def test_an_entry_of_two_packages_is_met_only_beside_both(matrix: Matrix) -> None:
    both: Defect = matrix.defects[0].model_copy(update={"affects": {"deepspeed": ">=0.15", "trl": "<1.0"}})
    matrix = matrix.model_copy(update={"defects": (both,)})
    assert ids(told(matrix, deepspeed="==0.19.8", trl="==0.15.2")) == ["a-norm"]
    assert ids(told(matrix, deepspeed="==0.19.8", trl="==1.16.0")) == []
    assert ids(told(matrix, deepspeed="==0.19.8")) == ["a-norm"]  # any release of trl is allowed
    moves = told(matrix, deepspeed="==0.19.8", trl="==0.15.2").moves
    assert [(move.package, str(move.release), move.leaves) for move in moves] == [("trl", "1.0", ("a-norm",))]


def test_the_shipped_ledger_names_report_as_answer() -> None:
    found = told(load(ROOT / "matrix.yaml"), deepspeed="==0.17.6")
    assert "zero0-bf16-norm-times-scale" in ids(found)
    mended = next(move for move in found.moves if str(move.release) == "0.18.6")
    assert "zero0-bf16-norm-times-scale" in mended.leaves


def test_a_requirements_file_is_read_with_markers_hashes_continuations_and_other_files(tmp_path: Path) -> None:
    (tmp_path / "pins.txt").write_text("transformers==4.57.6 # pinned\n-r all.txt\n", encoding="utf-8")
    path = tmp_path / "all.txt"
    path.write_text(
        "# a comment\n"
        "-r pins.txt\n"
        "--extra-index-url https://example.org/simple\n"
        "DeepSpeed==0.18.9 \\\n    --hash=sha256:00 \\\n    --hash=sha256:11\n"
        "deepspeed>=0.14\n"
        "trl>=0.20,<0.25 ; python_version >= '3'\n"
        "peft==0.1 ; python_version < '3'\n"
        "./local.whl\n"
        "torch[extra] @ https://example.org/torch.whl\n",
        encoding="utf-8",
    )
    found = requirements_file.read(path)
    assert dict(found) == {
        "transformers": SpecifierSet("==4.57.6"),
        "deepspeed": SpecifierSet("==0.18.9,>=0.14"),
        "trl": SpecifierSet(">=0.20,<0.25"),
        "torch": SpecifierSet(),
    }


def test_a_line_that_is_no_requirement_is_named(tmp_path: Path) -> None:
    path = tmp_path / "r.txt"
    path.write_text("a==1\n\nb=2\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"r\.txt:3: found 'b=2'"):
        requirements_file.read(path)
    with pytest.raises(UsageError, match="No such file"):
        requirements_file.read(tmp_path / "none.txt")
