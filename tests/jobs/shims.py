"""Changes to libraries without which a case cannot run on this device at all; each with its reason, each recorded.

None touches a number that is judged. Which of them apply follows from the accelerator and the installed releases.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from packaging.version import Version

Applied = list[tuple[str, str]]


def _released(package_version: str) -> Version:
    return Version(Version(package_version).base_version)


def apply_common(accelerator: str) -> Applied:
    """Shims that every engine case needs here, applied to this process. Returns (name, reason) of each."""
    applied: Applied = []
    if accelerator == "cpu":
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # reason: a module's own function is replaced
        applied.append(
            (
                "no-shared-memory-collective",
                "DeepSpeed compiles its CPU shared-memory collective at first use (90 s, needs a compiler); "
                "gloo carries every collective instead",
            )
        )
    if accelerator == "cpu" and _released(deepspeed.__version__) < Version("0.19.0"):
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


def allow_fp16(accelerator: Any) -> Applied:
    """Let the CPU accelerator train in fp16, which it refuses where the processor has no avx512_fp16."""
    if accelerator.device_name() != "cpu" or accelerator.is_fp16_supported():
        return []
    cls = type(accelerator)
    cls.is_fp16_supported = lambda self: True
    cls.supported_dtypes = lambda self: [torch.float, torch.half, torch.bfloat16]
    return [("fp16-on-cpu", "DeepSpeed refuses fp16 on a CPU without avx512_fp16; torch computes it all the same")]


def float_tensor_of_a_number(accelerator: Any) -> Applied:
    """Let the CPU accelerator's FloatTensor take a number, as that of CUDA does: the experts' norm is made with it."""
    if accelerator.device_name() != "cpu" or _released(deepspeed.__version__) >= Version("0.19.2"):
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
