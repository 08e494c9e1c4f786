"""What the rank server imports first: `preload`, and a note of why that failed, if it did.

multiprocessing's server swallows an ImportError and dies of anything else (an operator that is not registered, a
version check). Either way each case must say what was wrong with the stack, so a failure is kept here and every rank
ends with it.
"""

from __future__ import annotations

import traceback

FAILURE: str | None = None
"""Why the stack could not be imported, in one line; None where it was."""

try:
    import tests.jobs.preload  # noqa: F401  # reason: imported for the forks
except (Exception, SystemExit) as error:  # noqa: BLE001  # reason: whatever it is, the ranks say it
    FAILURE = f"{type(error).__name__}: {error}"
    traceback.print_exc()
