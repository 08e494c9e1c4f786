"""Where a run takes place, chosen and said aloud: docker if an engine answers, else a virtual environment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ci.errors import EnvironmentUnavailable
from ci.installed import host_python
from ci.provision.host import HostRuntime
from ci.provision.runtime import Runtime, RuntimeId
from ci.provision.venv import VenvRuntime


@dataclass(frozen=True)
class Place:
    """A runtime and why it was chosen."""

    runtime: Runtime
    why: str

    def __str__(self) -> str:
        return f"{self.runtime.id}: {self.why}"


def choose(wanted: RuntimeId | None, root: Path, *, python: str | None, say: Callable[[str], None]) -> Place:
    """The runtime asked for, or the best one here. A runtime asked for by name is never replaced by another."""
    if wanted == "venv":
        return Place(VenvRuntime(root, say=say), "asked for by --runtime")
    if wanted == "host":
        return Place(HostRuntime(root, str(host_python(python))), "asked for by --runtime")
    # The Docker SDK takes a moment to import; the two runtimes above need none of it.
    from ci.provision.image import DockerRuntime

    try:
        runtime = DockerRuntime.connect(root, say=say)
    except EnvironmentUnavailable as error:
        if wanted == "docker":
            raise
        return Place(VenvRuntime(root, say=say), f"no docker, {error.message}")
    return Place(runtime, f"{runtime.engine} answers")
