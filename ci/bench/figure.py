"""A measured number beside what was promised of it, and the page that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """One measured number, and its limit where something is promised."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    side: Literal["at most", "at least"] = "at most"
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the promise is kept; None where there is none."""
        if self.limit is None:
            return None
        return self.value <= self.limit if self.side == "at most" else self.value >= self.limit


@dataclass(frozen=True)
class Part:
    """Mean seconds that a part of a case takes."""

    name: str
    seconds: float


def page(figures: Sequence[Figure], parts: Sequence[Part], measured: str, notes: str = "") -> str:
    """docs/benchmarks.md. notes: what stands below the tables, kept from the page as it was."""
    lines = [
        "# Benchmarks",
        "",
        f"{measured}. Times depend on the machine; compare ratios.",
        "",
        "| figure | measured | promised | |",
        "|---|---|---|---|",
    ]
    for figure in figures:
        limit = "" if figure.limit is None else f"{figure.side} {figure.limit:g} {figure.unit}"
        met = {True: "met", False: "**not met**", None: ""}[figure.met]
        note = f" ({figure.note})" if figure.note else ""
        lines.append(f"| {figure.name}{note} | {figure.value:.3g} {figure.unit} | {limit} | {met} |")
    whole = sum(part.seconds for part in parts)
    if whole:
        lines += ["", "## Where the time of a case goes", "", "| part | mean | |", "|---|---|---|"]
        lines += [f"| {part.name} | {part.seconds:.3f} s | {part.seconds / whole:.0%} |" for part in parts]
        lines += [f"| all | {whole:.3f} s | |"]
    return "\n".join(lines) + "\n" + (f"\n{NOTES}\n{notes}" if notes else "")


NOTES = "## Notes\n"


def notes_of(text: str) -> str:
    """What people wrote below the tables."""
    return text.partition(f"{NOTES}\n")[2]
