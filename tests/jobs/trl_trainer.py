"""A case through TRL's GRPOTrainer: what each rank runs.

The real trainer on the real libraries, as the user of report A starts it: a model from a folder, PEFT's LoRA handed to
TRL, a DeepSpeed configuration with ms-swift's content and its "auto", completions generated in the run. The trainer is
listened to at the three places where its numbers pass (per-token log-probabilities, engine.backward, engine.step) and
computes what it would compute without us.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import datasets
import deepspeed
import torch
import transformers
from packaging.version import Version
from trl import GRPOConfig, GRPOTrainer

from tests.jobs import corrections, ds_config, grpo, plain_optimizer, shims, trl_grpo
from tests.jobs.engine import (
    WrongEngine,
    assert_accelerator,
    assert_engine,
    assert_preloaded,
    describe,
    init_distributed,
)
from tests.jobs.launcher import RankContext
from tests.jobs.recorder import Recorder
from tests.jobs.registry import user_files, workload_for
from tests.jobs.workload import DTYPES, Workload, seeded_weight

INPUTS = {
    "prompt_ids": "prompt_ids",
    "prompt_mask": "prompt_mask",
    "completion_ids": "completion_ids",
    "completion_mask": "completion_mask",
    "advantages": "advantages",
    "old_per_token_logps": "old_logprobs",
    "ref_per_token_logps": "reference_logprobs",
}
"""TRL's names of a micro-batch's inputs, and ours. The last two are absent or None where TRL does not use them."""


class RecordedTrainer(GRPOTrainer):  # type: ignore[misc]  # reason: TRL is not installed where types are checked
    """GRPOTrainer that keeps each micro-batch's inputs and log-probabilities until its backward pass."""

    inputs_seen: Mapping[str, Any]
    logprobs_seen: torch.Tensor | None = None
    shims_applied: shims.Applied = []  # noqa: RUF012  # reason: replaced by the one instance, never appended to

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer's own optimizer; called more than once, and the later calls find the groups in order."""
        optimizer = super().create_optimizer(*args, **kwargs)
        self.shims_applied = self.shims_applied + shims.drop_empty_groups(optimizer)
        return optimizer

    def _get_per_token_logps(self, *args: Any, **kwargs: Any) -> Any:
        logprobs = super()._get_per_token_logps(*args, **kwargs)
        self.logprobs_seen = logprobs
        return logprobs

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.logprobs_seen = found[0]
        return found

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        self.inputs_seen = inputs
        return super()._compute_loss(model, inputs)


