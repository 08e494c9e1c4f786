"""`durations`: write what each case took, from finished runs, for `--shard` and for the workflows."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Annotated

import typer

from ci import durations, runrecord
from ci.durations import Durations
from ci.errors import ExitCode, UsageError
from ci.runrecord import RunRecord


def main(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs' folders, or names under results/.")],
) -> ExitCode:
    """Write ci/durations.json anew from these runs; take quiet ones that cover the nightly lane."""
    found = measured(runrecord.read_run(runrecord.find(run)) for run in runs)
    if not found.seconds:
        raise UsageError(f"{' '.join(runs)}: found no cell that trained to the end; expected runs of the nightly lane")
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
