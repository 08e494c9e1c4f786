"""A lock per device, of which two runs never have the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ci.devicelocks import DeviceLocks

HOLD = """
import sys, time
from pathlib import Path
from ci.devicelocks import DeviceLocks
with DeviceLocks("cuda", Path(sys.argv[1])) as locks:
    print(locks.take("3"), flush=True)
    time.sleep(120)
"""


def test_a_lock_is_for_one_device_of_one_backend_and_ends_with_its_block(tmp_path: Path) -> None:
    with DeviceLocks("cuda", tmp_path) as others:
        with DeviceLocks("cuda", tmp_path) as ours:
            assert ours.take("0") and ours.take("1")
            assert not others.take("0") and not others.take("1") and others.take("2")
            with DeviceLocks("npu", tmp_path) as elsewhere:
                assert elsewhere.take("0")
        assert others.take("0") and others.take("1")


def test_the_lock_of_a_killed_run_is_free(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        with DeviceLocks("cuda", tmp_path) as ours:
            assert not ours.take("3")
            os.kill(other.pid, signal.SIGKILL)
            other.wait(60)
            assert ours.take("3")


def test_a_file_that_another_user_made_is_no_obstacle(tmp_path: Path) -> None:
    with DeviceLocks("cuda", tmp_path) as ours:
        assert ours.take("0")
    [made] = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o444, "readable for all, and written by nobody"


def test_a_device_whose_lock_cannot_be_made_is_free(tmp_path: Path) -> None:
    with DeviceLocks("cuda", tmp_path / "missing") as ours:
        assert ours.take("0")
    (tmp_path / ".zero-regression-matrix-cuda-1.lock").symlink_to(tmp_path / "elsewhere")
    with DeviceLocks("cuda", tmp_path) as ours:
        assert ours.take("1") and not (tmp_path / "elsewhere").exists()
