"""order.json: what the host asks of a stack. The jobs read it with the standard library; nothing else crosses over."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ci.entries import InstalledVersion
from ci.matrix import Backend
from ci.plan import Cell, PlannedStack

SCHEMA = 1


def build(
    backend_id: str,
    backend: Backend,
    stack: PlannedStack,
    cells: Sequence[Cell],
    *,
    adapter: str | None = None,
    ds_config: Mapping[str, Any] | None = None,
    seed: int = 0,
    devices: Sequence[str] = (),
) -> dict[str, Any]:
    """The order for one stack. adapter: "FILE.py:Class", as the runtime sees the path. ds_config: its content.

    devices: the numbers that the jobs may use, as they see them; none where the backend has none.
    """
    return {
        "schema": SCHEMA,
        "backend": {
            "id": backend_id,
            "accelerator": backend.accelerator,
            "communication": backend.communication,
            "start_method": backend.start_method,
            "environment": dict(backend.environment),
            "shims": list(backend.shims),
            "training_arguments": dict(backend.training_arguments),
            "versions": [_looked_up(version, stack) for version in backend.versions],
            "visible": None if backend.devices is None else backend.devices.visible,
            "devices": list(devices),
        },
        "stack": {"id": stack.id, "pins": dict(stack.pins), "check_pins": stack.check_pins},
        "cells": [
            {
                "id": cell.id,
                "job": cell.job,
                "case": dict(cell.case),
                "world_size": cell.world_size,
                "seed": seed,
                "timeout_s": cell.timeout_s,
                "corrections": list(cell.corrections),
                "adapter": adapter,
                "ds_config": ds_config,
            }
            for cell in cells
        ],
    }


def _looked_up(version: InstalledVersion, stack: PlannedStack) -> dict[str, str | None]:
    """A version to look up, with what this stack expects of it."""
    expected = version.expected
    if expected is not None and "{cann}" in expected:
        expected = None if stack.cann is None else expected.format(cann=stack.cann)
    return {**version.model_dump(), "expected": expected}


def write(path: Path, order: dict[str, Any]) -> None:
    """Readable by the plain user of a container, whatever the umask here."""
    path.write_text(json.dumps(order, indent=1) + "\n", encoding="utf-8")
    path.chmod(0o644)
