"""The loss scale of a case: its fp16 section, and by which rule the scale must move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def fp16_section(case: Mapping[str, Any]) -> dict[str, Any] | None:
    """The keys of DeepSpeed's fp16 section for the case's `loss_scale`; None leaves ms-swift's own section."""
    return None


def expected(
    case: Mapping[str, Any], wrapper: str, scale_before: float | None, overflows: Sequence[bool]
) -> float | None:
    """The scale after the step that `overflows[-1]` belongs to, or None where the dtype has no loss scale.

    overflows: for each step so far, oldest first, whether it overflowed. scale_before: the scale backward used.
    """
    return None
