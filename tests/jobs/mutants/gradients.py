"""Mutants of the gradients: how they are made, accumulated, reduced and handed over."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.jobs.mutants.site import Moment, Mutant, Site

SECOND_MICRO_BATCH = 1
COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_to_all_single")


def _scale_a_micro_batch(factor: float, site: Site) -> None:
    site.on_gradients(lambda _, gradient: gradient * factor if site.micro_batch == SECOND_MICRO_BATCH else None)


def _scale_a_rank(factor: float, site: Site) -> None:
    site.on_gradients(lambda _, gradient: gradient * factor if site.is_last_rank else None)


def _scale_all(factor: Callable[[Site], float], site: Site) -> None:
    site.on_gradients(lambda _, gradient: gradient * factor(site))


def _a_step_old(site: Site) -> None:
    held: dict[tuple[str, int], torch.Tensor] = {}

    def change(name: str, gradient: torch.Tensor) -> torch.Tensor | None:
        if not site.is_last_rank:
            return None
        old = held.get((name, site.micro_batch))
        held[name, site.micro_batch] = gradient.detach().clone()
        return old

    site.on_gradients(change)


def _first_micro_batch_lost(site: Site) -> None:
    site.on_gradients(lambda _, gradient: torch.zeros_like(gradient) if site.micro_batch == 0 else None)


def _sign_flipped(site: Site) -> None:
    one = next(iter(site.trainable()))
    site.on_gradients(lambda name, gradient: -gradient if name == one else None)


def _overflow_replaced_by_zero(site: Site) -> None:
    def change(_: str, gradient: torch.Tensor) -> torch.Tensor | None:
        if bool(torch.isfinite(gradient).all()):
            return None
        return torch.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)

    site.on_gradients(change)


def _swapped(site: Site) -> None:
    """Two tensors of one shape: at ZeRO-0 and 3 every rank holds the same part of both."""

    def swap() -> None:
        held = {fragment.name: fragment for fragment in site.fragments() if fragment.numel}
        one, other = held.get("first.bias"), held.get("middle.bias")
        if one is None or other is None or one.master.grad is None or other.master.grad is None:
            return
        first = one.master.grad.reshape(-1)[one.offset : one.offset + one.numel]
        second = other.master.grad.reshape(-1)[other.offset : other.offset + other.numel]
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)
        site.ran()

    site.around_inner_step(before=swap)


def _padding_filled(site: Site) -> None:
    from tests.jobs import masters

    def fill() -> None:
        for master, mask in masters.padding(site.fragments()).values():
            if master.grad is not None and bool(mask.any()):
                master.grad.reshape(-1)[mask] = 1.0
                site.ran()

    site.around_inner_step(before=fill)


def _collective_in_bf16(site: Site) -> None:
    def rounded(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and tensor.numel() > 1:
                tensor.copy_(tensor.to(torch.bfloat16).float())
                site.ran()
        return original(*args, **kwargs)

    for name in COLLECTIVES:
        site.replace(torch.distributed, name, rounded)


def _not_reduced(site: Site) -> None:
    def left_out(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        site.ran()

    site.replace(site.engine, "allreduce_gradients", left_out)


def _clipped_one_by_one(site: Site) -> None:
    """Each tensor is clipped by its own norm."""
    bound = 0.25

    def clip() -> None:
        for gradient in site.handed():
            size = float(gradient.norm())
            if size > bound:
                gradient.mul_(bound / size)
                site.ran()

    site.around_inner_step(before=clip)


MUTANTS = (
    Mutant("micro-batch-times-1.05", partial(_scale_a_micro_batch, 1.05)),
    Mutant("micro-batch-times-1.01", partial(_scale_a_micro_batch, 1.01)),
    Mutant("first-micro-batch-lost", _first_micro_batch_lost),
    Mutant("rank-gradient-dropped", partial(_scale_a_rank, 0.0)),
    Mutant("rank-gradient-doubled", partial(_scale_a_rank, 2.0)),
    Mutant("rank-gradient-a-step-old", _a_step_old),
    Mutant("sum-instead-of-mean", partial(_scale_all, lambda site: site.world_size)),
    Mutant("mean-taken-twice", partial(_scale_all, lambda site: 1 / site.world_size)),
    Mutant("accumulation-not-divided", partial(_scale_all, lambda site: site.accumulation)),
    Mutant("accumulation-divided-twice", partial(_scale_all, lambda site: 1 / site.accumulation)),
    Mutant("sign-flipped", _sign_flipped),
    Mutant("two-gradients-swapped", _swapped, Moment.LISTENED),
    Mutant("overflow-replaced-by-zero", _overflow_replaced_by_zero),
    Mutant("padding-handed-over", _padding_filled, Moment.LISTENED),
    Mutant("collective-in-bf16", _collective_in_bf16, Moment.BEFORE),
    Mutant("gradient-not-reduced", _not_reduced),
    Mutant("clipped-tensor-by-tensor", _clipped_one_by_one, Moment.LISTENED),
)
