"""The releases of a package on the index, as pip's own client tells them: with the user's index and certificates.

Pre-releases are left out, and so are yanked ones: pip does not list them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from itertools import groupby

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from ci.errors import EnvironmentUnavailable, UsageError
from ci.provision import process
from ci.provision.overlay import last_line
from ci.provision.site import Site

ANSWER_S = 120.0


def on_the_index(package: str, site: Site | None = None) -> tuple[Version, ...]:
    """Every release, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "--json", package]
    env = {**os.environ, **(site or Site.of()).indexes, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = process.run(command, env=env, timeout=ANSWER_S)
    if done.code:
        raise EnvironmentUnavailable(f"the releases of {package} cannot be listed: {last_line(done.said)}")
    return parse(done.output, package)


def parse(output: str, package: str) -> tuple[Version, ...]:
    """What `pip index versions --json` printed, oldest first; warnings around it are passed over."""
    for line in output.splitlines():
        try:
            versions = json.loads(line)["versions"]
        except (json.JSONDecodeError, KeyError, TypeError):
            continue
        return tuple(sorted(version for version in map(Version, versions) if not version.is_prerelease))
    raise EnvironmentUnavailable(f"the releases of {package} cannot be listed: pip printed no list")


def within(releases: Sequence[Version], specifier: str, option: str = "--releases") -> tuple[Version, ...]:
    """Those that a PEP 440 specifier holds."""
    try:
        wanted = SpecifierSet(specifier)
    except InvalidSpecifier:
        raise UsageError(
            f"{option}: found {specifier!r}; expected a version specifier such as '>=0.14,<0.19'"
        ) from None
    return tuple(release for release in releases if wanted.contains(release))


def last_of_each_minor(releases: Sequence[Version]) -> list[int]:
    """Positions of the last patch of each minor release, in a sequence sorted by version."""
    positions = groupby(range(len(releases)), key=lambda index: releases[index].release[:2])
    return [list(group)[-1] for _, group in positions]
