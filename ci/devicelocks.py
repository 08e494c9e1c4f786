"""One run a device: a lock for each that a run uses, so that two runs that start together never share one.

The vendors' tools tell who has a device open, but a run opens it only minutes after it looked: its image comes first.
The kernel gives a lock back however its process ends, so none is ever left over; the empty files stay.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType

FOLDER = Path("/tmp")
"""The one folder that all users of a host can write to. A container has its own: there, bind that of the host."""


class DeviceLocks:
    """The locks of one run: `take` as many as wanted; all of them end with the block."""

    def __init__(self, backend: str, folder: Path = FOLDER) -> None:
        self._backend, self._folder = backend, folder
        self._held: list[int] = []

    def __enter__(self) -> DeviceLocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._held:
            os.close(self._held.pop())

    def take(self, number: str) -> bool:
        """Whether this run now has the device to itself. Where no lock can be made, nothing speaks against it."""
        path = self._folder / f".zero-regression-matrix-{self._backend}-{number}.lock"
        try:
            lock = _opened(path)
        except OSError:
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            return False
        self._held.append(lock)
        return True


def _opened(path: Path) -> int:
    """The file, made where it is missing. Opened for reading alone: it may be another user's, in a sticky folder."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o444))
    return os.open(path, flags)
