"""What a requirements file asks for: the packages by name, each with the releases that it allows.

Only what advice needs of pip's format: requirements with specifiers, markers and hashes, `-r` and `-c` files, comments.
Lines that name no release (URLs, paths, options) allow any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from ci.errors import UsageError

_INCLUDE = re.compile(r"(?:-r|-c|--requirement|--constraint)[= ]?\s*(\S+)")
_OPTIONS = re.compile(r"\s--[a-z-]+[= ].*$")
_COMMENT = re.compile(r"(^|\s)#.*$")


def read(path: Path) -> Mapping[str, SpecifierSet]:
    """The specifiers of every package named, all of them together where one is named more than once.

    Raises UsageError that names file and line.
    """
    found: dict[str, SpecifierSet] = {}
    for requirement in _requirements(path, ()):
        name = canonicalize_name(requirement.name)
        found[name] = found.get(name, SpecifierSet()) & requirement.specifier
    return found


def _requirements(path: Path, including: tuple[Path, ...]) -> Iterator[Requirement]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"--for {path}: {reason}") from error
    for number, line in _lines(text):
        include = _INCLUDE.fullmatch(line)
        if include:
            other = path.parent / include[1]
            if other.resolve() not in including:
                yield from _requirements(other, (*including, path.resolve()))
        elif line and not line.startswith("-") and not re.match(r"\.{0,2}/|\w+:|\S+\.whl\b", line):
            try:
                requirement = Requirement(_OPTIONS.sub("", line))
            except InvalidRequirement as error:
                raise UsageError(f"{path}:{number}: found {line!r}; expected a requirement such as a==1.0") from error
            if requirement.marker is None or requirement.marker.evaluate():
                yield requirement


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, logical line): continued lines joined, comments gone."""
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first or number
        joined += _COMMENT.sub("", line)
        if joined.rstrip().endswith("\\"):
            joined = joined.rstrip()[:-1] + " "
            continue
        yield first, joined.strip()
        joined, first = "", 0
    if joined.strip():
        yield first, joined.strip()
