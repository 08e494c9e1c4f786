"""The same cases over all shipped stacks show every defect family of the ledger, and a wrong ledger is found out.

These are the numbers the project was founded on (ms-swift#6815, ms-swift#3262, DeepSpeed#8588), measured anew each
time. Ratios are compared to the rounding of bf16, which the norms are sums of.
"""

from __future__ import annotations

import pytest

from ci.entries import Defect
from ci.matrix import Matrix, Scalar
from ci.runrecord import FAILING, CellRecord, Check, RunRecord, Verdict
from tests.families.conftest import Families, within_reach

BF16_ROUNDING = 2.0**-9
SCALE = 65536.0
A_STACKS = ("report-a", "report-a-018")
CLEAN_STACKS = ("newest", "stable")


def check(cell: CellRecord, name: str, step: int = 0) -> Check:
    """One check of one step."""
    return next(found for found in cell.steps[step].checks if found.name == name)


def reported_over_true(cell: CellRecord, step: int = 0) -> float:
    found = cell.steps[step]
    reported, true = found.grad_norm_reported[0], found.grad_norm_true
    assert reported is not None and true
    return reported / true


def used_over_wanted(cell: CellRecord, step: int = 0) -> float:
    found = cell.steps[step]
    assert found.grad_norm_used is not None and found.grad_norm_wanted
    return found.grad_norm_used / found.grad_norm_wanted


def test_the_run_is_as_the_ledger_expects(families: Families, record: RunRecord) -> None:
    failing = {cell.id: (cell.verdict, cell.reason) for cell in record.cells if cell.verdict in FAILING}
    assert record.exit_code() == 0, failing
    assert families.code == 0
    assert not record.incomplete


def test_every_entry_of_the_ledger_is_shown_by_some_cell(record: RunRecord, matrix: Matrix) -> None:
    shown = {defect for cell in record.cells if cell.verdict is Verdict.KNOWN_DEFECT for defect in cell.defects}
    assert {entry.id for entry in within_reach(matrix)} - shown == set()


@pytest.mark.parametrize("stack", A_STACKS)
@pytest.mark.parametrize("case", ["zero0-bf16", "zero0-bf16-gas4", "trl-zero0-bf16-gas4"])
def test_report_a_zero0_reports_the_norm_times_65536(cells: dict[str, CellRecord], stack: str, case: str) -> None:
    cell = cells[f"{stack}/grpo-lora/{case}"]
    assert cell.verdict is Verdict.KNOWN_DEFECT
    assert "zero0-bf16-norm-times-scale" in cell.defects
    assert reported_over_true(cell) == pytest.approx(SCALE, rel=BF16_ROUNDING)
    assert check(cell, "gradient_used").ok


@pytest.mark.parametrize("stack", A_STACKS)
@pytest.mark.parametrize("case", ["zero2-bf16-gas4", "trl-zero2-bf16-gas4"])
def test_report_a_zero2_keeps_the_last_micro_batch(cells: dict[str, CellRecord], stack: str, case: str) -> None:
    cell = cells[f"{stack}/grpo-lora/{case}"]
    assert cell.verdict is Verdict.KNOWN_DEFECT
    assert cell.defects == ("zero2-last-micro-batch-only",)
    assert reported_over_true(cell) < 0.8


@pytest.mark.parametrize("stack", A_STACKS)
@pytest.mark.parametrize("case", ["zero3-bf16-gas4", "trl-zero3-bf16-gas4"])
def test_report_a_zero3_is_right(cells: dict[str, CellRecord], stack: str, case: str) -> None:
    assert cells[f"{stack}/grpo-lora/{case}"].verdict is Verdict.OK


@pytest.mark.parametrize("case", ["zero0-bf16-gas4", "trl-zero0-bf16-gas4"])
def test_frozen_update_looks_right_and_trains_nothing(cells: dict[str, CellRecord], case: str) -> None:
    cell = cells[f"frozen-update/grpo-lora/{case}"]
    assert cell.verdict is Verdict.KNOWN_DEFECT
    assert any(defect.startswith("zero0-bf16-frozen-update") for defect in cell.defects)
    assert check(cell, "reported_norm").ok
    found = cell.steps[0]
    assert found.grad_norm_used is not None and found.grad_norm_true
    assert found.grad_norm_used / found.grad_norm_true == pytest.approx(1 / SCALE, rel=BF16_ROUNDING)


@pytest.mark.parametrize("stack", CLEAN_STACKS)
def test_norms_and_gradients_hold_on_clean_stacks(record: RunRecord, stack: str) -> None:
    """Whatever else is wrong there (the dummy step, a norm that is None at fp32 ZeRO-0) is its own entry."""
    seen = 0
    for cell in record.cells:
        if cell.stack != stack or cell.job != "grpo-lora":
            continue
        seen += 1
        for step in cell.steps:
            for found in step.checks:
                if found.name == "gradient_used" or (found.name == "reported_norm" and cell.case["dtype"] == "bf16"):
                    assert found.ok, (cell.id, step.index, found)
    assert seen >= 12


