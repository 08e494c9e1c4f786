"""The table of mutants: which fault, in which cases, and which check has to notice it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter
from ruamel.yaml import YAML

from ci import cases
from ci.cases import Case
from ci.entries import Check, Matrix, Scalar
from ci.errors import UsageError
from ci.evidence import Record

TABLE = Path(__file__).with_name("table.yaml")
USUAL_JOB = "engine-sweep"

Pattern = Mapping[str, Scalar | tuple[Scalar, ...]]


class Mutant(Record):
    """One fault. survives: why no check can notice it, where that is so; then it must survive."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")]
    fault: str
    killed_by: Check
    cases: tuple[Pattern, ...]
    survives: str | None = None


@dataclass(frozen=True)
class Place:
    """A case that mutants are planted in. corrections: what makes it clean on a release where it is not."""

    job: str
    case: Mapping[str, Scalar]
    corrections: tuple[str, ...]
    name: str


def load(path: Path = TABLE) -> tuple[Mutant, ...]:
    """All mutants; pydantic's ValidationError for a table that is none."""
    tree = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    return TypeAdapter(tuple[Mutant, ...]).validate_python(tree)


def places(mutant: Mutant, matrix: Matrix) -> Iterator[Place]:
    """The cases of a mutant, resolved; UsageError where matrix.yaml has no such job."""
    for pattern in mutant.cases:
        given = dict(pattern)
        job = str(given.pop("job", USUAL_JOB))
        if job not in matrix.jobs:
            raise UsageError(f"mutant {mutant.id!r} is planted in cases of the job {job!r}, which matrix.yaml lacks")
        corrections = given.pop("corrections", ())
        for values in cases.expand(given):
            case: Case = cases.resolve(matrix.jobs[job], values)
            yield Place(
                job=job,
                case=case,
                corrections=tuple(map(str, corrections)) if isinstance(corrections, tuple) else (str(corrections),),
                name=cases.name(matrix.jobs[job], case),
            )
