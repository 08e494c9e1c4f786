"""Changes to libraries without which a case cannot run on this device at all; each with its reason, each recorded.

None touches a number that is judged. `wanted` are the names of those that the backend's entry allows; which of them
apply follows from the installed releases and the case.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import deepspeed
import torch
import transformers
from packaging.version import Version

Applied = list[tuple[str, str]]


def _released(package_version: str) -> Version:
    return Version(Version(package_version).base_version)


def apply_common(wanted: Collection[str]) -> Applied:
    """Shims that every engine case needs here, applied to this process. Returns (name, reason) of each."""
    applied: Applied = []
    if "no-shared-memory-collective" in wanted:
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # reason: a module's own function is replaced
        applied.append(
            (
                "no-shared-memory-collective",
                "DeepSpeed compiles its CPU shared-memory collective at first use (90 s, needs a compiler); "
                "gloo carries every collective instead",
            )
        )
    if "gather-without-autograd" in wanted and _released(deepspeed.__version__) < Version("0.19.0"):
        from deepspeed.runtime import utils
        from deepspeed.runtime.zero import stage_1_and_2

        for name in ("all_gather_dp_groups", "all_gather_into_tensor_dp_groups"):
            if hasattr(utils, name):
                wrapped = torch.no_grad()(getattr(utils, name))
                for module in (utils, stage_1_and_2, sys.modules.get("deepspeed.runtime.bf16_optimizer")):
                    if module is not None and hasattr(module, name):
                        setattr(module, name, wrapped)
        applied.append(
            (
                "gather-without-autograd",
                "ZeRO-1/2's all-gather writes into a view with autograd on, which torch >= 2.9 refuses on CPU "
                "(deepspeedai/DeepSpeed#7948, fixed in 0.19.0)",
            )
        )
    return applied


def wait_for_every_gather(wanted: Collection[str], case: Mapping[str, Any]) -> Applied:
    """Make ZeRO-3's coalesced gather wait for each of its collectives (persistent parameters after every step).

    Up to 0.19.3 it waits for the last one only, which is enough on a stream and not with gloo: 2-5 % of such gathers
    return memory that nothing has written yet, seen here as a loss of inf on 0.17.6.
    """
    if "wait-for-every-gather" not in wanted or int(case["zero_stage"]) != 3:
        return []
    if _released(deepspeed.__version__) >= Version("0.19.4"):
        return []
    from deepspeed.runtime.zero import partition_parameters

    original = partition_parameters.Init._allgather_params_coalesced
    collectives = partition_parameters.dist

    def waited(gather: Any) -> Any:
        @functools.wraps(gather)
        def call(*args: Any, **kwargs: Any) -> Any:
            handle = gather(*args, **kwargs)
            if handle is not None:
                handle.wait()
            return handle

        return call

    @functools.wraps(original)
    def coalesced(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept = {name: getattr(collectives, name) for name in ("all_gather", "all_gather_into_tensor")}
        for name, gather in kept.items():
            setattr(collectives, name, waited(gather))
        try:
            return original(self, *args, **kwargs)
        finally:
            for name, gather in kept.items():
                setattr(collectives, name, gather)

    partition_parameters.Init._allgather_params_coalesced = coalesced
    return [
        (
            "wait-for-every-gather",
            "up to 0.19.3 ZeRO-3's coalesced gather waits for its last collective only; with gloo the others may not "
            "have written yet, which makes any number of a case wrong once in a while",
        )
    ]


def allow_fp16(wanted: Collection[str], accelerator: Any) -> Applied:
    """Let the CPU accelerator train in fp16, which it refuses where the processor has no avx512_fp16."""
    if "fp16-on-cpu" not in wanted or accelerator.is_fp16_supported():
        return []
    cls = type(accelerator)
    cls.is_fp16_supported = lambda self: True
    cls.supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]
    return [("fp16-on-cpu", "DeepSpeed refuses fp16 on a CPU without avx512_fp16; torch computes it all the same")]


def float_tensor_of_a_number(wanted: Collection[str], accelerator: Any) -> Applied:
    """Let the CPU accelerator's FloatTensor take a number, as that of CUDA does: the experts' norm is made with it."""
    if "float-tensor-of-a-number" not in wanted or _released(deepspeed.__version__) >= Version("0.19.2"):
        return []
    type(accelerator).FloatTensor = property(lambda self: functools.partial(torch.tensor, dtype=torch.float))
    return [("float-tensor-of-a-number", "FP16_Optimizer with experts raises on CPU alone (fixed in 0.19.2, #7938)")]


def stand_in_for_fused(optimizer_class: type) -> Applied:
    """Make DeepSpeed choose FP16_Optimizer for `optimizer_class`: it asks isinstance(optimizer, FusedAdam)."""
    import deepspeed.runtime.engine as engine

    engine.FusedAdam = optimizer_class
    return [("fused-stand-in", "the wrapper is chosen by FusedAdam, a compiled op; a torch optimizer stands in for it")]


@contextmanager
def plain_linear() -> Iterator[None]:
    """torch's own F.linear while inside: zero.Init leaves its replacement behind."""
    patched = torch.nn.functional.linear
    torch.nn.functional.linear = torch._C._nn.linear
    try:
        yield
    finally:
        torch.nn.functional.linear = patched


