"""An interrupt at any moment ends the run tidily: nothing left running, nothing half written.

SIGINT, SIGTERM and SIGHUP raise `Interrupted` in the main thread, once: the tidying up that follows takes a bounded
time, so a second Ctrl-C (a terminal sends it to nox and to us) must not break it off half way. A shielded part, such
as starting a container and noting its id, ends before the interrupt is raised.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from ci.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Turns the first signal into `Interrupted`; use as a context manager around a whole run."""

    def __init__(self) -> None:
        self.received: str | None = None
        self._raised = False
        self._shields = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in SIGNALS:
            # `nohup` sets SIGHUP to be ignored: somebody wants the run to outlive the terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
        if not self._shields:
            self._raise_once()

    def _raise_once(self) -> None:
        if self.received is not None and not self._raised:
            self._raised = True
            raise Interrupted(f"interrupted by {self.received}")

    def check(self) -> None:
        """Raise an interrupt that some library swallowed on its way here."""
        if self.received is not None:
            self._raised = True
            raise Interrupted(f"interrupted by {self.received}")

    @contextlib.contextmanager
    def shield(self) -> Iterator[None]:
        """Hold an interrupt back until the end of the block; it is raised there, unless the block itself failed."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if not self._shields:
            self._raise_once()
