"""`advice`: what the ledger knows about a set of pins, before anything is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ci import advice, requirements_file
from ci.advice import PACKAGE, Advice
from ci.commands import options
from ci.commands.options import Versions
from ci.errors import ExitCode, UsageError
from ci.installed import host_python, installed_packages
from ci.known_defects import corrections
from ci.matrix import Matrix, load


def main(
    for_: Annotated[
        Path | None, typer.Option("--for", metavar="FILE", help="A requirements file; ranges are allowed.")
    ] = None,
    versions: Versions = None,
) -> ExitCode:
    """Print the known defects of a set of pins, and what avoids or corrects each. Default: what python3 has."""
    if for_ is not None and versions:
        raise UsageError("--for and --versions both give pins; give one of them")
    matrix = load()
    if for_ is not None:
        source, pins = str(for_), requirements_file.read(for_)
    elif versions:
        source, pins = "the versions given", options.pins(versions)
    else:
        python = host_python(None)
        source, pins = str(python), _installed(python)
    if PACKAGE not in pins:
        raise UsageError(f"{source} does not name {PACKAGE}; give --for FILE, or --versions {PACKAGE}=VERSION")
    _print(matrix, source, pins, advice.advise(matrix, pins))
    return ExitCode.OK


def _installed(python: Path) -> dict[str, SpecifierSet]:
    return {
        canonicalize_name(name): SpecifierSet(f"=={version}") for name, version in installed_packages(python).items()
    }


def _print(matrix: Matrix, source: str, pins: Mapping[str, SpecifierSet], found: Advice) -> None:
    ours = found.looked_at[PACKAGE]
    if not ours:
        raise UsageError(f"{source}: no release of {PACKAGE} that the ledger knows is in {pins[PACKAGE]}")
    print(f"{source}: {PACKAGE} {pins[PACKAGE] or 'in any release'}")
    if len(ours) > 1:
        print(f"a range; looked at where something changes: {', '.join(map(str, ours))}")
    oldest = min(
        (release for stack in matrix.stacks.values() for release in [stack.pins.get(PACKAGE)] if release), default=None
    )
    if not found.affected:
        print(f"the ledger knows no defect of it (measured on the stacks of matrix.yaml, {oldest} and newer)")
        return
    count = len(found.affected)
    print(f"{count} known defect{'s' if count > 1 else ''}; each shows only in the configuration named with it\n")
    for affected in found.affected:
        print("\n".join(advice.lines(affected)), end="\n\n")
    print("version constraints:" if found.moves else "version constraints: no release that the ledger names is better")
    for move in found.moves:
        meets = f"; but meets {', '.join(move.meets)}" if move.meets else ""
        print(f"  {move.package}>={move.release} leaves behind {', '.join(move.leaves)}{meets}")
    files = sorted({file for affected in found.affected for file in corrections(affected.defect)})
    if files:
        print("corrections: import them before deepspeed.initialize, or pass each to --external_plugins of ms-swift:")
        for file in files:
            print(f"  {file}")
