"""Plan -> the jobs of a workflow: what `strategy: matrix: ${{ fromJSON(...) }}` takes.

A job is a stack, or a shard of one where its cells are too much for a job: a stack is made once per job, and cells of
other stacks would make it make those too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypedDict

from ci.durations import Durations
from ci.errors import UsageError
from ci.matrix import Matrix, Runner
from ci.plan import Plan, shards

MOST_JOBS = 256
"""GitHub's limit on the jobs of one matrix."""


class WorkflowJob(TypedDict):
    """One entry of `include`. shard: i/n for `--shard`. slug: for names of artifacts. minutes: expected of its cells.

    max_parallel is the same in all of them: the strategy reads it from the first.
    """

    name: str
    slug: str
    stack: str
    shard: str
    cells: int
    minutes: float
    labels: list[str]
    hosted: bool
    timeout_minutes: int
    max_parallel: int


def runner_of(matrix: Matrix, backend: str, *, hosted_only: bool) -> Runner:
    """The backend's runner. UsageError where it has none, or one of ours for code that may be anybody's."""
    runner = matrix.runners.get(backend)
    if runner is None:
        raise UsageError(f"matrix.yaml: runners has no entry for {backend}; workflows cannot run its cells")
    if hosted_only and not runner.hosted:
        raise UsageError(
            f"--hosted-only: backend {backend} runs on {', '.join(runner.labels)}: code of a pull request does not "
            "run on self-hosted runners. Merge it first, or start the nightly workflow by hand on a branch of this "
            "repository"
        )
    return runner


def include(plan: Plan, runner: Runner, durations: Durations) -> list[WorkflowJob]:
    """The jobs, stack by stack."""
    jobs = [job for stack in plan.stacks for job in _jobs(plan, stack, runner, durations)]
    if len(jobs) > MOST_JOBS:
        raise UsageError(f"{len(jobs)} jobs; GitHub takes {MOST_JOBS}: raise shard_minutes of runners.{plan.backend}")
    return jobs


def _jobs(plan: Plan, stack: str, runner: Runner, durations: Durations) -> Iterator[WorkflowJob]:
    cells = [cell for cell in plan.cells if cell.stack == stack]
    runnable = [cell for cell in cells if cell.gated is None]
    minutes = sum(durations.of(cell.id) for cell in runnable) / 60
    count = min(math.ceil(minutes / runner.shard_minutes), len(runnable))
    for number, shard in enumerate(shards(cells, count, durations), 1):
        mine = [cell for cell in shard if cell.gated is None]
        yield WorkflowJob(
            name=stack if count == 1 else f"{stack} {number}/{count}",
            slug="-".join((plan.backend, plan.lane, stack, *(() if count == 1 else (f"{number}-of-{count}",)))),
            stack=stack,
            shard=f"{number}/{count}",
            cells=len(mine),
            minutes=round(sum(durations.of(cell.id) for cell in mine) / 60, 1),
            labels=list(runner.labels),
            hosted=runner.hosted,
            timeout_minutes=runner.timeout_minutes,
            max_parallel=runner.max_parallel,
        )
