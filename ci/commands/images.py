"""`images`: build the images of the stacks ahead of a run, and bring them to machines that do not build."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ci import commits
from ci.errors import ExitCode, UsageError, choices
from ci.interrupts import Interrupts
from ci.matrix import load
from ci.plan import DEFAULT_BACKEND
from ci.provision import carry, engine
from ci.provision.carry import Built
from ci.provision.image import DockerRuntime
from ci.provision.recipe import recipe_for
from ci.provision.runtime import Recipe


def main(
    stacks: Annotated[
        list[str] | None, typer.Argument(metavar="[STACK]...", help="Default: all of the backend.")
    ] = None,
    backend: Annotated[
        str, typer.Option("--backend", metavar="ID", help="Whose stacks, where none is named: cpu, cuda or npu.")
    ] = DEFAULT_BACKEND,
    push: Annotated[
        str | None, typer.Option("--push", metavar="REF", help="Push them, with their bases, to REGISTRY/REPOSITORY.")
    ] = None,
    pull: Annotated[
        str | None, typer.Option("--pull", metavar="REF", help="Fetch what --push brought there; build nothing.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write them and this project into one file.")
    ] = None,
    load_: Annotated[
        Path | None, typer.Option("--load", metavar="FILE", help="Load the images of such a file; build nothing.")
    ] = None,
) -> ExitCode:
    """Build the stacks' images; one whose ingredients did not change is only looked up."""
    ways = {"--push": push, "--pull": pull, "--save": save, "--load": load_}
    if len(given := [name for name, value in ways.items() if value is not None]) > 1:
        raise UsageError(f"found {' and '.join(given)}; expected one of them")
    root = Path.cwd()
    with Interrupts():
        if load_ is not None:
            for image in carry.load(engine.connect(), root, load_):
                print(f"{image.stack}: {image.tag} {image.id} (loaded)")
            return ExitCode.OK
        recipes = _recipes(stacks, backend, root)
        client = engine.connect()
        runtime = DockerRuntime(root, client, say=print)
        if pull is not None:
            for recipe in recipes:
                runtime.pull(recipe, pull)
        built = _built(runtime, recipes)
        if push is not None:
            for stack, digest in carry.push(client, built, push).items():
                print(f"{stack}: pushed as {digest}")
        if save is not None:
            carry.save(built, root, save, commits.here())
            print(f"{save}: {save.stat().st_size / 1e6:.0f} MB, {', '.join(image.stack for image in built)}")
    return ExitCode.OK


def _recipes(stacks: Sequence[str] | None, backend: str, root: Path) -> list[Recipe]:
    matrix = load()
    if backend not in matrix.backends:
        raise UsageError(f"unknown backend {backend!r}; {choices(backend, matrix.backends)}")
    of_backend = sorted(name for name, stack in matrix.stacks.items() if stack.backend == backend)
    return [recipe_for(matrix, stack, root) for stack in stacks or of_backend]


def _built(runtime: DockerRuntime, recipes: Sequence[Recipe]) -> list[Built]:
    """Make each image, or find it made, and say so."""
    built = []
    for recipe in recipes:
        made = runtime.provision(recipe)
        how = "unchanged" if made.reused else f"built in {made.seconds:.0f} s"
        print(f"{recipe.stack}: {made.image} {made.image_id} ({how})")
        built.append(Built(recipe.stack, made.image or "", made.image_id or "", recipe.base_image))
    return built
