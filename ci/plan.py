"""Matrix + Selection -> Plan: which cells there are, in which order, which of them cannot run with these pins.

Everything that a user can select is resolved here and nowhere else, so that `plan`, `run`, a dry run and the
generated workflow agree on every cell id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ci.matrix import Scalar

DEFAULT_LANE = "pull-request"
DEFAULT_BACKEND = "cpu"
DEFAULT_WORLD_SIZE = 2
CURRENT = "current"
"""The stack that stands for whatever is installed in the interpreter given."""


@dataclass(frozen=True)
class Replacement:
    """`--with PKG=VERSION|WHEEL|PATH`: one pin replaced for this run. version is None where only building tells it."""

    package: str
    version: str | None
    source: Path | None


@dataclass(frozen=True)
class Selection:
    """What the user asked for, as typed.

    current: the packages installed in the interpreter given, needed where `current` is among the stacks.
    repeat: further options of `run` that the command repeating one cell has to carry (`--runtime host`).
    """

    backend: str = DEFAULT_BACKEND
    lane: str = DEFAULT_LANE
    stacks: tuple[str, ...] = ()
    jobs: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    replacements: tuple[str, ...] = ()
    world_size: int | None = None
    shard: str | None = None
    adapter: str | None = None
    ds_config: Path | None = None
    current: Mapping[str, str] | None = None
    repeat: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedStack:
    """One stack as this run will have it.

    pins: what must be installed, replacements applied; a package replaced by a path whose version is not known yet
    has no pin. lock: None for `current`. nearest: for `current`, the shipped stack that differs least.
    """

    id: str
    pins: Mapping[str, str]
    lock: Path | None
    check_pins: bool
    replacements: tuple[Replacement, ...] = ()
    nearest: str | None = None


@dataclass(frozen=True)
class Cell:
    """Backend x stack x case: the unit that gets a verdict.

    case: every key of the job, in the contract's order. gated: why it is `not run`, or None. command: the one
    command that repeats just this cell.
    """

    id: str
    backend: str
    stack: str
    job: str
    case: Mapping[str, Scalar]
    world_size: int
    timeout_s: int
    gated: str | None
    command: str
    corrections: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The cells of one run, stack by stack, and the stacks they need."""

    backend: str
    lane: str
    stacks: Mapping[str, PlannedStack]
    cells: tuple[Cell, ...]
    selection: Selection = field(default_factory=Selection)

    @property
    def runnable(self) -> tuple[Cell, ...]:
        """The cells that these pins let run."""
        return tuple(cell for cell in self.cells if cell.gated is None)
