"""What the ranks of a fault case do, in place of training: each fault by its name, in code of a name to look for.

Copied over tests/jobs/fp16_direct.py of a project of the test's own; standard library only, so that it runs in any
interpreter. Rank 1 has the fault, rank 0 trains well or waits for it as a rank in a collective does.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.jobs.launcher import RankContext


def train(context: RankContext) -> None:
    """The case's `user_code` names the fault."""
    fault = str(context.payload["case"]["user_code"])
    print(f"rank {context.rank} begins {fault}", flush=True)
    if context.rank == 1 and fault in FAULTS:
        FAULTS[fault]()
    elif context.rank == 0 and fault in WAITED_FOR:
        wait_for_the_other_rank()
    elif fault == "slow":
        time.sleep(2.0)
    (context.workdir / f"trained{context.rank}").touch()


def wait_for_the_other_rank() -> None:
    """A collective that one rank never enters."""
    time.sleep(600)


def killed() -> None:
    """As the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def segfault() -> None:
    """A null pointer, in native code."""
    ctypes.string_at(0)


def hang_in_python() -> None:
    """Never ends, and does not mind being asked to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        time.sleep(1)


def hang_in_c() -> None:
    """Holds the interpreter's lock in native code, so that no Python runs in this rank any more."""
    library = ctypes.PyDLL(None)
    library.sleep(600)


def leave_early() -> None:
    """Exit code 0 before the work is done."""
    os._exit(0)


def fork_children() -> None:
    """Ends well and leaves behind: a fork of itself, a program, a program in a session of its own."""
    if os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleeper)
    subprocess.Popen(sleeper, start_new_session=True)


def fill_memory() -> None:
    """Take memory until the limit of the container is reached; without one, not all that the host has."""
    taken = [bytearray(b"x") * (16 << 20) for _ in range(128)]
    raise RuntimeError(f"there was no limit: {len(taken)} times 16 MB")


def fill_disk() -> None:
    """Print more than the disk holds; the evidence of this case then has no room."""
    line = b"x" * (1 << 20)
    while True:
        os.write(1, line)


def wait_for_the_test() -> None:
    """Goes on until the test lets it."""
    go = Path(os.environ.get("FAULT_GO", "/tmp/go"))
    for _ in range(3000):
        if go.exists():
            return
        time.sleep(0.02)


FAULTS: dict[str, Callable[[], None]] = {
    "children": fork_children,
    "early": leave_early,
    "full-disk": fill_disk,
    "hang-c": hang_in_c,
    "hang-python": hang_in_python,
    "killed": killed,
    "memory": fill_memory,
    "segfault": segfault,
    "wait": wait_for_the_test,
}
WAITED_FOR = ("hang-c", "hang-python", "killed", "segfault", "memory")
