"""`issues`: one issue for each group of cells that a scheduled run found failing; closed when it is right again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ci import issues, runrecord, shown
from ci.errors import ExitCode
from ci.issues import Close, Open
from ci.runfolder import explained


def main(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="The folders of one night's runs.")],
    history: Annotated[
        Path, typer.Option("--history", metavar="FILE", help="What the nights before found; written with --apply.")
    ] = Path("history.json"),
    apply: Annotated[
        bool, typer.Option("--apply", help="Ask GitHub, and write the history. Default: say what would be opened.")
    ] = False,
) -> ExitCode:
    """Open, rewrite or close issues after a scheduled run.

    With --apply the repository, its token and the API's address come from the environment of a workflow's job.
    """
    folders = [shown.read(runrecord.find(run)) for run in runs]
    tonight = issues.night(folders, _url())
    after = issues.advance(issues.read(history), tonight)
    if not apply:
        for operation in issues.operations(after, tonight, ()):
            print(f"would open or rewrite: {getattr(operation, 'title', '')}")
        return ExitCode.OK
    from ci.github import GitHub  # requests takes a moment

    github = GitHub()
    for operation in issues.operations(after, tonight, github.open_issues()):
        done = "opened" if isinstance(operation, Open) else "closed" if isinstance(operation, Close) else "rewrote"
        print(f"{done} {github.apply(operation)}", flush=True)
    # Last: where an issue could not be written, the same runs must ask for it again.
    with explained(history):
        history.write_text(after.model_dump_json(indent=1, exclude_defaults=True) + "\n", encoding="utf-8")
    failing = sum(group.bad is not None for group in after.groups.values())
    print(f"groups: {len(tonight.cells)} ran, {len(after.groups)} known, {failing} with failing cells")
    return ExitCode.OK


def _url() -> str | None:
    """Of the workflow's run that this is a part of."""
    words = [os.environ.get(name) for name in ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_RUN_ID")]
    return "{}/{}/actions/runs/{}".format(*words) if all(words) else None
