"""`bisect`: in which release, or commit, did a case change its behaviour?

Resumable: what was run is kept, and found again as long as the stack's lock and the release are the same.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from packaging.version import InvalidVersion, Version
from rich.console import Console

from ci import cases, commits, releases
from ci.bisect import Boundary, Gap, Search
from ci.commits import Commit
from ci.errors import EnvironmentUnavailable, ExitCode, NothingToRun, UsageError, choices
from ci.interrupts import Interrupts
from ci.matrix import Job, Matrix, load
from ci.plan import DEFAULT_BACKEND, DEFAULT_LANE, DEFAULT_WORLD_SIZE, Cell, PlannedStack, Selection, make_plan
from ci.probe import Kind, Outcome, Probe, Prober, alike, numbers
from ci.progress import brief_time
from ci.provision.overlay import OverlayRuntime, Release
from ci.provision.recipe import recipe_for

DEFAULT_STACK = "stable"
REPEATS = 2
"""Every release is asked twice in one start; only one that disagrees with itself is asked more often."""


@dataclass(frozen=True)
class Row:
    """What is searched: releases or commits, oldest first, as a user writes them."""

    package: str
    points: tuple[Version, ...] | tuple[Commit, ...]
    repo: Path | None = None

    def name(self, position: int) -> str:
        return str(self.points[position])

    def title(self, position: int) -> str:
        point = self.points[position]
        return f"{point} ({point.subject})" if isinstance(point, Commit) else str(point)

    def release(self, position: int) -> Release:
        point = self.points[position]
        commit = point.id if isinstance(point, Commit) else None
        return Release(self.package, str(point), self.repo, commit)

    def position(self, option: str, word: str) -> int:
        """Where a release that the user named stands."""
        names = [self.name(index) for index in range(len(self.points))]
        with contextlib.suppress(InvalidVersion):
            word = str(Version(word))
        if word not in names:
            raise UsageError(
                f"{option}: no release {word!r} of {self.package} that the job takes; {choices(word, names)}"
            )
        return names.index(word)


def main(
    job: Annotated[str, typer.Option("--job", metavar="ID", help="The job of the case.")],
    case: Annotated[
        str, typer.Option("--case", metavar="KEY=VALUE[,KEY=VALUE]", help="One case; keys left out are at the default.")
    ],
    package: Annotated[str, typer.Option("--package", metavar="NAME", help="Whose releases.")] = "deepspeed",
    good: Annotated[str | None, typer.Option("--good", metavar="V", help="One end: where it is right.")] = None,
    bad: Annotated[str | None, typer.Option("--bad", metavar="V", help="The other end: where it is wrong.")] = None,
    stack: Annotated[str, typer.Option("--stack", metavar="ID", help="Whose other pins are held.")] = DEFAULT_STACK,
    exhaustive: Annotated[bool, typer.Option("--exhaustive", help="Look at every release between the ends.")] = False,
    repo: Annotated[
        Path | None,
        typer.Option("--repo", metavar="PATH", help="Commits of this checkout; --good, --bad are revisions."),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where probes are kept.")] = Path("results/bisect"),
) -> ExitCode:
    """Find every release between which a case behaves differently, with the numbers of both sides."""
    console = Console(highlight=False, stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    matrix = load()
    cell, planned = one_cell(matrix, job, case, stack)
    if package not in planned.pins:
        raise UsageError(f"--package: stack {stack} has no pin of {package!r}; {choices(package, planned.pins)}")
    started = time.monotonic()
    with Interrupts() as interrupts:
        row = _row(matrix.jobs[job], cell, package, good, bad, repo)
        runtime = OverlayRuntime(Path.cwd(), say=say)
        recipe = recipe_for(matrix, stack, Path.cwd())
        prober = Prober(matrix, runtime, recipe, planned, out, interrupts, Console(quiet=not console.is_terminal))
        probes: dict[int, Probe] = {}

        def look(position: int) -> Outcome:
            begun = time.monotonic()
            probes[position] = prober.probe(row.release(position), [cell], REPEATS)[cell.id]
            say(f"{described(row.name(position), probes[position])}  ({brief_time(time.monotonic() - begun)})")
            return probes[position].outcome

        say(f"{job} with {case} on stack {stack}: {row.name(0)} to {row.name(len(row.points) - 1)} of {package}")
        search = Search(look)
        samples = _samples(row, search, good, bad, exhaustive)
        found = search.boundaries(samples)
    words = ["--job", job, "--case", case, "--package", package]
    words += ["--stack", stack] if stack != DEFAULT_STACK else []
    words += ["--repo", str(repo)] if repo else []
    for line in report(row, probes, samples, found, search.gaps(samples), words, cell):
        print(line)
    say(f"{len(probes)} probes in {brief_time(time.monotonic() - started)}; kept in {out}")
    return ExitCode.OK


def one_cell(matrix: Matrix, job_id: str, words: str, stack: str) -> tuple[Cell, PlannedStack]:
    """The one cell that `--job` and `--case` name, with every key left out at the job's default, and its stack."""
    if job_id not in matrix.jobs:
        raise UsageError(f"unknown job {job_id!r}; {choices(job_id, matrix.jobs)}")
    if stack not in matrix.stacks:
        raise UsageError(f"unknown stack {stack!r}; {choices(stack, matrix.stacks)}")
    job = matrix.jobs[job_id]
    given = cases.parse_filter(words, {job_id: job})[job_id]
    try:
        values = cases.resolve(job, given)
    except KeyError as missing:
        raise UsageError(f"--case {words}: {job_id} needs {missing.args[0]} too, it has no default") from None
    for exclusion in job.exclude:
        if cases.matches(exclusion.where, values):
            raise UsageError(f"--case {words}: there is no such case: {exclusion.reason}")
    name = cases.name(job, values)
    # A lane that has the case knows the command that runs it alone; a case of no lane can be asked for as well.
    every_key = ",".join(f"{key}={cases.text(value)}" for key, value in values.items())
    for lane in sorted(matrix.lanes, key=lambda lane: lane != DEFAULT_LANE):
        try:
            plan = make_plan(matrix, Selection(lane=lane, stacks=(stack,), jobs=(job_id,), cases=(every_key,)))
        except NothingToRun:
            continue
        return plan.cells[0], plan.stacks[stack]
    entry = matrix.stacks[stack]
    cell = Cell(
        id=f"{DEFAULT_BACKEND}/{stack}/{job_id}/{name}",
        backend=DEFAULT_BACKEND,
        stack=stack,
        job=job_id,
        case=values,
        world_size=int(values.get("world_size", DEFAULT_WORLD_SIZE)),
        timeout_s=job.timeout_s,
        gated=None,
        command="",
    )
    return cell, PlannedStack(stack, dict(entry.pins), Path(entry.lock), check_pins=True)


