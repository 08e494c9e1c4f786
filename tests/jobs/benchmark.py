"""What a case costs, measured inside a stack for `nox -s bench`: a line of JSON for each measurement.

The same bodies run in forks of the warm server, as in every run, and in fresh processes that import torch and DeepSpeed
for each case, as test suites do that spawn their ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.jobs import bodies, cells, conftest, order, probe
from tests.jobs.launcher import Launcher, Outcome, RankContext

TIMES = "times.json"


def main() -> None:
    """python -m tests.jobs.benchmark ORDER WAY, with WAY one of `warm`, `fresh` and `parts`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("order", type=Path)
    parser.add_argument("way", choices=("warm", "fresh", "parts"))
    parser.add_argument("--repeats", type=int, default=1)
    given = parser.parse_args()
    ordered = order.read(given.order)
    os.environ.update(conftest.environment(ordered))
    launcher = Launcher("spawn" if given.way == "fresh" else "forkserver")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        if given.way != "fresh":
            _launch(launcher, bodies.wait_for_the_imports, ordered.cells[0], ordered, folder, ranks=1)
        for _ in range(given.repeats):
            for cell in ordered.cells:
                print(json.dumps(_measured(launcher, given.way, cell, ordered, folder)), flush=True)


def _measured(launcher: Launcher, way: str, cell: order.Cell, ordered: order.Order, folder: Path) -> dict[str, Any]:
    """cell, seconds of its ranks alone; warm: of everything, with reference and evidence; parts: where they go."""
    measured: dict[str, Any] = {"cell": cell.id, "way": way}
    if way == "warm":
        measured["ranks_s"] = _launch(launcher, bodies.train, cell, ordered, folder).duration_s
        whole = cells.run(cell, ordered, launcher, folder)
        if whole.problem is not None:
            raise RuntimeError(f"{cell.id}: {whole.problem}")
        measured["whole_s"] = whole.duration_s
    elif way == "fresh":
        measured["ranks_s"] = _launch(launcher, train_fresh, cell, ordered, folder).duration_s
    else:
        measured["parts"] = _parts(launcher, cell, ordered, folder)
    return measured


def _launch(
    launcher: Launcher,
    body: Callable[[RankContext], None],
    cell: order.Cell,
    ordered: order.Order,
    folder: Path,
    *,
    ranks: int | None = None,
    workdir: Path | None = None,
) -> Outcome:
    with contextlib.ExitStack() as stack:
        if workdir is None:
            workdir = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        clip, _ = cells.clipping(cell, launcher, ordered, workdir, folder / "log")
        outcome = launcher.run(
            body,
            world_size=ranks or cell.world_size,
            workdir=workdir,
            log=folder / "log",
            timeout_s=probe.LIMIT_S,
            payload=cells.payload(cell, ordered, clip),
        )
    if outcome.problem is not None:
        raise RuntimeError(f"{cell.id}: {outcome.problem}")
    return outcome


def without_preload() -> None:
    """Let the ranks of this process import what their case needs and no more: the server's preload is for many."""
    stub = types.ModuleType("tests.jobs.preload")
    stub.__dict__.update(READY=True, THREADS=1)
    sys.modules["tests.jobs.preload"] = stub


def train_fresh(context: RankContext) -> None:
    """A rank in a process of its own."""
    without_preload()
    bodies.train(context)


PARTS: tuple[tuple[str, str, str], ...] = (
    ("rendezvous", "tests.jobs.engine", "init_distributed"),
    ("model", "tests.jobs.grpo", "GrpoLora.build_on_rank"),
    ("model", "tests.jobs.adapter", "CustomAdapter.build_on_rank"),
    ("model", "tests.jobs.fp16_workload", "DenseFp16.build_on_rank"),
    ("model", "tests.jobs.sweep_workload", "EngineSweep.build_on_rank"),
    ("deepspeed.initialize", "deepspeed", "initialize"),
    ("recording", "tests.jobs.recorder", "Recorder.attach"),
    ("recording", "tests.jobs.recorder", "Recorder.micro_batch"),
    ("recording", "tests.jobs.recorder", "Recorder._close"),
    ("saving the record", "tests.jobs.recorder", "Recorder.save"),
    ("reading the records", "tests.jobs.referee", "read_records"),
)
"""(what is timed, module, function)."""


@contextlib.contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Seconds spent in each of PARTS inside the block, and in all of it."""
    spent: dict[str, float] = {}

    def wrap(label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[label] = spent.get(label, 0.0) + time.perf_counter() - began

        return timed

    for label, module, name in PARTS:
        *path, last = name.split(".")
        owner = functools.reduce(getattr, path, importlib.import_module(module))
        setattr(owner, last, wrap(label, getattr(owner, last)))
    began = time.perf_counter()
    yield spent
    spent["all"] = time.perf_counter() - began


def train_timed(context: RankContext) -> None:
    """A rank that notes where its time goes."""
    from tests.jobs.recorder import Recorder

    steps_s = []
    save = Recorder.save

    def saved(self: Recorder, *args: Any, **kwargs: Any) -> None:
        steps_s.append(self.training_s)
        save(self, *args, **kwargs)

    Recorder.save = saved  # type: ignore[method-assign]  # reason: in this fork only
    with _timed() as spent:
        bodies.train(context)
    spent["training steps"] = steps_s[-1]
    (context.workdir / f"{context.rank}.{TIMES}").write_text(json.dumps(spent))


def referee_timed(context: RankContext) -> None:
    """The reference, which notes where its time goes."""
    with _timed() as spent:
        bodies.referee(context)
    (context.workdir / f"referee.{TIMES}").write_text(json.dumps(spent))


def _parts(launcher: Launcher, cell: order.Cell, ordered: order.Order, folder: Path) -> dict[str, float]:
    """Seconds of each part of a case; of the ranks those of the slowest."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        workdir = Path(name)
        ranks_s = _launch(launcher, train_timed, cell, ordered, folder, workdir=workdir).duration_s
        of_ranks = [json.loads((workdir / f"{rank}.{TIMES}").read_text()) for rank in range(cell.world_size)]
        referee_s = _launch(launcher, referee_timed, cell, ordered, folder, ranks=1, workdir=workdir).duration_s
        of_referee = json.loads((workdir / f"referee.{TIMES}").read_text())
    slowest = max(of_ranks, key=lambda spent: float(spent["all"]))
    inside = slowest.pop("all")
    found = {f"ranks: {part}": seconds for part, seconds in slowest.items()}
    found["ranks: start and end of the processes"] = ranks_s - inside
    found["ranks: everything else"] = inside - sum(slowest.values())
    reading = of_referee["reading the records"]
    found["reference: start and end of the process"] = referee_s - of_referee["all"]
    found["reference: reading the records"] = reading
    found["reference: computing and writing"] = of_referee["all"] - reading
    return found


if __name__ == "__main__":
    main()
