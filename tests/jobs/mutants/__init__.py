"""Faults planted into training at run time, to see whether the checks notice: `nox -s mutants`.

Each changes what the ranks execute, never evidence, reference or judge, and says that its line ran. What each is, where
it is planted and which check must turn red is in ci/mutants/table.yaml; what it does is here, by theme.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.jobs.mutants.site import Site


def site(payload: Mapping[str, Any], rank: int) -> Site:
    """Where the mutant of a case is planted; a site without one where the case has none."""
    name = payload.get("mutant")
    if name is None:
        return Site(None, payload, rank)
    from tests.jobs.mutants import forwards, gradients, norms, scales, states, updates, weights

    known = [
        found
        for theme in (forwards, gradients, norms, scales, states, updates, weights)
        for found in theme.MUTANTS
        if found.name == name
    ]
    if len(known) != 1:
        raise LookupError(f"{len(known)} mutants are named {name!r}")
    return Site(known[0], payload, rank)
