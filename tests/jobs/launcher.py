"""Ranks of a case: processes forked from a server that imported the stack once, watched until they end.

Importing torch, DeepSpeed, transformers, TRL and PEFT costs seconds, a fork milliseconds. multiprocessing's
forkserver holds the imports (see `rank_server`), each rank is a fork of it and dies with its case, so no state is left
over. Where a device runtime cannot be forked after import the backend's entry asks for "spawn"; nothing else changes.

Every wait has an end: a case that overruns gets the Python stack of every rank written beside its log, its process
groups are killed, and the next case runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SERVER_MODULE = "tests.jobs.rank_server"
GRACE_AFTER_FIRST_DEATH_S = 8.0
"""How long the other ranks may go on once one has ended badly: enough to see the failed collective and record it."""
STACK_DUMP_S = 1.0
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class RankContext:
    """What a rank knows of itself. workdir is shared by the ranks of one case and empty when they start."""

    rank: int
    world_size: int
    workdir: Path
    payload: Mapping[str, Any]
    environment: Mapping[str, str]
    log: Path

    @property
    def record_path(self) -> Path:
        return self.workdir / f"rank{self.rank}.pt"

    @property
    def rendezvous(self) -> str:
        return f"file://{self.workdir / 'rendezvous'}"


@dataclasses.dataclass(frozen=True)
class RankEnd:
    """How a rank ended.

    finished: its body came to an end, by return or exception. exception: {type, message, traceback} where its body
    raised. stack: where it hung.
    """

    rank: int
    exit_code: int | None
    finished: bool
    peak_memory_mb: float | None = None
    exception: Mapping[str, str] | None = None
    stack: str | None = None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the ranks of one launch ended. problem says why they did not all end by themselves with exit code 0."""

    ranks: tuple[RankEnd, ...]
    duration_s: float
    problem: str | None

    @property
    def peak_memory_mb(self) -> float | None:
        sizes = [end.peak_memory_mb for end in self.ranks if end.peak_memory_mb is not None]
        return max(sizes) if sizes else None


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this rank when the process that started it is gone (Linux; nothing elsewhere)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _assert_imported() -> None:
    """Raise what kept the rank server from importing the stack."""
    failure = getattr(sys.modules.get(SERVER_MODULE), "FAILURE", None)
    if failure is not None:
        raise ImportError(f"the stack cannot be imported: {failure}")


