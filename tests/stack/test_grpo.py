"""What the reference of the GRPO workload makes of ZeRO-3's own linear layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

from tests.jobs import grpo
from tests.jobs.grpo import GrpoLora

CASE = {"zero_stage": 3, "dtype": "bf16", "beta": 0.0, "num_iterations": 1}


def qwen2() -> Any:
    """What the job's model is where transformers has no Qwen3 yet: with biases."""
    sizes = {"vocab_size": grpo.VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    return transformers.Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **sizes)


@pytest.mark.parametrize("dimensions", [2, 3])
def test_a_bias_is_added_as_zero3_adds_it(dimensions: int) -> None:
    draw = torch.Generator().manual_seed(1)
    shape = (2, 8, 32)[-dimensions:]
    inputs, weight, bias = (torch.randn(size, generator=draw).bfloat16() for size in (shape, (64, 32), (64,)))
    plain = torch.nn.functional.linear(inputs, weight, bias)
    with grpo.bias_added_after_rounding():
        found = torch.nn.functional.linear(inputs, weight, bias)
        assert torch.equal(torch.nn.functional.linear(inputs, weight), inputs.matmul(weight.t()))
    assert torch.equal(found, LinearFunctionForZeroStage3.apply(inputs, weight, bias))
    assert torch.equal(found, plain) is (dimensions == 2)
    assert torch.equal(torch.nn.functional.linear(inputs, weight, bias), plain)


@pytest.mark.parametrize(
    ("change", "biased", "expected"),
    [
        ({}, True, True),
        ({"dtype": "fp16"}, True, True),
        ({"dtype": "fp32"}, True, False),
        ({"zero_stage": 2}, True, False),
        ({}, False, False),
    ],
)
def test_it_is_an_alternative_where_it_can_show(
    change: dict[str, Any], biased: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if biased:
        monkeypatch.setattr(grpo, "tiny_model", lambda: transformers.Qwen2ForCausalLM(qwen2()))
    found = GrpoLora({**CASE, **change}, seed=3).alternatives()
    assert set(found) == ({"bias_added_after_rounding"} if expected else set())


def test_the_alternative_computes_another_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "tiny_model", lambda: transformers.Qwen2ForCausalLM(qwen2()))
    workload = GrpoLora(CASE, seed=3)
    model = workload.build_on_rank({}).bfloat16()
    batch = workload.micro_batch(0, 0, 0)
    _, plain = workload.loss(model, batch)
    _, apart = workload.alternatives()["bias_added_after_rounding"].loss(model, batch)
    assert plain is not None and apart is not None
    assert 0 < float((plain - apart).detach().abs().max()) < 0.1
