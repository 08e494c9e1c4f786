"""`bench`: what the pull-request lane costs on this host, warm, and where its time goes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from ci import bench, evidence, facts, workers
from ci.commands import options
from ci.errors import EnvironmentUnavailable, ExitCode
from ci.matrix import load
from ci.provision.recipe import recipe_for
from ci.provision.venv import VenvRuntime
from ci.runrecord import EVIDENCE

PAGE = Path("docs/benchmarks.md")
STACK = "newest"


def main(
    runtime: options.Place = options.RuntimeName.VENV,
    write: Annotated[bool, typer.Option("--write", help=f"Write {PAGE}.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the runs are kept.")] = Path("results/bench"),
) -> ExitCode:
    """Run the pull-request lane on `newest` twice, the first to warm everything, and print the second's figures."""
    kind = str(runtime.value)
    figures = [bench.plan_figure(load())]
    _lane(kind, out, ["--job", "grpo-lora", "--case", "trainer=engine,zero_stage=0,dtype=fp32"])
    wall, first, folder = _lane(kind, out, [])
    recorded = list(evidence.read(folder / EVIDENCE).by_cell.values())
    chosen = workers.choose([e.world_size for e in recorded], cores=workers.cores(), free_mb=workers.free_memory_mb())
    figures += bench.lane_figures(recorded, wall, chosen.count)
    figures.append(bench.start_figure(kind, first, _import_s()))
    hardware = facts.hardware()
    described = f"{hardware.get('cores')} cores, {hardware.get('memory_mb')} MB, {hardware.get('processor')}"
    command = f"nox -s bench -- --runtime {kind}"
    text = bench.page(figures, described, datetime.now(UTC).date().isoformat(), command)
    print(text, end="")
    if write:
        PAGE.write_text(text, encoding="utf-8")
    return ExitCode.OK


def _lane(kind: str, out: Path, selection: list[str]) -> tuple[float, float, Path]:
    """(seconds from command to report, seconds to the first case's log, the run's folder)."""
    command = [sys.executable, "-m", "ci", "run", "--runtime", kind, "--stack", STACK, "--out", str(out), *selection]
    before = set(out.glob("*/logs/*.log"))
    first: list[float] = []
    ended = threading.Event()
    began = time.monotonic()

    def look() -> None:
        while not ended.wait(0.05):
            if set(out.glob("*/logs/*.log")) - before:
                first.append(time.monotonic() - began)
                return

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        code = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=3600, check=False).returncode
    finally:
        ended.set()
        watcher.join()
    if code not in (ExitCode.OK, ExitCode.FAILED) or not first:
        raise EnvironmentUnavailable(f"the lane ended with exit code {code}; look into {out / 'latest'}")
    return time.monotonic() - began, first[0], (out / "latest").resolve()


def _import_s() -> float:
    """Seconds that importing the stack alone takes, as the rank server does it, warm: the smaller of two."""
    root = Path.cwd()
    python = VenvRuntime(root).provision(recipe_for(load(), STACK, root)).python
    times = []
    for _ in range(2):
        began = time.monotonic()
        subprocess.run(
            [python, "-c", "import tests.jobs.preload"],
            # The bytecode that the lane's own runs have cached.
            env={
                "PYTHONPYCACHEPREFIX": str(Path(python).parent.parent / "pycache"),
                "DS_ACCELERATOR": "cpu",
                "OMP_NUM_THREADS": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "PATH": "/usr/bin:/bin",
            },
            check=True,
            timeout=600,
            capture_output=True,
        )
        times.append(time.monotonic() - began)
    return min(times)
