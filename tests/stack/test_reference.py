"""The reference against definitions that do not use autograd: finite differences, and torch's own optimizers."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from tests.jobs import plain_optimizer, referee, reference
from tests.jobs.grpo import GrpoLora
from tests.jobs.recorder import MicroBatch, RankRecord, StepRecord
from tests.jobs.swift.grpo import SwiftGrpo
from tests.jobs.workload import DTYPES, generator, seed_weights


@dataclasses.dataclass(frozen=True)
class _Double(GrpoLora):
    """The workload in fp64, old log-probabilities fixed, so that its loss has a derivative to measure."""


def _workload(**case: object) -> _Double:
    return _Double({"dtype": "fp32", "num_iterations": 1, "beta": 0.0, **case}, seed=3)


def _model(workload: GrpoLora) -> torch.nn.Module:
    model = workload.build()
    seed_weights(model, workload)
    return model.double()


def _batches(workload: GrpoLora, model: torch.nn.Module, ranks: int, accumulation: int) -> list[list[MicroBatch]]:
    batches = []
    for rank in range(ranks):
        of_rank = []
        for index in range(accumulation):
            inputs = workload.micro_batch(rank, 0, index)
            with torch.no_grad():
                _, logprobs = workload.loss(model, inputs)
            assert logprobs is not None
            inputs["old_logprobs"] = logprobs.double()
            of_rank.append(MicroBatch(inputs, 0.0, None))
        batches.append(of_rank)
    return batches


def _given(gradient: torch.Tensor | None) -> torch.Tensor:
    assert gradient is not None
    return gradient


def _mean_loss(workload: GrpoLora, model: torch.nn.Module, batches: list[list[MicroBatch]]) -> float:
    """The training objective by its definition: mean over ranks and micro-batches, nothing else."""
    losses = [workload.loss(model, batch.inputs)[0] for of_rank in batches for batch in of_rank]
    return float(sum(losses)) / len(losses)


@pytest.mark.parametrize(("ranks", "accumulation", "beta"), [(1, 1, 0.0), (2, 4, 0.0), (4, 1, 0.0), (2, 2, 0.04)])
def test_gradient_equals_finite_differences(ranks: int, accumulation: int, beta: float) -> None:
    """Central differences along random unit directions. The log-softmax is fp32: its noise over the step is 5e-5."""
    workload = _workload(beta=beta)
    model = _model(workload)
    batches = _batches(workload, model, ranks, accumulation)
    found = reference.gradients(model, workload, batches)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert set(found.mean) == set(parameters)
    step = 3e-3
    for direction in range(3):
        along = {n: torch.randn(p.shape, generator=generator(direction, n)).double() for n, p in parameters.items()}
        size = math.sqrt(sum(float(d.pow(2).sum()) for d in along.values()))
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                for name, parameter in parameters.items():
                    parameter.add_(along[name] / size, alpha=sign * step)
                values.append(_mean_loss(workload, model, batches))
                for name, parameter in parameters.items():
                    parameter.sub_(along[name] / size, alpha=sign * step)
        measured = (values[0] - values[1]) / (2 * step)
        expected = sum(float((_given(found.mean[n]).double() * along[n]).sum()) for n in parameters) / size
        assert measured == pytest.approx(expected, rel=2e-3, abs=5e-5)


def test_last_micro_batch_is_what_each_ranks_last_one_contributes() -> None:
    workload = _workload()
    model = _model(workload)
    batches = _batches(workload, model, 2, 3)
    found = reference.gradients(model, workload, batches)
    only_last = reference.gradients(model, workload, [of_rank[-1:] for of_rank in batches])
    for name, gradient in found.last.items():
        torch.testing.assert_close(gradient, _given(only_last.mean[name]) / 3)


def test_fp16_scale_is_divided_out() -> None:
    workload = _workload()
    model = _model(workload).float()
    batches = _batches(workload, model, 1, 1)
    plain = reference.gradients(model, workload, batches)
    scaled = reference.gradients(model, workload, batches, scale=1024.0)
    for name, gradient in plain.mean.items():
        torch.testing.assert_close(gradient, scaled.mean[name], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("clip", [None, 0.0, 0.1, 5.0])
def test_clipping_is_torchs(clip: float | None) -> None:
    gradient = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([0.0, 4.0])}
    used = reference.scaled(gradient, reference.clip_coefficient(reference.norm(gradient), clip))
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in gradient]
    for parameter, value in zip(parameters, gradient.values(), strict=True):
        parameter.grad = value.clone()
    if clip:
        torch.nn.utils.clip_grad_norm_(parameters, clip)
    for parameter, value in zip(parameters, used.values(), strict=True):
        torch.testing.assert_close(parameter.grad, value)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_stepped_follows_torch_over_several_steps(optimizer: str) -> None:
    """From masters and moments alone, each single step equals the one inside torch's own run."""
    config = plain_optimizer.settings({"optimizer": optimizer})
    parameter = torch.nn.Parameter(torch.randn(7, generator=generator("start")))
    whole = plain_optimizer.build([parameter], config)
    for step in range(4):
        before = parameter.detach().clone()
        moments = {k: v.clone() for k, v in whole.state.get(parameter, {}).items() if k.startswith("exp_avg")}
        parameter.grad = torch.randn(7, generator=generator("gradient", step))
        whole.step()
        single = plain_optimizer.stepped(before, parameter.grad, moments, step, config).master
        assert torch.equal(single, parameter.detach())
        if optimizer == "adamw":
            ahead = plain_optimizer.stepped(before, parameter.grad, moments, step + 1, config).master
            assert not torch.allclose(ahead, parameter.detach(), rtol=0, atol=1e-5)


