"""`doctor`: what this host can run, and what is missing for each backend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ci import facts
from ci.doctor import Diagnosis, diagnose
from ci.errors import ExitCode, UsageError, choices
from ci.matrix import Matrix, load
from ci.provision.recipe import recipe_for, torch_index

MARKS = {"ok": ("ok", "green"), "note": ("note", "yellow"), "missing": ("missing", "bold red")}


def main(
    backend: Annotated[list[str] | None, typer.Argument(help="cpu, cuda, npu; all where none is named.")] = None,
) -> ExitCode:
    """Say what this host can run and what is missing, in the order in which to mend it. Changes nothing."""
    matrix = load()
    for name in backend or ():
        if name not in matrix.backends:
            raise UsageError(f"unknown backend {name!r}; {choices(name, matrix.backends)}")
    console = Console(highlight=False)
    with console.status("asking the engine"):
        host = facts.with_tools(
            facts.gather(),
            torch_index(matrix, "cpu"),
            tools=[entry.devices.tool for entry in matrix.backends.values() if entry.devices],
            cdi=[entry.devices.cdi for entry in matrix.backends.values() if entry.devices and entry.devices.cdi],
        )
    diagnoses = [
        diagnose(
            name,
            host,
            base_image=_base_image(matrix, name),
            unavailable=entry.unavailable,
            devices=entry.devices,
        )
        for name, entry in matrix.backends.items()
        if not backend or name in backend
    ]
    for diagnosis in diagnoses:
        _print(diagnosis, console)
    return ExitCode.OK


def _base_image(matrix: Matrix, backend: str) -> str | None:
    """The base of the backend's first stack: it may depend on the stack."""
    stack = min((name for name, entry in matrix.stacks.items() if entry.backend == backend), default=None)
    return None if stack is None else recipe_for(matrix, stack, Path.cwd()).base_image


def _print(diagnosis: Diagnosis, console: Console) -> None:
    console.print(diagnosis.conclusion, style="bold green" if diagnosis.runtimes else "bold red", markup=False)
    table = Table(box=None, show_header=False, pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in diagnosis.findings:
        word, style = MARKS[finding.state]
        text = f"{finding.found}\n-> {finding.mend}" if finding.mend else finding.found
        table.add_row(f"[{style}]{word}[/{style}]", finding.subject, text.replace("[", r"\["))
    console.print(table)
    console.print()