def _row(job: Job, cell: Cell, package: str, good: str | None, bad: str | None, repo: Path | None) -> Row:
    if repo is not None:
        if good is None or bad is None:
            raise UsageError("--repo needs --good and --bad: the revisions between which commits are searched")
        return Row(package, commits.between(repo, good, bad), repo)
    found = releases.on_the_index(package)
    wanted = [job.requires.get(package, "")]
    wanted += [more.requires.get(package, "") for more in job.case_requires if cases.matches(more.where, cell.case)]
    for specifier in filter(None, wanted):
        found = releases.within(found, specifier)
    if not found:
        raise NothingToRun(f"the index has no release of {package} that {cell.job} takes ({', '.join(wanted)})")
    return Row(package, found)


def _samples(row: Row, search: Search, good: str | None, bad: str | None, exhaustive: bool) -> list[int]:
    """The positions between which boundaries are searched: the ends given, or the last patch of each minor release."""
    last = len(row.points) - 1
    if good is None and bad is None:
        versions = [point for point in row.points if isinstance(point, Version)]
        wanted = range(len(row.points)) if exhaustive else releases.last_of_each_minor(versions)
        samples = search.sampled(list(wanted))
        if not samples:
            raise EnvironmentUnavailable(f"no release could be tried: {search.seen[last].why}")
        return samples
    first, end = 0, last
    if row.repo is None:
        named = [row.position(option, word) for option, word in (("--good", good), ("--bad", bad)) if word is not None]
        # One end alone is searched towards the newest release for --good, towards the oldest for --bad.
        first, end = sorted([*named, last if bad is None else 0][:2])
    for position in (first, end):
        outcome = search.at(position)
        if not outcome.counts:
            raise EnvironmentUnavailable(f"{row.name(position)}: {outcome.kind}: {outcome.why}")
    if alike(search.at(first), search.at(end)):
        raise UsageError(
            f"{row.name(first)} and {row.name(end)} behave alike ({search.at(first).kind}): "
            "nothing to search between them; give other ends, or none"
        )
    return search.sampled(list(range(first, end + 1)), first) if exhaustive else [first, end]


