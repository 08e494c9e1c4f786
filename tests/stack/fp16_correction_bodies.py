"""What the ranks of test_corrections_fp16.py run: in a fork, so that what a correction patches dies with it.

Each asserts by itself; a failed assertion is the problem that the launcher reports.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch

from tests.jobs import corrections, engine, shims
from tests.jobs.launcher import RankContext
from tests.stack.given import CPU

PATCHED = (
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    ("deepspeed.runtime.fp16.fused_optimizer", "FP16_Optimizer"),
    ("deepspeed.runtime.fp16.unfused_optimizer", "FP16_UnfusedOptimizer"),
    ("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
)
"""Every class that one of the two files may patch."""


def _state() -> list[dict[str, Any]]:
    classes = [getattr(importlib.import_module(module), name) for module, name in PATCHED]
    return [
        dict(vars(thing)) for thing in (*classes, importlib.import_module("deepspeed.runtime.fp16.fused_optimizer"))
    ]


def _join(context: RankContext) -> None:
    engine.assert_preloaded()
    shims.apply_common(CPU["shims"])
    shims.allow_fp16(CPU["shims"], deepspeed.accelerator.get_accelerator())
    engine.init_distributed(context, CPU["communication"])


@contextmanager
def _replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(thing)[name]
    setattr(thing, name, value)
    yield
    setattr(thing, name, original)


def unknown_code(self: Any, *args: Any, **kwargs: Any) -> None:
    """Stands for a method of a release that has changed."""


def refuses(context: RankContext) -> None:
    """Whichever method is not as expected: CannotCorrect names it, and nothing is patched."""
    engine.assert_preloaded()
    for stem, module, cls_name, method in context.payload["methods"]:
        cls = getattr(importlib.import_module(module), cls_name)
        with _replaced(cls, method, unknown_code):
            before = _state()
            try:
                corrections.load(stem)
            except RuntimeError as error:
                assert type(error).__name__ == "CannotCorrect", repr(error)
                assert f"{cls_name}.{method}" in str(error), f"{method} is not named: {error}"
            else:
                raise AssertionError(f"{stem} took a {cls_name}.{method} that it does not know")
            assert _state() == before, f"{stem} patched something although {cls_name}.{method} is unknown"


def keeps_to_its_releases(context: RankContext) -> None:
    """Nothing on a release that is not claimed; a development version counts by its base; twice is once."""
    engine.assert_preloaded()
    installed = deepspeed.__version__
    for stem in ("loss_scale", "moe_clip_norm"):
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


def accumulates_scaled(context: RankContext) -> None:
    """fp16 through engine.backward, two micro-batches a step: gradients that fp16 cannot hold without a scale.

    The gradient is 2^-26 times the mean of the inputs; the smallest number of fp16 is 2^-24. What backward returns
    is the loss that it was given, over the accumulation steps.
    """
    _join(context)
    for name in context.payload["corrections"]:
        assert corrections.load(name).APPLIED
    tiny, scale, accumulation = 2.0**-26, 2.0**15, 2
    model = torch.nn.Linear(8, 1, bias=False)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": 0},
        "fp16": {"enabled": True, "loss_scale": scale},
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if context.payload["fused"]:
        shims.stand_in_for_fused(type(optimizer))
    wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    used: list[torch.Tensor] = []
    inner, step = wrapped.optimizer.optimizer, wrapped.optimizer.optimizer.step

    def spied(*args: Any, **kwargs: Any) -> Any:
        used.append(inner.param_groups[0]["params"][0].grad.reshape(-1).clone())
        return step(*args, **kwargs)

    inner.step = spied
    for index in range(2):
        rows = [torch.arange(1.0, 9.0).half()[None] * (index + part + 1) for part in range(accumulation)]
        for row in rows:
            loss = wrapped(row).float().sum() * tiny
            returned = wrapped.backward(loss)
            expected = loss.detach() / accumulation
            assert torch.allclose(returned.detach(), expected, rtol=1e-6, atol=0), (returned, expected)
            assert returned.dtype == loss.dtype
            wrapped.step()
        wanted = torch.stack(rows).float().mean(0).reshape(-1) * tiny
        assert torch.equal(used[-1], wanted), (used[-1], wanted)
        assert math.isclose(float(wrapped.get_global_grad_norm()), float(wanted.norm()), rel_tol=1e-5)
    assert len(used) == 2


def _wrapper(parameters: list[dict[str, Any]] | list[torch.nn.Parameter], **arguments: Any) -> Any:
    from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

    from tests.jobs.fp16_direct import LegacySgd

    return FP16_UnfusedOptimizer(LegacySgd(parameters, lr=1.0), verbose=False, **arguments)


def bf16_checkpoint(context: RankContext) -> None:
    """The state of a bf16 run of 0.17.6 - 0.18.5 holds fp16's scale; gradients are not divided by it."""
    _join(context)
    for name in context.payload["corrections"]:
        assert corrections.load(name).APPLIED
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    wrapper = _wrapper([parameter], low_precision_dtype=torch.bfloat16)
    saved = {**wrapper.state_dict(), "cur_scale": 65536.0, "dynamic_loss_scale": True}
    wrapper.load_state_dict({**saved, "last_overflow_iter": -1, "scale_factor": 2.0, "scale_window": 1000})
    parameter.grad = torch.ones_like(parameter)
    wrapper.step()
    assert torch.equal(parameter.detach(), -torch.ones_like(parameter)), parameter
    assert float(wrapper._global_grad_norm) == 2.0


