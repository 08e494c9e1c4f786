"""`base-image`: the base of the CPU image where no registry can be reached."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ci.errors import EnvironmentUnavailable, ExitCode, UsageError, choices
from ci.interrupts import Interrupts
from ci.matrix import load
from ci.provision import engine, process
from ci.provision.site import explain

SCRIPT = Path("docker/base/make.sh")


def main(
    backend: Annotated[str, typer.Option("--backend", help="Whose base image.")] = "cpu",
    site_ca: Annotated[
        Path | None, typer.Option("--site-ca", metavar="FILE.crt", help="A certificate that the base shall trust.")
    ] = None,
    if_absent: Annotated[bool, typer.Option("--if-absent", help="Do nothing where the base is here already.")] = False,
) -> ExitCode:
    """Make the base image by debootstrap (root needed) under the name that matrix.yaml gives it."""
    matrix = load()
    if backend not in matrix.backends:
        raise UsageError(f"unknown backend {backend!r}; {choices(backend, matrix.backends)}")
    tag = matrix.backends[backend].base_image
    if tag is None or backend != "cpu":
        raise UsageError(f"the base of backend {backend} comes from its vendor's registry only")
    if site_ca is not None and not site_ca.is_file():
        raise UsageError(f"--site-ca {site_ca}: no such file")
    client = engine.connect()
    if if_absent and client.images.list(tag):
        print(f"{tag} is here already")
        return ExitCode.OK
    command = ["bash", str(SCRIPT), tag, *([str(site_ca)] if site_ca else [])]
    docker = next(iter(engine.clients()), None)
    if docker is None:
        raise EnvironmentUnavailable("no docker client on PATH; install docker (docker.io on Debian)")
    env = {**os.environ, "DOCKER": docker, "DOCKER_HOST": engine.endpoint()}
    print(f"making {tag} by debootstrap (about a minute)")
    with Interrupts():
        done = process.run(command, env=env)
    if done.code:
        raise EnvironmentUnavailable(f"{tag} cannot be made: {explain(done.said)}")
    print(f"{tag}: {client.images.get(tag).id}")
    return ExitCode.OK
