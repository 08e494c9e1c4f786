"""The external plugin of `swift sft`, in each rank that swift starts: recorder, and what CPU needs."""

from __future__ import annotations

import functools
from typing import Any

from swift.trainers import Seq2SeqTrainer

from tests.jobs.swift.rank import Rank

INPUTS = {"input_ids": "input_ids", "labels": "labels"}


class SftRank(Rank):
    """A rank of full training."""

    def __init__(self) -> None:
        super().__init__(Seq2SeqTrainer, INPUTS)

    def listen(self) -> None:
        super().listen()
        original_loss = Seq2SeqTrainer.compute_loss

        @functools.wraps(original_loss)
        def loss(trainer: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            trainer.inputs_seen, trainer.logprobs_seen = dict(inputs), None  # ms-swift takes some of them out
            return original_loss(trainer, model, inputs, *args, **kwargs)

        Seq2SeqTrainer.compute_loss = loss


SftRank().listen()
