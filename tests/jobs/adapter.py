"""The custom-adapter workload: report B's model trained on seeded batches, or the same with a user's own module.

A user's own module (--adapter FILE.py:Class) maps [batch, sequence, hidden] to the same shape and is called on the
hidden states before the language model's head:

    class Gate(torch.nn.Module):
        def __init__(self, hidden_size: int) -> None:
            super().__init__()
            self.gate = torch.nn.Linear(hidden_size, hidden_size)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return hidden * torch.sigmoid(self.gate(hidden))
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tests.jobs.adapter_model import (
    CODE_LAYERS,
    TEXT_VOCABULARY,
    USER_CODE,
    AdapterModel,
    UserCode,
    audio_vocabulary,
    tiny_config,
)
from tests.jobs.workload import DTYPES, Workload, generator, seed_weights, seeded_weight

SEQUENCES, TOKENS = 2, 12
ADAPTER = "group_decode_adapter"
ABOVE_EVERY_SIZE = 10**6


@contextlib.contextmanager
def emptied(module: torch.nn.Module) -> Iterator[None]:
    """While inside, `module.parameters()` yields [0] placeholders, as it does for a partitioned ZeRO-3 module."""
    module.parameters = lambda recurse=True: (p.reshape(-1)[:0] for _, p in module.named_parameters())
    try:
        yield
    finally:
        del module.parameters


@dataclasses.dataclass(frozen=True)
class CustomAdapter(Workload):
    """own: "FILE.py:Class" of a user's own module. as_empty: compute what reading partitioned parameters gives."""

    own: str | None = None
    as_empty: bool = False

    @property
    def code(self) -> UserCode:
        """The user's code of this case."""
        return USER_CODE[self.case["user_code"]]

    def build(self) -> torch.nn.Module:
        """zero.Init, even disabled, needs ranks: the plain model is built without it."""
        return AdapterModel(tiny_config(self.case["user_code"], "plain", self.own))

    def build_on_rank(self, ds_config: Mapping[str, Any]) -> torch.nn.Module:
        """As transformers builds a model for ZeRO-3: partitioned from the start; whole at other stages."""
        import deepspeed

        init = str(self.case["init"])
        config = tiny_config(self.case["user_code"], init, self.own)
        if int(self.case["zero_stage"]) == 3:
            from transformers.integrations import HfDeepSpeedConfig

            # Lives while the model is built; transformers looks at it through a weak reference.
            announced = HfDeepSpeedConfig(copy.deepcopy(dict(ds_config)))
            model = AdapterModel._from_config(config)
            del announced
        else:
            model = AdapterModel(config)
        if init == "outside":
            model.add_adapter()
        self._seed(model)
        if self.case["checkpointing"] != "none":
            reentrant = self.case["checkpointing"] == "reentrant"
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        if self.code.setup == "leaf":
            deepspeed.utils.set_z3_leaf_modules(model, [type(model.group_decode_adapter)])
        return model

    def _seed(self, model: torch.nn.Module) -> None:
        """Seeded weights into a model that may be partitioned: one parameter at a time.

        GatheredParameters of a list is not safe on gloo up to 0.19.3: it waits for the last gather alone.
        """
        import deepspeed

        if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            seed_weights(model, self)
            return
        dtype = DTYPES[self.case["dtype"]]
        for name, parameter in model.named_parameters():
            # A parameter that was built outside zero.Init is whole, and the context does nothing.
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(seeded_weight(name, tuple(parameter.shape), self.seed, dtype))
            parameter.requires_grad_(self.trainable(name))

    def adjust_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """No parameter is persistent unless the case is about that: in a real model none of the adapter's is."""
        section = dict(config["zero_optimization"])
        if section["stage"] == 3:
            section["stage3_param_persistence_threshold"] = ABOVE_EVERY_SIZE if self.code.setup == "threshold" else 0
        return {**config, "zero_optimization": section}

    def after_initialize(self, engine: Any) -> None:
        if self.code.setup == "external":
            import deepspeed

            for parameter in engine.module.group_decode_adapter.parameters():
                deepspeed.zero.register_external_parameter(engine.module, parameter)

    def micro_batch(self, rank: int, step: int, index: int) -> dict[str, Any]:
        draw = generator("adapter", self.seed, rank, step, index)
        ids = torch.randint(0, TEXT_VOCABULARY, (SEQUENCES, TOKENS), generator=draw)
        audio = audio_vocabulary(self.case["user_code"])
        return {
            "input_ids": ids,
            "labels": ids.clone(),
            "audio_labels": torch.randint(0, audio, (SEQUENCES, CODE_LAYERS, TOKENS), generator=draw),
            "use_adapter": self.code.uses_adapter(rank, step),
            "reads_nothing": self.code.reads_nothing(step, index),
        }

    def loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        inputs = {key: value for key, value in batch.items() if key != "reads_nothing"}
        empty = self.as_empty and batch["reads_nothing"]
        with emptied(model.group_decode_adapter) if empty else contextlib.nullcontext():
            return model(**inputs), None

    def trainable(self, name: str) -> bool:
        return not (self.case["frozen"] and name.startswith(f"{ADAPTER}."))

    def alternatives(self) -> Mapping[str, Workload]:
        """Where the user's code may read parameters while they are partitioned: the same with nothing in them."""
        exists = self.code.reads_nothing(0, 0)
        return {"partitioned_as_empty": dataclasses.replace(self, as_empty=True)} if exists else {}
