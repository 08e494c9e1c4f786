"""How one release behaves in a few cells: run in an overlay, judged, and reduced to what can be compared.

An outcome is compared between releases, so it holds what a defect determines (which checks fail in which steps, by
which factor) and nothing that noise does. It does not depend on the ledger; the verdict that stands beside it does.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path

from rich.console import Console

from ci import evidence as evidence_lines
from ci import order
from ci.evidence import Evidence, Record
from ci.execute import problem
from ci.interrupts import Interrupts
from ci.judge import judge_cell
from ci.matrix import CHECKS, Matrix
from ci.plan import Cell, PlannedStack
from ci.progress import ProgressView
from ci.provision.overlay import NotUsable, OverlayRuntime, Release
from ci.provision.runtime import Environment, Recipe
from ci.runrecord import EVIDENCE, CellRecord, Check, Verdict
from ci.stackrun import StackOrder, run_stack

REPEAT = "/repeat"
MORE_REPEATS = 3
"""What a cell that disagrees with itself is run again."""
STEADY = 0.8
"""The share of repeats that have to agree for an outcome to count."""
CLOSE = 0.05
"""Factors nearer to each other than this are the same: rounding moves them between releases, a defect by more."""

Factor = float | str | None


class Kind(StrEnum):
    """What can become of a cell at one release. The first three are behaviours, the others are none."""

    PASSES = "passes"
    WRONG = "wrong numbers"
    RAISES = "raises"
    COULD_NOT_RUN = "could not run"
    UNSTEADY = "disagrees with itself"
    NOT_IMPORTED = "cannot be imported"
    NOT_INSTALLED = "cannot be installed"


BEHAVIOURS = frozenset({Kind.PASSES, Kind.WRONG, Kind.RAISES})


class Failing(Record):
    """A check that fails. factors: a step each, measured / expected; None where the check holds in that step.

    "none": the library reported no number. "differs": wrong by no factor (tensors differ, or 0 was expected).
    """

    check: str
    factors: tuple[Factor, ...]


class Outcome(Record):
    """A cell at a release. exception: type and message, numbers masked. why: where it is no behaviour."""

    kind: Kind
    failing: tuple[Failing, ...] = ()
    exception: str | None = None
    why: str | None = None
    verdict: Verdict | None = None
    defects: tuple[str, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether this says how the release trains, and not that it could not be tried."""
        return self.kind in BEHAVIOURS


class Probe(Record):
    """An outcome with the numbers it comes from. reported, used: measured / expected of every step."""

    outcome: Outcome
    reported: tuple[Factor, ...] = ()
    used: tuple[Factor, ...] = ()
    runs: int = 0


def without_places(message: str) -> str:
    """A message without the folders of this machine: what stands in an environment from its site-packages on."""
    inside = re.sub(r"/[^\s'\"()]*/(?:site|dist)-packages/", "", message)
    return re.sub(r"(?<![\w.])/(?:[^\s'\"()/]+/)+(?=[^\s'\"()/])", "", inside)


def masked(message: str) -> str:
    """The first line of a message without folders, addresses and numbers."""
    first = without_places(message.strip().partition("\n")[0])
    return re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?", "#", first, flags=re.IGNORECASE)[:200]


def factor(check: Check) -> Factor:
    """measured / expected, to three digits."""
    if check.value is None:
        return "none"
    if not check.expected:
        return "differs"
    found = float(f"{check.value / check.expected:.3g}")
    # The norm may be right and the tensors not.
    return "differs" if check.ok is False and found == 1 else found


def _factors(record: CellRecord, name: str, *, failed_only: bool) -> tuple[Factor, ...]:
    found: list[Factor] = []
    for step in record.steps:
        check = next((check for check in step.checks if check.name == name), None)
        shown = check is not None and check.ok is not None and not (failed_only and check.ok)
        found.append(factor(check) if check is not None and shown else None)
    return tuple(found)


def outcome_of(record: CellRecord) -> Outcome:
    """What a judged cell says about its release."""
    if record.verdict in (Verdict.ERROR, Verdict.NOT_RUN):
        why = without_places((record.reason or "").partition("\n")[0])
        return Outcome(kind=Kind.COULD_NOT_RUN, why=why, verdict=record.verdict)
    failed = {check.name for step in record.steps for check in step.checks if check.ok is False}
    failing = tuple(
        Failing(check=name, factors=_factors(record, name, failed_only=True)) for name in CHECKS if name in failed
    )
    kind, exception = (Kind.WRONG if failing else Kind.PASSES), None
    if record.exception is not None:
        kind, exception = Kind.RAISES, f"{record.exception.type}: {masked(record.exception.message)}"
    return Outcome(kind=kind, failing=failing, exception=exception, verdict=record.verdict, defects=record.defects)


def _near(one: Factor, other: Factor) -> bool:
    if isinstance(one, str) or isinstance(other, str) or one is None or other is None:
        return one == other
    return one == other or abs(one - other) <= CLOSE * max(abs(one), abs(other))


