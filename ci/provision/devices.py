"""How a container is handed the devices of its backend: what matrix.yaml says, and what the engine here can do.

An engine has up to three ways: an OCI runtime of the vendor, CDI, and `--gpus` or plain device files. Which of them is
taken depends on the engine alone, never on whether a device happens to be there: a dry run says the same as a run.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ci.entries import Backend, Devices


@dataclass(frozen=True)
class Handover:
    """What a container is given. gpus: numbers for --gpus; files: device files; mounts: bound read-only, same place.

    groups: ids of the groups that own the device files, which the plain user inside joins.
    """

    gpus: tuple[str, ...] = ()
    cdi: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    runtime: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Grant:
    """What a run's containers get: by the backend's entry, and of this host's devices these numbers."""

    backend: Backend
    numbers: tuple[str, ...] = ()

    def handover(self, info: Mapping[str, Any]) -> Handover:
        """How this engine hands them over."""
        return Handover() if self.backend.devices is None else handover_of(self.backend.devices, self.numbers, info)


def handover_of(devices: Devices, numbers: Sequence[str], info: Mapping[str, Any]) -> Handover:
    """What to give for these device numbers. info: what the engine says of itself (`docker info`), {} without one."""
    numbers = tuple(numbers)
    files = tuple(
        dict.fromkeys(
            pattern.format(number) for pattern in devices.files for number in (numbers if "{}" in pattern else ("",))
        )
    )
    groups = _groups(files)
    if devices.runtime is not None and devices.runtime in (info.get("Runtimes") or {}):
        variables = {str(devices.runtime_variable): ",".join(numbers)}
        return Handover(runtime=devices.runtime, environment=variables, groups=groups)
    if devices.cdi is not None and knows_cdi(info, devices.cdi):
        return Handover(cdi=tuple(f"{devices.cdi}={number}" for number in numbers))
    if devices.gpus:
        return Handover(gpus=numbers)
    return Handover(files=files, mounts=devices.mounts, groups=groups)


def knows_cdi(info: Mapping[str, Any], kind: str, folders: Sequence[str] | None = None) -> bool:
    """Whether the engine knows devices of this CDI kind: it lists them (28.2 and newer), or has a specification."""
    if any(str(device.get("ID", "")).startswith(f"{kind}=") for device in info.get("DiscoveredDevices") or ()):
        return True
    for folder in info.get("CDISpecDirs") or () if folders is None else folders:
        for path in sorted(Path(folder).glob("*")):
            try:
                if path.suffix in (".yaml", ".json") and kind in path.read_text(errors="replace"):
                    return True
            except OSError:
                continue
    return False


def inside(numbers: Sequence[str], *, in_container: bool) -> tuple[str, ...]:
    """The numbers under which the jobs see these devices: from 0 in a container, which has no others."""
    return tuple(map(str, range(len(numbers)))) if in_container else tuple(numbers)


def _groups(files: Sequence[str]) -> tuple[int, ...]:
    """The groups, other than root's, that may use these device files; none for a file that is not here."""
    found = set()
    for path in files:
        try:
            status = os.stat(path)
        except OSError:
            continue
        if status.st_gid and status.st_mode & stat.S_IRGRP:
            found.add(status.st_gid)
    return tuple(sorted(found))
