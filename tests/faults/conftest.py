"""Faults on real processes and, where an engine is part of it, a real engine of the test's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import docker
import pytest

from ci.errors import EnvironmentUnavailable
from ci.provision import engine, locks
from ci.provision.build import LABEL
from ci.provision.engine import LOST
from ci.provision.image import DockerRuntime
from ci.provision.runtime import Recipe
from tests.container.conftest import SMALL
from tests.faults.project import ROOT, Project, lay_out


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """Cells run in the interpreter of these tests."""
    root = tmp_path_factory.mktemp("faults")
    lay_out(root)
    return Project(root, ("--runtime", "host", "--python", sys.executable))


def cannot(reason: str) -> None:
    """In CI, where we are root, a green run must have tested this."""
    if os.environ.get("CI") and os.getuid() == 0:
        pytest.fail(reason)
    pytest.skip(reason)


def comm(pid: int) -> str:
    """The short name of a process; '' where it is gone or nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() if Path(f"/proc/{pid}/exe").readlink() else ""
    except OSError:
        return ""


@dataclass
class OwnEngine:
    """A second dockerd, which may be stopped, frozen and started again without harm to anybody."""

    folder: Path
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = None
    clients: list[docker.DockerClient] = field(default_factory=list)

    @property
    def host(self) -> str:
        return f"unix://{self.folder / 'docker.sock'}"

    def kill(self) -> None:
        """As the kernel does; its containers go on, its containerd does not, or the next start waits for that one."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 30
        while servers := [pid for pid in self.left() if comm(pid) == "containerd"]:
            assert time.monotonic() < deadline, "its containerd does not end"
            for pid in servers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        # Where nobody waits for orphans it stays a zombie, which the next dockerd would take for a living one.
        (self.folder / "exec" / "containerd" / "containerd.pid").unlink(missing_ok=True)

    def start(self, timeout: float = 60.0) -> docker.DockerClient:
        """Start it and wait for its answer."""
        # In a network of its own: a dockerd without a bridge removes docker0, which is the usual engine's.
        command = ["unshare", "--net", "dockerd", "--host", self.host]
        command += ["--bridge", "none", "--iptables=false", "--ip-masq=false"]
        command += ["--data-root", str(self.folder / "data"), "--exec-root", str(self.folder / "exec")]
        command += ["--pidfile", str(self.folder / "pid"), *self.options]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(*LOST):
                client = docker.DockerClient(base_url=self.host, version="auto", timeout=60)
                self.clients.append(client)
                return client
            time.sleep(0.1)
        self.stop()
        raise EnvironmentUnavailable(f"the second engine does not start: {(self.folder / 'log').read_text()[-2000:]}")

    def stop(self) -> None:
        """As a service is stopped: it ends its containers, itself, and the containerd that it started."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def unmount(self) -> None:
        """What an engine that was killed left mounted: the file systems and networks of its containers."""
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in reversed([mount for mount in mounts if mount.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", "--lazy", mount], check=True)

    def end(self) -> None:
        """For good, and fast: by now nothing runs in it."""
        if self.process is not None and self.process.poll() is None:
            self.kill()
        for pid in self.left():  # its containerd, which would take its time
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.unmount()

    def left(self) -> list[int]:
        """Processes of this engine, known by its folder in their command lines."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if f"{self.folder}/" in line:
                    found.append(int(entry.parent.name))
        return found

    def containers(self) -> list[str]:
        """Containers of this project, running or not."""
        found = self.clients[-1].containers.list(all=True, filters={"name": LABEL}, ignore_removed=True)
        return [container.name or "" for container in found]

    def volumes(self) -> list[str]:
        """Volumes that are no bytecode cache of an image."""
        found = self.clients[-1].volumes.list()
        return [volume.name for volume in found if (volume.attrs["Labels"] or {}).get(LABEL) != "bytecode"]


@pytest.fixture(scope="session")
def own_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnEngine]:
    """An engine with a socket and data root of its own."""
    if os.getuid() or shutil.which("dockerd") is None or shutil.which("unshare") is None:
        cannot("only root, with dockerd, can start a second engine")
    # The address of a socket has room for about a hundred characters.
    folder = Path(tempfile.mkdtemp(prefix="e-"))
    own = OwnEngine(folder)
    bridged = Path("/sys/class/net/docker0").exists()
    try:
        try:
            own.start()
        except EnvironmentUnavailable:
            # What dockerd takes by itself does not work on every file system.
            own.options = ("--storage-driver", "vfs")
            own.start()
        yield own
    finally:
        own.end()
        for client in own.clients:
            client.close()
        shutil.rmtree(folder, ignore_errors=True)
        assert own.left() == [] and not folder.exists()
        assert Path("/sys/class/net/docker0").exists() == bridged, "the usual engine was harmed"


@pytest.fixture(scope="session")
def small_image(
    tmp_path_factory: pytest.TempPathFactory, own_engine: OwnEngine
) -> Iterator[tuple[Path, Recipe, DockerRuntime]]:
    """A project whose stack is built by the usual engine, which has a network, and brought to the test's own."""
    try:
        usual = engine.connect()
        if engine.find_builder() is None:
            raise EnvironmentUnavailable(engine.NO_BUILDER)
    except EnvironmentUnavailable as error:
        cannot(f"an image needs an engine that builds: {error.message}")
    root = tmp_path_factory.mktemp("contained")
    root.parent.chmod(0o755)
    root.chmod(0o755)
    entries = locks.blocks((ROOT / "docker" / "locks" / "newest.txt").read_text())
    text = "".join(entries[name] for name in sorted(SMALL))
    pytest_version = locks.pins(text)["pytest"]
    lay_out(root, "small", pytest_version)
    lock = root / "docker" / "locks" / "small.txt"
    lock.write_text(text)
    recipe = Recipe(
        stack="small",
        backend="cpu",
        python="3.11",
        lock=lock,
        pins={"pytest": pytest_version},
        dockerfile=root / "docker" / "cpu.Dockerfile",
        base_image="debian:bookworm-slim",
    )
    runtime = DockerRuntime(root, usual)
    image = runtime.provision(recipe).image or ""
    saved = own_engine.folder / "images.tar"
    client = engine.find_builder()
    assert client is not None
    subprocess.run([client.client, "save", "--output", str(saved), image, recipe.base_image], check=True)
    load = [client.client, "--host", own_engine.host, "load", "--quiet", "--input", str(saved)]
    subprocess.run(load, check=True, stdout=subprocess.DEVNULL)
    saved.unlink()
    yield root, recipe, runtime
    with contextlib.suppress(*LOST):
        usual.images.remove(image)


@pytest.fixture
def contained(small_image: tuple[Path, Recipe, DockerRuntime], own_engine: OwnEngine) -> Iterator[Project]:
    """Cells run in containers of the test's own engine, none of which is left."""
    root, _, _ = small_image
    if own_engine.process is None or own_engine.process.poll() is not None:
        own_engine.start()  # the test before stopped it and failed
    yield Project(root, ("--runtime", "docker"), {"DOCKER_HOST": own_engine.host})
    assert own_engine.containers() == []
    assert own_engine.volumes() == []
