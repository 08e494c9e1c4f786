"""`images`: build the images of the stacks ahead of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ci.errors import ExitCode, UsageError, choices
from ci.interrupts import Interrupts
from ci.matrix import load
from ci.plan import DEFAULT_BACKEND
from ci.provision import choose
from ci.provision.recipe import recipe_for


def main(
    stacks: Annotated[
        list[str] | None, typer.Argument(metavar="[STACK]...", help="Default: all of the backend.")
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", metavar="ID", help="Whose stacks, where none is named: cpu, cuda or npu.")
    ] = DEFAULT_BACKEND,
) -> ExitCode:
    """Build the stacks' images; one whose ingredients did not change is only looked up."""
    matrix = load()
    if backend not in matrix.backends:
        raise UsageError(f"unknown backend {backend!r}; {choices(backend, matrix.backends)}")
    root = Path.cwd()
    of_backend = sorted(name for name, stack in matrix.stacks.items() if stack.backend == backend)
    recipes = [recipe_for(matrix, stack, root) for stack in stacks or of_backend]
    with Interrupts():
        runtime = choose.choose("docker", root, say=print).runtime
        for recipe in recipes:
            made = runtime.provision(recipe)
            how = "unchanged" if made.reused else f"built in {made.seconds:.0f} s"
            print(f"{recipe.stack}: {made.image} ({how})")
    return ExitCode.OK
