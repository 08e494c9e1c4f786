"""A user's own DeepSpeed configuration as a case: what it says about stage, dtype, accumulation and clipping.

The judge and the ledger speak in case keys, so the configuration has to be named in them before anything runs.
`auto`, which the trainer fills in, means the job's default here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ci import cases
from ci.errors import UsageError
from ci.matrix import Job, Scalar, canonical

AUTO = "auto"


def case_of_ds_config(file: Path, job: Job) -> dict[str, Scalar]:
    """The case keys that the configuration gives; UsageError where the job has no such case."""
    config: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    case: dict[str, Scalar] = {"zero_stage": _section(config, "zero_optimization", file).get("stage", 0)}
    case["dtype"] = "fp32"
    for dtype in ("bf16", "fp16"):
        if _section(config, dtype, file).get("enabled", False) is True:
            case["dtype"] = dtype
    # ms-swift's configurations leave both to the trainer, which trains in bf16.
    if case["dtype"] == "fp32" and _section(config, "bf16", file).get("enabled") == AUTO:
        case["dtype"] = "bf16"
    for key in ("gradient_accumulation_steps", "gradient_clipping"):
        value = config.get(key, AUTO)
        if value != AUTO:
            case[key] = canonical(value) if isinstance(value, int | float | str) else str(value)
    optimizer = _section(config, "optimizer", file).get("type")
    if optimizer is not None:
        case["optimizer"] = str(optimizer).lower()
    for key, value in case.items():
        if not job.keys[key].accepts(value):
            allowed = ", ".join(cases.text(known) for known in job.keys[key].allowed)
            raise UsageError(f"--ds-config {file}: found {key} {cases.text(value)}; expected one of: {allowed}")
    return case


def _section(config: Mapping[str, Any], name: str, file: Path) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise UsageError(f"--ds-config {file}: {name}: found {section!r}; expected an object")
    return section
