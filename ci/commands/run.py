"""`run`: does this pin train correctly here? Plan, provision, run, judge, report."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ci import facts, workers
from ci.commands import options
from ci.doctor import missing_devices
from ci.errors import CiError, ExitCode, NoDevice
from ci.execute import Execution, Outcome, Request
from ci.installed import host_python
from ci.interrupts import Interrupts
from ci.matrix import load
from ci.plan import Plan, PlannedStack, make_plan
from ci.provision.choose import Choice, choose
from ci.provision.host import HostRuntime
from ci.provision.recipe import CURRENT, current_recipe, recipe_for
from ci.provision.runtime import Override, Recipe, Runtime, pytest_command
from ci.provision.venv import VenvRuntime
from ci.report import print_run
from ci.runrecord import Context
from ci.userfiles import check_adapter


def main(
    backend: options.Backend = options.DEFAULT_BACKEND,
    lane: options.Lane = options.DEFAULT_LANE,
    stack: options.Stacks = None,
    with_: options.With = None,
    job: options.Jobs = None,
    case: options.Cases = None,
    runtime: options.Runtime = None,
    python: options.Python = None,
    corrections: options.CorrectionsChoice = options.Corrections.OFF,
    world_size: options.WorldSize = None,
    devices: options.Devices = None,
    shard: options.Shard = None,
    adapter: options.Adapter = None,
    ds_config: options.DsConfig = None,
    fail_fast: Annotated[
        bool, typer.Option("--fail-fast/--keep-going", help="Stop at the first verdict that fails, or go on.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would run, and where; run nothing.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the run's folder is made.")] = Path(
        "results"
    ),
) -> ExitCode:
    """Run the cells selected and judge what they measured."""
    console = Console(highlight=False)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    with Interrupts() as interrupts:
        matrix = load()
        missing = missing_devices(backend, facts.gather())
        if missing is not None and backend in matrix.backends:
            raise NoDevice(
                f"{backend}: this host has no device for it: {missing.found}. "
                f"To mend it: {missing.mend}. Nothing was run: a run on CPU would prove nothing about {backend}."
            )
        plan = make_plan(
            matrix,
            options.selection(
                backend=backend,
                lane=lane,
                stacks=stack,
                replacements=with_,
                jobs=job,
                cases=case,
                runtime=runtime,
                python=python,
                corrections=corrections,
                world_size=world_size,
                devices=devices,
                shard=shard,
                adapter=adapter,
                ds_config=ds_config,
            ),
        )
        plan.require_runnable()
        host = str(host_python(python)) if runtime is options.RuntimeName.HOST else None
        place = choose(runtime, Path.cwd(), host, say)
        say(f"{place.runtime.id}: {place.reason}")
        say(place.runtime.describe())
        for planned in plan.stacks.values():
            if planned.nearest is not None:
                say(f"{planned.id}: nearest to it of the shipped stacks is {planned.nearest}")
        recipes = {
            name: current_recipe(matrix, backend, Path.cwd())
            if name == CURRENT
            else recipe_for(matrix, name, Path.cwd())
            for name in plan.stacks
        }
        if dry_run:
            return _dry_run(plan, place.runtime, recipes, out)
        request = Request(
            plan=plan,
            matrix=matrix,
            runtime=place.runtime,
            recipes=recipes,
            context=_context(backend, place),
            out=out,
            overrides={name: _overrides(planned) for name, planned in plan.stacks.items()},
            fail_fast=fail_fast,
            adapter=check_adapter(adapter) if adapter else None,
            ds_config=ds_config,
        )
        outcome = Execution(request, console, interrupts).run()
    print_run(outcome.record)
    _publish(outcome, say)
    say(f"results: {_shown(outcome.folder)}")
    if outcome.stopped is not None:
        raise outcome.stopped
    return outcome.record.exit_code()


def _publish(outcome: Outcome, say: Callable[[str], None]) -> None:
    """The page; where the disk is full or run.json could not be written, the verdicts in the terminal still stand."""
    from ci.page.publish import REPORT, publish_beside  # templates and plots, for which no case has to wait

    try:
        publish_beside(outcome.folder)
    except CiError as error:
        say(f"no page: {error.message}")
    else:
        say(f"page: {_shown(outcome.folder) / REPORT}")


def _context(backend: str, place: Choice) -> Context:
    return Context(
        command=shlex.join(["python", "-m", "ci", *sys.argv[1:]]),
        commit=_commit(),
        backend=backend,
        runtime=place.runtime.id,
        hardware=facts.hardware(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _commit() -> str | None:
    """The commit of this project, marked where the work tree differs from it; None outside git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _overrides(stack: PlannedStack) -> tuple[Override, ...]:
    return tuple(
        Override(replacement.package, None if replacement.path else replacement.version, replacement.path)
        for replacement in stack.replacements
    )


def _shown(folder: Path) -> Path:
    """The folder as a person types it from here."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _dry_run(plan: Plan, runtime: Runtime, recipes: Mapping[str, Recipe], out: Path) -> ExitCode:
    """The cells, one a line, and per stack the command that would run them; nothing is made."""
    for cell in plan.cells:
        print(cell.id if cell.gated is None else f"{cell.id}\tnot run: {cell.gated}")
    run = out.resolve() / f"TIME-{plan.backend}-ID"
    for name, recipe in recipes.items():
        world_sizes = [cell.world_size for cell in plan.runnable if cell.stack == name]
        if not world_sizes:
            continue
        count = workers.choose(world_sizes, cores=workers.cores(), free_mb=workers.free_memory_mb()).count
        order, results = str(run / f"order.{name}.json"), str(run)
        if isinstance(runtime, VenvRuntime):
            python = str(runtime.folder(recipe, _overrides(plan.stacks[name])) / "bin" / "python")
        elif isinstance(runtime, HostRuntime):
            python = runtime.python
        else:
            python, order, results = "/opt/stack/bin/python", "/project/order.json", "/results"
        where = "in a container of its image: " if runtime.id == "docker" else ""
        print(f"{name}: {where}{shlex.join(pytest_command(python, order, results, count))}")
    return ExitCode.OK