def test_report_b_crashes_with_the_reports_own_text(cells: dict[str, CellRecord]) -> None:
    cell = cells["report-b/zero3-custom-adapter/report-sizes"]
    assert cell.verdict is Verdict.KNOWN_DEFECT
    assert cell.exception is not None
    assert cell.exception.message.startswith(
        "Function SumBackward0 returned an invalid gradient at index 0 - got [0] but expected shape compatible with "
        "[12480]"
    )
    assert cell.exception.user_frame is not None and "sum(" in cell.exception.user_frame
    assert cell.exception.remedy


@pytest.mark.parametrize("case", ["zero2-keepalive-after", "keepalive-after-frozen", "plain"])
def test_report_b_controls_are_right(cells: dict[str, CellRecord], case: str) -> None:
    assert cells[f"report-b/zero3-custom-adapter/{case}"].verdict is Verdict.OK


def test_all_stages_draw_the_same_completions_in_the_first_step(record: RunRecord) -> None:
    drawn: dict[tuple[str, Scalar, str], dict[str, str]] = {}
    for cell in record.cells:
        for note in cell.notes:
            rank, found, digest = note.partition(": completions of step 1: ")
            if found:
                key = (cell.stack, cell.case["gradient_accumulation_steps"], rank)
                drawn.setdefault(key, {})[cell.id] = digest
    stacks = {cell.stack for cell in record.cells}
    assert {stack for (stack, accumulation, _), by in drawn.items() if accumulation == 4 and len(by) >= 3} == stacks
    for key, by_cell in drawn.items():
        assert len(set(by_cell.values())) == 1, (key, by_cell)


def test_a_ledger_without_an_entry_fails(families: Families, record: RunRecord, matrix: Matrix) -> None:
    for entry in within_reach(matrix):
        without = families.judged(_with(matrix, entry, None), _showing(record, entry))
        turned = [cell.id for cell in without.cells if cell.verdict is Verdict.REGRESSION]
        assert turned, f"no cell misses {entry.id}"


def test_a_ledger_with_a_moved_bound_fails(families: Families, record: RunRecord, matrix: Matrix) -> None:
    """An entry said to affect other releases than it does: its cells are regressions."""
    for entry in within_reach(matrix):
        elsewhere = _with(matrix, entry, entry.model_copy(update={"affects": {"deepspeed": "<0.1"}}))
        moved = families.judged(elsewhere, _showing(record, entry))
        assert moved.exit_code() == 1, entry.id


def test_a_ledger_that_claims_a_release_too_many_fails(families: Families, matrix: Matrix) -> None:
    """The entries of report A said to affect every release: on newest they are `fixed upstream`."""
    for entry in matrix.defects:
        if entry.affects.get("deepspeed", "").find("<0.18.3") < 0 or "grpo" not in str(entry.where.get("job", "grpo")):
            continue
        everywhere = _with(matrix, entry, entry.model_copy(update={"affects": {"deepspeed": ">=0.14"}}))
        newest = {cell.id for cell in families.plan.cells if cell.stack == "newest"}
        wide = families.judged(everywhere, newest)
        fixed = [cell.id for cell in wide.cells if cell.verdict is Verdict.FIXED_UPSTREAM]
        assert fixed, entry.id


def test_a_ledger_with_another_factor_fails(families: Families, record: RunRecord, matrix: Matrix) -> None:
    seen = 0
    for entry in matrix.defects:
        for name, effect in entry.symptom.effects.items():
            if effect.times is None:
                continue
            seen += 1
            other = effect.model_copy(update={"times": 2.0 if effect.times != 2.0 else 3.0})
            symptom = entry.symptom.model_copy(update={name: other})
            otherwise = _with(matrix, entry, entry.model_copy(update={"symptom": symptom}))
            changed = families.judged(otherwise, _showing(record, entry))
            assert changed.exit_code() == 1, (entry.id, name)
    assert seen >= 5


def _showing(record: RunRecord, entry: Defect) -> set[str]:
    """The cells that show the entry: judging all of them anew for each entry takes minutes."""
    return {cell.id for cell in record.cells if entry.id in cell.defects}


def _with(matrix: Matrix, entry: Defect, replacement: Defect | None) -> Matrix:
    """The matrix with one ledger entry replaced, or left out."""
    defects = [found if found.id != entry.id else replacement for found in matrix.defects]
    return matrix.model_copy(update={"defects": tuple(found for found in defects if found is not None)})
