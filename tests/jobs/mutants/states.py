"""Mutants of what the optimizer keeps from one step to the next."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.jobs.mutants.site import Mutant, Site


def _moments_of_the_step(site: Site, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change AdamW's moments as the step that made them ends, before anything has looked at them."""

    def put() -> None:
        for state in site.inner.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state:
                    state[name].copy_(change(state[name]))
                    site.ran()

    site.around_inner_step(after=put)


def _counted_ahead(site: Site) -> None:
    """The optimizer has counted one step more than it took, as a wrapper's dummy step makes it."""
    counted: list[None] = []

    def ahead() -> None:
        if counted:
            return
        for state in site.inner.state.values():
            if "step" in state:
                state["step"] += 1
                site.ran()
        counted.append(None)

    site.around_inner_step(after=ahead)


def _lost_between_steps(site: Site) -> None:
    """The moments are lost before every step but the first."""

    def lose() -> None:
        for state in site.inner.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if name in state and bool(state[name].any()):
                    state[name].zero_()
                    site.ran()

    site.around_step(before=lose)


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).to(tensor.dtype)


MUTANTS = (
    Mutant("moments-lost-between-steps", _lost_between_steps),
    Mutant("moments-kept-in-bf16", partial(_moments_of_the_step, change=_rounded)),
    Mutant("moments-never-kept", partial(_moments_of_the_step, change=torch.zeros_like)),
    Mutant("step-count-ahead", _counted_ahead),
)