def described(name: str, probe: Probe) -> str:
    """One line about a release."""
    outcome = probe.outcome
    if outcome.why is not None:
        return f"  {name}: {outcome.kind}: {outcome.why}"
    line = f"  {name}: {outcome.kind}"
    if probe.reported or probe.used:
        line += f"; norm reported/true {numbers(probe.reported)}, gradient used/wanted {numbers(probe.used)}"
    others = [each.check for each in outcome.failing if each.check not in ("reported_norm", "gradient_used")]
    line += f"; wrong too: {', '.join(others)}" if others else ""
    line += f"; {outcome.exception}" if outcome.exception else ""
    if outcome.defects:
        return f"{line}; {outcome.verdict}: {', '.join(outcome.defects)}"
    return line if outcome.kind is Kind.PASSES else f"{line}; in no entry of the ledger"


def turn(before: Outcome, after: Outcome) -> str:
    """What happens at a boundary, in a word or three."""
    match before.kind, after.kind:
        case (Kind.PASSES, Kind.WRONG):
            return "goes wrong"
        case (_, Kind.PASSES):
            return "is right again"
        case (_, Kind.RAISES) if before.kind is not Kind.RAISES:
            return "begins to raise"
        case (Kind.RAISES, _) if after.kind is not Kind.RAISES:
            return "raises no longer, and is wrong"
        case _:
            return "changes"


def report(
    row: Row,
    probes: Mapping[int, Probe],
    samples: Sequence[int],
    found: Sequence[Boundary],
    gaps: Sequence[Gap],
    words: Sequence[str],
    cell: Cell,
) -> list[str]:
    """The answer: each boundary with both sides' numbers and the commands that show it again."""
    lines = [f"{len(found)} {'boundary' if len(found) == 1 else 'boundaries'} of {cell.job} {words[3]}, {row.package}:"]
    for boundary in found:
        low, high = probes[boundary.before], probes[boundary.after]
        where = row.title(boundary.after)
        if boundary.between:
            where += f", or one of {', '.join(map(row.name, boundary.between))}, which could not be tried"
        lines += ["", f"{where}: {turn(low.outcome, high.outcome)}"]
        lines += [described(row.name(boundary.before), low), described(row.name(boundary.after), high)]
        ends = ["--good", row.name(boundary.before), "--bad", row.name(boundary.after)]
        lines.append(f"  again: {shlex.join(['nox', '-s', 'bisect', '--', *words, *ends])}")
        if cell.command and row.repo is None:
            replaced = f"--runtime venv --with {row.package}={row.name(boundary.after)}"
            lines.append(f"  alone: {cell.command} {replaced}")
    lines.append("")
    failed = [position for position in sorted(probes) if not probes[position].outcome.counts]
    lines += ["could not be tried:"] * bool(failed)
    lines += [described(row.name(position), probes[position]) for position in failed]
    if gaps:
        pairs = ", ".join(f"{row.name(gap.first)} to {row.name(gap.last)}" for gap in gaps)
        lines.append(f"alike at both ends and not looked at between: {pairs}. A change there and back would be missed;")
        lines.append("--exhaustive looks at every release.")
    outside = [(0, samples[0] - 1), (samples[-1] + 1, len(row.points) - 1)]
    spans = [
        f"{row.name(low)} to {row.name(high)}" if low < high else row.name(low) for low, high in outside if low <= high
    ]
    lines += [f"outside the ends, not looked at: {', '.join(spans)}"] * bool(spans)
    return lines
