"""The sweep at work: batches of cells, one start of the ranks each, until the time is up and what failed is small.

Everything that ran is in the sweep's folder, so that a sweep that was cut short goes on where it was: the draw is the
same for the same seed, and a cell with evidence is not run again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci import cases, order, workers
from ci import evidence as evidence_lines
from ci.cases import Case
from ci.entries import Scalar
from ci.errors import EnvironmentUnavailable
from ci.evidence import Evidence
from ci.interrupts import Interrupts
from ci.matrix import Matrix
from ci.plan import Cell, PlannedStack
from ci.provision.runtime import Environment, Runtime
from ci.runrecord import EVIDENCE
from ci.stackrun import StackOrder
from ci.sweep.draw import draws
from ci.sweep.findings import Fold
from ci.sweep.signature import outcome

JOB = "engine-sweep"
BACKEND = "cpu"
BATCH = 24
"""Drawn cells a start: the import of the stack (8 s) is then a fifth of a batch."""
SHARE_OF_DRAWING = 0.8
"""Of the time; what is left belongs to making the last failures small."""


@dataclass(frozen=True)
class Place:
    """Where the cells run and where their evidence is kept."""

    runtime: Runtime
    environment: Environment
    stack: PlannedStack
    folder: Path


def cell_of(matrix: Matrix, stack: str, case: Case) -> Cell:
    """The cell of a case; its command repeats it without a lane."""
    job = matrix.jobs[JOB]
    return Cell(
        id=f"{BACKEND}/{stack}/{JOB}/{cases.name(job, case)}",
        backend=BACKEND,
        stack=stack,
        job=JOB,
        case=dict(case),
        world_size=int(case["world_size"]),
        timeout_s=job.timeout_s,
        gated=None,
        command=f"nox -s sweep -- --stack {stack} --case {written(matrix, case)}",
    )


def written(matrix: Matrix, case: Case) -> str:
    """The case as `--case` reads it."""
    return ",".join(f"{name}={cases.text(case[name])}" for name in cases.shown(matrix.jobs[JOB], case))


class Sweep:
    """Draws, runs, judges and shrinks in one stack."""

    def __init__(self, matrix: Matrix, place: Place, interrupts: Interrupts, say: Callable[[str], None]) -> None:
        self._matrix = matrix
        self._place = place
        self._interrupts = interrupts
        self._say = say
        self.job = matrix.jobs[JOB]
        self.fold = Fold(self.job)

    def run(self, seed: int, minutes: float) -> None:
        """Draw until most of the time is over, shrink until all of it is."""
        began = time.monotonic()
        stream = draws(self.job, seed)

        def left() -> float:
            return minutes * 60 - (time.monotonic() - began)

        while left() > 0:
            wanted = self.fold.wanted()
            drawing = left() > minutes * 60 * (1 - SHARE_OF_DRAWING)
            drawn = list(itertools.islice(stream, BATCH)) if drawing else []
            if not wanted and not drawn:
                break
            self._run([*wanted, *drawn], left())
            for case in drawn:
                if cases.name(self.job, case) in self.fold.outcomes:
                    self.fold.drawn(case)
            self.fold.wanted()
            self._tell(left())

    def only(self, given: Sequence[Case]) -> None:
        """Run these cases and no other; failures stay as they are."""
        self._run(given, float("inf"))
        for case in given:
            if cases.name(self.job, case) in self.fold.outcomes:
                self.fold.drawn(case)
        self.fold.wanted()

    def _tell(self, left: float) -> None:
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(self.fold.count().items()))
        still = sum(not finding.settled for finding in self.fold.findings)
        self._say(
            f"{sum(self.fold.count().values())} cells ({counts}); {len(self.fold.findings)} findings, "
            f"{still} of them not yet at their smallest; {max(0, left) / 60:.0f} min left"
        )

    def _run(self, given: Iterable[Case], limit_s: float) -> None:
        """Run what has no evidence yet, and judge all."""
        by_id: dict[str, tuple[Cell, Mapping[str, Scalar]]] = {}
        for case in given:
            cell = cell_of(self._matrix, self._place.stack.id, case)
            by_id[cell.id] = (cell, case)
        kept = self._evidence()
        missing = [cell for cell, _ in by_id.values() if cell.id not in kept]
        if missing:
            ended = self._start(missing, limit_s)
            kept = self._evidence()
            if ended and not any(cell.id in kept for cell in missing):
                raise EnvironmentUnavailable(f"no cell left evidence; see {self._place.folder / 'pytest.log'}")
        for cell_id, (cell, case) in by_id.items():
            if cell_id in kept:
                self.fold.ran(case, outcome(cell, kept[cell_id], self._matrix))

    def _evidence(self) -> Mapping[str, Evidence]:
        path = self._place.folder / EVIDENCE
        return evidence_lines.read(path).by_cell if path.exists() else {}

    def _start(self, cells: Sequence[Cell], limit_s: float) -> bool:
        """One start; ends with its last cell, at the limit of all its cells, or with the sweep's own time.

        Returns whether it ended by itself.
        """
        place = self._place
        order_file = place.folder / "order.json"
        order.write(order_file, order.build(BACKEND, self._matrix.backends[BACKEND], place.stack, cells))
        chosen = workers.choose(
            [cell.world_size for cell in cells], cores=workers.cores(), free_mb=workers.free_memory_mb()
        )
        whole = StackOrder(place.environment, cells, order_file, place.folder, chosen.count)
        began = time.monotonic()
        with self._interrupts.shield():
            running = place.runtime.start(place.environment, order_file, place.folder, chosen.count)
        try:
            while running.poll() is None and time.monotonic() - began < min(whole.limit_s, limit_s):
                self._interrupts.check()
                time.sleep(0.5)
        finally:
            ended = running.poll() is not None
            with self._interrupts.shield():
                running.terminate()
        return ended
