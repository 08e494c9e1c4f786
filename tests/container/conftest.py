"""A real engine, and a stack small enough to be built in seconds: pytest and what every stack has, without torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import NotFound

from ci.errors import EnvironmentUnavailable
from ci.provision import engine, locks
from ci.provision.build import LABEL
from ci.provision.image import INGREDIENTS, DockerRuntime
from ci.provision.runtime import Environment, Recipe, Running
from ci.provision.site import Site

ROOT = Path(__file__).resolve().parents[2]
SMALL = (*locks.BESIDES, "execnet", "iniconfig", "packaging", "pluggy", "pygments")


@pytest.fixture(scope="session")
def client() -> docker.DockerClient:
    """The engine of this host. In CI its absence is a failure: a green run must have tested containers."""
    try:
        found = engine.connect()
        if engine.find_builder() is None:
            raise EnvironmentUnavailable(engine.NO_BUILDER)
    except EnvironmentUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(f"container tests need an engine in CI: {error.message}")
        pytest.skip(error.message)
    return found


#: What runs inside: the word in the order file says which of the small jobs.
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--order")
    parser.addoption("--results")
"""
JOB = """
import json, os, pathlib, shutil, subprocess, sys, time

def test_job(pytestconfig):
    results = pathlib.Path(pytestconfig.getoption("--results"))
    order = json.loads(pathlib.Path(pytestconfig.getoption("--order")).read_text())
    print("a line of the job", flush=True)
    globals()[order["do"]](results, order)

def look(results, order):
    status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
    def writable(path):
        try:
            (pathlib.Path(path) / "probe").write_text("")
        except OSError as error:
            return error.strerror
        return True
    json.dump({
        "uid": os.getuid(), "gid": os.getgid(), "cwd": os.getcwd(),
        "capabilities": status["CapEff"].strip(), "no_new_privileges": status["NoNewPrivs"].strip(),
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "init": open("/proc/1/comm").read().strip(),
        "writable": {
            path: writable(path) for path in ["/", "/project", "/project/tests", "/tmp", "/results", "/opt/stack"]
        },
        "tools": [tool for tool in "cc gcc g++ c++ clang ld as make pip uv".split() if shutil.which(tool)],
        "environment": dict(os.environ),
        "inputs": {path: pathlib.Path(path).read_text() for path in order.get("inputs", [])},
        "corrections": os.path.isfile("/project/ci/corrections/one.py"),
        "shared_memory": os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize,
        "bytecode": os.path.dirname(json.__cached__),
    }, open(results / "seen.json", "w"))

def sleep(results, order):
    if os.fork() == 0:
        os.setsid()
        time.sleep(600)
    (results / "started").write_text("")
    time.sleep(600)

def die(results, order):
    os.kill(os.getpid(), 9)

def fail(results, order):
    assert False, "as ordered"
"""


@dataclasses.dataclass
class Small:
    """A project of its own with a small stack: its recipe, its runtime and a way to run a job."""

    root: Path
    recipe: Recipe
    runtime: DockerRuntime
    client: docker.DockerClient

    def start(self, do: str, **options: Any) -> tuple[Running, Path]:
        """Start one of the small jobs; the caller terminates it."""
        results = self.root / "results" / uuid.uuid4().hex[:8]
        results.mkdir(parents=True)
        order = results / "order.json"
        inputs = options.get("inputs", ())
        order.write_text(json.dumps({"do": do, "inputs": [self.runtime.path_inside(path) for path in inputs]}))
        return self.runtime.start(self.environment, order, results, **options), results

    @property
    def environment(self) -> Environment:
        """The stack's image, made at the first use."""
        return self.runtime.provision(self.recipe)

    def containers(self) -> list[str]:
        """Every container of this project, running or not."""
        found = self.client.containers.list(all=True, filters={"name": LABEL}, ignore_removed=True)
        return [container.name or "" for container in found]


def small_project(root: Path, client: docker.DockerClient, site: Site | None = None) -> Small:
    """A project with docker/ as shipped, a lock of a few packages, and a recipe nobody has built before."""
    context = root / "docker"
    for name in (*INGREDIENTS, ".dockerignore"):
        (context / name).parent.mkdir(parents=True, exist_ok=True)
        (context / name).write_bytes((ROOT / "docker" / name).read_bytes())
    for script in context.glob("*.sh"):
        script.chmod(0o755)
    dockerfile = context / "cpu.Dockerfile"
    # A comment at the end: another address for the image, the same layers for BuildKit.
    dockerfile.write_text((ROOT / "docker" / "cpu.Dockerfile").read_text() + f"# {uuid.uuid4()}\n")
    entries = locks.blocks((ROOT / "docker" / "locks" / "newest.txt").read_text())
    lock = context / "locks" / "small.txt"
    lock.write_text("".join(entries[name] for name in sorted(SMALL)))
    jobs = root / "tests" / "jobs"
    jobs.mkdir(parents=True)
    (jobs / "conftest.py").write_text(CONFTEST)
    (jobs / "test_jobs.py").write_text(JOB)
    corrections = root / "ci" / "corrections"
    corrections.mkdir(parents=True)
    (corrections / "one.py").write_text("")
    recipe = Recipe(
        stack="small",
        backend="cpu",
        python="3.11",
        lock=lock,
        pins={"pytest": locks.pins(lock.read_text())["pytest"]},
        dockerfile=dockerfile,
        base_image="debian:bookworm-slim",
    )
    return Small(root, recipe, DockerRuntime(root, client, site), client)


def forget(client: docker.DockerClient, small: Small) -> None:
    """Remove the images and volumes that a small project made; BuildKit keeps the layers."""
    marks = [path.stem for path in (small.root / ".cache" / "images").glob("*.json")]
    for mark in marks:
        with contextlib.suppress(NotFound):
            client.images.remove(f"{LABEL}/cpu:{mark}", force=True)
        for volume in client.volumes.list(filters={"name": mark.rpartition("-")[2]}):
            volume.remove()


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, client: docker.DockerClient) -> Iterator[Small]:
    """The small project that most tests share."""
    root = tmp_path_factory.mktemp("small")
    root.parent.chmod(0o755)
    root.chmod(0o755)
    project = small_project(root, client)
    yield project
    forget(client, project)
