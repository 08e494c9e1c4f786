"""One image build: the docker client with BuildKit, and how a closed network's settings reach it without staying.

Certificates and index settings are secrets, proxies are Docker's predefined build arguments: neither ends in a layer
or in the image's history. Local wheels and `--with` files are offered as images that hold nothing but files, which
every builder can read from, and which are gone after the build.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.models.images import Image

from ci.errors import EnvironmentUnavailable
from ci.provision import engine, locks, process, replace
from ci.provision.runtime import Override, Recipe
from ci.provision.site import Site, explain

#: The project's name: of its images, containers, volumes and labels.
LABEL = "zero-regression-matrix"
#: BuildKit's limit for one secret.
SECRET_BYTES = 500 * 1024


@dataclass(frozen=True)
class Order:
    """An image to be built. lock: the text of the stack's lock; log: where the build's output goes."""

    recipe: Recipe
    lock: str
    tag: str
    overrides: tuple[Override, ...]
    log: Path

    @property
    def labels(self) -> dict[str, str]:
        """What the image says about itself."""
        return {
            LABEL: "stack",
            f"{LABEL}.backend": self.recipe.backend,
            f"{LABEL}.stack": self.recipe.stack,
            f"{LABEL}.base": self.recipe.base_image,
            f"{LABEL}.pins": json.dumps(dict(sorted(self.recipe.pins.items()))),
            f"{LABEL}.lock": "sha256:" + hashlib.sha256(self.lock.encode()).hexdigest(),
            f"{LABEL}.with": json.dumps([replace.describe(override) for override in self.overrides]),
        }


def build(client: docker.DockerClient, site: Site, order: Order) -> Image:
    """Build and tag; raises EnvironmentUnavailable with what stood in the way."""
    builder = engine.find_builder()
    if builder is None:
        raise EnvironmentUnavailable(engine.NO_BUILDER)
    recipe = order.recipe
    context = recipe.dockerfile.parent
    arguments = {
        "BASE_IMAGE": recipe.base_image,
        "PYTHON": recipe.python,
        "LOCK": str((recipe.lock or Path()).resolve().relative_to(context.resolve())),
        "TORCH_INDEX": recipe.torch_index,
    }
    arguments |= site.proxies
    with ExitStack() as stack:
        secrets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="secrets-")))
        tools = (context / "locks" / "build-tools.txt").read_text(encoding="utf-8")
        if wheels := site.wheels_for(locks.pins(order.lock) | locks.pins(tools)):
            arguments["WHEELS_IMAGE"] = stack.enter_context(_files_as_image(client, "wheels", wheels))
        if order.overrides:
            staging = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="with-")))
            replace.stage(order.overrides, recipe, staging)
            files = _files_as_image(client, "with", sorted(staging.iterdir()))
            arguments["OVERRIDES_IMAGE"] = stack.enter_context(files)
        command = [builder.client, "build", "--progress", "plain", "--file", str(recipe.dockerfile)]
        command += ["--tag", order.tag, *_secrets(site, secrets)]
        for name, value in sorted(order.labels.items()):
            command += ["--label", f"{name}={value}"]
        for name, value in sorted(arguments.items()):
            command += ["--build-arg", f"{name}={value}"]
        env = {**os.environ, **builder.environment, "DOCKER_HOST": engine.endpoint()}
        done = process.run([*command, str(context)], env=env, log=order.log)
    if done.code:
        reason = explain(build_error(done.output))
        raise EnvironmentUnavailable(f"the image of {recipe.stack} cannot be built: {reason}\n  all of it: {order.log}")
    return client.images.get(order.tag)


def _secrets(site: Site, folder: Path) -> list[str]:
    """The options that show a build the site's settings."""
    options: list[str] = []
    if settings := site.build_secret():
        (folder / "site").write_text(settings, encoding="utf-8")
        options += ["--secret", f"id=site,src={folder / 'site'}"]
    if bundle := site.certificates:
        size = bundle.stat().st_size
        if size > SECRET_BYTES:
            raise EnvironmentUnavailable(
                f"{bundle} has {size} bytes and a build takes {SECRET_BYTES} at most; let SSL_CERT_FILE name a bundle "
                "that holds only what this site needs"
            )
        options += ["--secret", f"id=ca,src={bundle}"]
    return options


@contextmanager
def _files_as_image(client: docker.DockerClient, name: str, paths: Sequence[Path]) -> Iterator[str]:
    """An image that holds only these files and folders, at its root, while the block runs."""
    repository, tag = f"{LABEL}/{name}", f"{os.getpid()}"
    _forget_those_of_the_dead(client, repository)
    with tempfile.TemporaryDirectory(prefix="files-") as scratch:
        archive = Path(scratch, "files.tar")
        try:
            _pack(archive, paths)
            client.api.import_image_from_file(str(archive), repository=repository, tag=tag)
            archive.unlink()
            client.images.get(f"{repository}:{tag}")
            yield f"{repository}:{tag}"
        except OSError as error:
            raise process.cannot_write(archive, error) from error
        except engine.LOST as error:
            words = getattr(error, "explanation", None) or error
            raise EnvironmentUnavailable(f"{name} cannot be offered to the build: {words}") from error
        finally:
            with contextlib.suppress(*engine.LOST):  # never made, or the engine is gone
                client.images.remove(f"{repository}:{tag}", force=True)


def _forget_those_of_the_dead(client: docker.DockerClient, repository: str) -> None:
    """Remove what a build left that was killed before it could."""
    for image in client.images.list(repository):
        for reference in image.tags:
            if not Path("/proc", reference.rpartition(":")[2]).exists():
                with contextlib.suppress(*engine.LOST):  # another run was faster
                    client.images.remove(reference, force=True)


def _pack(archive: Path, paths: Sequence[Path]) -> None:
    """A tar of the files that is the same for the same content, so that BuildKit finds what it built from them."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        return member

    with tarfile.open(archive, "w") as tar:
        for path in paths:
            tar.add(path, arcname=path.name, filter=plain)


#: BuildKit's own lines around what a step printed.
_FRAME = re.compile(
    r"sha256:|CACHED|DONE |\[|-{6}|\s*> |\s*$|exporting|transferring|executor failed|failed to solve|ERROR: executor"
)


def build_error(output: str) -> str:
    """The lines of a failed build that say why: what the failing step printed, without BuildKit's own frame."""
    lines = [re.sub(r"^#\d+ (\d+\.\d+ )?", "", line) for line in output.splitlines()]
    return "\n".join(line for line in lines if not _FRAME.match(line)) or output
