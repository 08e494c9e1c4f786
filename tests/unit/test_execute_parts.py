"""The parts of a run: interrupts, the user's files, the folder, the follower, progress, junit.xml."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rich.console import Console

from ci import junit, runfolder
from ci.errors import EnvironmentUnavailable, Interrupted, UsageError
from ci.execute import append, pin_differences, problem
from ci.follow import Follower, log_name
from ci.interrupts import SIGNALS, Interrupts
from ci.plan import PlannedStack
from ci.progress import Estimate, ProgressView, brief_time
from ci.runfolder import RunFolder
from ci.runrecord import CellRecord, RunRecord, Verdict
from ci.userfiles import check_adapter, check_ds_config, copy_into
from tests.unit.stand_in import plan

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        with pytest.raises(Interrupted, match=f"interrupted by {number.name}"):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # a second one does not break off the tidying up
        assert interrupts.received == number.name
    assert signal.getsignal(number) is before


def test_a_shield_holds_the_interrupt_back_to_its_end() -> None:
    done = False
    with Interrupts() as interrupts, pytest.raises(Interrupted), interrupts.shield():
        os.kill(os.getpid(), signal.SIGTERM)
        with interrupts.shield():
            pass
        done = True
    assert done


def test_an_interrupt_swallowed_by_a_library_is_raised_by_check() -> None:
    with Interrupts() as interrupts:
        with contextlib.suppress(Interrupted):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted):
            interrupts.check()


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupts.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_adapter_is_read_and_never_imported(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit('imported')\nclass GroupDecodeAdapter:\n    pass\n")
    adapter = check_adapter(f"{file}:GroupDecodeAdapter")
    assert (adapter.file, adapter.cls) == (file, "GroupDecodeAdapter")


@pytest.mark.parametrize(
    ("content", "value", "says"),
    [
        ("class A: pass", "mine.py", "expected FILE.py:Class"),
        ("class A: pass", "mine.py:", "expected FILE.py:Class"),
        ("class A: pass", "mine.py:not a class", "expected FILE.py:Class"),
        ("class A: pass", "other.py:A", "other.py: no such file"),
        ("class Adapter: pass", "mine.py:Adaptor", "did you mean Adapter?"),
        ("x = 1", "mine.py:A", "it has no class"),
        ("class A:\n  class B: pass", "mine.py:B", "no class 'B' at the top level"),
        ("class A: pass\ndef (:", "mine.py:A", "mine.py:2: not valid Python"),
        ("x = 'a\0b'", "mine.py:A", "not valid Python"),
    ],
)
def test_a_wrong_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, value: str, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(content)
    with pytest.raises(UsageError, match=says.replace("?", r"\?").replace("(", r"\(")):
        check_adapter(value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{\n  'a': 1}", r"c.json:2: not valid JSON"),
        (b"[1]", "found list, expected a JSON object"),
        (b"\xff", "UTF-8"),
    ],
)
def test_a_wrong_ds_config(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "c.json").write_bytes(content)
    with pytest.raises(UsageError, match=says):
        check_ds_config(tmp_path / "c.json")


def test_a_user_s_file_is_copied_under_its_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("x")
    (tmp_path / "run").mkdir()
    copy = copy_into(tmp_path / "run", tmp_path / "mine.py")
    assert copy == tmp_path / "run" / "inputs" / "mine.py" and copy.read_text() == "x"


def test_a_run_folder_is_named_locked_and_latest(tmp_path: Path) -> None:
    first = RunFolder.create(tmp_path / "deep" / "results", "cpu", NOW)
    first.point_latest()
    second = RunFolder.create(tmp_path / "deep" / "results", "cpu", NOW)
    second.point_latest()
    assert first.path != second.path and first.path.name.startswith("20260102T030405Z-cpu-")
    assert (first.path.parent / "latest").resolve() == second.path
    assert runfolder.is_running(first.path)
    first.release()
    first.release()
    assert not runfolder.is_running(first.path)
    second.release()
    assert not [path for path in first.path.parent.iterdir() if path.name.startswith(".")]


def test_somebody_s_own_latest_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    folder = RunFolder.create(tmp_path, "cpu", NOW)
    folder.point_latest()
    folder.release()
    assert not (tmp_path / "latest").is_symlink()


@pytest.mark.parametrize(
    ("number", "says"), [(28, "the disk is full"), (30, "read-only file system"), (13, "you may not write there")]
)
def test_a_place_that_cannot_be_written_is_one_message(tmp_path: Path, number: int, says: str) -> None:
    with (
        pytest.raises(EnvironmentUnavailable, match=f"cannot write .*: .*{says}; 3 kept"),
        runfolder.explained(tmp_path, "3 kept"),
    ):
        raise OSError(number, "x")


def test_the_follower_takes_whole_lines_once(tmp_path: Path) -> None:
    file = tmp_path / "evidence.jsonl"
    follower = Follower(file, tmp_path / "logs")
    cells = plan(["a", "b", "c"]).cells
    assert follower.fresh() == [] and follower.begun(["x"]) == []
    append(file, [problem(cells[0], "cpu", "x")])
    whole = file.read_bytes()
    second = whole.replace(b"grpo-lora/a", b"grpo-lora/b")
    with file.open("ab") as stream:
        stream.write(b"not json\n" + second[:20])
    assert [line.cell for line in follower.fresh()] == [cells[0].id]
    with file.open("ab") as stream:
        stream.write(second[20:])
    assert [line.cell for line in follower.fresh()] == [cells[1].id]
    assert follower.fresh() == []
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / log_name(cells[2].id)).touch()
    assert follower.begun([cell.id for cell in cells]) == [cells[2].id]
    # Evidence of an earlier stack in the same file is not taken again.
    assert Follower(file, tmp_path / "logs").fresh() == []


def test_appending_after_a_line_that_was_cut_short(tmp_path: Path) -> None:
    file = tmp_path / "evidence.jsonl"
    file.write_bytes(b'{"cell": "cpu/')
    cells = plan(["a", "b"]).cells
    append(file, [problem(cell, "cpu", "why") for cell in cells])
    lines = file.read_text().splitlines()
    assert len(lines) == 3 and lines[0] == '{"cell": "cpu/' and '"problem":"why"' in lines[1]
    append(file, [])
    assert len(file.read_text().splitlines()) == 3


def test_pin_differences_compare_names_as_pip_does() -> None:
    stack = PlannedStack("x", {"torch-npu": "1", "b": "2", "c": "3"}, None, check_pins=True)
    assert pin_differences(stack, {"Torch_NPU": "1", "B": "2", "c": "3", "d": "4"}) is None
    assert (
        pin_differences(stack, {"torch-npu": "1", "b": "3"}) == "pins differ: b 3 instead of 2, c missing instead of 3"
    )
    # A build counts where the pin names one, as for the judge.
    built = PlannedStack("x", {"a": "1.0", "b": "2.0+cpu"}, None, check_pins=True)
    assert pin_differences(built, {"a": "1.0+local", "b": "2.0+cpu"}) is None
    assert pin_differences(built, {"a": "1", "b": "2.0"}) == "pins differ: b 2.0 instead of 2.0+cpu"
    assert pin_differences(PlannedStack("current", {"b": "2"}, None, check_pins=False), {}) is None


def test_the_time_left_is_told_by_the_job() -> None:
    estimate = Estimate(["a", "a", "a", "b"], workers=1)
    assert estimate.left_s() is None
    estimate.finished("a", 30)  # with the import of the stack
    assert estimate.left_s() is None
    estimate.finished("a", 4)
    assert estimate.left_s() == 8  # b is unknown yet: taken as the others
    estimate.finished("b", 1)
    assert estimate.left_s() == 4
    assert Estimate(["a"], workers=1).left_s() is None


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (61, "1 min 01 s"), (3900, "1 h 05 min"), (-1, "0 s")])
def test_times_as_a_person_says_them(seconds: float, text: str) -> None:
    assert brief_time(seconds) == text


def test_progress_is_plain_lines_without_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=60)
    with ProgressView(console, "newest", ["a", "a", "a"], 1) as view:
        view.running(["cpu/newest/a/zero0[x]"])
        view.finished("cpu/newest/a/zero0", "a", 30, "ok")
        view.finished("cpu/newest/a/zero1", "a", 2, "ok")
        view.finished("cpu/newest/a/zero2", "a", 2, "ok")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "[1/3] cpu/newest/a/zero0  ok  30.0 s",
        "[2/3] cpu/newest/a/zero1  ok  2.0 s, about 2 s left",
        "[3/3] cpu/newest/a/zero2  ok  2.0 s",
    ]


def test_progress_is_a_live_line_on_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True, _environ={})
    with ProgressView(console, "newest", ["a", "a", "a"], 1) as view:
        view.running(["cpu/newest/a/zero0"])
        view.finished("cpu/newest/a/zero0", "a", 30, "ok")
        view.finished("cpu/newest/a/zero1", "a", 2, "ok")
        view.running(["cpu/newest/a/zero1-bf16"])
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "a/zero1-bf16" in shown and "about 2 s left" in shown and "2/3" in shown


def test_junit_lists_every_cell_with_its_verdict(tmp_path: Path) -> None:
    cells = tuple(
        CellRecord(
            id=f"cpu/{stack}/grpo-lora/{verdict.name}",
            stack=stack,
            job="grpo-lora",
            case={},
            verdict=verdict,
            world_size=2,
            command="nox -s cpu-zero",
            reason="\x1b[31mnorm\0 < 1 & \ud800 nan",
            duration_s=1.5,
        )
        for stack in ("a", "b")
        for verdict in Verdict
    )
    junit.write(tmp_path, RunRecord(command="c", backend="cpu", runtime="venv", started="now", cells=cells))
    assert [path.name for path in tmp_path.iterdir()] == ["junit.xml"]
    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    # What junit-10.xsd of Jenkins' xUnit plugin allows: no other attribute here, and one of three children of a case.
    assert root.attrib == {"name": root.get("name"), "tests": "14", "failures": "6", "errors": "0", "time": "21.000"}
    assert [(suite.get("name"), suite.get("failures"), suite.get("skipped")) for suite in root] == [
        ("a", "3", "1"),
        ("b", "3", "1"),
    ]
    found = {str(case.get("name")): [(each.tag, each.get("type") or each.text) for each in case] for case in root[0]}
    assert found == {
        "ERROR": [("failure", "error")],
        "REGRESSION": [("failure", "regression")],
        "FIXED_UPSTREAM": [("failure", "fixed upstream")],
        "KNOWN_DEFECT": [("system-out", "known defect")],
        "CORRECTED": [("system-out", "corrected")],
        "OK": [("system-out", "ok")],
        "NOT_RUN": [("skipped", None)],
    }
    failure = root[0].find("testcase/failure")
    assert failure is not None and failure.get("message") == "?[31mnorm? < 1 & ? nan"
    assert "repeat: nox -s cpu-zero" in (failure.text or "")
