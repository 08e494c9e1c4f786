"""The lock of a stack: every package by exact version and hash, made from the pins in matrix.yaml by `uv pip compile`.

Two things keep a lock usable everywhere. It names no index and no host, so that a mirror, a folder of wheels or the
public index can all serve it. And torch stands in it by exact version without a hash: the CPU build is published on
PyTorch's own index and re-served by mirrors and folders of wheels whose files cannot be compared with it from here.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from ci.errors import UsageError
from ci.provision.process import cannot_write
from ci.provision.runtime import Recipe
from ci.provision.site import Site, uv

#: What every stack needs besides its pins: the runner of the jobs, and what DeepSpeed's source needs to be built.
BESIDES = ("ninja", "py-cpuinfo", "pytest", "pytest-xdist", "setuptools", "wheel")
UNHASHED = "torch"

_PIN = re.compile(r"^(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[^\s;\\]+)")


def pins(text: str) -> dict[str, str]:
    """Normalised name -> version of every package in a lock."""
    found = (_PIN.match(line) for line in text.splitlines())
    return {canonicalize_name(match["name"]): match["version"] for match in found if match}


def blocks(text: str) -> dict[str, str]:
    """Normalised name -> the lines of its entry, hashes and comments included."""
    entries: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if match := _PIN.match(line):
            current = entries.setdefault(canonicalize_name(match["name"]), [])
        elif line and not line[0].isspace():
            current = []  # a comment between entries belongs to none
        current.append(line)
    return {name: "\n".join(lines) + "\n" for name, lines in entries.items()}


def mistakes(text: str, wanted: Mapping[str, str]) -> list[str]:
    """What is wrong with a lock, measured by the pins it was made for."""
    locked = pins(text)
    wrong = [
        f"{name} is {locked.get(canonicalize_name(name), 'absent')}, matrix.yaml says {version}"
        for name, version in sorted(wanted.items())
        if locked.get(canonicalize_name(name)) != version
    ]
    wrong += [f"{name} is absent" for name in BESIDES if name not in locked]
    for name, entry in blocks(text).items():
        hashed = "--hash=" in entry
        if hashed and name == UNHASHED:
            wrong.append(f"{name} has a hash, which the same release from another source cannot match")
        elif not hashed and name != UNHASHED:
            wrong.append(f"{name} has no hash")
    for number, line in enumerate(text.splitlines(), 1):
        if "://" in line or re.match(r"\s*(-i\b|--(extra-)?index|--find-links)", line):
            wrong.append(f"line {number} names an index or a host: {line.strip()}")
    return wrong


def read(recipe: Recipe) -> str:
    """The lock of a stack, refused where it is absent or not the one matrix.yaml asks for."""
    if recipe.lock is None:
        raise UsageError(f"stack {recipe.stack} has no lock; it runs only with --runtime host")
    try:
        text = recipe.lock.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{recipe.lock}: {error.strerror}; nox -s lock -- {recipe.stack} makes it") from error
    if wrong := mistakes(text, recipe.pins):
        raise UsageError(f"{recipe.lock}: {wrong[0]}; nox -s lock -- {recipe.stack} makes it anew")
    return text


def _header(stack: str) -> str:
    return (
        f"# The lock of stack {stack}, made from its pins in matrix.yaml by: nox -s lock -- {stack}\n"
        f"# {UNHASHED} is pinned by its exact version only: the same release is served by more than one place.\n"
    )


def compile_lock(recipe: Recipe, site: Site, upgrade: bool = False) -> str:
    """Resolve the pins of a stack; releases of the present lock are kept where they still fit, unless `upgrade`."""
    with tempfile.TemporaryDirectory(prefix="lock-") as scratch:
        source, target = Path(scratch, f"{recipe.stack}.in"), Path(scratch, f"{recipe.stack}.txt")
        forced = Path(scratch, "forced.txt")
        wanted = [f"{name}=={version}" for name, version in sorted(recipe.pins.items())]
        source.write_text("\n".join([*wanted, *BESIDES, *recipe.packages]) + "\n", encoding="utf-8")
        forced.write_text("".join(f"{name}=={recipe.pins[name]}\n" for name in recipe.forced), encoding="utf-8")
        if not upgrade and recipe.lock is not None and recipe.lock.exists():
            # uv takes the releases of an existing output file as preferences.
            target.write_bytes(recipe.lock.read_bytes())
        command = ["pip", "compile", "--quiet", "--generate-hashes", "--no-emit-index-url", "--no-header"]
        command += ["--python-version", recipe.python, "--python-platform", recipe.platform]
        command += ["--override", str(forced)] if recipe.forced else []
        command += ["--output-file", str(target), *(f"--no-emit-package={name}" for name in recipe.left_out)]
        # Only torch from PyTorch's index, as a page of links: as a second index it would shadow other packages. And
        # only a local build ("+cpu"): a plain release is on every index.
        torch = recipe.pins.get(UNHASHED, "")
        if recipe.torch_index and "+" in torch and not site.wheels_for({UNHASHED: torch}):
            page = f"{recipe.torch_index.rstrip('/')}/{UNHASHED}/"
            site = dataclasses.replace(site, wheel_pages=(*site.wheel_pages, page))
        uv(site, [*command, str(source)], f"the pins of stack {recipe.stack} cannot be locked")
        return _header(recipe.stack) + _tidy(target.read_text(encoding="utf-8"), [str(source), str(forced)])


def _tidy(text: str, sources: Sequence[str]) -> str:
    """Without torch's hashes, without the scratch paths, in the order uv gave."""
    kept: list[str] = []
    name = ""
    for line in text.splitlines():
        if match := _PIN.match(line):
            name = canonicalize_name(match["name"])
        if name == UNHASHED:
            if line.lstrip().startswith("--hash="):
                continue
            line = line.removesuffix(" \\")
        if not line.startswith("#"):
            for source in sources:
                line = line.replace(f"-r {source}", "matrix.yaml").replace(f"--override {source}", "matrix.yaml")
            if line not in kept[-1:]:  # a forced pin is asked for twice
                kept.append(line)
    # What was left out is a comment at uv's end, and the blank line before it.
    return "\n".join(kept).rstrip("\n") + "\n"


def write(lock: Path, text: str) -> None:
    """Replace a lock in one step."""
    fresh = lock.with_suffix(".fresh")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(lock)
    except OSError as error:
        raise cannot_write(lock, error) from error
