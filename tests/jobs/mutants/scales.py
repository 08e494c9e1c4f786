"""Mutants of fp16's loss scale and of what an overflow step does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from tests.jobs.mutants.site import Moment, Mutant, Site


def _holder(wrapper: Any) -> Any:
    """What holds cur_scale."""
    for name in ("loss_scale_config", "loss_scaler"):
        if hasattr(getattr(wrapper, name, None), "cur_scale"):
            return getattr(wrapper, name)
    return wrapper


def _at_a_raise(factor: float, site: Site) -> None:
    """Where the scale would be raised it becomes the old one times factor."""
    holder = _holder(site.wrapper)
    held: list[float] = []

    def note() -> None:
        held[:] = [holder.cur_scale]

    def put() -> None:
        if holder.cur_scale > held[0]:
            holder.cur_scale = held[0] * factor
            site.ran()

    site.around_step(before=note, after=put)


def _overflow_applied(site: Site) -> None:
    """No gradient counts as overflowed, and no norm as invalid."""

    def never(original: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
        site.ran()
        return False

    for name, module in list(sys.modules.items()):
        if name.startswith("deepspeed.") and hasattr(module, "is_invalid_grad_norm"):
            site.replace(module, "is_invalid_grad_norm", never)
    if hasattr(site.wrapper, "has_overflow"):
        site.replace(site.wrapper, "has_overflow", never)
    if hasattr(site.wrapper, "overflow_checker"):
        site.replace(site.wrapper.overflow_checker, "check", never)


def _state_moved_by_an_overflow(site: Site) -> None:
    """A step that overflowed decays the momentum all the same."""

    def decay() -> None:
        if not getattr(site.wrapper, "overflow", False):
            return
        for state in site.inner.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"].mul_(0.9)
                site.ran()

    site.around_step(after=decay)


MUTANTS = (
    Mutant("scale-halved-at-a-raise", partial(_at_a_raise, 0.5)),
    Mutant("raise-missed", partial(_at_a_raise, 1.0)),
    Mutant("overflow-step-applied", _overflow_applied, Moment.MADE),
    Mutant("state-moved-by-an-overflow", _state_moved_by_an_overflow),
)
