"""`judge`: judge a finished run again, with the matrix.yaml of today, without running it."""

from __future__ import annotations

from typing import Annotated

import typer

from ci import evidence, junit, runrecord, shown
from ci.errors import ExitCode, UsageError
from ci.judge import judge_run
from ci.matrix import load
from ci.page.publish import publish_beside
from ci.report import print_run
from ci.runfolder import explained, is_running


def main(
    run: Annotated[str, typer.Argument(help="A run's folder, or its name under results/.")] = "latest",
) -> ExitCode:
    """Judge a run's evidence again with the current matrix.yaml and rewrite its run.json, junit.xml and page."""
    folder = runrecord.find(run)
    if is_running(folder):
        raise UsageError(f"{folder}: this run is still going on; judge it when it has ended.")
    plan = runrecord.read_plan(folder)
    reading = evidence.read(folder / runrecord.EVIDENCE)
    # How long the run took is not in its evidence; a run that was killed never knew.
    duration = runrecord.read_run(folder).duration_s if (folder / runrecord.RUN).exists() else None
    record = judge_run(plan, reading, load(), duration)
    with explained(folder, "the old run.json is as it was"):
        runrecord.write_run(folder, record)
        junit.write(folder, record)
    publish_beside(folder)
    print_run(shown.of(record, folder))
    return record.exit_code()
