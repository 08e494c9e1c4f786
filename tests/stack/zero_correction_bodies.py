"""What the ranks of the ZeRO corrections' tests run: a small engine beside plain PyTorch, step by step.

No cell can ask for a branch that is used in the first micro-batch alone, an offloaded optimizer or several backward
calls in a step; here a schedule says for every backward call which branches of the model take part.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch

from tests.jobs import corrections, engine, shims
from tests.jobs.launcher import RankContext
from tests.jobs.workload import generator
from tests.stack.given import CPU

LR = 0.5
INPUTS = 6
OUTPUTS = {"a": 5, "b": 7, "c": 3}
"""None of them divides evenly among two ranks: partitions have padding."""
TOLERANCE = 1e-5

Schedule = Sequence[Sequence[Sequence[str]]]
"""Optimizer steps of micro-batches of backward calls; a call is the branches it uses, "ab"."""


class Branches(torch.nn.Module):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """Independent linear layers; the loss is the sum of those that are used."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = torch.nn.ModuleDict({name: torch.nn.Linear(INPUTS, size) for name, size in OUTPUTS.items()})
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator("branch", name)))

    def forward(self, inputs: torch.Tensor, used: str) -> torch.Tensor:
        """A scalar. inputs: [B, INPUTS]."""
        losses: list[torch.Tensor] = [self.branches[name](inputs).square().mean() for name in used]
        return torch.stack(losses).sum()


def inputs(rank: int, *where: int) -> torch.Tensor:
    """[2, INPUTS], its own for every rank and backward call."""
    return torch.randn(2, INPUTS, generator=generator("inputs", rank, *where))


class Plain:
    """The same training in one process: plain SGD on the mean gradient of all ranks."""

    def __init__(self, world_size: int, accumulation: int, clip: float) -> None:
        self.model = Branches()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.share = 1.0 / (world_size * accumulation)
        self.world_size, self.clip = world_size, clip

    def step(self, index: int, micro_batches: Sequence[Sequence[str]]) -> float:
        """One optimizer step; returns the gradient norm before clipping."""
        self.optimizer.zero_grad()
        for rank in range(self.world_size):
            for micro, calls in enumerate(micro_batches):
                for call, used in enumerate(calls):
                    (self.model(inputs(rank, index, micro, call), used) * self.share).backward()
        limit = self.clip or float("inf")
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit))
        self.optimizer.step()
        return norm


def config(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration of deepspeed.initialize. payload: zero (its section), accumulation, clip (0: none)."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": payload.get("accumulation", 1),
        "gradient_clipping": payload.get("clip", 0.0),
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **payload["zero"]},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2000,
    }


def start(context: RankContext) -> None:
    """Ranks as a case has them, with the corrections of the payload."""
    engine.assert_preloaded()
    shims.apply_common(CPU["shims"])
    shims.wait_for_every_gather(CPU["shims"], {"zero_stage": context.payload["zero"].get("stage", 0)})
    corrections.apply(context.payload["corrections"])
    engine.init_distributed(context, CPU["communication"])


def follows_plain_training(context: RankContext) -> None:
    """Every norm and every weight of the schedule equals plain PyTorch's."""
    payload = context.payload
    start(context)
    settings = config(payload)
    if settings["zero_optimization"].get("stage") == 3:
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Branches.__new__(Branches)
            torch.nn.Module.__init__(model)
            model.branches = torch.nn.ModuleDict({n: torch.nn.Linear(INPUTS, size) for n, size in OUTPUTS.items()})
        for name, parameter in model.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator("branch", name)))
    else:
        model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    trained, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=optimizer, config=settings
    )
    plain = Plain(context.world_size, settings["gradient_accumulation_steps"], payload.get("clip", 0.0))
    for index, micro_batches in enumerate(payload["schedule"]):
        for micro, calls in enumerate(micro_batches):
            for call, used in enumerate(calls):
                trained.backward(trained(inputs(context.rank, index, micro, call), used))
            trained.step()
        compare(trained, plain, plain.step(index, micro_batches), index)


def compare(trained: Any, plain: Plain, norm: float, index: int) -> None:
    """Raises AssertionError where the engine is not where plain training is."""
    reported = trained.get_global_grad_norm()
    faults = []
    if reported is None or not abs(float(reported) - norm) <= TOLERANCE * norm:
        faults.append(f"reports {reported}, true {norm}")
    for name, parameter in trained.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            found = parameter.detach().clone()
        wanted = plain.model.get_parameter(name)
        error = float((found - wanted).abs().max())
        if not error <= TOLERANCE:
            faults.append(f"{name} is off by {error}")
    assert not faults, f"step {index}: {'; '.join(faults)}"


PATCHED = (
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
)
"""Every class that one of the four files may patch."""


def _state() -> list[dict[str, Any]]:
    return [dict(vars(getattr(importlib.import_module(module), name))) for module, name in PATCHED]


