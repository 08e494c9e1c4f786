"""Follow a stack at work through what it leaves in the run's folder.

Evidence lines say which cells are done, log files say which have begun. Only whole lines are taken, each once: the
last one may still be in the writing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ci.errors import UsageError
from ci.evidence import Evidence, parse_line


def log_name(cell: str) -> str:
    """File name of a cell's log under logs/."""
    return cell.replace("/", "__") + ".log"


class Follower:
    """Reads what was appended to evidence.jsonl since the last look."""

    def __init__(self, evidence: Path, logs: Path) -> None:
        self._evidence = evidence
        self._logs = logs
        self._offset = evidence.stat().st_size if evidence.exists() else 0
        self._rest = b""

    def fresh(self) -> list[Evidence]:
        """Evidence appended since the last call; an unreadable line is left for the judge to name."""
        try:
            with self._evidence.open("rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            try:
                found.append(parse_line(line.decode(), str(self._evidence)))
            except (ValueError, UsageError):
                continue
        return found

    def begun(self, cells: Sequence[str]) -> list[str]:
        """Those of these cells whose log exists."""
        try:
            logs = {entry.name for entry in self._logs.iterdir()}
        except FileNotFoundError:
            return []
        return [cell for cell in cells if log_name(cell) in logs]
