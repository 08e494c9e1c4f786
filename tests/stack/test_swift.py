"""ms-swift cells, as far as they can be looked at without it: command line, loss, and what is taken from the log."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from tests.jobs import corrections, trl_grpo
from tests.jobs.adapter_model import TEXT_VOCABULARY
from tests.jobs.recorder import RankRecord, StepRecord
from tests.jobs.swift import grpo, sft, trainer
from tests.jobs.swift.grpo import SwiftGrpo
from tests.jobs.trl_grpo import TrlGrpo
from tests.jobs.workload import seed_weights

CASE = {
    "trainer": "ms-swift",
    "zero_stage": 2,
    "dtype": "fp32",
    "optimizer": "adamw",
    "gradient_accumulation_steps": 4,
    "beta": 0,
}
PAYLOAD: dict[str, Any] = {
    "job": "grpo-lora",
    "case": CASE,
    "seed": 3,
    "world_size": 2,
    "clip": 1.0,
    "corrections": [],
    "backend": {"training_arguments": {"use_cpu": True}},
}
RELEASES = {Version("3.10.2"): "--train_type", Version("4.6.0"): "--tuner_type"}


@pytest.mark.parametrize("release", RELEASES)
def test_the_command_line_is_that_of_the_report(release: Version) -> None:
    words = grpo.arguments(PAYLOAD, Path("folder"), [corrections.FOLDER / "loss_scale.py"], release)
    said = dict(zip(words[1::2], words[2::2], strict=False))
    assert words[0] == "rlhf"
    report = {
        "--rlhf_type": "grpo",
        "--deepspeed": "zero2",
        "--loss_type": "bnpo",
        "--epsilon_high": "0.28",
        "--lora_rank": "16",
        "--target_modules": "all-linear",
        "--temperature": "0.8",
        "--top_p": "0.85",
        "--overlong_filter": "true",
        "--dynamic_sample": "true",
        "--torch_dtype": "bfloat16",
        "--gradient_accumulation_steps": "4",
        "--use_cpu": "true",
        "--lr_scheduler_type": "constant_with_warmup",
        "--warmup_steps": "2",
        RELEASES[release]: "lora",
    }
    assert {name: said.get(name) for name in report} == report
    assert float(said["--max_grad_norm"]) == 1.0
    assert words[-3:] == ["--external_plugins", str(grpo.PLUGIN), str(corrections.FOLDER / "loss_scale.py")]
    assert "None" not in words


def test_the_learning_rate_is_that_of_transformers_warm_up() -> None:
    workload = SwiftGrpo(CASE, 3)
    usual = workload.settings().lr
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=usual)
    schedule = transformers.get_constant_schedule_with_warmup(optimizer, grpo.WARMUP_STEPS)
    for index in range(5):
        assert workload.settings_at(index).lr == pytest.approx(schedule.get_last_lr()[0], rel=1e-12)
        optimizer.step()
        schedule.step()
    assert TrlGrpo(CASE, 3).settings_at(0).lr == usual


ADAPTER_CASE = {
    "trainer": "ms-swift",
    "zero_stage": 3,
    "dtype": "fp32",
    "gradient_accumulation_steps": 1,
    "user_code": "keepalive-after",
    "init": "disabled",
    "frozen": False,
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("frozen", [False, True])
def test_sft_is_told_of_a_model_type_of_ones_own(frozen: bool, release: Version) -> None:
    payload = {**PAYLOAD, "job": "zero3-custom-adapter", "case": {**ADAPTER_CASE, "frozen": frozen}}
    words = sft.arguments(payload, Path("folder"), [], release)
    said = dict(zip(words[1::2], words[2::2], strict=True))
    assert words[0] == "sft" and "None" not in words
    report = {
        RELEASES[release]: "full",
        "--deepspeed": "zero3",
        "--torch_dtype": "float32",
        "--fp16": "false",
        "--model_type": sft.MODEL_TYPE,
        "--custom_register_path": str(sft.REGISTER),
        "--external_plugins": str(sft.PLUGIN),
    }
    assert {name: said.get(name) for name in report} == report
    assert said.get("--freeze_parameters") == ("group_decode_adapter" if frozen else None)


def test_sft_s_answers_have_one_length_and_words_that_the_model_knows(tmp_path: Path) -> None:
    workload = sft.SwiftAdapter(ADAPTER_CASE, 3)
    sft.write_inputs(workload, tmp_path)
    tokens = trl_grpo.tokenizer()
    rows = [json.loads(line)["messages"] for line in (tmp_path / "data.jsonl").read_text().splitlines()]
    found = [[tokens(message["content"])["input_ids"] for message in row] for row in rows]
    assert len(found) == sft.EXAMPLES
    assert {(len(query), len(answer)) for query, answer in found} == {(4, 7)}
    known = range(len(trl_grpo.SPECIAL_TOKENS), TEXT_VOCABULARY)
    assert all(token in known for row in found for text in row for token in text)
    ids = torch.tensor([query + answer for query, answer in found[:2]])
    labels = torch.where(torch.arange(11) < 4, -100, ids)
    loss, logprobs = workload.loss(workload.build(), {"input_ids": ids, "labels": labels})
    assert logprobs is None and loss.isfinite()


def batch(truncated: list[bool]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same micro-batch as ms-swift and as TRL have it; TRL's mask leaves truncated completions out."""
    drawn = TrlGrpo(CASE, 3).micro_batch(0, 0, 0)
    cut = torch.tensor(truncated)
    prompt, completion = drawn["prompt_ids"], drawn["completion_ids"]
    mask = drawn["completion_mask"].bool()
    ours = {
        "input_ids": torch.cat([prompt, completion], dim=1),
        "attention_mask": torch.cat([drawn["prompt_mask"], drawn["completion_mask"]], dim=1),
        "completion_mask": mask,
        "truncated_mask": cut,
        "logits_to_keep": completion.size(1),
        "advantages": drawn["advantages"],
    }
    return ours, {**drawn, "counted": mask & ~cut.unsqueeze(-1)}


