"""What this host is: looked up once, never changed, and never raising.

The doctor judges these facts, `cuda-zero` and `npu-zero` refuse by them, and run.json keeps them as `hardware`.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

from ci import workers


@dataclass(frozen=True)
class Facts:
    """A host, in plain values. engine_problem and engine_mend are set where `engine` is None."""

    python: tuple[int, ...]
    cores: int
    memory_free_mb: int | None
    disk_free_mb: int
    docker_client: str | None = None
    engine: str | None = None
    engine_problem: str = ""
    engine_mend: str = ""
    engine_runtimes: tuple[str, ...] = ()
    builder: str | None = None
    images: frozenset[str] = frozenset()
    uv: str | None = None
    torch_wheels: tuple[str, ...] = ()
    torch_index: str = ""
    nvidia_driver: bool = False
    nvidia_devices: tuple[str, ...] = ()
    ascend_driver: bool = False
    davinci_devices: tuple[str, ...] = ()


def _numbered(folder: Path, prefix: str) -> tuple[str, ...]:
    """Device files such as /dev/nvidia0; /dev/nvidiactl and /dev/davinci_manager are no devices."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return ()
    return tuple(f"{folder}/{name}" for name in names if name.removeprefix(prefix).isdigit() and name != prefix)


def local_wheels(environment: Mapping[str, str], name: str) -> tuple[str, ...]:
    """File names of a package's wheels in the folders of PIP_FIND_LINKS and UV_FIND_LINKS."""
    found: set[str] = set()
    for variable, separators in (("PIP_FIND_LINKS", None), ("UV_FIND_LINKS", ",")):
        for word in environment.get(variable, "").split(separators):
            folder = Path(urlparse(word).path if word.startswith("file:") else word.strip())
            try:
                found |= {path.name for path in folder.glob(f"{name}-*.whl")}
            except OSError:
                continue
    return tuple(sorted(found))


def hardware() -> dict[str, str | int | float | None]:
    """The part of the facts that a run's record keeps: what the numbers were measured on."""
    total = None
    with contextlib.suppress(OSError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (1024 * 1024)
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "kernel": platform.release(),
        "processor": _processor(),
        "cores": workers.cores(),
        "memory_mb": total,
        "memory_free_mb": workers.free_memory_mb(),
    }


def _processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def gather(environment: Mapping[str, str], *, torch_index: str = "", devices: Path = Path("/dev")) -> Facts:
    """Look at this host."""
    return Facts(
        python=sys.version_info[:3],
        cores=workers.cores(),
        memory_free_mb=workers.free_memory_mb(),
        disk_free_mb=shutil.disk_usage(Path.cwd()).free // (1024 * 1024),
        torch_wheels=local_wheels(environment, "torch"),
        torch_index=torch_index,
        nvidia_driver=Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None,
        nvidia_devices=_numbered(devices, "nvidia"),
        ascend_driver=Path("/usr/local/Ascend/driver").exists() or shutil.which("npu-smi") is not None,
        davinci_devices=_numbered(devices, "davinci"),
    )
