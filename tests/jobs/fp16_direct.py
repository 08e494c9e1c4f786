"""The direct path of the job fp16-optimizers: a wrapper built by hand and given its gradients by hand.

DeepSpeed's own tests of these wrappers (PR #8588) do without an engine, and the two ways in disagree: through
engine.backward some releases never scale the loss. Here the gradient that a wrapper is given is the scaled one, so
that what it reports and uses is its own doing. Everything else (recorder, reference) is that of an engine case.
"""

from __future__ import annotations

import dataclasses
import traceback
import types
from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.loss_scaler import (
    CONSECUTIVE_HYSTERESIS,
    DELAYED_SHIFT,
    INITIAL_LOSS_SCALE,
    MIN_LOSS_SCALE,
    SCALE_WINDOW,
)
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import groups
from deepspeed.utils.timer import NoopTimer

from tests.jobs import corrections, engine, fp16_workload, loss_scaling, masters, plain_optimizer, shims
from tests.jobs.launcher import RankContext
from tests.jobs.recorder import Recorder
from tests.jobs.workload import Workload, generator, seed_weights

EXPERT_GROUP = "ep_size_1"
SHARED_NORM, EXPERT_NORM = 3.0, 4.0
"""Of a case with experts, together 5: a norm without the experts is 0.6 of the true one."""


class Leaves(torch.nn.Module):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """Parameters and nothing else; what they compute is never asked for."""

    def __init__(self, experts: bool) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.empty(6, 8))
        self.bias = torch.nn.Parameter(torch.empty(8))
        if experts:
            # Initialised small, as biases are: see fp16-fused-norm-without-experts in the ledger.
            self.expert_bias = torch.nn.Parameter(torch.empty(24))


