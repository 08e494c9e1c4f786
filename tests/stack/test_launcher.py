"""The launcher on real processes: warm forks, and every way in which a rank can end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.jobs import launcher as module
from tests.jobs.launcher import Launcher, Outcome, RankContext
from tests.stack import rank_bodies

Run = Callable[..., Outcome]
"""Runs a body in two ranks: (body, timeout_s=60, **environment)."""


@pytest.fixture
def run(launcher: Launcher, tmp_path: Path) -> Run:
    """Runs a body in two ranks."""

    def go(body: Callable[[RankContext], None], timeout_s: float = 60.0, **environment: str) -> Outcome:
        workdir = tmp_path / "work"
        workdir.mkdir()
        return launcher.run(
            body, world_size=2, workdir=workdir, log=tmp_path / "log", timeout_s=timeout_s, environment=environment
        )

    return go


def test_ranks_reduce(run: Run, tmp_path: Path) -> None:
    outcome = run(rank_bodies.reduce_sum, 120)
    assert outcome.problem is None
    assert [(tmp_path / "work" / f"sum{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]
    assert outcome.peak_memory_mb is not None and outcome.peak_memory_mb < 600


def test_each_rank_is_told_its_own_environment_and_leads_its_group(run: Run, tmp_path: Path) -> None:
    assert run(rank_bodies.environment, FROM_THE_CALL="yes").problem is None
    assert [(tmp_path / "work" / f"told{rank}").read_text() for rank in range(2)] == ["0 2 yes True", "1 2 yes True"]
    assert "FROM_THE_CALL" not in os.environ


def test_an_exception_in_one_rank_is_the_problem(run: Run, tmp_path: Path) -> None:
    outcome = run(rank_bodies.raise_on_one)
    assert outcome.problem is not None and "rank 1 raised ValueError" in outcome.problem
    assert "rank one says no" in (tmp_path / "log").read_text()


def test_a_hang_ends_at_its_limit_with_the_stack_and_without_children(run: Run, tmp_path: Path) -> None:
    child_file = tmp_path / "child"
    began = time.monotonic()
    outcome = run(rank_bodies.sleep_in_python, 4, CHILD_FILE=str(child_file))
    assert time.monotonic() - began < 20
    assert outcome.problem is not None and "rank 1 still running after the time limit of 4 s" in outcome.problem
    assert "_hung_here" in (outcome.ranks[1].stack or "")
    assert not _alive(int(child_file.read_text()))


def test_a_rank_that_waits_in_a_collective_shows_where(run: Run) -> None:
    began = time.monotonic()
    outcome = run(rank_bodies.hang_in_a_collective, 12)
    assert time.monotonic() - began < 30
    assert outcome.problem is not None and "rank 0, 1 still running after the time limit of 12 s" in outcome.problem
    assert "in all_reduce" in (outcome.ranks[0].stack or "")
    assert "in _hung_here" in (outcome.ranks[1].stack or "")
    assert outcome.ranks[0].exit_code == outcome.ranks[1].exit_code == -9


def _alive(pid: int) -> bool:
    for _ in range(50):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except FileNotFoundError:
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


def test_a_killed_rank_ends_the_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE_AFTER_FIRST_DEATH_S", 1.0)
    began = time.monotonic()
    outcome = run(rank_bodies.die)
    assert time.monotonic() - began < 20
    assert outcome.problem is not None and "rank 0 ended badly" in outcome.problem and "-9" in outcome.problem


def test_an_exit_code_of_0_before_the_work_is_done_is_a_problem(run: Run) -> None:
    outcome = run(rank_bodies.leave_early)
    assert outcome.problem is not None and "before its work was done" in outcome.problem
