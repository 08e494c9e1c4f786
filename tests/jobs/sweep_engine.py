"""A case of the job engine-sweep: what each rank runs.

As tests/jobs/engine.py, with what only these cases have: parameter groups, several backward calls a micro-step, and
a checkpoint in the middle from which a fresh engine goes on.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from tests.jobs import corrections, engine, masters, mutants, shims
from tests.jobs.launcher import RankContext
from tests.jobs.recorder import Recorder, _recording, _weights
from tests.jobs.reference import NOT_RESTORED
from tests.jobs.sweep_workload import HOST_MEMORY, RESUME_AFTER, EngineSweep
from tests.jobs.workload import DTYPES

TAG = "middle"


class ResumingRecorder(Recorder):
    """A recorder that moves on to a fresh engine and notes what a checkpoint did not bring back, bitwise."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self._not_restored: list[str] = []

    @_recording
    def resume(self, fresh: Any) -> None:
        """Listen to an engine into which the state after the last recorded step has been loaded."""
        last = self.steps[-1]
        frozen = self._frozen
        self.attach(fresh)
        assert self._spy is not None
        found = []
        pieces = {(piece.name, piece.start): piece for piece in last.pieces}
        for fragment, master in zip(self._fragments, self._before, strict=True):
            piece = pieces.pop((fragment.name, fragment.start), None)
            if piece is None:
                found.append(f"{fragment.name}: another part of it is held after resuming")
                continue
            if not torch.equal(piece.master_after, master):
                found.append(f"{fragment.name}: {NOT_RESTORED}")
            held = self._spy.state(fragment.master)
            for moment, value in piece.state_after.items():
                if moment not in held or not torch.equal(fragment.read(held[moment]), value):
                    found.append(f"{fragment.name}: {moment} is not restored by the checkpoint")
        found += [f"{name}: no master is held after resuming" for name, _ in pieces]
        scale = masters.loss_scale(fresh.optimizer)
        if scale != last.loss_scale_after:
            found.append("the loss scale is not restored by the checkpoint")
        if fresh.global_steps != len(self.steps):
            found.append("the number of steps taken is not restored by the checkpoint")
        for name, parameter in fresh.module.named_parameters():
            if name in frozen and not torch.equal(_weights(parameter, self.rank)[1], frozen[name]):
                found.append(f"{name}: frozen, and not restored by the checkpoint")
        self._frozen = frozen
        self._not_restored = found

    def _close(self) -> None:
        super()._close()
        if self._not_restored:
            self.steps[-1].violations.extend(self._not_restored)
            self._not_restored = []


def _initialize(workload: EngineSweep, config: dict[str, Any], *, resuming: bool) -> tuple[Any, shims.Applied]:
    """(a new engine for the case, shims). resuming: its weights are off until a checkpoint is loaded."""
    applied: shims.Applied = []
    model = workload.build_on_rank(config)
    if resuming:
        workload.put_off(model)
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = workload.optimizer(trainable)
    if workload.case["optimizer"] == "fused":
        applied += shims.stand_in_for_fused(type(optimizer))
    built, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    assert_as_asked(built, workload.case)
    built.train()
    return built, applied


def assert_as_asked(built: Any, case: Mapping[str, Any]) -> None:
    """A configuration that the engine dropped without a word would be swept in name only."""
    engine.assert_engine(built, case)
    offload = case["offload"]
    found = {
        "offload_optimizer": bool(built.zero_cpu_offload()),
        "offload_param": str(getattr(built.zero_offload_param(), "device", "none")).endswith(HOST_MEMORY),
    }
    wanted = {"offload_optimizer": offload != "none", "offload_param": offload == "optimizer-and-parameters"}
    if case["grad_accum_dtype"] != "unset":
        found["grad_accum_dtype"] = built.get_data_types()[1]
        wanted["grad_accum_dtype"] = DTYPES[case["grad_accum_dtype"]]
    if found != wanted:
        raise engine.WrongEngine(f"the engine has {found}, the case asks for {wanted}")


def train(context: RankContext) -> None:
    """Body of a rank; writes the rank's record."""
    engine.assert_preloaded()
    payload = context.payload
    case: Mapping[str, Any] = payload["case"]
    wanted = payload["backend"]["shims"]
    device = engine.assert_accelerator(payload["backend"])
    applied = shims.apply_common(wanted) + shims.wait_for_every_gather(wanted, case)
    if case["dtype"] == "fp16":
        applied += shims.allow_fp16(wanted, get_accelerator())
    workload = EngineSweep(case, int(payload["seed"]))
    recorder = ResumingRecorder(context.rank)
    recorder.facts["corrections"] = corrections.apply(payload["corrections"])
    site = mutants.site(payload, context.rank)
    calls = int(case["backward_calls"])
    engine.init_distributed(context, payload["backend"]["communication"])
    where = "setup"
    try:
        config = workload.adjust_config(engine.configuration(case, payload))
        current, more = _initialize(workload, config, resuming=False)
        applied += more
        site.engine_made(current)
        recorder.attach(current)
        site.listened()
        for step in range(workload.steps()):
            if case["resume"] and step == RESUME_AFTER:
                where = f"save, step {step}"
                folder = str(context.workdir / "checkpoint")
                current.save_checkpoint(folder, tag=TAG)
                where = f"resume, step {step}"
                del current
                gc.collect()
                current, _ = _initialize(workload, config, resuming=True)
                path, _ = current.load_checkpoint(folder, tag=TAG)
                if path is None:
                    raise RuntimeError("load_checkpoint found nothing where save_checkpoint had written")
                site.engine_made(current)
                recorder.resume(current)
                site.listened()
            for index in range(int(case["gradient_accumulation_steps"])):
                for call in range(calls):
                    batch = workload.micro_batch(context.rank, step, index * calls + call)
                    on_device = {
                        k: v.to(current.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()
                    }
                    with recorder.timed():
                        where = f"forward, step {step}, micro-batch {index}"
                        loss, _ = workload.loss(current, on_device)
                        with recorder.untimed():
                            recorder.micro_batch(batch, loss, None)
                        where = f"backward, step {step}, micro-batch {index}"
                        current.backward(loss / calls if calls > 1 else loss)
                with recorder.timed():
                    where = f"step, step {step}"
                    current.step()
    except engine.WrongEngine:
        raise
    except Exception as error:  # noqa: BLE001  # reason: what training raises is evidence, whatever it is
        traceback.print_exc()
        recorder.facts["exception"] = engine.describe(error, where, context.rank, ())
    recorder.facts.update(site.facts())
    recorder.save(context.record_path, device=device, shims=applied)
