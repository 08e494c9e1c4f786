"""What the ledger knows about a set of pins: which defects, where they show, what avoids them, what makes them right.

Pins may be ranges, as requirements files write them. A ledger speaks of bounds, so a range is looked at in the
releases at which something changes: every version that an entry or a stack names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ci import claims
from ci.known_defects import corrections, link, releases, symptom, where
from ci.matrix import Defect, Matrix


@dataclass(frozen=True)
class Affected:
    """An entry that these pins can meet. releases: of DeepSpeed, those looked at that have it; whole: all of them."""

    defect: Defect
    releases: tuple[Version, ...]
    whole: bool


@dataclass(frozen=True)
class Move:
    """A release to move to, and what that changes: the ids of entries left behind, and of those met only there."""

    package: str
    release: Version
    leaves: tuple[str, ...]
    meets: tuple[str, ...]


@dataclass(frozen=True)
class Advice:
    """The answer. looked_at: the releases of each package that stand for what the pins allow."""

    looked_at: Mapping[str, tuple[Version, ...]]
    affected: tuple[Affected, ...]
    moves: tuple[Move, ...]


PACKAGE = "deepspeed"
"""The package that every entry of the ledger speaks of."""


def advise(matrix: Matrix, pins: Mapping[str, SpecifierSet]) -> Advice:
    """pins: the releases allowed, by canonical package name; a package not named is allowed in every release."""
    named = _named(matrix)
    looked_at = {package: _allowed(known, pins.get(package, SpecifierSet())) for package, known in named.items()}
    ours = looked_at[PACKAGE]
    affected = []
    for defect in matrix.defects:
        having = tuple(release for release in ours if _meets(defect, release, looked_at))
        if having:
            affected.append(Affected(defect, having, len(having) == len(ours)))
    return Advice(looked_at, tuple(affected), tuple(_moves(matrix, looked_at)))


def _named(matrix: Matrix) -> dict[str, frozenset[Version]]:
    """Every release of a package that the ledger's bounds or a stack's pins name."""
    named: dict[str, set[Version]] = {PACKAGE: set()}
    for defect in matrix.defects:
        for package, specifier in defect.affects.items():
            named.setdefault(package, set()).update(Version(each.version) for each in SpecifierSet(specifier))
    for stack in matrix.stacks.values():
        for package in named:
            if package in stack.pins:
                named[package].add(Version(stack.pins[package]))
    return {package: frozenset(releases) for package, releases in named.items()}


def _allowed(known: Iterable[Version], specifier: SpecifierSet) -> tuple[Version, ...]:
    """The known releases that a specifier allows, and those that it names itself."""
    own = [Version(each.version) for each in specifier if not each.version.endswith(".*")]
    return tuple(sorted(release for release in {*known, *own} if specifier.contains(release, prereleases=True)))


def _meets(defect: Defect, release: Version, looked_at: Mapping[str, tuple[Version, ...]]) -> bool:
    """Whether the entry affects this release beside some allowed release of every other package it names."""
    others = {package: looked_at.get(package, ()) for package in defect.affects if package != PACKAGE}
    if not claims.affects(defect.model_copy(update={"affects": _only(defect, PACKAGE)}), {PACKAGE: str(release)}):
        return False
    return all(
        any(
            claims.affects(defect.model_copy(update={"affects": _only(defect, package)}), {package: str(each)})
            for each in releases
        )
        for package, releases in others.items()
    )


def _only(defect: Defect, package: str) -> dict[str, str]:
    return {package: defect.affects.get(package, ">=0")}


def _moves(matrix: Matrix, looked_at: Mapping[str, tuple[Version, ...]]) -> Iterator[Move]:
    """For each release, newer than the newest allowed one, at which an entry ends: what moving there leaves behind."""
    ends: set[tuple[str, Version]] = set()
    for defect in matrix.defects:
        for package, specifier in defect.affects.items():
            ends.update((package, Version(each.version)) for each in SpecifierSet(specifier) if each.operator == "<")

    def met(package: str, release: Version) -> list[str]:
        there = {**looked_at, package: (release,)}
        return [
            defect.id
            for defect in matrix.defects
            if any(_meets(defect, each, there) for each in there.get(PACKAGE, ()))
        ]

    for package, release in sorted(ends):
        allowed = looked_at.get(package, ())
        if not allowed or release <= allowed[-1]:
            continue
        before, after = met(package, allowed[-1]), met(package, release)
        leaves = tuple(each for each in before if each not in after)
        if leaves:
            yield Move(package, release, leaves, tuple(each for each in after if each not in before))


def lines(affected: Affected) -> Iterator[str]:
    """An entry in words, a line each: where, what it looks like, in which releases, and what to do."""
    defect = affected.defect
    yield f"{defect.id}: {defect.title}"
    yield f"  where: {where(defect)}"
    yield f"  symptom: {symptom(defect.symptom)}"
    yield f"  releases: {releases(defect)}" + (
        "" if affected.whole else f" (here {', '.join(map(str, affected.releases))})"
    )
    yield f"  advice: {defect.advice}"
    if defect.config is not None:
        yield f"  configuration: {json.dumps(defect.config)}"
    if defect.corrections:
        yield f"  correction: {', '.join(corrections(defect))}"
    if defect.upstream:
        yield f"  upstream: {', '.join(link(each).partition('(')[2].rstrip(')') for each in defect.upstream)}"
