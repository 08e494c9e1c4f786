"""Processes of a run, in sessions of their own, as those of ranks are: whether anything of them is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

#: Writes the pids of itself, of a child in a session of its own and of that child's child, and then waits.
FAMILY = """
import os, signal, sys, time
first = os.getpid()
if "stubborn" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(sys.argv[1], "a") as file:
    file.write(f"{os.getpid()}\\n")
if os.fork() == 0:
    os.setsid()
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    if os.fork() == 0:
        os.setsid()
        with open(sys.argv[1], "a") as file:
            file.write(f"{os.getpid()}\\n")
if os.getpid() == first and "short" in sys.argv:
    sys.exit(0)
time.sleep(60)
"""


def wait_for_family(file: Path) -> list[int]:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if file.exists() and len(pids := file.read_text().split()) == 3:
            return list(map(int, pids))
        time.sleep(0.01)
    raise AssertionError("the processes did not start")


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "Z" not in status(pid)]


def status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def left_by_a_killed_run(folder: Path) -> list[int]:
    """The family of a run that was killed; its temporary files are in `folder`."""
    pids = folder / "pids"
    program = f"""
import os, signal, sys, time
from pathlib import Path
from ci.provision.process import RunningProcess
RunningProcess([sys.executable, "-c", {FAMILY!r}, {str(pids)!r}], env=os.environ, cwd=Path("."), log_path=Path("log"))
while not os.path.exists({str(pids)!r}) or len(open({str(pids)!r}).read().split()) < 3:
    time.sleep(0.02)
os.kill(os.getpid(), signal.SIGKILL)
"""
    env = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", program], cwd=folder, env=env).returncode == -signal.SIGKILL
    return wait_for_family(pids)
