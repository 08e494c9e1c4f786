"""Records of one log, however many, folded into one frozen `Run`; and two logs, step by step, into a `Comparison`.

What is kept does not grow with the log: counts, extremes, and the course of the norm as at most `BLOCKS` means.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ci.audit.records import Raised, Record, Release, Scale, Setting, Step, Unread

BLOCKS = 128
KEPT = 32
"""How many different versions, settings and exceptions are kept."""

SAME_LOSS = 1e-6
SAME_NORM = 0.01
"""Relative. bf16 accumulation was seen to move the norm by 0.22 %, and four printed digits by 0.05 %."""

EXACT = math.log2(1.005)
"""How near the logarithm of a ratio of norms must be to a whole number. Two unrelated norms are with 1.4 % chance."""


@dataclass
class Values:
    """One value over all steps, added up while a log is folded. first_nan, first_inf: the step, from 1."""

    count: int = 0
    missing: int = 0
    nan: int = 0
    inf: int = 0
    zero: int = 0
    first_nan: int | None = None
    first_inf: int | None = None
    least: float = math.inf
    greatest: float = -math.inf
    first: float | None = None
    last: float | None = None

    def add(self, value: float | None, number: int) -> None:
        if value is None:
            self.missing += 1
            return
        self.count += 1
        if value - value != 0:  # nan or inf
            if math.isnan(value):
                self.nan += 1
                self.first_nan = number if self.first_nan is None else self.first_nan
            else:
                self.inf += 1
                self.first_inf = number if self.first_inf is None else self.first_inf
            return
        if self.first is None:
            self.first = value
        self.last = value
        if value < self.least:
            self.least = value
        if value > self.greatest:
            self.greatest = value
        if value == 0:
            self.zero += 1


@dataclass(frozen=True)
class Block:
    """Consecutive records with a positive finite norm: how many, and the means of the record's number and log(norm)."""

    count: int
    number: float
    log_norm: float


@dataclass(frozen=True)
class Run:
    """What one log says. steps: training records; numbered: the log names their steps."""

    steps: int
    numbered: bool
    first: int | None
    last: int | None
    loss: Values
    norm: Values
    course: tuple[Block, ...]
    overflows: int
    scales: tuple[float, float] | None
    releases: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, int | float | str]
    raised: tuple[str, ...]
    unread: int


@dataclass(frozen=True)
class Pair:
    """The records of one step in two logs."""

    number: int
    left: Step
    right: Step


@dataclass(frozen=True)
class Comparison:
    """Two logs, over the steps that both have.

    exact: by power of two, how many pairs of norms are that far apart (within EXACT); nearest: the same, rounded.
    equal_losses: pairs; of them unequal_norms have norms apart by more than SAME_NORM, zero_losses a loss of 0.
    """

    pairs: int
    with_norms: int
    first: Pair | None
    exact: Mapping[int, int]
    nearest: Mapping[int, int]
    equal_losses: int
    zero_losses: int
    unequal_norms: int
    first_unequal: Pair | None


