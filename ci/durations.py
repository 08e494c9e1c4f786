"""What each case took when it was measured, and equal parts of a plan by it.

durations.json is generated from finished runs (`python -m ci durations RUN... --write`) and committed, so that every
machine of a fleet divides a plan in the same way. A case that is not in it counts as the middle one of its job.
"""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from ci.errors import UsageError
from ci.evidence import Record

FILE = Path(__file__).with_name("durations.json")
UNKNOWN_S = 2.0
"""A case of a job that was never measured; what most cases take."""


class Durations(Record):
    """Seconds of a case, middle one of all stacks, by job and by the case's name in cell ids."""

    seconds: dict[str, dict[str, float]] = Field(default_factory=dict)

    def of(self, cell_id: str) -> float:
        """What a cell is expected to take; its corrections do not matter."""
        _, _, job, name = cell_id.split("/", 3)
        known = self.seconds.get(job, {})
        usual = statistics.median(known.values()) if known else UNKNOWN_S
        return known.get(name.partition("+")[0], usual)


def load(path: Path = FILE) -> Durations:
    """The committed file."""
    try:
        return Durations.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}; `python -m ci durations RUN... --write` writes it") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def text(durations: Durations) -> str:
    """The file's content."""
    return durations.model_dump_json(indent=1) + "\n"


def parts(seconds: Sequence[float], count: int) -> tuple[tuple[int, ...], ...]:
    """Positions of `seconds` in `count` parts whose sums are nearly equal: the longest first, to the emptiest part.

    Each part keeps the order given, and none is empty where there are enough positions.
    """
    heap: list[tuple[float, int, int]] = [(0.0, 0, part) for part in range(count)]
    found: list[list[int]] = [[] for _ in range(count)]
    for position in sorted(range(len(seconds)), key=lambda each: -seconds[each]):
        total, size, part = heapq.heappop(heap)
        found[part].append(position)
        heapq.heappush(heap, (total + seconds[position], size + 1, part))
    return tuple(tuple(sorted(part)) for part in found)
