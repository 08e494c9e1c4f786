"""pytest runs the cells of an order: one item a cell, evidence appended as each ends.

An item fails only when its evidence is incomplete; whether the numbers are right is for `ci.judge` to say.
"""

from __future__ import annotations

import dataclasses
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs import cells, evidence, order, probe
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
def launcher(ordered: order.Order) -> Launcher:
    """One warm rank server per pytest worker."""
    return Launcher(str(ordered.backend["start_method"]))


@pytest.fixture(scope="session")
def before(
    request: pytest.FixtureRequest,
    ordered: order.Order,
    launcher: Launcher,
    tmp_path_factory: pytest.TempPathFactory,
) -> evidence.Evidence:
    """What is known before the first case, as evidence of no case: its pins and its probe, or why none can run.

    The probe also waits for the import of the stack, so that this is no case's own time.
    """
    results: Path = request.config.getoption("--results")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
    log = results / "logs" / f"probe.{ordered.stack}.{worker}.log"
    found = evidence.Evidence(
        cell="",
        pins=cells.installed_pins(ordered.pins),
        accelerator=str(ordered.backend["accelerator"]),
        device="",
        world_size=0,
        problem=cells.pin_difference(ordered),
    )
    if found.problem is not None:
        return found
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        seen = probe.run(ordered, launcher, tmp_path_factory.mktemp("probe"), log)
    except probe.Failed as error:
        return dataclasses.replace(found, problem=str(error), log=str(log.relative_to(results)))
    return dataclasses.replace(found, probe=seen)


@pytest.fixture
def run_cell(
    request: pytest.FixtureRequest, ordered: order.Order, launcher: Launcher, before: evidence.Evidence
) -> Callable[[order.Cell], evidence.Evidence]:
    """Runs a cell, appends its evidence and fails the item where the evidence is incomplete."""
    results: Path = request.config.getoption("--results")

    def run(cell: order.Cell) -> evidence.Evidence:
        recorded = dataclasses.replace(before, cell=cell.id, world_size=cell.world_size)
        if before.problem is None:
            try:
                recorded = dataclasses.replace(cells.run(cell, ordered, launcher, results), probe=before.probe)
            except Exception as error:  # noqa: BLE001  # reason: a cell without evidence would not say why
                traceback.print_exc()
                recorded = dataclasses.replace(recorded, problem=f"{type(error).__name__}: {error}")
        evidence.append(results / "evidence.jsonl", recorded)
        if recorded.problem is not None:
            pytest.fail(recorded.problem, pytrace=False)
        return recorded

    return run
