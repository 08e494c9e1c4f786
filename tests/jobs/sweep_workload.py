"""What the job engine-sweep trains: a small network whose kinds of parameters are part of the case.

Nobody wrote these cases by hand, so the model is the smallest one that can have what a case asks for (a parameter
that is unused, tied, frozen, empty, a scalar, or used in some steps only), and its sizes are odd: no partition of it
is free of padding. The gradient norm of every step is set beforehand, so that a clip value means the same everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tests.jobs import loss_scaling, plain_optimizer
from tests.jobs.fp16_workload import NORMS, OVERFLOW_FACTOR
from tests.jobs.plain_optimizer import OptimizerSettings
from tests.jobs.workload import DTYPES, Workload, generator, seed_weights

INPUT, HIDDEN, OUTPUT, ROWS = 16, 33, 7, 8
HOST_MEMORY = "cpu"
"""DeepSpeed's word in an offload section for the memory of the host, whatever the accelerator."""
SGD_LR = 2.0**-6
"""Small, so that the gradient norms stay where they were set while the weights move."""
LR_OF_THE_SECOND_GROUP = 0.5
"""What the learning rate of the second parameter group (biases and scalars) is multiplied by."""
RESUME_AFTER = 2
"""Optimizer steps before a case with `resume` is saved and continued by a fresh engine."""
NOT_THE_SEED = 0.5
"""What a fresh engine's weights are off by until a checkpoint is loaded."""


class SmallNetwork(torch.nn.Module):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """[rows, 16] -> [rows, 7], in the dtype of its weights. kind: the case's `parameters`."""

    def __init__(self, kind: str, checkpointing: str) -> None:
        super().__init__()
        self.kind = kind
        self.checkpointing = checkpointing
        self.first = torch.nn.Linear(INPUT, HIDDEN)
        self.middle = torch.nn.Linear(HIDDEN, HIDDEN)
        if kind == "tied":
            self.mirror = torch.nn.Linear(HIDDEN, HIDDEN)
            self.mirror.weight = self.middle.weight
        if kind in ("unused", "used-in-some-steps"):
            self.extra = torch.nn.Linear(HIDDEN, HIDDEN)
        if kind == "empty":
            self.more_rows = torch.nn.Parameter(torch.zeros(0, HIDDEN))
        if kind == "scalar":
            self.gain = torch.nn.Parameter(torch.zeros(()))
        self.last = torch.nn.Linear(HIDDEN, OUTPUT)

    def forward(self, rows: torch.Tensor, with_extra: bool) -> torch.Tensor:
        """with_extra: whether the module that is used in some steps only is used in this one."""
        hidden = torch.tanh(self.first(rows))
        if self.checkpointing == "none":
            hidden = self._middle(hidden)
        else:
            hidden = checkpoint(self._middle, hidden, use_reentrant=self.checkpointing == "reentrant")
        if self.kind == "used-in-some-steps" and with_extra:
            hidden = hidden + torch.tanh(self.extra(hidden))
        if self.kind == "empty":
            hidden = torch.cat([hidden, self.more_rows])
        if self.kind == "scalar":
            hidden = hidden * (1 + self.gain)
        output: torch.Tensor = self.last(hidden)
        return output

    def _middle(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.middle(hidden))
        return torch.tanh(self.mirror(hidden)) if self.kind == "tied" else hidden


