"""Nothing of a run or a tool is left behind, even what has moved into a session of its own."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ci.errors import EnvironmentUnavailable
from ci.provision import process
from ci.provision.process import RunningProcess
from tests.unit.family import FAMILY, alive, left_by_a_killed_run, wait_for_family


@pytest.mark.parametrize("stubborn", [False, True])
def test_terminate_ends_every_process_of_a_run(tmp_path: Path, stubborn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.5)
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", FAMILY, str(pids), *(["stubborn"] if stubborn else [])]
    running = RunningProcess(command, env=os.environ, cwd=tmp_path, log_path=tmp_path / "log")
    family = wait_for_family(pids)
    assert running.poll() is None and running.wait(0.01) is None
    running.terminate()
    assert alive(family) == []
    running.terminate()  # safe to say twice
    assert running.poll() is not None


def test_terminate_also_clears_up_after_a_run_that_ended_by_itself(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", FAMILY, str(pids), "short"]
    running = RunningProcess(command, env=os.environ, cwd=tmp_path, log_path=tmp_path / "log")
    assert running.wait(10) == 0
    family = wait_for_family(pids)
    assert len(alive(family)) == 2
    running.terminate()
    assert alive(family) == []


def test_temporary_files_of_a_run_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "import tempfile; print(tempfile.mkdtemp()); tempfile.mkstemp()"
    running = RunningProcess([sys.executable, "-c", code], env=os.environ, cwd=tmp_path, log_path=tmp_path / "log")
    assert running.wait(10) == 0
    made = Path(running.log_path.read_text().strip())
    assert made.is_dir() and made.is_relative_to(tmp_path)
    running.terminate()
    assert list(tmp_path.iterdir()) == [running.log_path]


def test_what_a_killed_run_left_goes_with_the_next_and_what_a_living_one_needs_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    family = left_by_a_killed_run(tmp_path)
    assert sorted(alive(family)) == sorted(family)
    mine = process.make_scratch("living")
    assert process.sweep() == 1
    assert alive(family) == []
    assert list(tmp_path.glob("ci-run-*")) == [mine]


def test_output_and_exit_code_of_a_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('out'); sys.exit('err')"]
    running = RunningProcess(command, env=os.environ, cwd=tmp_path, log_path=tmp_path / "log")
    assert running.wait(10) == 1
    assert sorted(running.log_path.read_text().split()) == ["err", "out"]


def test_an_interrupt_while_a_tool_works_ends_the_tool(tmp_path: Path) -> None:
    pids = tmp_path / "pids"

    def interrupt() -> None:
        wait_for_family(pids)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        process.run([sys.executable, "-c", FAMILY, str(pids)])
    thread.join()
    assert alive(wait_for_family(pids)) == []


def test_a_tool_that_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = [sys.executable, "-c", FAMILY, str(pids)]
    with pytest.raises(EnvironmentUnavailable, match="did not answer within 2 s"):
        process.run(command, timeout=2)
    assert alive(wait_for_family(pids)) == []


def test_a_tool_that_is_absent_is_exit_3() -> None:
    with pytest.raises(EnvironmentUnavailable, match="cannot start /no/such/tool: No such file"):
        process.run(["/no/such/tool"])


def test_a_full_disk_is_told_as_one() -> None:
    error = process.cannot_write(Path("there"), OSError(28, "No space left on device"))
    assert "the disk is full" in error.message and error.exit_code == 3


def test_a_log_that_cannot_be_written_is_exit_3(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnavailable, match="absent/log: No such file"):
        RunningProcess(["true"], env={}, cwd=tmp_path, log_path=tmp_path / "absent" / "log")
