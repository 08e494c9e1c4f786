"""Full training of report B's model as ms-swift does it: `swift sft` on a model type of one's own, in small.

The model is registered by `register.py`, a file such as the report's user hands to `--custom_register_path`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from tests.jobs import trl_grpo
from tests.jobs.adapter import ADAPTER, CustomAdapter
from tests.jobs.adapter_model import CODE_LAYERS, TEXT_VOCABULARY, audio_vocabulary
from tests.jobs.swift import flags
from tests.jobs.swift.release import tuner_flag
from tests.jobs.workload import Workload, seed_weights

MODEL_TYPE = "report-b"
PLUGIN = Path(__file__).resolve().with_name("sft_plugin.py")
REGISTER = Path(__file__).resolve().with_name("register.py")
EXAMPLES, SEQUENCES = 64, 2
MAX_LENGTH = 64


def audio_labels(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Labels of the code layers, made of the text: [B, S] -> [B, L, S]. ms-swift's data has no audio."""
    return torch.stack([(ids * (layer + 3) + layer) % vocabulary for layer in range(CODE_LAYERS)], dim=1)


def write_inputs(workload: CustomAdapter, folder: Path) -> None:
    """The model's folder, and the data: answers of one length, so that all micro-batches weigh the same."""
    model: Any = workload.build()
    seed_weights(model, workload)
    model.save_pretrained(folder / "model")
    trl_grpo.tokenizer().save_pretrained(folder / "model")
    words = TEXT_VOCABULARY - len(trl_grpo.SPECIAL_TOKENS)
    with (folder / "data.jsonl").open("w") as data:
        for number in range(EXAMPLES):
            query, response = (
                " ".join(f"w{(number * step + place * 11) % words}" for place in range(count))
                for step, count in ((7, 4), (5, 7))
            )
            messages = [{"role": "user", "content": query}, {"role": "assistant", "content": response}]
            data.write(json.dumps({"messages": messages}) + "\n")


def arguments(payload: Mapping[str, Any], folder: Path, plugins: list[Path], release: Version) -> list[str]:
    """The words after `swift`. release: of ms-swift."""
    case = payload["case"]
    report = {
        "model_type": MODEL_TYPE,
        tuner_flag(release): "full",
        "torch_dtype": "float32",
        # ms-swift makes fp16 training of float32 unless told not to.
        "fp16": "false",
        "bf16": "false",
        "logging_steps": 1,
        "deepspeed": f"zero{case['zero_stage']}",
    }
    if case["frozen"]:
        report["freeze_parameters"] = ADAPTER
    small = {
        "model": folder / "model",
        "dataset": folder / "data.jsonl",
        "max_length": MAX_LENGTH,
        "per_device_train_batch_size": SEQUENCES,
        "gradient_accumulation_steps": case["gradient_accumulation_steps"],
        "max_steps": 3,
        "output_dir": folder / "output",
        "seed": payload["seed"],
    }
    said = {**report, **small, **flags.judged(payload), **flags.QUIET}
    return ["sft", *flags.words(said), "--custom_register_path", str(REGISTER), *flags.plugins(PLUGIN, plugins)]


@dataclasses.dataclass(frozen=True)
class SwiftAdapter(CustomAdapter):
    """The adapter cases' model on the micro-batches that ms-swift drew and recorded."""

    def loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids = batch["input_ids"]
        heard = audio_labels(ids, audio_vocabulary(self.case["user_code"]))
        return model(input_ids=ids, labels=batch["labels"], audio_labels=heard, use_adapter=True), None

    def alternatives(self) -> Mapping[str, Workload]:
        """None: what reads partitioned parameters here ends the case before its first step."""
        return {}
