"""The arithmetic of the benchmark: ratios, what is promised, the page. Times themselves are for people to compare."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ci.bench import figure, install, lane, memory, ranks, scale
from ci.bench.figure import Figure, Part
from ci.evidence import Evidence
from ci.matrix import Matrix, load
from ci.plan import Selection, make_plan
from ci.provision import locks
from tests.unit import synthetic

STACK = "newest"


@pytest.fixture(scope="module")
def shipped() -> Matrix:
    return load()


def case(name: str, duration_s: float, training_s: float, memory_mb: float = 400.0) -> Evidence:
    measured = {"duration_s": duration_s, "training_s": training_s, "peak_memory_mb": memory_mb}
    return synthetic.evidence(replace(synthetic.cell(zero_stage=1, dtype="bf16"), id=name)).model_copy(update=measured)


def by_name(figures: Sequence[Figure], start: str) -> Figure:
    (found,) = [each for each in figures if each.name.startswith(start)]
    return found


@pytest.mark.parametrize(
    ("value", "limit", "side", "met"),
    [
        (1.3, 1.3, "at most", True),
        (1.31, 1.3, "at most", False),
        (8.0, 8.0, "at least", True),
        (7.9, 8.0, "at least", False),
        (5.0, None, "at most", None),
    ],
)
def test_a_promise_is_kept_up_to_its_limit(value: float, limit: float | None, side: str, met: bool | None) -> None:
    assert Figure("x", value, "x", limit, side).met is met  # type: ignore[arg-type]  # reason: one of the two sides


def test_overhead_is_what_is_not_training_and_a_lane_is_compared_with_its_cases_per_worker() -> None:
    evidence = [case("a", 1.0, 0.4), case("b", 2.0, 1.9, 500.0), case("c", 3.0, 0.0)]
    found = lane.figures(evidence, wall_s=4.5, workers=2, memory_mb=1234.0)
    assert by_name(found, "overhead of a case beyond").value == pytest.approx(0.6)
    assert by_name(found, "overhead of a case, largest").note == "c"
    assert by_name(found, "the same over").value == pytest.approx(4.5 / (6.0 / 2))
    assert by_name(found, "peak memory of a rank").value == 500.0
    assert by_name(found, "peak memory of the whole").value == 1234.0


def test_a_start_in_docker_may_take_longer_than_in_an_environment() -> None:
    assert lane.start("venv", 12.0, 8.0).met is False
    assert lane.start("docker", 12.0, 8.0).met is True


def test_cells_a_minute_are_compared_stage_by_stage_by_the_median_of_repeats() -> None:
    cells = [synthetic.cell("engine-sweep", zero_stage=stage, dtype="bf16") for stage in (0, 1, 2, 3)]
    ours = [{"cell": cell.id, "ranks_s": s, "whole_s": 2 * s} for cell in cells for s in (0.5, 0.5, 60.0)]
    theirs = [{"cell": cell.id, "ranks_s": 4.5 if cell.case["zero_stage"] != 3 else 1.0} for cell in cells]
    low, high = ranks._compared(cells, ours, theirs, "a process for each rank")
    assert low.value == pytest.approx(9.0) and low.met is True
    assert high.value == pytest.approx(2.0) and high.met is False
    assert "120 cases a minute instead of 13.3; with reference and evidence 60" in low.note


def test_parts_are_means_over_cases_and_one_that_a_case_lacks_counts_as_nothing() -> None:
    found = ranks._parts([{"parts": {"ranks: a": 1.0, "ranks: b": 3.0}}, {"parts": {"ranks: a": 3.0}}])
    assert found == [Part("ranks: a", 2.0), Part("ranks: b", 1.5)]


def test_only_measurements_are_read_from_what_a_stack_prints() -> None:
    assert ranks._lines('[INFO] hello\n{"cell": "a", "ranks_s": 1.0}\nbye\n') == [{"cell": "a", "ranks_s": 1.0}]


def test_every_cell_of_the_sizes_is_planned_judged_and_reported(
    shipped: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "SIZES", (30, 60, 120))
    plan = make_plan(shipped, Selection(stacks=(STACK,)))
    evidence = {cell.id: synthetic.evidence(cell) for cell in plan.cells}
    found = scale.figures(shipped, STACK, evidence)
    assert [each.name.partition(",")[0] for each in found] == ["plan", "judge", "report"]
    assert all(each.value > 0 and "120 cells" in each.note for each in found)


def test_a_lock_is_installed_in_the_three_steps_of_every_stack(shipped: Matrix) -> None:
    stack = shipped.stacks[STACK]
    lock = Path(stack.lock).read_text(encoding="utf-8")
    torch, hashed, last = install.split(lock)
    assert torch == f"torch=={stack.pins['torch']}"
    assert last.startswith(f"deepspeed=={stack.pins['deepspeed']} ") and "--hash=" in last
    assert locks.pins(hashed).keys() == locks.pins(lock).keys() - {"torch", "deepspeed"}


def test_memory_counts_a_process_and_its_children() -> None:
    block = "import sys; x = bytearray(b'1' * (64 << 20)); print(1, flush=True); sys.stdin.read()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {block!r}], check=True)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        parent.stdout.readline()
        with memory.Watch(parent.pid, every_s=0.01) as seen:
            deadline = time.monotonic() + 30
            while seen.peak_mb < 64 and time.monotonic() < deadline:
                time.sleep(0.01)
        assert 64 < seen.peak_mb < 200
        assert memory.proportional_mb(os.getpid()) > seen.peak_mb
    finally:
        parent.communicate(timeout=30)


def test_the_page_has_every_figure_and_keeps_the_notes() -> None:
    figures = [Figure("a", 1.25, "x", 1.3), Figure("b", 2.0, "s", 1.0, note="why"), Figure("c", 7.0, "MB")]
    page = figure.page(figures, [Part("ranks: model", 0.3), Part("ranks: steps", 0.1)], "Measured", "Because.\n")
    assert "| a | 1.25 x | at most 1.3 x | met |" in page
    assert "| b (why) | 2 s | at most 1 s | **not met** |" in page
    assert "| c | 7 MB |  |  |" in page
    assert "| ranks: model | 0.300 s | 75% |" in page
    assert figure.notes_of(page) == "Because.\n"
    assert figure.notes_of("# Benchmarks\n") == ""