@dataclass
class Folding:
    """A `Run` in the making."""

    steps: int = 0
    numbers: int = 0
    first: int | None = None
    last: int | None = None
    loss: Values = field(default_factory=Values)
    norm: Values = field(default_factory=Values)
    overflows: int = 0
    unread: int = 0
    scales: tuple[float, float] | None = None
    releases: dict[str, list[str]] = field(default_factory=dict)
    settings: dict[str, int | float | str] = field(default_factory=dict)
    raised: dict[str, None] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    size: int = 1
    pending: list[tuple[int, float]] = field(default_factory=list)

    def add(self, record: Record) -> Step | None:
        """Take a record in; gives back a training record, numbered by its place where the log has no number."""
        if isinstance(record, Step):
            return self._step(record)
        if isinstance(record, Scale):
            self._scale(record)
        elif isinstance(record, Unread):
            self.unread += 1
        elif isinstance(record, Release):
            known = self.releases.setdefault(record.package, [])
            if record.version not in known and len(known) < KEPT:
                known.append(record.version)
        elif isinstance(record, Setting):
            self.settings.setdefault(record.key, record.value)
        elif isinstance(record, Raised) and len(self.raised) < KEPT:
            self.raised[record.message] = None
        return None

    def _step(self, record: Step) -> Step:
        self.steps += 1
        number = record.number
        if number is None:
            number = self.steps
            record = record._replace(number=number)
        else:
            self.numbers += 1
        if self.first is None:
            self.first = number
        self.last = number
        self.loss.add(record.loss, number)
        norm = record.grad_norm
        self.norm.add(norm, number)
        if norm is not None and 0 < norm < math.inf:
            self.pending.append((self.steps, math.log(norm)))
            if len(self.pending) == self.size:
                self._block()
        return record

    def _scale(self, record: Scale) -> None:
        self.overflows += record.overflow
        told = [each for each in (record.before, record.after) if each is not None]
        if told:
            least, greatest = self.scales or (math.inf, -math.inf)
            self.scales = min(least, *told), max(greatest, *told)

    def _block(self) -> None:
        if self.pending:
            numbers, logs = zip(*self.pending, strict=True)
            count = len(self.pending)
            self.blocks.append(Block(count, sum(numbers) / count, sum(logs) / count))
            self.pending.clear()
        if len(self.blocks) == 2 * BLOCKS:
            halves = zip(islice(self.blocks, 0, None, 2), islice(self.blocks, 1, None, 2), strict=True)
            self.blocks = [_merged(one, other) for one, other in halves]
            self.size *= 2

    def done(self) -> Run:
        """The run so far."""
        self._block()
        return Run(
            steps=self.steps,
            numbered=self.numbers > 0,
            first=self.first,
            last=self.last,
            loss=self.loss,
            norm=self.norm,
            course=tuple(self.blocks),
            overflows=self.overflows,
            scales=self.scales,
            releases={package: tuple(versions) for package, versions in self.releases.items()},
            settings=self.settings,
            raised=tuple(self.raised),
            unread=self.unread,
        )


def _merged(one: Block, other: Block) -> Block:
    count = one.count + other.count
    return Block(
        count,
        (one.number * one.count + other.number * other.count) / count,
        (one.log_norm * one.count + other.log_norm * other.count) / count,
    )


def fold(records: Iterable[Record]) -> Run:
    """One log."""
    folding = Folding()
    for record in records:
        folding.add(record)
    return folding.done()


def compare(left: Iterable[Record], right: Iterable[Record]) -> tuple[Run, Run, Comparison]:
    """Two logs, each read once, side by side."""
    foldings = Folding(), Folding()
    steps = [_steps(records, folding) for records, folding in zip((left, right), foldings, strict=True)]
    comparison = _compared(_paired(*steps))
    return foldings[0].done(), foldings[1].done(), comparison


def _steps(records: Iterable[Record], folding: Folding) -> Iterator[Step]:
    for record in records:
        step = folding.add(record)
        if step is not None:
            yield step


def _paired(left: Iterator[Step], right: Iterator[Step]) -> Iterator[Pair]:
    """The steps that both have. A log that goes back, as after a resume, waits until the other is reached again."""
    one, other = next(left, None), next(right, None)
    while one is not None and other is not None:
        mine, theirs = one.number or 0, other.number or 0
        if mine == theirs:
            yield Pair(mine, one, other)
        # Both are advanced where they are equal.
        if mine <= theirs:
            one = next(left, None)
        if theirs <= mine:
            other = next(right, None)
    for rest in (left, right):
        for _ in rest:
            pass


def _compared(pairs: Iterable[Pair]) -> Comparison:
    count = with_norms = equal = zero = unequal = 0
    first = first_unequal = None
    exact: Counter[int] = Counter()
    nearest: Counter[int] = Counter()
    for pair in pairs:
        count += 1
        distance = _distance(pair)
        if distance is not None:
            with_norms += 1
            first = first or pair
            power = round(distance)
            nearest[power] += 1
            if abs(distance - power) <= EXACT:
                exact[power] += 1
        one, other = pair.left.loss, pair.right.loss
        if one is None or other is None or not math.isclose(one, other, rel_tol=SAME_LOSS):
            continue
        equal += 1
        zero += one == 0
        if distance is not None and abs(distance) > math.log2(1 + SAME_NORM):
            unequal += 1
            first_unequal = first_unequal or pair
    return Comparison(count, with_norms, first, exact, nearest, equal, zero, unequal, first_unequal)


def _distance(pair: Pair) -> float | None:
    """log2 of the left norm over the right one; None where either is not above 0, or not finite."""
    one, other = pair.left.grad_norm, pair.right.grad_norm
    if one is None or other is None or not (0 < one < math.inf and 0 < other < math.inf):
        return None
    return math.log2(one) - math.log2(other)
