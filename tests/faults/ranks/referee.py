"""The evidence of a fault case whose ranks ended well: three steps with one judged check.

Copied over tests/jobs/referee.py of a project of the test's own.
"""

from __future__ import annotations

import json

from tests.jobs import evidence
from tests.jobs.launcher import RankContext


def write_steps(context: RankContext) -> None:
    """What tests/jobs/cells.py reads when the ranks have ended."""
    ranks = int(context.payload["world_size"])
    missing = [rank for rank in range(ranks) if not (context.workdir / f"trained{rank}").exists()]
    if missing:
        raise RuntimeError(f"rank {missing} did not train")
    not_judged = {check: "not what this case is about" for check in evidence.CHECKS if check != "reported_norm"}
    steps = [
        evidence.Step(index, grad_norm_reported=(1.0,) * ranks, grad_norm_true=1.0, not_judged=not_judged)
        for index in range(3)
    ]
    result = {
        "steps": [evidence.plain(step) for step in steps],
        "steps_expected": len(steps),
        "wrapper": "none",
        "device": "cpu",
        "exception": None,
        "shims": [],
        "corrections": [],
        "training_s": 0.1,
        "notes": [],
        "mutant": None,
    }
    (context.workdir / "steps.json").write_text(json.dumps(result))
