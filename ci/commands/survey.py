"""`survey`: how does every release of a package behave in the cells of the lane `survey`?

Resumable: evidence is kept by release in results/survey, and survey.json is written after each.
"""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ci import releases, survey
from ci.commands.bisect import DEFAULT_STACK
from ci.errors import CiError, ExitCode, NothingToRun, UsageError, choices
from ci.interrupts import Interrupts
from ci.matrix import load
from ci.plan import Cell, Selection, make_plan
from ci.probe import Outcome, Prober
from ci.progress import brief_time
from ci.provision.overlay import OverlayRuntime, Release
from ci.provision.recipe import recipe_for
from ci.runrecord import FAILING
from ci.survey import Row, Survey, SurveyedCase, row_of

LANE = "survey"
DOCS = Path("docs")
PAGE = DOCS / "compatibility.md"


def main(
    package: Annotated[str, typer.Option("--package", metavar="NAME", help="Whose releases.")] = "deepspeed",
    wanted: Annotated[
        str | None, typer.Option("--releases", metavar="SPEC", help="Which, as '>=0.14'. Default: those the jobs take.")
    ] = None,
    stack: Annotated[str, typer.Option("--stack", metavar="ID", help="Whose other pins are held.")] = DEFAULT_STACK,
    write: Annotated[bool, typer.Option("--write", help="Put the result into docs/ and make the page anew.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Measure nothing; fail if the page is not up to date.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where evidence is kept.")] = Path("results/survey"),
) -> ExitCode:
    """Run the lane `survey` at every release and write survey.json, and with --write docs/compatibility.md."""
    if check:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != _page():
            raise CiError(
                f"{PAGE} is not what docs/survey-*.json say; run `python -m ci survey --write`", ExitCode.FAILED
            )
        return ExitCode.OK
    console = Console(highlight=False, stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    matrix = load()
    if LANE not in matrix.lanes:
        raise UsageError(f"matrix.yaml has no lane {LANE}, whose cases a survey runs; {choices(LANE, matrix.lanes)}")
    surveyed = {name: matrix.jobs[name] for name in matrix.lanes[LANE].cases}
    jobs = survey.touching(package, surveyed)
    if not jobs:
        known = {name for job in surveyed.values() for name in job.requires}
        raise UsageError(f"--package: no job asks for {package!r}; {choices(package, known)}")
    plan = make_plan(matrix, Selection(lane=LANE, stacks=(stack,), jobs=tuple(jobs)))
    # What a job requires is what it is judged by elsewhere; here an older release may be asked for all the same.
    cells = [dataclasses.replace(cell, gated=None) for cell in plan.cells]
    ids = {cell.id: f"{cell.job}/{cell.id.split('/')[3]}" for cell in cells}
    started = time.monotonic()
    target = out / f"survey-{package}.json"
    result = Survey(
        package=package,
        stack=stack,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        pins={name: pin for name, pin in plan.stacks[stack].pins.items() if name != package},
        cases=tuple(SurveyedCase(id=ids[cell.id], job=cell.job) for cell in cells),
    )
    if target.is_file():
        result = result.with_rows(survey.read(target).rows_for(result))
    with Interrupts() as interrupts:
        found = releases.on_the_index(package)
        for specifier in [wanted] if wanted is not None else [surveyed[job].requires[package] for job in jobs]:
            found = releases.within(found, specifier)
        if not found:
            raise NothingToRun(f"the index has no release of {package} within {wanted or 'what the jobs take'}")
        runtime = OverlayRuntime(Path.cwd(), say=say)
        progress = Console(highlight=False, stderr=True, quiet=not console.is_terminal)
        recipe = recipe_for(matrix, stack, Path.cwd())
        prober = Prober(matrix, runtime, recipe, plan.stacks[stack], out, interrupts, progress)
        say(f"{len(found)} releases of {package}, {len(cells)} cells each")
        # The newest first: should the time run out, they are what most people ask about.
        for done, version in enumerate(reversed(found), 1):
            begun = time.monotonic()
            release = Release(package, str(version))
            outcomes = probed(prober, release, cells)
            changed = runtime.brought_along(recipe, release)
            row = row_of(str(version), changed, {ids[cell]: outcome for cell, outcome in outcomes.items()})
            result = result.with_rows([row])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(survey.text(result), encoding="utf-8")
            say(f"[{done}/{len(found)}] {_summary(row)}  ({brief_time(time.monotonic() - begun)})")
    say(f"{package}: {brief_time(time.monotonic() - started)}; {target}")
    if write:
        committed = DOCS / target.name
        committed.write_text(survey.text(survey.completed(result, committed)), encoding="utf-8")
        PAGE.write_text(_page(), encoding="utf-8")
        say(f"written: {committed}, {PAGE}")
    return ExitCode.OK


def probed(prober: Prober, release: Release, cells: list[Cell]) -> dict[str, Outcome]:
    """Every cell once; those whose verdict fails a second time, since a surprise has to be the same twice."""
    found = {cell: probe.outcome for cell, probe in prober.probe(release, cells, 1).items()}
    surprising = [cell for cell in cells if found[cell.id].verdict in FAILING]
    if surprising:
        found |= {cell: probe.outcome for cell, probe in prober.probe(release, surprising, 2).items()}
    return found


def _page() -> str:
    return survey.page([survey.read(path) for path in sorted(DOCS.glob("survey-*.json"))])


def _summary(row: Row) -> str:
    if row.unusable is not None:
        return f"{row.version}: {row.unusable.kind}: {row.unusable.why}"
    counted: dict[str, int] = {}
    for outcome in row.outcomes.values():
        word = str(outcome.verdict or outcome.kind)
        counted[word] = counted.get(word, 0) + 1
    return f"{row.version}: {', '.join(f'{count} {word}' for word, count in sorted(counted.items()))}"
