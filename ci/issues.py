"""Finished runs + what nights before found + open issues -> what to open, rewrite and close.

Pure, so that it can be asked again: the same runs on top of what they left ask for nothing. A group is a job on a
stack of a backend (`cpu/newest/grpo-lora`), and has one issue while any of its cells fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from ci.errors import UsageError
from ci.evidence import Record
from ci.page.summary import code, text
from ci.runrecord import FAILING, Verdict
from ci.shown import Cell, Run

LABEL = "zero-regression"
"""Whoever may set labels in the repository may make an issue look like ours, and nobody else."""
MOST_CELLS = 20
MOST_LETTERS = 1200
"""Of one cell's reason: GitHub takes 65,536 letters in all."""
_MARKER = "<!-- group: {} -->"


class Seen(Record):
    """A run as one group saw it. url: of the workflow's run."""

    started: str
    commit: str | None = None
    url: str | None = None
    pins: dict[str, str] = Field(default_factory=dict)


class Group(Record):
    """good: the last run in which all was well. bad: the first since in which it was not. failing: its cells now."""

    good: Seen | None = None
    bad: Seen | None = None
    failing: tuple[str, ...] = ()


class History(Record):
    """What the nights so far found, by group."""

    groups: dict[str, Group] = Field(default_factory=dict)


@dataclass(frozen=True)
class Issue:
    """An open issue of ours."""

    number: int
    title: str
    body: str


@dataclass(frozen=True)
class Open:
    title: str
    body: str


@dataclass(frozen=True)
class Rewrite:
    number: int
    title: str
    body: str


@dataclass(frozen=True)
class Close:
    number: int
    comment: str


Operation = Open | Rewrite | Close


@dataclass(frozen=True)
class Night:
    """Runs of one night, by group: the run in which each cell is newest, and the cell."""

    seen: Mapping[str, Seen]
    cells: Mapping[str, tuple[Cell, ...]]


def read(path: Path) -> History:
    """history.json; an empty one where nothing was recorded yet."""
    try:
        return History.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return History()
    except (OSError, ValidationError) as error:
        raise UsageError(f"{path}: expected what `python -m ci issues` wrote: {error}") from error


def night(runs: Iterable[Run], url: str | None = None) -> Night:
    """The runs of one night as one. Of a cell that ran twice the newer counts; what was not run is left out."""
    seen: dict[str, Seen] = {}
    cells: dict[str, dict[str, Cell]] = {}
    for run in sorted(runs, key=lambda each: (each.head.started, each.folder.name)):
        for cell in run.cells():
            if cell.verdict is Verdict.NOT_RUN:
                continue
            name = cell.id.rpartition("/")[0]
            pins = run.head.stacks.get(cell.stack, {})
            seen.setdefault(name, Seen(started=run.head.started, commit=run.head.commit, url=url, pins=pins))
            cells.setdefault(name, {})[cell.id] = cell
    return Night(seen, {name: tuple(found.values()) for name, found in cells.items()})


def advance(history: History, tonight: Night) -> History:
    """What is known after tonight. A cell that failed and was not run tonight still fails."""
    groups = dict(history.groups)
    for name, cells in tonight.cells.items():
        before, seen = groups.get(name, Group()), tonight.seen[name]
        ran = {cell.id for cell in cells}
        failing = [cell.id for cell in cells if cell.verdict in FAILING]
        failing += [cell for cell in before.failing if cell not in ran]
        if failing:
            groups[name] = Group(good=before.good, bad=before.bad or seen, failing=tuple(failing))
        else:
            groups[name] = Group(good=seen)
    return History(groups=dict(sorted(groups.items())))


def operations(after: History, tonight: Night, issues: Sequence[Issue]) -> tuple[Operation, ...]:
    """What makes the issues say what is known after tonight; nothing about groups that did not run."""
    found: list[Operation] = []
    for name, cells in tonight.cells.items():
        group = after.groups[name]
        issue = next((each for each in issues if _MARKER.format(name) in each.body), None)
        if group.bad is None:
            if issue is not None:
                found.append(Close(issue.number, _recovered(group, cells)))
            continue
        title, body = _title(name, group, cells), "\n".join(_body(name, group, tonight.seen[name], cells)) + "\n"
        if issue is None:
            found.append(Open(title, body))
        elif (issue.title, issue.body.replace("\r\n", "\n").strip()) != (title, body.strip()):
            found.append(Rewrite(issue.number, title, body))
    return tuple(found)


def _title(name: str, group: Group, cells: Sequence[Cell]) -> str:
    counts = {verdict: sum(cell.verdict is verdict for cell in cells) for verdict in Verdict if verdict in FAILING}
    gone = len(set(group.failing) - {cell.id for cell in cells})
    said = [f"{count} {verdict}" for verdict, count in counts.items() if count]
    return f"{name}: {', '.join([*said, *([f'{gone} not run again'] if gone else [])])}"


def _body(name: str, group: Group, now: Seen, cells: Sequence[Cell]) -> Iterator[str]:
    assert group.bad is not None
    wrong = [cell for cell in cells if cell.verdict in FAILING]
    yield _MARKER.format(name)
    yield f"{len(wrong)} of the {len(cells)} cells of {code(name)} that ran are not as they should be."
    yield ""
    yield "| | run | commit |"
    yield "|---|---|---|"
    for words, seen in (("last good run", group.good), ("first bad run", group.bad), ("newest run", now)):
        yield f"| {words} | {_run(seen)} | {code(seen.commit) if seen and seen.commit else ''} |"
    yield ""
    yield f"Pins that changed between the last good and the first bad run: {_changed(group.good, group.bad)}."
    for cell in wrong[:MOST_CELLS]:
        yield from ("", f"### {cell.verdict}: {code(cell.id)}", "")
        yield text((cell.reason or "no reason recorded")[:MOST_LETTERS])
        yield from ("", f"Repeat: {code(cell.command)}")
    if len(wrong) > MOST_CELLS:
        yield from ("", f"And {len(wrong) - MOST_CELLS} more; the report of the run has them all.")
    yield ""
    yield "This text is rewritten after each scheduled run. The issue is closed when all cells above are right again."


def _run(seen: Seen | None) -> str:
    if seen is None:
        return "none recorded"
    return f"[{text(seen.started)}](<{seen.url}>)" if seen.url else text(seen.started)


def _changed(good: Seen | None, bad: Seen) -> str:
    if good is None:
        return "not known, since no good run is recorded"
    names = sorted(good.pins.keys() | bad.pins.keys())
    pairs = [(name, good.pins.get(name, "none"), bad.pins.get(name, "none")) for name in names]
    changed = [code(f"{name} {old} -> {new}") for name, old, new in pairs if old != new]
    if changed:
        return ", ".join(changed)
    same = good.commit is not None and good.commit == bad.commit
    return "none" + (", nor did this project" if same else "; this project did" if good.commit and bad.commit else "")


def _recovered(group: Group, cells: Sequence[Cell]) -> str:
    assert group.good is not None
    pins = ", ".join(f"{name} {version}" for name, version in sorted(group.good.pins.items()))
    return f"{len(cells)} of {len(cells)} cells are as they should be again: {_run(group.good)}, with {text(pins)}."
