"""`report`: show a finished run again."""

from __future__ import annotations

from typing import Annotated

import typer

from ci import runrecord
from ci.errors import ExitCode, UsageError, choices
from ci.report import print_run

TERMINAL = "terminal"
LATER = ("html",)
"""Formats that have a name and no code yet."""


def main(
    run: Annotated[str, typer.Argument(help="A run's folder, or its name under results/.")] = "latest",
    format_: Annotated[str, typer.Option("--format", help="terminal; html is reserved.")] = TERMINAL,
) -> ExitCode:
    """Show a run: its table, and for each cell that is not ok the numbers, defects, advice and how to repeat it."""
    if format_ in LATER:
        raise UsageError(f"--format {format_} is reserved: this release shows a run in the terminal only.")
    if format_ != TERMINAL:
        raise UsageError(f"--format {format_}: unknown format; {choices(format_, (TERMINAL, *LATER))}")
    record = runrecord.read_run(runrecord.find(run))
    print_run(record)
    return record.exit_code()
