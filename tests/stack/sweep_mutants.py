"""Ranks of the job engine-sweep with one thing broken: what each axis of the sweep must turn red for.

Each body changes what the ranks execute, never the reference or the recorder, and then trains as the job does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from tests.jobs import sweep_engine
from tests.jobs.launcher import RankContext
from tests.jobs.sweep_workload import EngineSweep, SmallNetwork


def clean(context: RankContext) -> None:
    """Nothing is broken."""
    sweep_engine.train(context)


def _with_engine(context: RankContext, change: Callable[[Any], None]) -> None:
    """Train with every engine changed before its first step."""
    original = sweep_engine.assert_as_asked

    def asserted(built: Any, case: Any) -> None:
        original(built, case)
        change(built)

    sweep_engine.assert_as_asked = asserted
    sweep_engine.train(context)


def loses_a_backward_call(context: RankContext) -> None:
    """The first of two backward calls does nothing."""

    def change(engine: Any) -> None:
        backward = engine.backward
        calls: list[None] = []

        def every_other(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            return backward(*args, **kwargs) if len(calls) % 2 == 0 else None

        engine.backward = every_other

    _with_engine(context, change)


def unties(context: RankContext) -> None:
    """The weights that two modules share are two in the model that trains."""
    original = SmallNetwork.__init__

    def untied(self: SmallNetwork, kind: str, checkpointing: str) -> None:
        original(self, kind, checkpointing)
        self.mirror.weight.register_hook(lambda gradient: gradient / 2)

    SmallNetwork.__init__ = untied  # type: ignore[method-assign]  # reason: this mutant breaks exactly that method
    sweep_engine.train(context)


def one_learning_rate(context: RankContext) -> None:
    """All parameter groups get the learning rate of the first."""

    def change(engine: Any) -> None:
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        for group in inner.param_groups:
            group["lr"] = inner.param_groups[0]["lr"]

    _with_engine(context, change)


def no_decay(context: RankContext) -> None:
    """No weight decays."""

    def change(engine: Any) -> None:
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        for group in inner.param_groups:
            group["weight_decay"] = 0.0

    _with_engine(context, change)


def loads_no_optimizer(context: RankContext) -> None:
    """The checkpoint's optimizer state is left where it is."""
    import deepspeed

    original = deepspeed.DeepSpeedEngine.load_checkpoint

    def partly(self: Any, folder: str, **options: Any) -> Any:
        return original(self, folder, **options, load_optimizer_states=False)

    deepspeed.DeepSpeedEngine.load_checkpoint = partly
    sweep_engine.train(context)


def keeps_its_own_masters(context: RankContext) -> None:
    """Of a checkpoint at ZeRO-0 the 16-bit weights are loaded, and no state of the optimizer."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    FP16_UnfusedOptimizer.load_state_dict = lambda self, *args, **kwargs: None
    sweep_engine.train(context)


def loads_other_masters(context: RankContext) -> None:
    """The masters that a checkpoint brings back at ZeRO-0 are neither those saved nor those of the fresh engine."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    def halved(self: Any, *args: Any, **kwargs: Any) -> None:
        for group in self.fp32_groups:
            for master in group:
                master.data.mul_(0.5)

    FP16_UnfusedOptimizer.load_state_dict = halved
    sweep_engine.train(context)


def keeps_first_and_last(context: RankContext) -> None:
    """Of an accumulated step only the first and the last micro-batch have a gradient."""
    original = EngineSweep.loss
    calls: list[None] = []

    def without_the_middle(self: EngineSweep, model: Any, batch: Any) -> Any:
        loss, logprobs = original(self, model, batch)
        calls.append(None)
        among = self.micro_batches()
        middle = (len(calls) - 1) % among not in (0, among - 1)
        return (loss * 0 + loss.detach() if middle else loss), logprobs

    EngineSweep.loss = without_the_middle  # type: ignore[method-assign]  # reason: this mutant breaks that method
    sweep_engine.train(context)


def moves_what_is_frozen(context: RankContext) -> None:
    """A frozen weight is changed behind the optimizer's back."""

    def change(engine: Any) -> None:
        step = engine.step

        def moving(*args: Any, **kwargs: Any) -> Any:
            with torch.no_grad():
                for parameter in engine.module.parameters():
                    if not parameter.requires_grad:
                        parameter.add_(0.5)
            return step(*args, **kwargs)

        engine.step = moving

    _with_engine(context, change)


def trains_what_is_unused(context: RankContext) -> None:
    """The parameter that no loss depends on gets a gradient."""
    original = EngineSweep.loss

    def with_extra(self: EngineSweep, model: Any, batch: Any) -> Any:
        loss, logprobs = original(self, model, batch)
        added = sum(p.float().sum() for n, p in model.named_parameters() if "extra" in n)
        return loss + added - (added.detach() if isinstance(added, torch.Tensor) else added), logprobs

    EngineSweep.loss = with_extra  # type: ignore[method-assign]  # reason: this mutant breaks exactly that method
    sweep_engine.train(context)


def detaches_at_the_checkpoint(context: RankContext) -> None:
    """Nothing before the checkpointed part gets a gradient."""
    original = SmallNetwork._middle

    def detached(self: SmallNetwork, hidden: torch.Tensor) -> torch.Tensor:
        return original(self, hidden.detach())

    SmallNetwork._middle = detached  # type: ignore[method-assign]  # reason: this mutant breaks exactly that method
    sweep_engine.train(context)


def _scaled_gradient(context: RankContext, factor: float) -> None:
    """The inner optimizer is handed other gradients than were made."""

    def change(engine: Any) -> None:
        inner = getattr(engine.optimizer, "optimizer", engine.optimizer)
        clip = engine.optimizer.unscale_and_clip_grads

        def scaled(*args: Any, **kwargs: Any) -> Any:
            result = clip(*args, **kwargs)
            for group in inner.param_groups:
                for master in group["params"]:
                    if master.grad is not None:
                        master.grad.mul_(factor)
            return result

        engine.optimizer.unscale_and_clip_grads = scaled

    _with_engine(context, change)


def scales_offloaded_gradients(context: RankContext) -> None:
    """Gradients on their way to the optimizer on the CPU lose 5 %."""
    _scaled_gradient(context, 0.95)


def drops_the_accumulation_dtype(context: RankContext) -> None:
    """The engine is not told in which dtype to accumulate."""
    original = EngineSweep.adjust_config

    def without(self: EngineSweep, config: dict[str, Any]) -> dict[str, Any]:
        case = {**self.case, "grad_accum_dtype": "unset"}
        return original(dataclasses.replace(self, case=case), config)

    EngineSweep.adjust_config = without  # type: ignore[method-assign]  # reason: this mutant breaks exactly that method
    sweep_engine.train(context)
