"""What the rank server imports in a project of the test's own: nothing, or what the test makes it do.

Copied over tests/jobs/preload.py there.
"""

from __future__ import annotations

import os

exec(os.environ.get("FAULT_PRELOAD", ""))
READY = True
THREADS = 1
FAILED: dict[str, str] = {}
