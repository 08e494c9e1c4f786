"""What the ranks of the launcher's tests run: importable by name, as every body must be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch

from tests.jobs.launcher import RankContext
from tests.stack.given import CPU


def reduce_sum(context: RankContext) -> None:
    """All ranks add rank + 1; each writes what it got."""
    import deepspeed

    from tests.jobs import engine, shims

    engine.assert_preloaded()
    shims.apply_common(CPU["shims"])
    engine.init_distributed(context, CPU["communication"])
    value = torch.tensor([context.rank + 1.0])
    deepspeed.comm.all_reduce(value)
    (context.workdir / f"sum{context.rank}").write_text(str(value.item()))


def hang_in_a_collective(context: RankContext) -> None:
    """Both ranks reduce once; then rank 0 reduces again, and rank 1 does something else."""
    reduce_sum(context)
    if context.rank == 0:
        import deepspeed

        deepspeed.comm.all_reduce(torch.ones(4))
    else:
        _hung_here()


def environment(context: RankContext) -> None:
    """Write what the rank was told and in which process group it is."""
    told = [os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["FROM_THE_CALL"]]
    (context.workdir / f"told{context.rank}").write_text(" ".join(told) + f" {os.getpid() == os.getpgid(0)}")


def raise_on_one(context: RankContext) -> None:
    """Rank 1 raises, rank 0 returns."""
    if context.rank == 1:
        raise ValueError("rank one says no")


def sleep_in_python(context: RankContext) -> None:
    """Rank 1 sleeps in a function of a name to look for, with a child of its own."""
    if context.rank == 1:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (context.workdir / "child").write_text(str(child.pid))
        os.rename(context.workdir / "child", os.environ["CHILD_FILE"])
        _hung_here()


def _hung_here() -> None:
    time.sleep(600)


def die(context: RankContext) -> None:
    """Rank 0 is killed, rank 1 waits for it."""
    if context.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def leave_early(context: RankContext) -> None:
    """Ends with exit code 0 without having done its work."""
    os._exit(0)
