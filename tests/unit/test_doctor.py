"""The doctor's findings: each missing thing is named with what mends it, and keeps the right runtime from running."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ci import facts
from ci.doctor import Diagnosis, diagnose, missing_devices
from ci.facts import Facts

WELL = Facts(
    python=(3, 11, 7),
    cores=8,
    memory_free_mb=16000,
    disk_free_mb=50000,
    docker_client="/usr/bin/docker",
    engine="engine 20.10.24",
    builder="BuildKit of /usr/bin/docker",
    images=frozenset({"debian:bookworm-slim"}),
    uv="/usr/bin/uv",
    torch_wheels=("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl",),
)


def cpu(**changes: object) -> Diagnosis:
    changed = dataclasses.replace(WELL, **changes)  # type: ignore[arg-type]  # reason: names are checked by the dataclass
    return diagnose("cpu", changed, base_image="debian:bookworm-slim", unavailable=None)


def missing(diagnosis: Diagnosis) -> list[str]:
    return [finding.subject for finding in diagnosis.findings if finding.state == "missing"]


def test_a_host_with_everything() -> None:
    diagnosis = cpu()
    assert diagnosis.conclusion == "cpu: runs here (docker, venv)"
    assert missing(diagnosis) == []


@pytest.mark.parametrize(
    ("changes", "subject", "runtimes"),
    [
        ({"python": (3, 10, 1)}, "Python", ()),
        ({"docker_client": None}, "Docker client", ("venv",)),
        ({"engine": None, "engine_problem": "no answer"}, "Docker engine", ("venv",)),
        ({"builder": None}, "BuildKit builder", ("venv",)),
        ({"uv": None}, "uv", ("docker",)),
        ({"disk_free_mb": 100}, "disk", ()),
        ({"memory_free_mb": 500}, "memory", ()),
    ],
)
def test_what_is_missing_is_named_and_blocks(
    changes: dict[str, object], subject: str, runtimes: tuple[str, ...]
) -> None:
    diagnosis = cpu(**changes)
    assert missing(diagnosis) == [subject]
    assert diagnosis.runtimes == runtimes
    if subject != "Docker engine":  # the probe's own words there
        assert all(finding.mend for finding in diagnosis.findings if finding.state == "missing")


def test_findings_stand_in_the_order_of_mending() -> None:
    bare = Facts(python=(3, 9, 0), cores=2, memory_free_mb=100, disk_free_mb=10)
    diagnosis = diagnose("cuda", bare, base_image=None, unavailable="not part of this release yet")
    assert missing(diagnosis) == [
        *("GPU", "this project", "Python", "Docker client", "Docker engine", "uv", "disk", "memory"),
    ]
    assert diagnosis.conclusion == "cuda: cannot run here: no NVIDIA driver (/proc/driver/nvidia, nvidia-smi)"


@pytest.mark.parametrize(
    ("backend", "changes", "says"),
    [
        ("cuda", {}, "no NVIDIA driver"),
        ("cuda", {"nvidia_driver": True}, "no GPU"),
        ("npu", {}, "no Ascend driver"),
        ("npu", {"ascend_driver": True}, "no device (/dev/davinci0)"),
    ],
)
def test_devices_that_are_missing(backend: str, changes: dict[str, object], says: str) -> None:
    finding = missing_devices(backend, dataclasses.replace(WELL, **changes))  # type: ignore[arg-type]  # reason: names are checked by the dataclass
    assert finding is not None and says in finding.found and finding.mend


def test_devices_that_are_there() -> None:
    assert missing_devices("cpu", WELL) is None
    gpu = dataclasses.replace(WELL, nvidia_driver=True, nvidia_devices=("/dev/nvidia0",))
    assert missing_devices("cuda", gpu) is None
    without = diagnose("cuda", gpu, base_image=None, unavailable=None)
    assert missing(without) == ["GPU in containers"] and without.runtimes == ("venv",)
    with_runtime = dataclasses.replace(gpu, engine_runtimes=("nvidia", "runc"))
    assert diagnose("cuda", with_runtime, base_image=None, unavailable=None).runtimes == ("docker", "venv")


def test_device_files_are_counted_and_their_controls_are_not(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "davinci3", "davinci_manager"):
        (tmp_path / name).touch()
    found = facts.gather(tmp_path)
    assert found.nvidia_devices == (f"{tmp_path}/nvidia0", f"{tmp_path}/nvidia1")
    assert found.davinci_devices == (f"{tmp_path}/davinci3",)


def test_torch_comes_from_disk_from_its_index_or_from_nowhere() -> None:
    def torch(**changes: object) -> str:
        return next(finding.found for finding in cpu(**changes).findings if finding.subject == "torch")

    assert torch() == "wheel on disk: torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl"
    assert "from https://x/cpu" in torch(torch_wheels=(), torch_index="https://x/cpu")
    assert "switched off" in torch(torch_wheels=())
