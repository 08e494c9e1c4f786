"""What the ranks of the ZeRO corrections' tests run: a small engine beside plain PyTorch, step by step.

No cell can ask for a branch that is used in the first micro-batch alone, an offloaded optimizer or several backward
calls in a step; here a schedule says for every backward call which branches of the model take part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import deepspeed
import torch

from tests.jobs import corrections, engine, shims
from tests.jobs.launcher import RankContext
from tests.jobs.workload import generator

LR = 0.5
INPUTS = 6
OUTPUTS = {"a": 5, "b": 7, "c": 3}
"""None of them divides evenly among two ranks: partitions have padding."""
TOLERANCE = 1e-5

Schedule = Sequence[Sequence[Sequence[str]]]
"""Optimizer steps of micro-batches of backward calls; a call is the branches it uses, "ab"."""


class Branches(torch.nn.Module):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """Independent linear layers; the loss is the sum of those that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleDict({name: torch.nn.Linear(INPUTS, size) for name, size in OUTPUTS.items()})
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator("branch", name)))

    def forward(self, inputs: torch.Tensor, used: str) -> torch.Tensor:
        """A scalar. inputs: [B, INPUTS]."""
        losses: list[torch.Tensor] = [self.branches[name](inputs).square().mean() for name in used]
        return torch.stack(losses).sum()


def inputs(rank: int, *where: int) -> torch.Tensor:
    """[2, INPUTS], its own for every rank and backward call."""
    return torch.randn(2, INPUTS, generator=generator("inputs", rank, *where))


class Plain:
    """The same training in one process: plain SGD on the mean gradient of all ranks."""

    def __init__(self, world_size: int, accumulation: int, clip: float) -> None:
        self.model = Branches()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.share = 1.0 / (world_size * accumulation)
        self.world_size, self.clip = world_size, clip

    def step(self, index: int, micro_batches: Sequence[Sequence[str]]) -> float:
        """One optimizer step; returns the gradient norm before clipping."""
        self.optimizer.zero_grad()
        for rank in range(self.world_size):
            for micro, calls in enumerate(micro_batches):
                for call, used in enumerate(calls):
                    (self.model(inputs(rank, index, micro, call), used) * self.share).backward()
        limit = self.clip or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        self.optimizer.step()
        return norm


def config(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of deepspeed.initialize. payload: zero (its section), accumulation, clip (0: none)."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": payload.get("accumulation", 1),
        "gradient_clipping": payload.get("clip", 0.0),
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **payload["zero"]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2000,
    }


def start(context: RankContext) -> None:
    """Ranks as a case has them, with the corrections of the payload."""
    engine.assert_preloaded()
    shims.apply_common("cpu")
    shims.wait_for_every_gather("cpu", {"zero_stage": context.payload["zero"].get("stage", 0)})
    corrections.apply(context.payload["corrections"])
    engine.init_distributed(context, "gloo")


def follows_plain_training(context: RankContext) -> None:
    """Every norm and every weight of the schedule equals plain PyTorch's."""
    payload = context.payload
    start(context)
    settings = config(payload)
    if settings["zero_optimization"].get("stage") == 3:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Branches.__new__(Branches)
            torch.nn.Module.__init__(model)
            model.branches = torch.nn.ModuleDict({n: torch.nn.Linear(INPUTS, size) for n, size in OUTPUTS.items()})
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator("branch", name)))
    else:
        model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    trained, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=settings
    )
    plain = Plain(context.world_size, settings["gradient_accumulation_steps"], payload.get("clip", 0.0))
    for index, micro_batches in enumerate(payload["schedule"]):
        for micro, calls in enumerate(micro_batches):
            for call, used in enumerate(calls):
                trained.backward(trained(inputs(context.rank, index, micro, call), used))
            trained.step()
        compare(trained, plain, plain.step(index, micro_batches), index)


def compare(trained: Any, plain: Plain, norm: float, index: int) -> None:
    """Raises AssertionError where the engine is not where plain training is."""
    reported = trained.get_global_grad_norm()
    faults = []
    if reported is None or not abs(float(reported) - norm) <= TOLERANCE * norm:
        faults.append(f"reports {reported}, true {norm}")
    for name, parameter in trained.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found = parameter.detach().clone()
        wanted = plain.model.get_parameter(name)
        error = float((found - wanted).abs().max())
        if not error <= TOLERANCE:
            faults.append(f"{name} is off by {error}")
    assert not faults, f"step {index}: {'; '.join(faults)}"
