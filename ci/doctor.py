"""What this host can run, and what is missing, in the order in which a person would mend it.

`facts.gather` looks at the host; here the facts become findings, by backend and runtime. Nothing is changed, nothing is
installed and nothing here raises: a doctor that falls over on a broken host is of no use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from ci.entries import Devices
from ci.facts import Facts

State = Literal["ok", "missing", "note"]

IMAGE_MB = {"cpu": 6000, "cuda": 25000, "npu": 25000}
"""Disk that building an image takes while it works: the layers of the build stage and of the image itself.

Measured for cpu and cuda; npu, whose base has some GB of CANN, is taken to need what cuda does.
"""
VENV_MB = 3000
"""Disk that one stack's virtual environment takes, with the wheels in uv's cache."""
WITHOUT_A_REGISTRY = "without a registry: nox -s base-image"
BROUGHT_HERE = "without its registry: pull it elsewhere, docker save, and docker load here"
TWO_RANKS_MB = 1200
"""Memory of the smallest case of the lane: two ranks of 600 MB."""


@dataclass(frozen=True)
class Finding:
    """One thing looked at. mend: what to do; only where something is missing."""

    subject: str
    state: State
    found: str
    mend: str = ""
    needed_for: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """What one backend can do here. runtimes: those that would start a case."""

    backend: str
    runtimes: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def conclusion(self) -> str:
        """One line: where it runs, or the first thing that keeps it from running."""
        if self.runtimes:
            return f"{self.backend}: runs here ({', '.join(self.runtimes)})"
        first = next((finding for finding in self.findings if finding.state == "missing"), None)
        return f"{self.backend}: cannot run here" + (f": {first.found}" if first else "")


def _host(facts: Facts) -> Iterator[Finding]:
    if facts.python >= (3, 11):
        yield Finding("Python", "ok", ".".join(map(str, facts.python)))
    else:
        found = ".".join(map(str, facts.python))
        yield Finding("Python", "missing", f"{found}, 3.11 or newer needed", "install Python 3.11", "everything")


def _engine(facts: Facts) -> Iterator[Finding]:
    if facts.docker_client:
        yield Finding("Docker client", "ok", facts.docker_client)
    else:
        yield Finding("Docker client", "missing", "no docker on PATH", "install docker (docker.io on Debian)", "docker")
    if facts.engine:
        yield Finding("Docker engine", "ok", facts.engine)
    else:
        yield Finding("Docker engine", "missing", facts.engine_problem, facts.engine_mend, "docker")
        return
    if facts.builder:
        yield Finding("BuildKit builder", "ok", facts.builder)
    else:
        mend = "install docker-buildx, or a client with BuildKit built in (docker.io of Debian 12)"
        yield Finding("BuildKit builder", "missing", "no client here can build with BuildKit", mend, "docker")


def _image(facts: Facts, base: str | None) -> Iterator[Finding]:
    if not base or not facts.engine:
        return
    if base in facts.images:
        yield Finding("base image", "ok", f"{base} is here")
    elif base.startswith("debian:"):
        yield Finding("base image", "note", f"{base} is not here: it will be pulled", WITHOUT_A_REGISTRY)
    else:
        yield Finding("base image", "note", f"{base} is not here: it will be pulled", BROUGHT_HERE)


def _venv(backend: str, facts: Facts) -> Iterator[Finding]:
    if facts.uv:
        yield Finding("uv", "ok", facts.uv)
    else:
        yield Finding("uv", "missing", "no uv found", 'pip install "nox[uv]"', "venv")
    if backend != "cpu":
        return
    if facts.torch_wheels:
        yield Finding("torch", "ok", f"wheel on disk: {', '.join(facts.torch_wheels)}")
    elif facts.torch_index:
        yield Finding("torch", "note", f"no wheel in PIP_FIND_LINKS or UV_FIND_LINKS: from {facts.torch_index}")
    else:
        mend = "put the wheel into a folder named by UV_FIND_LINKS, or let the host's index hold it"
        yield Finding("torch", "note", "no wheel on disk and its index is switched off", mend)


def _room(backend: str, facts: Facts) -> Iterator[Finding]:
    free = facts.disk_free_mb
    if free < VENV_MB:
        mend = "free some space, or work in a checkout on a larger disk"
        yield Finding("disk", "missing", f"{free} MB free, {VENV_MB} MB for a venv", mend, "everything")
    elif free < (image := IMAGE_MB.get(backend, IMAGE_MB["cuda"])):
        yield Finding("disk", "note", f"{free} MB free: enough for a venv, building an image takes {image} MB")
    else:
        yield Finding("disk", "ok", f"{free} MB free")
    memory = facts.memory_free_mb
    if memory is not None and memory < TWO_RANKS_MB:
        mend = "end other programs: two ranks of 600 MB must fit"
        yield Finding("memory", "missing", f"{memory} MB free, {TWO_RANKS_MB} MB needed", mend, "everything")
    else:
        yield Finding("memory", "ok", f"{memory} MB free" if memory is not None else "unknown")
    yield Finding("cores", "ok", str(facts.cores))


def missing_devices(backend: str, facts: Facts) -> Finding | None:
    """What keeps this backend's devices from being used here; None where they are there (or none is needed)."""
    if backend == "cuda" and not facts.nvidia_devices:
        if not facts.nvidia_driver:
            mend = "use a host with an NVIDIA GPU and its driver (nvidia-smi must list it)"
            return Finding("GPU", "missing", "no NVIDIA driver (/proc/driver/nvidia, nvidia-smi)", mend, "everything")
        mend = "nvidia-smi must list a GPU; in a container or VM, hand one through"
        return Finding("GPU", "missing", "an NVIDIA driver, but no GPU (/dev/nvidia0)", mend, "everything")
    if backend == "npu" and not facts.davinci_devices:
        if not facts.ascend_driver:
            mend = "use an Ascend host with driver and firmware (npu-smi info must list the 910B)"
            return Finding("NPU", "missing", "no Ascend driver (/usr/local/Ascend/driver)", mend, "everything")
        mend = "npu-smi info must list a card; in a container, hand /dev/davinciN through"
        return Finding("NPU", "missing", "an Ascend driver, but no device (/dev/davinci0)", mend, "everything")
    return None


