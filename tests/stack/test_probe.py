"""The probe before the first case, in real ranks: what it finds here, and what it does not let pass."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.jobs import probe
from tests.jobs.evidence import Probe
from tests.jobs.launcher import Launcher
from tests.jobs.order import Cell, Order
from tests.stack.given import CPU, Given

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.146.02  Thu Dec 19 18:56:32 UTC 2023\n"
"""As in a public report of a driver and a library that differ."""


def looked(folder: Path, launcher: Launcher, backend: Mapping[str, Any], world_size: int = 2) -> Probe:
    """The probe for one cell of this many ranks."""
    cell = Cell("x/y/z", "z", {}, world_size, 0, 60.0, (), None, None)
    workdir = folder / "ranks"
    workdir.mkdir()
    return probe.run(Order(backend, "newest", {}, False, (cell,)), launcher, workdir, folder / "log")


def version(folder: Path, **entry: Any) -> dict[str, Any]:
    (folder / "version.info").write_text(DRIVER)
    return {"name": "driver", "file": str(folder / "*.info"), "pattern": r"Kernel Module .*?(\d+\.[\d.]+)", **entry}


@pytest.mark.parametrize(("world_size", "total"), [(2, 3.0), (3, 6.0)])
def test_the_probe_finds_every_rank_and_their_collective(
    tmp_path: Path, launcher: Launcher, world_size: int, total: float
) -> None:
    torch_version = {"name": "torch", "attribute": "torch.version:__version__"}
    found = looked(tmp_path, launcher, {**CPU, "versions": [version(tmp_path), torch_version]}, world_size)
    assert (found.accelerator, found.communication) == ("cpu", "gloo")
    assert (found.world_size, found.all_reduce, len(found.devices)) == (world_size, total, world_size)
    assert found.versions["driver"] == "535.146.02" and re.match(r"2\.\d+\.\d+", found.versions["torch"])


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"file": "/nowhere/version.info"}, "no version of driver: looked for it in /nowhere/version.info"),
        ({"pattern": "^Version=(.+)$"}, "no version of driver: looked for it in"),
        ({"expected": "580.1"}, "driver 535.146.02 is installed"),
        (
            {"file": None, "attribute": "torch.version:cuda"},
            "no version of driver: looked for it in torch.version:cuda",
        ),
    ],
    ids=["no file", "no such line", "another", "a build without it"],
)
def test_a_version_that_is_missing_or_another_stops_the_run(
    tmp_path: Path, launcher: Launcher, entry: dict[str, Any], said: str
) -> None:
    with pytest.raises(probe.Failed, match=re.escape(said)):
        looked(tmp_path, launcher, {**CPU, "versions": [version(tmp_path, **entry)]})


def test_another_accelerator_or_fewer_devices_stop_the_run(
    tmp_path: Path, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "accelerator").mkdir()
    with pytest.raises(probe.Failed, match="DeepSpeed chose 'cpu', the backend cuda needs 'cuda'"):
        looked(tmp_path / "accelerator", launcher, {**CPU, "id": "cuda", "accelerator": "cuda"})
    (tmp_path / "devices").mkdir()
    with pytest.raises(probe.Failed, match=r"devices are here, SOME_DEVICES=0,1,2,3,4,5,6 names 7"):
        looked(tmp_path / "devices", Given({"SOME_DEVICES": "0,1,2,3,4,5,6"}), {**CPU, "visible": "SOME_DEVICES"})


def test_ranks_that_do_not_reach_each_other_stop_the_run(tmp_path: Path) -> None:
    with pytest.raises(probe.Failed, match="before the first case: rank"):
        looked(tmp_path, Given({"GLOO_SOCKET_IFNAME": "nowhere0"}), CPU)