class Listener(transformers.TrainerCallback):  # type: ignore[misc]  # reason: as above
    """Attaches the recorder once the trainer has made its engine, and seeds what completions are drawn from."""

    def __init__(
        self, recorder: Recorder, case: Mapping[str, Any], seed: int, names: Mapping[str, str] = INPUTS
    ) -> None:
        """names: the trainer's names of a micro-batch's inputs, and ours."""
        self.recorder = recorder
        self.names = names
        self.case = case
        self.seed = seed
        self.trainer: Any
        self.began: float | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        engine = self.trainer.model_wrapped
        assert_engine(engine, self.case)
        self.recorder.attach(engine)
        self._listen_to_backward(engine)
        # Whatever a stage drew while it was set up, step 1 draws the same completions at every stage.
        transformers.set_seed(1000 * self.seed + self.recorder.rank)
        self.began = time.perf_counter()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.stop_clock()

    def stop_clock(self) -> None:
        if self.began is not None:
            self.recorder.training_s += time.perf_counter() - self.began
            self.began = None

    def _listen_to_backward(self, engine: Any) -> None:
        backward = engine.backward
        accumulation = engine.gradient_accumulation_steps()

        @functools.wraps(backward)
        def recorded(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with self.recorder.untimed():
                seen = self.trainer.inputs_seen
                inputs = {ours: seen[theirs] for theirs, ours in self.names.items() if seen.get(theirs) is not None}
                # Where DeepSpeed is told not to divide by the accumulation steps the trainer has done so.
                divided = not kwargs.get("scale_wrt_gas", True)
                self.recorder.micro_batch(inputs, loss * accumulation if divided else loss, self.trainer.logprobs_seen)
            return backward(loss, *args, **kwargs)

        engine.backward = recorded


def configuration(case: Mapping[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
    """ms-swift's configuration of the case's stage, "auto" kept for transformers to fill; or the user's own."""
    if own:
        # The case states optimizer and learning rate, so that the update can be judged.
        return {key: value for key, value in own.items() if key not in ("optimizer", "scheduler")}
    return {
        "fp16": {"enabled": "auto", **ds_config.FP16_SECTION},
        "bf16": {"enabled": "auto"},
        "zero_optimization": ds_config.zero_section(int(case["zero_stage"])),
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


def arguments(payload: Mapping[str, Any], workload: Workload, folder: Path) -> Any:
    """The trainer's arguments: report A's, and the case's optimizer spelled out."""
    case = payload["case"]
    optimizer = plain_optimizer.settings(case)
    known = {field.name for field in dataclasses.fields(GRPOConfig)}
    # TRL 1.x weighs the KL term by the ratio unless told otherwise, which earlier releases do not.
    newer: dict[str, Any] = {"use_bias_correction_kl": False} if "use_bias_correction_kl" in known else {}
    return GRPOConfig(
        **newer,
        output_dir=str(folder / "output"),
        deepspeed=configuration(case, payload.get("ds_config")),
        **payload["backend"]["training_arguments"],
        bf16=case["dtype"] == "bf16",
        fp16=False,
        per_device_train_batch_size=grpo.SEQUENCES,
        gradient_accumulation_steps=int(case["gradient_accumulation_steps"]),
        num_generations=grpo.SEQUENCES,
        max_completion_length=grpo.COMPLETION,
        num_iterations=int(case.get("num_iterations", 1)),
        loss_type="bnpo",
        beta=float(case.get("beta") or 0.0),
        epsilon=grpo.EPSILON_LOW,
        epsilon_high=grpo.EPSILON_HIGH,
        temperature=grpo.TEMPERATURE,
        top_p=trl_grpo.TOP_P,
        optim=plain_optimizer.IN_TRANSFORMERS[optimizer.kind],
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=float(payload["clip"] or 0.0),
        max_steps=workload.steps(),
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=int(payload["seed"]),
        data_seed=int(payload["seed"]),
    )


def load_model(folder: Path, dtype: torch.dtype) -> Any:
    """The model as a user loads it; at ZeRO-3 transformers partitions it as it is built."""
    key = "dtype" if Version(transformers.__version__) >= Version("4.56") else "torch_dtype"
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **{key: dtype})


def seed_adapters(model: torch.nn.Module, workload: Workload) -> None:
    """Seed the LoRA weights that PEFT drew at random. They are whole at every stage until the engine is made."""
    dtype, zero = DTYPES[workload.case["dtype"]], workload.case.get("lora_b") == "zero"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if workload.trainable(name):
                shape = tuple(parameter.shape)
                parameter.copy_(seeded_weight(name, shape, workload.seed, dtype, lora_b_zero=zero))


def compare_logged(recorder: Recorder, history: list[Mapping[str, Any]]) -> None:
    """Report the norm that the trainer logged; that it is not the engine's is a violation of its own."""
    logged = [entry.get("grad_norm") for entry in history if "loss" in entry]
    for index, step in enumerate(recorder.steps):
        engine = step.grad_norm_reported
        if index >= len(logged):
            step.violations.append("the trainer logged nothing of this step")
            continue
        norm = logged[index]
        step.grad_norm_reported = None if norm is None else float(norm)
        if step.grad_norm_reported != engine:
            step.violations.append(f"the trainer logged grad_norm {norm}, the engine says {engine}")


def completions_digest(recorder: Recorder) -> str:
    """A hash of the first step's completions on this rank: equal at every stage."""
    drawn = [
        [ids[mask.bool()].tolist() for ids, mask in zip(b["completion_ids"], b["completion_mask"], strict=True)]
        for b in (micro_batch.inputs for micro_batch in recorder.steps[0].micro_batches)
    ]
    return hashlib.sha256(json.dumps(drawn).encode()).hexdigest()


def train(context: RankContext) -> None:
    """Body of a rank of a TRL case; writes the rank's record."""
    assert_preloaded()
    payload = context.payload
    case: Mapping[str, Any] = payload["case"]
    wanted = payload["backend"]["shims"]
    device = assert_accelerator(payload["backend"])
    applied = shims.apply_common(wanted) + shims.wait_for_every_gather(wanted, case) + shims.apply_trl(wanted, case)
    workload = workload_for(payload)
    assert isinstance(workload, trl_grpo.TrlGrpo)
    recorder = Recorder(context.rank)
    recorder.facts["corrections"] = corrections.apply(payload["corrections"])
    listener = Listener(recorder, case, workload.seed)
    folder = context.workdir / "trl"
    trainer = None
    # What accelerate asks of a launcher when it is told to use the CPU; all ranks of a case are on one machine.
    os.environ["LOCAL_WORLD_SIZE"] = str(context.world_size)
    init_distributed(context, payload["backend"]["communication"])
    try:
        if context.rank == 0:
            workload.folder_model().save_pretrained(folder / "model")
        deepspeed.comm.barrier()
        # Before the model: transformers partitions what it loads where the arguments ask for ZeRO-3.
        args = arguments(payload, workload, folder)
        trainer = listener.trainer = RecordedTrainer(
            model=load_model(folder / "model", DTYPES[case["dtype"]]),
            reward_funcs=trl_grpo.reward,
            args=args,
            train_dataset=datasets.Dataset.from_dict({"prompt": trl_grpo.prompts()}),
            processing_class=trl_grpo.tokenizer(),
            callbacks=[listener],
            peft_config=grpo.lora_config(),
        )
        seed_adapters(trainer.model, workload)
        trainer.train()
    except WrongEngine:
        raise
    except Exception as error:  # noqa: BLE001  # reason: what training raises is evidence, whatever it is
        traceback.print_exc()
        where = f"step {len(recorder.steps)}" if listener.began is not None else "setup"
        recorder.facts["exception"] = describe(error, where, context.rank, user_files(payload))
    listener.stop_clock()
    if trainer is not None:
        compare_logged(recorder, trainer.state.log_history)
        applied += trainer.shims_applied
    if recorder.steps:
        digest = completions_digest(recorder)
        recorder.facts["notes"] = [f"rank {context.rank}: completions of step 1: sha256 {digest}"]
    recorder.save(context.record_path, device=device, shims=applied)
