"""A project of the test's own: all of our code, from the command line to the rank server, around ranks without torch.

A fault must be survived by the program as it is, so nothing of it is replaced but what ranks compute: `ranks/` lies
over three modules of tests/jobs. Everything a run starts carries a mark, has its own folder for temporary files, and
is looked for when the run has ended.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ci.runfolder import LOCK, is_running
from ci.runrecord import CellRecord, RunRecord, read_run

ROOT = Path(__file__).resolve().parents[2]
RANKS = Path(__file__).parent / "ranks"
MARK = "FAULT_TEST"
FAULTS = (
    *(
        "well",
        "children",
        "early",
        "full-disk",
        "hang-c",
        "hang-python",
        "killed",
        "segfault",
        "slow",
        "wait",
        "memory",
    ),
    "after",
)
"""Values of the case key that names the fault, in the order in which they run: `well` before any, `after` last."""
CASE_LIMIT_S = 4
MATRIX = """\
schema: 1
package_indexes: {{}}
backends:
  cpu: {{accelerator: cpu, communication: gloo, start_method: forkserver, dockerfile: docker/cpu.Dockerfile,
        base_image: "debian:bookworm-slim"}}
stacks:
  {stack}: {{backend: cpu, about: x, python: "3.11", lock: docker/locks/{stack}.txt, pins: {{pytest: "{pytest}"}}}}
lanes:
  pull-request: {{stacks: [{stack}], cases: {{rank-faults: [{{user_code: [{faults}]}}]}}}}
jobs:
  rank-faults:
    about: a fault by its name
    requires: {{}}
    timeout_s: {limit}
    keys:
      zero_stage: {{default: 0, values: [0]}}
      dtype: {{default: fp32, values: [fp32]}}
      user_code: {{values: [{faults}]}}
      path: {{default: direct, values: [direct]}}
tolerances:
  - stages: [0]
    dtype: fp32
    gradient_accumulation_steps: [1]
    checks: {{reported_norm: {{tolerance: 1e-3, largest: 1e-4, repeats: 30}}}}
