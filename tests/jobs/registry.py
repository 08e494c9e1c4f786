"""Which workload a cell trains: by job, from the payload that the ranks and the reference are both given."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.jobs.workload import Workload


def workload_for(payload: Mapping[str, Any]) -> Workload:
    """The workload of a cell. payload: job, case, seed, and adapter ("FILE.py:Class") or None."""
    case, seed = payload["case"], int(payload["seed"])
    if payload["job"] == "grpo-lora" and case.get("trainer") == "trl":
        from tests.jobs.trl_grpo import TrlGrpo

        return TrlGrpo(case, seed)
    if payload["job"] == "grpo-lora" and case.get("trainer") == "ms-swift":
        from tests.jobs.swift.grpo import SwiftGrpo

        return SwiftGrpo(case, seed)
    if payload["job"] == "grpo-lora":
        from tests.jobs.grpo import GrpoLora

        return GrpoLora(case, seed)
    if payload["job"] == "zero3-custom-adapter" and case.get("trainer") == "ms-swift":
        from tests.jobs.swift.sft import SwiftAdapter

        return SwiftAdapter(case, seed)
    if payload["job"] == "zero3-custom-adapter":
        from tests.jobs.adapter import CustomAdapter

        return CustomAdapter(case, seed, payload.get("adapter"))
    if payload["job"] == "fp16-optimizers" and case.get("path") == "direct":
        from tests.jobs.fp16_direct import HandSet

        return HandSet(case, seed)
    if payload["job"] == "fp16-optimizers":
        from tests.jobs.fp16_workload import DenseFp16

        return DenseFp16(case, seed)
    if payload["job"] == "engine-sweep":
        from tests.jobs.sweep_workload import EngineSweep

        return EngineSweep(case, seed)
    raise LookupError(f"job {payload['job']!r} has no workload")


def user_files(payload: Mapping[str, Any]) -> tuple[Path, ...]:
    """Files whose frames count as the user's own code in a traceback."""
    if payload["job"] != "zero3-custom-adapter":
        return ()
    own = payload.get("adapter")
    model = Path(__file__).resolve().with_name("adapter_model.py")
    return (model, Path(own.rpartition(":")[0]).resolve()) if own else (model,)
