"""What a case trains: a model, its micro-batches and its loss, the same code in the ranks and in the reference.

A workload knows nothing of DeepSpeed. Whatever is random in it comes from the case's seed through names
(`generator`), so the order in which modules are built, and whether a rank builds them partitioned, changes nothing.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from tests.jobs import plain_optimizer
from tests.jobs.plain_optimizer import OptimizerSettings

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def generator(*parts: object) -> torch.Generator:
    """A CPU generator seeded by what the parts say, the same in every process and release."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a case needs. case: the resolved case keys; batches are plain dictionaries of CPU tensors and values."""

    case: Mapping[str, Any]
    seed: int

    def build(self) -> torch.nn.Module:
        """The model in fp32, structure only: `seed_weights` fills it."""
        raise NotImplementedError

    def micro_batch(self, rank: int, step: int, index: int) -> dict[str, Any]:
        """Inputs of micro-batch `index` of optimizer step `step` on `rank`."""
        raise NotImplementedError

    def loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(loss, a scalar not divided by anything; per-token log-probabilities or None)."""
        raise NotImplementedError

    def build_on_rank(self, ds_config: Mapping[str, Any]) -> torch.nn.Module:
        """The seeded model as a rank hands it to deepspeed.initialize: whole, unless a workload is about zero.Init."""
        model = self.build()
        seed_weights(model, self)
        return model

    def adjust_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """The case's DeepSpeed configuration with what this workload is about."""
        return config

    def after_initialize(self, engine: Any) -> None:
        """Called once the engine exists, for what a user would do then (register_external_parameter)."""

    def trainable(self, name: str) -> bool:
        """Whether the parameter of this name trains."""
        return True

    def alternatives(self) -> Mapping[str, Workload]:
        """Workloads that compute what a known defect would make of the forward pass, by the alternative's name."""
        return {}

    def is_expert(self, name: str) -> bool:
        """Whether the parameter of this name belongs to a mixture-of-experts expert."""
        return False

    def micro_batches(self) -> int:
        """Forward passes that each rank makes for one optimizer step."""
        return int(self.case.get("gradient_accumulation_steps", 1))

    def settings(self, name: str = "") -> OptimizerSettings:
        """What the optimizer does to the parameter of this name; without one, to those of no special group."""
        return plain_optimizer.settings(self.case)

    def may_be_wider(self) -> bool:
        """Whether a trainer may hold what it trains in a wider dtype than the case's, and be right."""
        return False

    def warmed_up(self, index: int) -> float:
        """What the learning rate of optimizer step `index` (from 0) is multiplied by."""
        return 1.0

    def settings_at(self, index: int, name: str = "") -> OptimizerSettings:
        """`settings` with the learning rate of optimizer step `index`."""
        usual = self.settings(name)
        return dataclasses.replace(usual, lr=usual.lr * self.warmed_up(index))

    def may_skip_reduction(self) -> bool:
        """Whether a known defect may leave the gradients of this case unreduced, each rank using its own."""
        return False

    def resumes_after(self) -> int | None:
        """Optimizer steps after which a fresh engine goes on from a checkpoint; None where there is none."""
        return None

    def put_off(self, model: torch.nn.Module) -> None:
        """Move the fp32 weights of a model that a checkpoint is loaded into: what is not loaded must show."""
        raise NotImplementedError

    def clip_share(self, logprobs: torch.Tensor, batch: Mapping[str, Any]) -> float:
        """Share of tokens at which the loss's own ratio clip binds; a case about it must see it bind."""
        return 0.0

    def steps(self) -> int:
        """Optimizer steps of the case; at least three."""
        return 3


def seeded_weight(
    name: str, shape: tuple[int, ...], seed: int, dtype: torch.dtype, *, lora_b_zero: bool = False
) -> torch.Tensor:
    """The initial weight of a parameter: fp32, already representable in `dtype`, so that a cast loses nothing.

    Matrices are normal with standard deviation 0.08, vectors of norms near 1, biases small. LoRA's B is 0 only where
    asked for: with B = 0 the gradient of A is 0 and a check on it would be blind.
    """
    if lora_b_zero and ".lora_B." in name:
        return torch.zeros(shape)
    noise = torch.randn(shape, generator=generator("weight", seed, name))
    if len(shape) != 1:
        weight = 0.08 * noise
    elif name.endswith("bias"):
        weight = 0.02 * noise
    else:
        weight = 1.0 + 0.05 * noise
    return weight.to(dtype).float()


def seed_weights(model: torch.nn.Module, workload: Workload) -> None:
    """Fill a whole (unpartitioned) model in place and set which parameters train."""
    dtype = DTYPES[workload.case["dtype"]]
    lora_b_zero = workload.case.get("lora_b") == "zero"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(seeded_weight(name, shape, workload.seed, dtype, lora_b_zero=lora_b_zero))
            parameter.requires_grad_(workload.trainable(name))
