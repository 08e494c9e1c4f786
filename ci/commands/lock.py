"""`lock`: resolve the stacks' locks anew, or say that one no longer follows from matrix.yaml."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated

import typer

from ci.errors import ExitCode, UsageError, choices
from ci.matrix import load
from ci.provision import locks
from ci.provision.recipe import recipe_for
from ci.provision.site import Site


def main(
    stacks: Annotated[list[str] | None, typer.Argument(metavar="[STACK]...", help="Default: all of them.")] = None,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Take the newest release of whatever is no pin.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 where a lock would change.")] = False,
) -> ExitCode:
    """Lock every package of the stacks by version and hash, from the pins in matrix.yaml."""
    matrix = load()
    for stack in stacks or ():
        if stack not in matrix.stacks:
            raise UsageError(f"unknown stack {stack!r}; {choices(stack, matrix.stacks)}")
    site, root, code = Site.of(), Path.cwd(), ExitCode.OK
    for stack in stacks or sorted(matrix.stacks):
        recipe = recipe_for(matrix, stack, root)
        if recipe.lock is None:
            continue
        before = recipe.lock.read_text(encoding="utf-8") if recipe.lock.exists() else ""
        after = locks.compile_lock(recipe, site, upgrade=upgrade)
        if after == before:
            print(f"{stack}: unchanged")
        elif check:
            print(f"{stack}: {recipe.lock.relative_to(root)} does not follow from matrix.yaml:")
            for line in difflib.unified_diff(before.splitlines(), after.splitlines(), "now", "new", n=0, lineterm=""):
                print(f"  {line}")
            code = ExitCode.FAILED
        else:
            locks.write(recipe.lock, after)
            print(f"{stack}: {changes(before, after)}")
    return code


def changes(before: str, after: str) -> str:
    """Which releases moved, in one line."""
    old, new = locks.pins(before), locks.pins(after)
    moved = [
        f"{name} {old.get(name, 'added')} -> {new.get(name, 'gone')}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]
    return ", ".join(moved) if old and moved else "written"
