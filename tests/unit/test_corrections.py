"""What every correction promises without being run: self-contained, explained, claiming what the ledger does."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ci import claims
from ci.advice import PACKAGE
from ci.entries import MODE
from ci.matrix import load

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "ci" / "corrections").glob("*.py"))
THERE_ANYWAY = {"torch", "deepspeed", "packaging"}
"""What a user of DeepSpeed has installed; DeepSpeed itself needs packaging."""
RELEASES = [Version(f"0.{minor}.{patch}") for minor in range(14, 20) for patch in range(11)]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def claimed(path: Path) -> list[SpecifierSet]:
    """The releases of the file's parts."""
    value = next(
        ast.literal_eval(node.value)
        for node in tree(path).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "CLAIMS"
    )
    return [SpecifierSet(part) for part in (value.values() if isinstance(value, dict) else [value])]


def test_there_are_corrections() -> None:
    assert len(FILES) >= 7


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_can_be_copied_it_imports_nothing_of_this_project(path: Path) -> None:
    imported = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(node.module or "")
    packages = {name.partition(".")[0] for name in imported}
    assert packages - set(sys.stdlib_module_names) <= THERE_ANYWAY


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_importing_a_file_applies_it(path: Path) -> None:
    assert ast.unparse(tree(path).body[-1]) == "APPLIED = apply()"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_docstring_says_cause_releases_link_and_proof(path: Path) -> None:
    text = ast.get_docstring(tree(path)) or ""
    assert re.search(r"\b\w+\.py\b", text), "no file upstream"
    assert re.search(r"\b0\.1\d\.\d+\b", text), "no release"
    assert re.search(r"#\d+|/(issues|pull)/\d+", text) or "none known" in " ".join(text.lower().split()), "no link"
    tests = re.findall(r"tests/[\w/]+\.py", text)
    assert tests and all((ROOT / test).is_file() for test in tests), f"its proof does not exist: {tests}"


def test_a_file_claims_every_release_that_its_entries_say_are_affected() -> None:
    defects = load(ROOT / "matrix.yaml").defects
    for defect, name in ((each, name) for each in defects for name in each.corrections):
        path = ROOT / "ci" / "corrections" / f"{name.partition(MODE)[0]}.py"
        affected = [each for each in RELEASES if claims.affects(defect, {PACKAGE: str(each)})]
        assert affected, defect.id
        for release in affected:
            assert any(part.contains(release) for part in claimed(path)), (defect.id, str(release))


def test_every_file_belongs_to_an_entry_of_the_ledger() -> None:
    defects = load(ROOT / "matrix.yaml").defects
    named = {name.partition(MODE)[0] for defect in defects for name in defect.corrections}
    assert {path.stem for path in FILES} <= named
