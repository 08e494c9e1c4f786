"""A case straight through deepspeed.initialize: what each rank runs.

Fast, and without a trainer in between: the engine, a torch optimizer and a workload. Everything the rank sees is
recorded; an exception in training or in the workload's code is recorded as well and is no failure of the rank.
"""

from __future__ import annotations

import datetime
import linecache
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from tests.jobs import corrections, ds_config, loss_scaling, mutants, plain_optimizer, shims
from tests.jobs.launcher import RankContext
from tests.jobs.recorder import Recorder
from tests.jobs.registry import user_files, workload_for
from tests.jobs.user_lines import Watch

COLLECTIVE_TIMEOUT_S = 45


def assert_preloaded() -> None:
    """The server's imports must be whole and single-threaded (multiprocessing swallows an ImportError there).

    A rank that was spawned has imported for itself, and may have any number of threads.
    """
    from tests.jobs import preload

    forked = "tests.jobs.rank_server" in sys.modules
    if not getattr(preload, "READY", False) or (forked and preload.THREADS != 1):
        raise RuntimeError(
            f"the rank server is not ready: {getattr(preload, 'THREADS', 0)} threads at the end of its imports "
            "(expected 1), or an import of the stack failed"
        )


def assert_accelerator(backend: Mapping[str, Any]) -> str:
    """The name of DeepSpeed's accelerator, which must be the backend's and usable.

    Without a device DeepSpeed falls back to the CPU; told which accelerator to take (DS_ACCELERATOR) it takes it by
    name, device or not.
    """
    accelerator = get_accelerator()
    name: str = accelerator.device_name()
    if name != backend["accelerator"]:
        raise RuntimeError(
            f"wrong accelerator: DeepSpeed chose {name!r}, the backend {backend['id']} needs {backend['accelerator']!r}"
        )
    if not accelerator.is_available():
        raise RuntimeError(f"the accelerator {name!r} of backend {backend['id']} is not usable here: it has no device")
    return name


def init_distributed(context: RankContext, communication: str) -> None:
    """Rendezvous by a file in the case's own folder: no port, no other case can answer. A rank has its own device.

    To be called where an exception ends the rank: what it raises says nothing of training, and is no evidence.
    """
    get_accelerator().set_device(context.rank)
    deepspeed.init_distributed(
        dist_backend=communication,
        auto_mpi_discovery=False,
        verbose=False,
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
        init_method=context.rendezvous,
        rank=context.rank,
        world_size=context.world_size,
    )


class WrongEngine(RuntimeError):
    """What trains is not what the case is about: nothing it reports is evidence of the case."""


def assert_engine(engine: Any, case: Mapping[str, Any]) -> None:
    """Some pairs of releases fall back to plain data parallelism on CPU, or to another wrapper, without a word."""
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        raise WrongEngine(f"a {type(engine).__name__} trains, not a DeepSpeed engine")
    found = (engine.zero_optimization_stage(), engine.gradient_accumulation_steps())
    wanted = (int(case["zero_stage"]), int(case.get("gradient_accumulation_steps", 1)))
    if found != wanted:
        raise WrongEngine(f"the engine has (ZeRO stage, accumulation) {found}, the case asks for {wanted}")
    wrapper = type(engine.optimizer).__name__
    if case["dtype"] == "fp16" and wanted[0] == 0:
        expected = "FP16_Optimizer" if case["optimizer"] == "fused" else "FP16_UnfusedOptimizer"
        if wrapper != expected:
            raise WrongEngine(f"DeepSpeed chose {wrapper}, the case is about {expected}")


def configuration(case: Mapping[str, Any], payload: Mapping[str, Any]) -> dict[str, Any]:
    """The case's DeepSpeed configuration, or the user's own with the case's batch size where that says "auto"."""
    config = ds_config.engine_config(
        stage=int(case["zero_stage"]),
        dtype=case["dtype"],
        accumulation=int(case.get("gradient_accumulation_steps", 1)),
        micro_batch_size=1,
        hidden_size=64,
        gradient_clipping=None if case.get("gradient_clipping", "unset") == "unset" else payload["clip"],
        fp16=loss_scaling.fp16_section(case),
    )
    own = payload.get("ds_config")
    if own:
        config = ds_config.resolved(own, config)
    return config


