"""docs/mutants.md: which check notices which fault, from one run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ci.mutants.verdict import End, Shown


def label(cell: str) -> str:
    """A case without backend, stack and job where that is the usual one."""
    return cell.partition("+")[0].rpartition("/")[2]


def page(results: Sequence[Shown], measured: str) -> str:
    """One row a mutant: how many cases it was planted in, which checks failed in how many of them, what survived."""
    by_mutant: dict[str, list[Shown]] = defaultdict(list)
    for result in results:
        by_mutant[result.mutant.id].append(result)
    survivors = [result for result in results if not result.fine]
    lines = [
        "# Mutants",
        "",
        f"{measured}: {len(by_mutant)} faults planted in {len(results)} cases, {len(survivors)} of them not noticed.",
        "",
        "`nox -s mutants` plants each fault into the training stack at run time, in engine cases that are green",
        "without it, and demands that the check in the second column fails. The last column counts every check that",
        "failed.",
        "",
        "| fault | noticed by | cases | checks that failed |",
        "|---|---|---|---|",
    ]
    for name, shown in by_mutant.items():
        mutant = shown[0].mutant
        counts: dict[str, int] = defaultdict(int)
        for result in shown:
            for check in result.by:
                counts[check] += 1
        checks = ", ".join(f"{check} {count}" for check, count in counts.items()) or "none"
        by = mutant.killed_by if mutant.survives is None else f"nothing: {mutant.survives}"
        lines.append(f"| {mutant.fault} (`{name}`) | {by} | {len(shown)} | {checks} |")
    if survivors:
        lines += ["", "## Not noticed", "", "| fault | case | | |", "|---|---|---|---|"]
        lines += [f"| {r.mutant.id} | {label(r.cell)} | {r.end} | {r.why} |" for r in survivors]
    return "\n".join(lines) + "\n"


def told(results: Sequence[Shown]) -> list[str]:
    """What a person reads at the end of a run: everything that is not as it has to be, then the count."""
    lines = [
        f"{result.end}: {result.cell}: {result.why or result.mutant.fault}" for result in results if not result.fine
    ]
    counts = {end: sum(result.end is end for result in results) for end in End}
    lines.append(", ".join(f"{count} {end}" for end, count in counts.items() if count))
    return lines
