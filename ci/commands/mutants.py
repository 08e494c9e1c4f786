"""`mutants`: plant faults into training and see whether the checks notice."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ci import facts
from ci.commands import options
from ci.errors import ExitCode, UsageError, choices
from ci.interrupts import Interrupts
from ci.matrix import load
from ci.mutants import page, table
from ci.mutants.run import Place, planted, run
from ci.plan import PlannedStack
from ci.provision.choose import choose
from ci.provision.recipe import recipe_for

PAGE = Path("docs/mutants.md")


def main(
    stack: Annotated[str, typer.Option("--stack", metavar="ID", help="Where nothing is wrong.")] = "newest",
    mutant: Annotated[
        list[str] | None, typer.Option("--mutant", metavar="ID", help="Only this fault; repeatable.")
    ] = None,
    first: Annotated[bool, typer.Option("--first", help="Each fault in the first of its cases only.")] = False,
    runtime: options.Place = options.RuntimeName.VENV,
    write: Annotated[bool, typer.Option("--write", help=f"Write {PAGE}.")] = False,
    folder: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where evidence and logs are put.")] = Path(
        "results/mutants"
    ),
) -> ExitCode:
    """Plant faults into the training stack at run time; exit code 1 where one is not noticed by the right check."""
    console = Console(highlight=False, stderr=True)
    matrix = load()
    if stack not in matrix.stacks:
        raise UsageError(f"unknown stack {stack!r}; {choices(stack, matrix.stacks)}")
    every = table.load()
    known = {each.id for each in every}
    for name in mutant or ():
        if name not in known:
            raise UsageError(f"unknown mutant {name!r}; {choices(name, known)}")
    if write and (mutant or first):
        raise UsageError("--write needs every mutant in all of its cases")
    chosen = [each for each in every if not mutant or each.id in mutant]
    results = (folder / stack).resolve()
    results.mkdir(parents=True, exist_ok=True)
    with Interrupts() as interrupts:
        place = choose(runtime, Path.cwd(), None, console.print).runtime
        environment = place.provision(recipe_for(matrix, stack, Path.cwd()))
        entry = matrix.stacks[stack]
        pinned = PlannedStack(stack, dict(entry.pins), Path(entry.lock), check_pins=True)
        wanted = planted(chosen, matrix, stack, first_only=first)
        sound, shown = run(wanted, matrix, Place(place, environment, pinned, results), interrupts, console)
    red = [each for each in sound if not each.green]
    for each in red:
        print(f"not green without a fault: {each.cell}: {each.record.verdict}, {each.record.reason or each.missing}")
    for line in page.told(shown):
        print(line)
    if write:
        measured = f"Measured {datetime.now(UTC).date().isoformat()} on {stack} ({_pins(entry.pins)}), {_machine()}"
        PAGE.write_text(page.page(shown, measured), encoding="utf-8")
    return ExitCode.FAILED if red or not all(each.fine for each in shown) else ExitCode.OK


def _pins(pins: dict[str, str]) -> str:
    return ", ".join(f"{name} {pins[name]}" for name in ("torch", "deepspeed", "transformers") if name in pins)


def _machine() -> str:
    hardware = facts.hardware()
    return f"{hardware.get('cores')} cores, {hardware.get('processor')}"
