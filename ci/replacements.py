"""`--with PKG=VERSION|WHEEL|PATH`: what a maintainer types to try a release, a wheel or a pull request's checkout."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from ci.errors import UsageError


@dataclass(frozen=True)
class Replacement:
    """One pin replaced for this run. version is None where only building it tells; path is None for a release."""

    package: str
    version: str | None
    path: Path | None


def parse_replacement(text: str) -> Replacement:
    """Read one `--with`; whatever it names on this disk must be there and be what it seems."""
    package, equals, value = text.partition("=")
    value = value.removeprefix("=")  # pip's spelling, deepspeed==0.19.8, means the same
    if not equals or not package or not value:
        raise UsageError(f"--with: found {text!r}; expected PKG=VERSION, PKG=WHEEL or PKG=PATH")
    package = canonicalize_name(package)
    path = Path(value).expanduser()
    if not (os.sep in value or value.endswith(".whl") or value.startswith(("~", "."))):
        try:
            return Replacement(package, str(Version(value)), None)
        except InvalidVersion:
            if not path.exists():
                raise UsageError(f"--with {text}: {value!r} is neither a version nor a file or folder here") from None
    if not path.exists():
        raise UsageError(f"--with {text}: {path} does not exist")
    if path.is_dir():
        if not any((path / name).is_file() for name in ("pyproject.toml", "setup.py")):
            raise UsageError(f"--with {text}: {path} has neither pyproject.toml nor setup.py; expected a checkout")
        return Replacement(package, None, path)
    try:
        name, version, _, _ = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise UsageError(f"--with {text}: {error}; expected a wheel or the folder of a checkout") from error
    if name != package:
        raise UsageError(f"--with {text}: this is a wheel of {name}; expected one of {package}")
    return Replacement(package, str(version), path)
