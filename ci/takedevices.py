"""Which devices of this host a run takes, before anything else is made."""

from __future__ import annotations

import os
from collections.abc import Callable

from ci import facts, smi
from ci.devicelocks import DeviceLocks
from ci.doctor import device_numbers_here, missing_devices
from ci.errors import NoDevice, UsageError
from ci.matrix import Matrix
from ci.provision.leftovers import end_leftovers


def take_devices(
    matrix: Matrix,
    backend: str,
    asked: tuple[str, ...] | None,
    say: Callable[[str], None],
    locks: DeviceLocks,
    *,
    dry_run: bool,
    shared: bool,
) -> tuple[str, ...] | None:
    """The numbers of the devices to use, locked: those asked for, else all here that are well and in nobody's use.

    None where the backend has none. A host without them is NoDevice; a dry run goes on, with what was asked for. Where
    none was asked for, the variable by which schedulers hand out devices limits them (CUDA_VISIBLE_DEVICES). What a
    killed run left is ended first, or its ranks would be somebody who uses the device.
    """
    entry = matrix.backends[backend].devices if backend in matrix.backends else None
    if entry is None:
        return None
    host = facts.gather()
    missing = missing_devices(backend, host)
    if missing is None:
        here = device_numbers_here(backend, host)
        absent = [number for number in asked or () if number not in here]
        if absent and not dry_run:
            raise NoDevice(f"--devices {','.join(absent)}: not on this host, which has {', '.join(here)}")
        if asked is None and (handed_out := os.environ.get(entry.visible)) is not None:
            here = _limited(here, entry.visible, handed_out)
            say(f"{backend}: {entry.visible} leaves this run the devices {', '.join(here)}")
        if dry_run:
            return asked or here
        if ended := end_leftovers():
            say(f"{backend}: ended what killed runs had left running: {ended}")
        listing = smi.ask(entry.tool)
        if listing is None:
            say(f"{backend}: no {entry.tool} here, so nothing tells whether somebody else uses a device")
        found = smi.usable(listing, here, asked, shared=shared, take=locks.take)
        for text in found.left_out:
            say(f"{backend}: left out: {text}")
        return found.numbers
    said = f"{backend}: this host has no device for it: {missing.found}. To mend it: {missing.mend}."
    if not dry_run:
        raise NoDevice(f"{said} Nothing was run: a run on CPU would prove nothing about {backend}.")
    say(said)
    return asked


def _limited(here: tuple[str, ...], variable: str, value: str) -> tuple[str, ...]:
    """Those `here` that the variable lists. NoDevice where it lists none of them, UsageError where it is no list."""
    numbers = [word.strip() for word in value.split(",")]
    if value.strip() in ("", "-1"):
        raise NoDevice(f"{variable} is {value!r}, which hides every device: unset it, or name devices with --devices")
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"{variable}: found {value!r}; expected numbers such as 0,1: name them with --devices instead")
    limited = tuple(number for number in here if number in {str(int(number)) for number in numbers})
    if not limited:
        raise NoDevice(f"{variable} is {value!r}, and this host has {', '.join(here)}: unset it, or use --devices")
    return limited
