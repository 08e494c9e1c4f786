"""`audit`: what a user's own training log shows, and what the ledger knows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ci.audit.look import look
from ci.audit.tell import lines
from ci.commands.options import Versions, pins
from ci.errors import ExitCode, UsageError
from ci.matrix import load


def main(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE [FILE]", help="Training logs: logging.jsonl, trainer_state.json, or what the terminal showed."
        ),
    ],
    versions: Versions = None,
    clip: Annotated[
        float | None,
        typer.Option(
            "--clip", min=0, help="The clip value, 0 for none. Default: as in the log, else 1, the trainers' own."
        ),
    ] = None,
) -> ExitCode:
    """Look for known defects in one training log, or in two beside each other. Ends with 1 where something is found."""
    if len(files) > 2:
        raise UsageError(f"found {len(files)} files; expected one training log, or two to compare")
    matrix = load()
    audit = look(files, matrix, pins(versions or []), clip)
    for line in lines(audit, matrix):
        print(line)
    return ExitCode.FAILED if audit.answered else ExitCode.OK
