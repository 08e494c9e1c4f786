"""How containers are handed devices: by the entries of matrix.yaml, in the words of the vendors' documentation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from ci import workers
from ci.commands.options import device_numbers
from ci.errors import NoDevice, UsageError
from ci.matrix import Matrix, load
from ci.plan import Selection, make_plan
from ci.provision.commandline import docker_run
from ci.provision.container import Orders, device_requests
from ci.provision.devices import Grant, inside, knows_cdi
from ci.provision.image import granted
from tests.jobs.order import own_devices

ROOT = Path(__file__).parents[2]
WITH_CDI = {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=0"}]}


@functools.cache
def shipped() -> Matrix:
    return load(ROOT / "matrix.yaml")


def command(backend: str, numbers: tuple[str, ...], info: dict[str, Any]) -> str:
    """The `docker run` for a backend's devices on an engine that says this of itself."""
    orders = Orders(
        image="IMAGE",
        command=("python", "-m", "pytest"),
        shown=[(Path("/src/tests"), "/project/tests")],
        written=(Path("/out"), "/results"),
        volume=("cache", "/pycache"),
        log_path=Path("/out/log"),
    )
    return " ".join(docker_run(granted(orders, Grant(shipped().backends[backend], numbers), info)))


def test_cuda_is_handed_over_by_gpus_and_gets_what_nccl_needs() -> None:
    said = command("cuda", ("0", "1"), {})
    assert '--gpus "device=0,1" ' in said
    assert "--shm-size 8g --ipc private --ulimit memlock=-1 --ulimit stack=67108864" in said
    assert "--device" not in said


def test_cuda_is_handed_over_by_cdi_where_the_engine_has_it(tmp_path: Path) -> None:
    said = command("cuda", ("0", "3"), WITH_CDI)
    assert "--device nvidia.com/gpu=0 --device nvidia.com/gpu=3" in said and "--gpus" not in said
    # An engine before 28.2 lists no devices, only where it looks for specifications.
    info: dict[str, Any] = {"CDISpecDirs": [str(tmp_path)]}
    assert not knows_cdi(info, "nvidia.com/gpu")
    (tmp_path / "nvidia.yaml").write_text("cdiVersion: 0.5.0\nkind: nvidia.com/gpu\n")
    assert knows_cdi(info, "nvidia.com/gpu")


def test_npu_is_handed_over_as_its_documentation_says_and_never_by_a_volume() -> None:
    words = command("npu", ("0", "1"), {}).split()
    devices = [words[index + 1] for index, word in enumerate(words) if word == "--device"]
    assert devices == [
        *("/dev/davinci0", "/dev/davinci1", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"),
    ]
    mounts = [words[index + 1] for index, word in enumerate(words) if word == "--mount"]
    for place in (
        "/usr/local/dcmi",
        "/usr/local/bin/npu-smi",
        "/usr/local/Ascend/driver/lib64/",
        "/usr/local/Ascend/driver/version.info",
        "/etc/ascend_install.info",
    ):
        assert f"type=bind,source={place},target={place},readonly" in mounts
    assert not {"-v", "--volume", "--privileged"} & set(words)


def test_npu_is_handed_over_by_the_runtime_of_ascend_where_the_engine_has_it() -> None:
    said = command("npu", ("2", "3"), {"Runtimes": {"runc": {}, "ascend": {"path": "/x"}}})
    assert "--runtime ascend" in said and "--env ASCEND_VISIBLE_DEVICES=2,3" in said
    assert "/dev/davinci" not in said and "/usr/local/dcmi" not in said
    # Without that runtime the variable is ignored without a word.
    assert "ASCEND_VISIBLE_DEVICES" not in command("npu", ("2", "3"), {"Runtimes": {"runc": {}}})


@pytest.mark.parametrize("backend", ["cpu", "cuda", "npu"])
def test_every_container_is_as_closed_as_that_of_the_cpu(backend: str) -> None:
    said = command(backend, ("0",), {})
    for flag in ("--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges", "--init"):
        assert flag in said


def test_the_engine_is_asked_for_what_the_command_says() -> None:
    def asked(info: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            dict(request) for request in device_requests(Grant(shipped().backends["cuda"], ("0", "1")).handover(info))
        ]

    (gpus,) = asked({})
    assert gpus["DeviceIDs"] == ["0", "1"] and gpus["Capabilities"] == [["gpu"]]
    (cdi,) = asked(WITH_CDI)
    assert cdi["Driver"] == "cdi" and cdi["DeviceIDs"] == ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]


def test_a_case_with_more_ranks_than_devices_is_not_run_and_none_at_all_is_exit_3() -> None:
    plan = make_plan(shipped(), Selection(backend="cuda", devices=("1",), jobs=("zero3-custom-adapter",)))
    assert {cell.gated for cell in plan.cells} == {"needs 2 devices, a rank each; those to be used are: 1"}
    with pytest.raises(NoDevice, match="no cell can run with these devices: needs 2 devices") as caught:
        plan.require_runnable()
    assert caught.value.exit_code == 3


def test_workers_share_no_device() -> None:
    assert workers.choose([2] * 10 + [4], cores=2, free_mb=1, devices=8).count == 2
    assert workers.choose([2], cores=2, free_mb=1, devices=8).count == 1
    eight = tuple(map(str, range(8)))
    assert [own_devices(eight, worker, 2) for worker in range(2)] == [eight[:4], eight[4:]]
    assert own_devices((), 0, 1) == ()
    assert inside(("2", "5"), in_container=True) == ("0", "1") and inside(("2", "5"), in_container=False) == ("2", "5")


@pytest.mark.parametrize("text", ["0,0", "a", "", "0,", "-1"])
def test_device_numbers_are_numbers_each_once(text: str) -> None:
    with pytest.raises(UsageError, match="expected numbers, each once"):
        device_numbers(text, "cuda")


def test_the_cpu_has_no_devices_to_choose_from() -> None:
    assert device_numbers("0, 1", "npu") == ("0", "1") and device_numbers(None, "cpu") is None
    with pytest.raises(UsageError, match="has no devices"):
        device_numbers("0", "cpu")
