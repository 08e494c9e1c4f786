"""`defects`: write docs/known-defects.md from the ledger, or check that it is up to date."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ci.errors import CiError, ExitCode
from ci.known_defects import page
from ci.matrix import load

PAGE = Path("docs/known-defects.md")


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if the page is not up to date.")] = False,
) -> ExitCode:
    """Write docs/known-defects.md."""
    text = page(load())
    if check:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            raise CiError(f"{PAGE} is not what the ledger says; run `python -m ci defects`", ExitCode.FAILED)
        return ExitCode.OK
    PAGE.write_text(text, encoding="utf-8")
    return ExitCode.OK
