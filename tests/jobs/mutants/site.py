"""Where a mutant is planted in one rank, and what it may use there.

A rank goes through three moments: before the engine is made (patches of a library), once it is made (what training
calls from then on), and once the recorder listens. A wrapper around the inner optimizer's step that is planted before
the recorder listens lies below it: the recorder sees what was handed, and the fault is in the update. Planted
afterwards it lies above: the fault is in what is handed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tests.jobs import masters


class Moment(enum.Enum):
    """When a mutant is planted."""

    BEFORE = "before the engine is made"
    MADE = "once the engine is made"
    LISTENED = "once the recorder listens"


@dataclass(frozen=True)
class Mutant:
    """One fault. name: its id in ci/mutants/table.yaml."""

    name: str
    plant: Callable[[Site], None]
    moment: Moment = Moment.MADE


class Site:
    """One rank of a case. step and micro_batch (from 0) are those of the backward call in progress, or the last."""

    def __init__(self, mutant: Mutant | None, payload: Mapping[str, Any], rank: int) -> None:
        self._mutant = mutant
        self._ran = False
        self.case: Mapping[str, Any] = payload["case"]
        self.rank = rank
        self.world_size = int(payload["world_size"])
        self.accumulation = int(self.case.get("gradient_accumulation_steps", 1))
        self.step = 0
        self.micro_batch = -1
        self.engine: Any = None
        self._plant(Moment.BEFORE)

    def engine_made(self, engine: Any) -> None:
        """The engine is made and nothing listens to it yet."""
        if self._mutant is None:
            return
        self.engine = engine
        self.around_backward(self._count)
        self._plant(Moment.MADE)
        self.around_step(after=self._stepped)

    def listened(self) -> None:
        """The recorder listens to the engine."""
        self._plant(Moment.LISTENED)

    def facts(self) -> dict[str, str]:
        """What goes into the rank's record: the mutant, if its line ran."""
        return {"mutant": self._mutant.name} if self._mutant is not None and self._ran else {}

    def ran(self) -> None:
        """The faulty line ran."""
        self._ran = True

    @property
    def is_last_rank(self) -> bool:
        return self.rank == self.world_size - 1

    @property
    def wrapper(self) -> Any:
        """DeepSpeed's optimizer; torch's own where there is no wrapper."""
        return self.engine.optimizer

    @property
    def inner(self) -> Any:
        """torch's optimizer."""
        return getattr(self.wrapper, "optimizer", self.wrapper)

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: p for name, p in self.engine.module.named_parameters() if p.requires_grad}

    def fragments(self) -> list[masters.Fragment]:
        """What this rank holds of the masters."""
        return masters.fragments(self.wrapper, self.trainable(), self.rank)

    def handed(self) -> list[torch.Tensor]:
        """The gradients that the inner optimizer is about to use."""
        tensors = [tensor for group in self.inner.param_groups for tensor in group["params"]]
        return [tensor.grad for tensor in tensors if tensor.grad is not None]

    def on_gradients(self, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> None:
        """Change gradients as autograd makes them; change(name, gradient) returns None to leave one as it is."""

        def hook_for(name: str) -> Callable[[torch.Tensor], torch.Tensor | None]:
            def hook(gradient: torch.Tensor) -> torch.Tensor | None:
                changed = change(name, gradient)
                if changed is not None:
                    self.ran()
                return changed

            return hook

        for name, parameter in self.trainable().items():
            parameter.register_hook(hook_for(name))

    def around_backward(self, before: Callable[[], None]) -> None:
        backward = self.engine.backward

        def counted(*args: Any, **kwargs: Any) -> Any:
            before()
            return backward(*args, **kwargs)

        self.engine.backward = counted

    def around_step(self, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None) -> None:
        """Do something before or after the engine's step, where that is an optimizer step."""
        step = self.engine.step

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            boundary = self.engine.is_gradient_accumulation_boundary()
            if boundary and before is not None:
                before()
            result = step(*args, **kwargs)
            if boundary and after is not None:
                after()
            return result

        self.engine.step = wrapped

    def around_inner_step(
        self, *, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
    ) -> None:
        """Do something before or after torch's optimizer steps."""
        step = self.inner.step

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            result = step(*args, **kwargs)
            if after is not None:
                after()
            return result

        self.inner.step = wrapped

    def replace(self, holder: Any, name: str, change: Callable[..., Any]) -> None:
        """Replace a function of a library or an object: change(original, *args, **kwargs) runs in its place."""
        original = getattr(holder, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            return change(original, *args, **kwargs)

        setattr(holder, name, changed)

    def _plant(self, moment: Moment) -> None:
        if self._mutant is not None and self._mutant.moment is moment:
            self._mutant.plant(self)

    def _count(self) -> None:
        self.micro_batch += 1

    def _stepped(self) -> None:
        self.step += 1
        self.micro_batch = -1