def alike(one: Outcome, other: Outcome) -> bool:
    """Whether two outcomes are the same behaviour."""
    if (one.kind, one.exception) != (other.kind, other.exception) or len(one.failing) != len(other.failing):
        return False
    return all(
        mine.check == its.check and len(mine.factors) == len(its.factors) and all(map(_near, mine.factors, its.factors))
        for mine, its in zip(one.failing, other.failing, strict=True)
    )


def settled(records: Sequence[CellRecord]) -> Probe | None:
    """The probe of a cell's repeats; None where they disagree and nothing prevails."""
    outcomes = [outcome_of(record) for record in records]
    for record, outcome in zip(records, outcomes, strict=True):
        if sum(alike(outcome, other) for other in outcomes) >= STEADY * len(outcomes):
            return Probe(
                outcome=outcome,
                reported=_factors(record, "reported_norm", failed_only=False),
                used=_factors(record, "gradient_used", failed_only=False),
                runs=len(records),
            )
    return None


class Prober:
    """Probes releases of one package on one stack; what was run before is read, not run again."""

    def __init__(
        self,
        matrix: Matrix,
        runtime: OverlayRuntime,
        recipe: Recipe,
        stack: PlannedStack,
        out: Path,
        interrupts: Interrupts,
        console: Console,
    ) -> None:
        self._matrix = matrix
        self._runtime = runtime
        self._recipe = recipe
        self._stack = stack
        self._out = out.resolve()
        self._interrupts = interrupts
        self._console = console

    def probe(self, release: Release, cells: Sequence[Cell], repeats: int) -> dict[str, Probe]:
        """The probe of each cell (by id) at this release."""
        try:
            environment = self._runtime.overlay(self._recipe, release)
        except NotUsable as error:
            kind = Kind.NOT_INSTALLED if error.what == "installed" else Kind.NOT_IMPORTED
            why = without_places(error.why)
            return {cell.id: Probe(outcome=Outcome(kind=kind, why=why)) for cell in cells}
        pins = {**self._stack.pins, release.package: environment.packages[release.package]}
        stack = dataclasses.replace(self._stack, pins=pins)
        found = self._settled(environment, stack, cells, repeats)
        unsettled = [cell for cell in cells if found[cell.id] is None]
        if unsettled:
            found |= self._settled(environment, stack, unsettled, repeats + MORE_REPEATS)
        none = Probe(
            outcome=Outcome(kind=Kind.UNSTEADY, why=f"{repeats + MORE_REPEATS} runs do not agree"),
            runs=repeats + MORE_REPEATS,
        )
        return {cell: probe or none for cell, probe in found.items()}

    def _settled(
        self, environment: Environment, stack: PlannedStack, cells: Sequence[Cell], repeats: int
    ) -> dict[str, Probe | None]:
        by_cell = {
            cell.id: [dataclasses.replace(cell, id=f"{cell.id}{REPEAT}{number}") for number in range(1, repeats + 1)]
            for cell in cells
        }
        evidence = self._evidence(environment, stack, [repeat for group in by_cell.values() for repeat in group])
        return {
            cell: settled([judge_cell(repeat, evidence[repeat.id], self._matrix, stack.pins) for repeat in group])
            for cell, group in by_cell.items()
        }

    def _evidence(self, environment: Environment, stack: PlannedStack, cells: Sequence[Cell]) -> Mapping[str, Evidence]:
        """Evidence of all these cells, those without any run now."""
        assert environment.folder is not None  # an overlay always has one
        folder = self._out / environment.folder.name
        folder.mkdir(parents=True, exist_ok=True)
        kept = evidence_lines.read(folder / EVIDENCE).by_cell
        missing = [cell for cell in cells if cell.id not in kept]
        if not missing:
            return kept
        reason = self._run(environment, stack, missing, folder)
        kept = evidence_lines.read(folder / EVIDENCE).by_cell
        accelerator = self._matrix.backends[cells[0].backend].accelerator
        return {cell.id: kept.get(cell.id) or problem(cell, accelerator, reason) for cell in cells}

    def _run(self, environment: Environment, stack: PlannedStack, cells: Sequence[Cell], folder: Path) -> str:
        order_file = folder / "order.json"
        order.write(order_file, order.build(cells[0].backend, self._matrix.backends[cells[0].backend], stack, cells))
        by_id = {cell.id: cell for cell in cells}

        def judge(evidence: Evidence) -> CellRecord:
            return judge_cell(by_id[evidence.cell], evidence, self._matrix, stack.pins)

        # One worker: a release's ranks must not wait for another's, or a limit would speak about the host.
        what = StackOrder(environment, cells, order_file, folder, workers=1)
        with ProgressView(self._console, stack.id, [cell.job for cell in cells], 1) as view:
            return run_stack(what, self._runtime, view, self._interrupts, judge, _never)


def _never(record: CellRecord) -> str | None:
    return None


def numbers(factors: Iterable[Factor]) -> str:
    """Factors as a person reads them: 65500, 1, 1.53e-05; a dash where the check was not judged."""
    return " ".join("-" if each is None else each if isinstance(each, str) else f"{each:g}" for each in factors)
