"""GRPO-LoRA as TRL's trainer computes it: the workload by which the reference reads TRL's own micro-batches.

The loss is that of `grpo`, written out from its definition. Only the dtype in which the log-probabilities are taken
follows the installed release, because in bf16 it moves them by more than the tolerances: up to 0.x TRL divides the
logits by the temperature and takes the log-softmax in the logits' own dtype; with the fused LM head of 1.x both happen
in fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.jobs import grpo
from tests.jobs.workload import seed_weights

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>")
ROLE_WORDS = ("user", "assistant", "system", "newline", "question", "answer")
WORDS = grpo.VOCABULARY - len(SPECIAL_TOKENS) - len(ROLE_WORDS)
PROMPTS = 64
TOP_P = 0.85


def tokenizer() -> Any:
    """The word-level tokenizer of the tiny models, built by the installed library: releases differ."""
    vocabulary = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(WORDS)), *ROLE_WORDS]
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def prompts() -> list[str]:
    """Prompts of one length, so that a micro-batch holds no padding before its completion."""
    return [f"question w{i} w{i * 7 % WORDS} w{i * 3 % WORDS} answer" for i in range(PROMPTS)]


def reward(completions: list[str], **_: Any) -> list[float]:
    """A reward that depends on the completion's words alone."""
    return [
        sum(int(word[1:]) % 5 for word in completion.split() if word[1:].isdigit()) / 40 for completion in completions
    ]


def fused_lm_head() -> bool:
    """Whether the installed TRL takes log-probabilities from its fused LM head."""
    from trl.trainer import utils

    return hasattr(utils, "add_fused_lm_head")


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Log-softmax at the sampling temperature, in the dtype in which the installed TRL takes it."""
    if fused_lm_head():
        return torch.log_softmax(logits.float() / grpo.TEMPERATURE, dim=-1)
    return torch.log_softmax(logits / grpo.TEMPERATURE, dim=-1)


@dataclasses.dataclass(frozen=True)
class TrlGrpo(grpo.GrpoLora):
    """The engine cases' model and loss on the completions that TRL generated and recorded."""

    def build(self) -> torch.nn.Module:
        """The engine cases' model without Qwen2's attention biases (Qwen3 has none), which `folder_model` leaves at 0.

        zero.Init's linear layer rounds the product before it adds the bias, torch's does not: in bf16 a bias other than
        0 would give ZeRO-3 other completions than the other stages.
        """
        model = super().build()
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.bias = None
        return model

    def folder_model(self) -> Any:
        """The seeded base model as its class knows it: no adapters, biases at 0 as transformers initialises them."""
        seeded: Any = self.build()
        seed_weights(seeded, self)
        model = grpo.tiny_model()
        model.load_state_dict(seeded.unload().state_dict(), strict=False)
        return model

    def loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        length = batch["completion_ids"].size(1)
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1][:, -length:]
        logprobs = log_softmax(logits).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
        return grpo.grpo_loss(logprobs, batch, float(self.case.get("beta") or 0.0)), logprobs
