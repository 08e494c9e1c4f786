"""The words of the first screen: the answer for each backend, what changed, what was not run, what is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ci.page.history import Entry, History
from ci.runrecord import FAILING, Verdict

QUESTION = "Does this pin of DeepSpeed and transformers train correctly on this hardware?"
SHORT = ("deepspeed", "transformers")
"""The pins that stand beside a stack's name."""


@dataclass(frozen=True)
class Answer:
    """One sentence for a backend. word: yes, partly, no or unknown, which also chooses the mark."""

    backend: str
    word: str
    sentence: str


@dataclass(frozen=True)
class StackLine:
    """A stack with how many cells have each verdict, and where and when they ran."""

    backend: str
    stack: str
    pins: str
    counts: tuple[tuple[Verdict, int], ...]
    when: str
    where: str


@dataclass(frozen=True)
class NotRun:
    where: str
    count: int
    reason: str


def answers(history: History) -> tuple[Answer, ...]:
    """One for each backend that ran, and for each that never did on real hardware."""
    by_backend: dict[str, list[Entry]] = {}
    for entry in history.entries:
        by_backend.setdefault(entry.backend, []).append(entry)
    found = [_answer(name, by_backend[name]) for name in sorted(by_backend)]
    unavailable = {name: why for run in history.runs for name, why in run.head.unavailable.items()}
    found += [
        Answer(name, "unknown", f"Not known: {why}.") for name, why in unavailable.items() if name not in by_backend
    ]
    return tuple(found)


def _answer(backend: str, entries: Sequence[Entry]) -> Answer:
    counts = Counter(entry.verdict for entry in entries)
    ran = sum(counts.values()) - counts[Verdict.NOT_RUN]
    right = counts[Verdict.OK] + counts[Verdict.CORRECTED]
    known = counts[Verdict.KNOWN_DEFECT]
    failing = {verdict: counts[verdict] for verdict in Verdict if verdict in FAILING and counts[verdict]}
    many = f"{right} of {ran} cells are right"
    if not ran:
        return Answer(backend, "unknown", "Not known. No cell could run; the reasons are below.")
    if failing:
        said = ", ".join(f"{count} {verdict}" for verdict, count in failing.items())
        return Answer(backend, "no", f"No. {said} need a look: no known defect explains them; {many}.")
    if known:
        also = f"{known} show known defects exactly as the ledger predicts, and nothing is unexplained"
        return Answer(backend, "partly", f"Where its known defects do not matter. {many}, {also}.")
    corrected = f", {counts[Verdict.CORRECTED]} of them with a correction" if counts[Verdict.CORRECTED] else ""
    return Answer(backend, "yes", f"Yes. All {ran} cells are right{corrected}.")


def stack_lines(history: History) -> tuple[StackLine, ...]:
    """A line per backend and stack, in the order of backends and DeepSpeed releases as the runs have them."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in history.entries:
        groups.setdefault((entry.backend, entry.stack), []).append(entry)
    lines = []
    for (backend, stack), entries in sorted(groups.items()):
        counts = Counter(entry.verdict for entry in entries)
        newest = history.runs[max(entry.run for entry in entries)].head
        lines.append(
            StackLine(
                backend=backend,
                stack=stack,
                pins=short_pins(newest.stacks.get(stack, {})),
                counts=tuple((verdict, counts[verdict]) for verdict in Verdict if counts[verdict]),
                when=newest.started,
                where=newest.image or newest.runtime,
            )
        )
    return tuple(lines)


def short_pins(pins: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {pins[name]}" for name in SHORT if name in pins)


def failing(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Cells whose verdict fails, the worst verdict first."""
    found = [entry for entry in entries if entry.verdict in FAILING]
    order = list(Verdict)
    return tuple(sorted(found, key=lambda entry: order.index(entry.verdict)))


def changed(history: History) -> tuple[Entry, ...]:
    """Cells that the newest run of their stack planned, and that were otherwise in the run before."""
    order = list(Verdict)
    found = [entry for entry in history.entries if entry.before is not None]
    return tuple(sorted(found, key=lambda entry: order.index(entry.verdict)))


def pins_changed(history: History) -> tuple[str, ...]:
    """What each stack's newest run has installed that the run before it had not."""
    seen: dict[tuple[str, str], list[dict[str, str]]] = {}
    for run in history.runs:
        for stack, pins in run.head.stacks.items():
            seen.setdefault((run.head.backend, stack), []).append(pins)
    said = []
    for (backend, stack), all_pins in sorted(seen.items()):
        if len(all_pins) < 2:
            continue
        before, now = all_pins[-2:]
        said += [
            f"{backend}/{stack}: {package} {before.get(package, 'none')} -> {now.get(package, 'none')}"
            for package in sorted(before.keys() | now.keys())
            if before.get(package) != now.get(package)
        ]
    return tuple(said)


def not_run(history: History) -> tuple[NotRun, ...]:
    counts = Counter(
        (f"{entry.backend}/{entry.stack}/{entry.job}", entry.reason or "no reason recorded")
        for entry in history.entries
        if entry.verdict == Verdict.NOT_RUN
    )
    return tuple(NotRun(where, count, reason) for (where, reason), count in counts.items())


def defects_met(history: History) -> tuple[tuple[str, tuple[Entry, ...]], ...]:
    """Ledger entries that show, with their cells, the most frequent first."""
    cells: dict[str, list[Entry]] = {}
    for entry in history.entries:
        for defect in entry.defects:
            cells.setdefault(defect, []).append(entry)
    return tuple(
        (name, tuple(found)) for name, found in sorted(cells.items(), key=lambda each: (-len(each[1]), each[0]))
    )
