"""`diff`: what changed between two runs or two backends."""

from __future__ import annotations

from itertools import groupby
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from ci import runrecord
from ci.diff import diff
from ci.errors import ExitCode


def main(
    before: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or its name under results/.")],
    after: Annotated[str, typer.Argument(metavar="RUN", help="The run to hold against it.")] = "latest",
) -> ExitCode:
    """What changed between two runs, check by check. Ends like diff(1): 0 when nothing did, 1 when something did."""
    folders = [runrecord.find(run) for run in (before, after)]
    changes = diff(*(runrecord.read_run(folder) for folder in folders))
    out = Console(highlight=False)
    out.print(Text(f"{folders[0]} -> {folders[1]}"), soft_wrap=True)
    for cell, group in groupby(changes, key=lambda change: change.cell):
        out.print(Text(cell, style="bold"), soft_wrap=True)
        for change in group:
            out.print(Text(f"  {change.what}: {change.before} -> {change.after}"), soft_wrap=True)
    if not changes:
        out.print("nothing changed: the same cells, verdicts, defects, and values within tolerance")
    return ExitCode.FAILED if changes else ExitCode.OK
