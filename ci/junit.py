"""junit.xml of a run: pytest writes one per stack, a reader wants one per run."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path


def set_aside(folder: Path, stack: str) -> None:
    """Give pytest's files of one stack a name of their own, before the next stack writes its own."""
    for name in ("junit.xml", "pytest.log"):
        path = folder / name
        if path.exists():
            path.replace(path.with_name(f"{path.stem}.{stack}{path.suffix}"))


def merge(folder: Path, stacks: Sequence[str]) -> None:
    """All suites of the run in junit.xml; a file that was cut short is left out (its log says why)."""
    root = ElementTree.Element("testsuites", name="deepspeed regression jobs")
    for stack in stacks:
        try:
            tree = ElementTree.parse(folder / f"junit.{stack}.xml").getroot()
        except (OSError, ElementTree.ParseError):
            continue
        for suite in [tree] if tree.tag == "testsuite" else tree:
            suite.set("name", stack)
            root.append(suite)
    temporary = folder / ".junit.xml"
    ElementTree.ElementTree(root).write(temporary, encoding="utf-8", xml_declaration=True)
    temporary.replace(folder / "junit.xml")
