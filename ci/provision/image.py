"""The runtime with an engine: one image per stack, addressed by what goes into it, and containers that run its jobs.

The docker client builds (BuildKit: secrets and cache mounts), the Docker SDK looks up, imports, inspects and runs.
What a closed network needs goes in as secrets or predefined build arguments and stays out of every layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import stat
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import ImageNotFound, NotFound
from docker.models.images import Image

from ci.errors import EnvironmentUnavailable
from ci.provision import cache, carry, locks, process, replace
from ci.provision.build import LABEL, Order, build
from ci.provision.container import OWNER, Orders, RunningContainer, hand_over, new_name, plain_user, remove
from ci.provision.devices import Grant
from ci.provision.engine import LOST, answering
from ci.provision.engine import explain as engine_says
from ci.provision.owner import owner
from ci.provision.runtime import (
    COMMON_ENVIRONMENT,
    Environment,
    Override,
    Recipe,
    Running,
    RuntimeId,
    pytest_command,
)
from ci.provision.site import Site

#: Changed when an image made by an older version of this module must not be found again.
FORMAT = "image-1"
PACKAGES = "/opt/stack/packages.json"
CONFLICTS = "/opt/stack/conflicts.txt"
#: What of docker/ goes into an image besides its lock and Dockerfile.
INGREDIENTS = ("install-stack.sh", "replace-packages.sh", "record-packages.py", "locks/build-tools.txt")


@dataclass(frozen=True)
class Facts:
    """What is installed in an image, and what does not fit together there."""

    packages: Mapping[str, str]
    conflicts: tuple[str, ...]


class DockerRuntime:
    """Builds the stack's image, or finds it built, and starts pytest in containers of it."""

    def __init__(
        self,
        root: Path,
        client: docker.DockerClient,
        site: Site | None = None,
        say: Callable[[str], None] | None = None,
        grant: Grant | None = None,
    ) -> None:
        self._root = root
        self._client = client
        self._grant = grant
        self._site = site or Site.of()
        self._say = say or (lambda text: None)
        self._cache = root / ".cache" / "images"

    @property
    def id(self) -> RuntimeId:
        return "docker"

    def describe(self) -> str:
        with answering():
            version = self._client.version()
        return f"Docker engine {version.get('Version', '?')} on {version.get('Os', '?')}/{version.get('Arch', '?')}"

    def provision(self, recipe: Recipe, overrides: Sequence[Override] = ()) -> Environment:
        with answering():
            return self._provision(recipe, overrides)

    def pull(self, recipe: Recipe, reference: str) -> None:
        """Fetch the base and the image of a stack that another machine has pushed, where they are not here."""
        with answering():
            carry.pull_base(self._client, recipe.stack, recipe.base_image, reference)
            tag = self._tag(recipe, locks.read(recipe), self._base(recipe), ())
            if self._find(tag) is None:
                carry.pull(self._client, tag, reference)

    def _provision(self, recipe: Recipe, overrides: Sequence[Override]) -> Environment:
        started = time.monotonic()
        lock = locks.read(recipe)
        base = self._base(recipe)
        tag = self._tag(recipe, lock, base, overrides)
        image = self._find(tag)
        reused = image is not None
        if image is None:
            with cache.only_one(self._cache, tag.rpartition(":")[2], self._say):
                # Another run may have built it while this one waited.
                image = self._find(tag)
                reused = image is not None
                image = image or self._build(recipe, lock, tag, overrides)
        facts = self._facts(image, tag)
        return Environment(
            kind="docker",
            stack=recipe.stack,
            python="/opt/stack/bin/python",
            packages=facts.packages,
            image=tag,
            image_id=image.id,
            digests=tuple(image.attrs.get("RepoDigests") or ()),
            overrides=tuple(map(str, overrides)),
            reused=reused,
            seconds=time.monotonic() - started,
            notes=(*map(replace.describe, overrides), *facts.conflicts),
        )

    def path_inside(self, path: Path) -> str:
        # Two files of the same name may come from two folders.
        place = hashlib.sha256(str(path.resolve().parent).encode()).hexdigest()[:8]
        return f"/inputs/{place}/{path.name}"

    def start(
        self,
        environment: Environment,
        order_file: Path,
        results_dir: Path,
        workers: int = 1,
        extra_env: Mapping[str, str] | None = None,
        inputs: Sequence[Path] = (),
    ) -> Running:
        hand_over(results_dir)
        _must_be_readable([self._root / "tests", *inputs])
        orders = orders_for(
            self._root,
            environment.image_id or environment.image or "",
            (environment.image or "").rpartition("-")[2],
            pytest_command(environment.python, "/project/order.json", "/results", workers),
            order_file,
            results_dir,
            environment={**COMMON_ENVIRONMENT, **(extra_env or {})},
            inputs=[(path, self.path_inside(path)) for path in inputs],
        )
        if self._grant is not None:
            with answering():
                info = self._client.info() if self._grant.backend.devices is not None else {}
            orders = granted(orders, self._grant, info)
            _must_exist(orders.handover.mounts)
        return RunningContainer(self._client, orders)

    def _find(self, reference: str) -> Image | None:
        try:
            return self._client.images.get(reference)
        except ImageNotFound:
            return None
        except LOST as error:
            raise EnvironmentUnavailable(f"the Docker engine does not answer: {engine_says(error)}") from error

    def _base(self, recipe: Recipe) -> Image:
        """The base image: here already, else pulled."""
        if found := self._find(recipe.base_image):
            return found
        self._say(f"pulling {recipe.base_image}")
        try:
            return self._client.images.pull(recipe.base_image)
        except LOST as error:
            raise EnvironmentUnavailable(
                f"the base image {recipe.base_image} is neither here nor can it be pulled ({engine_says(error)}); "
                "nox -s base-image makes that of Debian without a registry; another can be pulled elsewhere and "
                "brought here under this name by docker save and docker load; --runtime venv needs none"
            ) from error

    def _tag(self, recipe: Recipe, lock: str, base: Image, overrides: Sequence[Override]) -> str:
        context = recipe.dockerfile.parent
        ingredients = [recipe.dockerfile.read_bytes(), *((context / name).read_bytes() for name in INGREDIENTS)]
        key = cache.key(FORMAT, recipe.python, base.id or "", lock, *ingredients, *map(replace.fingerprint, overrides))
        return f"{LABEL}/{recipe.backend}:{recipe.stack}-{key}"

    def _build(self, recipe: Recipe, lock: str, tag: str, overrides: Sequence[Override]) -> Image:
        log = self._cache / f"{tag.rpartition(':')[2]}.log"
        self._say(f"building the image of {recipe.stack} (once; 2 to 5 minutes), log: {log}")
        return build(self._client, self._site, Order(recipe, lock, tag, tuple(overrides), log))

    def _facts(self, image: Image, tag: str) -> Facts:
        """What is installed in an image, read out of it once."""
        known = self._cache / f"{tag.rpartition(':')[2]}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = json.loads(known.read_text())
            if found["image"] == image.id:
                return Facts(found["packages"], tuple(found["conflicts"]))
        try:
            text = read_out(self._client, image, (PACKAGES, CONFLICTS))
            facts = Facts(json.loads(text[PACKAGES])["packages"], tuple(text.get(CONFLICTS, "").splitlines()))
        except (*LOST, KeyError, ValueError) as error:
            raise EnvironmentUnavailable(f"image {tag} cannot be looked into: {engine_says(error)}") from error
        fresh = known.with_suffix(f".{os.getpid()}")
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            fresh.write_text(json.dumps({"image": image.id, "packages": facts.packages, "conflicts": facts.conflicts}))
            os.replace(fresh, known)
        except OSError as error:
            raise process.cannot_write(known, error) from error
        return facts


