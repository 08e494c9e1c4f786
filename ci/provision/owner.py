"""Who made something that outlives its maker (a container, a folder for temporary files), and whether they still live.

A run that is killed cannot tidy up; the next one does, and must never take what a living run still needs.
"""

from __future__ import annotations

import os
from pathlib import Path


def owner() -> str:
    """This process, so that a later one can tell whether it still lives: boot, process namespace, pid, start time."""
    return f"{_namespace()}/{os.getpid()}/{_started(os.getpid())}"


def is_orphan(label: str) -> bool:
    """Whether what this label says is a process of this host that has ended."""
    if label.count("/") < 2:
        return False
    namespace, pid, started = label.rsplit("/", 2)
    return namespace == _namespace() and pid.isdigit() and _started(int(pid)) != started


def _namespace() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"


def _started(pid: int) -> str:
    """Start time of a process in clock ticks since boot; '' where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""
