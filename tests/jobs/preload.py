"""Imported once by the server that ranks are forked from: stack and jobs, then everything frozen out of the collector.

multiprocessing's server swallows ImportError, so each rank asserts `READY` and the number of threads that were
running at the end of the import (OpenMP or Arrow threads would be lost in the fork and hang the rank).
"""

from __future__ import annotations

import contextlib
import gc
import os

FAILED: dict[str, str] = {}
"""What could not be imported, with the reason: optional parts of a stack (trl in an engine-only one) end here."""

import torch  # noqa: E402  # reason: FAILED is filled below and documented above

torch.set_num_threads(1)

import deepspeed.runtime.engine  # noqa: E402, F401  # reason: imported for the forks
import transformers  # noqa: E402, F401  # reason: imported for the forks

_TRL = ("trl", "trl.trainer.grpo_trainer") if os.environ.get("JOBS_WITH_TRL", "1") == "1" else ()
"""Left out where no cell of the order needs it: it takes seconds, and fits fewer releases than the engine."""

for _name in ("peft", "accelerate", "datasets", *_TRL[:1]):
    try:
        __import__(_name)
    except ImportError as _error:
        FAILED[_name] = str(_error)

# What a first access inside a rank would import again in every case; a release that lacks one of them does without.
for _lazy in (
    "torch._dynamo",
    "torch._inductor.compiler_bisector",
    "torch._inductor.utils",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.fsdp",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.trainer",
    "transformers.integrations.deepspeed",
    "peft.tuners.lora",
    "peft.utils.transformers_weight_conversion",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.fp16.fused_optimizer",
    "deepspeed.runtime.fp16.unfused_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "tests.jobs.adapter",
    "tests.jobs.fp16_direct",
    "tests.jobs.grpo",
    "tests.jobs.referee",
    "tests.jobs.sweep_engine",
    *_TRL[1:],
):
    with contextlib.suppress(ImportError):
        __import__(_lazy)

# PEFT asks for this table, of a thousand regular expressions, whenever it wraps a model: 0.1 s a rank.
with contextlib.suppress(ImportError, AttributeError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")

READY = True
THREADS = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
gc.collect()
gc.freeze()
