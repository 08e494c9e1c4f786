"""run.json and plan.json: whole or not at all, and what was written is what is read."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from ci import runrecord
from ci.commands import judge as judge_command
from ci.commands.schema import FOLDER
from ci.errors import ExitCode, UsageError
from ci.evidence import Reading
from ci.judge import judge_run
from ci.runrecord import RunRecord, SavedPlan, Verdict
from tests.jobs import evidence as jobs
from tests.unit import synthetic
from tests.unit.synthetic import Faults
from tests.unit.test_judge import NORM

CELLS = (
    synthetic.cell(zero_stage=0, dtype="bf16", gradient_accumulation_steps=4),
    synthetic.cell(zero_stage=1, dtype="bf16", beta=0.04, experts=False, gated="needs deepspeed >=0.20"),
)
PLAN = SavedPlan(
    command="python -m ci run --stack made-up",
    commit="0123abc",
    backend="cpu",
    runtime="venv",
    hardware={"cores": 2, "memory_mb": 8000.0, "cpu": "made up"},
    started="2026-11-30T21:00:00Z",
    stacks={"made-up": {"deepspeed": "0.17.6"}},
    cells=CELLS,
)


def run(faults: Faults | None = None) -> RunRecord:
    evidence = synthetic.evidence(CELLS[0], "0.17.6", faults or Faults([NORM]))
    return judge_run(PLAN, Reading({CELLS[0].id: evidence}), synthetic.matrix([NORM]), 3.5)


def test_a_plan_reads_back_equal_gated_cells_and_kinds_of_values_included(tmp_path: Path) -> None:
    runrecord.write_plan(tmp_path, PLAN)
    again = runrecord.read_plan(tmp_path)
    assert again == PLAN
    assert [type(value) for value in again.cells[1].case.values()] == [int, str, float, bool]


def test_a_run_reads_back_equal(tmp_path: Path) -> None:
    runrecord.write_run(tmp_path, run())
    assert runrecord.read_run(tmp_path) == run()


def test_a_rewrite_puts_a_new_file_in_place_so_that_a_reader_never_sees_half_of_one(tmp_path: Path) -> None:
    runrecord.write_run(tmp_path, run())
    with (tmp_path / "run.json").open(encoding="utf-8") as old:
        runrecord.write_run(tmp_path, run(Faults()))
        assert RunRecord.model_validate_json(old.read()) == run()
    assert runrecord.read_run(tmp_path) == run(Faults())


def test_run_json_has_the_fields_of_the_contract(tmp_path: Path) -> None:
    runrecord.write_run(tmp_path, run())
    data = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert data["schema"] == 1
    assert set(data) >= {
        "command", "commit", "backend", "runtime", "image", "hardware", "started", "duration_s", "stacks", "cells",
    }  # fmt: skip
    assert set(data["cells"][0]) >= {
        "id", "stack", "job", "case", "verdict", "defects", "corrections", "shims", "reason", "exception", "log",
        "duration_s", "peak_memory_mb", "steps",
    }  # fmt: skip
    assert set(data["cells"][0]["steps"][0]["checks"][0]) >= {"name", "ok", "value", "expected", "tolerance"}
    assert data["cells"][1]["verdict"] == "not run" and data["cells"][1]["reason"] == "needs deepspeed >=0.20"
    for step in data["cells"][0]["steps"]:
        assert [check["name"] for check in step["checks"]] == list(jobs.CHECKS)


def test_nan_and_inf_are_strings_and_none_is_null(tmp_path: Path) -> None:
    record = run()
    steps = record.cells[0].steps
    odd = steps[0].model_copy(update={"loss": math.nan, "grad_norm_reported": (math.inf, -math.inf, None)})
    cell = record.cells[0].model_copy(update={"steps": (odd,)})
    runrecord.write_run(tmp_path, record.model_copy(update={"cells": (cell,)}))
    written = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["cells"][0]["steps"][0]
    assert written["loss"] == "nan" and written["grad_norm_reported"] == ["inf", "-inf", None]
    again = runrecord.read_run(tmp_path).cells[0].steps[0]
    assert again.loss is not None and math.isnan(again.loss)
    assert again.grad_norm_reported == (math.inf, -math.inf, None)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runrecord.write_run(tmp_path, run())
    before = (tmp_path / "run.json").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ci.runrecord.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        runrecord.write_run(tmp_path, run(Faults()))
    assert (tmp_path / "run.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["whole file", "Invalid JSON"]),
        ('{"schema": 1', ["whole file", "Invalid JSON"]),
        ('{"schema": 1, "command": "c", "backend": "cpu", "runtime": "venv", "started": 3}', ["started"]),
    ],
)
def test_a_file_that_is_not_ours_is_refused_with_file_and_field(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "run.json").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        runrecord.read_run(tmp_path)
    for word in [str(tmp_path / "run.json"), *words]:
        assert word in caught.value.message


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.json: not found"):
        runrecord.read_run(tmp_path)
    with pytest.raises(UsageError, match="no such run"):
        runrecord.find("nothing", tmp_path)


def test_runs_are_found_by_path_and_by_name(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "latest").symlink_to("one")
    assert runrecord.find("one", tmp_path) == tmp_path / "one"
    assert runrecord.find("latest", tmp_path).resolve() == tmp_path / "one"
    assert runrecord.find(str(tmp_path / "one"), Path("elsewhere")) == tmp_path / "one"


def test_the_committed_schema_is_current() -> None:
    committed = json.loads((FOLDER / "run.schema.json").read_text(encoding="utf-8"))
    committed.pop("$schema")
    assert committed == runrecord.schema()


def test_a_users_own_file_stands_in_the_record() -> None:
    cell = dataclasses.replace(CELLS[0], adapter="mine.py:Mine", ds_config="ds.json")
    plan = PLAN.model_copy(update={"cells": (cell, CELLS[1])})
    found = judge_run(plan, Reading({}), synthetic.matrix()).cells
    assert [(each.adapter, each.ds_config) for each in found] == [("mine.py:Mine", "ds.json"), (None, None)]


def test_only_verdicts_that_fail_fail_the_run() -> None:
    for verdict in Verdict:
        record = run()
        cell = record.cells[0].model_copy(update={"verdict": verdict})
        failing = verdict in (Verdict.ERROR, Verdict.REGRESSION, Verdict.FIXED_UPSTREAM)
        code = record.model_copy(update={"cells": (cell,)}).exit_code()
        assert code == (ExitCode.FAILED if failing else ExitCode.OK), verdict


def test_an_old_run_is_judged_again_with_the_matrix_of_today(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runrecord.write_plan(tmp_path, PLAN)
    runrecord.write_run(tmp_path, run())
    record = synthetic.recorded(CELLS[0], "0.17.6", Faults([NORM]))
    jobs.append(tmp_path / "evidence.jsonl", record)
    monkeypatch.setattr(judge_command, "load", lambda: synthetic.matrix([NORM]))
    assert judge_command.main(str(tmp_path)) == ExitCode.OK
    assert runrecord.read_run(tmp_path) == run()
    monkeypatch.setattr(judge_command, "load", lambda: synthetic.matrix())
    assert judge_command.main(str(tmp_path)) == ExitCode.FAILED
    again = runrecord.read_run(tmp_path)
    assert [cell.verdict for cell in again.cells] == [Verdict.REGRESSION, Verdict.NOT_RUN]
    assert '<failure type="regression"' in (tmp_path / "junit.xml").read_text(encoding="utf-8")
    assert again.duration_s == 3.5


def test_a_run_that_was_killed_before_run_json_is_judged_from_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runrecord.write_plan(tmp_path, PLAN)
    monkeypatch.setattr(judge_command, "load", lambda: synthetic.matrix())
    assert judge_command.main(str(tmp_path)) == ExitCode.FAILED
    assert [cell.verdict for cell in runrecord.read_run(tmp_path).cells] == [Verdict.ERROR, Verdict.NOT_RUN]
