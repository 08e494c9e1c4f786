"""report.html: one file that needs no network, made of the templates, the style sheet and the script in assets/.

The Content-Security-Policy lets only this script and this style sheet run, by their hashes: whatever a log or a name
holds, it is text.
"""

from __future__ import annotations

import base64
import hashlib
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path

import jinja2
import msgspec
from markupsafe import Markup
from msgspec import Struct

from ci.page import answer, compatibility, grid
from ci.page.details import Details
from ci.page.history import History, merge
from ci.page.packed import BLOCK, pack
from ci.report import link
from ci.runrecord import Verdict
from ci.shown import Known, Number, Run

ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("data.js", "tabs.js", "grid.js", "cell.js", "time.js", "releases.js", "start.js")
"""One script in the page, in this order."""
MARKS = {
    Verdict.ERROR: "!",
    Verdict.REGRESSION: "✗",
    Verdict.FIXED_UPSTREAM: "▲",
    Verdict.KNOWN_DEFECT: "◆",
    Verdict.CORRECTED: "✚",
    Verdict.OK: "✓",
    Verdict.NOT_RUN: "○",
}
"""Beside the word of each verdict, never in place of it."""
CLASSES = {verdict: verdict.value.replace(" ", "-") for verdict in Verdict}
LISTED = 50
"""Rows of a list on the first screen; the grid has them all."""


class Place(Struct, frozen=True):
    """A run as the script gets it."""

    started: str
    command: str
    commit: str | None
    backend: str
    runtime: str
    image: str | None
    hardware: dict[str, str | int | float | None]
    stacks: dict[str, dict[str, str]]


class Defect(Struct, frozen=True):
    """A ledger entry; links: address, where there is one, and text."""

    title: str
    links: tuple[tuple[str | None, str], ...]
    affects: dict[str, str]
    advice: str | None
    correction: str | None


class Line(Struct, frozen=True, array_like=True):
    """A point of a cell's history. verdict: position in `verdicts`."""

    run: int
    verdict: int
    ratio: float | None
    duration_s: Number
    peak_memory_mb: Number


class Indexed(Struct, frozen=True, array_like=True):
    """A cell: id, verdict, what a search looks at besides, plots, history."""

    id: str
    verdict: int
    text: str
    plots: tuple[int, ...]
    points: tuple[Line, ...]


class Index(Struct, frozen=True):
    """Everything but details, plots and the grid itself. block: how many values are packed together."""

    block: int

    verdicts: tuple[tuple[str, str, str], ...]
    runs: tuple[Place, ...]
    ledger: dict[str, Defect]
    cells: tuple[Indexed, ...]


def page(runs: Sequence[Run], out: Path) -> tuple[str, History]:
    """The page about these runs (oldest first), to lie in the folder `out`; and what it is about."""
    details = Details(runs, out)
    history = merge(runs, details.take)
    plots, of_cell = details.plots(history)
    tables = compatibility.tables()
    style, script = _asset("page.css"), "".join(map(_asset, SCRIPTS))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"mark": MARKS.__getitem__, "kind": CLASSES.__getitem__}
    environment.filters |= {"address": address, "breakable": breakable, "web": web}
    changed = answer.changed(history)
    text = environment.get_template("page.html").render(
        question=answer.QUESTION,
        policy=_policy(style, script),
        style=Markup(style),  # our own file
        script=Markup(script),  # our own file
        answers=answer.answers(history),
        stacks=answer.stack_lines(history),
        failing=answer.failing(history.entries),
        changed=changed,
        pins_changed=answer.pins_changed(history),
        not_run=answer.not_run(history),
        defects=answer.defects_met(history),
        incomplete=[line for run in history.runs for line in run.head.incomplete],
        history=history,
        entries=history.entries,
        grids=grid.grids(history),
        tables=tables,
        kinds=compatibility.kinds(tables),
        verdicts=list(Verdict),
        listed=LISTED,
        index=pack(msgspec.json.encode(_index(history, of_cell))),
        cell_blocks=details.cells.blocks,
        plot_blocks=plots.blocks,
    )
    return text, history


def address(id_: str) -> str:
    """Where a cell opens, within the page."""
    return "#cell=" + urllib.parse.quote(id_, safe="/+=,.")


def web(upstream: str) -> str | None:
    """The address of an upstream thread; None for anything that is not on the web (`javascript:` runs on a click)."""
    found = link(upstream)
    return found if found.startswith(("https://", "http://")) else None


def breakable(name: str) -> Markup:
    """A name that may be broken after each hyphen and before each plus."""
    parts = (Markup("<wbr>+").join(part.split("+")) for part in name.split("-"))  # join escapes the parts
    return Markup("-<wbr>").join(parts)


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _policy(style: str, script: str) -> str:
    def source(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return (
        f"default-src 'none'; script-src {source(script)}; style-src {source(style)}; "
        "base-uri 'none'; form-action 'none'"
    )


def _index(history: History, plots: Mapping[int, tuple[int, ...]]) -> Index:
    positions = {verdict: position for position, verdict in enumerate(Verdict)}
    return Index(
        block=BLOCK,
        verdicts=tuple((verdict.value, CLASSES[verdict], MARKS[verdict]) for verdict in Verdict),
        runs=tuple(
            Place(
                started=run.head.started,
                command=run.head.command,
                commit=run.head.commit,
                backend=run.head.backend,
                runtime=run.head.runtime,
                image=run.head.image,
                hardware=run.head.hardware,
                stacks=run.head.stacks,
            )
            for run in history.runs
        ),
        ledger={name: _defect(known) for name, known in sorted(history.ledger.items())},
        cells=tuple(
            Indexed(
                id=entry.id,
                verdict=positions[entry.verdict],
                text=" ".join((*entry.defects, *entry.fixed, *entry.corrections, entry.reason or ""))[:400],
                plots=plots.get(number, ()),
                points=tuple(
                    Line(point.run, positions[point.verdict], point.ratio, point.duration_s, point.peak_memory_mb)
                    for point in entry.points
                ),
            )
            for number, entry in enumerate(history.entries)
        ),
    )


def _defect(known: Known) -> Defect:
    return Defect(
        title=known.title,
        links=tuple((web(upstream), upstream) for upstream in known.upstream),
        affects=known.affects,
        advice=known.advice,
        correction=known.correction,
    )
