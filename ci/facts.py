"""What this host is: looked up once, never changed, and never raising.

The doctor judges these facts, `cuda-zero` and `npu-zero` refuse by them, and run.json keeps them as `hardware`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ci import smi, workers
from ci.errors import EnvironmentUnavailable
from ci.smi import Listing


@dataclass(frozen=True)
class Facts:
    """A host, in plain values. engine_problem and engine_mend are set where `engine` is None.

    closed_devices: device files that this user may not open. listings: what the vendors' tools say, by tool. cann_home:
    the CANN whose environment is set. cdi: the kinds of devices that the engine has CDI for, of those looked for.
    """

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
    closed_devices: tuple[str, ...] = ()
    listings: Mapping[str, Listing] = field(default_factory=dict)
    cann_home: str | None = None
    cdi: frozenset[str] = frozenset()


def _numbered(folder: Path, prefix: str) -> tuple[str, ...]:
    """Device files such as /dev/nvidia0; /dev/nvidiactl and /dev/davinci_manager are no devices."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return ()
    return tuple(f"{folder}/{name}" for name in names if name.removeprefix(prefix).isdigit() and name != prefix)


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


def gather(devices: Path = Path("/dev")) -> Facts:
    """Look at this host: its resources and its devices. Quick, and nothing else is asked."""
    nvidia, davinci = _numbered(devices, "nvidia"), _numbered(devices, "davinci")
    return Facts(
        python=sys.version_info[:3],
        cores=workers.cores(),
        memory_free_mb=workers.free_memory_mb(),
        disk_free_mb=shutil.disk_usage(Path.cwd()).free // (1024 * 1024),
        nvidia_driver=Path("/proc/driver/nvidia").exists() or shutil.which("nvidia-smi") is not None,
        nvidia_devices=nvidia,
        ascend_driver=Path("/usr/local/Ascend/driver").exists() or shutil.which("npu-smi") is not None,
        davinci_devices=davinci,
        closed_devices=tuple(path for path in (*nvidia, *davinci) if not os.access(path, os.R_OK | os.W_OK)),
        cann_home=os.environ.get("ASCEND_HOME_PATH"),
    )


def with_tools(facts: Facts, torch_index: str, tools: Iterable[smi.Tool] = (), cdi: Iterable[str] = ()) -> Facts:
    """The same host with what is asked of others: the engine, its builder and images, uv, wheels on disk.

    tools: the vendors' tools to ask. cdi: the kinds of devices to ask the engine for.
    """
    # The Docker SDK takes a moment to import, and only the doctor asks all this.
    from docker.errors import DockerException

    from ci.provision import engine
    from ci.provision.devices import knows_cdi
    from ci.provision.site import Site, uv_executable

    clients = engine.clients()
    builder = engine.find_builder()
    try:
        uv: str | None = uv_executable()
    except (EnvironmentUnavailable, FileNotFoundError):  # the latter: the package uv is there, its program is not
        uv = None
    torch = sorted({wheel.name for folder in Site.of().wheel_folders for wheel in folder.glob("torch-*.whl")})
    facts = dataclasses.replace(
        facts,
        docker_client=clients[0] if clients else None,
        builder=f"{builder.client} ({builder.version})" if builder else None,
        uv=uv,
        torch_wheels=tuple(torch),
        torch_index=torch_index,
        listings={tool: listing for tool in tools if (listing := smi.ask(tool)) is not None},
    )
    try:
        client = engine.connect()
        version, info = client.version().get("Version", "?"), client.info()
        runtimes = info.get("Runtimes") or {}
        images = frozenset(tag for image in client.images.list() for tag in image.tags)
    except EnvironmentUnavailable as error:
        problem, _, mend = error.message.partition("; ")
        return dataclasses.replace(facts, engine_problem=problem, engine_mend=mend)
    except (DockerException, OSError) as error:
        return dataclasses.replace(facts, engine_problem=f"the engine answers and then fails: {error}")
    return dataclasses.replace(
        facts,
        engine=f"{version}",
        engine_runtimes=tuple(sorted(runtimes)),
        images=images,
        cdi=frozenset(kind for kind in cdi if knows_cdi(info, kind)),
    )
