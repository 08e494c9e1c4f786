"""The Dockerfiles of CUDA and Ascend, all of them but the stack's wheels: a small lock in place of theirs.

Ascend's has a stand-in for its base: Debian's Python behind an entrypoint that sets what CANN's set_env.sh does. What
only the real base and a device can show is not shown here (docs/backends.md).
"""

from __future__ import annotations

import dataclasses
import io
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from ci.errors import EnvironmentUnavailable
from ci.provision.build import LABEL
from ci.provision.image import DockerRuntime
from tests.container.conftest import ROOT, Small, small_project

STAND_IN = """\
FROM debian:bookworm-slim
RUN apt-get update && apt-get install --yes --no-install-recommends ca-certificates {packages} \\
    && rm -rf /var/lib/apt/lists/*
RUN printf '#!/bin/sh\\nexport ASCEND_HOME_PATH=/usr/local/Ascend/cann\\nexec "$@"\\n' >/entrypoint.sh \\
    && chmod 755 /entrypoint.sh
ENTRYPOINT ["/entrypoint.sh"]
"""


def stand_in(client: docker.DockerClient, packages: str) -> str:
    """An image to build on, in place of one of CANN; its layers are kept, its name is the caller's to remove."""
    tag = f"{LABEL}/stand-in:{uuid.uuid4().hex[:8]}"
    client.images.build(fileobj=io.BytesIO(STAND_IN.format(packages=packages).encode()), tag=tag, rm=True)
    return tag


def project(root: Path, client: docker.DockerClient, backend: str, base: str) -> Small:
    """The small project with the Dockerfile of this backend."""
    root.parent.chmod(0o755)
    root.chmod(0o755)
    small = small_project(root, client)
    dockerfile = root / "docker" / f"{backend}.Dockerfile"
    dockerfile.write_text((ROOT / "docker" / dockerfile.name).read_text() + f"# {uuid.uuid4()}\n")
    recipe = dataclasses.replace(small.recipe, backend=backend, dockerfile=dockerfile, base_image=base)
    return Small(root, recipe, DockerRuntime(root, client), client)


@pytest.fixture
def made(tmp_path: Path, client: docker.DockerClient) -> Iterator[list[str]]:
    """Names of images and volumes to remove after the test."""
    names: list[str] = []
    yield names
    for name in names:
        client.images.remove(name, force=True)
        for volume in client.volumes.list(filters={"name": f"bytecode-{name.rpartition('-')[2]}"}):
            volume.remove()


def seen_inside(small: Small) -> dict[str, Any]:
    running, results = small.start("look")
    try:
        assert running.wait(60) == 0, running.log_path.read_text()
    finally:
        running.terminate()
    seen: dict[str, Any] = json.loads((results / "seen.json").read_text())
    return seen


def test_the_image_of_cuda(tmp_path: Path, client: docker.DockerClient, made: list[str]) -> None:
    small = project(tmp_path, client, "cuda", "debian:bookworm-slim")
    made.append(small.environment.image or "")
    seen = seen_inside(small)
    assert seen["environment"]["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    # torch asks for the name of its user as it is imported; the uid has none inside.
    assert seen["environment"]["USER"] and seen["tools"] == []


def test_the_image_of_ascend_keeps_the_entrypoint_of_its_base(
    tmp_path: Path, client: docker.DockerClient, made: list[str]
) -> None:
    base = stand_in(client, "python3.11 python3.11-venv")
    made.append(base)
    small = project(tmp_path, client, "npu", base)
    made.insert(0, small.environment.image or "")
    assert seen_inside(small)["environment"]["ASCEND_HOME_PATH"] == "/usr/local/Ascend/cann"


def test_a_base_without_the_stacks_python_is_refused_in_words(
    tmp_path: Path, client: docker.DockerClient, made: list[str]
) -> None:
    base = stand_in(client, "")
    made.append(base)
    with pytest.raises(EnvironmentUnavailable, match=r"the base image has no python3\.11; take the CANN image"):
        project(tmp_path, client, "npu", base).environment  # noqa: B018  # reason: the property builds
