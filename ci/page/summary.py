"""summary.md: the same answer for GitHub's job summary and other readers of Markdown.

Everything of a run goes through `text`, so that neither a name nor a message can make markup, HTML or a table's cell.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from ci.page import answer
from ci.page.build import MARKS, web
from ci.page.history import Entry, History

LIMIT = 900_000
"""Bytes. GitHub refuses a summary of 1 MiB."""
_MARKUP = re.compile(r"([\\`*_{}\[\]()#+\-.!|~@:])")


def text(words: str) -> str:
    """Words as Markdown shows them literally, on one line."""
    return _MARKUP.sub(r"\\\1", html.escape(" ".join(words.split()), quote=False))


def code(words: str) -> str:
    """Words as code: HTML, since back-ticks in them would end Markdown's."""
    return f"<code>{html.escape(' '.join(words.split())).replace('|', '&#124;')}</code>"


def markdown(history: History, limit: int = LIMIT) -> str:
    """Sections in order of importance; what would not fit is left out and said so."""
    said = "\nMore did not fit here; report.html has everything.\n"
    whole: list[str] = []
    room = limit - len(said.encode())
    for line in _lines(history):
        room -= len(line.encode()) + 1
        if room < 0:
            # A block that is open must be closed, or the rest of the page would fold away.
            opened = sum(part.startswith("<details>") for part in whole)
            closed = sum(part == "</details>" for part in whole)
            return "\n".join([*whole, *["</details>"] * (opened - closed)]) + said
        whole.append(line)
    return "\n".join(whole) + "\n"


def _lines(history: History) -> Iterator[str]:
    yield f"## {answer.QUESTION}"
    yield ""
    for said in answer.answers(history):
        yield f"- **{text(said.backend)}**: {text(said.sentence)}"
    yield ""
    yield "| stack | pins | cells | run |"
    yield "|---|---|---|---|"
    for line in answer.stack_lines(history):
        counts = ", ".join(f"{count} {MARKS[verdict]} {verdict}" for verdict, count in line.counts)
        yield f"| {text(f'{line.backend}/{line.stack}')} | {text(line.pins)} | {counts} | {text(line.when)} |"
    yield ""
    failing = answer.failing(history.entries)
    if failing:
        yield f"### Needs a look ({len(failing)})"
        yield ""
        for entry in failing:
            yield from _folded(entry)
    changed = answer.changed(history)
    if changed:
        yield from ("### Changed since the run before", "", "| cell | before | now |", "|---|---|---|")
        for entry in changed:
            assert entry.before is not None
            yield f"| {text(entry.id)} | {entry.before.verdict} | {entry.verdict} |"
        yield ""
    defects = answer.defects_met(history)
    if defects:
        yield from (f"<details><summary>Known defects that show ({len(defects)})</summary>", "")
        yield from ("| defect | cells | advice |", "|---|---|---|")
        for name, found in defects:
            known = history.ledger.get(name)
            links = " ".join(_linked(each) for each in known.upstream) if known else ""
            title = text(known.title) if known else code(name)
            yield f"| {title} {links} | {len(found)} | {text(known.advice or '') if known else ''} |"
        yield from ("", "</details>", "")
    missing = answer.not_run(history)
    if missing:
        yield from (f"<details><summary>Not run ({sum(each.count for each in missing)})</summary>", "")
        for each in missing:
            yield f"- {each.count} of {text(each.where)}: {text(each.reason)}"
        yield from ("", "</details>", "")


def _linked(upstream: str) -> str:
    found = web(upstream)
    return f"[{text(upstream)}](<{re.sub('[<> ]', '', found)}>)" if found else text(upstream)


def _folded(entry: Entry) -> Iterator[str]:
    yield f"<details><summary>{MARKS[entry.verdict]} {entry.verdict}: {code(entry.id)}</summary>"
    yield ""
    yield text(entry.reason or "no reason recorded")
    yield ""
    yield f"Repeat: {code(entry.command)}"
    yield ""
    yield "</details>"
