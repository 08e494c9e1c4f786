"""Installing a stack: by uv, cold and with its cache, and by plain pip. It is what takes the time of an image build."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.bench.figure import Figure
from ci.errors import EnvironmentUnavailable
from ci.provision import locks
from ci.provision.runtime import Recipe
from ci.provision.site import Site, uv_executable

LIMIT_S = 1800
BUILDS_AGAINST_TORCH = "deepspeed"
_ENTRY = re.compile(r"^(?=[A-Za-z0-9])", re.MULTILINE)


def figures(recipe: Recipe, site: Site, python: str) -> list[Figure]:
    """python: the interpreter of the environments that are made. Downloads the whole stack twice."""
    with tempfile.TemporaryDirectory(prefix="bench-install-") as name:
        folder = Path(name)
        cold = _uv(recipe, site, python, folder / "cold", folder / "cache")
        warm = _uv(recipe, site, python, folder / "warm", folder / "cache")
        plain = _pip(recipe, site, python, folder / "pip")
    seconds = f"uv {cold:.0f} s, with its cache {warm:.0f} s, pip {plain:.0f} s"
    return [
        Figure("installing the stack, plain pip over uv, both cold", plain / cold, "x", note=seconds),
        Figure("the same with uv's cache, as every image build but the first", plain / warm, "x"),
    ]


def _uv(recipe: Recipe, site: Site, python: str, target: Path, cache: Path) -> float:
    """As ci.provision and the Dockerfile do it: the same script."""
    env = _environment(site, recipe) | {"UV_CACHE_DIR": str(cache)}
    env["PATH"] = os.pathsep.join([str(Path(uv_executable()).parent), env.get("PATH", os.defpath)])
    script = recipe.dockerfile.parent / "install-stack.sh"
    return _clocked([["sh", str(script), python, str(recipe.lock), str(target)]], env)


def _pip(recipe: Recipe, site: Site, python: str, target: Path) -> float:
    """The same three steps, since torch has no hash and DeepSpeed's setup.py wants to import torch."""
    torch, hashed, last = split(locks.read(recipe))
    target.mkdir()
    (target / "hashed.txt").write_text(hashed, encoding="utf-8")
    (target / "last.txt").write_text(last, encoding="utf-8")
    install = [str(target / "env" / "bin" / "pip"), "install", "--quiet", "--no-cache-dir", "--no-deps"]
    index = ["--index-url", recipe.torch_index] if recipe.torch_index else []
    steps = [
        [python, "-m", "venv", str(target / "env")],
        [*install, *index, torch],
        [*install, "--require-hashes", "--requirement", str(target / "hashed.txt")],
        [*install, "--require-hashes", "--no-build-isolation", "--requirement", str(target / "last.txt")],
    ]
    env = _environment(site, recipe)
    if site.wheel_folders or site.wheel_pages:
        env["PIP_FIND_LINKS"] = " ".join([*map(str, site.wheel_folders), *site.wheel_pages])
    return _clocked(steps, env)


def split(lock: str) -> tuple[str, str, str]:
    """(torch as a requirement, everything that has a hash, what builds against torch) of a lock's text."""
    found = {entry.partition("==")[0]: entry for entry in _ENTRY.split(lock) if "==" in entry.partition("\n")[0]}
    torch = found.pop("torch").split()[0]
    last = found.pop(BUILDS_AGAINST_TORCH)
    return torch, "".join(found.values()), last


def _environment(site: Site, recipe: Recipe) -> dict[str, str]:
    switches = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return site.uv_environment() | switches | {"TORCH_INDEX": recipe.torch_index, "GIT_DIR": os.devnull}


def _clocked(steps: Sequence[Sequence[str]], env: Mapping[str, str]) -> float:
    began = time.monotonic()
    for step in steps:
        done = subprocess.run(step, env=dict(env), capture_output=True, text=True, timeout=LIMIT_S, check=False)
        if done.returncode:
            said = done.stderr.strip().rpartition("\n")[2]
            raise EnvironmentUnavailable(f"{' '.join(step[:3])} ended with exit code {done.returncode}: {said}")
    return time.monotonic() - began
