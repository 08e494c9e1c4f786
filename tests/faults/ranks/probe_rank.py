"""What the ranks of a fault project find before the first case: nothing is looked at.

Copied over tests/jobs/probe_rank.py of a project of the test's own; standard library only, as every interpreter has it.
"""

from __future__ import annotations

import json

from tests.jobs.launcher import RankContext


def look(context: RankContext) -> None:
    """Write what a rank on a CPU would."""
    backend = context.payload["backend"]
    found = {name: backend[name] for name in ("accelerator", "communication")}
    found |= {"device": "none", "versions": {}, "all_reduce": 0.0}
    (context.workdir / f"rank{context.rank}.probe.json").write_text(json.dumps(found))
