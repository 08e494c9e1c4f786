"""The external plugin of an ms-swift cell, in each rank that swift starts: reward, recorder, and what CPU needs.

ms-swift imports it by its path before it builds its arguments, so everything of ms-swift that runs, runs after it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from swift.plugin import ORM, orms
from swift.trainers.rlhf_trainer.grpo_trainer import GRPOTrainer

from tests.jobs import shims, trl_grpo
from tests.jobs.engine import WrongEngine, assert_accelerator, describe
from tests.jobs.launcher import die_with_parent
from tests.jobs.recorder import Recorder
from tests.jobs.registry import user_files, workload_for
from tests.jobs.swift.grpo import REWARD
from tests.jobs.trl_trainer import Listener, seed_adapters

ORDER = "JOBS_SWIFT_CASE"
"""The variable that names the case's file: {"payload", "workdir"}."""

INPUTS = {
    name: name
    for name in ("input_ids", "attention_mask", "completion_mask", "truncated_mask", "logits_to_keep", "advantages")
}


class Toy(ORM):  # type: ignore[misc]  # reason: ms-swift is not installed where types are checked
    """The TRL cases' reward."""

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        return trl_grpo.reward(completions)


class Rank:
    """What this rank records. The trainer's methods are replaced on its class: ms-swift builds the instance."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.payload = order["payload"]
        self.workdir = Path(order["workdir"])
        self.case = self.payload["case"]
        self.rank = int(os.environ["RANK"])
        self.device = assert_accelerator(self.payload["backend"])
        wanted = self.payload["backend"]["shims"]
        self.applied = shims.apply_common(wanted) + shims.wait_for_every_gather(wanted, self.case)
        self.applied += shims.apply_trl(wanted, self.case) + shims.apply_swift(wanted, self.device, GRPOTrainer)
        self.workload = workload_for(self.payload)
        self.recorder = Recorder(self.rank)
        self.listener = Listener(self.recorder, self.case, self.workload.seed, INPUTS)

    def listen(self) -> None:
        """Replace the methods through which the trainer's numbers pass."""
        original_init, original_train = GRPOTrainer.__init__, GRPOTrainer.train
        original_loss, original_logps = GRPOTrainer._compute_loss, GRPOTrainer._get_per_token_logps_and_entropies
        original_optimizer = GRPOTrainer.create_optimizer

        @functools.wraps(original_init)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            original_init(trainer, *args, **kwargs)
            self.listener.trainer = trainer
            trainer.add_callback(self.listener)
            seed_adapters(trainer.model, self.workload)

        @functools.wraps(original_optimizer)
        def create_optimizer(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = original_optimizer(trainer, *args, **kwargs)
            self.applied += shims.drop_empty_groups(optimizer)
            return optimizer

        @functools.wraps(original_logps)
        def logps(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            found = original_logps(trainer, *args, **kwargs)
            trainer.logprobs_seen = found[0]
            return found

        @functools.wraps(original_loss)
        def loss(trainer: Any, model: Any, inputs: Any) -> Any:
            trainer.inputs_seen = inputs
            return original_loss(trainer, model, inputs)

        @functools.wraps(original_train)
        def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original_train(trainer, *args, **kwargs)
            except WrongEngine:
                raise
            except Exception as error:
                traceback.print_exc()
                where = f"step {len(self.recorder.steps)}" if self.listener.began is not None else "setup"
                self.recorder.facts["exception"] = describe(error, where, self.rank, user_files(self.payload))
                raise
            finally:
                self.save()

        GRPOTrainer.__init__, GRPOTrainer.train, GRPOTrainer.create_optimizer = init, train, create_optimizer
        GRPOTrainer._compute_loss, GRPOTrainer._get_per_token_logps_and_entropies = loss, logps

    def save(self) -> None:
        """Write this rank's record, with the corrections that did something."""
        self.listener.stop_clock()
        stems = {name.partition("=")[0]: name for name in self.payload["corrections"]}
        # ms-swift imports each --external_plugins file under its own name.
        self.recorder.facts["corrections"] = [
            name for stem, name in stems.items() if getattr(sys.modules.get(stem), "APPLIED", False)
        ]
        self.recorder.save(self.workdir / f"rank{self.rank}.pt", device=self.device, shims=self.applied)


# torchrun gives each rank a session of its own, which a case that is killed would leave behind.
die_with_parent(os.getppid())
orms[REWARD] = Toy
Rank(json.loads(Path(os.environ[ORDER]).read_text())).listen()
