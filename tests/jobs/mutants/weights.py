"""Mutants of the weights that ranks compute with, and of what must not move."""

from __future__ import annotations

from typing import Any

import torch

from tests.jobs.mutants.site import Moment, Mutant, Site


def _held(parameter: Any) -> torch.Tensor:
    """What this rank holds of a weight: its partition under ZeRO-3."""
    held: torch.Tensor = getattr(parameter, "ds_tensor", parameter).data
    return held


def _stale_on_one_rank(site: Site) -> None:
    parameter = next(p for name, p in site.trainable().items() if "weight" in name or "lora" in name)
    held: list[torch.Tensor] = []

    def note() -> None:
        held[:] = [_held(parameter).clone()]

    def put_back() -> None:
        if site.is_last_rank:
            _held(parameter).copy_(held[0])
            site.ran()

    site.around_step(before=note, after=put_back)


def _frozen_moved(site: Site) -> None:
    def move() -> None:
        for parameter in site.engine.module.parameters():
            if not parameter.requires_grad:
                with torch.no_grad():
                    _held(parameter).add_(2.0**-10)
                site.ran()

    site.around_step(after=move)


def _lora_frozen(site: Site) -> None:
    """One of LoRA's matrices gets no gradient."""
    one = next(name for name in site.trainable() if ".lora_A." in name)
    site.on_gradients(lambda name, gradient: torch.zeros_like(gradient) if name == one else None)


def _frozen_from_the_start(site: Site) -> None:
    """A parameter that ought to be trained is no longer asked for a gradient."""
    name = next(iter(site.trainable()))
    dict(site.engine.module.named_parameters())[name].requires_grad_(False)
    site.ran()


def _starts_elsewhere(site: Site) -> None:
    """One rank starts from other weights, and nobody sends it the right ones."""
    import deepspeed

    def not_sent(engine: Any, *args: Any, **kwargs: Any) -> None:
        if not site.is_last_rank:
            return
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.add_(2.0**-6)
        site.ran()

    deepspeed.DeepSpeedEngine._broadcast_model = not_sent


MUTANTS = (
    Mutant("weights-stale-on-one-rank", _stale_on_one_rank),
    Mutant("frozen-parameter-moved", _frozen_moved),
    Mutant("lora-matrix-frozen", _lora_frozen),
    Mutant("parameter-frozen", _frozen_from_the_start),
    Mutant("rank-starts-elsewhere", _starts_elsewhere, Moment.BEFORE),
)
