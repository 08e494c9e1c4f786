"""Runs to look at: evidence made up from defects, judged for real, in every verdict."""

from __future__ import annotations

import dataclasses

from ci.evidence import Reading
from ci.judge import judge_run
from ci.runrecord import CellRecord, RunRecord, SavedPlan, Verdict
from tests.unit import synthetic
from tests.unit.synthetic import Faults
from tests.unit.test_report import KNOWN
from tests.unit.test_report import run as every_verdict

LOG = "".join(f"line {number} of a log\n" for number in range(400)) + "the last words\n"
STACK = 'Thread 0x1 (most recent call first):\n  File "engine.py", line 7 in allreduce\n'


def two_nights() -> tuple[RunRecord, RunRecord]:
    """The second night one cell is wrong that was right, and there is a corrected one."""
    now = every_verdict()
    now = now.model_copy(
        update={"cells": (*now.cells, _corrected(now.cells[0])), "unavailable": {"npu": "no image yet"}}
    )
    fine = next(cell for cell in now.cells if cell.verdict is Verdict.REGRESSION)
    before = [
        cell.model_copy(update={"verdict": Verdict.OK, "reason": None, "duration_s": 1.25, "peak_memory_mb": 419.0})
        if cell is fine
        else cell
        for cell in now.cells
        if cell.verdict is not Verdict.CORRECTED
    ]
    earlier = now.model_copy(
        update={
            "started": "2026-11-29T21:00:00Z",
            "cells": tuple(before),
            "stacks": {"made-up": {**now.stacks["made-up"], "deepspeed": "0.17.5"}},
        }
    )
    return earlier, now


def _corrected(cell: CellRecord) -> CellRecord:
    return cell.model_copy(
        update={
            "id": f"{cell.id}+corrected",
            "verdict": Verdict.CORRECTED,
            "defects": (),
            "corrections": ("loss_scale",),
            "steps": cell.steps,
        }
    )


def named(names: list[str]) -> RunRecord:
    """A known defect under each of these names."""
    plain = synthetic.cell(zero_stage=0, dtype="bf16", gradient_accumulation_steps=4)
    cells = [dataclasses.replace(plain, id=f"cpu/made-up/grpo-lora/{name}") for name in names]
    evidence = synthetic.recorded(plain, "0.17.6", Faults([KNOWN]))
    reading = Reading(
        {cell.id: synthetic.read(dataclasses.replace(evidence, cell=cell.id, log="logs/a.log")) for cell in cells}
    )
    plan = SavedPlan(command="c", backend="cpu", runtime="venv", started="2026-12-01T00:00:00Z", cells=tuple(cells))
    return judge_run(plan, reading, synthetic.matrix([KNOWN]))
