"""What each rank of the probe looks at: accelerator, devices, driver, toolkit, and one collective over the world."""

from __future__ import annotations

import glob
import importlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from tests.jobs import shims
from tests.jobs.engine import assert_accelerator, assert_preloaded, init_distributed
from tests.jobs.launcher import RankContext


def look(context: RankContext) -> None:
    """Body of a rank of the probe; writes what it found. Raises RuntimeError where that is not what was ordered."""
    assert_preloaded()
    backend: Mapping[str, Any] = context.payload["backend"]
    accelerator = assert_accelerator(backend)
    assert_devices(backend)
    versions = {entry["name"]: installed_version(entry) for entry in backend.get("versions", ())}
    shims.apply_common(backend["shims"])
    init_distributed(context, backend["communication"])
    found = {
        "accelerator": accelerator,
        "communication": assert_communication(backend),
        "device": device_name(accelerator),
        "versions": versions,
        "all_reduce": all_reduce(context),
    }
    (context.workdir / f"rank{context.rank}.probe.json").write_text(json.dumps(found))


def assert_devices(backend: Mapping[str, Any]) -> None:
    """As many devices as this worker was given; none is given where the backend has none."""
    given = os.environ.get(str(backend.get("visible")), "")
    if not given:
        return
    wanted, found = len(given.split(",")), get_accelerator().device_count()
    if found != wanted:
        raise RuntimeError(f"{found} devices are here, {backend['visible']}={given} names {wanted}")


def assert_communication(backend: Mapping[str, Any]) -> str:
    """The library that carries the collectives."""
    found = str(torch.distributed.get_backend())
    if found != backend["communication"]:
        raise RuntimeError(
            f"{found} carries the collectives, the backend {backend['id']} has {backend['communication']}"
        )
    return found


def device_name(accelerator: str) -> str:
    """What the vendor calls this rank's device."""
    name = getattr(getattr(torch, accelerator), "get_device_name", None)
    current: str = get_accelerator().current_device_name()
    return current if name is None else str(name(get_accelerator().current_device()))


def installed_version(entry: Mapping[str, str | None]) -> str:
    """The version of a driver or toolkit, as the backend's entry says where it stands."""
    name, expected = entry["name"], entry.get("expected")
    if entry.get("attribute"):
        place = str(entry["attribute"])
        module, _, attribute = place.partition(":")
        found = getattr(importlib.import_module(module), attribute, None)
    else:
        place = os.path.expandvars(str(entry["file"]))
        texts = [Path(path).read_text(errors="replace") for path in sorted(glob.glob(place))]
        matches = [match for text in texts if (match := re.search(str(entry["pattern"]), text, re.MULTILINE))]
        found = matches[0].group(1).strip() if matches else None
    if not found:
        raise RuntimeError(f"no version of {name}: looked for it in {place}")
    if expected is not None and str(found).lower() != expected.lower():
        raise RuntimeError(f"{name} {found} is installed ({place}), the stack is made for {expected}")
    return str(found)


def all_reduce(context: RankContext) -> float:
    """The sum of rank + 1 over the world, computed by a collective on the ranks' own devices."""
    tensor = torch.full((1,), context.rank + 1.0, device=get_accelerator().current_device_name())
    deepspeed.comm.all_reduce(tensor)
    get_accelerator().synchronize()
    total, wanted = float(tensor.item()), context.world_size * (context.world_size + 1) / 2
    if total != wanted:
        raise RuntimeError(f"all_reduce over {context.world_size} ranks gave {total}, the sum is {wanted}")
    return total
