"""Which devices a run takes on a host as it is, and what it ends before it looks."""

from __future__ import annotations

import dataclasses
import re
import sys
import tempfile
from pathlib import Path

import pytest

from ci import facts
from ci.devicelocks import DeviceLocks
from ci.errors import NoDevice, UsageError
from ci.matrix import load
from ci.takedevices import take_devices
from tests.unit import recorded_smi as recorded
from tests.unit.family import alive, left_by_a_killed_run

MATRIX = load(Path(__file__).parents[2] / "matrix.yaml")

DEVICES = tuple(f"/dev/nvidia{number}" for number in range(4))

#: nvidia-smi, for which device 0 is in use as long as this process lives.
IN_USE_WHILE_IT_LIVES = """#!{python} -S
import sys
try:
    lives = open("/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
except OSError:
    lives = False
print({apps!r} * lives if "--query-compute-apps" in " ".join(sys.argv) else {gpus!r}, end="")
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A host with GPUs; what a run says there. Temporary files and engines of this host are not touched."""
    host = dataclasses.replace(facts.gather(tmp_path), nvidia_driver=True, nvidia_devices=DEVICES)
    monkeypatch.setattr(facts, "gather", lambda: host)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no-engine")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return []


def taken(folder: Path, said: list[str], asked: tuple[str, ...] | None = None) -> tuple[str, ...] | None:
    with DeviceLocks("cuda", folder) as locks:
        return take_devices(MATRIX, "cuda", asked, said.append, locks, dry_run=False, shared=False)


def put_nvidia_smi_on_path(folder: Path, patch: pytest.MonkeyPatch, user: int) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(
        IN_USE_WHILE_IT_LIVES.format(
            python=sys.executable, pid=user, apps=recorded.APP.format(0), gpus=recorded.EIGHT_GPUS
        )
    )
    tool.chmod(0o755)
    patch.setenv("PATH", str(folder))


def test_what_a_killed_run_left_on_a_device_is_ended_and_the_device_taken(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = left_by_a_killed_run(tmp_path)
    put_nvidia_smi_on_path(tmp_path, monkeypatch, user=family[-1])
    assert taken(tmp_path, said, asked=("0",)) == ("0",)
    assert alive(family) == [] and said == ["cuda: ended what killed runs had left running: 1"]


def test_a_device_that_somebody_elses_process_uses_is_not_taken(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi_on_path(tmp_path, monkeypatch, user=1)
    with pytest.raises(NoDevice, match=r"device 0 .*: in use by /opt/conda/bin/python"):
        taken(tmp_path, said, asked=("0",))
    assert taken(tmp_path, said) == ("1", "2", "3")


@pytest.mark.parametrize(("value", "left"), [("1,3", ("1", "3")), ("3", ("3",)), ("2, 02,9", ("2",)), ("0,1", ("1",))])
def test_a_scheduler_s_variable_limits_a_run(
    value: str, left: tuple[str, ...], tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_nvidia_smi_on_path(tmp_path, monkeypatch, user=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert taken(tmp_path, said) == left
    assert said[0].startswith("cuda: CUDA_VISIBLE_DEVICES leaves this run the devices ")
    assert taken(tmp_path, said, asked=("2",)) == ("2",), "what was asked for counts"


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        ("", NoDevice, "CUDA_VISIBLE_DEVICES is '', which hides every device"),
        ("-1", NoDevice, "is '-1', which hides every device"),
        ("7", NoDevice, "is '7', and this host has 0, 1, 2, 3"),
        ("GPU-513536b6", UsageError, "found 'GPU-513536b6'; expected numbers such as 0,1"),
        ("0,", UsageError, "found '0,'"),
    ],
)
def test_a_scheduler_s_variable_without_a_device_of_this_host_is_answered(
    value: str, error: type[Exception], says: str, tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(error, match=re.escape(says)):
        taken(tmp_path, said)


def test_a_device_that_is_not_here_is_named(tmp_path: Path, said: list[str]) -> None:
    with pytest.raises(NoDevice, match="--devices 7: not on this host, which has 0, 1, 2, 3"):
        taken(tmp_path, said, asked=("7",))
