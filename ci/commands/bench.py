"""`bench`: what a run costs on this host, warm, and where its time goes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ci import evidence, facts, workers
from ci.bench import figure, install, lane, ranks, scale
from ci.bench.memory import Watch
from ci.errors import EnvironmentUnavailable, ExitCode, UsageError
from ci.matrix import load
from ci.provision.recipe import recipe_for
from ci.provision.site import Site
from ci.provision.venv import VenvRuntime, isolated_environment
from ci.runrecord import EVIDENCE

PAGE = Path("docs/benchmarks.md")
STACK = "newest"
ONE_CELL = ("--job", "grpo-lora", "--case", "trainer=engine,zero_stage=0,dtype=fp32")
MEMORY_EVERY_S = 0.5


def main(
    docker: Annotated[
        bool, typer.Option("--docker", help="Also the start in Docker; builds the image where there is none.")
    ] = False,
    deepspeed_tests: Annotated[
        Path | None,
        typer.Option("--deepspeed-tests", metavar="CHECKOUT", help="Also compare with a checkout's DistributedExec."),
    ] = None,
    install_too: Annotated[
        bool, typer.Option("--install", help="Also install the stack by uv and by pip; downloads it twice.")
    ] = False,
    write: Annotated[bool, typer.Option("--write", help=f"Write {PAGE}.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the runs are kept.")] = Path("results/bench"),
) -> ExitCode:
    """Measure ratios on `newest`: warm forks, overhead, lane, start, many cells, memory. For a quiet host."""
    if deepspeed_tests is not None and not (deepspeed_tests / "tests" / "unit" / "common.py").is_file():
        raise UsageError(f"--deepspeed-tests: found no tests/unit/common.py in {deepspeed_tests}; expected a checkout")
    console = Console(highlight=False, stderr=True)
    root = Path.cwd()
    matrix = load()
    recipe = recipe_for(matrix, STACK, root)
    python = VenvRuntime(root, say=console.print).provision(recipe).python
    environment = {
        **isolated_environment(python),
        # The bytecode that the lane's own runs have cached.
        "PYTHONPYCACHEPREFIX": str(Path(python).parent.parent / "pycache"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
    }
    stack = ranks.Stack(STACK, python, environment, root)
    out.mkdir(parents=True, exist_ok=True)

    console.print("the lane, warm")
    _run("venv", out, ONE_CELL)
    timed = _run("venv", out, ())
    recorded = evidence.read(timed.folder / EVIDENCE).by_cell
    world_sizes = [each.world_size for each in recorded.values()]
    chosen = workers.choose(world_sizes, cores=workers.cores(), free_mb=workers.free_memory_mb())
    figures = lane.figures(list(recorded.values()), timed.seconds, chosen.count, timed.memory_mb)
    import_s = _import_s(stack)
    figures.append(lane.start("venv", timed.first_case_s, import_s))
    if docker:
        console.print("the start in Docker")
        _run("docker", out, ONE_CELL)
        figures.append(lane.start("docker", _run("docker", out, ONE_CELL).first_case_s, import_s))
    if install_too:
        console.print("installing")
        figures += install.figures(recipe, Site.of(), sys.executable)
    console.print("ranks in warm forks and in fresh processes")
    compared, parts = ranks.figures(matrix, stack, out.resolve(), deepspeed_tests)
    console.print("many cells")
    figures = [*compared, *figures, *scale.figures(matrix, STACK, recorded)]

    hardware = facts.hardware()
    machine = f"{hardware.get('cores')} cores, {hardware.get('memory_mb')} MB, {hardware.get('processor')}"
    asked = " ".join(["nox -s bench", *(["--", *sys.argv[2:]] if sys.argv[2:] else [])])
    measured = f"Measured {datetime.now(UTC).date().isoformat()} on {machine} with `{asked}`"
    notes = figure.notes_of(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else ""
    text = figure.page(figures, parts, measured, notes)
    print(text, end="")
    if write:
        PAGE.write_text(text, encoding="utf-8")
    return ExitCode.OK


@dataclass(frozen=True)
class _Timed:
    """A run. seconds: from command to report; first_case_s: to the first case's log; memory_mb: the most it held."""

    seconds: float
    first_case_s: float
    memory_mb: float
    folder: Path


def _run(runtime: str, out: Path, selection: tuple[str, ...]) -> _Timed:
    command = [sys.executable, "-m", "ci", "run", "--runtime", runtime, "--stack", STACK, "--out", str(out), *selection]
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
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        with Watch(process.pid, MEMORY_EVERY_S) as memory:
            code = process.wait(timeout=3600)
            seconds = time.monotonic() - began
    finally:
        process.terminate()
        ended.set()
        watcher.join()
    if code not in (ExitCode.OK, ExitCode.FAILED) or not first:
        raise EnvironmentUnavailable(f"the lane ended with exit code {code}; look into {out / 'latest'}")
    return _Timed(seconds, first[0], memory.peak_mb, (out / "latest").resolve())


def _import_s(stack: ranks.Stack) -> float:
    """Seconds that importing the stack alone takes, as the rank server does it, warm: the smaller of two."""
    times = []
    for _ in range(2):
        began = time.monotonic()
        command = [stack.python, "-c", "import tests.jobs.preload"]
        subprocess.run(command, env=stack.environment, cwd=stack.root, check=True, timeout=600, capture_output=True)
        times.append(time.monotonic() - began)
    return min(times)
