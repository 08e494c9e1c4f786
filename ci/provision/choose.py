"""Which runtime a run gets, and why: said aloud before anything is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ci.errors import EnvironmentUnavailable, UsageError, choices
from ci.provision.devices import Grant
from ci.provision.runtime import Runtime, RuntimeId

RUNTIMES: tuple[RuntimeId, ...] = ("docker", "venv", "host")


@dataclass(frozen=True)
class Choice:
    """A runtime and the reason why it was taken."""

    runtime: Runtime
    reason: str


def choose(
    asked: str | None,
    root: Path,
    python: str | None = None,
    say: Callable[[str], None] | None = None,
    grant: Grant | None = None,
) -> Choice:
    """The runtime asked for, or Docker if an engine answers and can build, else a virtual environment."""
    # Imported where they are used: plan and judge need neither the SDK nor the time it takes to import.
    if asked == "host":
        from ci.provision.host import HostRuntime

        if python is None:
            raise UsageError("--runtime host needs --python EXE, the interpreter to run in")
        return Choice(HostRuntime(root, python), "asked for")
    if asked == "venv":
        from ci.provision.venv import VenvRuntime

        return Choice(VenvRuntime(root, say=say), "asked for")
    if asked not in (None, "docker"):
        raise UsageError(f"unknown runtime {asked!r}; {choices(asked, RUNTIMES)}")
    from ci.provision import engine
    from ci.provision.image import DockerRuntime

    try:
        client = engine.connect()
        # Asked for by name it needs a builder only where an image has to be built; `images --load` may have brought it.
        if asked is None and engine.find_builder() is None:
            raise EnvironmentUnavailable(engine.NO_BUILDER)
    except EnvironmentUnavailable as error:
        if asked == "docker":
            raise
        from ci.provision.venv import VenvRuntime

        # What to do about it comes after the semicolon; here something has been done about it.
        return Choice(VenvRuntime(root, say=say), error.message.partition("; ")[0])
    return Choice(
        DockerRuntime(root, client, say=say, grant=grant), "asked for" if asked else "a Docker engine answers"
    )
