"""The terminal report: everything a reader needs of a cell that is not ok, in 80 columns."""

from __future__ import annotations

import dataclasses
import io
import shlex
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from ci import runrecord
from ci.commands import report as report_command
from ci.errors import ExitCode, UsageError
from ci.evidence import Reading
from ci.judge import judge_run
from ci.report import MANY, folded, link, print_run
from ci.runrecord import FAILING, RunRecord, SavedPlan
from ci.shown import of
from tests.jobs import evidence as jobs
from tests.unit import synthetic
from tests.unit.synthetic import Faults
from tests.unit.test_judge import CRASH, defect

KNOWN = defect(
    "zero0-norm",
    title="bf16 at ZeRO-0 reports the gradient norm times the loss scale",
    upstream=("deepspeedai/DeepSpeed#7837", "https://example.org/thread"),
    where={"zero_stage": 0},
    advice="use 0.18.6 or newer",
)
GONE = defect("gone", where={"zero_stage": 2}, title="something that was mended")
BREAKS = CRASH.model_copy(update={"where": {"zero_stage": 3}})


def run() -> RunRecord:
    """One cell of every verdict but `corrected`."""
    known, regression, fixed, crash, error, fine = (
        synthetic.cell(zero_stage=stage, dtype="bf16", gradient_accumulation_steps=accumulation)
        for stage, accumulation in ((0, 4), (1, 4), (2, 4), (3, 4), (1, 1), (1, 1))
    )
    fine = dataclasses.replace(fine, id=f"{fine.id}-fine")
    gated = synthetic.cell(zero_stage=3, dtype="fp32", gated="needs transformers >=4.51, has 4.46.2")
    records = {
        known.id: synthetic.recorded(known, "0.17.6", Faults([KNOWN])),
        regression.id: synthetic.recorded(regression, "0.17.6", Faults(moved={"gradient_used": 0.5})),
        fixed.id: synthetic.recorded(fixed, "0.17.6"),
        crash.id: synthetic.recorded(crash, "0.17.6", Faults(raises="expected [96], got [0]")),
        error.id: dataclasses.replace(synthetic.recorded(error, "0.17.6"), problem="killed after 60 s"),
        fine.id: synthetic.recorded(fine, "0.17.6"),
    }
    crashed = records[crash.id]
    assert crashed.exception is not None
    records[crash.id] = dataclasses.replace(
        crashed,
        exception=dataclasses.replace(
            crashed.exception, user_frame="adapter.py:12 in forward: x = p.sum()", remedy="out.sum() * 0"
        ),
        shims=(jobs.Shim("empty groups", "torch 2.13 zips strictly"),),
        log="logs/crash.log",
        duration_s=1.25,
        peak_memory_mb=440.0,
    )
    plan = SavedPlan(
        command="python -m ci run --stack made-up",
        backend="cpu",
        runtime="venv",
        started="2026-11-30T21:00:00Z",
        stacks={"made-up": {"deepspeed": "0.17.6"}},
        cells=(known, regression, fixed, crash, error, fine, gated),
    )
    reading = Reading({id_: synthetic.read(record) for id_, record in records.items()}, ("evidence.jsonl:9: cut",))
    return judge_run(plan, reading, synthetic.matrix([BREAKS, GONE, KNOWN]), 61.0)


def shown(width: int = 80, record: RunRecord | None = None) -> str:
    stream = io.StringIO()
    print_run(of(record or run(), Path()), Console(file=stream, width=width, highlight=False))
    return stream.getvalue()


def block(words: str) -> str:
    """The block of a cell that holds these words, without line breaks."""
    blocks = shown().split("\n\n")
    return " ".join(next(part for part in blocks if "repeat: " in part and words in part).split())


def test_a_known_defect_has_numbers_title_links_advice_and_command() -> None:
    text = block("zero0-norm:")
    for words in (
        "zero0-norm: bf16 at ZeRO-0 reports the gradient norm times the loss scale",
        "https://github.com/deepspeedai/DeepSpeed/issues/7837",
        "https://example.org/thread",
        "advice: use 0.18.6 or newer",
        "repeat: nox -s cpu-zero",
        "reported_norm",
        "65536",
    ):
        assert words in text, words


def test_a_regression_names_the_check_both_values_the_tolerance_and_the_worst_tensors() -> None:
    text = block("worst tensors")
    for words in ("regression", "step 1 gradient_used: found", "expected", "0.001", "first.weight 0.5"):
        assert words in text, words


