"""Mutants of the gradient norm: how it is taken, what of it is reported, and which bound it meets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from tests.jobs.mutants.site import Mutant, Site

Taken = Callable[..., Any]


def _taken(site: Site, change: Callable[..., Any]) -> None:
    """change(original, gradients, *rest, **options) runs where a wrapper takes the norm of its gradients."""
    if hasattr(site.wrapper, "get_grad_norm_direct"):
        site.replace(site.wrapper, "get_grad_norm_direct", change)
    else:
        from deepspeed.runtime.fp16 import unfused_optimizer

        site.replace(unfused_optimizer, "get_weight_norm", change)


def _own_shard_only(site: Site) -> None:
    import deepspeed.comm as dist

    def alone(original: Taken, *args: Any, **kwargs: Any) -> Any:
        reduce = dist.all_reduce
        dist.all_reduce = lambda *_, **__: site.ran()
        try:
            return original(*args, **kwargs)
        finally:
            dist.all_reduce = reduce

    _taken(site, alone)


def _without_the_smallest(site: Site) -> None:
    def fewer(original: Taken, gradients: Sequence[torch.Tensor], *rest: Any, **options: Any) -> Any:
        smallest = min(range(len(gradients)), key=lambda index: float(gradients[index].float().norm()))
        kept = [index for index in range(len(gradients)) if index != smallest]
        site.ran()
        rest = tuple([each[index] for index in kept] if isinstance(each, list) else each for each in rest)
        return original([gradients[index] for index in kept], *rest, **options)

    _taken(site, fewer)


def _padding_counted(site: Site) -> None:
    """What lies in the padding, as large as any gradient, is one more tensor of the norm."""

    def more(original: Taken, gradients: Sequence[torch.Tensor], *rest: Any, **options: Any) -> Any:
        site.ran()
        padding = torch.full_like(gradients[0], float(gradients[0].float().abs().mean()))
        rest = tuple([*each, each[0]] if isinstance(each, list) else each for each in rest)
        return original([*gradients, padding], *rest, **options)

    _taken(site, more)


def _infinity_norm(site: Site) -> None:
    def largest(original: Taken, *args: Any, **kwargs: Any) -> Any:
        site.ran()
        return original(*args, **{**kwargs, "norm_type": math.inf})

    _taken(site, largest)


def _reported(site: Site, change: Callable[[float], float | None]) -> None:
    """Change what the engine reports after a step; None leaves it."""

    def report() -> None:
        norm = site.engine.get_global_grad_norm()
        changed = None if norm is None else change(float(norm))
        if changed is not None:
            site.engine._global_grad_norm = changed
            site.ran()

    site.around_step(after=report)


def _after_clipping(site: Site) -> None:
    _reported(site, lambda norm: min(norm, float(site.engine.gradient_clipping())))


def _of_the_step_before(site: Site) -> None:
    held: list[float] = []

    def old(norm: float) -> float | None:
        held.append(norm)
        return held[-2] if len(held) > 1 else None

    _reported(site, old)


def _ranks_differ(site: Site) -> None:
    _reported(site, lambda norm: norm * 1.001 if site.is_last_rank else None)


def _times(factor: float, site: Site) -> None:
    _reported(site, lambda norm: norm * factor)


def _bound_times(factor: float, site: Site) -> None:
    """Every clip bound of the step, times a factor."""

    def other_bound(original: Taken, *args: Any, **kwargs: Any) -> Any:
        site.ran()
        bound = site.wrapper.clip_grad
        site.wrapper.clip_grad = bound * factor
        try:
            return original(*args, **kwargs)
        finally:
            site.wrapper.clip_grad = bound

    def other_setting(original: Taken, *args: Any, **kwargs: Any) -> Any:
        site.ran()
        return original(*args, **kwargs) * factor

    if hasattr(site.wrapper, "unscale_and_clip_grads"):
        site.replace(site.wrapper, "unscale_and_clip_grads", other_bound)
    else:
        site.replace(site.engine, "gradient_clipping", other_setting)


MUTANTS = (
    Mutant("norm-of-own-shard", _own_shard_only),
    Mutant("norm-without-smallest-tensor", _without_the_smallest),
    Mutant("norm-with-padding", _padding_counted),
    Mutant("infinity-norm", _infinity_norm),
    Mutant("norm-after-clipping", _after_clipping),
    Mutant("norm-of-the-step-before", _of_the_step_before),
    Mutant("norm-times-scale", partial(_times, 65536.0)),
    Mutant("ranks-report-different-norms", _ranks_differ),
    Mutant("clip-bound-doubled", partial(_bound_times, 2.0)),
    Mutant("clip-left-out", partial(_bound_times, 0.0)),
)
