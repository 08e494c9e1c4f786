"""Mutants of the forward pass."""

from __future__ import annotations

from typing import Any

import torch

from tests.jobs.mutants.site import Mutant, Site


def _in_bf16(site: Site) -> None:
    """The outputs of every linear layer are rounded to bf16."""

    def rounded(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        site.ran()
        return output.to(torch.bfloat16).to(output.dtype)

    for module in site.engine.module.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(rounded)


def _dropout_left_on(site: Site) -> None:
    """One part in a hundred of every linear layer's outputs is dropped."""

    def dropped(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        site.ran()
        return torch.nn.functional.dropout(output, p=0.01, training=True)

    for module in site.engine.module.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(dropped)


def _other_weights(site: Site) -> None:
    """One rank's first linear layer gives 1 % more than its weights say."""
    one = next(module for module in site.engine.module.modules() if isinstance(module, torch.nn.Linear))

    def larger(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if not site.is_last_rank:
            return None
        site.ran()
        return output * 1.01

    one.register_forward_hook(larger)


MUTANTS = (
    Mutant("forward-in-bf16", _in_bf16),
    Mutant("dropout-left-on", _dropout_left_on),
    Mutant("rank-computes-with-other-weights", _other_weights),
)