def device_numbers_here(backend: str, facts: Facts) -> tuple[str, ...]:
    """The numbers of this host's devices of a backend, by their files."""
    files = {"cuda": facts.nvidia_devices, "npu": facts.davinci_devices}.get(backend, ())
    return tuple(sorted((file[len(file.rstrip("0123456789")) :] for file in files), key=int))


def _driver(backend: str, facts: Facts, devices: Devices) -> Iterator[Finding]:
    """The driver, by its files and by its tool."""
    here = facts.nvidia_driver if backend == "cuda" else facts.ascend_driver
    if not here:
        missing = missing_devices(backend, facts)
        if missing is not None:
            yield dataclasses.replace(missing, subject="driver")
        return
    listing = facts.listings.get(devices.tool)
    if listing is None:
        mend = f"install it with the driver: only {devices.tool} tells who uses a device and whether it is well"
        yield Finding("driver", "note", f"here, but no {devices.tool} on PATH", mend)
    elif not listing.devices:
        mend = f"{devices.tool} must list the devices: load the driver's kernel module, or reboot after its update"
        yield Finding("driver", "missing", listing.problem or f"{devices.tool} lists nothing", mend, "everything")
    elif listing.driver and devices.driver and listing.driver not in SpecifierSet(devices.driver):
        found = f"{listing.driver}, {devices.driver} needed by the stacks"
        yield Finding("driver", "missing", found, "install a newer driver", "everything")
    else:
        yield Finding("driver", "ok", f"{listing.driver or 'version unknown'} ({devices.tool})")


