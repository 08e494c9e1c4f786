"""The processes around a case's ranks: the norm that clipping variants refer to, and the evidence of the steps.

Both run in forks of the same warm server as the ranks, alone and without a collective library.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from tests.jobs import evidence, reference
from tests.jobs.launcher import RankContext
from tests.jobs.recorder import RankRecord
from tests.jobs.registry import workload_for
from tests.jobs.workload import DTYPES

STEPS_FILE = "steps.json"
NORM_FILE = "first_norm.json"


def measure_first_norm(context: RankContext) -> None:
    """Write the true norm of the first step from the seeded weights."""
    payload = context.payload
    workload = workload_for(payload)
    value = reference.first_norm(workload, int(payload["world_size"]), workload.micro_batches())
    (context.workdir / NORM_FILE).write_text(json.dumps(value))


def read_records(context: RankContext) -> list[RankRecord]:
    """The records of all ranks, in rank order."""
    records = []
    for rank in range(int(context.payload["world_size"])):
        # The file is our own rank's, written a moment ago; it holds our dataclasses beside tensors.
        record: RankRecord = torch.load(context.workdir / f"rank{rank}.pt", weights_only=False)
        records.append(record)
    return records


def write_steps(context: RankContext) -> None:
    """Write what the ranks and the reference say of every step, as JSON."""
    records = read_records(context)
    steps = list(reference.steps(workload_for(context.payload), records, context.payload.get("clip")))
    write_result(context, records, steps, workload_for(context.payload).steps())


def write_result(
    context: RankContext, records: list[RankRecord], steps: list[evidence.Step], steps_expected: int
) -> None:
    """The result of a case as JSON, with what ended it if something did."""
    exceptions = sorted(
        (record.facts["exception"] for record in records if "exception" in record.facts), key=lambda e: e["at"]
    )
    result: dict[str, Any] = {
        "steps_expected": steps_expected,
        "steps": [evidence.plain(step) for step in steps],
        "wrapper": records[0].wrapper,
        "device": records[0].device,
        "training_s": max(record.training_s for record in records),
        "shims": records[0].shims,
        "corrections": records[0].facts["corrections"],
        "exception": _first(exceptions),
        "mutant": next((record.facts["mutant"] for record in records if "mutant" in record.facts), None),
        "notes": notes(records, context.payload["case"]),
    }
    (context.workdir / STEPS_FILE).write_text(json.dumps(result))


def notes(records: list[RankRecord], case: Mapping[str, Any]) -> list[str]:
    """What the ranks note, each note once."""
    found = (note for record in records for note in (*record.facts.get("notes", []), *held(record, case)))
    return list(dict.fromkeys(found))


def held(record: RankRecord, case: Mapping[str, Any]) -> list[str]:
    """A note of the trainable parameters that the engine computes with in another dtype than the case's."""
    found = Counter(
        record.dtypes[name]
        for name in record.shapes
        if name in record.dtypes and record.dtypes[name] != DTYPES[case["dtype"]]
    )
    return [f"{count} of {len(record.shapes)} trainable tensors are held in {dtype}" for dtype, count in found.items()]


def _first(exceptions: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The earliest exception: the others are ranks that lost their peer."""
    return {key: value for key, value in exceptions[0].items() if key != "at"} if exceptions else None
