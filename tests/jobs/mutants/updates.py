"""Mutants of the optimizer step: below the recorder, which has seen the right gradient handed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.jobs import masters
from tests.jobs.mutants.site import Mutant, Site

ONE = "weight"
"""A part of the name of the parameters of which the first is chosen."""


def _change_one(site: Site, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """change(before, after) is what one parameter's master becomes in each step."""
    name = next(name for name in site.trainable() if ONE in name)
    held: list[tuple[masters.Fragment, torch.Tensor]] = []

    def part(fragment: masters.Fragment) -> torch.Tensor:
        return fragment.master.detach().reshape(-1)[fragment.offset : fragment.offset + fragment.numel]

    def note() -> None:
        mine = [f for f in site.fragments() if f.name == name and f.numel and f.master.grad is not None]
        held[:] = [(fragment, part(fragment).clone()) for fragment in mine]

    def put() -> None:
        for fragment, before in held:
            part(fragment).copy_(change(before, part(fragment)))
            site.ran()

    site.around_inner_step(before=note, after=put)


def _left_out(site: Site) -> None:
    _change_one(site, lambda before, after: before)


def _updated_twice(site: Site) -> None:
    _change_one(site, lambda before, after: after + (after - before))


def _stepped_twice(site: Site) -> None:
    step = site.inner.step

    def twice(*args: Any, **kwargs: Any) -> Any:
        step(*args, **kwargs)
        site.ran()
        return step(*args, **kwargs)

    site.inner.step = twice


def _from_the_previous_gradient(site: Site) -> None:
    previous: dict[int, torch.Tensor] = {}

    def put_back() -> None:
        for index, gradient in enumerate(site.handed()):
            current = gradient.clone()
            if index in previous:
                gradient.copy_(previous[index])
                site.ran()
            previous[index] = current

    site.around_inner_step(before=put_back)


def _rounded_masters(site: Site) -> None:
    def round_all() -> None:
        for group in site.inner.param_groups:
            for master in group["params"]:
                master.data.copy_(master.data.to(torch.bfloat16).float())
                site.ran()

    site.around_inner_step(after=round_all)


def _group_option(site: Site, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Change the options of the parameter groups for the time of each step.

    All of them, although ZeRO-1 and 2 let the optimizer see one group after the other.
    """
    groups = list(site.inner.param_groups)

    def changed_step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        held = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        change(groups)
        if any(
            group[key] != value for group, options in zip(groups, held, strict=True) for key, value in options.items()
        ):
            site.ran()
        try:
            return original(*args, **kwargs)
        finally:
            for group, options in zip(groups, held, strict=True):
                group.update(options)

    site.replace(site.inner, "step", changed_step)


def _no_decay(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        group["weight_decay"] = 0.0


def _decay_for_all(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        group["weight_decay"] = max(each["weight_decay"] for each in groups)


def _rate_off(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        group["lr"] *= 1.005


def _rates_exchanged(groups: list[dict[str, Any]]) -> None:
    rates = [group["lr"] for group in groups]
    for group, rate in zip(groups, reversed(rates), strict=True):
        group["lr"] = rate


def _other_beta(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        group["betas"] = (group["betas"][0], 0.99)


def _options(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Site], None]:
    return lambda site: _group_option(site, change)


def _zero_grad_skipped(site: Site) -> None:
    def skipped(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        site.ran()

    for holder in (site.engine, site.wrapper):
        site.replace(holder, "zero_grad", skipped)


MUTANTS = (
    Mutant("parameter-not-updated", _left_out),
    Mutant("parameter-updated-twice", _updated_twice),
    Mutant("optimizer-stepped-twice", _stepped_twice),
    Mutant("updated-from-previous-gradient", _from_the_previous_gradient),
    Mutant("masters-rounded-to-bf16", _rounded_masters),
    Mutant("weight-decay-dropped", _options(_no_decay)),
    Mutant("weight-decay-on-every-group", _options(_decay_for_all)),
    Mutant("learning-rate-off-by-half-a-percent", _options(_rate_off)),
    Mutant("learning-rates-exchanged", _options(_rates_exchanged)),
    Mutant("another-beta2", _options(_other_beta)),
    Mutant("zero-grad-skipped", _zero_grad_skipped),
)
