"""Which ledger entries claim a case at a set of pins, and which corrections that calls for.

Shared by the plan, which makes corrected cells of claimed ones, and by the judge, for whom an entry whose correction
was applied claims no more. Corrections are named as they are asked for: `loss_scale`, or with a mode
`zero3_guard=raise`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ci import cases
from ci.entries import MODE, Correction, Defect
from ci.entries import CorrectionMode as Mode


@cache
def _contains(specifier: str, version: str | None) -> bool:
    try:
        return version is not None and SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False  # a job writes "absent" for a package that is not installed


def affects(defect: Defect, pins: Mapping[str, str]) -> bool:
    """Whether all packages named are installed in an affected release; a development build counts by its version."""
    installed = {canonicalize_name(package): version for package, version in pins.items()}
    return all(
        _contains(specifier, installed.get(canonicalize_name(package))) for package, specifier in defect.affects.items()
    )


def corrected_by(defect: Defect, corrections: Iterable[str]) -> bool:
    """Whether these corrections make the entry right. An entry that names a mode is right in that mode only."""
    applied = {part for name in corrections for part in (name, name.partition(MODE)[0])}
    return bool(defect.corrections) and applied.issuperset(defect.corrections)


def claims(
    defect: Defect, job: str, case: cases.Case, pins: Mapping[str, str], corrections: Iterable[str] = ()
) -> bool:
    """Whether the entry says that this case shows its symptom; not where its correction was applied."""
    if corrected_by(defect, corrections):
        return False
    return affects(defect, pins) and cases.matches(defect.where, {**case, "job": job})


@dataclass(frozen=True)
class Variant:
    """One way of correcting a case. suffix: what stands behind `+` in the id of its cell."""

    suffix: str
    corrections: tuple[str, ...]


def variants(claiming: Iterable[Defect], corrections: Mapping[str, Correction]) -> tuple[Variant, ...]:
    """The corrected cells that a claimed case has: none, one, or one for each mode of a correction that has modes."""
    entries = [defect for defect in claiming if defect.corrections]
    stems = list(dict.fromkeys(name.partition(MODE)[0] for defect in entries for name in defect.corrections))
    moded = {stem: corrections[stem].modes for stem in stems if stem in corrections}
    if not moded:
        return (Variant("corrected", tuple(stems)),) if stems else ()
    plain = [stem for stem in stems if stem not in moded]
    found = []
    for stem, modes in moded.items():
        for position, mode in enumerate(modes):
            name = f"{stem}{MODE}{mode}"
            if any(name in entry.corrections or stem in entry.corrections for entry in entries):
                suffix = "corrected" if position == 0 else f"corrected-{mode}"
                found.append(Variant(suffix, (*plain, name)))
    return tuple(found)


def mode_of(name: str, corrections: Mapping[str, Correction]) -> Mode | None:
    """What matrix.yaml says of the mode that a correction was asked for in, or None where it has no modes."""
    stem, _, mode = name.partition(MODE)
    return corrections[stem].modes.get(mode) if stem in corrections else None
