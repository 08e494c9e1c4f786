"""What a place to run a stack looks like to the rest of the program.

`ci.execute` runs a plan without knowing whether the ranks live in a container, in a virtual environment made by us or
in an interpreter that was handed over. The three runtimes (`image.DockerRuntime`, `venv.VenvRuntime`,
`host.HostRuntime`) answer to the protocol in this module, and what they hand back is data that can be written to
run.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

RuntimeId = Literal["docker", "venv", "host"]

#: Environment every runtime gives to pytest, so that a cell sees the same world in each of them: ranks talk over the
#: loopback device, nothing is fetched from a hub, and nothing of the user's site-packages leaks in.
COMMON_ENVIRONMENT: Mapping[str, str] = {
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONNOUSERSITE": "1",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True)
class Override:
    """One `--with PACKAGE=SOURCE`: a release, a wheel or a source checkout that replaces one pin for one run."""

    package: str
    version: str | None = None
    path: Path | None = None

    def __str__(self) -> str:
        return f"{self.package}={self.version if self.path is None else self.path}"


@dataclass(frozen=True)
class Recipe:
    """All that provisioning needs to know of a stack, taken out of matrix.yaml by `ci.provision.recipe`.

    `lock` is None for `current`, whose packages are whatever the given interpreter has.
    `torch_index` is '' where the site has emptied it.
    """

    stack: str
    backend: str
    python: str
    lock: Path | None
    pins: Mapping[str, str]
    dockerfile: Path
    base_image: str
    torch_index: str = ""
    #: What the backend's runtime needs of the stack besides its pins.
    packages: tuple[str, ...] = ()
    #: Pins that hold although another package declares that it does not run with them.
    forced: tuple[str, ...] = ()
    #: What its lock leaves out although a pin asks for it.
    left_out: tuple[str, ...] = ()
    #: uv's name of the platform that the lock is resolved for.
    platform: str = "x86_64-manylinux_2_28"


@dataclass(frozen=True)
class Environment:
    """A provisioned stack: where it is and what is really installed in it."""

    kind: RuntimeId
    stack: str
    #: Interpreter that runs pytest; inside the container for kind 'docker'.
    python: str
    #: Every installed distribution (normalised name -> version), read from the environment, not from the lock.
    packages: Mapping[str, str]
    #: Image reference and id (sha256:...), for kind 'docker' only.
    image: str | None = None
    image_id: str | None = None
    #: REPOSITORY@sha256:... of the registries that this image was pulled from or pushed to.
    digests: tuple[str, ...] = ()
    #: Folder of the virtual environment, for kind 'venv' only.
    folder: Path | None = None
    overrides: tuple[str, ...] = ()
    #: True when nothing had to be made: a look-up.
    reused: bool = False
    seconds: float = field(default=0.0, compare=False)
    #: Things worth a line in the report: dependency conflicts after `--with`, the commit of a checkout.
    notes: tuple[str, ...] = ()


class Running(Protocol):
    """A pytest process (and every rank below it) that was started by `Runtime.start`."""

    @property
    def log_path(self) -> Path:
        """Standard output and error of pytest, written while it runs."""

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait for the end; None when `timeout` seconds passed first. 137/-9 is a killed process."""

    def terminate(self) -> None:
        """End it and everything it started: interrupt, a few seconds of grace, kill. Safe to call at any time.

        Afterwards no process of the run is left, and no container. It must be called in a `finally`: it also clears
        up after a run that ended by itself.
        """


class Runtime(Protocol):
    """A kind of place where a stack can be made and pytest started in it."""

    @property
    def id(self) -> RuntimeId:
        """The word users write after `--runtime`."""

    def describe(self) -> str:
        """One line for people: what runs where, in which version."""

    def provision(self, recipe: Recipe, overrides: Sequence[Override] = ()) -> Environment:
        """Make the stack, or find it made. Raises EnvironmentUnavailable (exit 3) or UsageError (exit 2)."""

    def path_inside(self, path: Path) -> str:
        """Where a file that is passed to `start` as one of `inputs` will be seen by the jobs (for order.json)."""

    def start(
        self,
        environment: Environment,
        order_file: Path,
        results_dir: Path,
        workers: int = 1,
        extra_env: Mapping[str, str] | None = None,
        inputs: Sequence[Path] = (),
    ) -> Running:
        """Start `pytest tests/jobs` on the order.

        `results_dir` exists and is the only place the jobs may write to; pytest's output goes to
        `results_dir/pytest.log`. `inputs` are a user's own files (`--adapter`, `--ds-config`), shown read-only.
        """


def pytest_command(python: str, order_file: str, results_dir: str, workers: int) -> tuple[str, ...]:
    """The command that runs the ordered cells, started in the folder that holds `tests/`."""
    command = (
        python,
        "-m",
        "pytest",
        "tests/jobs",
        "-p",
        "no:cacheprovider",
        "--order",
        order_file,
        "--results",
        results_dir,
    )
    # One worker runs without xdist: a process less, and a debugger works.
    return (*command, "-n", str(workers)) if workers > 1 else command
