"""The doctor's findings: each missing thing is named with what mends it, and keeps the right runtime from running."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ci import facts, smi
from ci.doctor import Diagnosis, diagnose, missing_devices
from ci.facts import Facts
from ci.matrix import load
from ci.smi import Device, Listing
from tests.unit import recorded_smi as recorded

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


MATRIX = load(Path(__file__).parents[2] / "matrix.yaml")


def with_devices(backend: str, host: Facts) -> Diagnosis:
    """As the command diagnoses a backend that has devices."""
    entry = MATRIX.backends[backend]
    return diagnose(backend, host, base_image=None, unavailable=None, devices=entry.devices)


def host_of(tmp_path: Path, patch: pytest.MonkeyPatch, backend: str, count: int, **answers: Any) -> Facts:
    """A host with so many device files and a vendor's tool that prints what was recorded."""
    files = tmp_path / "dev"
    files.mkdir()
    for number in range(count):
        (files / f"{'nvidia' if backend == 'cuda' else 'davinci'}{number}").touch()
    tool: smi.Tool = "nvidia-smi" if backend == "cuda" else "npu-smi"
    if answers:
        recorded.put_on_path(tmp_path, patch, tool, **answers)
    else:
        patch.setenv("PATH", str(tmp_path))
    listing = smi.ask(tool)
    devices = facts.gather(files)
    return dataclasses.replace(
        WELL,
        nvidia_driver=devices.nvidia_driver,
        nvidia_devices=devices.nvidia_devices,
        ascend_driver=devices.ascend_driver,
        davinci_devices=devices.davinci_devices,
        closed_devices=devices.closed_devices,
        listings={} if listing is None else {tool: listing},
        cann_home="/usr/local/Ascend/cann",
        engine_runtimes=("ascend", "nvidia", "runc"),
    )


def found(diagnosis: Diagnosis) -> dict[str, tuple[str, str]]:
    """State and text of each finding, by its subject."""
    return {finding.subject: (finding.state, finding.found) for finding in diagnosis.findings}


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
    assert missing(with_devices("cuda", bare)) == [
        *("Python", "driver", "Docker client", "Docker engine", "uv", "disk", "memory"),
    ]
    closed = dataclasses.replace(
        bare,
        python=(3, 11, 7),
        nvidia_driver=True,
        nvidia_devices=("/dev/nvidia0",),
        closed_devices=("/dev/nvidia0",),
        engine="engine",
        listings={"nvidia-smi": Listing("nvidia-smi", (Device("0", "A800", trouble="lost"),), "470.1")},
    )
    assert missing(with_devices("cuda", closed)) == [
        *("driver", "container runtime", "Docker client", "BuildKit builder", "permission", "device 0", "uv", "disk"),
        "memory",
    ]
    unavailable = diagnose("cuda", WELL, base_image=None, unavailable="not part of this release yet")
    assert missing(unavailable) == ["this project"] and unavailable.runtimes == ()
    none = with_devices("cuda", WELL)
    assert none.conclusion == "cuda: cannot run here: no NVIDIA driver (/proc/driver/nvidia, nvidia-smi)"


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
    without = with_devices("cuda", gpu)
    assert missing(without) == ["container runtime"] and without.runtimes == ("venv",)
    assert found(without)["driver"] == ("note", "here, but no nvidia-smi on PATH")
    for has in ({"engine_runtimes": ("nvidia", "runc")}, {"cdi": frozenset({"nvidia.com/gpu"})}):
        assert with_devices("cuda", dataclasses.replace(gpu, **has)).runtimes == ("docker", "venv")
    npu = dataclasses.replace(WELL, ascend_driver=True, davinci_devices=("/dev/davinci0",))
    assert missing(with_devices("npu", npu)) == ["CANN"] and with_devices("npu", npu).runtimes == ("docker",)


@pytest.mark.parametrize("backend", ["cuda", "npu"])
def test_a_host_without_the_tool_and_without_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    diagnosis = with_devices(backend, host_of(tmp_path, monkeypatch, backend, 0))
    assert missing(diagnosis)[0] == "driver" and diagnosis.runtimes == ()


@pytest.mark.parametrize(
    ("backend", "count", "answers", "says"),
    [
        ("cuda", 1, {"--query-gpu": recorded.ONE_GPU}, "1 well, 1 free: NVIDIA A100-SXM4-80GB"),
        ("npu", 1, {"info": recorded.npus(1)}, "1 well, 1 free: 910B2"),
        (
            "cuda",
            8,
            {"--query-gpu": recorded.EIGHT_GPUS, "--query-compute-apps": recorded.APP.format(5)},
            "8 well, 7 free: NVIDIA A100-SXM4-80GB",
        ),
        ("npu", 8, {"info": recorded.npus(8, busy=2)}, "8 well, 7 free: 910B2"),
        ("cuda", 8, {"--query-gpu": recorded.SEVEN_GPUS_ONE_LOST}, "7 well, 7 free: NVIDIA A100-SXM4-80GB"),
        ("npu", 8, {"info": recorded.npus(8, health={6: "Alarm"})}, "7 well, 7 free: 910B2"),
    ],
    ids=["one gpu", "one npu", "eight gpus", "eight npus", "a gpu lost", "an npu with an alarm"],
)
def test_a_host_as_its_tool_describes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, count: int, answers: dict[str, str], says: str
) -> None:
    diagnosis = with_devices(backend, host_of(tmp_path, monkeypatch, backend, count, answers=answers))
    assert missing(diagnosis) == [] and diagnosis.runtimes == ("docker", "venv")
    told = found(diagnosis)
    assert told["devices"] == ("ok", says) and told["driver"][0] == "ok"
    notes = [subject for subject, (state, _) in told.items() if state == "note" and subject.startswith("device ")]
    assert len(notes) == (0 if count == 1 else 1)


def test_a_driver_that_does_not_answer_and_one_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = host_of(tmp_path, monkeypatch, "cuda", 1, answers={"--query": recorded.NO_DRIVER}, code=9)
    diagnosis = with_devices("cuda", silent)
    assert missing(diagnosis) == ["driver"] and "couldn't communicate" in diagnosis.conclusion
    old = Listing("nvidia-smi", (Device("0", "A100"),), driver="470.82.01")
    aged = with_devices("cuda", dataclasses.replace(silent, listings={"nvidia-smi": old}))
    assert missing(aged) == ["driver"] and "470.82.01, >=525.60.13 needed" in aged.conclusion


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
