"""Mistakes in matrix.yaml that need two entries to see: names that do not exist, orders broken, cases that cannot be.

Kept apart from the models because each rule here is about the whole file; `ci.matrix` adds the line numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

from packaging.utils import canonicalize_name

from ci import cann, cases
from ci.entries import (
    CASE_KEYS,
    CURRENT,
    MODE,
    NEGATION,
    CaseKey,
    Defect,
    Exclusion,
    Job,
    Lane,
    Matrix,
    Scalar,
    Stack,
    Where,
)
from ci.errors import choices

CORRECTIONS = Path("ci/corrections")
"""Where the file of an entry's `correction` is, from the folder of matrix.yaml."""

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

Place = tuple[str | int, ...]


@dataclass(frozen=True)
class Contradiction:
    """One mistake: the place in the file, what stands there and what should."""

    path: Place
    found: str
    expected: str


def contradictions(matrix: Matrix, root: Path) -> Iterator[Contradiction]:
    """All contradictions. Lanes and defects speak in the words of jobs and stacks, so these come first."""
    yield from _order(matrix)
    yield from _backends_and_stacks(matrix)
    for job_id, job in matrix.jobs.items():
        yield from _job(matrix, ("jobs", job_id), job)
    for lane_id, lane in matrix.lanes.items():
        yield from _lane(matrix, ("lanes", lane_id), lane)
    yield from _tolerances(matrix)
    yield from _corrections(matrix, root)
    for index, defect in enumerate(matrix.defects):
        yield from _defect(matrix, root, ("defects", index), defect)


def _order(matrix: Matrix) -> Iterator[Contradiction]:
    """Entries are sorted by id, so that two changes rarely touch the same line and a reader finds an entry."""
    sections: dict[str, Mapping[str, object]] = {
        "package_indexes": matrix.package_indexes,
        "cann": matrix.cann,
        "backends": matrix.backends,
        "runners": matrix.runners,
        "stacks": matrix.stacks,
        "lanes": matrix.lanes,
        "jobs": matrix.jobs,
        "corrections": matrix.corrections,
    }
    for name, entries in sections.items():
        yield from _unsorted({(name, word): word for word in entries})
    yield from _unsorted({("defects", index, "id"): defect.id for index, defect in enumerate(matrix.defects)})


def _unsorted(ids: Mapping[Place, str]) -> Iterator[Contradiction]:
    for (_, before), (place, after) in pairwise(ids.items()):
        if before == after:
            yield Contradiction(place, f"{after!r} a second time", "each id once")
        elif before > after:
            yield Contradiction(place, f"{after!r} after {before!r}", "entries sorted by id")


def _backends_and_stacks(matrix: Matrix) -> Iterator[Contradiction]:
    for backend_id, backend in matrix.backends.items():
        index = backend.package_index
        if index is not None and index not in matrix.package_indexes:
            yield _unknown(("backends", backend_id, "package_index"), "package index", index, matrix.package_indexes)
    for backend_id in matrix.runners:
        if backend_id not in matrix.backends:
            yield _unknown(("runners", backend_id), "backend", backend_id, matrix.backends)
    for stack_id, stack in matrix.stacks.items():
        here: Place = ("stacks", stack_id)
        if stack_id == CURRENT:
            yield Contradiction(here, f"{CURRENT!r}", "another id: this one means what an interpreter has installed")
        if stack.backend not in matrix.backends:
            yield _unknown((*here, "backend"), "backend", stack.backend, matrix.backends)
        yield from _cann(matrix, here, stack)
        for package in stack.pins:
            if package != canonicalize_name(package):
                yield Contradiction((*here, "pins", package), repr(package), f"{canonicalize_name(package)!r}")
        for package in stack.why:
            if package not in stack.pins:
                yield _unknown((*here, "why", package), "pin", package, stack.pins)
        for number, package in enumerate(stack.forced):
            if package not in stack.pins:
                yield _unknown((*here, "forced", number), "pin", package, stack.pins)
            elif package not in stack.why:
                yield Contradiction((*here, "forced", number), repr(package), f"its reason: `why: {{{package}: ...}}`")
        if stack.lane is not None and stack.lane not in matrix.lanes:
            yield _unknown((*here, "lane"), "lane", stack.lane, matrix.lanes)


def _cann(matrix: Matrix, here: Place, stack: Stack) -> Iterator[Contradiction]:
    """A stack names a CANN where its image is one of CANN, and pins the torch-npu that is made for it."""
    backend = matrix.backends.get(stack.backend)
    needed = backend is not None and "{cann}" in (backend.base_image or "")
    if needed and stack.cann is None:
        yield Contradiction(here, "no cann", f"the CANN of its base image: {', '.join(matrix.cann) or 'none is known'}")
    elif stack.cann is not None and not needed:
        yield Contradiction((*here, "cann"), repr(stack.cann), f"none: the image of {stack.backend} has no CANN")
    elif stack.cann is not None and (wrong := cann.mismatch(matrix.cann, stack.cann, stack.pins)) is not None:
        place = (*here, "cann") if stack.cann not in matrix.cann else (*here, "pins")
        yield Contradiction(place, *wrong)