def test_a_crash_names_the_users_line_and_what_to_write_instead() -> None:
    text = block("adapter.py:12")
    for words in (
        "RuntimeError: expected [96], got [0]",
        "at adapter.py:12 in forward: x = p.sum()",
        "write instead: out.sum() * 0",
        "shim empty groups: torch 2.13 zips strictly",
        "log: logs/crash.log",
    ):
        assert words in text, words


def test_what_did_not_run_and_what_could_not_be_read_is_said() -> None:
    text = " ".join(shown().split())
    assert "not run: 1 of made-up/grpo-lora: needs transformers >=4.51, has 4.46.2" in text
    assert "unreadable evidence: evidence.jsonl:9: cut" in text
    assert "move its bound" in text and "killed after 60 s" in text
    assert "1 error, 1 regression, 1 fixed upstream, 2 known defect, 1 ok, 1 not run in 61 s" in text


def test_markup_in_messages_is_shown_not_interpreted() -> None:
    assert "[96]" in shown() and "[0]" in shown()


def test_nothing_but_an_address_or_a_single_word_is_wider_than_80_columns() -> None:
    for width in (80, 200):
        for line in shown(width).splitlines():
            assert len(line) <= 80 or len(line.strip(" \\").split(" ")) <= 2, line


def test_of_very_many_cells_one_block_speaks_for_all_that_are_alike() -> None:
    record = run()
    times = MANY // 6 + 1
    copies = [cell.model_copy(update={"id": f"{cell.id}-{n}"}) for n in range(times) for cell in record.cells]
    text = shown(record=record.model_copy(update={"cells": tuple(copies)}))
    alone = shown()
    assert text.count("repeat: ") == alone.count("repeat: ") == 5
    row = next(line for line in text.splitlines() if line.startswith("cpu/made-up/grpo-lora "))
    assert f"{times} error" in row and f"and {times - 1} of cpu/made-up/grpo-lora" in text
    for cell in copies[len(record.cells) :]:  # whoever must act needs every name
        assert (f"    {cell.id}\n" in text) is (cell.verdict in FAILING), cell.id
    assert f"\n\n{times} error, {times} regression, {times} fixed upstream" in text


def test_a_folded_command_is_the_same_command_to_a_shell() -> None:
    command = "nox -s cpu-zero -- --stack report-a --with 'deepspeed=my checkout' --job grpo-lora --case dtype=bf16"
    script = f"printf '%s\\n' {folded(command, 40)}"
    words = subprocess.run(["sh", "-c", script], check=True, capture_output=True, text=True).stdout.splitlines()
    assert words == shlex.split(command)
    assert max(len(line) for line in folded(command, 40).splitlines()) <= 40
    assert folded(command, 400) == command


def test_links() -> None:
    assert link("modelscope/ms-swift#6815") == "https://github.com/modelscope/ms-swift/issues/6815"
    assert link("https://example.org/a#b") == "https://example.org/a#b"


def test_the_command_shows_saved_runs_and_refuses_formats_it_does_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runrecord.write_run(tmp_path, run())
    assert report_command.main([str(tmp_path)]) == ExitCode.FAILED
    assert "zero0-norm" in capsys.readouterr().out
    with pytest.raises(UsageError, match=r"unknown format; did you mean terminal\?"):
        report_command.main([str(tmp_path)], "terminl")
    with pytest.raises(UsageError, match="add --format html"):
        report_command.main([str(tmp_path)], out=tmp_path)


def test_a_cell_that_a_correction_made_right_takes_a_line_and_a_known_defect_names_its_correction() -> None:
    entry = KNOWN.model_copy(update={"correction": "norm_by_scale"})
    plain = synthetic.cell(zero_stage=0, dtype="bf16", gradient_accumulation_steps=4)
    corrected = dataclasses.replace(plain, id=f"{plain.id}+corrected", corrections=("norm_by_scale",))
    records = {
        plain.id: synthetic.recorded(plain, "0.17.6", Faults([entry])),
        corrected.id: dataclasses.replace(synthetic.recorded(corrected, "0.17.6"), corrections=("norm_by_scale",)),
    }
    plan = SavedPlan(command="c", backend="cpu", runtime="venv", started="now", cells=(plain, corrected))
    reading = Reading({id_: synthetic.read(record) for id_, record in records.items()})
    text = shown(record=judge_run(plan, reading, synthetic.matrix([entry])))
    assert f"corrected  {corrected.id}  by norm_by_scale\n" in text
    assert "makes it right: norm_by_scale (--corrections both shows it)" in " ".join(text.split())
    assert text.count("repeat:") == 1
