"""ci.execute with a stand-in runtime: records, reasons, limits, interrupts; nothing is ever left behind."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from rich.console import Console

from ci import evidence, execute, runfolder, stackrun
from ci.errors import EnvironmentUnavailable, ExitCode, Interrupted
from ci.execute import Execution, Outcome
from ci.interrupts import Interrupts
from ci.judge import judge_run
from ci.matrix import Defect, Effect, Symptom
from ci.plan import Plan
from ci.replacements import Replacement
from ci.runrecord import Verdict, read_plan, read_run
from tests.unit.stand_in import StandInRuntime, matrix, plan, request

ROOT = Path(__file__).parents[2]


def run(out: Path, a_plan: Plan, runtime: StandInRuntime, *, fail_fast: bool = False) -> tuple[Outcome, str]:
    console = Console(file=io.StringIO(), width=200)
    with Interrupts() as interrupts:
        outcome = Execution(request(out, a_plan, runtime, fail_fast=fail_fast), console, interrupts).run()
    assert isinstance(console.file, io.StringIO)
    return outcome, console.file.getvalue()


def verdicts(outcome: Outcome) -> dict[str, str]:
    return {cell.id.split("/", 1)[1]: str(cell.verdict) for cell in outcome.record.cells}


def reason(outcome: Outcome, name: str) -> str:
    return next(cell.reason or "" for cell in outcome.record.cells if cell.id.endswith(name))


def test_a_run_leaves_plan_evidence_and_record(tmp_path: Path) -> None:
    outcome, said = run(tmp_path, plan(["a", "b"], gated={"b": "needs deepspeed >=1"}), StandInRuntime())
    assert verdicts(outcome) == {"newest/grpo-lora/a": "ok", "newest/grpo-lora/b": "not run"}
    assert outcome.stopped is None and outcome.record.exit_code() == ExitCode.OK
    assert read_run(outcome.folder) == outcome.record
    assert [cell.id for cell in read_plan(outcome.folder).cells] == [cell.id for cell in outcome.record.cells]
    assert (tmp_path / "latest").resolve() == outcome.folder
    assert not (outcome.folder / runfolder.LOCK).exists()
    assert "[1/1] cpu/newest/grpo-lora/a  ok  0.1 s" in said
    names = {path.name for path in outcome.folder.iterdir()}
    assert names == {
        *("plan.json", "run.json", "evidence.jsonl", "junit.xml"),
        *("order.newest.json", "logs", "pytest.newest.log"),
    }


def test_a_gated_cell_is_not_ordered(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, plan(["a", "b"], gated={"b": "no"}), StandInRuntime())
    order = json.loads((outcome.folder / "order.newest.json").read_text())
    assert [cell["id"] for cell in order["cells"]] == ["cpu/newest/grpo-lora/a"]
    assert order["backend"] == {
        "id": "cpu",
        "accelerator": "cpu",
        "communication": "gloo",
        "start_method": "forkserver",
        "environment": {},
        "shims": [],
        "training_arguments": {},
        "versions": [],
        "visible": None,
        "devices": [],
    }
    assert order["stack"]["check_pins"] is True


def test_a_wrong_norm_fails_the_run(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, plan(["a", "b"]), StandInRuntime({"a": "wrong"}))
    assert verdicts(outcome) == {"newest/grpo-lora/a": "regression", "newest/grpo-lora/b": "ok"}
    assert outcome.record.exit_code() == ExitCode.FAILED


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        (
            "crash",
            "pytest ended with exit code 1 and left no evidence of this cell; the last line of pytest.log: Fatal",
        ),
        ("half", "pytest ended with exit code 3"),
        ("killed", "the process was killed from outside (out of memory?)"),
    ],
)
def test_cells_without_evidence_are_errors_with_the_reason(tmp_path: Path, behaviour: str, said: str) -> None:
    outcome, _ = run(tmp_path, plan(["a", "b", "c"]), StandInRuntime({"b": behaviour}))
    assert list(verdicts(outcome).values()) == ["ok", "error", "error"]
    assert said in reason(outcome, "b") and said in reason(outcome, "c")
    # Judging the folder again says the same: the reason is evidence too, also after a line that was cut short.
    again = judge_run(
        read_plan(outcome.folder), evidence.read(outcome.folder / "evidence.jsonl"), matrix(), outcome.record.duration_s
    )
    assert [(cell.verdict, cell.reason) for cell in again.cells] == [
        (cell.verdict, cell.reason) for cell in outcome.record.cells
    ]


def test_one_line_of_another_schema_does_not_take_the_verdicts_of_the_others(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, plan(["a", "b", "c"]), StandInRuntime({"b": "foreign"}))
    assert list(verdicts(outcome).values()) == ["ok", "error", "ok"]
    assert read_run(outcome.folder) == outcome.record
    assert len(outcome.record.incomplete) == 1 and "schema 2, expected 1" in outcome.record.incomplete[0]


def test_the_hard_limit_ends_a_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stackrun.StackOrder, "limit_s", 1.0)
    outcome, _ = run(tmp_path, plan(["a", "b"]), StandInRuntime({"b": "hang"}))
    assert list(verdicts(outcome).values()) == ["ok", "error"]
    assert reason(outcome, "b").startswith("the stack was stopped after 1 s")
    assert gone(int((outcome.folder / "child.pid").read_text()))


def test_the_limit_leaves_room_for_the_last_case(tmp_path: Path) -> None:
    cells = plan(["a", "b", "c"]).cells
    order = stackrun.StackOrder(None, cells, tmp_path, tmp_path, workers=2)  # type: ignore[arg-type]  # reason: not looked at
    # Two of the three run one after the other: 20 s, more than the sum by workers (15 s).
    assert order.limit_s == 15 + 10 + stackrun.START_ALLOWANCE_S


def test_fail_fast_stops_at_the_first_failing_cell(tmp_path: Path) -> None:
    runtime = StandInRuntime({"a": "wrong", "b": "hang"})
    outcome, _ = run(tmp_path, plan(["a", "b"], stacks=["newest", "stable"]), runtime, fail_fast=True)
    assert list(verdicts(outcome).values()) == ["regression", "error", "error", "error"]
    for cell in outcome.record.cells[1:]:
        assert cell.reason == "--fail-fast: stopped after cpu/newest/grpo-lora/a (regression)"
    assert len(runtime.started) == 1


def test_installed_versions_unlike_the_pins_are_errors_before_anything_runs(tmp_path: Path) -> None:
    runtime = StandInRuntime(packages={"torch": "2.13.0+cpu", "deepspeed": "0.19.7"})
    outcome, _ = run(tmp_path, plan(["a"]), runtime)
    assert verdicts(outcome) == {"newest/grpo-lora/a": "error"}
    assert reason(outcome, "a") == "pins differ: deepspeed 0.19.7 instead of 0.19.8"
    assert runtime.started == []


@pytest.mark.parametrize("installed", ["0.19.7", "0.20.0+1a2b3c"])
def test_what_replaces_a_package_is_judged_by_the_version_it_turned_out_to_have(tmp_path: Path, installed: str) -> None:
    """A checkout has no version before it is built; without one no entry of the ledger would claim anything."""
    replaced = plan(["a"])
    stack = replaced.stacks["newest"]
    pins = {name: version for name, version in stack.pins.items() if name != "deepspeed"}
    checkout = (Replacement("deepspeed", None, tmp_path),)
    stacks = {"newest": dataclasses.replace(stack, pins=pins, replacements=checkout)}
    runtime = StandInRuntime(packages={"torch": "2.13.0+cpu", "deepspeed": installed})
    outcome, _ = run(tmp_path, dataclasses.replace(replaced, stacks=stacks), runtime)
    assert verdicts(outcome) == {"newest/grpo-lora/a": "ok"}
    order = json.loads((outcome.folder / "order.newest.json").read_text())
    everywhere = (
        order["stack"]["pins"],
        evidence.read(outcome.folder / "evidence.jsonl").by_cell["cpu/newest/grpo-lora/a"].pins,
        read_plan(outcome.folder).stacks["newest"],
        read_run(outcome.folder).stacks["newest"],
    )
    assert everywhere == ({"torch": "2.13.0+cpu", "deepspeed": installed},) * 4
    # Judging again knows it too.
    entry = Defect(
        id="claims-it",
        title="x",
        upstream=(),
        where={"zero_stage": 0},
        affects={"deepspeed": f"=={installed}"},
        symptom=Symptom(reported_norm=Effect(times=2.0)),
        advice="x",
    )
    ledger = matrix().model_copy(update={"defects": (entry,)})
    again = judge_run(read_plan(outcome.folder), evidence.read(outcome.folder / "evidence.jsonl"), ledger)
    assert again.cells[0].verdict == Verdict.FIXED_UPSTREAM


def test_a_replacement_that_is_not_installed_afterwards_is_exit_3(tmp_path: Path) -> None:
    stack = dataclasses.replace(
        plan(["a"]).stacks["newest"], pins={}, replacements=(Replacement("deepspeed", None, tmp_path),)
    )
    runtime = StandInRuntime(packages={"torch": "2.13.0+cpu"})
    outcome, _ = run(tmp_path, dataclasses.replace(plan(["a"]), stacks={"newest": stack}), runtime)
    assert outcome.stopped is not None and outcome.stopped.exit_code == ExitCode.UNAVAILABLE
    assert "deepspeed, and it is not installed afterwards" in outcome.stopped.message


def test_junit_xml_lists_the_cells_and_not_what_pytest_says(tmp_path: Path) -> None:
    outcome, _ = run(tmp_path, plan(["a", "b", "c"], gated={"c": "no"}), StandInRuntime({"b": "wrong"}))
    root = ElementTree.parse(outcome.folder / "junit.xml").getroot()
    found = {case.get("name"): [child.tag for child in case] for case in root.iter("testcase")}
    assert found == {"a": ["system-out"], "b": ["failure"], "c": ["skipped"]}


def test_one_stack_that_cannot_be_made_does_not_take_the_others(tmp_path: Path) -> None:
    runtime = StandInRuntime(unmakeable={"newest": EnvironmentUnavailable("no network")})
    outcome, _ = run(tmp_path, plan(["a"], stacks=["newest", "stable"]), runtime)
    assert verdicts(outcome) == {"newest/grpo-lora/a": "error", "stable/grpo-lora/a": "ok"}
    assert reason(outcome, "newest/grpo-lora/a") == "the place to run could not be made: no network"
    assert outcome.stopped is None and outcome.record.exit_code() == ExitCode.FAILED


def test_no_stack_that_can_be_made_is_exit_3(tmp_path: Path) -> None:
    runtime = StandInRuntime(unmakeable={"newest": EnvironmentUnavailable("no network")})
    outcome, _ = run(tmp_path, plan(["a"]), runtime)
    assert outcome.stopped is not None and outcome.stopped.exit_code == ExitCode.UNAVAILABLE
    assert read_run(outcome.folder).cells[0].reason == "no network"


def test_a_full_disk_ends_the_run_and_keeps_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free_mb(path: Path) -> int:
        return 1 if (path / "child.pid").exists() else 1000

    monkeypatch.setattr(stackrun, "free_mb", free_mb)
    outcome, _ = run(tmp_path, plan(["a", "b"]), StandInRuntime({"b": "hang"}))
    assert list(verdicts(outcome).values()) == ["ok", "error"]
    assert outcome.stopped is not None and outcome.stopped.exit_code == ExitCode.UNAVAILABLE
    assert "the disk is full" in outcome.stopped.message
    assert "Kept: the evidence of 1 of 2 cells" in outcome.stopped.message
    assert gone(int((outcome.folder / "child.pid").read_text()))


def test_a_record_that_cannot_be_written_is_exit_3_and_still_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "run.json")

    monkeypatch.setattr(execute, "write_run", full)
    outcome, _ = run(tmp_path, plan(["a"]), StandInRuntime())
    assert verdicts(outcome) == {"newest/grpo-lora/a": "ok"}
    assert outcome.stopped is not None and outcome.stopped.exit_code == ExitCode.UNAVAILABLE
    assert "the disk is full; kept: the evidence of 1 of 1 cells" in outcome.stopped.message


def test_a_results_folder_that_cannot_be_made_is_exit_3(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(EnvironmentUnavailable, match=r"cannot write .*results.*(file is in the way|part of the path)"):
        run(tmp_path / "results", plan(["a"]), StandInRuntime())


def test_a_results_folder_without_space_is_exit_3_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runfolder, "free_mb", lambda path: 3)
    with pytest.raises(EnvironmentUnavailable, match=r"3 MB free, 64 MB needed"):
        run(tmp_path, plan(["a"]), StandInRuntime())
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_while_the_place_is_made(tmp_path: Path) -> None:
    runtime = StandInRuntime(unmakeable={"newest": Interrupted("interrupted by SIGTERM")})
    outcome, _ = run(tmp_path, plan(["a"]), runtime)
    assert outcome.stopped is not None and outcome.stopped.exit_code == ExitCode.INTERRUPTED
    assert read_run(outcome.folder).cells[0].verdict == Verdict.ERROR
    assert read_run(outcome.folder).cells[0].reason == "interrupted by SIGTERM"


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie that its parent has not looked at has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


DRIVER = """
import sys
from pathlib import Path
from rich.console import Console
from ci.errors import CiError
from ci.execute import Execution
from ci.interrupts import Interrupts
from tests.unit.stand_in import StandInRuntime, plan, request
with Interrupts() as interrupts:
    outcome = Execution(
        request(Path(sys.argv[1]), plan(["a", "b", "c"]), StandInRuntime({"b": "hang"})), Console(), interrupts
    ).run()