def orders_for(
    root: Path,
    image: str,
    key: str,
    command: Sequence[str],
    order_file: Path,
    results_dir: Path,
    *,
    environment: Mapping[str, str],
    inputs: Sequence[tuple[Path, str]] = (),
) -> Orders:
    """What a container of a stack's image runs and sees. key: what the name of its volume for bytecode ends in."""
    shown = [(root / "tests", "/project/tests"), (order_file, "/project/order.json")]
    corrections = root / "ci" / "corrections"
    if corrections.is_dir():
        shown.append((corrections, "/project/ci/corrections"))
    return Orders(
        image=image,
        command=command,
        shown=[*shown, *inputs],
        written=(results_dir, "/results"),
        # One per image and user: nobody runs bytecode that another user wrote.
        volume=(f"{LABEL}-bytecode-{key}-{plain_user()[0]}", "/pycache"),
        log_path=results_dir / "pytest.log",
        environment=environment,
    )


def granted(orders: Orders, grant: Grant, info: Mapping[str, Any]) -> Orders:
    """The same orders with what the backend needs and the devices of this run. info: `docker info`."""
    return dataclasses.replace(orders, needs=grant.backend.container, handover=grant.handover(info))


def _must_exist(mounts: Iterable[str]) -> None:
    """A bind of a folder that is not there is refused by the engine, in words that do not say whose it is."""
    if absent := [place for place in mounts if not Path(place).exists()]:
        raise EnvironmentUnavailable(
            f"{', '.join(absent)} of the device's driver: not on this host; install the driver, or the vendor's OCI "
            "runtime for containers, or use --runtime host"
        )


def read_out(client: docker.DockerClient, image: Image, files: Sequence[str]) -> dict[str, str]:
    """The text of those files of an image that are there; a container is made for it and never started."""
    name = new_name()
    try:
        client.containers.create(image.id or "", name=name, labels={OWNER: owner()}, network_mode="none")
        return {path: text for path in files if (text := _text(client, name, path)) is not None}
    finally:
        remove(client, name)


def _text(client: docker.DockerClient, container: str, path: str) -> str | None:
    try:
        stream, _ = client.api.get_archive(container, path)
    except NotFound:
        return None
    with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
        member = archive.extractfile(archive.getmembers()[0])
        return member.read().decode() if member else None


def _must_be_readable(paths: Iterable[Path]) -> None:
    """The plain user inside is not root: what root keeps to itself would be a riddle there."""
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise EnvironmentUnavailable(f"{path} cannot be shown to a container: {error.strerror}") from error
        needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
        if os.getuid() == 0 and mode & needed != needed:
            raise EnvironmentUnavailable(
                f"{path} can be read by root only, and a container never runs as root; chmod -R o+rX {path}"
            )