def train(context: RankContext) -> None:
    """Body of a rank of an engine case; writes the rank's record."""
    assert_preloaded()
    payload = context.payload
    case: Mapping[str, Any] = payload["case"]
    backend: Mapping[str, Any] = payload["backend"]
    device = assert_accelerator(backend)
    applied = shims.apply_common(backend["shims"]) + shims.wait_for_every_gather(backend["shims"], case)
    if case["dtype"] == "fp16":
        applied += shims.allow_fp16(backend["shims"], get_accelerator())
    workload = workload_for(payload)
    recorder = Recorder(context.rank)
    recorder.facts["corrections"] = corrections.apply(payload["corrections"])
    site = mutants.site(payload, context.rank)
    watch = Watch(user_files(payload))
    init_distributed(context, backend["communication"])
    where = "setup"
    try:
        config = workload.adjust_config(configuration(case, payload))
        model = workload.build_on_rank(config)
        settings = plain_optimizer.settings(case)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = plain_optimizer.build(parameters, settings)
        if case.get("optimizer") == "fused":
            applied += shims.stand_in_for_fused(type(optimizer))
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=parameters, optimizer=optimizer, config=config, dist_init_required=False
        )
        workload.after_initialize(engine)
        engine.train()
        site.engine_made(engine)
        recorder.attach(engine)
        site.listened()
        old_logprobs: dict[int, torch.Tensor] = {}
        iterations = int(case.get("num_iterations", 1))
        assert_engine(engine, case)
        accumulation = int(case.get("gradient_accumulation_steps", 1))
        for step in range(workload.steps()):
            for index in range(accumulation):
                batch = workload.micro_batch(context.rank, step, index)
                if iterations > 1 and step % iterations:
                    batch["old_logprobs"] = old_logprobs[index]
                on_device = {k: v.to(engine.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
                with recorder.timed():
                    where = f"forward, step {step}, micro-batch {index}"
                    with watch.during_forward(engine.module):
                        loss, logprobs = workload.loss(engine, on_device)
                    with recorder.untimed():
                        recorder.micro_batch(batch, loss, logprobs)
                    if logprobs is not None and step % iterations == 0:
                        old_logprobs[index] = logprobs.detach().float().cpu().clone()
                    where = f"backward, step {step}, micro-batch {index}"
                    engine.backward(loss)
                    where = f"step, step {step}"
                    engine.step()
        recorder.facts["notes"] = watch.notes()
    except WrongEngine:
        raise
    except Exception as error:  # noqa: BLE001  # reason: what training or user code raises is evidence, whatever it is
        traceback.print_exc()
        recorder.facts["exception"] = describe(error, where, context.rank, user_files(payload), watch)
    recorder.facts.update(site.facts())
    recorder.save(context.record_path, device=device, shims=applied)


def describe(
    error: BaseException, where: str, rank: int, files: tuple[Path, ...], watch: Watch | None = None
) -> dict[str, Any]:
    """An exception as evidence data.

    user_frame: the innermost frame in one of the user's own files; outside the forward pass the line that autograd
    has lost, if the watch saw one.
    """
    frame = None
    for entry in traceback.extract_tb(error.__traceback__):
        if Path(entry.filename).resolve() in files:
            line = linecache.getline(entry.filename, entry.lineno or 0).strip()
            frame = f"{Path(entry.filename).name}:{entry.lineno} in {entry.name}: {line}"
    if watch is not None:
        watch.note_failure(error)
    seen = watch.culprit() if watch is not None else None
    if seen is not None and (frame is None or not where.startswith("forward")):
        frame = seen.line
    return {
        "type": type(error).__name__,
        "message": str(error)[:4000],
        "user_frame": frame,
        "remedy": watch.remedy() if watch is not None else None,
        "where": where,
        "rank": rank,
        "at": time.time(),
    }
