"""The terminal report of a run: what failed or is defective, with numbers, links, advice and how to repeat it.

Fits 80 columns. Cells that are ok take one line; every other cell that ran gets a block that can be read without
opening another file. Commands are broken with a backslash, so that they can be pasted as they stand. Of a run with more
than MANY cells the table counts, and one block speaks for all cells with its verdict and defects.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ci.runrecord import FAILING, CellRecord, Check, DefectSummary, RunRecord, Verdict

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


def number(value: float | None) -> str:
    return "None" if value is None else f"{value:.6g}"


def folded(command: str, width: int = WIDTH - 4) -> str:
    """A shell command over several lines, each but the last ending in a backslash."""
    lines: list[str] = []
    for word in map(shlex.quote, shlex.split(command)):
        if lines and len(lines[-1]) + 1 + len(word) <= width - 2:
            lines[-1] += f" {word}"
        else:
            lines.append(word if not lines else f"  {word}")
    return " \\\n".join(lines)


def print_run(run: RunRecord, console: Console | None = None) -> None:
    """The whole report of a run."""
    out = console or Console(highlight=False)
    width = min(out.width, WIDTH)
    ran = [cell for cell in run.cells if cell.verdict is not Verdict.NOT_RUN]
    out.print(_heading(run), width=width)
    if len(ran) > MANY:
        out.print(_counts(ran, width))
        for alike in _alike(ran):
            _block(alike[0], run.ledger, out, width)
            _others(alike[1:], out, width)
    else:
        if ran:
            out.print(_table(ran, width))
        for cell in ran:
            if _is_right(cell):
                _corrected_line(cell, out)
            elif cell.verdict is not Verdict.OK:
                _block(cell, run.ledger, out, width)
    _not_run(run.cells, out, width)
    _not_judged(ran, out, width)
    for line in run.incomplete:
        out.print(Text(f"unreadable evidence: {line}", style="red"), width=width)
    out.print(_summary(run), width=width)


def _heading(run: RunRecord) -> Text:
    place = f"{run.backend}, {run.runtime}" + (f", image {run.image}" if run.image else "")
    text = Text(f"{run.started}  {place}\n{run.command}")
    for stack, pins in sorted(run.stacks.items()):
        text.append(f"\n{stack}: " + ", ".join(f"{name} {version}" for name, version in sorted(pins.items())), "dim")
    return text


def _table(cells: Sequence[CellRecord], width: int) -> Table:
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
        seconds = "" if cell.duration_s is None else f"{cell.duration_s:.1f} s"
        memory = "" if cell.peak_memory_mb is None else f"{cell.peak_memory_mb:.0f} MB"
        table.add_row(Text(f"  {case}"), Text(cell.verdict.value, style=STYLES[cell.verdict]), seconds, memory)
    return table


def _counts(cells: Iterable[CellRecord], width: int) -> Table:
    """A row per job of a stack."""
    table = Table(box=None, width=width, pad_edge=False, show_edge=False)
    table.add_column("cells", overflow="fold", ratio=1)
    table.add_column("verdicts", overflow="fold", ratio=1)
    table.add_column("time", justify="right", no_wrap=True)
    groups: dict[str, list[CellRecord]] = {}
    for cell in cells:
        groups.setdefault(cell.id.rpartition("/")[0], []).append(cell)
    for name, of_job in groups.items():
        seconds = sum(cell.duration_s or 0.0 for cell in of_job)
        table.add_row(Text(name, style="bold"), _verdicts(of_job), f"{seconds:.1f} s")
    return table


def _alike(cells: Iterable[CellRecord]) -> Iterable[list[CellRecord]]:
    """Cells that have something to tell, by verdict and defects."""
    groups: dict[object, list[CellRecord]] = {}
    for cell in cells:
        if cell.verdict is not Verdict.OK and not _is_right(cell):
            groups.setdefault((cell.verdict, cell.defects, cell.fixed), []).append(cell)
    return groups.values()


def _others(cells: Sequence[CellRecord], out: Console, width: int) -> None:
    """The cells that a block speaks for: those that need a look by name, else how many where."""
    if not cells:
        return
    if cells[0].verdict in FAILING:
        out.print(Text(f"  {len(cells)} more {cells[0].verdict}, with their numbers in report.html:"), width=width)
        out.print(Text("\n".join(f"    {cell.id}" for cell in cells)), soft_wrap=True)
        return
    where = Counter(cell.id.rpartition("/")[0] for cell in cells)
    said = ", ".join(f"{count} of {name}" for name, count in where.items())
    out.print(Padding(Text(f"and {said}", overflow="fold"), (0, 0, 0, 2)), width=width)


def _is_right(cell: CellRecord) -> bool:
    """Whether a correction has left nothing to tell."""
    return cell.verdict is Verdict.CORRECTED and not (cell.defects or cell.reason or cell.exception)


def _corrected_line(cell: CellRecord, out: Console) -> None:
    out.print(
        Text.assemble((cell.verdict.value, STYLES[cell.verdict]), f"  {cell.id}  by {', '.join(cell.corrections)}"),
        soft_wrap=True,
    )


def _block(cell: CellRecord, ledger: dict[str, DefectSummary], out: Console, width: int) -> None:
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
        table.add_row(
            str(position),
            check.name,
            number(check.value),
            number(check.expected),
            f"{check.value / check.expected:.5g}" if check.value is not None and check.expected else "",
            "" if check.error is None else f"{check.error:.2g}",
            "" if check.tolerance is None else f"{check.tolerance:.2g}",
        )
        if check.reason:
            table.add_row("", Text(check.reason, overflow="fold", no_wrap=False))
    return table


def _not_run(cells: Iterable[CellRecord], out: Console, width: int) -> None:
    reasons = Counter((cell.stack, cell.job, cell.reason or "") for cell in cells if cell.verdict is Verdict.NOT_RUN)
    for (stack, job, reason), count in reasons.items():
        out.print(Text(f"not run: {count} of {stack}/{job}: {reason}", style="dim"), width=width)


def _not_judged(cells: Iterable[CellRecord], out: Console, width: int) -> None:
    reasons = Counter(
        (check.name, check.reason or "")
        for cell in cells
        if cell.verdict is not Verdict.ERROR
        for step in cell.steps
        for check in step.checks
        if check.ok is None
    )
    for (name, reason), count in reasons.items():
        steps = "step" if count == 1 else "steps"
        out.print(Text(f"not judged: {name} in {count} {steps}: {reason}", style="dim"), width=width)


def _verdicts(cells: Iterable[CellRecord]) -> Text:
    """How many of each, in the order of the verdicts."""
    counts = Counter(cell.verdict for cell in cells)
    return Text(", ").join(
        Text(f"{counts[verdict]} {verdict.value}", style=STYLES[verdict]) for verdict in Verdict if counts[verdict]
    )


def _summary(run: RunRecord) -> Text:
    text = Text("\n").append(_verdicts(run.cells))
    if run.duration_s is not None:
        text.append(f" in {run.duration_s:.0f} s")
    return text
