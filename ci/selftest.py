"""Everything that proves this project, in one command: which parts there are, where each runs, what may be left out.

Unit tests need only this program; tests/stack needs torch and runs in the virtual environment of a stack; container
and workflow tests need an engine, those of the page a browser. Where it is missing they are left out and that is said,
except in CI: there their absence fails, since a green check that tested nothing is worse than a red one.

Tests marked slow run only with `--slow`, which is pytest's to read (tests/conftest.py) and selects nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ci.errors import ExitCode, UsageError, choices

STACK = "newest"
"""The stack whose environment runs tests/stack."""

NOTHING_COLLECTED = 5
"""pytest's own exit code for a selection that matches no test."""


@dataclass(frozen=True)
class Part:
    """A folder of tests and what it needs of the host. place: the interpreter of this program, or that of a stack."""

    name: str
    place: Literal["host", "stack"] = "host"
    needs: Literal["engine", "browser"] | None = None

    @property
    def folder(self) -> str:
        return f"tests/{self.name}"


PARTS = (
    Part("unit"),
    Part("stack", place="stack"),
    Part("page", needs="browser"),
    Part("container", needs="engine"),
    Part("workflows", needs="engine"),
    Part("faults"),
    Part("families"),
)
"""In the order of what they cost."""


@dataclass(frozen=True)
class Chosen:
    """The parts to run, each with pytest's arguments."""

    parts: tuple[tuple[Part, tuple[str, ...]], ...]
    selective: bool


def choose(arguments: Sequence[str]) -> Chosen:
    """Words before the first option select parts, paths under tests/ too; everything else goes to pytest as it is."""
    known = {part.name: part for part in PARTS}
    named: list[str] = []
    paths: dict[str, list[str]] = {}
    rest: list[str] = []
    leading = True
    for word in arguments:
        leading = leading and not word.startswith("-")
        pieces = word.split("::")[0].strip("/").split("/")
        if pieces[0] == "tests" and len(pieces) > 1:
            if pieces[1] not in known:
                raise UsageError(f"{word}: not a part of the tests; {choices(pieces[1], known)}")
            paths.setdefault(pieces[1], []).append(word)
        elif leading:
            if word not in known:
                raise UsageError(f"unknown part of the tests {word!r}; {choices(word, known)}")
            named.append(word)
        else:
            rest.append(word)
    wanted = {*named, *paths} or set(known)
    parts = tuple((part, (*(paths.get(part.name) or [part.folder]), *rest)) for part in PARTS if part.name in wanted)
    return Chosen(parts, selective=bool(arguments))


def exit_code(codes: Sequence[int], *, selective: bool, missing_in_ci: bool) -> ExitCode:
    """One code for all parts: a failing test first, then a place that could not be made, then an empty selection."""
    if any(code not in (0, NOTHING_COLLECTED) for code in codes):
        return ExitCode.FAILED
    if missing_in_ci:
        return ExitCode.UNAVAILABLE
    empty = [code for code in codes if code == NOTHING_COLLECTED]
    if empty and (not selective or len(empty) == len(codes)):
        return ExitCode.USAGE
    return ExitCode.OK
