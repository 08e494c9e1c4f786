"""One stack at work: start pytest in its runtime, follow the evidence, and end it when it must end.

Every wait here has an end, and every way out goes through `terminate`. What comes back is why a cell that left no
evidence left none; nothing is judged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ci.errors import EnvironmentUnavailable
from ci.evidence import Evidence
from ci.follow import Follower
from ci.interrupts import Interrupts
from ci.plan import Cell
from ci.progress import ProgressView, brief_time
from ci.provision.runtime import Environment, Runtime
from ci.runfolder import SPACE_TO_GO_ON_MB, free_mb
from ci.runrecord import EVIDENCE, CellRecord

START_ALLOWANCE_S = 300
"""Import of a stack on a busy machine (18-50 s were measured), a first start without byte code, a slow engine."""
LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class StackOrder:
    """What is to run in one provisioned stack. inputs: a user's own files, as copied into the run's folder."""

    environment: Environment
    cells: Sequence[Cell]
    order_file: Path
    folder: Path
    workers: int
    inputs: Sequence[Path] = ()
    extra_env: Mapping[str, str] = field(default_factory=dict)

    @property
    def limit_s(self) -> float:
        """When the whole stack is overdue. Each case has its own limit inside; this one is for what hangs outside."""
        limits = [cell.timeout_s for cell in self.cells]
        return sum(limits) / self.workers + max(limits, default=0) + START_ALLOWANCE_S


def last_line(log: Path) -> str:
    """The last line of pytest's output that says something; its closing count of tests says nothing."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip() and not line.startswith("=")), "")


def _ended(code: int, log: Path) -> str:
    said = last_line(log)
    tail = f"; the last line of {log.name}: {said}" if said else ""
    if code in (137, -9):
        return f"the process was killed from outside (out of memory?){tail}"
    if code in (143, -15):
        return f"the process was ended from outside (SIGTERM: an engine or a host that shuts down?){tail}"
    return f"pytest ended with exit code {code} and left no evidence of this cell{tail}"


def run_stack(
    order: StackOrder,
    runtime: Runtime,
    view: ProgressView,
    interrupts: Interrupts,
    judge: Callable[[Evidence], CellRecord],
    stop_after: Callable[[CellRecord], str | None],
    *,
    limit_s: float | None = None,
) -> str:
    """Run to the end and say why a cell without evidence has none.

    stop_after: a reason to stop the whole run after this cell, or None.
    """
    evidence_file = order.folder / EVIDENCE
    follower = Follower(evidence_file, order.folder / "logs")
    waiting = [cell.id for cell in order.cells]
    limit = order.limit_s if limit_s is None else limit_s
    started = time.monotonic()
    reason: str | None = None
    running = None

    def take() -> str | None:
        stop = None
        for evidence in follower.fresh():
            if evidence.cell not in waiting:
                continue
            waiting.remove(evidence.cell)
            record = judge(evidence)
            view.finished(record.id, record.job, evidence.duration_s or 0.0, str(record.verdict))
            stop = stop or stop_after(record)
        view.running(follower.begun(waiting))
        return stop

    try:
        with interrupts.shield():
            running = runtime.start(
                order.environment, order.order_file, order.folder, order.workers, order.extra_env, order.inputs
            )
        while True:
            code = running.poll()
            reason = take()
            if code is not None or reason is not None:
                break
            interrupts.check()
            if time.monotonic() - started > limit:
                reason = f"the stack was stopped after {brief_time(limit)}, the limit of all its cases together"
                break
            if free_mb(order.folder) < SPACE_TO_GO_ON_MB:
                done = len(order.cells) - len(waiting)
                raise EnvironmentUnavailable(
                    f"the disk is full: {order.folder} has {free_mb(order.folder)} MB left. "
                    f"Kept: the evidence of {done} of {len(order.cells)} cells of {order.environment.stack}"
                )
            time.sleep(LOOK_EVERY_S)
    finally:
        if running is not None:
            with interrupts.shield():
                running.terminate()
    late = take()
    if reason is None and code is not None:
        reason = late or _ended(code, running.log_path)
    return reason or ""