def drop_empty_groups(optimizer: torch.optim.Optimizer) -> Applied:
    """Take parameter groups that hold nothing out of a trainer's optimizer."""
    held = [group for group in optimizer.param_groups if group["params"]]
    if _released(transformers.__version__) >= Version("5.0") or len(held) == len(optimizer.param_groups):
        return []
    optimizer.param_groups[:] = held
    return [
        (
            "no-empty-parameter-groups",
            "LoRA leaves the trainer's group without weight decay empty, DeepSpeed drops it, and torch's scheduler "
            "(>= 2.13) then refuses to pair the groups (transformers before 5); it is left out from the start",
        )
    ]


def apply_trl(wanted: Collection[str], case: Mapping[str, Any]) -> Applied:
    """Shims that TRL's trainer needs here beside those of every engine case."""
    applied: Applied = []
    if "gather-one-by-one" not in wanted:
        return applied
    if int(case["zero_stage"]) == 3 and _released(deepspeed.__version__) < Version("0.19.4"):
        deepspeed.zero.GatheredParameters = _one_by_one
        applied.append(
            (
                "gather-one-by-one",
                "GatheredParameters of several parameters waits for the last alone (up to 0.19.3), so that on gloo "
                "generation may read unwritten memory; there each is gathered by itself, training is untouched",
            )
        )
    return applied


def apply_swift(wanted: Collection[str], accelerator: str, communication: str) -> Applied:
    """Shims that ms-swift needs beside those of every TRL case."""
    applied: Applied = []
    if "communication-first" in wanted:
        deepspeed.init_distributed(dist_backend=communication, auto_mpi_discovery=False, verbose=False)
        applied.append(
            (
                "communication-first",
                "told use_cpu, without which transformers refuses bf16 and a new accelerate sees one process, "
                "the trainer leaves DeepSpeed out unless DeepSpeed's communication is there already",
            )
        )
    if "memory-of-the-cpu" in wanted:
        module = getattr(torch, accelerator)
        for name in _MEMORY_STATISTICS:
            if not hasattr(module, name):
                setattr(module, name, lambda *_, **__: 0)
        applied.append(("memory-of-the-cpu", "ms-swift asks torch.cpu for memory statistics that only devices have"))
    return applied


def rollout_attributes(trainer: type) -> Applied:
    """Give ms-swift's GRPO trainer the attributes that it has with vLLM alone."""
    absent = [name for name in _ROLLOUT_ATTRIBUTES if not hasattr(trainer, name)]
    for name in absent:
        setattr(trainer, name, False)
    if not absent:
        return []
    return [
        (
            "rollout-attributes",
            "ms-swift 3.10 sets attributes of its trainer where it uses vLLM, and reads them without",
        )
    ]


_MEMORY_STATISTICS = (
    "max_memory_reserved",
    "max_memory_allocated",
    "memory_reserved",
    "memory_allocated",
    "empty_cache",
)
_ROLLOUT_ATTRIBUTES = (
    "use_fast_infer",
    "enable_offload",
    "use_gym_env",
    "enable_server_multi_turn",
    "rollout_enable_lora",
    "vllm_use_async_engine",
)


@contextmanager
def _one_by_one(params: Iterable[torch.nn.Parameter], *args: Any, **kwargs: Any) -> Iterator[None]:
    """deepspeed.zero.GatheredParameters, a parameter at a time."""
    from deepspeed.runtime.zero.partition_parameters import GatheredParameters

    with ExitStack() as stack:
        for parameter in [params] if isinstance(params, torch.Tensor) else list(params):
            stack.enter_context(GatheredParameters([parameter], *args, **kwargs))
        yield