def _rank_main(body: Callable[[RankContext], None], context: RankContext) -> None:
    os.setsid()
    die_with_parent(os.getppid())
    log = os.open(context.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stack_file = open(context.workdir / f"rank{context.rank}.stack", "w")  # noqa: SIM115  # reason: open while we live
    faulthandler.enable(stack_file, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    os.environ.update(context.environment)
    end: dict[str, Any] = {}
    code = 0
    try:
        _assert_imported()
        body(context)
    except BaseException as error:  # noqa: BLE001  # reason: whatever ends a rank is written down before the process goes
        with contextlib.suppress(OSError):  # a full disk; the reason below is in another place
            traceback.print_exc()
        end["exception"] = {
            "type": type(error).__name__,
            "message": str(error)[:4000],
            "traceback": traceback.format_exc()[-8000:],
        }
        code = 1
    end["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (context.workdir / f"rank{context.rank}.end.json").write_text(json.dumps(end))
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # Native teardown of gloo and OpenMP hangs in some ranks after their result is out.
    os._exit(code)


class Launcher:
    """Starts the ranks of one case after another from one warm server."""

    def __init__(self, start_method: str = "forkserver") -> None:
        """start_method: "forkserver", or "spawn" where the device runtime cannot be forked after import."""
        self._multiprocessing = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            # pytest is among them only because each fork looks at the parent's main module.
            self._multiprocessing.set_forkserver_preload(["pytest", SERVER_MODULE])
            # The server of Python 3.11 does not take over sys.path before it preloads; it does read PYTHONPATH.
            os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run(
        self,
        body: Callable[[RankContext], None],
        *,
        world_size: int,
        workdir: Path,
        log: Path,
        timeout_s: float,
        payload: Mapping[str, Any] = MappingProxyType({}),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Outcome:
        """Run `body` in `world_size` ranks and wait until all have ended or been ended.

        body must be importable by name (it is pickled). workdir must exist. Never raises for what a rank does.
        """
        began = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        processes: list[Any] = []
        problem: str | None = None
        for rank in range(world_size):
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_SIZE": str(world_size),
                **environment,
            }
            context = RankContext(rank, world_size, workdir, dict(payload), variables, log)
            # The stubs of multiprocessing give a context's Process no constructor that mypy can see through.
            process = self._multiprocessing.Process(  # type: ignore[attr-defined]  # reason: see the line above
                target=_rank_main, args=(body, context), daemon=True
            )
            try:
                process.start()
            except (OSError, EOFError) as error:
                # A server that crashes while it imports leaves a closed pipe; a full machine has no room for a fork.
                problem = f"rank {rank} could not be started, the rank server ended ({type(error).__name__}: {error})"
                break
            processes.append(process)
        try:
            if problem is None:
                problem = self._wait(processes, began + timeout_s, timeout_s, workdir)
        finally:
            for process in processes:
                _kill_group(process.pid, process.is_alive())
            for process in processes:
                process.join(10)
        ends = tuple(_read_end(workdir, rank, process.exitcode) for rank, process in enumerate(processes))
        if problem is None:
            problem = _death(ends)
        return Outcome(ends, time.monotonic() - began, problem)

    def _wait(self, processes: list[Any], deadline: float, timeout_s: float, workdir: Path) -> str | None:
        """Wait for all; returns why they had to be ended, or None when all ended by themselves."""
        alive = dict(enumerate(processes))
        shortened = False
        while alive:
            left = deadline - time.monotonic()
            if left <= 0:
                _dump_stacks(list(alive.values()))
                hung = ", ".join(str(rank) for rank in sorted(alive))
                if shortened:
                    dead = sorted(set(range(len(processes))) - set(alive))
                    return (
                        f"rank {', '.join(map(str, dead))} ended badly (exit code "
                        f"{[processes[rank].exitcode for rank in dead]}) and rank {hung} waited on in vain"
                    )
                return f"rank {hung} still running after the time limit of {timeout_s:.0f} s; stacks beside the log"
            multiprocessing.connection.wait([process.sentinel for process in alive.values()], timeout=left)
            for rank, process in list(alive.items()):
                if process.exitcode is None:
                    continue
                del alive[rank]
                if process.exitcode != 0 and not shortened:
                    shortened = True
                    deadline = min(deadline, time.monotonic() + GRACE_AFTER_FIRST_DEATH_S)
        return None


def _dump_stacks(processes: list[Any]) -> None:
    for process in processes:
        try:
            os.kill(process.pid, signal.SIGUSR1)
        except ProcessLookupError:
            continue
    time.sleep(STACK_DUMP_S)


def _kill_group(pid: int | None, alive: bool) -> None:
    """Kill everything that the rank started, and the rank itself where it is still alive.

    A rank leads its own process group, which stays as long as a child of it lives: children that a rank left must not
    take time and memory from the next case.
    """
    if pid is None:
        return
    for kill in (os.killpg, os.kill) if alive else (os.killpg,):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _read_end(workdir: Path, rank: int, exit_code: int | None) -> RankEnd:
    stack_file = workdir / f"rank{rank}.stack"
    stack = stack_file.read_text(errors="replace") if stack_file.exists() else ""
    end_file = workdir / f"rank{rank}.end.json"
    try:
        end = json.loads(end_file.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        end = {}
    return RankEnd(rank, exit_code, bool(end), end.get("peak_memory_mb"), end.get("exception"), stack or None)


def _death(ends: tuple[RankEnd, ...]) -> str | None:
    """Why the case is incomplete, from how the ranks ended: raised exceptions come before exit codes."""
    for end in ends:
        if end.exception is not None:
            return f"rank {end.rank} raised {end.exception['type']}: {end.exception['message'].partition(chr(10))[0]}"
    for end in ends:
        if end.exit_code != 0:
            code = end.exit_code
            how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            return f"rank {end.rank} ended with {how}"
        if not end.finished:
            return f"rank {end.rank} ended with exit code 0 before its work was done"
    return None