@dataclasses.dataclass(frozen=True)
class EngineSweep(Workload):
    """The network of a case, its data, and the optimizer with its groups."""

    def build(self) -> torch.nn.Module:
        """Without checkpointing, which the reference does not need."""
        return SmallNetwork(self.case["parameters"], "none")

    def build_on_rank(self, ds_config: Mapping[str, Any]) -> torch.nn.Module:
        model = SmallNetwork(self.case["parameters"], self.case["checkpointing"])
        seed_weights(model, self)
        return model

    def micro_batch(self, rank: int, step: int, index: int) -> dict[str, Any]:
        """An overflow step is one rank's first micro-batch alone: all ranks must agree on it."""
        rows, target = _drawn(self.seed, rank, step, index)
        size = _norm(
            self.case["parameters"],
            self.case["dtype"],
            self.seed,
            int(self.case["world_size"]),
            self.micro_batches(),
            step,
        )
        overflow = rank == 0 and index == 0 and loss_scaling.overflows_at(self.case, step)
        return {
            "rows": rows,
            "target": target * (NORMS[step % len(NORMS)] / size),
            "factor": OVERFLOW_FACTOR if overflow else 1.0,
            "with_extra": step % 2 == 0,
        }

    def loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        output = model(batch["rows"].to(DTYPES[self.case["dtype"]]), batch["with_extra"])
        return (output.float() * batch["target"]).mean() * batch["factor"], None

    def trainable(self, name: str) -> bool:
        return self.case["parameters"] != "frozen" or not name.startswith("middle.")

    def steps(self) -> int:
        kind = self.case["loss_scale"]
        wanted = max(int(self.case["steps"]), loss_scaling.STEPS.get(kind, 3))
        return max(wanted, RESUME_AFTER + 2) if self.case["resume"] else wanted

    def micro_batches(self) -> int:
        """Each backward call has a forward pass of its own."""
        return int(self.case["gradient_accumulation_steps"]) * int(self.case["backward_calls"])

    def may_skip_reduction(self) -> bool:
        return self.case["zero_stage"] == 1 and self.case["grad_accum_dtype"] not in ("unset", self.case["dtype"])

    def resumes_after(self) -> int | None:
        return RESUME_AFTER if self.case["resume"] else None

    def put_off(self, model: torch.nn.Module) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(NOT_THE_SEED)

    def settings(self, name: str = "") -> OptimizerSettings:
        """Where there are two groups, the second has half the learning rate and no decay."""
        if self.case["optimizer"] == "adamw":
            usual = OptimizerSettings("adamw", lr=1e-3)
        else:
            usual = OptimizerSettings("sgd", lr=SGD_LR, momentum=0.9 if self.case["loss_scale"] == "overflow" else 0.0)
        if self.case["param_groups"] == 2 and _second_group(name):
            return dataclasses.replace(usual, lr=usual.lr * LR_OF_THE_SECOND_GROUP)
        return dataclasses.replace(usual, weight_decay=float(self.case["weight_decay"]))

    def optimizer(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
        """The torch optimizer of the case over the trainable parameters, in its groups."""
        groups: dict[OptimizerSettings, list[torch.nn.Parameter]] = {}
        for name, parameter in named_parameters:
            groups.setdefault(self.settings(name), []).append(parameter)
        described = [
            {"params": parameters, "lr": settings.lr, "weight_decay": settings.weight_decay}
            for settings, parameters in groups.items()
        ]
        return plain_optimizer.build(described, self.settings())

    def adjust_config(self, config: dict[str, Any]) -> dict[str, Any]:
        in_host_memory = {"device": HOST_MEMORY, "pin_memory": True}
        zero = dict(config["zero_optimization"])
        if self.case["offload"] != "none":
            zero["offload_optimizer"] = in_host_memory
        if self.case["offload"] == "optimizer-and-parameters":
            zero["offload_param"] = in_host_memory
        adjusted = {**config, "zero_optimization": zero}
        if self.case["grad_accum_dtype"] != "unset":
            adjusted["data_types"] = {"grad_accum_dtype": self.case["grad_accum_dtype"]}
        return adjusted


def _second_group(name: str) -> bool:
    return name.endswith("bias") or name == "gain"


def _drawn(seed: int, rank: int, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = generator("sweep", seed, rank, step, index)
    return torch.randn(ROWS, INPUT, generator=draw), torch.randn(ROWS, OUTPUT, generator=draw)


@functools.lru_cache(maxsize=64)
def _norm(kind: str, dtype: str, seed: int, world_size: int, micro_batches: int, step: int) -> float:
    """Norm, at the seeded weights and in fp32, of the mean gradient of all ranks' micro-batches as they are drawn."""
    case = {"parameters": kind, "dtype": dtype}
    workload = EngineSweep(case, seed)
    model = workload.build()
    seed_weights(model, workload)
    for rank in range(world_size):
        for index in range(micro_batches):
            rows, target = _drawn(seed, rank, step, index)
            loss = (model(rows, step % 2 == 0) * target).mean() / (world_size * micro_batches)
            loss.backward()
    return float(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]).norm())
