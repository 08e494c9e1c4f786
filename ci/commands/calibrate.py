"""`calibrate`: measure the tolerances of matrix.yaml by repeating the cells of the lane `calibration` with new seeds.

Resumable, since it takes most of an hour: repeats already in results/calibration/ are not run again.
"""

from __future__ import annotations

import time
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ci import calibration, order, workers
from ci import evidence as evidence_lines
from ci.commands import options
from ci.errors import EnvironmentUnavailable, ExitCode, UsageError
from ci.interrupts import Interrupts
from ci.matrix import MATRIX_FILE, Matrix, load
from ci.plan import Plan, Selection, make_plan
from ci.provision.choose import choose
from ci.provision.recipe import recipe_for
from ci.repeats import SEPARATOR, Repeat, ordered
from ci.runrecord import EVIDENCE

LANE = "calibration"
MINIMUM_REPEATS = 30


def main(
    stack: Annotated[str, typer.Option("--stack", metavar="ID", help="Where nothing is wrong.")] = "newest",
    job: options.Jobs = None,
    case: options.Cases = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Repeats of each cell, a new seed each.")] = 30,
    runtime: options.Place = options.RuntimeName.VENV,
    write: Annotated[bool, typer.Option("--write", help="Put the groups measured into matrix.yaml.")] = False,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where repeats are kept.")] = Path(
        "results/calibration"
    ),
) -> ExitCode:
    """Repeat clean cells with new seeds and print the `tolerances:` section of matrix.yaml."""
    if write and repeats < MINIMUM_REPEATS:
        raise UsageError(f"--write needs at least {MINIMUM_REPEATS} repeats, not {repeats}")
    console = Console(highlight=False, stderr=True)
    matrix = load()
    selection = Selection(lane=LANE, stacks=(stack,), jobs=tuple(job or ()), cases=tuple(case or ()))
    plan = make_plan(matrix, selection)
    cells = {cell.id: cell for cell in plan.runnable}
    if write:
        _check_whole_groups(matrix, make_plan(matrix, Selection(lane=LANE, stacks=(stack,))), cells.keys())
    results = (folder / stack).resolve()
    results.mkdir(parents=True, exist_ok=True)
    wanted = [Repeat(cell, seed) for seed in range(1, repeats + 1) for cell in cells.values()]
    with Interrupts() as interrupts:
        place = choose(runtime, Path.cwd(), None, console.print).runtime
        environment = place.provision(recipe_for(matrix, stack, Path.cwd()))
        done = {evidence.cell for evidence in _clean(results)}
        missing = [repeat for repeat in wanted if repeat.as_cell.id not in done]
        console.print(f"{len(wanted)} repeats, {len(wanted) - len(missing)} of them kept from before")
        if missing:
            order_file = results / "order.json"
            backend = matrix.backends[plan.backend]
            order.write(order_file, ordered(plan.backend, backend, plan.stacks[stack], missing))
            chosen = workers.choose(
                [repeat.cell.world_size for repeat in missing],
                cores=workers.cores(),
                free_mb=workers.free_memory_mb(),
            )
            running = place.start(environment, order_file, results, chosen.count)
            try:
                while running.poll() is None:
                    interrupts.check()
                    time.sleep(1.0)
            finally:
                with interrupts.shield():
                    running.terminate()
    kept = [evidence for evidence in _clean(results) if evidence.cell.rpartition(SEPARATOR)[0] in cells]
    if not kept:
        raise EnvironmentUnavailable(f"no repeat left evidence; see {results / 'pytest.log'}")
    found = calibration.tolerances(
        calibration.largest(cells, matrix.jobs, [(e.cell.rpartition(SEPARATOR)[0], e) for e in kept])
    )
    print(calibration.as_yaml(found), end="")
    if write:
        section = calibration.as_yaml({**calibration.shipped(matrix), **found})
        MATRIX_FILE.write_text(calibration.replaced(MATRIX_FILE.read_text(encoding="utf-8"), section), encoding="utf-8")
    return ExitCode.OK


def _check_whole_groups(matrix: Matrix, lane: Plan, selected: AbstractSet[str]) -> None:
    """Raises UsageError where a tolerance would be written that some of the cells it judges had no part in."""
    for group, missing in calibration.partly_selected(lane.runnable, selected, matrix.jobs).items():
        raise UsageError(
            f"--write replaces whole groups, and {group.job} at ZeRO {', '.join(map(str, group.stages))} in"
            f" {group.dtype} is also made from {', '.join(missing)}; select these too"
        )


def _clean(results: Path) -> list[evidence_lines.Evidence]:
    """Complete evidence of earlier repeats; nothing where there is none yet."""
    path = results / EVIDENCE
    if not path.exists():
        return []
    recorded = evidence_lines.read(path).by_cell.values()
    return [evidence for evidence in recorded if evidence.problem is None and evidence.exception is None]
