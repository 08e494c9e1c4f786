"""DeepSpeed configurations: equal in content to the zero0 ... zero3 files that ms-swift ships, "auto" resolved or kept.

Values as read in ms-swift 3.10.2 (swift/llm/ds_config, modelscope/ms-swift); ZeRO-1 and -2 differ in the stage alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packaging.version import Version


def zero_section(stage: int, hidden_size: int | None = None) -> dict[str, Any]:
    """The zero_optimization section.

    hidden_size: resolves ZeRO-3's "auto" sizes as transformers does; None keeps "auto".
    """
    if stage == 0:
        return {
            "stage": 0,
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": False,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        }
    if stage < 3:
        return {**zero_section(0), "stage": stage, "offload_optimizer": {"device": "none", "pin_memory": True}}
    auto: dict[str, Any] = dict.fromkeys(
        ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"), "auto"
    )
    if hidden_size is not None:
        auto = {
            "reduce_bucket_size": hidden_size * hidden_size,
            "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
            "stage3_param_persistence_threshold": 10 * hidden_size,
        }
    return {
        "stage": 3,
        "offload_optimizer": {"device": "none", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
        "overlap_comm": False,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        **auto,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }


FP16_SECTION: Mapping[str, Any] = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""ms-swift writes this section whatever the dtype; in bf16 it is what report A's 65536 comes from."""


UNSET_CLIPPING_SINCE = "0.19.3"
"""First release in which a configuration without `gradient_clipping` clips at 1.0; before, it does not clip.

deepspeedai/DeepSpeed#8068 ("Default gradient_clipping to 1.0"). The case's expected clip follows this line, not the
installed library's constant: a release that moves the default again turns its cells red.
"""


def unset_clipping(deepspeed_version: str) -> float | None:
    """What leaving `gradient_clipping` out means in a release: a clip value, or None for no clipping."""
    release = Version(Version(deepspeed_version).base_version)
    return 1.0 if release >= Version(UNSET_CLIPPING_SINCE) else None


def engine_config(
    *,
    stage: int,
    dtype: str,
    accumulation: int,
    micro_batch_size: int,
    hidden_size: int,
    gradient_clipping: float | None,
    fp16: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A whole configuration for deepspeed.initialize. gradient_clipping None leaves the key out ("unset")."""
    config: dict[str, Any] = {
        "fp16": {"enabled": dtype == "fp16", **(FP16_SECTION if fp16 is None else fp16)},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": zero_section(stage, hidden_size),
        "gradient_accumulation_steps": accumulation,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if gradient_clipping is not None:
        config["gradient_clipping"] = gradient_clipping
    return config


def resolved(own: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A user's configuration with every "auto", and every batch size it leaves out, taken from the case's own."""

    def fill(value: Any, default: Any) -> Any:
        if value == "auto":
            return default
        if isinstance(value, Mapping):
            inner = default if isinstance(default, Mapping) else {}
            filled = {key: fill(item, inner.get(key)) for key, item in value.items()}
            return {key: item for key, item in filled.items() if item is not None}
        return value

    config: dict[str, Any] = fill(own, defaults)
    config.pop("train_batch_size", None)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        config.setdefault(key, defaults[key])
    for key in ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"):
        config[key] = defaults[key]
    # The case brings its own torch optimizer and a constant learning rate, so that the update can be judged.
    config.pop("optimizer", None)
    config.pop("scheduler", None)
    return config
