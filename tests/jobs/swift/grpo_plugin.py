"""The external plugin of `swift rlhf`, in each rank that swift starts: reward, recorder, and what CPU needs."""

from __future__ import annotations

import functools
from typing import Any

from tests.jobs import shims, trl_grpo
from tests.jobs.swift.grpo import REWARD
from tests.jobs.swift.rank import Rank
from tests.jobs.swift.release import four, installed
from tests.jobs.trl_trainer import seed_adapters

if four(installed()):
    from swift.rewards import ORM, orms
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
else:
    from swift.plugin import ORM, orms
    from swift.trainers.rlhf_trainer.grpo_trainer import GRPOTrainer

INPUTS = {
    name: name
    for name in ("input_ids", "attention_mask", "completion_mask", "truncated_mask", "logits_to_keep", "advantages")
}


class Toy(ORM):  # type: ignore[misc]  # reason: ms-swift is not installed where types are checked
    """The TRL cases' reward."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return trl_grpo.reward(completions)


class GrpoRank(Rank):
    """A rank of GRPO with LoRA."""

    def __init__(self) -> None:
        super().__init__(GRPOTrainer, INPUTS)
        self.applied += shims.rollout_attributes(GRPOTrainer)

    def prepare(self, trainer: Any) -> None:
        seed_adapters(trainer.model, self.workload)

    def listen(self) -> None:
        super().listen()
        original_loss, original_logps = GRPOTrainer._compute_loss, GRPOTrainer._get_per_token_logps_and_entropies

        @functools.wraps(original_logps)
        def logps(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            found = original_logps(trainer, *args, **kwargs)
            trainer.logprobs_seen = found[0]
            return found

        @functools.wraps(original_loss)
        def loss(trainer: Any, model: Any, inputs: Any, *more: Any) -> Any:
            # ms-swift 4 gives what the model itself does not take in an object of its own, the first of `more`.
            trainer.inputs_seen = {**inputs, **(vars(more[0]) if more else {})}
            return original_loss(trainer, model, inputs, *more)

        GRPOTrainer._compute_loss, GRPOTrainer._get_per_token_logps_and_entropies = loss, logps


orms[REWARD] = Toy
GrpoRank().listen()