def unknown_code(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for a method of a release that has changed."""


def refuses(context: RankContext) -> None:
    """Whichever method is not as expected: CannotCorrect names it, and nothing is patched."""
    engine.assert_preloaded()
    for stem, version, module, name, method in context.payload["methods"]:
        owner = getattr(importlib.import_module(module), name)
        installed, original = deepspeed.__version__, vars(owner)[method]
        deepspeed.__version__ = version or installed
        setattr(owner, method, unknown_code)
        before = _state()
        try:
            corrections.load(stem)
        except RuntimeError as error:
            assert type(error).__name__ == "CannotCorrect", repr(error)
            assert method in str(error) and name in str(error), f"{method} is not named: {error}"
        else:
            raise AssertionError(f"{stem} took a {name}.{method} that it does not know")
        assert _state() == before, f"{stem} patched something although {method} is unknown"
        setattr(owner, method, original)
        deepspeed.__version__ = installed


def keeps_to_its_releases(context: RankContext) -> None:
    """Nothing on a release that is not claimed; a development version counts by its base; twice is once."""
    engine.assert_preloaded()
    installed = deepspeed.__version__
    before = _state()
    assert corrections.load("zero2_micro_batches").APPLIED is False
    assert _state() == before
    for stem in ("zero3_stale_gradient", "unfused_dummy_step", "fp32_zero0_norm"):
        before = _state()
        deepspeed.__version__ = "0.14.3"
        assert corrections.load(stem).APPLIED is False
        assert _state() == before, f"{stem} patched a release that it does not claim"
        deepspeed.__version__ = f"{installed}+unknown.1234567"
        assert corrections.load(stem).APPLIED is True
        after = _state()
        assert after != before
        deepspeed.__version__ = installed
        assert corrections.load(stem).APPLIED is True
        assert _state() == after, f"{stem} patched twice"


def begins_as_if_never_stepped(context: RankContext) -> None:
    """Wrapped by FP16_UnfusedOptimizer, every optimizer goes the way it goes without."""
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    engine.assert_preloaded()
    shims.apply_common(CPU["shims"])
    engine.init_distributed(context, CPU["communication"])
    corrections.apply(context.payload["corrections"])
    optim = torch.optim
    kinds: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (optim.AdamW, {"weight_decay": 0.5}),
        (optim.Adam, {"weight_decay": 0.5, "amsgrad": True}),
        (optim.NAdam, {"weight_decay": 0.5}),
        (optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.5}),
        (optim.SGD, {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.5}),
        (optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (optim.ASGD, {"weight_decay": 0.5}),
        (optim.Rprop, {}),
    ]
    gradients = [torch.randn(7, 5, generator=generator("gradient", index)) for index in range(3)]
    weight = torch.randn(7, 5, generator=generator("weight")).bfloat16()

    def wrapped(kind: Callable[..., Any], settings: dict[str, Any]) -> Any:
        half = torch.nn.Parameter(weight.clone())
        return FP16_UnfusedOptimizer(
            kind([half], lr=0.01, **settings), low_precision_dtype=torch.bfloat16, static_loss_scale=1.0
        )

    for kind, settings in kinds:
        built = wrapped(kind, settings)
        # A copy, as from a file: a loaded optimizer would share the tensors.
        saved = copy.deepcopy(built.state_dict())
        (master,) = built.fp32_groups[0]
        assert torch.equal(master, weight.float()), f"{kind}: the dummy step moved the masters"
        state = built.optimizer.state[master]
        assert float(state.get("step", 0)) == 0, f"{kind}: {state}"
        if kind in (optim.AdamW, optim.Adam, optim.NAdam):
            assert not state["exp_avg"].any() and not state["exp_avg_sq"].any(), f"{kind}: {state}"
        loaded = wrapped(kind, settings)
        loaded.load_state_dict(saved)
        plain = torch.nn.Parameter(weight.float())
        alone = kind([plain], lr=0.01, **settings)
        for index, gradient in enumerate(gradients):
            for optimizer, parameter in (
                (built.optimizer, master),
                (loaded.optimizer, loaded.fp32_groups[0][0]),
                (alone, plain),
            ):
                parameter.grad = gradient.clone()
                optimizer.step()
            for parameter in (master, loaded.fp32_groups[0][0]):
                assert torch.equal(parameter, plain), f"{kind} {settings}: step {index} is not the plain one"


class MicroBatches:
    """The gradients of ZeRO-2 as 0.17.6 to 0.18.2 handle them: a group of one parameter, [1] numbers."""

    def __init__(self) -> None:
        self.partition_gradients, self.cpu_offload, self.is_gradient_accumulation_boundary = True, False, False
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        self.params_in_partition = [[torch.zeros(1, dtype=torch.bfloat16)]]
        self.all_grad_tensors: dict[int, Any] = {}
        self.averaged_gradients: dict[int, Any] = {}

    def get_param_gradient_attribute(self, param: Any) -> Any:
        return param.grad

    def get_all_grad_tensors(self, tensor_list: Any, dtype: Any) -> Any:
        return [self.get_param_gradient_attribute(tensor) for tensor in tensor_list]

    def independent_gradient_partition_epilogue(self) -> None:
        if self.cpu_offload:
            return
        waiting, ready = self.all_grad_tensors, self.averaged_gradients
        new = self.get_all_grad_tensors(self.params_in_partition[0], dtype=torch.float32)
        if ready.get(0) is None:
            waiting[0] = new
        else:
            for old, further in zip(waiting[0], new, strict=True):
                old.add_(further)
        if self.is_gradient_accumulation_boundary:
            ready[0], waiting[0] = list(waiting[0]), None

    def backward(self, gradient: float, *, last: bool = False) -> None:
        """A backward pass that gives the parameter this gradient."""
        self.params_in_partition[0][0].grad = torch.full((1,), gradient, dtype=torch.bfloat16)
        self.is_gradient_accumulation_boundary = last
        self.independent_gradient_partition_epilogue()


def adds_up_micro_batches(context: RankContext) -> None:
    """Micro-batches and further backward calls are added up, in the accumulation's dtype."""
    engine.assert_preloaded()
    correction = corrections.load("zero2_micro_batches")
    correction._check(MicroBatches, "kept")
    correction._patch_kept(MicroBatches)
    stage = MicroBatches()
    for _ in range(2):
        # 256 + 1 is no number of bfloat16.
        stage.backward(256.0)
        stage.backward(1.0)
        stage.backward(1.0, last=True)
        assert float(stage.averaged_gradients[0][0]) == 258.0, stage.averaged_gradients
        stage.backward(4.0, last=True)
        assert float(stage.averaged_gradients[0][0]) == 262.0, stage.averaged_gradients
        assert stage.all_grad_tensors[0] is None
        stage.averaged_gradients[0] = None


class Offloaded:
    """A parameter's gradient in host memory as 0.15.2 to 0.18.9 accumulate it."""

    def __init__(self) -> None:
        self.partition_gradients, self.micro_step_id = True, -1
        self.accumulated_grads_in_cpu = {0: torch.zeros(2)}
        self.grad_position = {0: [0, 0, 0, 2]}

    def get_param_id(self, param: Any) -> int:
        return 0

    def get_param_gradient_attribute(self, param: Any) -> Any:
        return param.grad

    def async_accumulate_grad_in_cpu_via_gpu(self, param: Any) -> None:
        waiting = self.accumulated_grads_in_cpu[self.get_param_id(param)]
        assert self.grad_position
        if self.micro_step_id > 0:
            param.grad.add_(waiting)
        else:
            waiting.copy_(param.grad)


def adds_up_offloaded_micro_batches(context: RankContext) -> None:
    """With three micro-batches the one in the middle counts; ZeRO-1, which comes here once a step, is left alone."""
    engine.assert_preloaded()
    correction = corrections.load("zero2_micro_batches")
    correction._check(Offloaded, "offloaded")
    correction._patch_offloaded(Offloaded)
    stage, parameter = Offloaded(), torch.zeros(2)
    for _ in range(2):
        for stage.micro_step_id, gradient in enumerate((1.0, 2.0, 4.0)):
            parameter.grad = torch.full((2,), gradient)
            stage.async_accumulate_grad_in_cpu_via_gpu(parameter)
        assert parameter.grad is not None and parameter.grad.tolist() == [7.0, 7.0]
    one = Offloaded()
    one.partition_gradients, one.micro_step_id = False, 3
    parameter.grad = torch.ones(2)
    one.async_accumulate_grad_in_cpu_via_gpu(parameter)
    assert one.accumulated_grads_in_cpu[0].tolist() == [0.0, 0.0]


def norm_counts_every_expert_once(context: RankContext) -> None:
    """Shared parameters once, the experts of both ranks, those held by tensor parallel ranks in parts."""
    from deepspeed import comm
    from deepspeed.utils import groups

    engine.assert_preloaded()
    shims.apply_common(CPU["shims"])
    engine.init_distributed(context, CPU["communication"])
    correction = corrections.load("fp32_zero0_norm")
    assert correction.APPLIED
    both, alone = comm.new_group([0, 1]), [comm.new_group([rank]) for rank in (0, 1)][context.rank]
    groups._EXPERT_PARALLEL_GROUP["ep_size_2"] = both
    module = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    shared, expert = module
    shared.grad, expert.grad = torch.tensor([2.0]), torch.tensor([3.0 + context.rank])
    expert.allreduce, expert.group_name = False, "ep_size_2"
    known = SimpleNamespace(
        module=module,
        device="cpu",
        mpu=None,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        enable_backward_allreduce=True,
        pipeline_parallelism=False,
    )
    assert abs(float(correction._global_norm(known)) - (4 + 9 + 16) ** 0.5) < 1e-6
    parts = SimpleNamespace(get_model_parallel_rank=lambda: context.rank, get_model_parallel_group=lambda: both)
    groups._EXPERT_PARALLEL_GROUP["ep_size_2"] = alone
    expert.tensor_model_parallel = True
    known.mpu = parts
    assert abs(float(correction._global_norm(known)) - (4 + 9 + 16) ** 0.5) < 1e-6
    known.enable_backward_allreduce = False
    assert correction._global_norm(known) is None
