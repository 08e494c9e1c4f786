"""The adapter's workload, its alternative, and the finder of the user's own line, without ranks."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.jobs import engine, reference
from tests.jobs.adapter import CustomAdapter, emptied
from tests.jobs.adapter_model import USER_CODE, Linear_GroupDecodeAdapter, load_class
from tests.jobs.recorder import MicroBatch, RankRecord
from tests.jobs.registry import user_files
from tests.jobs.user_lines import Watch
from tests.jobs.workload import seed_weights

OWN = """
import torch

class Gate(torch.nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.gate = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden):
        return hidden * torch.sigmoid(self.gate(hidden))

def term(module):
    return sum(p.sum() for p in module.parameters()) * 0.0

def call(module, hidden):
    return module(hidden)

def wrong(module, hidden):
    weight, bias = module.parameters()
    return hidden + "no tensor"

def look(module):
    return [(p.shape, p.requires_grad, p.numel()) for p in module.parameters()]
"""


class Status(enum.Enum):
    """As DeepSpeed's ZeroParamStatus names them."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2


def workload(user_code: str, own: str | None = None, **case: Any) -> CustomAdapter:
    full = {
        "zero_stage": 3,
        "dtype": "fp32",
        "gradient_accumulation_steps": 1,
        "user_code": user_code,
        "checkpointing": "none",
        "frozen": False,
        "init": "disabled",
        **case,
    }
    return CustomAdapter(full, 0, own)


def built(chosen: CustomAdapter) -> torch.nn.Module:
    model = chosen.build()
    seed_weights(model, chosen)
    return model


def of(user_code: str, status: Status = Status.NOT_AVAILABLE) -> tuple[torch.nn.Module, Watch]:
    """A module that says of its parameters what ZeRO-3 would, and a watch for the user's file of `own`."""
    module = torch.nn.Linear(2, 3)
    for parameter in module.parameters():
        parameter.ds_status = status
    return module, Watch([Path(user_code)])


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def functions(path: Path) -> dict[str, Any]:
    """The functions of a file, their code known by its path."""
    found: dict[str, Any] = {"__name__": "own"}
    exec(compile(path.read_text(), str(path), "exec"), found)
    return found


@pytest.mark.parametrize("user_code", sorted(USER_CODE))
def test_every_user_code_has_a_loss_and_gradients_without_ranks(user_code: str) -> None:
    chosen = workload(user_code)
    model = built(chosen)
    loss, logprobs = chosen.loss(model, chosen.micro_batch(0, 0, 0))
    assert logprobs is None and bool(torch.isfinite(loss))
    loss.backward()
    given = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert "lm_head.weight" in given
    if USER_CODE[user_code].used == "always":
        assert "group_decode_adapter.linear.bias" in given


def test_a_keepalive_changes_neither_loss_nor_gradients() -> None:
    with_it, without = workload("keepalive-after"), workload("plain")
    model = built(without)
    batches = [[MicroBatch(without.micro_batch(0, 0, 0), 0.0, None)]]
    other = reference.gradients(built(with_it), with_it, batches)
    truth = reference.gradients(model, without, batches)
    assert other.loss == truth.loss
    assert all(torch.equal(other.mean[name], truth.mean[name]) for name in truth.mean)


def test_an_emptied_module_yields_placeholders_and_is_itself_again() -> None:
    module = Linear_GroupDecodeAdapter(4, 4, 3, "plain")
    with emptied(module):
        assert [tuple(parameter.shape) for parameter in module.parameters()] == [(0,), (0,)]
        assert module.linear.weight.shape == (12, 4)
        assert float(sum((p.detach() ** 2).sum() for p in module.parameters())) == 0.0
    assert [tuple(parameter.shape) for parameter in module.parameters()] == [(12, 4), (12,)]


def test_read_as_empty_an_l2_term_is_missing_from_the_loss() -> None:
    chosen = workload("l2-before")
    model = built(chosen)
    batch = chosen.micro_batch(0, 0, 0)
    missing = sum(float((p.detach() ** 2).sum()) for p in model.group_decode_adapter.parameters()) * 0.05
    (empty,) = chosen.alternatives().values()
    difference = float(chosen.loss(model, batch)[0]) - float(empty.loss(model, batch)[0])
    assert difference == pytest.approx(missing, rel=1e-5)


@pytest.mark.parametrize(
    ("user_code", "passes"),
    [
        ("l2-before", [True, True, True]),
        ("l2-unused", [True, True, True]),
        ("l2-after", [True, False, False]),
        ("detached-norm", [True, False, False]),
        ("detached-norm-attribute", [False, False, False]),
        ("external-parameter-l2", [False, False, False]),
        ("plain", [False, False, False]),
    ],
)
def test_in_which_passes_parameters_are_read_as_empty(user_code: str, passes: list[bool]) -> None:
    """Passes: first, second micro-batch of the first step, first of the second step."""
    chosen = workload(user_code)
    found = [chosen.micro_batch(0, step, index)["reads_nothing"] for step, index in ((0, 0), (0, 1), (1, 0))]
    assert found == passes
    assert set(chosen.alternatives()) == ({"partitioned_as_empty"} if any(passes) else set())


