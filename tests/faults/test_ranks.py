"""What can happen to a rank: its case ends within its limit with the reason, and the next case runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.project import CASE_LIMIT_S, Ended, Project, evidence_of, marked

START_S = 60
"""Start of the program, of pytest and of the rank server on a busy machine."""
FAULTS = ("killed", "segfault", "early", "hang-python", "hang-c")


@pytest.fixture(scope="module")
def ended(project: Project) -> Ended:
    """One run with all of them, since each must leave the next one as if nothing had been."""
    return project.run("well", *FAULTS, "after", limit_s=len(FAULTS) * (CASE_LIMIT_S + 3) + START_S)


def test_the_run_goes_on_and_fails(ended: Ended) -> None:
    assert ended.verdicts == {"well": "ok", **dict.fromkeys(FAULTS, "error"), "after": "ok"}, ended.said
    assert ended.code == 1
    assert ended.folder is not None and sorted(evidence_of(ended.folder)) == sorted(["well", *FAULTS, "after"])


HUNG = f"rank 0, 1 still running after the time limit of {CASE_LIMIT_S} s; stacks beside the log"


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("killed", "rank 1 ended badly (exit code [-9]) and rank 0 waited on in vain"),
        ("segfault", "rank 1 ended badly (exit code [-11]) and rank 0 waited on in vain"),
        ("early", "rank 1 ended with exit code 0 before its work was done"),
        ("hang-python", HUNG),
        ("hang-c", HUNG),
    ],
)
def test_the_reason_is_what_happened_and_comes_in_time(ended: Ended, fault: str, says: str) -> None:
    assert ended.reason(fault) == says
    # The stacks take a second; the rest is the end of processes on a busy machine.
    assert (ended.cell(fault).duration_s or 0) < CASE_LIMIT_S + 3


@pytest.mark.parametrize("fault", ["killed", "segfault", "hang-python", "hang-c"])
def test_the_stack_of_each_rank_that_hung_or_crashed_is_kept(ended: Ended, fault: str) -> None:
    stacks = ended.stacks(fault)
    assert "in wait_for_the_other_rank" in stacks["rank0"]
    if fault == "killed":
        assert "rank1" not in stacks  # nobody can write it
    else:
        assert f"in {fault.replace('-', '_').replace('hang', 'hang_in')}" in stacks["rank1"]


def test_children_that_a_rank_leaves_do_not_outlive_its_case(project: Project, tmp_path: Path) -> None:
    go = tmp_path / "go"
    with project.started("children", "wait", env={"FAULT_GO": str(go)}) as started:
        started.wait_until(lambda: started.begun("wait"))
        sleepers = [pid for pid, line in marked(started.mark).items() if "import time; time.sleep(600)" in line]
        # What a rank put into a session of its own is known by the run's mark only, and goes at the end of the run.
        assert len(sleepers) == 1 and os.getsid(sleepers[0]) == sleepers[0]
        forks = [line for line in marked(started.mark).values() if "forkserver" in line]
        assert len(forks) == 2, forks  # the server and rank 1 of the case at work
        go.touch()
        ended = started.end(START_S)
    assert ended.verdicts == {"children": "ok", "wait": "ok"} and ended.code == 0


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("raise RuntimeError('no such operator')", "RuntimeError: no such operator"),
        (
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("import os; os.abort()", "rank 0 could not be started, the rank server ended"),
    ],
)
def test_a_preload_that_fails_is_each_case_s_reason(project: Project, code: str, says: str) -> None:
    ended = project.run("well", "after", limit_s=START_S, env={"FAULT_PRELOAD": code})
    assert ended.code == 1
    assert ended.verdicts == {"well": "error", "after": "error"}
    assert says in ended.reason("well") and says in ended.reason("after")
