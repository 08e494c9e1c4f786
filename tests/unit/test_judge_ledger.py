"""Every entry of the shipped ledger: its exact symptom is a known defect, five tolerances beside it a regression.

The evidence is made up from the entries themselves (and, for crashes, from messages that real runs printed), so this
says that each entry means something precise, not that the library does it: tests/jobs measure that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from ci import ledger
from ci.judge import judge_cell
from ci.matrix import Defect, Effect, Matrix, load
from ci.plan import Cell, Selection, make_plan
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
GATHERED = "The size of tensor a (0) must match the size of tensor b (32) at non-singleton dimension 1"
IN_FLIGHT = " Parameter containing:\ntensor([], requires_grad=True) Cannot partition a param in flight"
MINIMUM = "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
EMPTY = (
    "{'id': 0, 'status': 'NOT_AVAILABLE', 'numel': 0, 'ds_numel': 0, 'shape': (0,), 'ds_shape': (0, 33), "
    "'requires_grad': True, 'grad_shape': None, 'persist': True, 'active_sub_modules': {0}, "
    "'ds_tensor.shape': torch.Size([0])}"
)
NO_ELEMENTS = "max(): Expected reduction dim to be specified for input.numel() == 0. Specify the reduction dim."
WEIGHTS_ONLY = (
    "Weights only load failed. This file can still be loaded, to do so you have two options\n\tWeightsUnpickler error: "
    "Unsupported global: GLOBAL deepspeed.utils.tensor_fragment.fragment_address was not an allowed global by default."
)
IN_FLIGHT_PARAMS = (
    "still have inflight params [{'id': 4, 'status': 'AVAILABLE', 'numel': 1089, 'ds_numel': 1089, 'shape': (33, 33), "
    "'ds_shape': (33, 33), 'requires_grad': True, 'grad_shape': None, 'persist': False, 'active_sub_modules': set(), "
    "'ds_tensor.shape': torch.Size([545])}]"
)
SURVEYED = ("0.15.2", "0.19.8")
"""Releases of DeepSpeed that surveys ran and no shipped stack pairs with report B's other pins."""
MESSAGES: Mapping[str, str] = {
    "checkpoint-weights-only-bf16": WEIGHTS_ONLY,
    "checkpoint-weights-only-zero": WEIGHTS_ONLY,
    "fp16-fused-static-without-timers": "'NoneType' object is not callable",
    "zero0-bf16-checkpoint-raises": "'FP16_UnfusedOptimizer' object has no attribute 'dp_process_group'",
    "zero12-backward-twice-raises": "'NoneType' object is not iterable",
    "zero12-empty-parameter": NO_ELEMENTS,
    "zero12-offload-empty-parameter": NO_ELEMENTS,
    "zero12-offload-overflow-never-ends": MINIMUM,
    "zero3-empty-parameter": EMPTY,
    "zero3-gathered-sum-backward": GATHERED,
    "zero3-gathered-sum-in-flight": IN_FLIGHT,
    "zero3-inflight-params": IN_FLIGHT_PARAMS,
    "zero3-inflight-params-some-steps": IN_FLIGHT_PARAMS,
    "zero3-keepalive-after": SUM.replace("12480", "96"),
    "zero3-keepalive-after-report-sizes": SUM,
    "zero3-keepalive-before-empty-sum": SUM,
    "zero3-keepalive-before-linear": LINEAR,
    "zero3-keepalive-unused-reduce": REDUCE,
    "zero3-l2-after": POW,
    "zero3-l2-before": POW,
    "zero3-trl-stale-trace": "pop from an empty deque",
}
"""What runs printed, by the entry that must match it (2 ranks, CPU, releases within the entry's bounds)."""


@cache
def shipped() -> Matrix:
    return load(ROOT / "matrix.yaml")


@cache
def planned(lane: str) -> tuple[tuple[Cell, str], ...]:
    """Every runnable cell of a lane's cases on every shipped stack, with the release of DeepSpeed there."""
    of_cpu = tuple(name for name, stack in shipped().stacks.items() if stack.backend == "cpu")
    plan = make_plan(shipped(), Selection(lane=lane, stacks=of_cpu))
    return tuple((cell, shipped().stacks[cell.stack].pins["deepspeed"]) for cell in plan.runnable)


def claiming(cell: Cell, release: str) -> tuple[Defect, ...]:
    return ledger.claiming(shipped().defects, cell, pins(cell, release), ())


def pins(cell: Cell, release: str) -> dict[str, str]:
    """What is installed in the cell's stack, with this release of DeepSpeed."""
    return {**shipped().stacks[cell.stack].pins, "deepspeed": release}


