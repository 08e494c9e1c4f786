"""`sweep`: draw engine configurations that nobody wrote a case for, and make small what fails."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ci import cases
from ci.commands import options
from ci.errors import ExitCode, UsageError, choices
from ci.interrupts import Interrupts
from ci.matrix import Matrix, Scalar, load
from ci.plan import PlannedStack
from ci.provision.choose import choose
from ci.provision.recipe import recipe_for
from ci.sweep.draw import allowed
from ci.sweep.run import JOB, Place, Sweep
from ci.sweep.tell import report


def main(
    stack: Annotated[str, typer.Option("--stack", metavar="ID", help="The stack to sweep.")] = "newest",
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="When it ends by itself.")] = 30.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the draw; the same seed draws the same configurations.")] = 0,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", metavar="KEY=VALUE[,KEY=VALUE]", help="Run only this configuration; repeatable."),
    ] = None,
    runtime: options.Place = options.RuntimeName.VENV,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where evidence is kept.")] = Path(
        "results/sweep"
    ),
) -> ExitCode:
    """Draw configurations, check everything, and print the smallest of each kind that fails."""
    console = Console(highlight=False, stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    matrix = load()
    if JOB not in matrix.jobs:
        raise UsageError(f"matrix.yaml has no job {JOB}, which a sweep draws from; {choices(JOB, matrix.jobs)}")
    if stack not in matrix.stacks:
        raise UsageError(f"unknown stack {stack!r}; {choices(stack, matrix.stacks)}")
    given = [_case(matrix, words) for words in case or ()]
    results = (folder / stack).resolve()
    results.mkdir(parents=True, exist_ok=True)
    with Interrupts() as interrupts:
        place = choose(runtime, Path.cwd(), None, say).runtime
        environment = place.provision(recipe_for(matrix, stack, Path.cwd()))
        entry = matrix.stacks[stack]
        planned = PlannedStack(stack, dict(entry.pins), Path(entry.lock), check_pins=True)
        sweep = Sweep(matrix, Place(place, environment, planned, results), interrupts, say)
        if given:
            sweep.only(given)
        else:
            sweep.run(seed, minutes)
    for line in report(matrix, stack, sweep.fold):
        print(line)
    return ExitCode.FAILED if sweep.fold.findings else ExitCode.OK


def _case(matrix: Matrix, words: str) -> dict[str, Scalar]:
    """The configuration that the words describe; what they leave out is at its default."""
    job = matrix.jobs[JOB]
    values = cases.parse_filter(words, {JOB: job})[JOB]
    try:
        whole = cases.resolve(job, values)
    except KeyError as error:
        raise UsageError(f"--case {words}: no {error.args[0]}; it has no default") from error
    if not allowed(job, whole):
        reasons = [each.reason for each in job.exclude if cases.matches(each.where, whole)]
        raise UsageError(f"--case {words}: {'; '.join(reasons)}")
    return whole
