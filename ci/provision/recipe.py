"""matrix.yaml -> Recipe: the few facts of a stack that provisioning needs."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from ci.errors import UsageError, choices
from ci.matrix import Matrix
from ci.provision.runtime import Recipe

#: The stack of `--stack current`: whatever the given interpreter has.
CURRENT = "current"


def recipe_for(matrix: Matrix, stack: str, root: Path, environ: Mapping[str, str] | None = None) -> Recipe:
    """The recipe of a stack of the matrix; `root` is the folder that matrix.yaml's paths start from."""
    if stack not in matrix.stacks:
        raise UsageError(f"unknown stack {stack!r}; {choices(stack, matrix.stacks)}")
    entry = matrix.stacks[stack]
    backend = matrix.backends[entry.backend]
    if backend.dockerfile is None or backend.base_image is None:
        raise UsageError(f"backend {entry.backend} has no image yet: {backend.unavailable or 'no dockerfile'}")
    return Recipe(
        stack=stack,
        backend=entry.backend,
        python=entry.python,
        lock=root / entry.lock,
        pins=entry.pins,
        dockerfile=root / backend.dockerfile,
        base_image=backend.base_image.format(cann=(entry.cann or "").lower(), python=entry.python),
        torch_index=torch_index(matrix, entry.backend, environ),
        packages=backend.packages,
        forced=entry.forced,
        left_out=backend.left_out,
        platform=backend.lock_platform,
    )


def current_recipe(matrix: Matrix, backend: str, root: Path) -> Recipe:
    """The recipe of `current`: nothing to make, nothing to compare with."""
    entry = matrix.backends[backend]
    return Recipe(
        stack=CURRENT,
        backend=backend,
        python=platform.python_version(),
        lock=None,
        pins={},
        dockerfile=root / (entry.dockerfile or f"docker/{backend}.Dockerfile"),
        base_image=entry.base_image or "",
    )


def torch_index(matrix: Matrix, backend: str, environ: Mapping[str, str] | None = None) -> str:
    """PyTorch's own index of a backend; a site replaces it by an environment variable, or empties it."""
    name = matrix.backends[backend].package_index
    if name is None:
        return ""
    index = matrix.package_indexes[name]
    return (os.environ if environ is None else environ).get(index.variable, index.url)
