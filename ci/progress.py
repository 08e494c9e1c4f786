"""What a person sees while a stack runs: which cell, how many are done, how long is left.

A live line on a terminal, one plain line a cell elsewhere (a log of a CI service). The times are an estimate from the
cells already done: nothing is decided by them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


def brief_time(seconds: float) -> str:
    """Seconds as a person says them: 8 s, 3 min 20 s, 1 h 05 min."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Estimate:
    """How long the rest takes: the mean of the finished cells, of the same job where there are any.

    The first cell of each worker waited for the import of the stack, so it tells nothing about the others.
    """

    def __init__(self, jobs: Sequence[str], workers: int) -> None:
        self._left = list(jobs)
        self._workers = max(1, workers)
        self._done: list[tuple[str, float]] = []

    def finished(self, job: str, seconds: float) -> None:
        """Count one cell of this job as done."""
        if job in self._left:
            self._left.remove(job)
        self._done.append((job, seconds))

    def left_s(self) -> float | None:
        """Seconds left, or None while nothing is known."""
        done = self._done[self._workers :]
        if not done:
            return None
        overall = sum(seconds for _, seconds in done) / len(done)
        left = 0.0
        for job in self._left:
            of_job = [seconds for its, seconds in done if its == job]
            left += sum(of_job) / len(of_job) if of_job else overall
        return left / self._workers


class ProgressView:
    """Shows one stack's progress on `console`; a context manager, since a live line must be given back."""

    def __init__(self, console: Console, stack: str, jobs: Sequence[str], workers: int) -> None:
        self._console = console
        self._total = len(jobs)
        self._done = 0
        self._estimate = Estimate(jobs, workers)
        self._live: Progress | None = None
        self._task: TaskID | None = None
        self._running: tuple[str, ...] = ()
        if console.is_terminal:
            self._live = Progress(
                TextColumn(f"[bold]{stack}[/bold]"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.description}", markup=False),
                console=console,
                transient=True,
            )

    def __enter__(self) -> ProgressView:
        self._start = time.monotonic()
        if self._live is not None:
            self._live.start()
            self._task = self._live.add_task("starting", total=self._total, left="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _left(self) -> str:
        seconds = self._estimate.left_s()
        return "" if seconds is None else f"about {brief_time(seconds)} left"

    def running(self, cells: Sequence[str]) -> None:
        """Name the cells at work now."""
        if tuple(cells) == self._running:
            return
        self._running = tuple(cells)
        if self._live is not None and self._task is not None:
            self._live.update(self._task, description=", ".join(_short(cell) for cell in cells))

    def finished(self, cell: str, job: str, seconds: float, verdict: str) -> None:
        """One more cell is done."""
        self._done += 1
        self._estimate.finished(job, seconds)
        left = self._left() if self._done < self._total else ""
        line = f"[{self._done:>{len(str(self._total))}}/{self._total}] {cell}  {verdict}  {seconds:.1f} s"
        self._console.print(
            line if self._live or not left else f"{line}, {left}", markup=False, highlight=False, soft_wrap=True
        )
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=self._done, left=left)


def _short(cell: str) -> str:
    """Job and case of a cell id: the backend and the stack are said once, at the start."""
    return "/".join(cell.split("/")[2:]) or cell
