"""What the ranks of test_correction_guard run: in a fork, so that what the guard patches dies with it.

Each asserts by itself; a failed assertion is the problem that the launcher reports.
"""

from __future__ import annotations

import copy
import importlib
import linecache
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap

from tests.jobs import corrections, engine, shims
from tests.jobs.launcher import RankContext
from tests.stack.given import CPU

STEPS = 5
PATCHED = (
    ("deepspeed.runtime.engine", "DeepSpeedEngine"),
    ("deepspeed.runtime.zero.parameter_offload", "DeepSpeedZeRoOffload"),
    ("deepspeed.runtime.zero.partition_parameters", "GatheredParameters"),
    ("deepspeed.runtime.zero.linear", "LinearFunctionForZeroStage3"),
)


class Inner(torch.nn.Module):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """A module that is handed another one and looks at its parameters in its own forward pass."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        self.scale = torch.nn.Linear(4, 4)
        self._others = [other]

    def forward(self, x: torch.Tensor, penalize: bool) -> torch.Tensor:
        """[N, 4] -> [N, 4]."""
        y = self.scale(x)
        return y * sum((p**2).sum() for p in self._others[0].parameters()) if penalize else y


class Small(torch.nn.Module):  # type: ignore[misc]  # reason: torch is untyped where mypy runs
    """What no cell does with a module's parameters; `code` says what. Lines that touch are marked."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self.code = code
        self.first, self.side, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.inner = Inner(self.side)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """The loss of x [N, 4] in a step."""
        extra: Any = 0.0
        hidden = self.inner(self.first(x), self.code == "in-a-module")
        if self.code == "late" and step >= 2:
            extra = sum((p**2).sum() for p in self.side.parameters())
        if self.code == "vector":
            extra = torch.nn.utils.parameters_to_vector(self.side.parameters()).pow(2).sum()
        if self.code == "list":
            bias = list(self.side.parameters())[1]
            extra = torch.cat([bias, bias]).exp().sum()
        if self.code == "data":
            extra = self.head.bias.sum() * next(iter(self.side.parameters())).data.norm()
        if self.code == "alone" and torch.distributed.get_rank() == 0:
            extra = sum(p.sum() for p in self.side.parameters())
        if self.code == "functional":
            weight, bias = self.side.parameters()
            side = torch.nn.functional.linear(hidden, weight, bias)
        else:
            side = self.side(hidden)
        return self.head(torch.tanh(side)).pow(2).mean() + extra * 0.1


def _join(context: RankContext) -> None:
    engine.assert_preloaded()
    shims.apply_common(CPU["shims"])
    shims.wait_for_every_gather(CPU["shims"], {"zero_stage": 3})
    engine.init_distributed(context, CPU["communication"])


def _guarded(mode: str) -> Any:
    os.environ["ZERO3_GUARD"] = mode
    guard = corrections.load("zero3_guard")
    assert guard.APPLIED is True
    return guard


def _engine(model: torch.nn.Module) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # 0.19 clips at 1.0 unless told otherwise
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    torch.nn.functional.linear = zero3_linear_wrap  # as zero.Init leaves it
    return wrapped


