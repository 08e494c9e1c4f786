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

from tests.jobs import grpo, plain_optimizer, trl_grpo

STOP_WORDS = ("w0", "w1", "w2")
"""Without them hardly a completion of random weights ends by itself, and --overlong_filter would leave nothing."""

MAX_LENGTH = 64
REWARD = "toy"


def write_data(path: Path) -> None:
    """The prompts of the TRL cases, as ms-swift's messages."""
    lines = (json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in trl_grpo.prompts())
    path.write_text("\n".join(lines) + "\n")


def arguments(payload: Mapping[str, Any], folder: Path, plugins: list[Path]) -> list[str]:
    """The words after `swift`."""
    case = payload["case"]
    optimizer = plain_optimizer.settings(case)
    report = {
        "rlhf_type": "grpo",
        "model_type": "qwen3",
        "loss_type": "bnpo",
        "epsilon_high": grpo.EPSILON_HIGH,
        "overlong_filter": "true",
        "dynamic_sample": "true",
        "max_resample_times": 3,
        "train_type": "lora",
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
    ours = {
        # What the case judges is spelled out: ms-swift's own defaults are a cosine schedule and other betas.
        "learning_rate": optimizer.lr,
        "lr_scheduler_type": "constant",
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_epsilon": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "max_grad_norm": payload["clip"] or 0.0,
        "beta": 0,
        "lora_dropout": 0,  # 0.05 by default: nobody could draw the same mask again
        # Nothing of the network, nothing that another process would do, nothing that is written besides the log.
        "check_model": "false",
        "use_vllm": "false",
        "attn_impl": "eager",
        "gradient_checkpointing": "false",
        "dataloader_num_workers": 0,
        "dataset_num_proc": 1,
        "load_from_cache_file": "false",
        "split_dataset_ratio": 0,
        "eval_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "add_version": "false",
    }
    words = [
        word for flags in (report, small, ours) for name, value in flags.items() for word in (f"--{name}", f"{value}")
    ]
    return ["rlhf", *words, "--stop_words", *STOP_WORDS, "--external_plugins", *map(str, plugins)]


@dataclasses.dataclass(frozen=True)
class SwiftGrpo(trl_grpo.TrlGrpo):
    """The TRL cases' model and loss on the completions that ms-swift generated and recorded."""

    def loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Truncated completions count for nothing (--overlong_filter)."""
        keep, ids = batch["logits_to_keep"], batch["input_ids"]
        logits = model(input_ids=ids, attention_mask=batch["attention_mask"], use_cache=False).logits[:, :-1][:, -keep:]
        logprobs = trl_grpo.log_softmax(logits).gather(-1, ids[:, -keep:].unsqueeze(-1)).squeeze(-1)
        mask = batch["completion_mask"] & ~batch["truncated_mask"].unsqueeze(-1)
        return grpo.grpo_loss(logprobs, {**batch, "completion_mask": mask}, 0.0), logprobs
