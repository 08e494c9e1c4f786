"""What can happen to a run: each ends tidily, says what was wrong, and keeps what was measured."""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.runfolder import LATEST, LOCK, is_running
from tests.faults.project import Project, evidence_of, lay_out, marked
from tests.unit.wheelhouse import BESIDES, make_stack, make_wheel

LIMIT_S = 60
MB = 1 << 20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 72 MB; a run wants 64 MB to start."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=72m,mode=777", "none", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root can mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_disk_that_fills_while_evidence_is_written(project: Project, small_disk: Path) -> None:
    ended = project.run("well", "full-disk", "after", limit_s=LIMIT_S, out=small_disk)
    assert ended.code == 3
    assert "the disk is full" in ended.said and "Traceback" not in ended.said
    # A line of evidence is a few hundred bytes, for which the last page of the disk may just have had room.
    assert re.search("Kept: the evidence of [123] of 3 cells", ended.said), ended.said
    assert ended.folder is not None and evidence_of(ended.folder)[:1] == ["well"]
    # Once there is space again, what was measured can be judged, whether run.json could be written or not.
    for log in (ended.folder / "logs").glob("*full-disk*"):
        log.unlink()
    again = project.again("judge", ended.folder)
    assert again.code == 1, again.said
    assert ended.verdicts == {"well": "ok", "full-disk": "error", "after": "error"}


def test_a_disk_that_is_full_before_the_record_is_written(project: Project, small_disk: Path, tmp_path: Path) -> None:
    """Filled from outside, and to the last byte."""
    go = tmp_path / "go"
    with project.started("well", "wait", out=small_disk, env={"FAULT_GO": str(go)}) as started:
        started.wait_until(lambda: started.begun("wait"))
        with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(MB // 16))
        ended = started.end(LIMIT_S)
    assert ended.code == 3
    assert "the disk is full" in ended.said and "Traceback" not in ended.said
    (small_disk / "filler").unlink()
    assert ended.folder is not None and evidence_of(ended.folder)[:1] == ["well"]
    assert project.again("judge", ended.folder).code == 1
    assert ended.verdicts == {"well": "ok", "wait": "error"}


def test_a_results_folder_that_is_read_only(project: Project, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    ended = project.run("well", limit_s=LIMIT_S, out=small_disk)
    assert ended.code == 3
    assert f"cannot write {small_disk}" in ended.said and "it is on a read-only file system" in ended.said
    assert "Traceback" not in ended.said and ended.folder is None


def test_what_a_killed_run_left_is_not_in_the_way(project: Project) -> None:
    with project.started("well", "wait", killed=True) as killed:
        killed.wait_until(lambda: killed.begun("wait"))
        (folder,) = killed.folders()
        assert is_running(folder)
        killed.process.kill()
        killed.process.wait()
        for pid in marked(killed.mark):
            os.kill(pid, signal.SIGSTOP)  # else its own limits would end it before the next run can
        assert (folder / LOCK).exists() and not is_running(folder)
        again = project.again("judge", folder)
        assert again.code == 1 and "1 error, 1 ok" in again.said, again.said
        assert len(marked(killed.mark)) >= 3
        # The next run under the same folder for temporary files ends what is still there and removes its files.
        following = project.run("well", limit_s=LIMIT_S, env={"TMPDIR": str(killed.scratch)})
        assert following.code == 0
        assert marked(killed.mark) == {} and list(killed.scratch.iterdir()) == []


def test_two_runs_of_one_stack_at_once(project: Project, tmp_path: Path) -> None:
    out = tmp_path / "results"
    with project.started("well", "slow", out=out) as one, project.started("well", "slow", out=out) as two:
        one.wait_until(lambda: len(one.folders()) == 2)
        codes = [one.end(LIMIT_S).code, two.end(LIMIT_S).code]
    assert codes == [0, 0]
    folders = one.folders()
    assert len(folders) == 2 and (out / LATEST).resolve() in folders
    assert [sorted(evidence_of(folder)) for folder in folders] == [["slow", "well"]] * 2


CLOCK = """
import datetime, os, time
BACK = float(os.environ["CLOCK_GOES_BACK_AT"])
real = time.time
time.time = lambda: real() - (3600 if real() > BACK else 0)
time.time_ns = lambda: int(time.time() * 1e9)
class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
datetime.datetime = Clock
"""


def test_a_clock_that_is_set_back(project: Project, tmp_path: Path) -> None:
    """An hour, while the second case runs; in all processes of the run, as a clock is."""
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    go = tmp_path / "go"
    env = {"PYTHONPATH": str(tmp_path), "CLOCK_GOES_BACK_AT": str(time.time() + 4), "FAULT_GO": str(go)}
    with project.started("well", "wait", "after", env=env) as started:
        started.wait_until(lambda: started.begun("wait"))
        time.sleep(max(0.0, float(env["CLOCK_GOES_BACK_AT"]) - time.time()) + 0.2)
        go.touch()
        ended = started.end(LIMIT_S)
    assert ended.code in (0, 1), ended.said
    assert ended.verdicts["well"] == ended.verdicts["after"] == "ok"
    assert 0 < (ended.record.duration_s or 0) < ended.seconds + 1
    for cell in ended.record.cells:
        assert 0 < (cell.duration_s or 0) < ended.seconds


SEED = int(os.environ.get("FAULT_SEED", secrets.randbelow(1 << 30)))
MOMENTS_S = [random.Random(SEED + number).uniform(0, 5) for number in range(10)]
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler of its own: Python's start is not ours."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", range(10))
def test_an_interrupt_at_a_random_moment(project: Project, number: int) -> None:
    which, moment = SIGNALS[number % 3], MOMENTS_S[number]
    with project.started("well", "slow", "after") as started:
        started.wait_until(lambda: catches(started.process.pid, signal.SIGTERM))
        time.sleep(moment)
        started.process.send_signal(which)
        ended = started.end(moment + 20)
    told = f"FAULT_SEED={SEED}, {which.name} after {moment:.3f} s: {ended.said}"
    assert ended.code in (0, 130), told
    assert "Traceback" not in ended.said, told
    if ended.folder is None:
        assert ended.code == 130, told
        return
    measured = evidence_of(ended.folder)
    for cell in ended.record.cells:
        fault = str(cell.case["user_code"])
        if fault in measured and cell.verdict != "error":
            assert cell.verdict == "ok", told
        else:
            assert ended.code == 130 and cell.reason == f"interrupted by {which.name}", told
    if ended.code == 0:
        assert set(ended.verdicts.values()) == {"ok"}, told


def test_a_wheel_with_a_wrong_hash(tmp_path: Path) -> None:
    """The lock was made from another file of the same name: nothing is installed, and nothing half made is found."""
    root, wheels = tmp_path / "project", tmp_path / "wheels"
    lay_out(root, "here", BESIDES["pytest"])
    make_stack(root, wheels, {}, "here")
    make_wheel(wheels, "ninja", BESIDES["ninja"], requires=("something-else",))
    env = {"UV_FIND_LINKS": str(wheels), "UV_NO_INDEX": "1"}
    ended = Project(root, ("--runtime", "venv"), env).run("well", limit_s=LIMIT_S)
    assert ended.code == 3 and "Traceback" not in ended.said
    assert "stack here cannot be installed: a download does not have the hash" in ended.said, ended.said
    assert ended.verdicts == {"well": "error"}
    assert [path.name for path in (root / ".cache" / "venvs").iterdir() if not path.name.endswith(".lock")] == []
