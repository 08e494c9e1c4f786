"""`plan`: which cells a command line selects, without running any."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ci import durations, workflow
from ci.commands import options
from ci.errors import ExitCode, UsageError
from ci.matrix import load
from ci.plan import Plan, make_plan


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
    shard: options.Shard = None,
    adapter: options.Adapter = None,
    ds_config: options.DsConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="The whole plan as JSON.")] = False,
    github: Annotated[
        bool, typer.Option("--github", help="A GitHub Actions matrix: a job per stack, or per shard of it.")
    ] = False,
    hosted_only: Annotated[
        bool, typer.Option("--hosted-only", help="With --github: refuse self-hosted runners, for code of anybody's.")
    ] = False,
) -> ExitCode:
    """Print the cells that the same options of `run` would run."""
    asked = options.device_numbers(devices, backend)
    chosen = options.selection(
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
        devices=asked,
        asked=asked,
        shard=shard,
        adapter=adapter,
        ds_config=ds_config,
    )
    matrix, known = load(), durations.load()
    plan = make_plan(matrix, chosen, known)
    if hosted_only and not github:
        raise UsageError("--hosted-only belongs to --github")
    if github:
        runner = workflow.runner_of(matrix, plan.backend, hosted_only=hosted_only)
        plan.require_runnable()
        print(json.dumps({"include": workflow.include(plan, runner, known)}, separators=(",", ":")))
    elif as_json:
        print(json.dumps(as_data(plan), indent=1))
    else:
        print_table(plan)
    plan.require_runnable()
    return ExitCode.OK


def as_data(plan: Plan) -> dict[str, Any]:
    """The plan as plain data."""
    return {
        "schema": 1,
        "backend": plan.backend,
        "lane": plan.lane,
        "stacks": {stack.id: dict(stack.pins) for stack in plan.stacks.values()},
        "cells": [dataclasses.asdict(cell) for cell in plan.cells],
    }


def print_table(plan: Plan) -> None:
    """One line a cell; plain lines where the output is no terminal, so that grep and cut work."""
    if not sys.stdout.isatty():
        for cell in plan.cells:
            print(cell.id if cell.gated is None else f"{cell.id}\tnot run: {cell.gated}")
    else:
        table = Table(box=None, pad_edge=False)
        table.add_column("cell", overflow="fold")
        table.add_column("ranks", justify="right")
        table.add_column("not run because")
        for cell in plan.cells:
            table.add_row(cell.id, str(cell.world_size), cell.gated or "")
        Console().print(table)
    gated = len(plan.cells) - len(plan.runnable)
    stacks = ", ".join(plan.stacks)
    cells = "1 cell" if len(plan.cells) == 1 else f"{len(plan.cells)} cells"
    print(f"{cells} on {stacks}; {gated} not run", file=sys.stderr)
    for stack in plan.stacks.values():
        if stack.nearest is not None:
            print(f"{stack.id}: nearest shipped stack is {stack.nearest}", file=sys.stderr)