def _job(matrix: Matrix, here: Place, job: Job) -> Iterator[Contradiction]:
    yield from _packages(matrix, (*here, "requires"), job.requires)
    for name, key in job.keys.items():
        place: Place = (*here, "keys", name)
        if name not in CASE_KEYS:
            yield _unknown(place, "case key", name, CASE_KEYS)
            continue
        for value in key.allowed:
            if isinstance(value, str) and not _SAFE.fullmatch(value):
                yield Contradiction((*place, "values"), repr(value), "letters, digits, '.', '_' and '-' (it is in ids)")
        if key.default is not None and not key.accepts(key.default):
            yield _value((*place, "default"), name, key.default, [key])
        earlier = {other: job.keys[other] for other in CASE_KEYS[: CASE_KEYS.index(name)] if other in job.keys}
        for index, conditional in enumerate(key.default_when):
            spot = (*place, "default_when", index)
            yield from _where((*spot, "where"), conditional.where, [earlier], "key of the job before this one")
            if not key.accepts(conditional.value):
                yield _value((*spot, "value"), name, conditional.value, [key])
    if all(key.default is not None for key in job.keys.values()):
        yield Contradiction((*here, "keys"), "a default for every key", "one key without, or some case has no name")
    for index, requirement in enumerate(job.case_requires):
        place = (*here, "case_requires", index)
        yield from _where((*place, "where"), requirement.where, [job.keys])
        yield from _packages(matrix, (*place, "requires"), requirement.requires)
    yield from _exclusions((*here, "exclude"), job.exclude, job)


def _lane(matrix: Matrix, here: Place, lane: Lane) -> Iterator[Contradiction]:
    for index, stack in enumerate(lane.stacks):
        if stack not in matrix.stacks:
            yield _unknown((*here, "stacks", index), "stack", stack, matrix.stacks)
    for job_id, patterns in lane.cases.items():
        if job_id not in matrix.jobs:
            yield _unknown((*here, "cases", job_id), "job", job_id, matrix.jobs)
            continue
        job = matrix.jobs[job_id]
        names: dict[str, Mapping[str, Scalar]] = {}
        for index, pattern in enumerate(patterns):
            place: Place = (*here, "cases", job_id, index)
            mistakes = list(_where(place, pattern, [job.keys], negation=False))
            yield from mistakes
            if not mistakes:
                yield from _pattern(place, pattern, job, names)
    for job_id, exclusions in lane.exclude.items():
        if job_id not in matrix.jobs:
            yield _unknown((*here, "exclude", job_id), "job", job_id, matrix.jobs)
        else:
            yield from _exclusions((*here, "exclude", job_id), exclusions, matrix.jobs[job_id])


def _pattern(place: Place, pattern: Where, job: Job, names: dict[str, Mapping[str, Scalar]]) -> Iterator[Contradiction]:
    """Every case of the pattern can be resolved, at least one exists, and no two have one name."""
    exists = False
    for given in cases.expand(pattern):
        try:
            case = cases.resolve(job, given)
        except KeyError as error:
            yield Contradiction(place, f"no {error.args[0]}", "a value for it: it has no default")
            return
        if any(cases.matches(exclusion.where, case) for exclusion in job.exclude):
            continue
        exists = True
        name = cases.name(job, case)
        if names.setdefault(name, case) != case:
            yield Contradiction(place, f"two cases with the id {name}", "one name for one case")
    if not exists:
        reasons = "; ".join(exclusion.reason for exclusion in job.exclude)
        yield Contradiction(place, "only cases that the job excludes", f"a case that exists ({reasons})")


def _exclusions(here: Place, exclusions: Sequence[Exclusion], job: Job) -> Iterator[Contradiction]:
    for index, exclusion in enumerate(exclusions):
        yield from _where((*here, index, "where"), exclusion.where, [job.keys])


