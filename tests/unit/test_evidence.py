"""The evidence contract: the jobs' dataclasses and the host's models are the same schema, and damage is survived."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

import ci.evidence as host
from ci.commands.schema import FOLDER
from ci.errors import UsageError
from tests.jobs import evidence as jobs
from tests.unit import synthetic

GOLDEN = Path(__file__).parent / "golden" / "evidence.jsonl"
PAIRS = [
    (getattr(jobs, name), getattr(host, name))
    for name in ("Shim", "ExceptionRecord", "TensorError", "Gram", "Alternative", "Step", "Probe", "Evidence")
]


def shape(kind: object) -> object:
    """A type with everything left out that the two sides may spell differently: Annotated, class against model."""
    if typing.get_origin(kind) is typing.Annotated:
        return shape(typing.get_args(kind)[0])
    if isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel)):
        return kind.__name__
    origin = typing.get_origin(kind)
    if origin is None:
        return kind
    parts = [shape(part) for part in typing.get_args(kind)]
    if origin in (typing.Union, types.UnionType):
        return frozenset(parts)
    return (origin, *parts)


@pytest.mark.parametrize(("written", "read"), PAIRS, ids=[written.__name__ for written, _ in PAIRS])
def test_every_field_has_the_same_name_type_and_default_on_both_sides(written: type, read: type[BaseModel]) -> None:
    hints, host_hints = typing.get_type_hints(written), typing.get_type_hints(read, include_extras=True)
    found = {(field.alias or name): name for name, field in read.model_fields.items()}
    assert sorted(found) == sorted(field.name for field in dataclasses.fields(written))
    for field in dataclasses.fields(written):
        name = found[field.name]
        assert shape(hints[field.name]) == shape(host_hints[name]), field.name
        model = read.model_fields[name]
        optional = field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
        assert model.is_required() != optional, field.name
        if field.default is not dataclasses.MISSING:
            assert model.default == field.default, field.name
    assert host.SCHEMA == jobs.SCHEMA


def golden() -> list[jobs.Evidence]:
    """What the golden file holds: a clean case, and one with everything that is rare."""
    clean = synthetic.recorded(synthetic.cell(zero_stage=0, dtype="bf16", gradient_accumulation_steps=4), "0.19.8")
    rare = dataclasses.replace(
        synthetic.recorded(synthetic.cell("zero3-custom-adapter", zero_stage=3, dtype="fp32"), "0.15.4"),
        wrapper="FP16_Optimizer",
        steps=(
            jobs.Step(
                index=0,
                overflow=True,
                loss=float("nan"),
                grad_norm_reported=(float("inf"), None),
                gradient_error=float("-inf"),
                not_judged={"reported_norm": "overflow"},
                consistency=("layer.weight: not the cast master",),
            ),
        ),
        shims=(jobs.Shim("empty groups", "torch 2.13 zips strictly"),),
        exception=jobs.ExceptionRecord(
            "RuntimeError", "got [0]", "model.py:3 in forward: x", "out.sum()*0", "backward", 1
        ),
        problem="killed after 60 s",
        log="logs/a.log",
        duration_s=1.5,
        training_s=0.5,
        peak_memory_mb=440.0,
        notes=("über",),
        probe=jobs.Probe("cuda", "nccl", 2, ("NVIDIA A800-SXM4-80GB",) * 2, {"driver": "535.146.02"}, 3.0),
    )
    return [clean, rare]


def golden_text() -> str:
    return "".join(jobs.to_json(record) + "\n" for record in golden())


def test_the_golden_file_is_what_the_jobs_write() -> None:
    """After a wanted change of the schema: `python -m tests.unit.test_evidence` and `python -m ci schema`."""
    assert GOLDEN.read_text(encoding="utf-8") == golden_text()


def test_the_golden_file_reads_back_value_by_value() -> None:
    reading = host.read(GOLDEN)
    assert not reading.skipped
    for record in golden():
        again = reading.by_cell[record.cell].model_dump_json(by_alias=True)
        assert json.loads(again) == json.loads(jobs.to_json(record))


def test_the_committed_schema_is_current() -> None:
    committed = json.loads((FOLDER / "evidence.schema.json").read_text(encoding="utf-8"))
    committed.pop("$schema")
    assert committed == host.schema()


NUMBERS = st.one_of(st.none(), st.floats())


@given(loss=NUMBERS, reported=st.lists(NUMBERS, max_size=3))
def test_any_number_survives_the_way(loss: float | None, reported: list[float | None]) -> None:
    record = dataclasses.replace(golden()[1], steps=(jobs.Step(0, loss=loss, grad_norm_reported=tuple(reported)),))
    step = synthetic.read(record).steps[0]
    assert repr(step.loss) == repr(loss)
    assert repr(list(step.grad_norm_reported)) == repr(reported)


def lines() -> list[str]:
    return [jobs.to_json(record) for record in golden()]


def test_a_half_last_line_is_left_out_and_named(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    first, second = lines()
    for end in range(1, len(second), 97):
        path.write_text(f"{first}\n{second[:end]}", encoding="utf-8")
        reading = host.read(path)
        assert list(reading.by_cell) == [golden()[0].cell]
        assert len(reading.skipped) == 1 and reading.skipped[0].startswith(f"{path}:2: ")


def test_a_line_cut_inside_a_letter_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    cut = lines()[1].encode()
    path.write_bytes(cut[: cut.index("ü".encode()) + 1])
    assert host.read(path).by_cell == {} and len(host.read(path).skipped) == 1


def test_a_whole_line_after_a_half_one_still_counts(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    first, second = lines()
    path.write_text(f"{first[:50]}\n{second}\n", encoding="utf-8")
    assert list(host.read(path).by_cell) == [golden()[1].cell]


def test_of_doubled_lines_the_last_whole_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "evidence.jsonl"
    record = golden()[0]
    later = dataclasses.replace(record, duration_s=9.0)
    path.write_text(f"{jobs.to_json(record)}\n{jobs.to_json(later)}\n{jobs.to_json(record)[:80]}", encoding="utf-8")
    assert host.read(path).by_cell[record.cell].duration_s == 9.0


def test_no_file_is_no_evidence(tmp_path: Path) -> None:
    assert host.read(tmp_path / "evidence.jsonl").by_cell == {}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 2}, ["schema 2", "expected 1", "another version"]),
        ({"colour": "red"}, ["colour", "Extra inputs"]),
        ({"world_size": "two"}, ["world_size"]),
        ({"duration_s": "fast"}, ["duration_s", "'fast'", "expected a number"]),
        ({"duration_s": True}, ["duration_s", "True"]),
    ],
)
def test_evidence_that_is_not_ours_is_refused_with_file_line_and_field(
    tmp_path: Path, change: dict[str, object], words: list[str]
) -> None:
    path = tmp_path / "evidence.jsonl"
    path.write_text("\n" + json.dumps({**json.loads(lines()[0]), **change}) + "\n", encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        host.read(path)
    for word in [f"{path}:2", *words]:
        assert word in caught.value.message


if __name__ == "__main__":
    GOLDEN.write_text(golden_text(), encoding="utf-8")
