"""What changed between two runs, check by check: verdicts, defects, and values beyond tolerance.

Cells are paired by what they test. Two backends pair by everything but the backend; two runs of one stack each pair
by job and case, so that an old pin can be held against a new one. What is the same is not mentioned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ci.runrecord import CellRecord, Check, RunRecord, StepRecord

Key = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """One difference: where ("" for the runs themselves), what, and both sides as text."""

    cell: str
    what: str
    before: str
    after: str


def diff(before: RunRecord, after: RunRecord) -> list[Change]:
    """All differences, those of the pins first, then cell by cell in the order of the earlier run."""
    key = _pairing(before, after)
    old = {key(cell): cell for cell in before.cells}
    new = {key(cell): cell for cell in after.cells}
    changes = list(_pins(before, after))
    for name in [*old, *(name for name in new if name not in old)]:
        left, right = old.get(name), new.get(name)
        label = (left or right or before.cells[0]).id
        if left is None or right is None:
            there = ["absent" if cell is None else cell.verdict.value for cell in (left, right)]
            changes.append(Change(label, "cell", *there))
            continue
        changes.extend(_cell(label if left.id == right.id else f"{left.id} -> {right.id}", left, right))
    return changes


def _pairing(before: RunRecord, after: RunRecord) -> Callable[[CellRecord], Key]:
    """How cells of the two runs are matched."""
    left, right = ({cell.stack for cell in run.cells} for run in (before, after))
    skip_stack = len(left) == len(right) == 1 and left != right

    def key(cell: CellRecord) -> Key:
        _, stack, *rest = cell.id.split("/")
        return tuple(rest) if skip_stack else (stack, *rest)

    return key


def _pins(before: RunRecord, after: RunRecord) -> Iterator[Change]:
    left, right = sorted(before.stacks), sorted(after.stacks)
    pairs = [(stack, stack) for stack in left if stack in right]
    if not pairs and len(left) == len(right) == 1:
        pairs = [(left[0], right[0])]
    for one, other in pairs:
        pins, others = before.stacks[one], after.stacks[other]
        for package in sorted(pins.keys() | others.keys()):
            old, new = pins.get(package, "none"), others.get(package, "none")
            if old != new:
                label = one if one == other else f"{one} -> {other}"
                yield Change(f"stack {label}", package, old, new)


def _cell(label: str, left: CellRecord, right: CellRecord) -> Iterator[Change]:
    for what, mine, other in (("adapter", left.adapter, right.adapter), ("ds_config", left.ds_config, right.ds_config)):
        if mine != other:
            yield Change(label, what, mine or "the shipped one", other or "the shipped one")
    if left.verdict != right.verdict:
        yield Change(label, "verdict", left.verdict.value, right.verdict.value)
    for what, old, new in (
        ("defects", left.defects, right.defects),
        ("fixed upstream", left.fixed, right.fixed),
        ("corrections", left.corrections, right.corrections),
    ):
        if set(old) != set(new):
            yield Change(label, what, ", ".join(old) or "none", ", ".join(new) or "none")
    if left.verdict != right.verdict and left.reason != right.reason:
        yield Change(label, "reason", left.reason or "none", right.reason or "none")
    old_error, new_error = (
        cell.exception and f"{cell.exception.type}: {cell.exception.message}" for cell in (left, right)
    )
    if old_error != new_error:
        yield Change(label, "exception", old_error or "none", new_error or "none")
    if len(left.steps) != len(right.steps):
        yield Change(label, "steps", str(len(left.steps)), str(len(right.steps)))
    for position, (old_step, new_step) in enumerate(zip(left.steps, right.steps, strict=False), start=1):
        yield from _step(label, position, old_step, new_step)


def _step(label: str, position: int, left: StepRecord, right: StepRecord) -> Iterator[Change]:
    old, new = ({check.name: check for check in step.checks} for step in (left, right))
    for name in [*old, *(name for name in new if name not in old)]:
        one, other = old.get(name), new.get(name)
        if one is None or other is None or one.ok != other.ok or _moved(one, other):
            yield Change(label, f"step {position} {name}", _text(one), _text(other))


def _moved(one: Check, other: Check) -> bool:
    """Whether the value moved by more than the wider of the two tolerances, relative to the larger value.

    Where the value is itself an error (expected 0) the tolerance is absolute: two errors that both hold are alike.
    """
    if one.value is None or other.value is None:
        return one.value is not other.value
    if one.value == other.value or (math.isnan(one.value) and math.isnan(other.value)):
        return False
    if not math.isfinite(one.value) or not math.isfinite(other.value):
        return True
    allowed = max(one.tolerance or 0.0, other.tolerance or 0.0)
    size = max(abs(one.value), abs(other.value)) if one.expected or other.expected else 1.0
    return abs(one.value - other.value) > allowed * size


def _text(check: Check | None) -> str:
    if check is None:
        return "absent"
    if check.ok is None:
        return f"not judged ({check.reason})"
    value = "None" if check.value is None else f"{check.value:.6g}"
    return f"{value} ({'holds' if check.ok else 'fails'})"
