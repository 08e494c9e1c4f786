"""Which workload a cell trains: by job, from the payload that the ranks and the reference are both given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.jobs.workload import Workload


def workload_for(payload: Mapping[str, Any]) -> Workload:
    """The workload of a cell. payload: job, case, seed, and adapter ("FILE.py:Class") or None."""
    case, seed = payload["case"], int(payload["seed"])
    if payload["job"] == "grpo-lora":
        from tests.jobs.grpo import GrpoLora

        return GrpoLora(case, seed)
    raise LookupError(f"job {payload['job']!r} has no workload")


def user_files(payload: Mapping[str, Any]) -> tuple[Path, ...]:
    """Files whose frames count as the user's own code in a traceback."""
    return ()