defects: []
"""


def lay_out(root: Path, stack: str = "here", pytest: str | None = None) -> None:
    """Put the project's files under `root`. pytest: the version that the stack pins, by default what is here."""
    jobs = root / "tests" / "jobs"
    jobs.parent.mkdir(parents=True, exist_ok=True)
    (root / "tests" / "__init__.py").touch()
    shutil.copytree(ROOT / "tests" / "jobs", jobs, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for module in RANKS.glob("*.py"):
        shutil.copy(module, jobs)
    job = (jobs / "test_fp16_optimizers.py").read_text()
    (jobs / "test_rank_faults.py").write_text(job.replace("fp16-optimizers", "rank-faults"))
    docker = root / "docker"
    shutil.copytree(ROOT / "docker", docker, dirs_exist_ok=True)
    if not (root / "ci").exists():
        (root / "ci").symlink_to(ROOT / "ci")
    version = pytest or importlib.metadata.version("pytest")
    text = MATRIX.format(stack=stack, pytest=version, faults=", ".join(FAULTS), limit=CASE_LIMIT_S)
    (root / "matrix.yaml").write_text(text)


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it left."""

    code: int
    said: str
    seconds: float
    folder: Path | None
    scratch: Path

    @property
    def record(self) -> RunRecord:
        assert self.folder is not None, self.said
        return read_run(self.folder)

    @property
    def verdicts(self) -> dict[str, str]:
        """Verdict by the fault's name."""
        return {str(cell.case["user_code"]): str(cell.verdict) for cell in self.record.cells}

    def cell(self, fault: str) -> CellRecord:
        return next(cell for cell in self.record.cells if cell.case["user_code"] == fault)

    def reason(self, fault: str) -> str:
        return self.cell(fault).reason or ""

    def stacks(self, fault: str) -> dict[str, str]:
        """The Python stacks that were kept of a case, by the rank's name."""
        assert self.folder is not None
        found = (self.folder / "logs").glob(f"*__{fault}.rank*.stack")
        return {path.suffixes[-2].removeprefix("."): path.read_text() for path in found}


@dataclass
class Started:
    """A `python -m ci` at work. `end` waits; whoever starts one must end it."""

    process: subprocess.Popen[bytes]
    out: Path
    log: Path
    scratch: Path
    mark: str
    began: float = field(default_factory=time.monotonic)

    def folders(self) -> list[Path]:
        """The run's folder, as soon as there is one."""
        return sorted(path for path in self.out.glob("*-cpu-*") if path.is_dir())

    def wait_until(self, what: Callable[[], object], timeout: float = 60.0) -> None:
        """Until it holds; a program that has ended before is a failure with its words."""
        deadline = time.monotonic() + timeout
        while not what():
            assert time.monotonic() < deadline, f"it did not happen in {timeout:.0f} s: {self.log.read_text()}"
            assert self.process.poll() is None or what(), f"ended too early: {self.log.read_text()}"
            time.sleep(0.02)

    def begun(self, fault: str) -> bool:
        """Whether the ranks of this case are at work."""
        logs = [path for folder in self.folders() for path in folder.glob(f"logs/*__{fault}.log")]
        return any("rank 1 begins" in path.read_text(errors="replace") for path in logs)

    def end(self, limit_s: float) -> Ended:
        """Wait for the end, which must come within the limit."""
        try:
            code = self.process.wait(max(0.0, self.began + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {limit_s:.0f} s: {self.log.read_text()}") from None
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
                kill_marked(self.mark)
        folders = self.folders()
        seconds = time.monotonic() - self.began
        folder = folders[-1] if folders else None
        return Ended(code, self.log.read_text(errors="replace"), seconds, folder, self.scratch)


@dataclass(frozen=True)
class Project:
    """The project and how its commands are run: `env` is added to each run's environment."""

    root: Path
    words: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def started(
        self, *faults: str, out: Path | None = None, env: Mapping[str, str] | None = None, killed: bool = False
    ) -> Iterator[Started]:
        """`run` of these cases, and nothing of it left afterwards. killed: it leaves its lock, not held."""
        chosen = [word for fault in faults for word in ("--case", f"user_code={fault}")]
        results = out or self.root / "results" / uuid.uuid4().hex[:8]
        words = ["run", *self.words, *chosen, "--out", str(results)]
        with self.command(*words, out=results, env=env, killed=killed) as started:
            yield started

    @contextlib.contextmanager
    def command(
        self, *words: str, out: Path, env: Mapping[str, str] | None = None, killed: bool = False
    ) -> Iterator[Started]:
        """Any command of the program, with a mark and a folder for temporary files of its own."""
        mark = uuid.uuid4().hex
        # Not under pytest's folder: the address of a socket in it has room for about a hundred characters.
        scratch = Path(tempfile.mkdtemp(prefix="f-"))
        log = self.root / f"said.{mark[:8]}"
        environment = {**os.environ, "TMPDIR": str(scratch), MARK: mark, **self.env, **(env or {})}
        environment.pop("PYTEST_ADDOPTS", None)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [sys.executable, "-m", "ci", *words],
                cwd=self.root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
        started = Started(process, out, log, scratch, mark)
        try:
            yield started
        finally:
            left_running = process.poll() is None
            if left_running:
                process.kill()
                process.wait()
            left = marked(mark)
            kill_marked(mark)
            files = sorted(str(path.relative_to(scratch)) for path in scratch.rglob("*"))
            shutil.rmtree(scratch, ignore_errors=True)
        assert not left_running, f"the test did not wait for the end: {log.read_text()}"
        assert left == {}, f"processes were left: {left}"
        assert files == [], f"temporary files were left: {files}"
        for folder in started.folders():
            assert not is_running(folder), f"{folder} is still locked"
            allowed = {LOCK} if killed else set()
            hidden = sorted({path.name for path in folder.iterdir() if path.name.startswith(".")} - allowed)
            assert hidden == [], f"half a file or a lock was left: {hidden}"

    def run(self, *faults: str, limit_s: float, out: Path | None = None, env: Mapping[str, str] | None = None) -> Ended:
        """`run` of these cases from start to end."""
        with self.started(*faults, out=out, env=env) as started:
            return started.end(limit_s)

    def again(self, command: str, folder: Path) -> Ended:
        """`judge` or `report` of a run's folder."""
        with self.command(command, str(folder), out=self.root / "none") as started:
            return started.end(30)


def marked(mark: str) -> dict[int, str]:
    """Processes that carry the mark, with their command lines."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def kill_marked(mark: str) -> None:
    """End what a failing test left; each is ours by its mark."""
    for pid in marked(mark):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def evidence_of(folder: Path) -> list[str]:
    """The cells of evidence.jsonl, by the fault's name, in the order written."""
    lines = (folder / "evidence.jsonl").read_text().splitlines()
    return [json.loads(line)["cell"].rpartition("/")[2] for line in lines]
