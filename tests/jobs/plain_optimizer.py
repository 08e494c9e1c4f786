"""The plain optimizers of a case: what its configuration asks for, and one step of it from given moments.

The step count, learning rate, betas and decay come from here for the engine and for the reference alike, never from
the engine: a wrapper that takes a step of its own must show.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
"""Per-element state of the optimizers in use; the step count is taken from the case, never from the engine."""


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
    """kind: "sgd" or "adamw" (torch's defaults), with a weight decay. momentum: of SGD."""

    kind: str
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0


@dataclasses.dataclass(frozen=True)
class Stepped:
    """What one plain step leaves: the master and, by name, the moments; fp32, shapes as given."""

    master: torch.Tensor
    moments: Mapping[str, torch.Tensor]


IN_TRANSFORMERS = {"adamw": "adamw_torch", "sgd": "sgd"}
"""transformers' name (`optim`) of each kind."""
FP16_LR = 2.0**-6
"""Small, so that the gradient norms of an fp16 case stay on their side of the clip value and of twice that value."""


def settings(case: Mapping[str, Any]) -> OptimizerSettings:
    """The settings of a case. Engine cases use SGD(lr=1) unless they are about AdamW or the loss scale of fp16.

    A case about overflow has momentum: its optimizer needs a state that an overflow step must leave alone.
    """
    if case.get("optimizer") == "adamw":
        return OptimizerSettings("adamw", lr=1e-3, weight_decay=0.01)
    if case.get("dtype") == "fp16":
        return OptimizerSettings("sgd", lr=FP16_LR, momentum=0.9 if case.get("loss_scale") == "overflow" else 0.0)
    return OptimizerSettings("sgd", lr=float(case.get("lr", 1.0)))


def build(
    parameters: Iterable[torch.nn.Parameter] | Iterable[dict[str, Any]], config: OptimizerSettings
) -> torch.optim.Optimizer:
    """The torch optimizer that a user of this configuration would hand to DeepSpeed.

    parameters: parameters, or groups of them with what differs there.
    """
    if config.kind == "adamw":
        return torch.optim.AdamW(
            parameters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


def stepped(
    master: torch.Tensor,
    gradient: torch.Tensor | None,
    moments: Mapping[str, torch.Tensor],
    steps_before: int,
    config: OptimizerSettings,
) -> Stepped:
    """The master and the moments after one plain step.

    gradient None: nothing is touched. moments: "exp_avg" and "exp_avg_sq", or "momentum_buffer", before the step;
    absent means 0.
    steps_before: optimizer steps already taken. Source: torch.optim.SGD and torch.optim.AdamW themselves.
    """
    if gradient is None:
        return Stepped(master.clone(), {})
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = gradient.clone()
    optimizer = build([parameter], config)
    if config.kind == "adamw":
        optimizer.state[parameter] = {
            "step": torch.tensor(float(steps_before)),
            "exp_avg": moments.get("exp_avg", torch.zeros_like(master)).clone(),
            "exp_avg_sq": moments.get("exp_avg_sq", torch.zeros_like(master)).clone(),
        }
    if config.momentum:
        buffer = moments.get("momentum_buffer", torch.zeros_like(master))
        optimizer.state[parameter] = {"momentum_buffer": buffer.clone()}
    optimizer.step()
    state = optimizer.state[parameter]
    return Stepped(parameter.detach(), {name: state[name] for name in MOMENTS if name in state})
