"""What is installed in an interpreter that is not ours: the stack `current` of a cluster's image."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ci.errors import EnvironmentUnavailable

_LIST = (
    "import importlib.metadata as m, json;"
    "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions() if d.metadata['Name']}))"
)
ANSWER_S = 60


def host_python(given: str | None) -> Path:
    """The interpreter of `--python`, else the first python3 on the PATH that is not the one running this program.

    nox puts its own environment first on the PATH, and that one never holds a stack.
    """
    if given is not None:
        found = shutil.which(given)
        if found is None:
            raise EnvironmentUnavailable(f"--python {given}: no such interpreter, or not executable")
        return Path(found)
    own = Path(sys.prefix).resolve()
    folders = [folder for folder in os.get_exec_path() if not Path(folder).resolve().is_relative_to(own)]
    found = shutil.which("python3", path=os.pathsep.join(folders)) or sys.executable
    return Path(found)


def installed_packages(python: Path) -> Mapping[str, str]:
    """Every distribution that the interpreter sees, by name."""
    try:
        done = subprocess.run(
            [python, "-c", _LIST],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
        packages: dict[str, str] = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentUnavailable(f"{python} cannot list its packages: {last}") from error
    except (OSError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        raise EnvironmentUnavailable(f"{python} cannot list its packages: {error}") from error
    return packages
