"""Health and users of devices, out of what nvidia-smi and npu-smi print, and which of them a run takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import smi
from ci.devicelocks import DeviceLocks
from ci.errors import NoDevice
from ci.smi import Device, Listing, usable
from tests.unit import recorded_smi as recorded

EIGHT = tuple(map(str, range(8)))


def nvidia(folder: Path, patch: pytest.MonkeyPatch, gpus: str, apps: str = "", code: int = 0) -> Listing:
    recorded.put_on_path(folder, patch, "nvidia-smi", {"--query-gpu": gpus, "--query-compute-apps": apps}, code)
    found = smi.ask("nvidia-smi")
    assert found is not None
    return found


def npu(folder: Path, patch: pytest.MonkeyPatch, said: str, code: int = 0) -> Listing:
    recorded.put_on_path(folder, patch, "npu-smi", {"info": said}, code)
    found = smi.ask("npu-smi")
    assert found is not None
    return found


def test_a_host_without_the_tools_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert smi.ask("nvidia-smi") is None and smi.ask("npu-smi") is None


def test_one_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = nvidia(tmp_path, monkeypatch, recorded.ONE_GPU)
    assert gpu == Listing("nvidia-smi", (Device("0", "NVIDIA A100-SXM4-80GB"),), driver="535.129.03")
    card = npu(tmp_path, monkeypatch, recorded.npus(1))
    assert card == Listing("npu-smi", (Device("0", "910B2"),), driver="24.1.0.3")


def test_eight_cards_one_of_them_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = nvidia(tmp_path, monkeypatch, recorded.EIGHT_GPUS, recorded.APP.format(5))
    assert [device.number for device in gpus.devices] == list(EIGHT)
    assert [device.users for device in gpus.devices if device.users] == [("/opt/conda/bin/python (pid 1333928)",)]
    assert gpus.device("5").users
    cards = npu(tmp_path, monkeypatch, recorded.npus(8, busy=2))
    assert [device.number for device in cards.devices] == list(EIGHT)
    assert {device.number: device.users for device in cards.devices if device.users} == {
        "2": ("a process (pid 1333928)",)
    }


def test_two_chips_a_card_are_told_by_their_physical_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chips = npu(tmp_path, monkeypatch, recorded.TWO_CHIPS)
    assert [(device.number, device.users) for device in chips.devices] == [("2", ()), ("3", ("python (pid 3328327)",))]


def test_a_card_that_is_not_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = nvidia(tmp_path, monkeypatch, recorded.SEVEN_GPUS_ONE_LOST, code=6)
    assert len(gpus.devices) == 7 and gpus.device("2").trouble is None
    assert gpus.device("3").trouble == f"nvidia-smi does not list it ({recorded.LOST.strip()})"
    cards = npu(tmp_path, monkeypatch, recorded.npus(8, health={6: "Alarm"}))
    assert [(device.number, device.trouble) for device in cards.devices if device.trouble] == [("6", "health Alarm")]


def test_a_tool_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = nvidia(tmp_path, monkeypatch, recorded.NO_DRIVER, recorded.NO_DRIVER, code=9)
    assert gpus.devices == () and gpus.problem == recorded.NO_DRIVER.strip()
    assert npu(tmp_path, monkeypatch, "", code=1).problem == "exit code 1"
    (tmp_path / "npu-smi").write_text("no program")
    assert "npu-smi" in ((smi.ask("npu-smi") or Listing("npu-smi")).problem or "")


LISTING = Listing(
    "npu-smi",
    (
        *(Device("0", "910B2"), Device("1", "910B2", users=("python (pid 7)",))),
        *(Device("2", "910B2", trouble="health Alarm"), Device("3", "910B2")),
    ),
)
HERE = ("0", "1", "2", "3")


def free(number: str) -> bool:
    del number
    return True


def test_what_is_in_use_or_not_well_is_left_out_and_said() -> None:
    found = usable(LISTING, HERE, None, shared=False, take=free)
    assert found.numbers == ("0", "3")
    assert found.left_out == (
        "device 1 (910B2): in use by python (pid 7)",
        "device 2 (910B2): health Alarm",
    )


def test_what_is_in_use_is_taken_when_told_so_and_what_is_not_well_never() -> None:
    assert usable(LISTING, HERE, None, shared=True, take=free).numbers == ("0", "1", "3")
    assert usable(LISTING, HERE, ("1",), shared=True, take=free).numbers == ("1",)
    with pytest.raises(NoDevice, match=r"device 2 \(910B2\): health Alarm"):
        usable(LISTING, HERE, ("0", "2"), shared=True, take=free)


def test_a_device_asked_for_by_number_is_refused_and_not_replaced() -> None:
    with pytest.raises(NoDevice, match=r"device 1 .*in use by python \(pid 7\).*--share-devices") as caught:
        usable(LISTING, HERE, ("0", "1"), shared=False, take=free)
    assert caught.value.exit_code == 3
    with pytest.raises(NoDevice, match="npu-smi does not list it"):
        usable(LISTING, (*HERE, "4"), ("4",), shared=False, take=free)


def test_a_host_whose_devices_are_all_in_use_has_none() -> None:
    busy = Listing("npu-smi", (Device("0", "910B2", users=("python (pid 7)",)),))
    with pytest.raises(NoDevice, match="in use by"):
        usable(busy, ("0",), None, shared=False, take=free)


def test_what_another_run_has_is_left_out_and_refused_where_it_was_asked_for(tmp_path: Path) -> None:
    with DeviceLocks("npu", tmp_path) as theirs, DeviceLocks("npu", tmp_path) as ours:
        assert theirs.take("0")
        found = usable(LISTING, HERE, None, shared=False, take=ours.take)
        assert found.numbers == ("3",)
        assert found.left_out[0] == "device 0 (910B2): in use by another run of this program"
        with pytest.raises(NoDevice, match=r"device 0 .*another run of this program \(as npu-smi says\).*--share-dev"):
            usable(LISTING, HERE, ("0",), shared=False, take=ours.take)


def test_without_a_tool_the_locks_alone_tell(tmp_path: Path) -> None:
    with DeviceLocks("npu", tmp_path) as theirs, DeviceLocks("npu", tmp_path) as ours:
        assert theirs.take("1")
        assert usable(None, ("0", "1"), None, shared=False, take=ours.take).numbers == ("0",)
        with pytest.raises(NoDevice, match=r"device 1 \(unknown\): in use by another run of this program\. Wait"):
            usable(None, ("0", "1"), ("1",), shared=False, take=ours.take)


def test_a_run_that_shares_a_device_keeps_others_off_it(tmp_path: Path) -> None:
    with DeviceLocks("npu", tmp_path) as first, DeviceLocks("npu", tmp_path) as second:
        assert usable(LISTING, HERE, ("0",), shared=True, take=first.take).numbers == ("0",)
        assert usable(LISTING, HERE, ("0",), shared=True, take=second.take).numbers == ("0",)
        assert not second.take("0")
