"""The GRPO-LoRA workload: a tiny Qwen3 (Qwen2 where there is no Qwen3) with LoRA on all linear layers, bnpo loss.

The loss is written out from its definition (DAPO's clip-higher, TRL's "bnpo" normalisation over the micro-batch), so
that the ranks, the reference and the reading of TRL's own batches share one formula.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from tests.jobs.workload import Workload, generator

VOCABULARY = 261
"""Size of the local word-level tokenizer: 5 special tokens, 250 words, 6 role words."""
EPSILON_LOW, EPSILON_HIGH = 0.2, 0.28
TEMPERATURE = 0.8
SEQUENCES, PROMPT, COMPLETION = 4, 10, 12
LORA_RANK, LORA_ALPHA = 16, 32
HIDDEN = 64


def tiny_config() -> Any:
    """Configuration of the tiny causal LM: hidden 64, 2 layers, 4 heads (2 key-value heads), untied embeddings."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "attn_implementation": "eager",
    }
    if hasattr(transformers, "Qwen3Config"):
        return transformers.Qwen3Config(head_dim=16, **sizes)
    return transformers.Qwen2Config(**sizes)


def tiny_model() -> torch.nn.Module:
    """The tiny causal LM in fp32 with its library's own initialisation."""
    config = tiny_config()
    cls = transformers.Qwen3ForCausalLM if hasattr(transformers, "Qwen3Config") else transformers.Qwen2ForCausalLM
    return cls(config)


def lora_config() -> Any:
    """LoRA as in report A: rank 16 on all linear layers, no dropout."""
    import peft

    return peft.LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )


def with_lora(model: torch.nn.Module) -> torch.nn.Module:
    """The model with LoRA adapters in its own dtype."""
    import peft

    return peft.get_peft_model(model, lora_config(), autocast_adapter_dtype=False)


def completion_logprobs(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Per-token log-probabilities [sequences, completion] of the completion, at the sampling temperature, fp32."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    length = batch["completion_ids"].size(1)
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1][:, -length:]
    logprobs = torch.log_softmax(logits.float() / TEMPERATURE, dim=-1)
    return logprobs.gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)


def per_token_advantages(batch: Mapping[str, Any]) -> torch.Tensor:
    """[B, 1], or [B, T] where every token has its own (ms-swift 4)."""
    advantages: torch.Tensor = batch["advantages"]
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages


def grpo_loss(logprobs: torch.Tensor, batch: Mapping[str, Any], beta: float) -> torch.Tensor:
    """The "bnpo" loss: mean over the micro-batch's completion tokens of the clipped surrogate plus beta * KL.

    advantages: [B], or [B, T] where every token has its own. old_logprobs absent means one iteration: the ratio is 1
    and only its gradient counts.
    """
    old = batch.get("old_logprobs")
    ratio = torch.exp(logprobs - (logprobs.detach() if old is None else old))
    advantages = per_token_advantages(batch)
    clipped = torch.clamp(ratio, 1 - EPSILON_LOW, 1 + EPSILON_HIGH)
    per_token = -torch.min(ratio * advantages, clipped * advantages)
    if beta:
        delta = batch["reference_logprobs"] - logprobs
        per_token = per_token + beta * (torch.exp(delta) - delta - 1)
    mask = batch["completion_mask"]
    return (per_token * mask).sum() / mask.sum().clamp(min=1.0)


def clip_share(logprobs: torch.Tensor, batch: Mapping[str, Any]) -> float:
    """Share of completion tokens at which the ratio clip binds; 0 where there is one iteration."""
    old = batch.get("old_logprobs")
    if old is None:
        return 0.0
    ratio = torch.exp(logprobs - old)
    advantages = per_token_advantages(batch)
    bound = ((ratio < 1 - EPSILON_LOW) & (advantages < 0)) | ((ratio > 1 + EPSILON_HIGH) & (advantages > 0))
    mask = batch["completion_mask"].bool()
    return float((bound & mask).sum() / mask.sum().clamp(min=1))


@contextlib.contextmanager
def bias_added_after_rounding() -> Iterator[None]:
    """F.linear as zero.Init leaves it, while inside: of more than two dimensions the product is rounded on its own."""
    plain = torch.nn.functional.linear

    def linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return plain(input, weight, bias) if bias is None or input.dim() == 2 else plain(input, weight) + bias

    torch.nn.functional.linear = linear
    try:
        yield
    finally:
        torch.nn.functional.linear = plain


@dataclasses.dataclass(frozen=True)
class GrpoLora(Workload):
    """Report A's training in small, on recorded micro-batches drawn from the seed instead of generated ones.

    bias_apart: linear layers add their bias after rounding, as under ZeRO-3.
    """

    bias_apart: bool = False

    def build(self) -> torch.nn.Module:
        return with_lora(tiny_model())

    def micro_batch(self, rank: int, step: int, index: int) -> dict[str, Any]:
        """Several iterations train on the same completions: the batch is that of the first of them."""
        iterations = int(self.case.get("num_iterations", 1))
        draw = generator("grpo", self.seed, rank, step // iterations, index)

        def tokens(length: int) -> torch.Tensor:
            return torch.randint(5, VOCABULARY, (SEQUENCES, length), generator=draw)

        lengths = torch.randint(COMPLETION // 2, COMPLETION + 1, (SEQUENCES, 1), generator=draw)
        advantages = torch.randn(SEQUENCES, generator=draw)
        batch = {
            "prompt_ids": tokens(PROMPT),
            "prompt_mask": torch.ones(SEQUENCES, PROMPT, dtype=torch.long),
            "completion_ids": tokens(COMPLETION),
            "completion_mask": (torch.arange(COMPLETION).unsqueeze(0) < lengths).long(),
            "advantages": (advantages - advantages.mean()) / (advantages.std() + 1e-4),
        }
        if self.case.get("beta"):
            batch["reference_logprobs"] = -5.5 + 0.3 * torch.randn(SEQUENCES, COMPLETION, generator=draw)
        return batch

    def loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        with bias_added_after_rounding() if self.bias_apart else contextlib.nullcontext():
            logprobs = completion_logprobs(model, batch)
        return grpo_loss(logprobs, batch, float(self.case.get("beta") or 0.0)), logprobs

    def trainable(self, name: str) -> bool:
        return ".lora_" in name

    def alternatives(self) -> Mapping[str, Workload]:
        """In 16 bits under ZeRO-3, where the model has biases: Qwen2's linear layers have, Qwen3's have none."""
        rounds = self.case.get("zero_stage") == 3 and self.case["dtype"] != "fp32"
        if not rounds or not any(name.endswith(".bias") for name, _ in self.build().named_parameters()):
            return {}
        return {"bias_added_after_rounding": dataclasses.replace(self, bias_apart=True)}

    def clip_share(self, logprobs: torch.Tensor, batch: Mapping[str, Any]) -> float:
        return clip_share(logprobs, batch)

    def steps(self) -> int:
        """With several iterations, two rounds of them."""
        return max(3, 2 * int(self.case.get("num_iterations", 1)))
