"""A fleet builds once: images go through a registry, or in one file to where no network is."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from ci.errors import EnvironmentUnavailable, UsageError
from ci.provision import carry
from ci.provision.carry import Built
from ci.provision.image import DockerRuntime
from tests.container.conftest import Small, forget, small_project

CONFIG = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "{address}"}}
"""


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Debian's docker-registry on a free port of the loopback device, which an engine talks to without TLS."""
    program = shutil.which("docker-registry")
    assert program is not None, "install docker-registry (Debian has it; .ci/steps/10-packages.sh does so)"
    folder = tmp_path_factory.mktemp("registry")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "config.yml").write_text(CONFIG.format(folder=folder / "data", address=address))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        host, port = address.split(":")
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    break
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        process.wait(10)


@pytest.fixture
def own(tmp_path: Path, client: docker.DockerClient) -> Iterator[Small]:
    """A project whose image no other test needs, in a repository of git: what is carried is what git knows."""
    tmp_path.parent.chmod(0o755)
    tmp_path.chmod(0o755)
    project = small_project(tmp_path, client)
    (tmp_path / "matrix.yaml").write_text("schema: 1\n")
    (tmp_path / ".gitignore").write_text(".cache/\nresults/\n*.tar\n")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    yield project
    forget(client, project)


def built(project: Small) -> Built:
    made = project.environment
    return Built(project.recipe.stack, made.image or "", made.image_id or "", project.recipe.base_image)


def test_what_one_machine_pushes_another_pulls(own: Small, client: docker.DockerClient, registry: str) -> None:
    image, reference = built(own), f"{registry}/zero/{own.root.name.lower()}"
    digests = carry.push(client, [image], reference)
    assert digests["small"].startswith(f"{reference}@sha256:")
    assert [tag for tag in client.images.get(image.tag).tags if registry in tag] == []
    client.images.remove(image.tag, force=True)
    elsewhere = DockerRuntime(own.root, client)
    elsewhere.pull(own.recipe, reference)
    found = elsewhere.provision(own.recipe)
    assert found.reused and (found.image, found.image_id) == (image.tag, image.id)
    elsewhere.pull(own.recipe, reference)  # it is here: nothing to fetch
    other = own.recipe.lock
    assert other is not None
    other.write_text(other.read_text() + "# another\n")
    with pytest.raises(EnvironmentUnavailable, match=r"cannot be pulled \(was it pushed from these locks"):
        elsewhere.pull(own.recipe, reference)


def test_a_base_that_is_not_here_comes_from_the_registry(
    own: Small, client: docker.DockerClient, registry: str
) -> None:
    image, reference = built(own), f"{registry}/zero/base-{own.root.name.lower()}"
    carry.push(client, [image], reference)
    name = f"zero-regression-matrix/base-of-a-test:{own.root.name.lower()}"
    try:
        carry.pull_base(client, "small", name, reference)
        assert client.images.get(name).id == client.images.get(own.recipe.base_image).id
    finally:
        client.images.remove(name)


def test_a_registry_that_is_not_there_says_so(own: Small, client: docker.DockerClient) -> None:
    with pytest.raises(EnvironmentUnavailable, match=r"127\.0\.0\.1:9/zero:small-base cannot be pushed"):
        carry.push(client, [built(own)], "127.0.0.1:9/zero")
    with pytest.raises(UsageError, match="expected REGISTRY/REPOSITORY without a tag"):
        carry.push(client, [], "127.0.0.1:9/zero:latest")


def test_one_file_has_image_locks_and_jobs_and_runs_where_nothing_else_is(
    own: Small, client: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    image, file = built(own), own.root / "carried.tar"
    carry.save([image], own.root, file, "a commit")
    client.images.remove(image.tag, force=True)
    site = tmp_path_factory.mktemp("site")
    site.chmod(0o755)
    with tarfile.open(file) as archive:
        names = archive.getnames()
        assert {"manifest.json", "images.tar", "project/docker/locks/small.txt", "project/tests/jobs/test_jobs.py"} <= {
            *names
        }
        archive.extractall(site, [m for m in archive if m.name.startswith("project/")], filter="data")
    project = site / "project"
    (loaded,) = carry.load(client, project, file)
    assert loaded == image
    docker_ = project / "docker"
    recipe = dataclasses.replace(
        own.recipe, lock=docker_ / "locks" / "small.txt", dockerfile=docker_ / "cpu.Dockerfile"
    )
    there = Small(project, recipe, DockerRuntime(project, client), client)
    assert there.environment.reused and there.environment.image_id == image.id
    running, results = there.start("look")
    try:
        assert running.wait(60) == 0, running.log_path.read_text()
    finally:
        running.terminate()
    assert json.loads((results / "seen.json").read_text())["interfaces"] == ["lo"]


def test_a_file_of_other_locks_or_jobs_is_refused_with_the_way_out(own: Small, client: docker.DockerClient) -> None:
    file = own.root / "carried.tar"
    carry.save([built(own)], own.root, file, "a commit")
    job = own.root / "tests" / "jobs" / "test_jobs.py"
    job.write_text(job.read_text() + "# edited\n")
    with pytest.raises(UsageError, match=r"locks or jobs \(commit a commit\) are not those.*tar xf"):
        carry.load(client, own.root, file)


def test_what_is_no_such_file_is_refused(own: Small, client: docker.DockerClient, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        carry.load(client, own.root, tmp_path / "absent.tar")
    (tmp_path / "text.tar").write_text("text")
    with pytest.raises(UsageError, match="not a file of `images --save`"):
        carry.load(client, own.root, tmp_path / "text.tar")
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    with pytest.raises(UsageError, match="not a file of `images --save`"):
        carry.load(client, own.root, tmp_path / "empty.tar")
