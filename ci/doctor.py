"""What this host can run, and what is missing, in the order in which a person would mend it.

`facts.gather` looks at the host; here the facts become findings, by backend and runtime. Nothing is changed, nothing is
installed and nothing here raises: a doctor that falls over on a broken host is of no use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ci.facts import Facts

State = Literal["ok", "missing", "note"]

IMAGE_MB = 6000
"""Disk that building an image takes while it works: the layers of the build stage and of the image itself."""
VENV_MB = 3000
"""Disk that one stack's virtual environment takes, with the wheels in uv's cache."""
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


def _docker(facts: Facts, backend_base: str | None) -> Iterator[Finding]:
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
    if backend_base:
        if backend_base in facts.images:
            yield Finding("base image", "ok", f"{backend_base} is here")
        else:
            found = f"{backend_base} is not here: it will be pulled"
            yield Finding("base image", "note", found, "without a registry: nox -s base-image")


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


def _room(facts: Facts) -> Iterator[Finding]:
    free = facts.disk_free_mb
    if free < VENV_MB:
        mend = "free some space, or work in a checkout on a larger disk"
        yield Finding("disk", "missing", f"{free} MB free, {VENV_MB} MB for a venv", mend, "everything")
    elif free < IMAGE_MB:
        yield Finding("disk", "note", f"{free} MB free: enough for a venv, building an image takes {IMAGE_MB} MB")
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


def _devices(backend: str, facts: Facts) -> Iterator[Finding]:
    missing = missing_devices(backend, facts)
    if missing is not None:
        yield missing
    elif backend == "cuda":
        yield Finding("GPU", "ok", ", ".join(facts.nvidia_devices))
        if facts.engine and "nvidia" not in facts.engine_runtimes:
            mend = "install nvidia-container-toolkit and run: nvidia-ctk runtime configure --runtime=docker"
            yield Finding("GPU in containers", "missing", "the engine has no nvidia runtime", mend, "docker")
    elif backend == "npu":
        yield Finding("NPU", "ok", ", ".join(facts.davinci_devices))


def diagnose(backend: str, facts: Facts, *, base_image: str | None, unavailable: str | None) -> Diagnosis:
    """All findings of one backend. unavailable: why matrix.yaml says that this backend cannot run anything yet."""
    findings = [*_devices(backend, facts)]
    if unavailable:
        findings.append(Finding("this project", "missing", unavailable, "", "everything"))
    findings += [*_host(facts), *_docker(facts, base_image), *_venv(backend, facts), *_room(facts)]
    blocked = {finding.needed_for for finding in findings if finding.state == "missing"}
    runtimes = () if "everything" in blocked else tuple(word for word in ("docker", "venv") if word not in blocked)
    return Diagnosis(backend, runtimes, tuple(findings))