def experts_of_each_rank(context: RankContext) -> None:
    """Expert parallelism of 2: shared gradients of norm 3 on both ranks, experts of norm 4 and 12, together 13.

    In the second step rank 0's experts get no token, and so no gradient: sqrt(3^2 + 12^2).
    """
    _join(context)
    from deepspeed.utils import groups

    for name in context.payload["corrections"]:
        assert corrections.load(name).APPLIED
    groups._create_expert_and_data_parallel(2)
    clip, scale = 1.0, 8.0
    for legacy in (False, True):
        shared = torch.nn.Parameter(torch.zeros(9, dtype=torch.float16))
        expert = torch.nn.Parameter(torch.zeros(16, dtype=torch.float16))
        expert.allreduce, expert.group_name = False, "ep_size_2"
        parameters = [{"params": [shared], "name": "shared"}, {"params": [expert], "name": "ep_size_2", "moe": True}]
        wrapper = _wrapper(parameters, static_loss_scale=scale, clip_grad=clip, fused_lamb_legacy=legacy)
        for own in ((4.0, 12.0), (None, 12.0)):
            mine = own[context.rank]
            shared.grad = torch.full_like(shared, scale * 3 / math.sqrt(shared.numel()))
            expert.grad = None if mine is None else torch.full_like(expert, scale * mine / math.sqrt(expert.numel()))
            before = {"shared": shared.detach().float().clone(), "expert": expert.detach().float().clone()}
            wrapper.step()
            true = math.sqrt(9 + sum(norm**2 for norm in own if norm))
            reported = float(wrapper._global_grad_norm) / (
                1 if "loss_scale" in context.payload["corrections"] else scale
            )
            moved = {
                "shared": shared.detach().float() - before["shared"],
                "expert": expert.detach().float() - before["expert"],
            }
            _close("reported norm", reported, true)
            _close("shared gradient used", float(moved["shared"].norm()), 3 * clip / true)
            _close("expert gradient used", float(moved["expert"].norm()), (mine or 0.0) * clip / true)


def _close(what: str, found: float, wanted: float) -> None:
    """To fp16's precision, in which the weights move."""
    assert math.isclose(found, wanted, rel_tol=3e-3, abs_tol=1e-6), f"{what}: {found}, expected {wanted}"


Body = Callable[[RankContext], None]