def test_a_frozen_adapter_does_not_train_and_the_rest_does() -> None:
    names = {n: p.requires_grad for n, p in built(workload("plain", frozen=True)).named_parameters()}
    assert not any(trains for name, trains in names.items() if name.startswith("group_decode_adapter."))
    assert all(trains for name, trains in names.items() if not name.startswith("group_decode_adapter."))


def test_a_users_own_module_stands_in_the_adapters_place(own: Path) -> None:
    spec = f"{own}:Gate"
    model = built(workload("keepalive-after", spec))
    assert type(model.group_decode_adapter).__name__ == "Gate"
    assert {"group_decode_adapter.gate.weight", "group_decode_adapter.gate.bias"} <= dict(
        model.named_parameters()
    ).keys()
    assert load_class(spec)(8).gate.in_features == 8


def test_the_models_file_and_the_users_are_the_users_files(own: Path) -> None:
    files = user_files({"job": "zero3-custom-adapter", "adapter": f"{own}:Gate"})
    assert [file.name for file in files] == ["adapter_model.py", "own.py"]
    assert user_files({"job": "grpo-lora", "adapter": None}) == ()


def test_the_line_that_touches_a_partitioned_parameter_is_found(own: Path) -> None:
    module, watch = of(str(own))
    with watch.during_forward(module):
        functions(own)["term"](module)
    culprit = watch.culprit()
    assert culprit is not None and culprit.away
    assert culprit.line.startswith("own.py:13 in term: return sum(p.sum() for p in module.parameters()) * 0.0")
    remedy = watch.remedy()
    assert remedy is not None and "weight, bias are partitioned there" in remedy and "model.weight" in remedy
    assert watch.notes() == [f"{culprit.line} reads weight, bias, partitioned by ZeRO-3 there: the values are missing"]


def test_looking_at_a_partitioned_parameter_without_reading_it_is_no_fault(own: Path) -> None:
    module, watch = of(str(own))
    with watch.during_forward(module):
        functions(own)["look"](module)
    assert watch.touches == []


def test_what_is_gathered_by_hand_is_named_only_where_nothing_else_is(own: Path) -> None:
    module, watch = of(str(own), Status.AVAILABLE)
    with watch.during_forward(module):
        functions(own)["call"](module, torch.ones(1, 2))  # the module's own operation, not the user's
        assert watch.culprit() is None
        functions(own)["term"](module)
    culprit = watch.culprit()
    assert culprit is not None and not culprit.away and culprit.line.startswith("own.py:13 in term")
    assert watch.notes() == []


def test_code_of_others_is_nobodys_line(own: Path) -> None:
    module, watch = of(str(own.with_name("another.py")))
    with watch.during_forward(module):
        functions(own)["term"](module)
    assert watch.touches == []


def test_watching_changes_no_number(own: Path) -> None:
    chosen = workload("l2-after")
    model, batch = built(chosen), chosen.micro_batch(0, 0, 0)
    plain = chosen.loss(model, batch)[0]
    with Watch([own]).during_forward(model):
        watched = chosen.loss(model, batch)[0]
    assert torch.equal(plain, watched)


def test_an_error_in_backward_is_told_with_the_line_that_autograd_lost(own: Path) -> None:
    module, watch = of(str(own))
    with watch.during_forward(module):
        functions(own)["term"](module)
    told = engine.describe(RuntimeError("got [0]"), "backward, step 0, micro-batch 0", 1, (own,), watch)
    assert told["user_frame"].startswith("own.py:13 in term") and told["remedy"] and told["rank"] == 1


def test_an_error_on_a_line_that_holds_partitioned_parameters_has_its_remedy(own: Path) -> None:
    module, watch = of(str(own))
    told: dict[str, Any] = {}
    with watch.during_forward(module):
        try:
            functions(own)["wrong"](module, torch.ones(1, 2))
        except TypeError as error:
            told = engine.describe(error, "forward, step 0, micro-batch 0", 0, (own,), watch)
    assert told["user_frame"] == 'own.py:20 in wrong: return hidden + "no tensor"'
    assert "model.weight" in told["remedy"]


def test_a_step_that_backward_ended_has_its_forward_and_says_why_it_has_nothing_else() -> None:
    chosen = workload("l2-before")
    model, ranks = built(chosen), []
    (empty,) = chosen.alternatives().values()
    for rank in range(2):
        batch = chosen.micro_batch(rank, 0, 0)
        read = float(empty.loss(model, batch)[0])
        ranks.append(RankRecord(rank, "", {}, {}, [], 0.0, "cpu", [], {}, [MicroBatch(batch, read, None)]))
    (step,) = reference.steps(chosen, ranks, None)
    assert step.index == 0 and step.loss_error is not None and step.loss_error > 0.05
    assert step.alternatives["partitioned_as_empty"].forward_error == pytest.approx(0.0, abs=1e-6)
    assert "forward" not in step.not_judged and len(step.not_judged) == 6
