"""GRPO-LoRA as ms-swift trains it: the report's command line in small, and the workload that reads its micro-batches.

What is scaled down is here and nowhere else; every other flag is that of ms-swift#6815, less what needs vLLM or a GPU.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from tests.jobs import grpo, trl_grpo
from tests.jobs.swift import flags
from tests.jobs.swift.release import tuner_flag

STOP_WORDS = ("w0", "w1", "w2")
"""Without them hardly a completion of random weights ends by itself, and --overlong_filter would leave nothing."""

PLUGIN = Path(__file__).resolve().with_name("grpo_plugin.py")
MAX_LENGTH = 64
REWARD = "toy"
WARMUP_STEPS = 2
"""Optimizer steps over which the learning rate rises from 0, of three."""


def write_inputs(workload: trl_grpo.TrlGrpo, folder: Path) -> None:
    """The model's folder, and the prompts of the TRL cases as ms-swift's messages."""
    workload.folder_model().save_pretrained(folder / "model")
    trl_grpo.tokenizer().save_pretrained(folder / "model")
    lines = (json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in trl_grpo.prompts())
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")


def arguments(payload: Mapping[str, Any], folder: Path, plugins: list[Path], release: Version) -> list[str]:
    """The words after `swift`. release: of ms-swift."""
    case = payload["case"]
    report = {
        "rlhf_type": "grpo",
        "model_type": "qwen3",
        "loss_type": "bnpo",
        "epsilon_high": grpo.EPSILON_HIGH,
        "overlong_filter": "true",
        "dynamic_sample": "true",
        "max_resample_times": 3,
        tuner_flag(release): "lora",
        "lora_rank": grpo.LORA_RANK,
        "lora_alpha": grpo.LORA_ALPHA,
        "target_modules": "all-linear",
        "torch_dtype": "bfloat16",
        "temperature": grpo.TEMPERATURE,
        "top_p": trl_grpo.TOP_P,
        "logging_steps": 1,
        "deepspeed": f"zero{case['zero_stage']}",
    }
    small = {
        "model": folder / "model",
        "template": "qwen3",  # a release finds it by the name Qwen3-8B, and the folder has another
        "dataset": folder / "data.jsonl",
        "reward_funcs": REWARD,
        "max_completion_length": grpo.COMPLETION,
        "max_length": MAX_LENGTH,
        "num_generations": grpo.SEQUENCES,
        "per_device_train_batch_size": grpo.SEQUENCES,
        "gradient_accumulation_steps": case["gradient_accumulation_steps"],
        "max_steps": 3,
        "output_dir": folder / "output",
        "seed": payload["seed"],
    }
    ours = {"beta": 0, "use_vllm": "false", "lora_dropout": 0}  # 0.05 by default: nobody could draw the same mask again
    said = {**report, **small, **flags.judged(payload, WARMUP_STEPS), **ours, **flags.QUIET}
    return ["rlhf", *flags.words(said), "--stop_words", *STOP_WORDS, *flags.plugins(PLUGIN, plugins)]


@dataclasses.dataclass(frozen=True)
class SwiftGrpo(trl_grpo.TrlGrpo):
    """The TRL cases' model and loss on the completions that ms-swift generated and recorded."""

    def may_be_wider(self) -> bool:
        """PEFT makes LoRA's matrices fp32; which of them the engine casts differs by ZeRO stage."""
        return True

    def warmed_up(self, index: int) -> float:
        """transformers' constant_with_warmup: 0 in the first step."""
        return min(1.0, index / WARMUP_STEPS)

    def loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Truncated completions count for nothing (--overlong_filter)."""
        keep, ids = batch["logits_to_keep"], batch["input_ids"]
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1][:, -keep:]
        logprobs = trl_grpo.log_softmax(logits).gather(-1, ids[:, -keep:].unsqueeze(-1)).squeeze(-1)
        mask = batch["completion_mask"] & ~batch["truncated_mask"].unsqueeze(-1)
        return grpo.grpo_loss(logprobs, {**batch, "completion_mask": mask}, 0.0), logprobs
