"""A container that runs pytest: without network, read-only, without capabilities, as a plain user, with an init.

And one that never stays: it has a name before it exists, so an interrupt at any moment can remove it, and a label that
tells the next run when its owner was killed before it could.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import docker
from docker.errors import APIError, NotFound
from docker.models.containers import Container
from docker.types import DeviceRequest, Mount, Ulimit

from ci.entries import Container as Needs
from ci.errors import EnvironmentUnavailable
from ci.provision.build import LABEL
from ci.provision.devices import Handover
from ci.provision.engine import ANSWER_S, LOST, answering, explain
from ci.provision.owner import is_orphan, owner
from ci.provision.process import GRACE_S

OWNER = f"{LABEL}.owner"
#: Used where the caller is root: a job never runs as root.
PLAIN_USER = 4242
LOOK_S = 0.1
KILLED = 137


@dataclass(frozen=True)
class Orders:
    """What a container is to run and what it may see."""

    image: str
    command: Sequence[str]
    #: (file or folder on the host, place inside), read-only.
    shown: Sequence[tuple[Path, str]]
    #: (folder on the host, place inside), writable.
    written: tuple[Path, str]
    #: (named volume, place inside): the bytecode cache of a read-only image.
    volume: tuple[str, str]
    log_path: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    needs: Needs = field(default_factory=Needs)
    handover: Handover = field(default_factory=Handover)

    @property
    def whole_environment(self) -> dict[str, str]:
        """The environment inside."""
        # The uid need not have a name inside, and torch 2.10 for CUDA asks for one as it is imported.
        return {"HOME": "/tmp", "USER": "jobs", **self.environment, **self.handover.environment}


def device_requests(handover: Handover) -> list[DeviceRequest]:
    """`--gpus` and CDI devices as the engine's interface has them."""
    requests = []
    if handover.gpus:
        requests.append(DeviceRequest(device_ids=list(handover.gpus), capabilities=[["gpu"]]))
    if handover.cdi:
        requests.append(DeviceRequest(driver="cdi", device_ids=list(handover.cdi)))
    return requests


def plain_user() -> tuple[int, int]:
    """uid and gid of the process inside: the caller's, so that results are theirs, but never root's."""
    uid, gid = os.getuid(), os.getgid()
    return (uid, gid) if uid else (PLAIN_USER, PLAIN_USER)


def hand_over(folder: Path) -> None:
    """Let the plain user write into a results folder that root has made."""
    if os.getuid():
        return
    for path in [folder, *folder.rglob("*")]:
        if not path.is_symlink():
            os.chown(path, PLAIN_USER, PLAIN_USER)


def new_name() -> str:
    """The name of a container that does not exist yet: known before the engine is asked, so that it can be removed."""
    return f"{LABEL}-{uuid.uuid4().hex[:12]}"


def sweep(client: docker.DockerClient) -> int:
    """Remove the containers whose owner was killed before it could; how many there were."""
    removed = 0
    for found in client.containers.list(all=True, filters={"label": OWNER}, ignore_removed=True):
        if is_orphan(found.labels.get(OWNER, "")):
            removed += remove(client, found.id or "")
    return removed


def remove(client: docker.DockerClient, name: str) -> bool:
    """Kill and remove a container; False where there is none."""
    try:
        client.api.remove_container(name, force=True, v=True)
    except NotFound:
        return False
    except APIError as error:
        if error.status_code != 409:  # 409: its removal is under way already
            raise
    return True


class RunningContainer:
    """`runtime.Running` for a container."""

    def __init__(self, client: docker.DockerClient, orders: Orders) -> None:
        self._client = client
        self._log_path = orders.log_path
        self._name = new_name()
        self._code: int | None = None
        self._lost = False
        self._log: threading.Thread | None = None
        try:
            sweep(client)
            self._container = self._create(orders)
            self._container.start()
            self._log = threading.Thread(target=self._follow, name=f"log of {self._name}", daemon=True)
            self._log.start()
        except BaseException as error:  # an interrupt too: a container that was created or started must not stay
            with contextlib.suppress(*LOST):
                remove(client, self._name)
            if isinstance(error, (*LOST, OSError)):
                raise EnvironmentUnavailable(f"the container cannot be started: {explain(error)}") from error
            raise

    def _create(self, orders: Orders) -> Container:
        uid, gid = plain_user()
        mounts = [Mount(inside, str(path.resolve()), type="bind", read_only=True) for path, inside in orders.shown]
        folder, inside = orders.written
        mounts.append(Mount(inside, str(folder.resolve()), type="bind"))
        given = orders.handover
        mounts += [Mount(place, place, type="bind", read_only=True) for place in given.mounts]
        mounts.append(Mount(orders.volume[1], orders.volume[0], type="volume", labels={LABEL: "bytecode"}))
        return self._client.containers.create(
            orders.image,
            list(orders.command),
            name=self._name,
            labels={OWNER: owner()},
            user=f"{uid}:{gid}",
            environment=orders.whole_environment,
            mounts=mounts,
            network_mode="none",
            read_only=True,
            tmpfs={"/tmp": ""},
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            init=True,
            # Ranks share tensors through /dev/shm; the engine's 64 MB end in a bus error.
            shm_size=orders.needs.shm_size,
            ipc_mode=orders.needs.ipc,
            ulimits=[Ulimit(name=name, soft=value, hard=value) for name, value in orders.needs.ulimits.items()],
            runtime=given.runtime,
            device_requests=device_requests(given),
            devices=[f"{path}:{path}:rwm" for path in given.files],
            group_add=[str(group) for group in given.groups],
        )

    @property
    def log_path(self) -> Path:
        return self._log_path

    @property
    def name(self) -> str:
        """The container's name, for a person with a docker client."""
        return self._name

    def _follow(self) -> None:
        """Copy the container's output to the log until it ends."""
        # A lost engine ends the log early and shows in poll(); a full disk shows in the evidence.
        with contextlib.suppress(*LOST, OSError), self._log_path.open("wb", buffering=0) as log:
            for chunk in self._container.logs(stream=True, follow=True):
                log.write(chunk)

    def poll(self) -> int | None:
        if self._code is None:
            try:
                with answering():
                    self._container.reload()
            except EnvironmentUnavailable as error:
                if isinstance(error.__cause__, NotFound):
                    self._code = KILLED
                    return self._code
                self._lost = True
                raise
            if self._container.status in ("exited", "dead"):
                if self._log is not None:
                    self._log.join(GRACE_S)
                self._code = int(self._container.attrs["State"]["ExitCode"])
        return self._code

    def wait(self, timeout: float | None = None) -> int | None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() >= deadline:
                return None
            time.sleep(LOOK_S)
        return code

    def terminate(self) -> None:
        try:
            with contextlib.suppress(*LOST, EnvironmentUnavailable):
                if not self._lost and self.poll() is None:
                    self._container.kill("SIGINT")
                    self.wait(GRACE_S)
        finally:
            if self._lost:
                # Who did not answer within a minute is asked once more, briefly; the next run removes what stays.
                self._client.api.timeout = ANSWER_S
            _quietly(lambda: remove(self._client, self._name), attempts=1 if self._lost else 3)
            if self._log is not None:
                self._log.join(GRACE_S)


def _quietly(action: Callable[[], object], attempts: int) -> None:
    """Try a removal a few times: an engine that is busy answers late."""
    for attempt in range(attempts):
        try:
            action()
        except LOST:
            time.sleep(attempt + 1)
        else:
            return
