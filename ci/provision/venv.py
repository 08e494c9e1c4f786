"""The runtime without an engine: a virtual environment per stack, made from its lock by uv, found by its hash."""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ci.errors import EnvironmentUnavailable
from ci.provision import cache, locks, process, replace
from ci.provision.process import RunningProcess
from ci.provision.runtime import (
    COMMON_ENVIRONMENT,
    Environment,
    Override,
    Recipe,
    Running,
    RuntimeId,
    pytest_command,
)
from ci.provision.site import Site, explain, uv, uv_executable

#: Changed when a venv made by an older version of this module must not be found again.
FORMAT = "venv-1"
#: What of the caller's environment would change which packages a stack's interpreter sees, or keep it from caching
#: its bytecode.
NOT_INHERITED = (
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "CONDA_PREFIX",
    "VIRTUAL_ENV",
    "PYTEST_ADDOPTS",
    "PYTEST_PLUGINS",
    # Which cells are corrected is the order's to say; inside a stack the variable asks for more.
    "CI_CORRECTIONS",
)


class VenvRuntime:
    """Makes the stack under `root/.cache/venvs` and starts pytest in it."""

    def __init__(self, root: Path, site: Site | None = None, say: Callable[[str], None] | None = None) -> None:
        self._root = root
        self._site = site or Site.of()
        self._say = say or (lambda text: None)
        self._folder = root / ".cache" / "venvs"

    @property
    def id(self) -> RuntimeId:
        return "venv"

    def describe(self) -> str:
        return f"isolated virtual environment under {self._folder} (uv)"

    def folder(self, recipe: Recipe, overrides: Sequence[Override] = ()) -> Path:
        """Where the stack is, or would be made: the folder's name is the hash of what goes into it."""
        lock = locks.read(recipe)
        scripts = [
            (recipe.dockerfile.parent / name).read_bytes() for name in ("install-stack.sh", "replace-packages.sh")
        ]
        python = self._interpreter(recipe.python)
        key = cache.key(FORMAT, python, platform.machine(), lock, *scripts, *map(replace.fingerprint, overrides))
        return self._folder / f"{recipe.stack}-{key}"

    def provision(self, recipe: Recipe, overrides: Sequence[Override] = ()) -> Environment:
        started = time.monotonic()
        python = self._interpreter(recipe.python)
        target = self.folder(recipe, overrides)
        name = target.name
        reused = _whole(target)
        if not reused:
            with cache.only_one(self._folder, name, self._say):
                # Another run may have made it while this one waited.
                reused = _whole(target)
                if not reused:
                    self._make(recipe, overrides, python, target)
        notes = [*map(replace.describe, overrides), *_conflicts(target)]
        return Environment(
            kind="venv",
            stack=recipe.stack,
            python=str(target / "bin" / "python"),
            packages=json.loads((target / "packages.json").read_text())["packages"],
            folder=target,
            overrides=tuple(map(str, overrides)),
            reused=reused,
            seconds=time.monotonic() - started,
            notes=tuple(notes),
        )

    def path_inside(self, path: Path) -> str:
        return str(path.resolve())

    def start(
        self,
        environment: Environment,
        order_file: Path,
        results_dir: Path,
        workers: int = 1,
        extra_env: Mapping[str, str] | None = None,
        inputs: Sequence[Path] = (),
    ) -> Running:
        folder = Path(environment.python).parent.parent
        env = isolated_environment(environment.python) | {
            # Extensions compiled at run time: one folder per environment, since a killed build leaves a lock.
            "TORCH_EXTENSIONS_DIR": str(folder / "torch-extensions"),
            "VIRTUAL_ENV": str(folder),
            # Beside the stack, where nothing else changes: compiling it anew would cost every start 20 s.
            "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
            **(extra_env or {}),
        }
        command = pytest_command(environment.python, str(order_file.resolve()), str(results_dir.resolve()), workers)
        return RunningProcess(command, env=env, cwd=self._root, log_path=results_dir / "pytest.log")

    def _interpreter(self, version: str) -> str:
        """The Python a stack asks for: the one running this program where that fits, else one uv finds."""
        if platform.python_version_tuple()[: version.count(".") + 1] == tuple(version.split(".")):
            return os.path.realpath(sys.executable)
        what = f"a virtual environment with Python {version} cannot be made"
        return uv(self._site, ["python", "find", "--no-python-downloads", "--system", version], what).output.strip()

    def _make(self, recipe: Recipe, overrides: Sequence[Override], python: str, target: Path) -> None:
        self._say(f"making the virtual environment of {recipe.stack} (once; 1 to 3 minutes where nothing is cached)")
        env = self._site.uv_environment()
        env["PATH"] = os.pathsep.join([str(Path(uv_executable()).parent), env.get("PATH", os.defpath)])
        env["TORCH_INDEX"] = recipe.torch_index
        # DeepSpeed: no operator is compiled in advance, whatever the caller's environment asks for. Without them the
        # package is the same for every accelerator, and its setup.py needs no device.
        env |= {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        # A setup.py that asks git for a commit must not be told that of the folder around it.
        env["GIT_DIR"] = os.devnull
        scripts = recipe.dockerfile.parent
        with cache.made_whole(target) as scratch, tempfile.TemporaryDirectory(prefix="with-") as staging:
            # uv makes the folder itself, and only an absent or empty one.
            steps = [["sh", str(scripts / "install-stack.sh"), python, str(recipe.lock), str(scratch)]]
            if overrides:
                replace.stage(overrides, recipe, Path(staging))
                steps.append(["sh", str(scripts / "replace-packages.sh"), str(scratch), staging])
            for step in steps:
                done = process.run(step, env=env)
                if done.code:
                    raise EnvironmentUnavailable(f"stack {recipe.stack} cannot be installed: {explain(done.said)}")


def isolated_environment(python: str) -> dict[str, str]:
    """The caller's environment as pytest gets it in a venv: its interpreter first, nothing that leaks packages in."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    env["PATH"] = os.pathsep.join([str(Path(python).parent), env.get("PATH", os.defpath)])
    return {**env, **COMMON_ENVIRONMENT}


def _whole(target: Path) -> bool:
    """Whether the folder is there and its interpreter too (the Python below it may have been removed)."""
    return (target / "packages.json").is_file() and (target / "bin" / "python").exists()


def _conflicts(target: Path) -> list[str]:
    try:
        return (target / "conflicts.txt").read_text().splitlines()
    except FileNotFoundError:
        return []
