"""What a newer release changes in matrix.yaml: pins that move, and bounds of defects that went away.

Pure: the text of matrix.yaml goes in and the changed text comes out, byte for byte the same elsewhere, so that the
change can be printed as a patch and looked at before anything is written.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from packaging.version import Version

from ci.matrix import Defect
from ci.runrecord import RunRecord


@dataclass(frozen=True)
class Newer:
    """A package of a stack of which the index has a newer release."""

    package: str
    pinned: Version
    newest: Version

    def __str__(self) -> str:
        return f"{self.package} {self.pinned} -> {self.newest}"


@dataclass(frozen=True)
class Bound:
    """An entry that ends: it affects releases of `package` below `release` only."""

    defect: str
    package: str
    release: Version


def newer(pins: Mapping[str, str], available: Mapping[str, Sequence[Version]]) -> tuple[Newer, ...]:
    """The packages of which a newer release is available, in the order of the pins."""
    found = []
    for package, pinned in pins.items():
        newest = max(available.get(package, ()), default=None)
        if newest is not None and newest > Version(pinned):
            found.append(Newer(package, Version(pinned), newest))
    return tuple(found)


def gone(run: RunRecord, defects: Iterable[Defect], moved: Sequence[Newer]) -> tuple[Bound, ...]:
    """The entries that claimed cells of the run and showed in none of them, each bounded in a package that moved.

    An entry that still shows somewhere needs a narrower `where`, which no program can write.
    """
    shown = {entry for cell in run.cells for entry in cell.defects}
    absent = {entry for cell in run.cells for entry in cell.fixed} - shown
    found = []
    for defect in defects:
        package = next((each for each in moved if each.package in defect.affects), None)
        if defect.id in absent and package is not None:
            found.append(Bound(defect.id, package.package, package.newest))
    return tuple(found)


def with_pins(text: str, stack: str, moved: Iterable[Newer]) -> str:
    """matrix.yaml's text with the pins of one stack moved. LookupError where a pin does not stand on its own line."""
    start, end = _block(text, rf"^  {re.escape(stack)}:\n", r"^  \S|^\S")
    block = text[start:end]
    for each in moved:
        pattern = rf"^(      {re.escape(each.package)}: ){re.escape(str(each.pinned))}$"
        block, count = re.subn(pattern, rf"\g<1>{each.newest}", block, flags=re.MULTILINE)
        if count != 1:
            raise LookupError(f"matrix.yaml: stack {stack} has no line `{each.package}: {each.pinned}`")
    return text[:start] + block + text[end:]


def with_bounds(text: str, bounds: Iterable[Bound]) -> str:
    """matrix.yaml's text with an upper bound added to entries of the ledger."""
    for bound in bounds:
        start, end = _block(text, rf"^  - id: {re.escape(bound.defect)}\n", r"^  - id: |^\S")
        pattern = rf'^(    affects: \{{.*\b{re.escape(bound.package)}: "[^"]*)"'
        block, count = re.subn(pattern, rf'\g<1>,<{bound.release}"', text[start:end], flags=re.MULTILINE)
        if count != 1:
            raise LookupError(f"matrix.yaml: {bound.defect} has no line that bounds {bound.package}")
        text = text[:start] + block + text[end:]
    return text


def patch(before: str, after: str, name: str = "matrix.yaml") -> str:
    """A unified diff that `git apply` takes; empty where nothing changed."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(lines)


def _block(text: str, head: str, next_head: str) -> tuple[int, int]:
    """(start, end) of the part of a text from a line that matches `head` to the next that matches `next_head`."""
    found = re.search(head, text, flags=re.MULTILINE)
    if found is None:
        raise LookupError(f"matrix.yaml: no line matches {head!r}")
    after = re.compile(next_head, flags=re.MULTILINE).search(text, found.end())
    return found.start(), after.start() if after else len(text)
