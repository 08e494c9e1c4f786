"""The runtime that makes nothing: an interpreter that is already there, as in the image of a cluster."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.errors import EnvironmentUnavailable, UsageError
from ci.provision import process
from ci.provision.process import RunningProcess
from ci.provision.runtime import COMMON_ENVIRONMENT, Environment, Override, Recipe, Running, RuntimeId, pytest_command
from ci.provision.site import last_lines

LOOK_S = 60.0


class HostRuntime:
    """Starts pytest in the interpreter given by `--python`."""

    def __init__(self, root: Path, python: str) -> None:
        self._root = root
        self._python = python

    @property
    def id(self) -> RuntimeId:
        return "host"

    @property
    def python(self) -> str:
        """The interpreter given."""
        return self._python

    def describe(self) -> str:
        return f"the packages installed beside {self._python}"

    def provision(self, recipe: Recipe, overrides: Sequence[Override] = ()) -> Environment:
        if overrides:
            raise UsageError("--with would change an interpreter that is not ours; it needs --runtime venv or docker")
        started = time.monotonic()
        script = self._root / "docker" / "record-packages.py"
        done = process.run([self._python, str(script)], timeout=LOOK_S)
        if done.code:
            raise EnvironmentUnavailable(
                f"{self._python} does not work: {' / '.join(last_lines(done.said.splitlines(), 3))}"
            )
        packages: dict[str, str] = json.loads(done.output)["packages"]
        if "pytest" not in packages:
            raise EnvironmentUnavailable(
                f"{self._python} has no pytest, which runs the cells; install it with\n"
                f"  {self._python} -m pip install pytest pytest-xdist"
            )
        return Environment(
            kind="host",
            stack=recipe.stack,
            python=self._python,
            packages=packages,
            reused=True,
            seconds=time.monotonic() - started,
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
        # xdist is a convenience: without it the cells run one after the other.
        side_by_side = workers if "pytest-xdist" in environment.packages else 1
        # PYTHONPATH and the user's site-packages may be how this interpreter finds its packages: they stay.
        env = {**os.environ, **COMMON_ENVIRONMENT, **(extra_env or {})}
        env.pop("PYTHONNOUSERSITE")
        command = pytest_command(
            environment.python, str(order_file.resolve()), str(results_dir.resolve()), side_by_side
        )
        return RunningProcess(command, env=env, cwd=self._root, log_path=results_dir / "pytest.log")
