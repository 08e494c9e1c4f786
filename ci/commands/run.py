"""`run`: does this pin train correctly here? Plan, provision, run, judge, report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ci import commits, durations, facts, shown, workers
from ci.commands import options
from ci.devicelocks import DeviceLocks
from ci.errors import CiError, EnvironmentUnavailable, ExitCode
from ci.execute import Execution, Outcome, Request
from ci.installed import host_python
from ci.interrupts import Interrupts
from ci.matrix import load
from ci.plan import Plan, PlannedStack, make_plan
from ci.provision.choose import Choice, choose
from ci.provision.devices import Grant
from ci.provision.host import HostRuntime
from ci.provision.recipe import CURRENT, current_recipe, recipe_for
from ci.provision.runtime import COMMON_ENVIRONMENT, Override, Recipe, Runtime, pytest_command
from ci.provision.venv import VenvRuntime
from ci.report import print_run
from ci.runrecord import Context
from ci.takedevices import take_devices
from ci.userfiles import check_adapter


def main(
    backend: options.Backend = options.DEFAULT_BACKEND,
    lane: options.Lane = None,
    stack: options.Stacks = None,
    with_: options.With = None,
    job: options.Jobs = None,
    case: options.Cases = None,
    runtime: options.Runtime = None,
    python: options.Python = None,
    corrections: options.CorrectionsChoice = options.Corrections.OFF,
    world_size: options.WorldSize = None,
    devices: options.Devices = None,
    share_devices: options.ShareDevices = False,
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

    with Interrupts() as interrupts, DeviceLocks(backend) as locks:
        matrix = load()
        asked = options.device_numbers(devices, backend)
        numbers = take_devices(matrix, backend, asked, say, locks, dry_run=dry_run, shared=share_devices)
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
                devices=numbers,
                asked=asked,
                shard=shard,
                adapter=adapter,
                ds_config=ds_config,
            ),
            durations.load(),
        )
        plan.require_runnable()
        if why := matrix.backends[backend].never_run:
            say(f"{backend}: {why}")
        grant = Grant(matrix.backends[backend], numbers if numbers is not None else _as_many_as_needed(plan))
        host = str(host_python(python)) if runtime is options.RuntimeName.HOST else None
        place = choose(runtime, Path.cwd(), host, say, grant)
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
            return _dry_run(plan, place.runtime, recipes, grant, out)
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
            devices=numbers,
        )
        outcome = Execution(request, console, interrupts).run()
    print_run(shown.of(outcome.record, outcome.folder))
    _publish(outcome, say)
    say(f"results: {_shown(outcome.folder)}")
    if outcome.stopped is not None:
        raise outcome.stopped
    return outcome.record.exit_code()


def _as_many_as_needed(plan: Plan) -> tuple[str, ...]:
    """What a dry run on a host without devices takes for them: as many as the largest case needs."""
    return tuple(map(str, range(max(cell.world_size for cell in plan.runnable))))


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
        commit=commits.here(),
        backend=backend,
        runtime=place.runtime.id,
        hardware=facts.hardware(),
        started=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _overrides(stack: PlannedStack) -> tuple[Override, ...]:
    return tuple(
        Override(replacement.package, None if replacement.path else replacement.version, replacement.path)
        for replacement in stack.replacements
    )


def _shown(folder: Path) -> Path:
    """The folder as a person types it from here."""
    return folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder


def _dry_run(plan: Plan, runtime: Runtime, recipes: Mapping[str, Recipe], grant: Grant, out: Path) -> ExitCode:
    """The cells, one a line, and per stack the command that would run them; nothing is made.

    For a backend with devices the container's command is among them even where no engine answers.
    """
    for cell in plan.cells:
        print(cell.id if cell.gated is None else f"{cell.id}\tnot run: {cell.gated}")
    run = out.resolve() / f"TIME-{plan.backend}-ID"
    devices = None if grant.backend.devices is None else len(grant.numbers)
    for name, recipe in recipes.items():
        world_sizes = [cell.world_size for cell in plan.runnable if cell.stack == name]
        if not world_sizes:
            continue
        free_mb = workers.free_memory_mb()
        count = workers.choose(world_sizes, cores=workers.cores(), free_mb=free_mb, devices=devices).count
        order = run / f"order.{name}.json"
        python = None
        if isinstance(runtime, VenvRuntime):
            python = str(runtime.folder(recipe, _overrides(plan.stacks[name])) / "bin" / "python")
        elif isinstance(runtime, HostRuntime):
            python = runtime.python
        if python is not None:
            print(f"{name}: {shlex.join(pytest_command(python, str(order), str(run), count))}")
        if python is None or (devices is not None and name != CURRENT):
            print(f"{name}: {shlex.join(_container_command(name, recipe, grant, order, run, count))}")
    return ExitCode.OK


def _container_command(name: str, recipe: Recipe, grant: Grant, order: Path, run: Path, count: int) -> tuple[str, ...]:
    """The `docker run` of a stack, for the engine here; where none answers, for one that has no more than Docker."""
    # Imported here: the Docker SDK takes a moment, and only this needs it.
    from ci.provision import engine
    from ci.provision.commandline import docker_run
    from ci.provision.image import granted, orders_for

    try:
        info: Mapping[str, Any] = engine.connect().info()
    except EnvironmentUnavailable:
        info = {}
    orders = orders_for(
        Path.cwd(),
        f"zero-regression-matrix/{recipe.backend}:{name}-KEY",
        "KEY",
        pytest_command("/opt/stack/bin/python", "/project/order.json", "/results", count),
        order,
        run,
        environment=COMMON_ENVIRONMENT,
    )
    return docker_run(granted(orders, grant, info))
