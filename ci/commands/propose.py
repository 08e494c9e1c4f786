"""`propose`: one open pull request for a branch, opened or rewritten, with what a command printed as its text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ci.errors import ExitCode, UsageError

MOST_LETTERS = 60_000
"""GitHub takes 65,536 in all."""


def main(
    branch: Annotated[str, typer.Option("--branch", metavar="NAME", help="What was pushed.")],
    title: Annotated[str, typer.Option("--title", metavar="TEXT", help="The pull request's.")],
    said: Annotated[Path, typer.Option("--said", metavar="FILE", help="What was printed; its end, if it is long.")],
    base: Annotated[str, typer.Option("--base", metavar="NAME", help="Where it should go.")] = "main",
    draft: Annotated[bool, typer.Option("--draft", help="It must not be merged as it is.")] = False,
) -> ExitCode:
    """Open or rewrite the pull request of a branch, from a job of a workflow.

    The repository, its token and the API's address come from the environment of the job.
    """
    from ci.github import GitHub  # requests takes a moment

    try:
        text = said.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UsageError(f"{said}: {error.strerror}; expected what a command printed") from error
    # Longer than any run of backticks in it, so that the text can't end it.
    fence = "`" * max(3, 1 + max((len(word) for word in text.split() if set(word) == {"`"}), default=0))
    body = f"Made by the weekly run; a newer one rewrites it.\n\n{fence}text\n{text[-MOST_LETTERS:]}\n{fence}\n"
    print(GitHub().propose(branch, base, title, body, draft=draft))
    return ExitCode.OK