sys.exit(int(outcome.stopped.exit_code) if outcome.stopped else 0)
"""


def wait_for(path: Path, pattern: str, seconds: float = 30) -> Path:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = sorted(path.glob(pattern))
        if found and found[0].stat().st_size:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no {pattern} in {path} after {seconds} s")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_and_keeps_what_was_measured(tmp_path: Path, number: signal.Signals) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=ROOT, env=env)
    try:
        child = wait_for(tmp_path, "*-cpu-*/child.pid")
        process.send_signal(number)
        process.send_signal(number)  # a terminal's Ctrl-C arrives twice: from the terminal and from nox
        assert process.wait(30) == ExitCode.INTERRUPTED
    finally:
        process.kill()
    folder = child.parent
    assert gone(int(child.read_text()))
    record = read_run(folder)
    assert [str(cell.verdict) for cell in record.cells] == ["ok", "error", "error"]
    assert record.cells[1].reason == f"interrupted by {number.name}"
    assert not runfolder.is_running(folder)
    assert not [path for path in folder.iterdir() if path.name.startswith(".")], "a half file was left"
    assert (tmp_path / "latest").resolve() == folder


def test_the_folder_is_locked_while_the_run_goes_on(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=ROOT, env=env)
    try:
        folder = wait_for(tmp_path, "*-cpu-*/child.pid").parent
        assert runfolder.is_running(folder)
    finally:
        process.terminate()
        assert process.wait(30) == ExitCode.INTERRUPTED
    assert not runfolder.is_running(folder)
