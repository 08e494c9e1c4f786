"""CANN and torch-npu: which releases belong together, after the table in matrix.yaml.

torch-npu is compiled against one CANN and one torch. A pair that its maintainers do not publish imports, at times runs,
and fails in ways that say nothing of the cause; so it is refused before an image is built, with the row that would fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from packaging.version import Version

TORCH_NPU = "torch-npu"

Table = Mapping[str, Sequence[str]]


def mismatch(table: Table, cann: str, pins: Mapping[str, str]) -> tuple[str, str] | None:
    """(what does not fit, what would) of a stack's CANN and pins; None where they belong together.

    A pin that is absent (a checkout whose version is not known yet) is not judged.
    """
    if cann not in table:
        return f"CANN {cann}", f"a CANN of the table: {', '.join(table)}"
    release = pins.get(TORCH_NPU)
    if release is None:
        return None
    if release not in table[cann]:
        elsewhere = [name for name, row in table.items() if release in row]
        others = f", or CANN {' or '.join(elsewhere)} for it" if elsewhere else ""
        return f"{TORCH_NPU} {release} with CANN {cann}", f"one of its row, {', '.join(table[cann])}{others}"
    torch, wanted = pins.get("torch"), Version(release).base_version
    if torch is not None and Version(torch).base_version != wanted:
        return f"torch {torch} with {TORCH_NPU} {release}", f"torch {wanted}, which it is compiled against"
    return None
