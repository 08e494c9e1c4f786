"""Evidence as no case would write it: read and judged to the end, or refused with its line, never a traceback."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ci import evidence
from ci.errors import UsageError
from ci.evidence import Reading
from ci.judge import judge_run
from ci.matrix import Defect, Effect, Symptom
from ci.runrecord import RunRecord, SavedPlan
from tests.jobs import evidence as jobs
from tests.unit import synthetic
from tests.unit.fuzz import EXAMPLES, changed, places
from tests.unit.synthetic import Faults

CELL = synthetic.cell(zero_stage=0, dtype="bf16", gradient_accumulation_steps=4)
OTHER = synthetic.cell("zero3-custom-adapter", zero_stage=3, dtype="fp32")
ABOUT: dict[str, Any] = {"title": "x", "upstream": (), "advice": "x", "where": {}, "affects": {"deepspeed": ">=0.1"}}
SCALES = Effect(times="scale_before/scale_after")
LEDGER = (
    Defect(id="norm", symptom=Symptom(reported_norm=Effect(times="loss_scale")), **ABOUT),
    Defect(id="raise", symptom=Symptom(gradient_used=SCALES, steps="scale_raise"), **ABOUT),
    Defect(id="stale", symptom=Symptom(update=Effect(equals="previous_step"), steps="from:2"), **ABOUT),
)
LINES = [
    jobs.to_json(synthetic.recorded(CELL, "0.17.6", Faults(defects=LEDGER, clip=0.5, dynamic=True))),
    jobs.to_json(synthetic.recorded(OTHER, "0.17.6")),
]
DATA = json.loads(LINES[0])
KEYS = tuple(sorted({str(place[-1]) for place in places(DATA)} | {"exception", "message", "where", "problem", "x"}))
PLAN = SavedPlan(
    command="x",
    backend="cpu",
    runtime="venv",
    started="x",
    stacks={"made-up": {"deepspeed": "0.17.6"}},
    cells=(CELL, OTHER),
)


def judge(content: bytes) -> RunRecord | None:
    """Judged as `judge` does; None where the file is refused, as by a run's end it must not be."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "evidence.jsonl")
        path.write_bytes(content)
        tolerant = record(evidence.read(path, refuse_foreign=False))
        try:
            strict = record(evidence.read(path))
        except UsageError as error:
            assert f"{path}:" in error.message, error.message
            assert tolerant.incomplete
            return None
    assert strict.model_dump_json() == tolerant.model_dump_json()  # not ==: nan is unlike itself
    return strict


def record(reading: Reading) -> RunRecord:
    judged = judge_run(PLAN, reading, synthetic.matrix(LEDGER))
    assert [cell.id for cell in judged.cells] == [CELL.id, OTHER.id]
    # What was judged can be written and read again, number by number.
    text = judged.model_dump_json(by_alias=True)
    assert RunRecord.model_validate_json(text).model_dump_json(by_alias=True) == text
    return judged


def test_the_original_is_judged() -> None:
    judged = judge("\n".join(LINES).encode())
    assert judged is not None and [cell.verdict for cell in judged.cells] == ["known defect", "fixed upstream"]


@settings(max_examples=EXAMPLES)
@given(changed(DATA, KEYS))
def test_values_that_no_case_records(data: Any) -> None:
    judge(json.dumps(data).encode())


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Both lines in any order and number, with pieces gone, doubled, or of something else."""
    content = b"".join(line.encode() + b"\n" for line in draw(st.lists(st.sampled_from(LINES), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.integers(start, len(content)))
        put = draw(st.sampled_from((b"", b"\n", content[start:end] * 2, b"\xff", b"{}", b"[]\n", b"null\n", b"\x00")))
        content = content[:start] + put + content[end:]
    return content


@settings(max_examples=EXAMPLES)
@given(damaged())
@example(b"[" * 100_000)
@example(b'{"schema": 1}\n')
@example(b"1" * 5000)
def test_lines_that_were_damaged(content: bytes) -> None:
    judge(content)
