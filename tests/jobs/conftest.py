"""pytest runs the cells of an order: one item a cell, evidence appended as each ends.

An item fails only when its evidence is incomplete; whether the numbers are right is for `ci.judge` to say.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs import bodies, cells, evidence, order
from tests.jobs.launcher import Launcher

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_DISABLED": "true",
    # Arrow's allocator starts a thread at import, and a rank server must have one thread when it forks.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
"""What the rank server is born with: a fork cannot change what a library read at its import."""

IMPORT_LIMIT_S = 300.0
"""Importing a stack took 6 s (quiet) to 90 s (busy machine, no byte code yet)."""


def environment(ordered: order.Order) -> dict[str, str]:
    """What the processes of an order are born with."""
    with_trl = any(cell.case.get("trainer") in ("trl", "ms-swift") for cell in ordered.cells)
    return {
        **ENVIRONMENT,
        "JOBS_WITH_TRL": "1" if with_trl else "0",
        "DS_ACCELERATOR": str(ordered.backend["accelerator"]),
        **ordered.backend.get("environment", {}),
        **_devices(ordered),
    }


def _devices(ordered: order.Order) -> dict[str, str]:
    """What limits this pytest worker to devices of its own."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    devices = ordered.backend.get("devices", ())
    own = order.own_devices(devices, int(worker.removeprefix("gw")), int(workers))
    return {str(ordered.backend["visible"]): ",".join(own)} if own else {}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("regression jobs")
    group.addoption("--order", type=Path, help="the order.json to run")
    group.addoption("--results", type=Path, help="folder for evidence.jsonl and logs/")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--order")
    if path is None:
        return
    config.stash[_ORDER] = order.read(path)
    os.environ.update(environment(config.stash[_ORDER]))


_ORDER = pytest.StashKey[order.Order]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Jobs of which the order has no cell are not collected: an empty parameter set would read as a skip."""
    ordered = config.stash.get(_ORDER, None)
    if ordered is None or not collection_path.name.startswith("test_"):
        return None
    job = collection_path.stem.removeprefix("test_").replace("_", "-")
    return True if job not in {cell.job for cell in ordered.cells} else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" not in metafunc.fixturenames:
        return
    ordered = metafunc.config.stash.get(_ORDER, None)
    if ordered is None:
        raise pytest.UsageError("tests/jobs needs --order FILE and --results DIR: start it with python -m ci run")
    job = metafunc.module.JOB
    chosen = [cell for cell in ordered.cells if cell.job == job]
    metafunc.parametrize("cell", chosen, ids=[cell.id for cell in chosen])


@pytest.fixture(scope="session")
def ordered(request: pytest.FixtureRequest) -> order.Order:
    """The order being run."""
    return request.config.stash[_ORDER]


@pytest.fixture(scope="session")
def launcher(ordered: order.Order, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """One warm rank server per pytest worker: the import of the stack is no case's own time.

    Should the imports fail, each case says so by itself.
    """
    warm = Launcher(str(ordered.backend["start_method"]))
    folder = tmp_path_factory.mktemp("imports")
    warm.run(
        bodies.wait_for_the_imports,
        world_size=1,
        workdir=folder,
        log=folder / "log",
        timeout_s=IMPORT_LIMIT_S,
    )
    return warm


@pytest.fixture(scope="session")
def pins_differ(ordered: order.Order) -> str | None:
    """What is installed unlike the stack's pins, looked at before the first case."""
    return cells.pin_difference(ordered)


@pytest.fixture
def run_cell(
    request: pytest.FixtureRequest, ordered: order.Order, launcher: Launcher, pins_differ: str | None
) -> Callable[[order.Cell], evidence.Evidence]:
    """Runs a cell, appends its evidence and fails the item where the evidence is incomplete."""
    results: Path = request.config.getoption("--results")

    def incomplete(cell: order.Cell, problem: str) -> evidence.Evidence:
        return evidence.Evidence(
            cell=cell.id,
            pins=cells.installed_pins(ordered.pins),
            accelerator=str(ordered.backend["accelerator"]),
            device="",
            world_size=cell.world_size,
            problem=problem,
        )

    def run(cell: order.Cell) -> evidence.Evidence:
        if pins_differ is not None:
            recorded = incomplete(cell, pins_differ)
        else:
            try:
                recorded = cells.run(cell, ordered, launcher, results)
            except Exception as error:  # noqa: BLE001  # reason: a cell without evidence would not say why
                traceback.print_exc()
                recorded = incomplete(cell, f"{type(error).__name__}: {error}")
        evidence.append(results / "evidence.jsonl", recorded)
        if recorded.problem is not None:
            pytest.fail(recorded.problem, pytrace=False)
        return recorded

    return run