def test_tensor_error_is_relative_to_the_tensor_or_to_its_share_of_all() -> None:
    wanted = {"large": torch.tensor([3.0, 4.0]), "small": torch.tensor([0.0])}
    used = {"large": torch.tensor([3.0, 4.5]), "small": torch.tensor([0.5])}
    errors = reference.tensor_errors(used, wanted)
    assert errors["large"] == pytest.approx(0.1)
    assert errors["small"] == pytest.approx(0.5 / (5 / math.sqrt(2)))


def test_grams_give_the_error_against_any_factor() -> None:
    wanted = {"w": torch.randn(50, generator=generator("wanted"))}
    used = {"w": wanted["w"] * 0.25 + 1e-3 * torch.randn(50, generator=generator("noise"))}
    gram = reference.grams(used, wanted)["w"]
    for factor in (1.0, 0.25, 2.0):
        by_gram = math.sqrt(max(0.0, gram.gg - 2 * factor * gram.gr + factor**2 * gram.rr))
        assert by_gram == pytest.approx(float((used["w"].double() - factor * wanted["w"].double()).norm()), rel=1e-6)


SWIFT = {"dtype": "bf16", "gradient_accumulation_steps": 1, "beta": 0.0}


def dtypes_of_lora(workload: GrpoLora, held: torch.dtype) -> set[torch.dtype]:
    """Those in which the reference holds LoRA's matrices where the engine holds them in `held`."""
    lora = [name for name, parameter in workload.build().named_parameters() if parameter.requires_grad]
    model = reference.model_at(workload, None, dict.fromkeys(lora, held))
    assert {p.dtype for n, p in model.named_parameters() if n not in lora} == {DTYPES[workload.case["dtype"]]}
    return {p.dtype for n, p in model.named_parameters() if n in lora}


def test_the_reference_follows_a_wider_dtype_where_the_workload_says_so_and_no_narrower_one() -> None:
    assert dtypes_of_lora(SwiftGrpo(SWIFT, 3), torch.float32) == {torch.float32}
    assert dtypes_of_lora(SwiftGrpo({**SWIFT, "dtype": "fp32"}, 3), torch.bfloat16) == {torch.float32}
    assert dtypes_of_lora(GrpoLora(SWIFT, 3), torch.float32) == {torch.bfloat16}
    assert dtypes_of_lora(GrpoLora({**SWIFT, "dtype": "fp32"}, 3), torch.bfloat16) == {torch.float32}


@pytest.mark.parametrize(
    ("case", "held", "right"),
    [
        *(("bf16", "bf16", True), ("bf16", "fp32", True), ("fp32", "fp32", True), ("fp32", "bf16", False)),
        *(("fp32", "fp16", False), ("fp16", "bf16", False), ("bf16", "fp16", False)),
    ],
)
def test_a_weight_of_another_dtype_is_the_cast_master_only_if_it_is_no_narrower(
    case: str, held: str, right: bool
) -> None:
    master = torch.tensor([0.1, 1 / 3])
    step = StepRecord([], [], {"w": (0, master.to(DTYPES[held]))}, None, None, None, 1, [])
    rank = RankRecord(0, "", {}, {}, [], 0.0, "cpu", [], {})
    judged = reference._Referee(GrpoLora({**SWIFT, "dtype": case}, 3), [rank], None)
    said = "w: the weight computed with is not the cast master"
    assert judged._weights([step], {"w": master}) == ([] if right else [said])


@pytest.mark.parametrize(
    ("share", "right"),
    [
        (0.0, True),  # the schedule exists before the engine: its first step, in warm-up
        (1.0, True),  # it is made later (transformers 5): the optimizer's own
        (0.5, False),
    ],
)
def test_a_dummy_step_was_taken_at_the_rate_of_the_first_step_or_the_optimizers_own(share: float, right: bool) -> None:
    workload = SwiftGrpo({**SWIFT, "dtype": "fp32", "optimizer": "adamw"}, 3)
    assert workload.settings_at(0).lr == 0 < workload.settings().lr * workload.settings().weight_decay
    rank = RankRecord(0, "", {}, {}, [], 0.0, "cpu", [], {})
    judged = reference._Referee(workload, [rank], None)
    masters = {}
    for name, parameter in judged.model.named_parameters():
        settings = dataclasses.replace(workload.settings(name), lr=workload.settings(name).lr * share)
        seeded = parameter.detach()
        masters[name] = plain_optimizer.stepped(seeded, torch.zeros_like(seeded), {}, 0, settings).master
    moved = [f"{name}: the initial master is not the seeded weight" for name, m in masters.items() if bool(m.any())]
    assert judged._initial(judged.model, masters, steps_taken=1) == ([] if right else moved)
    assert judged._initial(judged.model, masters, steps_taken=0) == (moved if share else [])


def test_trainable_tensors_in_another_dtype_are_noted() -> None:
    dtypes = {"a": torch.bfloat16, "b": torch.float32, "buffer": torch.float32}
    record = RankRecord(0, "", {"a": (1,), "b": (1,)}, dtypes, [], 0.0, "cpu", [], {"notes": ["seen"]})
    noted = ["seen", "1 of 2 trainable tensors are held in torch.float32"]
    assert referee.notes([record, record], {"dtype": "bf16"}) == noted
    assert referee.notes([record], {"dtype": "fp32"}) == ["seen", "1 of 2 trainable tensors are held in torch.bfloat16"]


def test_seeded_weights_do_not_depend_on_the_order_of_construction() -> None:
    workload = _workload()
    first, second = workload.build(), workload.build()
    torch.manual_seed(5)
    seed_weights(first, workload)
    torch.manual_seed(6)
    seed_weights(second, workload)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = dataclasses.replace(workload, seed=4)
    seed_weights(second, other)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
