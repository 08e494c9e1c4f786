"""`--with`: what replaces one package of a stack for one run, made ready for either runtime.

A checkout is copied before it is built: setup.py files write into their folder, and what is built must be what was
fingerprinted, even while somebody goes on editing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from ci.errors import UsageError
from ci.provision.runtime import Override, Recipe

#: Folders of a checkout that is not under git which no build reads.
LITTER = frozenset(
    {".git", ".venv", "venv", "build", "dist", "__pycache__", ".tox", ".nox", ".mypy_cache", ".pytest_cache"}
)


def _git(folder: Path, *arguments: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def checkout_files(folder: Path) -> list[Path]:
    """The files of a checkout that a build may read, relative to it: those git knows or would add.

    Links count as files, also those to folders: DeepSpeed's own package is one at deepspeed/accelerator.
    """
    listed = _git(folder, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    known = [Path(os.fsdecode(name)) for name in (listed or b"").split(b"\0") if name]
    return sorted({name for name in known or _walk(folder) if (folder / name).is_file() or _inner_link(folder, name)})


def _inner_link(folder: Path, name: Path) -> bool:
    """Whether this is a link to something else in the same checkout, which a copy of the checkout can keep."""
    path = folder / name
    return path.is_symlink() and path.exists() and path.resolve().is_relative_to(folder.resolve())


def _walk(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder):
        yield from (Path(place, name).relative_to(folder) for name in folders if Path(place, name).is_symlink())
        folders[:] = [name for name in folders if name not in LITTER and not name.endswith(".egg-info")]
        yield from (Path(place, name).relative_to(folder) for name in files)


def fingerprint(override: Override) -> str:
    """A hash of what would be installed: the same text for the same content, wherever it lies."""
    digest = hashlib.sha256(f"{canonicalize_name(override.package)}\0{override.version or ''}\0".encode())
    if override.path is None:
        return digest.hexdigest()
    try:
        if override.path.is_file():
            digest.update(override.path.name.encode() + override.path.read_bytes())
        elif override.path.is_dir():
            for name in checkout_files(override.path):
                path = override.path / name
                content = os.fsencode(path.readlink()) if _inner_link(override.path, name) else path.read_bytes()
                digest.update(
                    f"{name}\0{os.access(override.path / name, os.X_OK)}\0{len(content)}\0".encode() + content
                )
        else:
            raise UsageError(f"--with {override}: there is no such file or folder")
    except OSError as error:
        raise UsageError(f"--with {override}: {error.filename}: {error.strerror}") from error
    return digest.hexdigest()


def describe(override: Override) -> str:
    """A line for the report: for a checkout its commit and how many files differ from it."""
    if override.path is None:
        return f"{override.package} replaced by release {override.version}"
    if override.path.is_file():
        return f"{override.package} replaced by wheel {override.path.name}"
    commit = _git(override.path, "rev-parse", "--short=12", "HEAD")
    if commit is None:
        return f"{override.package} replaced by {override.path} (not under git)"
    changed = len((_git(override.path, "status", "--porcelain") or b"").splitlines())
    state = f", {changed} files changed" if changed else ""
    return f"{override.package} replaced by {override.path} at commit {commit.decode().strip()}{state}"


def stage(overrides: Sequence[Override], recipe: Recipe, folder: Path) -> None:
    """Fill `folder` for docker/replace-packages.sh: requirements, constraints, wheels and copies of checkouts."""
    replaced = {canonicalize_name(override.package) for override in overrides}
    requirements: list[str] = []
    for override in overrides:
        if override.path is None:
            requirements.append(f"{override.package}=={override.version}")
            continue
        place = folder / override.path.resolve().name
        if override.path.is_file():
            shutil.copyfile(override.path, place)
        else:
            # A name of its own: a checkout may be called like another, or like one of our files.
            place = folder / f"checkout-{canonicalize_name(override.package)}"
            for name in checkout_files(override.path):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                kept_link = _inner_link(override.path, name)
                shutil.copy2(override.path / name, place / name, follow_symlinks=not kept_link)
        # By name: only so does uv build DeepSpeed against what is installed instead of in isolation.
        requirements.append(f"{override.package} @ ./{place.name}")
    kept = [
        f"{name}=={version}" for name, version in sorted(recipe.pins.items()) if canonicalize_name(name) not in replaced
    ]
    (folder / "requirements.txt").write_text("".join(f"{line}\n" for line in requirements), encoding="utf-8")
    (folder / "constraints.txt").write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
