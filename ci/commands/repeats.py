"""`repeats`: repeat clean cases with new seeds under load and look for false alarms.

Resumable, since it takes hours: repeats already in results/repeats/, or counted in docs/repeats.json by a machine
before this one, are not run again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ci import order, repeats, tallied, workers
from ci.commands import options
from ci.errors import ExitCode, UsageError
from ci.evidence import Evidence
from ci.interrupts import Interrupts
from ci.judge import judge_cell
from ci.matrix import Corrections, Matrix, load
from ci.plan import Plan, Selection, make_plan
from ci.progress import ProgressView
from ci.provision.choose import choose
from ci.provision.recipe import recipe_for
from ci.provision.runtime import Environment, Runtime
from ci.repeats import Repeat
from ci.runrecord import EVIDENCE, CellRecord
from ci.stackrun import StackOrder, run_stack

LANE = "repeats"
PAGE = Path("docs/tolerances.md")
TALLIED = Path("docs/repeats.json")
LOAD = 2
"""Cases side by side for each that the cores carry: every rank waits for a core now and then, as on a busy machine."""


def main(
    stack: Annotated[str, typer.Option("--stack", metavar="ID", help="Where nothing is wrong.")] = "newest",
    job: options.Jobs = None,
    case: options.Cases = None,
    count: Annotated[
        int, typer.Option("--repeats", min=1, help="Of each engine case; a TRL case gets one for twenty.")
    ] = 200,
    minutes: Annotated[
        float | None, typer.Option("--minutes", min=0, help="Stop after this; the same command goes on.")
    ] = None,
    runtime: options.Place = options.RuntimeName.VENV,
    write: Annotated[bool, typer.Option("--write", help=f"Put the counts into {TALLIED} and {PAGE}.")] = False,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the evidence is kept.")] = Path(
        "results/repeats"
    ),
) -> ExitCode:
    """Repeat clean cells; exit code 1 where one turns red or an error uses more than half of its tolerance."""
    if write and (job or case):
        raise UsageError("--write needs every case of the lane: leave --job and --case out")
    console = Console(highlight=False, stderr=True)
    matrix = load()
    plan = make_plan(
        matrix,
        Selection(
            lane=LANE, stacks=(stack,), jobs=tuple(job or ()), cases=tuple(case or ()), corrections=Corrections.ON
        ),
    )
    plan.require_runnable()
    results = (folder / stack).resolve()
    results.mkdir(parents=True, exist_ok=True)
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    with Interrupts() as interrupts:
        place = choose(runtime, Path.cwd(), None, console.print).runtime
        environment = place.provision(recipe_for(matrix, stack, Path.cwd()))
        start = _Place(matrix, plan, stack, place, environment, results, interrupts, console)
        pins = plan.stacks[stack].pins
        before = tallied.holding(tallied.read(TALLIED), plan.runnable, matrix, pins)
        done = {evidence.cell for evidence in repeats.kept(results / EVIDENCE)}
        done |= {Repeat(tally.cell, seed).as_cell.id for tally in before for seed in tally.seeds}
        for wanted in repeats.rounds(plan.runnable, count):
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            start.run([repeat for repeat in wanted if repeat.as_cell.id not in done], left_s)
    found = repeats.tallies(plan.runnable, repeats.kept(results / EVIDENCE), matrix, pins, before)
    for tally in found:
        print(repeats.told(tally))
    if write:
        TALLIED.write_text(tallied.text(found, matrix, pins), encoding="utf-8")
        versions = ", ".join(f"{name} {version}" for name, version in pins.items())
        section = repeats.section(found, datetime.now(UTC).date().isoformat(), f"{stack} ({versions})")
        PAGE.write_text(repeats.replaced(PAGE.read_text(encoding="utf-8"), section), encoding="utf-8")
    return ExitCode.OK if all(tally.clean for tally in found) else ExitCode.FAILED


@dataclass(frozen=True)
class _Place:
    """Where and with what a round runs."""

    matrix: Matrix
    plan: Plan
    stack: str
    runtime: Runtime
    environment: Environment
    folder: Path
    interrupts: Interrupts
    console: Console

    def run(self, wanted: Sequence[repeats.Repeat], limit_s: float | None) -> None:
        """One start of the ranks; each repeat leaves its evidence."""
        if not wanted:
            return
        pinned = self.plan.stacks[self.stack]
        cells = {repeat.as_cell.id: repeat.as_cell for repeat in wanted}
        order_file = self.folder / "order.json"
        backend = self.matrix.backends[self.plan.backend]
        order.write(order_file, repeats.ordered(self.plan.backend, backend, pinned, wanted))
        chosen = workers.choose(
            [cell.world_size for cell in cells.values()],
            cores=LOAD * workers.cores(),
            free_mb=workers.free_memory_mb(),
        )

        def judge(evidence: Evidence) -> CellRecord:
            return judge_cell(cells[evidence.cell], evidence, self.matrix, pinned.pins)

        what = StackOrder(self.environment, list(cells.values()), order_file, self.folder, chosen.count)
        with ProgressView(self.console, self.stack, [cell.job for cell in what.cells], chosen.count) as view:
            reason = run_stack(what, self.runtime, view, self.interrupts, judge, lambda _: None, limit_s=limit_s)
        done = {evidence.cell for evidence in repeats.kept(self.folder / EVIDENCE)}
        if lost := len(cells.keys() - done):
            self.console.print(f"{lost} of {len(cells)} repeats left no evidence: {reason}", markup=False)
