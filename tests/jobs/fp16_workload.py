"""The dense fp16 workload: a tiny two-layer network whose gradient norm is the size that its case asks for.

What an fp16 wrapper makes of a gradient depends on whether the norm, or half of it, is above the clip value. So the
loss is linear in the network's output and scaled, per step, to a norm that is known before anything runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tests.jobs import loss_scaling
from tests.jobs.workload import DTYPES, Workload, generator, seed_weights

INPUT, HIDDEN, OUTPUT, ROWS = 16, 32, 8, 8

NORMS = (1.45, 1.2, 1.3, 1.15, 1.35, 1.25)
"""Gradient norm of each step: above every clip value in use (1.0 and below), its half between 0.5 and 0.75.

So clipping binds at 1.0, 0.75 and 0.5; and where a gradient is halved on the way, it binds at 0.5 alone. The first is
the largest, hence "binding" (half of it) does not bind a halved gradient either.
"""

OVERFLOW_FACTOR = 1e8
"""What the loss of an overflow step is multiplied by: its gradients overflow fp16 whether or not they were scaled."""


class TwoLayers(torch.nn.Module):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """[rows, 16] -> [rows, 8], in the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(INPUT, HIDDEN)
        self.second = torch.nn.Linear(HIDDEN, OUTPUT)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(torch.tanh(self.first(rows)))
        return output


@dataclasses.dataclass(frozen=True)
class DenseFp16(Workload):
    """The engine path of the job fp16-optimizers."""

    def build(self) -> torch.nn.Module:
        return TwoLayers()

    def micro_batch(self, rank: int, step: int, index: int) -> dict[str, Any]:
        """An overflow step is one rank's alone: all ranks must agree on it."""
        rows, target = self._drawn(rank, step, index)
        factor = OVERFLOW_FACTOR if rank == 0 and loss_scaling.overflows_at(self.case, step) else 1.0
        return {"rows": rows, "target": target * (NORMS[step] / self._norm(step, index)), "factor": factor}

    def loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        output = model(batch["rows"].to(DTYPES[self.case["dtype"]]))
        return (output.float() * batch["target"]).mean() * batch["factor"], None

    def steps(self) -> int:
        return loss_scaling.STEPS[self.case["loss_scale"]]

    def _drawn(self, rank: int, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = generator("fp16", self.seed, rank, step, index)
        return torch.randn(ROWS, INPUT, generator=draw), torch.randn(ROWS, OUTPUT, generator=draw)

    def _norm(self, step: int, index: int) -> float:
        """Norm of the gradient that all ranks' targets, as drawn, have together at the seeded weights, in fp32."""
        model = self.build()
        seed_weights(model, self)
        world_size = int(self.case.get("world_size", 2))
        for rank in range(world_size):
            rows, target = self._drawn(rank, step, index)
            ((model(rows) * target).mean() / world_size).backward()
        return float(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm())
