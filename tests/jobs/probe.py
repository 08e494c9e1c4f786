"""Before the first case: is this the place that the cases are about?

A training that falls back to the CPU, to fewer devices or to another toolkit is right and proves nothing. So as many
ranks as the largest case has look at accelerator, devices, driver and toolkit, and carry out one collective
(`probe_rank`). What they find goes into the evidence of every case; where they do not find what the order says, no
case runs.

Standard library only: this half runs in pytest, which imports no torch.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.jobs import bodies
from tests.jobs.evidence import Probe
from tests.jobs.launcher import Launcher
from tests.jobs.order import Order

LIMIT_S = 300.0
"""With the import of the stack, which the first ranks wait for: 6 s (quiet) to 90 s (busy machine, no byte code)."""


class Failed(Exception):
    """This is not the place, or its ranks do not reach each other; the message is the problem of every case."""


def run(order: Order, launcher: Launcher, workdir: Path, log: Path) -> Probe:
    """Look, with a rank per device that the largest case needs. workdir: empty. Raises Failed."""
    world_size = max(cell.world_size for cell in order.cells)
    outcome = launcher.run(
        bodies.probe,
        world_size=world_size,
        workdir=workdir,
        log=log,
        timeout_s=LIMIT_S,
        payload={"backend": dict(order.backend)},
    )
    if outcome.problem is not None:
        raise Failed(f"before the first case: {outcome.problem}")
    found = [json.loads((workdir / f"rank{rank}.probe.json").read_text()) for rank in range(world_size)]
    return Probe(
        accelerator=found[0]["accelerator"],
        communication=found[0]["communication"],
        world_size=world_size,
        devices=tuple(rank["device"] for rank in found),
        versions=found[0]["versions"],
        all_reduce=found[0]["all_reduce"],
    )