@dataclasses.dataclass(frozen=True)
class HandSet(Workload):
    """A loss that is the inner product of the parameters with hand-set numbers, which are then its gradient."""

    def build(self) -> torch.nn.Module:
        return Leaves(bool(self.case.get("experts")))

    def micro_batch(self, rank: int, step: int, index: int) -> dict[str, Any]:
        """The same on every rank: a wrapper built by hand is given gradients that are already reduced."""
        sizes = {"shared": fp16_workload.NORMS[step]}
        if self.case.get("experts"):
            sizes = {"shared": SHARED_NORM, "expert": EXPERT_NORM}
        shapes = {name: tuple(parameter.shape) for name, parameter in self.build().named_parameters()}
        drawn = {name: torch.randn(shape, generator=generator(name, self.seed, step)) for name, shape in shapes.items()}
        batch = {}
        for kind, size in sizes.items():
            members = [name for name in drawn if self.is_expert(name) == (kind == "expert")]
            norm = torch.cat([drawn[name].reshape(-1) for name in members]).norm()
            batch.update({name: drawn[name] * (size / norm) for name in members})
        if loss_scaling.overflows_at(self.case, step):
            batch["bias"][0] *= fp16_workload.OVERFLOW_FACTOR
        return batch

    def loss(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        products = [(parameter.float() * batch[name]).sum() for name, parameter in model.named_parameters()]
        return torch.stack(products).sum(), None

    def is_expert(self, name: str) -> bool:
        return name.startswith("expert")

    def steps(self) -> int:
        return loss_scaling.STEPS[self.case["loss_scale"]]


class LegacySgd(torch.optim.SGD):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """SGD with the keywords that the legacy paths pass to the fused LAMB and Adam: gradients beside their scale."""

    def step(
        self,
        closure: Any = None,
        grads: list[list[torch.Tensor]] | None = None,
        output_params: list[list[torch.Tensor]] | None = None,
        scale: float = 1.0,
        grad_norms: list[float] | None = None,
    ) -> Any:
        """A plain step on `param.grad` where `grads` is not given (the wrapper's own dummy step)."""
        if grads is None:
            return super().step(closure)
        for group, gradients in zip(self.param_groups, grads, strict=True):
            for parameter, gradient in zip(group["params"], gradients, strict=True):
                parameter.grad = (gradient.float() / scale).view_as(parameter)
        super().step()
        for group, outputs in zip(self.param_groups, output_params or [], strict=True):
            for parameter, output in zip(group["params"], outputs, strict=True):
                parameter.grad = None
                output.data.copy_(parameter.detach().view_as(output))
        return None


def build_optimizer(
    case: Mapping[str, Any], named_parameters: Mapping[str, torch.nn.Parameter], workload: HandSet
) -> Any:
    """The wrapper of the case around an inner optimizer. Clipping `unset` is the wrapper's own argument default."""
    legacy = case["step_method"] == "legacy"
    settings = plain_optimizer.settings(case)
    fused = case["optimizer"] == "fused"
    experts = [parameter for name, parameter in named_parameters.items() if workload.is_expert(name)]
    shared = [parameter for name, parameter in named_parameters.items() if not workload.is_expert(name)]
    param_groups: list[dict[str, Any]] = [{"params": shared, "name": "shared"}]
    if experts:
        if EXPERT_GROUP not in groups._EXPERT_PARALLEL_GROUP:
            groups._create_expert_and_data_parallel(1)
        for parameter in experts:
            parameter.allreduce = False  # how DeepSpeed marks an expert
            parameter.group_name = EXPERT_GROUP
        param_groups.append({"params": experts, "name": EXPERT_GROUP, "moe": True})
    cls = LegacySgd if legacy else torch.optim.SGD
    inner = cls(param_groups, lr=settings.lr, momentum=settings.momentum)
    arguments: dict[str, Any] = {"verbose": False, "fused_adam_legacy" if fused else "fused_lamb_legacy": legacy}
    if case.get("gradient_clipping", "unset") != "unset":
        arguments["clip_grad"] = float(case["clip"])
    section = loss_scaling.SECTIONS[case["loss_scale"]]
    if loss_scaling.dynamic(case):
        arguments["dynamic_loss_scale"] = True
        arguments["dynamic_loss_args"] = {
            INITIAL_LOSS_SCALE: 2.0 ** section["initial_scale_power"],
            SCALE_WINDOW: section["loss_scale_window"],
            MIN_LOSS_SCALE: section["min_loss_scale"],
            DELAYED_SHIFT: section["hysteresis"],
            CONSECUTIVE_HYSTERESIS: False,
        }
    else:
        arguments["static_loss_scale"] = float(section["loss_scale"])
    if fused:
        # Up to 0.17.0 it reads attributes of an engine and calls timers, whether or not it was given any.
        no_engine = types.SimpleNamespace(pipeline_parallelism=False, enable_backward_allreduce=True)
        return FP16_Optimizer(inner, deepspeed=no_engine, timers=NoopTimer(), has_moe_layers=bool(experts), **arguments)
    return FP16_UnfusedOptimizer(inner, **arguments)


class HandMade:
    """What the recorder needs of an engine, around a wrapper that has none."""

    def __init__(self, module: torch.nn.Module, optimizer: Any) -> None:
        self.module = module
        self.optimizer = optimizer

    def backward(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Set the gradients as a backward of the scaled loss leaves them: times the scale, in the weights' dtype."""
        scale = masters.loss_scale(self.optimizer) or 1.0
        for name, parameter in self.module.named_parameters():
            parameter.grad = (gradients[name].to(parameter.device) * scale).to(parameter.dtype)

    def step(self) -> None:
        self.optimizer.step()

    def is_gradient_accumulation_boundary(self) -> bool:
        return True

    def get_global_grad_norm(self) -> Any:
        return self.optimizer._global_grad_norm


def train(context: RankContext) -> None:
    """Body of a rank of a direct case; writes the rank's record."""
    engine.assert_preloaded()
    payload = context.payload
    case = {**payload["case"], "clip": payload["clip"]}
    engine.assert_accelerator(payload["backend"])
    accelerator = get_accelerator()
    wanted = payload["backend"]["shims"]
    applied = shims.apply_common(wanted) + shims.allow_fp16(wanted, accelerator)
    workload = HandSet(payload["case"], int(payload["seed"]))
    if case["optimizer"] == "fused" and case.get("experts"):
        applied += shims.float_tensor_of_a_number(wanted, accelerator)
    recorder = Recorder(context.rank)
    recorder.facts["corrections"] = corrections.apply(payload["corrections"])
    engine.init_distributed(context, payload["backend"]["communication"])
    where = "setup"
    try:
        module = workload.build()
        seed_weights(module, workload)
        module.to(device=accelerator.current_device_name(), dtype=torch.float16)
        hand_made = HandMade(module, build_optimizer(case, dict(module.named_parameters()), workload))
        recorder.attach(hand_made)
        for step in range(workload.steps()):
            batch = workload.micro_batch(context.rank, step, 0)
            with recorder.timed():
                where = f"forward, step {step}"
                on_device = {name: value.to(accelerator.current_device_name()) for name, value in batch.items()}
                with torch.no_grad():
                    loss, _ = workload.loss(module, on_device)
                recorder.micro_batch(batch, loss, None)
                where = f"backward, step {step}"
                hand_made.backward(batch)
                where = f"step, step {step}"
                hand_made.step()
    except Exception as error:  # noqa: BLE001  # reason: what training raises is evidence, whatever it is
        traceback.print_exc()
        recorder.facts["exception"] = engine.describe(error, where, context.rank, ())
    recorder.save(context.record_path, device=accelerator.device_name(), shims=applied)
