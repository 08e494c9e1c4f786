"""What killed runs left running on this host: processes of this user, and containers of the engine here."""

from __future__ import annotations

from ci.errors import EnvironmentUnavailable
from ci.provision import container, engine, process


def end_leftovers() -> int:
    """End all of it; how many runs and containers it was. An engine that does not answer has none."""
    ended = process.sweep()
    try:
        return ended + container.sweep(engine.connect())
    except (EnvironmentUnavailable, *engine.LOST):
        return ended
