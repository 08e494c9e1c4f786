"""The Docker engine of this host: whether it answers, why not, and which client can build with BuildKit.

Asked, never guessed from a path: a host can have a client without a builder beside one that has it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.errors import DockerException
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

from ci.errors import EnvironmentUnavailable

ANSWER_S = 10
NO_BUILDER = (
    "no docker client here can build with BuildKit; install docker-buildx (or docker.io of Debian 12), or use "
    "--runtime venv"
)
LOST = (DockerException, RequestException, HTTPError)
"""What the Docker SDK raises: its own where the engine answers, those of the libraries below where it is gone."""
DEFAULT_SOCKET = "unix:///var/run/docker.sock"


@dataclass(frozen=True)
class Builder:
    """A docker client whose `build` is BuildKit, and the environment that makes it so."""

    client: str
    version: str

    @property
    def environment(self) -> Mapping[str, str]:
        """Added to this process's environment for a build."""
        # Attestations would turn the image into an index of two.
        return {"DOCKER_BUILDKIT": "1", "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}


def clients() -> list[str]:
    """Every docker client on PATH, in its order, each once."""
    found: dict[str, str] = {}
    for folder in os.get_exec_path():
        if client := shutil.which("docker", path=folder):
            found.setdefault(os.path.realpath(client), client)
    return list(found.values())


def _ask(*command: str, env: Mapping[str, str] | None = None) -> str | None:
    """What a client prints, or None where it fails."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=True,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=ANSWER_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def find_builder() -> Builder | None:
    """The first client whose build takes secrets, which only BuildKit's does."""
    for client in clients():
        said = _ask(client, "build", "--help", env={"DOCKER_BUILDKIT": "1"})
        if said is not None and "--secret" in said:
            version = _ask(client, "--version") or ""
            return Builder(client, version.strip())
    return None


def endpoint() -> str:
    """Where the engine listens: DOCKER_HOST, else the client's current context, else the usual socket."""
    if host := os.environ.get("DOCKER_HOST"):
        return host
    for client in clients():
        said = _ask(client, "context", "inspect", "--format", "{{.Endpoints.docker.Host}}")
        if said and said.strip():
            return said.strip()
    return DEFAULT_SOCKET


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Turn whatever an engine that stops or hangs makes of a call into one message with exit code 3."""
    try:
        yield
    except LOST as error:
        raise EnvironmentUnavailable(f"the Docker engine no longer answers: {explain(error)}") from error


def explain(error: Exception) -> str:
    """The engine's own words, without the address of the request."""
    return str(getattr(error, "explanation", None) or error)


def connect() -> docker.DockerClient:
    """A client of the engine that answers here; otherwise one message with the reason and what to do."""
    where = endpoint()
    try:
        client = docker.DockerClient(base_url=where, version="auto", timeout=ANSWER_S)
        client.ping()
    except LOST as error:
        raise EnvironmentUnavailable(_reason(where, error)) from error
    client.api.timeout = 60
    return client


def _reason(where: str, error: Exception) -> str:
    text = str(error)
    socket = Path(where.removeprefix("unix://"))
    if "PermissionError" in text or "Permission denied" in text:
        return (
            f"the Docker engine at {where} does not let this user in; join the group that owns the socket "
            "(usermod -aG docker USER, then log in again), or use --runtime venv"
        )
    if where.startswith("unix://") and not socket.exists():
        hint = "install and start it (docker.io on Debian)" if not clients() else "start it (systemctl start docker)"
        return f"no Docker engine answers: {socket} does not exist; {hint}, or use --runtime venv"
    if "ConnectionRefused" in text or "Connection refused" in text:
        return f"no Docker engine answers at {where}: nothing listens there; start it, or use --runtime venv"
    return f"no Docker engine answers at {where}: {text}; or use --runtime venv"
