"""What the ledger knows of a finding: the entries whose symptom it is, in the releases and the settings of the run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ci import advice, cases
from ci.advice import Affected
from ci.audit.findings import Finding, Signature
from ci.audit.fold import Run
from ci.entries import Defect, Scalar
from ci.matrix import Matrix


def pins(run: Run) -> dict[str, SpecifierSet]:
    """The releases that a log names, the first where it names several of a package."""
    found: dict[str, SpecifierSet] = {}
    for package, versions in run.releases.items():
        for version in versions:
            try:
                found.setdefault(package, SpecifierSet(f"=={Version(version)}"))
            except InvalidVersion:
                continue
    return found


def entries(
    matrix: Matrix, signature: Signature, allowed: Mapping[str, SpecifierSet], settings: Mapping[str, Scalar]
) -> tuple[Affected, ...]:
    """The entries that these releases and settings can meet and that look like it, the most general ones first.

    An entry that holds in many configurations is likelier to be met than one about a corner of a job.
    """
    found = [
        affected
        for affected in advice.advise(matrix, allowed).affected
        if _shows(affected.defect, signature) and _meets(matrix, affected.defect, settings)
    ]
    return tuple(sorted(found, key=lambda affected: len(affected.defect.where)))


def exceptions(matrix: Matrix, run: Run, position: int, name: str) -> Iterator[Finding]:
    """The exceptions of a log that some entry expects; of any other the ledger has nothing to say."""
    expected = [defect.symptom.raises for defect in matrix.defects if defect.symptom.raises is not None]
    for message in run.raised:
        if any(re.search(each, message) for each in expected):
            yield Finding(
                f"{name}: an exception that the ledger knows: {message}", ((position, Signature(raised=message)),)
            )


def _shows(defect: Defect, signature: Signature) -> bool:
    symptom = defect.symptom
    if symptom.raises is not None:
        return signature.raised is not None and re.search(symptom.raises, signature.raised) is not None
    effect = symptom.effects.get("reported_norm")
    return effect is not None and (effect.times in signature.times or effect.equals in signature.equals)


def _meets(matrix: Matrix, defect: Defect, settings: Mapping[str, Scalar]) -> bool:
    """Whether the entry can show in a run with these settings; what the log does not say is no obstacle."""
    said = {key: wanted for key, wanted in defect.where.items() if key in settings}
    if not cases.matches(said, settings):
        return False
    named = defect.where.get("job", tuple(matrix.jobs))
    jobs = [matrix.jobs[str(job)] for job in (named if isinstance(named, tuple) else (named,))]
    return any(
        all(
            key not in settings or job.keys[key].accepts(settings[key])
            for key in ("zero_stage", "dtype")
            if key in job.keys
        )
        for job in jobs
    )
