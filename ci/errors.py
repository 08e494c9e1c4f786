"""Every error that ends the program on purpose, with its exit code, in one place.

The commands let a CiError rise; `ci.__main__` prints its message once to standard error and ends with its code, so
that a user sees one clear message and a script sees one documented number.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """The exit codes of `python -m ci` and of the nox sessions over it."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    INTERRUPTED = 130


class CiError(Exception):
    """An error whose message is for the user and whose exit code is for the caller."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class UsageError(CiError):
    """The command line asks for something that does not exist or contradicts itself."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.USAGE)


class MatrixError(CiError):
    """matrix.yaml cannot be read or contradicts itself: says where, what was found and what was expected."""

    def __init__(self, file: Path, line: int | None, found: str, expected: str, where: str = "") -> None:
        self.file, self.line, self.found, self.expected, self.where = file, line, found, expected, where
        place = str(file) if line is None else f"{file}:{line}"
        super().__init__(f"{place}: {where + ': ' if where else ''}found {found}; expected {expected}")


class NothingToRun(CiError):
    """The selection is valid and selects no cell that can run with these pins."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.USAGE)


class EnvironmentUnavailable(CiError):
    """The place to run could not be made: no engine, no network, a full disk, an unresolvable stack."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.UNAVAILABLE)


class NoDevice(CiError):
    """The backend asked for by name has no device on this host."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.UNAVAILABLE)


class Interrupted(CiError):
    """The user, or the machine, asked the run to stop."""

    def __init__(self, message: str = "interrupted") -> None:
        super().__init__(message, ExitCode.INTERRUPTED)


def choices(word: str, known: Iterable[str]) -> str:
    """'did you mean X? known: A, B': the nearest match of an unknown word, and what exists."""
    names = sorted(set(known))
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    listed = f"known: {', '.join(names) or 'none'}"
    return f"did you mean {near[0]}? {listed}" if near else listed
