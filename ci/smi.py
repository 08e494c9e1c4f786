"""What the vendors' own tools say of this host's devices: nvidia-smi and npu-smi, each as one listing.

Device files tell that a device is there; only its tool tells whether it is well and whether somebody uses it.
"""

from __future__ import annotations

import csv
import itertools
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from ci.errors import NoDevice

Tool = Literal["nvidia-smi", "npu-smi"]
ANSWER_S = 60
"""nvidia-smi loads the driver where no process holds it (persistence mode off): some seconds a card."""


@dataclass(frozen=True)
class Device:
    """One device. number: as its file has it. trouble: why it is not well, or None. users: who has it open."""

    number: str
    name: str
    trouble: str | None = None
    users: tuple[str, ...] = ()


@dataclass(frozen=True)
class Listing:
    """What a tool says. driver: its version, where told. problem: what the tool complains about, or None."""

    tool: Tool
    devices: tuple[Device, ...] = ()
    driver: str | None = None
    problem: str | None = None

    def device(self, number: str) -> Device:
        """The device of this number; one that the tool leaves out is not well."""
        for device in self.devices:
            if device.number == number:
                return device
        return Device(number, "unknown", trouble=f"{self.tool} does not list it{_because(self.problem)}")


@dataclass(frozen=True)
class Usable:
    """The devices to take, and what was left out with the reason, to be said aloud."""

    numbers: tuple[str, ...]
    left_out: tuple[str, ...] = ()


def ask(tool: Tool) -> Listing | None:
    """What the tool of this host says; None where there is none. Never raises."""
    if shutil.which(tool) is None:
        return None
    return _nvidia() if tool == "nvidia-smi" else _npu()


def usable(
    listing: Listing | None,
    here: Sequence[str],
    asked: Sequence[str] | None,
    *,
    shared: bool,
    take: Callable[[str], bool],
) -> Usable:
    """Which of the devices `here` to take: those `asked` for by number, else all that are well and in nobody's use.

    listing: None where no tool tells. shared: take devices that somebody uses, too. take: locks one by its number, or
    says that another run has it. Raises NoDevice where one that was asked for cannot be taken, or where none is left.
    """
    taken, refused = [], []
    for number in asked or here:
        device = Device(number, "unknown") if listing is None else listing.device(number)
        why = device.trouble
        if why is None and device.users and not shared:
            why = f"in use by {', '.join(device.users)}"
        if why is None and not take(number) and not shared:
            why = "in use by another run of this program"
        if why is None:
            taken.append(device.number)
        else:
            refused.append(f"device {device.number} ({device.name}): {why}")
    if refused and (asked or not taken):
        raise NoDevice(
            f"{'; '.join(refused)}{'' if listing is None else f' (as {listing.tool} says)'}. Wait for it, name others "
            "with --devices, or take devices that are in use with --share-devices"
        )
    return Usable(tuple(taken), tuple(refused))


def _because(problem: str | None) -> str:
    return "" if problem is None else f" ({problem})"


def _run(*command: str) -> tuple[int, str, str]:
    """Exit code, and both streams; a tool that cannot be started or hangs is a failure with its reason."""
    try:
        done = subprocess.run(command, capture_output=True, check=False, text=True, errors="replace", timeout=ANSWER_S)
    except subprocess.TimeoutExpired:
        return 1, "", f"{command[0]} did not answer within {ANSWER_S} s"
    except OSError as error:
        return 1, "", f"{command[0]}: {error.strerror}"
    return done.returncode, done.stdout, done.stderr


def _first_line(*texts: str) -> str | None:
    return next((line.strip() for text in texts for line in text.splitlines() if line.strip()), None)


def _rows(text: str, columns: int) -> tuple[list[list[str]], list[str]]:
    """The rows of nvidia-smi's CSV, and its lines that are none: it complains in the midst of them."""
    rows, others = [], []
    for line in text.splitlines():
        cells = next(csv.reader([line], skipinitialspace=True), [])
        if len(cells) == columns:
            rows.append([cell.strip() for cell in cells])
        elif line.strip():
            others.append(line.strip())
    return rows, others


def _nvidia() -> Listing:
    csv_only = "--format=csv,noheader,nounits"
    code, said, complained = _run("nvidia-smi", "--query-gpu=index,uuid,name,driver_version", csv_only)
    found, others = _rows(said, 4)
    gpus = [row for row in found if row[0].isdigit()]
    problem = _first_line(complained, *others) if code or others or complained.strip() else None
    _, said, _ = _run("nvidia-smi", "--query-compute-apps=gpu_uuid,pid,process_name", csv_only)
    users: dict[str, list[str]] = {}
    for uuid, pid, name in _rows(said, 3)[0]:
        users.setdefault(uuid, []).append(_user(name, pid))
    devices = [
        Device(index, name, _trouble_of_gpu(uuid, name), tuple(users.get(uuid, ()))) for index, uuid, name, _ in gpus
    ]
    driver = next((driver for *_, driver in gpus if driver[:1].isdigit()), None)
    return Listing("nvidia-smi", tuple(devices), driver, problem)


def _trouble_of_gpu(uuid: str, name: str) -> str | None:
    """A GPU that fell off the bus is listed with errors in place of what is asked."""
    return next((value for value in (uuid, name) if "error" in value.lower() or "lost" in value.lower()), None)


def _npu() -> Listing:
    code, said, complained = _run("npu-smi", "info")
    version = re.search(r"Version: (\S+)", said)
    devices = list(_chips(said))
    problem = (_first_line(complained, said) or f"exit code {code}") if code or not devices else None
    return Listing("npu-smi", tuple(devices), version.group(1) if version else None, problem)


def _chips(text: str) -> Iterator[Device]:
    """The chips of `npu-smi info`: two rows each, then a table of processes by NPU and chip.

    A chip's number is its Phy-ID where the table has that column (two chips a card), else the NPU's.
    """
    table, _, processes = text.partition("Process id")
    users: dict[tuple[str, str], list[str]] = {}
    for npu, chip, pid, name in re.findall(r"^\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|([^|]*)\|", processes, re.MULTILINE):
        users.setdefault((npu, chip), []).append(_user(name.strip(), pid))
    first = re.compile(r"\|\s*(\d+)\s+([^\s|]+)\s*\|\s*([A-Za-z]+)\s*\|")
    second = re.compile(r"\|\s*(\d+)(?:\s+(\d+))?\s*\|\s*[0-9A-Fa-f]{4}:")
    for above, below in itertools.pairwise(table.splitlines()):
        if (card := first.match(above)) and (chip := second.match(below)):
            npu, name, health = card.groups()
            number = chip.group(2) or npu
            trouble = None if health == "OK" else f"health {health}"
            yield Device(number, name, trouble, tuple(users.get((npu, chip.group(1)), ())))


def _user(name: str, pid: str) -> str:
    return f"{name or 'a process'} (pid {pid})"
