"""Loads corrections into a rank the way a user would: the file by its path, which applies it.

A rank dies with its case, so nothing has to be undone. What is recorded is what the file says it did, not what was
asked for: on a release that a correction does not claim it applies nothing.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "ci" / "corrections"
VARIABLE = "CI_CORRECTIONS"
"""`all` or names separated by commas: corrections for every cell, beside those that the order asks for."""


def asked(ordered: Iterable[str]) -> tuple[str, ...]:
    """The corrections of a cell: those its order names, and those that the environment asks for everywhere."""
    words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    if words == ["all"]:
        words = sorted(path.stem for path in FOLDER.glob("*.py"))
    return tuple(dict.fromkeys([*ordered, *words]))


def apply(names: Iterable[str]) -> list[str]:
    """Apply corrections to this process; returns those that this release needed, as they were named.

    A name may carry a mode, `zero3_guard=raise`, which its file reads from the variable named like it (ZERO3_GUARD).
    Raises FileNotFoundError for a name without a file, and whatever a correction refuses with.
    """
    names = tuple(names)
    os.environ.update(modes(names))
    return [name for name in names if load(name.partition("=")[0]).APPLIED]


def modes(names: Iterable[str]) -> dict[str, str]:
    """The variables that the files of these corrections read their modes from."""
    asked_for = (name.partition("=") for name in names)
    return {stem.upper(): mode for stem, _, mode in asked_for if mode}


def load(stem: str) -> ModuleType:
    """The module of a correction, executed anew."""
    path = FOLDER / f"{stem}.py"
    if not path.is_file():
        known = ", ".join(sorted(other.stem for other in FOLDER.glob("*.py"))) or "none"
        raise FileNotFoundError(f"no correction {stem!r} in {FOLDER}; there are: {known}")
    spec = importlib.util.spec_from_file_location(f"correction_{stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
