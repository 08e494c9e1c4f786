"""The terminal report of a run: what failed or is defective, with numbers, links, advice and how to repeat it.

Fits 80 columns. Cells that are ok take one line; every other cell that ran gets a block that can be read without
opening another file. Commands are broken with a backslash, so that they can be pasted as they stand. Of a run with more
than MANY cells the table counts, and one block speaks for all cells with its verdict and defects.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ci.runrecord import FAILING, Verdict
from ci.shown import Cell, Check, Head, Known, Number, Run, finite

WIDTH = 80
MANY = 500
"""A full nightly lane has fewer; the page has every cell of a larger run."""
STYLES = {
    Verdict.ERROR: "bold red",
    Verdict.REGRESSION: "bold red",
    Verdict.FIXED_UPSTREAM: "bold magenta",
    Verdict.KNOWN_DEFECT: "yellow",
    Verdict.CORRECTED: "cyan",
    Verdict.OK: "green",
    Verdict.NOT_RUN: "dim",
}
_THREAD = re.compile(r"([\w.-]+/[\w.-]+)#(\d+)")


def link(upstream: str) -> str:
    """`owner/name#N` as an address; GitHub leads from an issue's to a pull request's by itself."""
    thread = _THREAD.fullmatch(upstream)
    return f"https://github.com/{thread[1]}/issues/{thread[2]}" if thread else upstream


def number(value: Number) -> str:
    return "None" if value is None else f"{float(value):.6g}"


def folded(command: str, width: int = WIDTH - 4) -> str:
    """A shell command over several lines, each but the last ending in a backslash."""
    lines: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if lines and len(lines[-1]) + 1 + len(word) <= width - 2:
            lines[-1] += f" {word}"
        else:
            lines.append(word if not lines else f"  {word}")
    return " \\\n".join(lines)


@dataclass(frozen=True)
class _Row:
    """What the table says of a cell that ran."""

    id: str
    verdict: Verdict
    duration_s: Number
    peak_memory_mb: Number


@dataclass
class _Alike:
    """A cell that has something to tell, and the ids of those that tell the same."""

    first: Cell
    others: list[str]


class _Told:
    """What a report says of a run, gathered in one pass over its cells: at ten thousand they do not stay."""

    def __init__(self, run: Run) -> None:
        self.many = len(run.head.cells) > MANY
        self.verdicts: Counter[Verdict] = Counter()
        self.rows: list[_Row] = []
        self.alike: dict[object, _Alike] = {}
        self.not_run: Counter[tuple[str, str, str]] = Counter()
        self.not_judged: Counter[tuple[str, str]] = Counter()
        for cell in run.cells():
            self._take(cell)

    def _take(self, cell: Cell) -> None:
        self.verdicts[cell.verdict] += 1
        if cell.verdict is Verdict.NOT_RUN:
            self.not_run[cell.stack, cell.job, cell.reason or ""] += 1
            return
        self.rows.append(_Row(cell.id, cell.verdict, cell.duration_s, cell.peak_memory_mb))
        if cell.verdict is not Verdict.ERROR:
            checks = (check for step in cell.steps for check in step.checks if check.ok is None)
            self.not_judged.update((check.name, check.reason or "") for check in checks)
        if cell.verdict is Verdict.OK or (self.many and _is_right(cell)):
            return
        key = (cell.verdict, cell.defects, cell.fixed) if self.many else cell.id
        if key in self.alike:
            self.alike[key].others.append(cell.id)
        else:
            self.alike[key] = _Alike(cell, [])


def print_run(run: Run, console: Console | None = None) -> None:
    """The whole report of a run."""
    out = console or Console(highlight=False)
    width = min(out.width, WIDTH)
    told = _Told(run)
    out.print(_heading(run.head), width=width)
    if told.rows:
        out.print(_by_job(told.rows, width) if told.many else _by_cell(told.rows, width))
    for alike in told.alike.values():
        if _is_right(alike.first):
            _corrected_line(alike.first, out)
        else:
            _block(alike.first, run.head.ledger, out, width)
            _others(alike, out, width)
    _not_run(told.not_run, out, width)
    _not_judged(told.not_judged, out, width)
    for line in run.head.incomplete:
        out.print(Text(f"unreadable evidence: {line}", style="red"), width=width)
    out.print(_summary(run.head, told.verdicts), width=width)


def _heading(run: Head) -> Text:
    place = f"{run.backend}, {run.runtime}" + (f", image {run.image}" if run.image else "")
    text = Text(f"{run.started}  {place}\n{run.command}")
    for stack, pins in sorted(run.stacks.items()):
        text.append(f"\n{stack}: " + ", ".join(f"{name} {version}" for name, version in sorted(pins.items())), "dim")
    return text


def _by_cell(cells: Iterable[_Row], width: int) -> Table:
    table = Table(box=None, width=width, pad_edge=False, show_edge=False)
    table.add_column("cell", overflow="fold", ratio=1)
    table.add_column("verdict", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("memory", justify="right", no_wrap=True)
    group = ""
    for cell in cells:
        prefix, _, case = cell.id.rpartition("/")
        if prefix != group:
            group = prefix
            table.add_row(Text(group, style="bold"))
        seconds, memory = finite(cell.duration_s), finite(cell.peak_memory_mb)
        table.add_row(
            Text(f"  {case}"),
            Text(cell.verdict.value, style=STYLES[cell.verdict]),
            "" if seconds is None else f"{seconds:.1f} s",
            "" if memory is None else f"{memory:.0f} MB",
        )
    return table


def _by_job(cells: Iterable[_Row], width: int) -> Table:
    """A row per job of a stack."""
    table = Table(box=None, width=width, pad_edge=False, show_edge=False)
    table.add_column("cells", overflow="fold", ratio=1)
    table.add_column("verdicts", overflow="fold", ratio=1)
    table.add_column("time", justify="right", no_wrap=True)
    groups: dict[str, list[_Row]] = {}
    for cell in cells:
        groups.setdefault(cell.id.rpartition("/")[0], []).append(cell)
    for name, of_job in groups.items():
        seconds = sum(finite(cell.duration_s) or 0.0 for cell in of_job)
        table.add_row(Text(name, style="bold"), _verdicts(Counter(cell.verdict for cell in of_job)), f"{seconds:.1f} s")
    return table


def _others(alike: _Alike, out: Console, width: int) -> None:
    """The cells that a block speaks for: those that need a look by name, else how many where."""
    if not alike.others:
        return
    if alike.first.verdict in FAILING:
        said = f"  {len(alike.others)} more {alike.first.verdict.value}, with their numbers in report.html:"
        out.print(Text(said), width=width)
        out.print(Text("\n".join(f"    {id_}" for id_ in alike.others)), soft_wrap=True)
        return
    where = Counter(id_.rpartition("/")[0] for id_ in alike.others)
    said = ", ".join(f"{count} of {name}" for name, count in where.items())
    out.print(Padding(Text(f"and {said}", overflow="fold"), (0, 0, 0, 2)), width=width)


def _is_right(cell: Cell) -> bool:
    """Whether a correction has left nothing to tell."""
    return cell.verdict is Verdict.CORRECTED and not (cell.defects or cell.reason or cell.exception)


def _corrected_line(cell: Cell, out: Console) -> None:
    out.print(
        Text.assemble((cell.verdict.value, STYLES[cell.verdict]), f"  {cell.id}  by {', '.join(cell.corrections)}"),
        soft_wrap=True,
    )


def _block(cell: Cell, ledger: dict[str, Known], out: Console, width: int) -> None:
    out.print()
    out.print(Text.assemble((cell.verdict.value, STYLES[cell.verdict]), f"  {cell.id}"), width=width)

    def say(text: str, style: str = "") -> None:
        out.print(Padding(Text(text, style=style, overflow="fold"), (0, 0, 0, 2)), width=width)

    if cell.corrections:
        say(f"corrected by {', '.join(cell.corrections)}")
    if cell.reason:
        say(cell.reason)
    if cell.exception is not None:
        where = f" in {cell.exception.where}" if cell.exception.where else ""
        say(f"rank {cell.exception.rank}{where}: {cell.exception.type}: {cell.exception.message}")
        if cell.exception.user_frame:
            say(f"at {cell.exception.user_frame}")
        if cell.exception.remedy:
            say(f"write instead: {cell.exception.remedy}")
    failing = [(at, check) for at, step in enumerate(cell.steps, 1) for check in step.checks if check.ok is False]
    if failing:
        out.print(Padding(_numbers(failing, width - 2), (0, 0, 0, 2)), width=width)
    for step_number, step in enumerate(cell.steps, 1):
        if any(check.name == "gradient_used" and check.ok is False and not check.defects for check in step.checks):
            worst = ", ".join(f"{tensor.name} {number(tensor.gradient_error)}" for tensor in step.tensors[:3])
            say(f"step {step_number}, worst tensors: {worst}" if worst else f"step {step_number}: no tensor recorded")
            break
    for defect in (*cell.defects, *cell.fixed):
        known = ledger.get(defect)
        if known is None:
            say(f"{defect}: no longer in matrix.yaml")
            continue
        say(f"{defect}: {known.title}")
        for upstream in known.upstream:
            out.print(Text(f"    {link(upstream)}"), soft_wrap=True)
        if known.advice and defect in cell.defects:
            say(f"advice: {known.advice}")
        if known.correction and defect in cell.defects and not cell.corrections:
            say(f"makes it right: {known.correction} (--corrections both shows it)")
    for shim in cell.shims:
        say(f"shim {shim.name}: {shim.reason}", "dim")
    if cell.log:
        out.print(Text(f"  log: {cell.log}"), soft_wrap=True)
    for line in f"repeat: {folded(cell.command, WIDTH - 12)}".splitlines():
        out.print(Text(f"  {line}"), soft_wrap=True)


def _numbers(failing: Iterable[tuple[int, Check]], width: int) -> Table:
    table = Table(box=None, width=width, pad_edge=False, show_edge=False)
    for column in ("step", "check"):
        table.add_column(column, no_wrap=True)
    for column in ("found", "expected", "ratio", "error", "allowed"):
        table.add_column(column, justify="right", no_wrap=True)
    for position, check in failing:
        value, expected, error = finite(check.value), finite(check.expected), check.error
        table.add_row(
            str(position),
            check.name,
            number(check.value),
            number(check.expected),
            f"{value / expected:.5g}" if value is not None and expected else "",
            "" if error is None else f"{float(error):.2g}",
            "" if check.tolerance is None else f"{float(check.tolerance):.2g}",
        )
        if check.reason:
            table.add_row("", Text(check.reason, overflow="fold", no_wrap=False))
    return table


def _not_run(reasons: Counter[tuple[str, str, str]], out: Console, width: int) -> None:
    for (stack, job, reason), count in reasons.items():
        out.print(Text(f"not run: {count} of {stack}/{job}: {reason}", style="dim"), width=width)


def _not_judged(reasons: Counter[tuple[str, str]], out: Console, width: int) -> None:
    for (name, reason), count in reasons.items():
        steps = "step" if count == 1 else "steps"
        out.print(Text(f"not judged: {name} in {count} {steps}: {reason}", style="dim"), width=width)


def _verdicts(counts: Counter[Verdict]) -> Text:
    """How many of each, in the order of the verdicts."""
    return Text(", ").join(
        Text(f"{counts[verdict]} {verdict.value}", style=STYLES[verdict]) for verdict in Verdict if counts[verdict]
    )


def _summary(run: Head, counts: Counter[Verdict]) -> Text:
    text = Text("\n").append(_verdicts(counts))
    seconds = finite(run.duration_s)
    if seconds is not None:
        text.append(f" in {seconds:.0f} s")
    return text
