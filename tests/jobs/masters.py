"""Where DeepSpeed keeps the fp32 master of each parameter, whichever wrapper it chose.

The job measures what the inner optimizer is handed and what it leaves behind. Every wrapper arranges its masters
differently: the parameters themselves (fp32, ZeRO-0), a list per group (FP16_UnfusedOptimizer), one flat tensor per
group (FP16_Optimizer), a flat partition per rank (ZeRO-1/2 and BF16_Optimizer), a padded partition of every parameter
in sub-groups (ZeRO-3). Here all of them become `Fragment`s: this many elements of that master are those elements of
the parameter of that name. Read without any of DeepSpeed's own gathers: those are under test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Fragment:
    """Elements [start, start + numel) of parameter `name` are elements [offset, offset + numel) of `master`.

    master: the fp32 tensor that the inner optimizer updates, any shape (elements are counted flattened).
    """

    name: str
    start: int
    numel: int
    master: torch.Tensor
    offset: int

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """This fragment of a tensor laid out like its master (master, gradient or moment); [numel] fp32, a copy."""
        return tensor.detach().reshape(-1)[self.offset : self.offset + self.numel].float().clone().cpu()


def fragments(optimizer: Any, named_parameters: Mapping[str, torch.nn.Parameter], rank: int) -> list[Fragment]:
    """Fragments that this rank holds of the trainable parameters.

    optimizer: `engine.optimizer`, or a wrapper built directly. Raises LookupError for a parameter without a master.
    """
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return list(_zero3(optimizer, named_parameters, rank))
    if any(hasattr(parameter, "_hp_mapping") for parameter in named_parameters.values()):
        return list(_linked(optimizer, named_parameters))
    if hasattr(optimizer, "fp32_groups"):
        return list(_unfused(optimizer, named_parameters))
    if hasattr(optimizer, "fp32_groups_flat"):
        return list(_fused(optimizer, named_parameters))
    return [Fragment(name, 0, p.numel(), p, 0) for name, p in named_parameters.items()]


def _zero3(optimizer: Any, named_parameters: Mapping[str, torch.nn.Parameter], rank: int) -> Iterable[Fragment]:
    for name, parameter in named_parameters.items():
        if not parameter.ds_numel:
            continue
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        partition = parameter.ds_tensor.ds_numel
        start = rank * partition
        numel = max(0, min(partition, parameter.ds_numel - start))
        yield Fragment(name, start, numel, optimizer.fp32_partitioned_groups_flat[group], offset)


def _linked(optimizer: Any, named_parameters: Mapping[str, torch.nn.Parameter]) -> Iterable[Fragment]:
    flats = getattr(optimizer, "single_partition_of_fp32_groups", None)
    if flats is None:
        flats = optimizer.fp32_groups_flat_partition
    by_storage = {flat.untyped_storage().data_ptr(): flat for flat in flats}
    for name, parameter in named_parameters.items():
        mapping = getattr(parameter, "_hp_mapping", None)
        if mapping is None:  # this rank's partition holds nothing of it, or there is nothing to hold
            continue
        flat = by_storage[mapping.hp_fragment.untyped_storage().data_ptr()]
        address = mapping.lp_fragment_address
        offset = mapping.hp_fragment.storage_offset() - flat.storage_offset()
        yield Fragment(name, address.start, address.numel, flat, offset)


def _names(named_parameters: Mapping[str, torch.nn.Parameter]) -> dict[int, str]:
    return {id(parameter): name for name, parameter in named_parameters.items()}


def _unfused(optimizer: Any, named_parameters: Mapping[str, torch.nn.Parameter]) -> Iterable[Fragment]:
    names = _names(named_parameters)
    for halves, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
        for half, master in zip(halves, masters, strict=True):
            yield Fragment(names[id(half)], 0, half.numel(), master, 0)


def _fused(optimizer: Any, named_parameters: Mapping[str, torch.nn.Parameter]) -> Iterable[Fragment]:
    names = _names(named_parameters)
    for halves, flat in zip(optimizer.fp16_groups, optimizer.fp32_groups_flat, strict=True):
        offset = 0
        for half in halves:
            yield Fragment(names[id(half)], 0, half.numel(), flat, offset)
            offset += half.numel()


def padding(held: Iterable[Fragment]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """For each master: (master, boolean mask [numel] of the elements that belong to no parameter)."""
    masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for fragment in held:
        key = id(fragment.master)
        if key not in masks:
            masks[key] = (fragment.master, torch.ones(fragment.master.numel(), dtype=torch.bool))
        masks[key][1][fragment.offset : fragment.offset + fragment.numel] = False
    return masks


def loss_scale(optimizer: Any) -> float | None:
    """The loss scale a wrapper holds now, or None where it has none (also for bf16 wrappers that do hold one)."""
    for path in (("loss_scale_config", "cur_scale"), ("cur_scale",), ("loss_scaler", "cur_scale"), ("loss_scale",)):
        value = optimizer
        for attribute in path:
            value = getattr(value, attribute, None)
            if value is None:
                break
        if value is not None:
            return float(value)
    return None
