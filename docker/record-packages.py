"""Print what is really installed beside the interpreter that runs this, as JSON; standard library only.

A lock says what should be there. This says what is: it is run by the interpreter of an image, of a virtual environment
or of a cluster's own installation, and its answer is what a run records and compares with the pins.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from importlib import metadata


def main() -> None:
    """Print {"python": ..., "packages": {normalised name: version}}."""
    packages: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a folder left by a broken uninstallation has none
            # The first one on sys.path is the one that is imported.
            packages.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    json.dump({"python": platform.python_version(), "packages": dict(sorted(packages.items()))}, sys.stdout)


if __name__ == "__main__":
    main()