def _batch(step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def trains_like_plain_torch(context: RankContext) -> None:
    """Every rank has the same batch, so plain torch on one of them is the truth, step by step."""
    _join(context)
    _guarded("gather")
    plain_linear = torch.nn.functional.linear
    for code in context.payload["codes"]:
        torch.manual_seed(0)
        model = Small(code)
        plain = copy.deepcopy(model)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        wrapped = _engine(model)
        for step in range(STEPS):
            loss = wrapped(_batch(step), step)
            wrapped.backward(loss)
            wrapped.step()
            guarded_linear, torch.nn.functional.linear = torch.nn.functional.linear, plain_linear
            expected = plain(_batch(step), step)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            torch.nn.functional.linear = guarded_linear
            assert torch.allclose(loss, expected, rtol=1e-6, atol=1e-7), (code, step, loss, expected)
        for (name, there), truth in zip(model.named_parameters(), plain.parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([there]):
                assert torch.allclose(there, truth, rtol=1e-5, atol=1e-6), (code, name, there, truth)
        torch.nn.functional.linear = plain_linear


def stops_at_the_line(context: RankContext) -> None:
    """The message names the line whose source is in the payload, and so does the traceback's innermost frame here."""
    _join(context)
    _guarded("raise")
    for code, operation, source in context.payload["codes"]:
        wrapped = _engine(Small(code))
        try:
            wrapped(_batch(0), 2)
        except RuntimeError as error:
            assert type(error).__name__ == "PartitionedParameterError", repr(error)
            entry, line = error.__traceback__, 0
            while entry is not None:
                if entry.tb_frame.f_code.co_filename == __file__:
                    line = entry.tb_lineno
                entry = entry.tb_next
            assert linecache.getline(__file__, line).strip() == source, (code, line)
            beginning = f"{Path(__file__).name}:{line}: {operation} on side."
            assert str(error).startswith(beginning), (code, str(error), beginning)
        else:
            raise AssertionError(f"{code}: nothing was raised")


def touches_alone(context: RankContext) -> None:
    """Rank 0 learns that nobody else is there; what the other one sees then is gloo's affair."""
    _join(context)
    guard = _guarded("gather")
    guard.PATIENCE_S = 2
    wrapped = _engine(Small("alone"))
    try:
        wrapped(_batch(0), 0)
    except RuntimeError as error:
        if context.rank == 0:
            assert type(error).__name__ == "PartitionedParameterError", repr(error)
            assert "sum on side.weight at guard_bodies.py:" in str(error), str(error)
            assert "rank 1 did something else for 2 s" in str(error), str(error)
    else:
        assert context.rank == 1, "rank 0 gathered by itself"


def _state() -> list[dict[str, Any]]:
    classes = [getattr(importlib.import_module(module), name) for module, name in PATCHED]
    return [dict(vars(cls)) for cls in classes if cls is not None]


@contextmanager
def _replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    original = vars(thing)[name]
    setattr(thing, name, value)
    yield
    setattr(thing, name, original)


def _refused(expected: str) -> None:
    before = _state()
    try:
        corrections.load("zero3_guard")
    except RuntimeError as error:
        assert type(error).__name__ == "CannotCorrect", repr(error)
        assert expected in str(error), f"{expected} is not named: {error}"
    else:
        raise AssertionError(f"{expected}: not refused")
    assert _state() == before, f"{expected}: something was patched"


def unknown_code(self: Any, something: Any) -> None:
    """Stands for what a release has changed."""


def refuses(context: RankContext) -> None:
    """An unknown mode and unknown code: CannotCorrect says which, and nothing is patched."""
    engine.assert_preloaded()
    os.environ["ZERO3_GUARD"] = "rise"
    _refused("ZERO3_GUARD='rise', expected one of gather, raise")
    os.environ["ZERO3_GUARD"] = "gather"
    for module, cls, name in context.payload["code"]:
        owner = importlib.import_module(module)
        with _replaced(getattr(owner, cls) if cls else owner, name, unknown_code if cls else None):
            _refused(name)


def keeps_to_its_releases(context: RankContext) -> None:
    """Nothing on a release that is not claimed; a development version counts by its base; twice is once."""
    engine.assert_preloaded()
    installed, before = deepspeed.__version__, _state()
    deepspeed.__version__ = "0.14.3"
    assert corrections.load("zero3_guard").APPLIED is False
    assert _state() == before
    deepspeed.__version__ = f"{installed}+unknown.1234567"
    assert corrections.load("zero3_guard").APPLIED is True
    after = _state()
    assert after != before
    deepspeed.__version__ = installed
    assert corrections.load("zero3_guard").APPLIED is True
    assert _state() == after, "patched twice"
    os.environ["ZERO3_GUARD"] = "raise"
    _refused("already on with ZERO3_GUARD=gather")
