"""The sessions people type: their names, that everything after `--` passes through, and that codes and signals do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STAND_IN = """
import os, pathlib, signal, sys, time
print("ci was given", sys.argv[1:], flush=True)
if "wait" in sys.argv:
    def stop(number, frame):
        pathlib.Path("stopped").write_text(signal.Signals(number).name)
        sys.exit(130)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    pathlib.Path("started").write_text("yes")
    time.sleep(60)
if "killed" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[-1]))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The real noxfile beside a `ci` that only tells what it was given, and locks that ask for nothing."""
    shutil.copy(ROOT / "noxfile.py", tmp_path)
    requirements = tmp_path / "ci" / "requirements"
    requirements.mkdir(parents=True)
    for name in ("host.txt", "dev.txt"):
        (requirements / name).touch()
    (tmp_path / "ci" / "__init__.py").touch()
    (tmp_path / "ci" / "__main__.py").write_text(STAND_IN)
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "nox", "--script-mode", "none", *arguments]


def test_each_session_has_a_line_for_nox_l() -> None:
    done = subprocess.run(command("--list"), cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line[2:].partition(" -> ") for line in done.stdout.splitlines() if line.startswith(("* ", "- "))]
    sessions = {name: text for name, _, text in lines}
    assert set(sessions) >= {
        *("cpu-zero", "cuda-zero", "npu-zero", "tests", "images", "lock", "lint", "types", "doctor", "base-image"),
    }
    assert all(text and len(text) <= 110 for text in sessions.values())


@pytest.mark.parametrize("code", [0, 1, 2, 3, 130])
def test_a_session_passes_everything_on_and_ends_with_the_code(project: Path, code: int) -> None:
    words = ["--stack", "report-a", "--job", "grpo-lora", str(code)]
    done = subprocess.run(command("-s", "cpu-zero", "--", *words), cwd=project, capture_output=True, text=True)
    assert f"ci was given {['run', '--backend', 'cpu', *words]}" in done.stdout
    assert done.returncode == code, done.stdout + done.stderr


def test_a_ci_that_was_killed_is_not_a_success(project: Path) -> None:
    done = subprocess.run(command("-s", "cpu-zero", "--", "killed"), cwd=project, capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_nox_reaches_ci(project: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(command("-s", "cpu-zero", "--", "wait"), cwd=project, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (project / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(process.pid, number)
        assert process.wait(30) == 130
    finally:
        process.kill()
    assert (project / "stopped").read_text() == number.name
