"""Every entry of the shipped ledger: its exact symptom is a known defect, five tolerances beside it a regression.

The evidence is made up from the entries themselves (and, for crashes, from messages that real runs printed), so this
says that each entry means something precise, not that the library does it: tests/jobs measure that.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ci import cases, ledger
from ci.judge import judge_cell
from ci.matrix import Defect, Effect, Matrix, Scalar, load
from ci.plan import Cell
from ci.runrecord import CellRecord, Verdict
from tests.unit import synthetic
from tests.unit.synthetic import TOLERANCE, Faults

ROOT = Path(__file__).parents[2]

INVALID = "returned an invalid gradient at index"
SUM = f"Function SumBackward0 {INVALID} 0 - got [0] but expected shape compatible with [12480]"
POW = f"Function PowBackward0 {INVALID} 0 - got [0] but expected shape compatible with [96, 32]"
LINEAR = (
    f"Function LinearFunctionForZeroStage3Backward {INVALID} 1 - got [96, 32] but expected shape compatible with [0]"
)
REDUCE = "0 != 96 Cannot reduce scatter gradients whose size is not same as the params"
MESSAGES: Mapping[str, str] = {
    "zero3-keepalive-after": SUM,
    "zero3-keepalive-before-empty-sum": SUM,
    "zero3-keepalive-before-linear": LINEAR,
    "zero3-keepalive-unused-reduce": REDUCE,
    "zero3-l2-after": POW,
    "zero3-l2-before": POW,
}
"""What runs printed, by the entry that must match it (2 ranks, CPU, releases within the entry's bounds)."""


@cache
def shipped() -> Matrix:
    return load(ROOT / "matrix.yaml")


def releases() -> list[str]:
    return sorted({stack.pins["deepspeed"] for stack in shipped().stacks.values()}, key=Version)


def cells(entry: Defect) -> Iterator[Cell]:
    """Cells that an entry claims: of every job, the default case moved to each combination that `where` allows."""
    for name, job in shipped().jobs.items():
        if not set(entry.where) - {"job"} <= set(job.keys) or entry.where.get("job", name) != name:
            continue
        choices = [
            [value for value in job.keys[key].allowed if value not in ("integer", "number")]
            + [value for value in _listed(entry.where.get(key)) if isinstance(value, (int, float))]
            + [value for value in (1, 4) if "integer" in job.keys[key].allowed]
            if key in entry.where
            else [None]
            for key in job.ordered_keys
        ]
        for values in itertools.product(*choices):
            given = {key: value for key, value in zip(job.ordered_keys, values, strict=True) if value is not None}
            given = {**{key: job.keys[key].allowed[0] for key in job.keys if _free(job.keys[key])}, **given}
            case = cases.resolve(job, given)
            if cases.matches(entry.where, {**case, "job": name}):
                yield synthetic.cell_of(name, case)


def _listed(wanted: Scalar | tuple[Scalar, ...] | None) -> tuple[Scalar, ...]:
    return wanted if isinstance(wanted, tuple) else () if wanted is None else (wanted,)


def _free(key: Any) -> bool:
    return key.default is None and not key.default_when


def claimed() -> list[tuple[Defect, Cell, str]]:
    """(entry, a cell it claims, a release): a few cells, in the first and the last affected release of the stacks."""
    found = []
    for entry in shipped().defects:
        affected = [release for release in releases() if ledger.affects(entry, {"deepspeed": release})]
        for release in dict.fromkeys((*affected[:1], *affected[-1:])):
            found += [(entry, cell, release) for cell in itertools.islice(cells(entry), 2)]
    return found


CLAIMED = claimed()
IDS = [f"{entry.id}-{release}-{number}" for number, (entry, _, release) in enumerate(CLAIMED)]


def faults(cell: Cell, claiming: Sequence[Defect], moved: Mapping[str, float] | None = None) -> Faults:
    crash = next((entry for entry in claiming if entry.symptom.raises is not None), None)
    clip = cell.case.get("gradient_clipping", "unset")
    return Faults(
        claiming,
        moved or {},
        # Truth is about 2: a number or "binding" clips, the rest does not.
        clip=1.5 if clip not in ("unset", 0, "loose") else None,
        dynamic=any(word in str(cell.case.get("loss_scale")) for word in ("dynamic", "init4")),
        raises=None if crash is None else MESSAGES[crash.id],
        steps=4,
    )


def judged(cell: Cell, release: str, defects: Sequence[Defect], shown: Faults) -> CellRecord:
    matrix = synthetic.matrix(defects)
    return judge_cell(cell, synthetic.evidence(cell, release, shown), matrix)


def claiming(cell: Cell, release: str) -> tuple[Defect, ...]:
    return ledger.claiming(shipped().defects, cell, {"deepspeed": release}, ())


def test_every_entry_affects_a_shipped_stack_and_can_claim_a_cell() -> None:
    assert {entry.id for entry, _, _ in CLAIMED} == {entry.id for entry in shipped().defects}


def test_every_crash_has_the_message_of_a_real_run() -> None:
    crashes = {entry.id for entry in shipped().defects if entry.symptom.raises is not None}
    assert crashes == set(MESSAGES)


@pytest.mark.parametrize(("entry", "cell", "release"), CLAIMED, ids=IDS)
def test_the_exact_symptoms_of_all_claiming_entries_are_a_known_defect(entry: Defect, cell: Cell, release: str) -> None:
    claims = claiming(cell, release)
    found = judged(cell, release, shipped().defects, faults(cell, claims))
    assert found.verdict is Verdict.KNOWN_DEFECT, found.reason
    assert entry.id in found.defects and set(found.defects) == {each.id for each in claims}


@pytest.mark.parametrize(("entry", "cell", "release"), CLAIMED, ids=IDS)
def test_five_tolerances_beside_the_symptom_is_a_regression(entry: Defect, cell: Cell, release: str) -> None:
    claims = claiming(cell, release)
    exact = faults(cell, claims)
    if entry.symptom.raises is not None:
        other = "the size of tensor a (64) must match the size of tensor b (32)"
        assert (
            judged(cell, release, shipped().defects, dataclasses.replace(exact, raises=other)).verdict
            is Verdict.REGRESSION
        )
        return
    for check in entry.symptom.effects:
        tolerance = {"update": 1e-6, "consistency": 1.0}.get(check, entry.tolerance or TOLERANCE)
        for sign in (1, -1) if check in ("reported_norm", "gradient_used") else (1,):
            moved = judged(
                cell, release, shipped().defects, dataclasses.replace(exact, moved={check: sign * 5 * tolerance})
            )
            assert moved.verdict is Verdict.REGRESSION, (check, moved.reason)


@pytest.mark.parametrize(("entry", "cell", "release"), CLAIMED, ids=IDS)
def test_a_wrong_ledger_fails_the_run(entry: Defect, cell: Cell, release: str) -> None:
    shown = faults(cell, claiming(cell, release))
    others = [each for each in shipped().defects if each is not entry]
    wrong = {"removed": others, "bound moved below": [*others, _bound(entry, release)]}
    for check, effect in entry.symptom.effects.items():
        if effect.times is not None:
            wrong[f"factor of {check} changed"] = [*others, _changed(entry, check, effect.equals, 3.0)]
        if effect.equals is not None:
            other = "last_micro_batch" if effect.equals == "without_experts" else "without_experts"
            wrong[f"equals of {check} changed"] = [*others, _changed(entry, check, other, effect.times)]
    if entry.symptom.raises is not None:
        symptom = entry.symptom.model_copy(update={"raises": "something else"})
        wrong["message changed"] = [*others, entry.model_copy(update={"symptom": symptom})]
    for name, defects in wrong.items():
        assert judged(cell, release, defects, shown).verdict is Verdict.REGRESSION, name


@pytest.mark.parametrize(("entry", "cell", "release"), CLAIMED, ids=IDS)
def test_a_release_that_mends_an_entry_says_so(entry: Defect, cell: Cell, release: str) -> None:
    claims = claiming(cell, release)
    rest = [each for each in claims if each is not entry]
    if entry.symptom.raises is None and any(each.symptom.raises is not None for each in rest):
        return  # the crash still comes first
    found = judged(cell, release, shipped().defects, faults(cell, rest))
    assert found.verdict is Verdict.FIXED_UPSTREAM, found.reason
    assert found.fixed == (entry.id,)


def _bound(entry: Defect, release: str) -> Defect:
    return entry.model_copy(update={"affects": {"deepspeed": f"<{release}"}})


def _changed(entry: Defect, check: str, equals: Any, times: Any) -> Defect:
    effect = Effect(equals=equals, times=times)
    return entry.model_copy(update={"symptom": entry.symptom.model_copy(update={check: effect})})
