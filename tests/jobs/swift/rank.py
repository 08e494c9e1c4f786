"""What a rank of an ms-swift cell records, whichever of ms-swift's trainers it runs.

ms-swift imports a plugin by its path before it builds its arguments: whatever it runs, it runs after that.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.jobs import shims
from tests.jobs.engine import WrongEngine, assert_accelerator, describe
from tests.jobs.launcher import die_with_parent
from tests.jobs.recorder import Recorder
from tests.jobs.registry import user_files, workload_for
from tests.jobs.swift.flags import ORDER
from tests.jobs.trl_trainer import Listener


class Rank:
    """What this rank records. The trainer's methods are replaced on its class: ms-swift builds the instance."""

    def __init__(self, trainer: Any, inputs: Mapping[str, str]) -> None:
        """trainer: ms-swift's class. inputs: its names of a micro-batch's inputs, and ours."""
        order = json.loads(Path(os.environ[ORDER]).read_text())
        # torchrun gives each rank a session of its own, which a case that is killed would leave behind.
        die_with_parent(os.getppid())
        self.trainer = trainer
        self.payload = order["payload"]
        self.workdir = Path(order["workdir"])
        self.case = self.payload["case"]
        self.rank = int(os.environ["RANK"])
        self.device = assert_accelerator(self.payload["backend"])
        wanted = self.payload["backend"]["shims"]
        self.applied = shims.apply_common(wanted) + shims.wait_for_every_gather(wanted, self.case)
        self.applied += shims.apply_trl(wanted, self.case) + shims.apply_swift(
            wanted, self.device, self.payload["backend"]["communication"]
        )
        self.workload = workload_for(self.payload)
        self.recorder = Recorder(self.rank)
        self.listener = Listener(self.recorder, self.case, self.workload.seed, inputs)

    def prepare(self, trainer: Any) -> None:
        """What the case does to a trainer that was just built."""

    def listen(self) -> None:
        """Replace the methods through which the trainer's numbers pass."""
        original_init, original_train = self.trainer.__init__, self.trainer.train
        original_optimizer = self.trainer.create_optimizer

        @functools.wraps(original_init)
        def init(trainer: Any, *args: Any, **kwargs: Any) -> None:
            original_init(trainer, *args, **kwargs)
            self.listener.trainer = trainer
            trainer.add_callback(self.listener)
            self.prepare(trainer)

        @functools.wraps(original_optimizer)
        def create_optimizer(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = original_optimizer(trainer, *args, **kwargs)
            self.applied += shims.drop_empty_groups(optimizer)
            return optimizer

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

        self.trainer.__init__, self.trainer.train, self.trainer.create_optimizer = init, train, create_optimizer

    def save(self) -> None:
        """Write this rank's record, with the corrections that did something."""
        self.listener.stop_clock()
        stems = {name.partition("=")[0]: name for name in self.payload["corrections"]}
        # ms-swift imports each --external_plugins file under its own name.
        self.recorder.facts["corrections"] = [
            name for stem, name in stems.items() if getattr(sys.modules.get(stem), "APPLIED", False)
        ]
        self.recorder.save(self.workdir / f"rank{self.rank}.pt", device=self.device, shims=self.applied)
