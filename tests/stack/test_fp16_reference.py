"""fp16 in the reference: a plain, right run is clean, and what must not happen on an overflow step is found."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from tests.jobs import loss_scaling, plain_optimizer, reference
from tests.jobs.evidence import Step
from tests.jobs.fp16_workload import NORMS, DenseFp16
from tests.jobs.recorder import MicroBatch, Piece, RankRecord, StepRecord
from tests.jobs.workload import seed_weights

WRAPPER = "FP16_UnfusedOptimizer"
OVERFLOWED = loss_scaling.OVERFLOW_STEPS[0]


def workload(kind: str = "overflow", clip: str = "unset") -> DenseFp16:
    case = {"dtype": "fp16", "loss_scale": kind, "gradient_clipping": clip, "world_size": 1, "optimizer": "unfused"}
    return DenseFp16(case, seed=1)


def plain_run(case: DenseFp16, clip: float | None) -> RankRecord:
    """What a right wrapper would have let the recorder see: scaled backward in fp16, fp32 masters, dynamic scale."""
    seeded = case.build()
    seed_weights(seeded, case)
    masters = {name: parameter.detach().clone() for name, parameter in seeded.named_parameters()}
    settings = plain_optimizer.settings(case.case)
    state: dict[str, dict[str, torch.Tensor]] = {name: {} for name in masters}
    section = loss_scaling.SECTIONS[case.case["loss_scale"]]
    scale = float(section["loss_scale"] or 2 ** section["initial_scale_power"])
    steps: list[StepRecord] = []
    for index in range(case.steps()):
        model = case.build().half()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
        batch = case.micro_batch(0, index, 0)
        loss, _ = case.loss(model, batch)
        (loss * scale).backward()
        gradients: dict[str, torch.Tensor | None] = {
            n: p.grad.float() / scale for n, p in model.named_parameters() if p.grad is not None
        }
        overflow = any(g is not None and not bool(g.isfinite().all()) for g in gradients.values())
        true = reference.norm(gradients)
        used = reference.scaled(gradients, reference.clip_coefficient(true, clip))
        pieces = []
        for name, master in masters.items():
            gradient = None if overflow else used[name]
            after, kept = master, state[name]
            if gradient is not None:
                after = plain_optimizer.stepped(master, gradient, state[name], index, settings).master
                if settings.momentum:
                    buffer = state[name].get("momentum_buffer", torch.zeros_like(master))
                    kept = {"momentum_buffer": buffer * settings.momentum + gradient}
            handed = {} if gradient is None else {k: v.reshape(-1) for k, v in state[name].items()}
            flat = None if gradient is None else gradient.reshape(-1)
            pieces.append(
                Piece(
                    name,
                    0,
                    master.reshape(-1),
                    after.reshape(-1),
                    flat,
                    handed,
                    {k: v.reshape(-1).clone() for k, v in kept.items()},
                )
            )
            masters[name], state[name] = after, kept
        history = [loss_scaling.overflows_at(case.case, step) for step in range(index + 1)]
        scale_after = loss_scaling.expected(case.case, WRAPPER, scale, history)
        weights = {name: (0, master.reshape(-1).half()) for name, master in masters.items()}
        kept_batch = [MicroBatch(batch, float(loss.detach()), None)]
        reported = float("inf") if overflow else true
        steps.append(StepRecord(kept_batch, pieces, weights, reported, scale, scale_after, 0 if overflow else 1, []))
        scale = scale_after or scale
    shapes = {name: tuple(master.shape) for name, master in masters.items()}
    return RankRecord(0, WRAPPER, shapes, {}, steps, 0.0, "cpu", [], {})


def steps_of(record: RankRecord, case: DenseFp16, clip: float | None) -> list[Step]:
    return list(reference.steps(case, [record], clip))


@pytest.mark.parametrize("kind", list(loss_scaling.SECTIONS))
@pytest.mark.parametrize("clip", [None, 0.5, 0.75])
def test_a_right_run_is_clean_at_every_scale(kind: str, clip: float | None) -> None:
    case = workload(kind)
    found = steps_of(plain_run(case, clip), case, clip)
    assert [step.overflow for step in found] == [loss_scaling.overflows_at(case.case, i) for i in range(case.steps())]
    for step in found:
        assert step.consistency == ()
        assert step.loss_error == 0
        assert step.loss_scale_after == step.loss_scale_expected
        if not step.overflow:
            assert step.gradient_error is not None and step.gradient_error < 1e-6
            assert step.update_error is not None and step.update_error < 1e-6
            assert step.grad_norm_true == pytest.approx(NORMS[step.index], rel=0.02)
        else:
            assert set(step.not_judged) == {"reported_norm", "gradient_used", "update"}


def moved_master(step: StepRecord) -> None:
    step.pieces[0].master_after = step.pieces[0].master_after.nextafter(torch.tensor(9.0))


def moved_moment(step: StepRecord) -> None:
    step.pieces[0].state_after["momentum_buffer"] = step.pieces[0].state_after["momentum_buffer"] * 0.9


def stepped(step: StepRecord) -> None:
    step.inner_steps = 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (moved_master, "moved on an overflow step"),
        (moved_moment, "momentum_buffer moved on an overflow step"),
        (stepped, "the inner optimizer was stepped on an overflow step"),
    ],
)
def test_nothing_may_move_on_an_overflow_step(fault: Callable[[StepRecord], None], words: str) -> None:
    case = workload()
    record = copy.deepcopy(plain_run(case, None))
    fault(record.steps[OVERFLOWED])
    assert any(words in violation for violation in steps_of(record, case, None)[OVERFLOWED].consistency)


def test_a_dynamic_scale_that_stands_still_is_found_in_the_last_step() -> None:
    case = workload("dynamic-window2")
    record = plain_run(case, None)
    for step in record.steps:
        step.loss_scale_before = step.loss_scale_after = 128.0
    found = steps_of(record, case, None)
    assert any("never moved" in violation for violation in found[-1].consistency)
    assert found[2].loss_scale_after != found[2].loss_scale_expected


def test_norms_keep_their_distance_from_every_clip_value() -> None:
    """Neither the norm nor half of it may come near a clip value, or the prediction of a halved step is a coin toss."""
    for norm in NORMS:
        for clip in (0.5, 0.75, 1.0):
            assert abs(norm - clip) > 0.1
            assert abs(norm / 2 - clip) > 0.02
