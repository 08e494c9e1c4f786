"""junit.xml of a run, for a CI server that shows tests: every cell with its verdict.

It is written from the judged record and not by pytest: in a stack a case passes when it left evidence, whatever that
evidence says.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from ci.runrecord import FAILING, CellRecord, RunRecord, Verdict

FILE = "junit.xml"

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What XML 1.0 cannot hold: a library's message may carry colours or a NUL."""


def write(folder: Path, record: RunRecord) -> None:
    """The run's cells, a suite per stack. A reader never sees half a file."""
    total = _counts(record.cells)
    total.pop("skipped")  # the strictest reader, Jenkins' xUnit plugin, knows it of suites only
    root = ElementTree.Element("testsuites", {"name": "zero regression matrix", **total})
    for stack in dict.fromkeys(cell.stack for cell in record.cells):
        cells = tuple(cell for cell in record.cells if cell.stack == stack)
        suite = ElementTree.SubElement(
            root, "testsuite", {"name": stack, "timestamp": record.started, **_counts(cells)}
        )
        suite.extend(_case(cell) for cell in cells)
    temporary = folder / f".{FILE}"
    try:
        ElementTree.ElementTree(root).write(temporary, encoding="utf-8", xml_declaration=True)
        temporary.replace(folder / FILE)
    finally:
        temporary.unlink(missing_ok=True)


def _counts(cells: tuple[CellRecord, ...]) -> dict[str, str]:
    return {
        "tests": str(len(cells)),
        "failures": str(sum(cell.verdict in FAILING for cell in cells)),
        "errors": "0",
        "skipped": str(sum(cell.verdict is Verdict.NOT_RUN for cell in cells)),
        "time": f"{sum(cell.duration_s or 0.0 for cell in cells):.3f}",
    }


def _case(cell: CellRecord) -> ElementTree.Element:
    backend, stack, job, name = cell.id.split("/", 3)
    case = ElementTree.Element(
        "testcase", classname=f"{backend}.{stack}.{job}", name=name, time=f"{cell.duration_s or 0.0:.3f}"
    )
    reason = _clean(cell.reason or "")
    if cell.verdict in FAILING:
        failure = ElementTree.SubElement(case, "failure", type=cell.verdict.value, message=reason)
        failure.text = _clean(f"{cell.verdict}: {cell.reason}\nrepeat: {cell.command}\nlog: {cell.log or 'none'}\n")
    elif cell.verdict is Verdict.NOT_RUN:
        ElementTree.SubElement(case, "skipped", message=reason)
    else:
        said = ", ".join(cell.defects)
        ElementTree.SubElement(case, "system-out").text = f"{cell.verdict}{f': {said}' if said else ''}"
    return case


def _clean(text: str) -> str:
    return _NOT_XML.sub("?", text)
