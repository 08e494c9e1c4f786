"""How many cases run side by side: as many as the devices carry, or the cores and the free memory.

On cpu the world size is never gated: a case with more ranks than cores runs, alone and slower.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY_PER_RANK_MB = 600
"""What the project allows a rank (290-530 MB were measured)."""

_CGROUP_LIMITS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)


@dataclass(frozen=True)
class Workers:
    """A number of pytest workers and the reason for it, to be said aloud."""

    count: int
    why: str


def cores() -> int:
    """Cores this process may use, which a container or taskset may have cut."""
    return len(os.sched_getaffinity(0))


def free_memory_mb(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that could be used without swapping, within the limit of the cgroup; None where nothing tells."""
    found: list[int] = []
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) // 1024)
    except OSError:
        pass
    for limit, usage in _CGROUP_LIMITS:
        try:
            found.append((int(limit.read_text()) - int(usage.read_text())) // (1024 * 1024))
        except (OSError, ValueError):  # no such cgroup, or "max"
            continue
    return min(found) if found else None


def choose(world_sizes: Sequence[int], *, cores: int, free_mb: int | None, devices: int | None = None) -> Workers:
    """Workers for cases of these world sizes: cores // the usual world size, less if the largest would not fit.

    devices: how many a run has, where it has any: then each worker gets as many of its own as the largest case needs.
    """
    if not world_sizes:
        return Workers(1, "no case")
    if devices is not None:
        count = min(max(1, devices // max(world_sizes)), len(world_sizes))
        return Workers(count, f"{devices} devices, at most {max(world_sizes)} ranks a case")
    usual = Counter(sorted(world_sizes)).most_common(1)[0][0]
    by_cores = max(1, cores // usual)
    count = min(by_cores, len(world_sizes))
    why = f"{cores} cores, {usual} ranks a case"
    if free_mb is not None:
        by_memory = max(1, free_mb // (max(world_sizes) * MEMORY_PER_RANK_MB))
        if by_memory < count:
            count = by_memory
            why = f"{free_mb} MB free, {max(world_sizes)} ranks of {MEMORY_PER_RANK_MB} MB a case"
    return Workers(count, why)