def _runtime(backend: str, facts: Facts, devices: Devices) -> Iterator[Finding]:
    """How a container gets the devices, and what a process outside of one needs besides the driver."""
    if facts.engine and devices.gpus:
        if "nvidia" in facts.engine_runtimes or devices.cdi in facts.cdi:
            yield Finding("container runtime", "ok", "nvidia" if "nvidia" in facts.engine_runtimes else "CDI")
        else:
            mend = "install nvidia-container-toolkit and run: nvidia-ctk runtime configure --runtime=docker"
            yield Finding("container runtime", "missing", "the engine has no nvidia runtime and no CDI", mend, "docker")
    elif facts.engine and devices.runtime:
        if devices.runtime in facts.engine_runtimes:
            yield Finding("container runtime", "ok", devices.runtime)
        else:
            found = (
                f"the engine has no runtime {devices.runtime}: device files and the driver's folders are handed over"
            )
            yield Finding("container runtime", "note", found)
    if backend == "npu":
        if facts.cann_home:
            yield Finding("CANN", "ok", facts.cann_home)
        else:
            mend = "source set_env.sh of its CANN before nox; an image of CANN does so by itself"
            yield Finding("CANN", "missing", "its environment is not set (ASCEND_HOME_PATH)", mend, "venv")


def _permission(backend: str, facts: Facts) -> Iterator[Finding]:
    own = facts.nvidia_devices if backend == "cuda" else facts.davinci_devices
    closed = [path for path in facts.closed_devices if path in own]
    if closed:
        mend = "join the group that owns them (ls -l), then log in again; a container does so by itself"
        yield Finding("permission", "missing", f"this user may not open {', '.join(closed)}", mend, "venv")
    elif own:
        yield Finding("permission", "ok", "this user may open every device")


def _devices(backend: str, facts: Facts, devices: Devices) -> Iterator[Finding]:
    """Each device that is here: whether it is well, and who uses it."""
    numbers = device_numbers_here(backend, facts)
    listing = facts.listings.get(devices.tool)
    if not numbers:
        driver = facts.nvidia_driver if backend == "cuda" else facts.ascend_driver
        if driver and (missing := missing_devices(backend, facts)) is not None:
            yield dataclasses.replace(missing, subject="devices")
        return
    if listing is None or not listing.devices:
        yield Finding("devices", "ok", f"{len(numbers)} by their files: {', '.join(numbers)}")
        return
    found = [listing.device(number) for number in numbers]
    well = [device for device in found if device.trouble is None]
    for device in found:
        if device.trouble is not None:
            mend = f"look into the kernel's log, reset or replace it; a run leaves it out (of {len(found)})"
            state: State = "note" if well else "missing"
            subject = f"device {device.number}"
            yield Finding(subject, state, f"{device.name}: {device.trouble}", mend, "" if well else "everything")
        elif device.users:
            text = f"{device.name}: in use by {', '.join(device.users)}"
            yield Finding(f"device {device.number}", "note", text, "a run leaves it out; --share-devices takes it")
    if well:
        names = ", ".join(sorted({device.name for device in well}))
        free = sum(not device.users for device in well)
        yield Finding("devices", "ok", f"{len(well)} well, {free} free: {names}")


def diagnose(
    backend: str, facts: Facts, *, base_image: str | None, unavailable: str | None, devices: Devices | None = None
) -> Diagnosis:
    """All findings of one backend, in the order of mending: driver, runtime, engine, permission, devices, image, disk.

    unavailable: why matrix.yaml says that this backend cannot run anything yet. devices: of its entry there.
    """
    findings = [*_host(facts)]
    if unavailable:
        findings.append(Finding("this project", "missing", unavailable, "", "everything"))
    if devices is not None:
        findings += [*_driver(backend, facts, devices), *_runtime(backend, facts, devices)]
    findings += _engine(facts)
    if devices is not None:
        findings += [*_permission(backend, facts), *_devices(backend, facts, devices)]
    findings += [*_image(facts, base_image), *_venv(backend, facts), *_room(backend, facts)]
    blocked = {finding.needed_for for finding in findings if finding.state == "missing"}
    runtimes = () if "everything" in blocked else tuple(word for word in ("docker", "venv") if word not in blocked)
    return Diagnosis(backend, runtimes, tuple(findings))
