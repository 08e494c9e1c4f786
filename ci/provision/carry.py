"""Images for machines that do not build them: pushed to a registry and pulled from it, or carried in one file.

A fleet builds once. What travels is each stack's image and the base it was built on, since the address of an image
follows from both; the machine that receives them finds its stacks built. The file also has the project as it was, so
that a site without a network needs nothing else: locks, jobs, and the program that runs them.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
from docker.errors import ImageNotFound

from ci.errors import EnvironmentUnavailable, UsageError
from ci.provision import engine, process

MANIFEST, IMAGES, PROJECT = "manifest.json", "images.tar", "project"
SCHEMA = 1
WORKED_FROM = ("matrix.yaml", "docker", "tests/jobs")
"""What of the project decides what a run does with an image: checked when a file is loaded."""


LEFT_BEHIND = frozenset({"results", "__pycache__", ".cache", ".git", ".nox", ".venv"})
"""Folders of a working copy that are not the project's."""


@dataclass(frozen=True)
class Built:
    """A stack's image on this machine. tag: REPOSITORY:STACK-KEY. id: sha256:... of its configuration."""

    stack: str
    tag: str
    id: str
    base: str

    def at(self, reference: str) -> str:
        """Its name in a registry."""
        return f"{reference}:{self.tag.rpartition(':')[2]}"


def base_at(reference: str, stack: str) -> str:
    """The name in a registry of the base of a stack's image."""
    return f"{reference}:{stack}-base"


def push(client: docker.DockerClient, images: Sequence[Built], reference: str) -> dict[str, str]:
    """Push each image and its base. reference: REGISTRY/REPOSITORY without a tag.

    Returns REGISTRY/REPOSITORY@sha256:... of each image, by stack: the registry's own digest.
    """
    _check(reference)
    digests = {}
    for image in images:
        for source, target in ((image.base, base_at(reference, image.stack)), (image.tag, image.at(reference))):
            with _named(client, source, target):
                _docker("push", target, what=f"{target} cannot be pushed")
                known: Sequence[str] = client.images.get(target).attrs.get("RepoDigests") or ()
                digests[image.stack] = next((name for name in known if name.startswith(f"{reference}@")), target)
    return digests


def pull_base(client: docker.DockerClient, stack: str, base: str, reference: str) -> None:
    """Fetch the base of a stack's image where this machine has none of that name."""
    _check(reference)
    with contextlib.suppress(ImageNotFound):
        client.images.get(base)
        return
    _pull(client, base_at(reference, stack), base)


def pull(client: docker.DockerClient, tag: str, reference: str) -> None:
    """Fetch the image of this tag."""
    _pull(client, f"{reference}:{tag.rpartition(':')[2]}", tag)


def save(images: Sequence[Built], root: Path, target: Path, commit: str | None) -> None:
    """Write one file: the images with their bases, and the project's files. It appears whole or not at all."""
    if target.is_dir():
        raise UsageError(f"--save {target}: is a folder; expected the name of a file")
    files = _tracked(root)
    manifest = {
        "schema": SCHEMA,
        "commit": commit,
        "stacks": {image.stack: {"tag": image.tag, "id": image.id, "base": image.base} for image in images},
        "worked_from": fingerprint({name: (root / name).read_bytes() for name in files}),
    }
    fresh = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(prefix="images-", dir=target.absolute().parent) as scratch:
            exported = Path(scratch, IMAGES)
            names = sorted({name for image in images for name in (image.tag, image.base)})
            _docker("save", "--output", str(exported), *names, what="the images cannot be saved")
            with tarfile.open(fresh, "w") as archive:
                _add(archive, MANIFEST, json.dumps(manifest, indent=1).encode())
                for name in files:
                    archive.add(root / name, arcname=f"{PROJECT}/{name}", recursive=False)
                archive.add(exported, arcname=IMAGES)
        fresh.replace(target)
    except OSError as error:
        raise process.cannot_write(target, error) from error
    finally:
        fresh.unlink(missing_ok=True)


