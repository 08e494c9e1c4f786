"""Memory of a process and everything below it, shared pages counted once."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")


def proportional_mb(pid: int) -> float:
    """Proportional set sizes of the process and its descendants: a page shared by n of them counts 1/n in each."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children[int(parent)].append(int(entry.name))
    total, waiting = 0, [pid]
    while waiting:
        process = waiting.pop()
        waiting += children[process]
        with contextlib.suppress(OSError):
            for line in (PROC / str(process) / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024


class Watch:
    """Looks at a process while the block runs; `peak_mb` is the most it saw."""

    def __init__(self, pid: int, every_s: float) -> None:
        self.peak_mb = 0.0
        self._pid = pid
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(self._every_s):
            self.peak_mb = max(self.peak_mb, proportional_mb(self._pid))
