"""`durations`: what each case took, from finished runs, for `--shard` and for the workflows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Annotated

import typer

from ci import durations, runrecord
from ci.durations import Durations
from ci.errors import ExitCode, UsageError
from ci.runfolder import explained
from ci.runrecord import RunRecord


def main(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs' folders, or names under results/.")],
    write: Annotated[bool, typer.Option("--write", help="Put the result into ci/durations.json, anew.")] = False,
) -> ExitCode:
    """Print what each case took in these runs, as ci/durations.json has it.

    With --write take quiet runs that cover the nightly lane: the file then knows what they have and nothing else.
    """
    found = measured(runrecord.read_run(runrecord.find(run)) for run in runs)
    if not found.seconds:
        raise UsageError(f"{' '.join(runs)}: found no cell that trained to the end; expected runs of the nightly lane")
    if not write:
        print(durations.text(found), end="")
        return ExitCode.OK
    with explained(durations.FILE):
        durations.FILE.write_text(durations.text(found), encoding="utf-8")
    counted = ", ".join(f"{len(cases)} of {job}" for job, cases in found.seconds.items())
    print(f"{durations.FILE.name}: cases measured: {counted}")
    return ExitCode.OK


def measured(runs: Iterable[RunRecord]) -> Durations:
    """Of the cells that trained to the end; what stopped early says nothing about how long a case takes."""
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for cell in run.cells:
            if cell.steps and cell.duration_s:
                name = cell.id.split("/", 3)[3].partition("+")[0]
                found.setdefault(cell.job, {}).setdefault(name, []).append(float(cell.duration_s))
    return Durations(
        seconds={
            job: {name: round(statistics.median(values), 1) for name, values in sorted(cases.items())}
            for job, cases in sorted(found.items())
        }
    )
