"""What a newer release changes in matrix.yaml, and that nothing else of the file changes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from ci import watch
from ci.matrix import load
from ci.runrecord import CellRecord, RunRecord, Verdict
from ci.watch import Bound, Newer

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "matrix.yaml").read_text(encoding="utf-8")
NEXT = Newer("deepspeed", Version("0.19.8"), Version("0.20.1"))


def run(*cells: tuple[tuple[str, ...], tuple[str, ...]]) -> RunRecord:
    """A run whose cells showed the first ids, and not the second."""
    records = tuple(
        CellRecord(
            id=f"cpu/newest/job/{position}",
            stack="newest",
            job="job",
            case={},
            world_size=2,
            command="nox",
            verdict=Verdict.FIXED_UPSTREAM if fixed else Verdict.KNOWN_DEFECT,
            defects=defects,
            fixed=fixed,
        )
        for position, (defects, fixed) in enumerate(cells)
    )
    return RunRecord(command="c", backend="cpu", runtime="venv", started="now", cells=records)


def test_only_newer_releases_count() -> None:
    pins = {"torch": "2.13.0+cpu", "deepspeed": "0.19.8", "trl": "1.16.0", "peft": "0.21.2"}
    available = {
        "deepspeed": [Version("0.9.5"), Version("0.20.1"), Version("0.19.8")],
        "trl": [Version("1.16.0")],
        "peft": [Version("0.9")],
    }
    assert watch.newer(pins, available) == (NEXT,)


def test_an_entry_ends_where_no_cell_shows_it_any_more() -> None:
    defects = load(ROOT / "matrix.yaml").defects
    seen = run(((), ("zero0-fp32-norm-none",)), (("unfused-dummy-step",), ()), ((), ("unfused-dummy-step",)))
    assert watch.gone(seen, defects, (NEXT,)) == (Bound("zero0-fp32-norm-none", "deepspeed", Version("0.20.1")),)
    assert watch.gone(seen, defects, (Newer("peft", Version("0.1"), Version("0.2")),)) == ()


def test_pins_and_bounds_move_and_the_result_is_a_matrix_and_a_patch(tmp_path: Path) -> None:
    bounds = (
        Bound("zero0-fp32-norm-none", "deepspeed", Version("0.20.1")),
        Bound("fp16-fused-never-steps", "deepspeed", Version("0.17.9")),
    )
    after = watch.with_bounds(watch.with_pins(TEXT, "newest", (NEXT,)), bounds)
    (tmp_path / "ci").symlink_to(ROOT / "ci")
    changed = tmp_path / "matrix.yaml"
    changed.write_text(after, encoding="utf-8")
    before, now = load(ROOT / "matrix.yaml"), load(changed)
    assert now.stacks["newest"].pins == {**before.stacks["newest"].pins, "deepspeed": "0.20.1"}
    assert {name: stack for name, stack in now.stacks.items() if name != "newest"} == {
        name: stack for name, stack in before.stacks.items() if name != "newest"
    }
    affects = {defect.id: dict(defect.affects) for defect in now.defects}
    was = {defect.id: dict(defect.affects) for defect in before.defects}
    assert affects.pop("zero0-fp32-norm-none") == {
        "deepspeed": was.pop("zero0-fp32-norm-none")["deepspeed"] + ",<0.20.1"
    }
    assert affects.pop("fp16-fused-never-steps") == {"deepspeed": ">=0.17.6,<0.18.2,<0.17.9"}
    was.pop("fp16-fused-never-steps")
    assert affects == was
    diff = watch.patch(TEXT, after)
    assert [line[0] for line in diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")] == list(
        "-+" * 3
    )
    target = tmp_path / "repo"
    target.mkdir()
    (target / "matrix.yaml").write_text(TEXT, encoding="utf-8")
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=target, check=True, env={"PATH": "/usr/bin:/bin"})
    assert (target / "matrix.yaml").read_text(encoding="utf-8") == after
    assert watch.patch(TEXT, TEXT) == ""


def test_what_cannot_be_moved_is_said() -> None:
    with pytest.raises(LookupError, match=r"no line `deepspeed: 0\.1\.0`"):
        watch.with_pins(TEXT, "newest", (Newer("deepspeed", Version("0.1.0"), Version("0.2")),))
    with pytest.raises(LookupError, match="bounds trl"):
        watch.with_bounds(TEXT, (Bound("zero0-fp32-norm-none", "trl", Version("2.0")),))