def _tolerances(matrix: Matrix) -> Iterator[Contradiction]:
    """Each group speaks of cases that exist, and one case finds one tolerance for one check."""
    seen: dict[tuple[object, ...], int] = {}
    for index, group in enumerate(matrix.tolerances):
        here: Place = ("tolerances", index)
        if group.job is not None and group.job not in matrix.jobs:
            yield _unknown((*here, "job"), "job", group.job, matrix.jobs)
            continue
        jobs = list(matrix.jobs.values()) if group.job is None else [matrix.jobs[group.job]]
        for field, name, values in (
            ("dtype", "dtype", (group.dtype,)),
            ("stages", "zero_stage", group.stages),
            ("trainers", "trainer", group.trainers or ()),
        ):
            having = [job.keys[name] for job in jobs if name in job.keys]
            for value in values:
                if not any(key.accepts(value) for key in having):
                    yield _value((*here, field), name, value, having)
        trainers = group.trainers or (None,)
        for spot in product(trainers, group.stages, group.gradient_accumulation_steps, group.checks):
            first = seen.setdefault((group.job, group.dtype, *spot), index)
            if first != index:
                trainer, stage, accumulation, check = spot
                of_trainer = "" if trainer is None else f", trainer {trainer}"
                what = f"{check} of zero_stage {stage}, {group.dtype}, accumulation {accumulation}{of_trainer}"
                yield Contradiction(here, f"a second tolerance for {what}", f"one (the first is entry {first})")
                break


def _defect(matrix: Matrix, root: Path, here: Place, defect: Defect) -> Iterator[Contradiction]:
    jobs = matrix.jobs
    if "job" in defect.where:
        wanted = defect.where["job"]
        for word in wanted if isinstance(wanted, tuple) else (wanted,):
            plain = cases.text(word).removeprefix(NEGATION)
            if plain not in jobs:
                yield _unknown((*here, "where", "job"), "job", plain, jobs)
                return
        jobs = {job_id: job for job_id, job in jobs.items() if cases.matches({"job": wanted}, {"job": job_id})}
    where = {name: value for name, value in defect.where.items() if name != "job"}
    yield from _where((*here, "where"), where, [job.keys for job in jobs.values()])
    if not any(set(where) <= set(job.keys) for job in jobs.values()):
        yield Contradiction((*here, "where"), ", ".join(defect.where), "keys that one job has all of")
    yield from _packages(matrix, (*here, "affects"), defect.affects)
    for name in defect.corrections:
        stem, separator, mode = name.partition(MODE)
        place = (*here, "correction")
        yield from _correction_file(root, place, stem)
        modes = matrix.corrections[stem].modes if stem in matrix.corrections else {}
        if separator and mode not in modes:
            yield _unknown(place, f"mode of {stem}", mode, modes)


def _corrections(matrix: Matrix, root: Path) -> Iterator[Contradiction]:
    named = {name.partition(MODE)[0] for defect in matrix.defects for name in defect.corrections}
    for stem in matrix.corrections:
        yield from _correction_file(root, ("corrections", stem), stem)
        if stem not in named:
            yield Contradiction(("corrections", stem), repr(stem), "the `correction` of some entry of the ledger")


def _correction_file(root: Path, place: Place, stem: str) -> Iterator[Contradiction]:
    file = CORRECTIONS / f"{stem}.py"
    if not (root / file).is_file():
        yield Contradiction(place, repr(stem), f"the name of a file: no {file}")


def _packages(matrix: Matrix, here: Place, requires: Mapping[str, str]) -> Iterator[Contradiction]:
    """A range of a package that no stack pins could never be checked."""
    pinned = {package for stack in matrix.stacks.values() for package in stack.pins}
    for package in requires:
        if package not in pinned:
            yield _unknown((*here, package), "package of a stack", package, pinned)


def _where(
    here: Place,
    where: Where,
    jobs: Sequence[Mapping[str, CaseKey]],
    what: str = "case key",
    *,
    negation: bool = True,
) -> Iterator[Contradiction]:
    """Every key is one of these jobs', and every value one that it can have."""
    for name, wanted in where.items():
        having = [keys[name] for keys in jobs if name in keys]
        if not having:
            yield _unknown((*here, name), what, name, {known for keys in jobs for known in keys})
            continue
        for value in wanted if isinstance(wanted, tuple) else (wanted,):
            if any(key.accepts(value) for key in having):
                continue
            if negation and isinstance(value, str) and value.startswith(NEGATION):
                word = value.removeprefix(NEGATION)
                if any(cases.parse_value(key, word) is not None for key in having):
                    continue
            yield _value((*here, name), name, value, having)


def _unknown(here: Place, what: str, word: str, known: Iterable[str]) -> Contradiction:
    return Contradiction(here, f"unknown {what} {word!r}", f"one that exists ({choices(word, known)})")


def _value(here: Place, name: str, value: Scalar, keys: Sequence[CaseKey]) -> Contradiction:
    allowed = dict.fromkeys(cases.text(known) for key in keys for known in key.allowed)
    return Contradiction(here, f"{name} {cases.text(value)!r}", f"one of: {', '.join(allowed)}")
