"""A lane that ran warm: its time beside that of its cases, the overhead of a case, memory.

The overhead of a case is everything but its own training steps: forks, rendezvous, the engine's construction, the
reference, the evidence.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from ci.bench.figure import Figure
from ci.evidence import Evidence


def figures(evidence: Sequence[Evidence], wall_s: float, workers: int, memory_mb: float) -> list[Figure]:
    """wall_s: from command to report. memory_mb: the most that all processes of the lane held together."""
    timed = [e for e in evidence if e.duration_s is not None and e.training_s is not None and e.exception is None]
    overhead = {e.cell: (e.duration_s or 0.0) - (e.training_s or 0.0) for e in timed}
    slowest = max(overhead, key=lambda cell: overhead[cell])
    own = sum(e.duration_s or 0.0 for e in evidence)
    return [
        Figure(f"lane of {len(evidence)} cells, command to report", wall_s, "s", 240.0),
        Figure("the same over its cases' own time per worker", wall_s / (own / workers), "x", 1.3),
        Figure("overhead of a case beyond its training steps, median", statistics.median(overhead.values()), "s", 0.5),
        Figure("overhead of a case, largest", overhead[slowest], "s", note=slowest),
        Figure("training steps of a case, median", statistics.median(e.training_s or 0.0 for e in timed), "s"),
        Figure("peak memory of a rank", max(e.peak_memory_mb or 0.0 for e in evidence), "MB", 600.0),
        Figure("peak memory of the whole lane", memory_mb, "MB", note=f"{workers} at a time, shared pages once"),
    ]


def start(runtime: str, to_first_case_s: float, import_s: float) -> Figure:
    """What an unchanged start pays before its first case beyond the import of the stack."""
    limit = 5.0 if runtime == "docker" else 3.0
    note = f"{to_first_case_s:.1f} s to the first case, import of the stack {import_s:.1f} s"
    return Figure(f"unchanged start beyond the import ({runtime})", to_first_case_s - import_s, "s", limit, note=note)
