"""Plan -> jobs of a workflow, and `--shard` by recorded durations."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from ci import durations, workflow
from ci.commands.durations import measured
from ci.durations import Durations, parts
from ci.errors import MatrixError, UsageError
from ci.matrix import Matrix, Runner, load
from ci.plan import Selection, make_plan
from ci.runrecord import CellRecord, RunRecord, StepRecord, Verdict
from tests.unit import small_matrix

RUNNER = Runner(labels=("here",), max_parallel=3, shard_minutes=1, timeout_minutes=5)
RUNNERS = "runners:\n  cpu: {labels: [here], max_parallel: 3, shard_minutes: 1, timeout_minutes: 5}\nstacks:"


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    return load(small_matrix.write(tmp_path, "stacks:", RUNNERS))


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=60), st.integers(1, 12))
def test_parts_differ_by_less_than_the_longest(seconds: list[float], count: int) -> None:
    found = parts(seconds, count)
    assert sorted(position for part in found for position in part) == list(range(len(seconds)))
    assert all(list(part) == sorted(part) for part in found)
    sums = [sum(seconds[position] for position in part) for part in found]
    assert max(sums) - min(sums) <= max(seconds) + 1e-9
    assert len(seconds) < count or all(found)


def test_a_shard_is_a_part_of_the_time_not_of_the_number(matrix: Matrix) -> None:
    asked = Selection(lane="nightly", stacks=("new",), jobs=("adapter",))
    slow = Durations(seconds={"adapter": {"keepalive": 9.0, "plain": 1.0}})
    whole = make_plan(matrix, replace(asked, jobs=()), slow).cells
    first, second = (make_plan(matrix, replace(asked, jobs=(), shard=f"{i}/2"), slow).cells for i in (1, 2))
    assert {cell.id for cell in first} | {cell.id for cell in second} == {cell.id for cell in whole}
    times = [sum(slow.of(cell.id) for cell in part) for part in (first, second)]
    assert len(first) != len(second) and abs(times[0] - times[1]) <= 2.0


def test_what_was_not_measured_counts_as_the_middle_of_its_job() -> None:
    known = Durations(seconds={"lora": {"a": 1.0, "b": 3.0, "c": 50.0}})
    assert known.of("cpu/new/lora/b") == known.of("cuda/other/lora/b+loss_scale") == 3.0
    assert known.of("cpu/new/lora/unheard") == 3.0
    assert known.of("cpu/new/other/a") == durations.UNKNOWN_S


def cell(stack: str, name: str, seconds: float | None, *, trained: bool = True) -> CellRecord:
    return CellRecord(
        id=f"cpu/{stack}/lora/{name}",
        stack=stack,
        job="lora",
        case={},
        verdict=Verdict.OK,
        world_size=2,
        command="x",
        duration_s=seconds,
        steps=(StepRecord(index=0),) if trained else (),
    )


def test_durations_are_the_middle_one_of_what_trained() -> None:
    cells = (cell("a", "x", 2.0), cell("b", "x", 4.0), cell("c", "x+fix", 9.0), cell("a", "y", 0.1, trained=False))
    run = RunRecord(command="x", backend="cpu", runtime="venv", started="2026-12-01T00:00:00+00:00", cells=cells)
    assert measured([run]).seconds == {"lora": {"x": 4.0}}


def test_the_committed_durations_know_the_pull_request_lane() -> None:
    known = durations.load()
    plan = make_plan(load(Path("matrix.yaml")), Selection())
    missing = [each.id for each in plan.runnable if each.id.split("/", 3)[3] not in known.seconds[each.job]]
    assert len(missing) <= len(plan.cells) // 10, missing
    assert durations.FILE.read_text() == durations.text(known)
    assert 0.1 < statistics.median(known.seconds["grpo-lora"].values()) < 60


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "Invalid JSON"), ('{"seconds": {"lora": {"x": "long"}}}', "seconds.lora.x: Input should be a valid number")],
)
def test_a_broken_file_of_durations_is_answered_with_its_place(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "durations.json"
    with pytest.raises(UsageError, match=r"python -m ci durations RUN"):
        durations.load(path)
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        durations.load(path)
    assert says in caught.value.message and str(path) in caught.value.message


def test_a_stack_with_more_than_a_shard_of_work_is_several_jobs(matrix: Matrix) -> None:
    plan = make_plan(matrix, Selection(lane="nightly", stacks=("new", "old")))
    known = Durations(seconds={"lora": {"zero0-bf16": 5.0}, "adapter": {"plain": 5.0}})
    jobs = workflow.include(plan, RUNNER, known)
    assert json.loads(json.dumps(jobs)) == jobs
    for stack in ("new", "old"):
        mine = [job for job in jobs if job["stack"] == stack]
        cells = [each for each in plan.runnable if each.stack == stack]
        assert sum(job["cells"] for job in mine) == len(cells)
        assert len(mine) == -(-len(cells) * 5 // 60)
        assert [job["shard"] for job in mine] == [f"{i}/{len(mine)}" for i in range(1, len(mine) + 1)]
        for job in mine:
            asked = Selection(lane="nightly", stacks=(stack,), shard=job["shard"])
            assert len(make_plan(matrix, asked, known).runnable) == job["cells"]
    assert len({job["slug"] for job in jobs}) == len(jobs)
    assert {job["max_parallel"] for job in jobs} == {3}


def test_github_s_limit_is_said_before_github_says_it() -> None:
    plan = make_plan(load(Path("matrix.yaml")), Selection(lane="nightly", stacks=("newest",)))
    with pytest.raises(UsageError, match=r"GitHub takes 256: raise shard_minutes of runners\.cpu"):
        workflow.include(plan, RUNNER, Durations(seconds={job: {"x": 60.0} for job in load(Path("matrix.yaml")).jobs}))


def test_a_backend_without_a_runner_is_answered(matrix: Matrix) -> None:
    with pytest.raises(UsageError, match="runners has no entry for npu"):
        workflow.runner_of(matrix, "npu", hosted_only=False)


@pytest.mark.parametrize(
    ("labels", "hosted"),
    [
        (("ubuntu-24.04",), True),
        (("ubuntu-latest",), True),
        (("ubuntu-24.04-arm",), True),
        (("self-hosted", "linux", "x64", "cuda"), False),
        (("self-hosted", "ubuntu-24.04"), False),
        (("cuda-scale-set",), False),  # a runner scale set of actions-runner-controller has one label, its name
        (("ubuntu-24.04-of-ours",), False),
    ],
)
def test_only_a_standard_machine_of_github_takes_anybody_s_code(
    matrix: Matrix, labels: tuple[str, ...], hosted: bool
) -> None:
    runner = Runner(labels=labels, max_parallel=1, shard_minutes=1, timeout_minutes=5)
    assert runner.hosted == hosted
    known = matrix.model_copy(update={"runners": {"cpu": runner}})
    if hosted:
        assert workflow.runner_of(known, "cpu", hosted_only=True) is runner
    else:
        with pytest.raises(UsageError, match="does not run on self-hosted runners"):
            workflow.runner_of(known, "cpu", hosted_only=True)
    assert workflow.runner_of(known, "cpu", hosted_only=False) is runner


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("  cpu: {labels", "  gpu: {labels", "runners.gpu: found unknown backend 'gpu'"),
        ("shard_minutes: 1", "shard_minutes: 5", "expected timeout_minutes above shard_minutes, which is 5"),
        ("labels: [here]", "labels: []", "runners.cpu.labels: found []"),
        ("max_parallel: 3", "max_parallel: 0", "runners.cpu.max_parallel: found 0; expected"),
    ],
)
def test_a_mistake_in_a_runner_is_answered_with_its_line(tmp_path: Path, old: str, new: str, says: str) -> None:
    path = small_matrix.write(tmp_path, "stacks:", RUNNERS.replace(old, new))
    with pytest.raises(MatrixError) as caught:
        load(path)
    line = path.read_text().splitlines().index(RUNNERS.replace(old, new).splitlines()[1]) + 1
    assert caught.value.line == line
    assert says in caught.value.message


def test_a_cancelled_job_reaches_the_run(tmp_path: Path) -> None:
    """GitHub interrupts a step's first process alone, 7.5 s before it repeats it and 10 s before it kills all."""
    steps = YAML(typ="safe").load(Path(".github/workflows/lane.yml"))["jobs"]["cells"]["steps"]
    (script,) = [step["run"] for step in steps if "-zero" in step.get("run", "")]
    nox = tmp_path / ".venv" / "bin" / "nox"
    nox.parent.mkdir(parents=True)
    nox.write_text("#!/bin/sh\ntrap 'echo told; exit 130' INT\necho here\nfor n in $(seq 200); do sleep 0.05; done\n")
    nox.chmod(0o755)
    (tmp_path / "step.sh").write_text(script)
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "step.sh"]
    env = {**os.environ, "BACKEND": "cpu", "LANE": "nightly", "STACK": "newest", "SHARD": "1/1"}
    with subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True) as step:
        assert step.stdout is not None and step.stdout.readline() == "here\n"
        step.send_signal(signal.SIGINT)
        try:
            assert step.wait(5) == 130 and step.stdout.read() == "told\n"
        finally:
            step.kill()