def load(client: docker.DockerClient, root: Path, source: Path) -> tuple[Built, ...]:
    """Load the images of a file and make sure that they are what it says, and that this project is the file's."""
    try:
        with tarfile.open(source) as archive:
            manifest = _manifest(archive, source)
            member = archive.extractfile(IMAGES)
            with tempfile.TemporaryDirectory(prefix="images-", dir=source.absolute().parent) as scratch:
                exported = Path(scratch, IMAGES)
                with exported.open("wb") as stream:
                    while member is not None and (chunk := member.read(1 << 20)):
                        stream.write(chunk)
                _docker("load", "--input", str(exported), what=f"{source}: its images cannot be loaded")
    except (KeyError, tarfile.TarError) as error:
        raise UsageError(f"{source}: not a file of `images --save`: {error}") from error
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror or error}") from error
    built = tuple(Built(stack, entry["tag"], entry["id"], entry["base"]) for stack, entry in manifest["stacks"].items())
    for image in built:
        try:
            found = client.images.get(image.tag).id
        except ImageNotFound:
            found = None
        if found != image.id:
            raise EnvironmentUnavailable(f"{image.tag}: {found or 'not there'} after loading, {source} says {image.id}")
    here = {name: (root / name).read_bytes() for name in _tracked(root)}
    if fingerprint(here) != manifest["worked_from"]:
        raise UsageError(
            f"{source}: its images are loaded, but its locks or jobs (commit {manifest['commit'] or 'unknown'}) are "
            f"not those of this folder; work in those of the file: tar xf {source} {PROJECT} && cd {PROJECT}"
        )
    return built


def fingerprint(files: Mapping[str, bytes]) -> str:
    """A hash of the files that decide what a run does with an image."""
    digest_ = hashlib.sha256()
    for name in sorted(files):
        if name.startswith(tuple(f"{place}/" for place in WORKED_FROM)) or name in WORKED_FROM:
            digest_.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return digest_.hexdigest()


def _tracked(root: Path) -> list[str]:
    """The project's files: those that git knows, or in an unpacked file everything but what runs leave behind."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=False)
    names: Iterable[str] = done.stdout.decode().split("\0") if done.returncode == 0 else ()
    if not any(names):
        paths = (path.relative_to(root) for path in root.rglob("*"))
        names = [path.as_posix() for path in paths if not LEFT_BEHIND & set(path.parts[:-1])]
    return sorted(name for name in names if name and (root / name).is_file())


def _manifest(archive: tarfile.TarFile, source: Path) -> dict[str, Any]:
    member = archive.extractfile(MANIFEST)
    manifest = json.loads(member.read()) if member is not None else {}
    if manifest.get("schema") != SCHEMA:
        raise UsageError(f"{source}: schema {manifest.get('schema')!r}, expected {SCHEMA}: written by another release")
    return dict(manifest)


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def _check(reference: str) -> None:
    if ":" in reference.rpartition("/")[2] or "@" in reference or not reference.strip("/"):
        raise UsageError(
            f"found {reference!r}; expected REGISTRY/REPOSITORY without a tag: the stacks' keys are the tags"
        )


def _pull(client: docker.DockerClient, source: str, target: str) -> None:
    """Fetch `source` and keep it under the name `target` alone."""
    _docker("pull", source, what=f"{source} cannot be pulled (was it pushed from these locks and this base?)")
    client.images.get(source).tag(*target.rsplit(":", 1))
    client.images.remove(source)


@contextmanager
def _named(client: docker.DockerClient, source: str, target: str) -> Iterator[None]:
    """The image under a second name while the block runs."""
    client.images.get(source).tag(*target.rsplit(":", 1))
    try:
        yield
    finally:
        with contextlib.suppress(*engine.LOST):
            client.images.remove(target)


def _docker(*words: str, what: str) -> str:
    """Run the docker client, which has the user's log-in to a registry."""
    clients = engine.clients()
    if not clients:
        raise EnvironmentUnavailable(f"{what}: no docker client on PATH")
    done = process.run([clients[0], *words], env={**os.environ, "DOCKER_HOST": engine.endpoint()})
    if done.code:
        raise EnvironmentUnavailable(f"{what}: {(done.said.strip().splitlines() or ['it failed'])[-1]}")
    return done.output