@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("truncated", [[False] * 4, [False, True, False, False], [True] * 4])
def test_truncated_completions_do_not_count(truncated: list[bool], of_tokens: bool) -> None:
    model = TrlGrpo(CASE, 3).build()
    seed_weights(model, TrlGrpo(CASE, 3))
    inputs, same = batch(truncated)
    if of_tokens:  # ms-swift 4
        inputs["advantages"] = inputs["advantages"].unsqueeze(1).expand_as(inputs["completion_mask"])
    loss, logprobs = SwiftGrpo(CASE, 3).loss(model, inputs)
    _, expected = TrlGrpo(CASE, 3).loss(model, same)
    assert logprobs is not None and expected is not None
    assert torch.equal(logprobs, expected)
    # With one iteration the ratio is 1 everywhere, so the loss is the mean of the advantages over what counts.
    weights = same["counted"].float()
    mean = -(same["advantages"].unsqueeze(1) * weights).sum() / weights.sum().clamp(min=1.0)
    assert float(loss.detach()) == pytest.approx(float(mean), abs=1e-6)


def test_the_first_error_that_a_command_names_is_its_reason(capfd: pytest.CaptureFixture[str]) -> None:
    said = "W 7 warning\n[rank1]: ImportError: cannot import name 'x'\nRuntimeError: later\n"
    script = f"import sys; sys.stderr.write({said!r}); sys.exit(3)"
    assert trainer.run([sys.executable, "-c", script], {}) == (3, "ImportError: cannot import name 'x'")
    assert said in capfd.readouterr().out
    assert trainer.run([sys.executable, "-c", "print('fine')"], {}) == (0, "it named no error")


def records(*norms: float) -> list[RankRecord]:
    def step(norm: float) -> StepRecord:
        return StepRecord([], [], {}, norm, None, None, 1, [])

    return [RankRecord(rank, "", {}, {}, [step(norm) for norm in norms], 0.0, "cpu", [], {}) for rank in range(2)]


def test_the_norm_is_taken_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "logging.jsonl"
    entries = [{"loss": 0.5, "grad_norm": 0.12345679}, {"loss": 0.5, "grad_norm": 0.5}, {"train_loss": 0.5}]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    ranks = records(0.123456789012, 0.25, 0.125)
    trainer.take_logged(ranks, trainer.logged(log))
    first, second, third = ranks[0].steps
    assert (first.grad_norm_reported, first.violations) == (0.12345679, [])
    assert second.grad_norm_reported == 0.5
    assert second.violations == ["ms-swift logged grad_norm 0.5, the engine says 0.25"]
    assert third.violations == ["ms-swift logged nothing of this step"]
    assert [step.grad_norm_reported for step in ranks[1].steps[:2]] == [0.12345679, 0.25]
    assert trainer.logged(tmp_path / "none") == []


def test_the_mode_of_a_correction_reaches_swift_s_ranks_through_its_variable() -> None:
    assert corrections.modes(["zero3_guard=raise", "loss_scale"]) == {"ZERO3_GUARD": "raise"}
