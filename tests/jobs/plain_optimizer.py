"""The plain optimizers of a case: what its configuration asks for, and one step of it from given moments.

The step count, learning rate, betas and decay come from here for the engine and for the reference alike, never from
the engine: a wrapper that takes a step of its own must show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """kind: "sgd" (lr 1, no momentum, no decay) or "adamw" (torch's defaults and a weight decay)."""

    kind: str
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0


def settings(case: Mapping[str, Any]) -> OptimizerSettings:
    """The settings of a case. Engine cases use SGD(lr=1) unless they are about AdamW."""
    if case.get("optimizer") == "adamw":
        return OptimizerSettings("adamw", lr=1e-3, weight_decay=0.01)
    return OptimizerSettings("sgd", lr=float(case.get("lr", 1.0)))


def build(parameters: Iterable[torch.nn.Parameter], config: OptimizerSettings) -> torch.optim.Optimizer:
    """The torch optimizer that a user of this configuration would hand to DeepSpeed."""
    if config.kind == "adamw":
        return torch.optim.AdamW(
            parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
    return torch.optim.SGD(parameters, lr=config.lr)


def stepped(
    master: torch.Tensor,
    gradient: torch.Tensor | None,
    moments: Mapping[str, torch.Tensor],
    steps_before: int,
    config: OptimizerSettings,
) -> torch.Tensor:
    """The master after one plain step, fp32, same shape.

    gradient None: the parameter is not touched. moments: "exp_avg" and "exp_avg_sq" before the step, absent means 0.
    steps_before: optimizer steps already taken. Source: torch.optim.SGD and torch.optim.AdamW themselves.
    """
    if gradient is None:
        return master.clone()
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = gradient.clone()
    optimizer = build([parameter], config)
    if config.kind == "adamw":
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps_before)),
            "exp_avg": moments.get("exp_avg", torch.zeros_like(master)).clone(),
            "exp_avg_sq": moments.get("exp_avg_sq", torch.zeros_like(master)).clone(),
        }
    optimizer.step()
    return parameter.detach()
