"""`watch`: are there newer releases than the pins, do they train correctly, what does that change in matrix.yaml?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from ci import releases, watch
from ci.commands import options
from ci.errors import EnvironmentUnavailable, ExitCode, UsageError, choices
from ci.matrix import MATRIX_FILE, Matrix, load
from ci.runrecord import RunRecord, Verdict, read_run
from ci.watch import Newer


def main(
    stack: Annotated[str, typer.Option("--stack", metavar="ID", help="Whose pins are compared.")] = "newest",
    package: Annotated[
        list[str] | None,
        typer.Option("--package", metavar="PKG", help="Only this package; repeatable. Default: all with a release."),
    ] = None,
    lane: options.Lane = None,
    runtime: options.Runtime = None,
    write: Annotated[bool, typer.Option("--write", help="Apply the patch to matrix.yaml.")] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the run's folder is made.")] = Path(
        "results/watch"
    ),
) -> ExitCode:
    """Compare the pins with the index, run the lane on the newest releases, and print what changes as a patch."""
    matrix = load()
    moved = _moved(matrix, stack, package)
    if not moved:
        print(f"{stack}: the index has no newer release of {', '.join(_watched(matrix, stack, package))}")
        return ExitCode.OK
    print(f"{stack}: newer releases: {', '.join(map(str, moved))}", flush=True)
    record = _run(stack, lane, runtime, moved, out)
    before = MATRIX_FILE.read_text(encoding="utf-8")
    bounds = watch.gone(record, matrix.defects, moved)
    after = watch.with_bounds(watch.with_pins(before, stack, moved), bounds)
    for bound in bounds:
        print(f"{bound.defect} is gone in {bound.package} {bound.release}")
        print(f"  where exactly, if releases lie between: nox -s bisect -- --package {bound.package} ...")
    wrong = [cell for cell in record.cells if cell.verdict in (Verdict.REGRESSION, Verdict.ERROR)]
    for cell in wrong:
        print(f"{cell.verdict}: {cell.id}: {cell.reason}")
    if wrong:
        print("the pins should not move before these are understood")
    print(f"\n{watch.patch(before, after)}", end="")
    if write:
        MATRIX_FILE.write_text(after, encoding="utf-8")
        print("written; what follows from it: nox -s lock, python -m ci defects, nox -s calibrate")
    else:
        print("nothing was changed; --write applies this patch")
    return ExitCode.FAILED if wrong else ExitCode.OK


def _watched(matrix: Matrix, stack: str, packages: list[str] | None) -> list[str]:
    """The packages to compare. A pin with a build (torch 2.13.0+cpu) comes from an index of its own and stays."""
    if stack not in matrix.stacks:
        raise UsageError(f"unknown stack {stack!r}; {choices(stack, matrix.stacks)}")
    pins = matrix.stacks[stack].pins
    for name in packages or ():
        if name not in pins:
            raise UsageError(f"--package: stack {stack} has no pin of {name!r}; {choices(name, pins)}")
    return packages or [name for name, version in pins.items() if "+" not in version]


def _moved(matrix: Matrix, stack: str, packages: list[str] | None) -> tuple[Newer, ...]:
    watched = _watched(matrix, stack, packages)
    pins = {name: matrix.stacks[stack].pins[name] for name in watched}
    return watch.newer(pins, {name: releases.on_the_index(name) for name in watched})


def _run(
    stack: str, lane: str | None, runtime: options.RuntimeName | None, moved: tuple[Newer, ...], out: Path
) -> RunRecord:
    command = [sys.executable, "-m", "ci", "run", "--stack", stack, "--out", str(out)]
    command += [] if lane is None else ["--lane", lane]
    command += [word for each in moved for word in ("--with", f"{each.package}={each.newest}")]
    if runtime is not None:
        command += ["--runtime", str(runtime)]
    code = subprocess.run(command, check=False).returncode
    if code not in (ExitCode.OK, ExitCode.FAILED):
        # Its own message stands above.
        raise EnvironmentUnavailable(
            f"the candidate could not be run (exit code {code}): "
            "where the newest releases do not fit together, take one at a time with --package"
        )
    return read_run((out / "latest").resolve())