def claimed() -> list[tuple[Defect, Cell, str]]:
    """(entry, a cell of the pull-request lane it claims, its release): per entry the oldest and the newest release.

    Of an entry that no shipped stack shows, report B's cells at a release that surveys ran.
    """
    found = []
    lane = planned("pull-request")
    within_reach = [(cell, release, claiming(cell, release)) for cell, release in lane]
    of_report_b = [(cell, release) for release in SURVEYED for cell, _ in lane if cell.stack == "report-b"]
    surveyed = [(cell, release, claiming(cell, release)) for cell, release in of_report_b]
    for entry in shipped().defects:
        cells = within_reach if any(entry in by for _, _, by in within_reach) else surveyed
        mine = sorted((Version(release), cell.id) for cell, release, by in cells if entry in by)
        ends = {id_ for _, id_ in (*mine[:1], *mine[-1:])}
        found += [(entry, cell, release) for cell, release, by in cells if cell.id in ends and entry in by]
    return found


CLAIMED = claimed()
IDS = [f"{entry.id}-{cell.id}" for entry, cell, _ in CLAIMED]


def faults(cell: Cell, claiming: Sequence[Defect], moved: Mapping[str, float] | None = None) -> Faults:
    crash = next((entry for entry in claiming if entry.symptom.raises is not None), None)
    clip = cell.case.get("gradient_clipping", "unset")
    return Faults(
        claiming,
        moved or {},
        # Truth is about 2: a number or "binding" clips, the rest does not.
        clip=1.5 if clip not in ("unset", 0, "loose") else None,
        dynamic=cell.case.get("loss_scale", "static-128") != "static-128",
        raises=None if crash is None else MESSAGES[crash.id],
        steps=4,
        resumes=bool(cell.case.get("resume", False)),
    )


def judged(cell: Cell, release: str, defects: Sequence[Defect], shown: Faults) -> CellRecord:
    matrix = synthetic.matrix(defects)
    evidence = synthetic.evidence(cell, release, shown).model_copy(update={"pins": pins(cell, release)})
    return judge_cell(cell, evidence, matrix)


def test_every_entry_is_shown_by_a_cell_of_the_pull_request_lane() -> None:
    assert {entry.id for entry, _, _ in CLAIMED} == {entry.id for entry in shipped().defects}


def test_every_crash_has_the_message_of_a_real_run() -> None:
    crashes = {entry.id for entry in shipped().defects if entry.symptom.raises is not None}
    assert crashes == set(MESSAGES)


@pytest.mark.parametrize(("entry", "cell", "release"), CLAIMED, ids=IDS)
def test_the_exact_symptoms_of_all_claiming_entries_are_a_known_defect(entry: Defect, cell: Cell, release: str) -> None:
    claims = claiming(cell, release)
    found = judged(cell, release, shipped().defects, faults(cell, claims))
    assert found.verdict is Verdict.KNOWN_DEFECT, found.reason
    hidden = {each.id for each in claims if f"{each.id} could not be seen" in (found.reason or "")}
    assert not hidden or any(each.symptom.raises for each in claims)
    assert entry.id in {*found.defects, *hidden} and {*found.defects, *hidden} == {each.id for each in claims}


def test_no_cell_of_any_lane_is_claimed_by_entries_that_cannot_hold_together() -> None:
    seen = set()
    for lane in shipped().lanes:
        for cell, release in planned(lane):
            claims = claiming(cell, release)
            shown = faults(cell, claims)
            key = (tuple(entry.id for entry in claims), shown.clip, shown.dynamic)
            if not claims or key in seen:
                continue
            seen.add(key)
            found = judged(cell, release, shipped().defects, shown)
            assert found.verdict is Verdict.KNOWN_DEFECT, (cell.id, key, found.reason)
            hidden = {entry.id for entry in claims if shown.raises and not _shows_beside_a_crash(entry)}
            assert set(found.defects) == {entry.id for entry in claims} - hidden, cell.id


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
    if any(each.symptom.raises is not None for each in rest) and not _shows_beside_a_crash(entry):
        return  # the crash still comes first
    found = judged(cell, release, shipped().defects, faults(cell, rest))
    assert found.verdict is Verdict.FIXED_UPSTREAM, found.reason
    assert found.fixed == (entry.id,)


def _shows_beside_a_crash(entry: Defect) -> bool:
    return entry.symptom.raises is not None or "forward" in entry.symptom.effects


def _bound(entry: Defect, release: str) -> Defect:
    return entry.model_copy(update={"affects": {"deepspeed": f"<{release}"}})


def _changed(entry: Defect, check: str, equals: Any, times: Any) -> Defect:
    effect = Effect(equals=equals, times=times)
    return entry.model_copy(update={"symptom": entry.symptom.model_copy(update={check: effect})})
