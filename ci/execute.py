"""Run a plan: stack by stack make the place, run its cells, judge what was measured, and leave a whole record.

However it ends (as planned, a full disk, an interrupt at any moment), what was measured is judged and readable, and
nothing is left running. Where a cell stays without evidence, this program writes the reason into evidence.jsonl as
the cell's `problem`, so that judging the folder again later says the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from packaging.utils import canonicalize_name
from rich.console import Console

from ci import evidence as evidence_lines
from ci import junit, order, workers
from ci.errors import CiError, EnvironmentUnavailable, Interrupted
from ci.evidence import Evidence, Reading
from ci.interrupts import Interrupts
from ci.judge import judge_cell, judge_run, same_version
from ci.matrix import Matrix
from ci.plan import Cell, Plan, PlannedStack
from ci.progress import ProgressView, brief_time
from ci.provision.devices import inside
from ci.provision.runtime import Environment, Override, Recipe, Runtime
from ci.runfolder import RunFolder, explained
from ci.runrecord import (
    EVIDENCE,
    FAILING,
    CellRecord,
    Context,
    ImageRecord,
    RunRecord,
    SavedPlan,
    write_plan,
    write_run,
)
from ci.stackrun import StackOrder, run_stack
from ci.userfiles import Adapter, copy_into, read_ds_config


@dataclass(frozen=True)
class Request:
    """Everything a run needs, resolved: what `ci.commands.run` makes of the command line.

    context: how the run was asked for; its stacks and image are filled in as they are made. devices: the numbers of
    those it may use; None where the backend has none.
    """

    plan: Plan
    matrix: Matrix
    runtime: Runtime
    recipes: Mapping[str, Recipe]
    context: Context
    out: Path
    overrides: Mapping[str, Sequence[Override]] = field(default_factory=dict)
    fail_fast: bool = False
    adapter: Adapter | None = None
    ds_config: Path | None = None
    devices: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Outcome:
    """How a run ended. stopped: the error that cut it short; its exit code wins over the verdicts'."""

    record: RunRecord
    folder: Path
    stopped: CiError | None = None


def pin_differences(stack: PlannedStack, packages: Mapping[str, str]) -> str | None:
    """What is installed unlike the stack's pins, or None."""
    installed = {canonicalize_name(name): version for name, version in packages.items()}
    differing = [
        f"{package} {installed.get(canonicalize_name(package), 'missing')} instead of {pin}"
        for package, pin in sorted(stack.pins.items())
        if not same_version(installed.get(canonicalize_name(package)), pin)
    ]
    return f"pins differ: {', '.join(differing)}" if stack.check_pins and differing else None


def with_installed(stack: PlannedStack, packages: Mapping[str, str]) -> PlannedStack:
    """The stack with the version that a replacement turned out to have: only a built checkout tells."""
    installed = {canonicalize_name(name): version for name, version in packages.items()}
    pins = dict(stack.pins)
    for package in (replacement.package for replacement in stack.replacements):
        if package in pins:
            continue
        version = installed.get(canonicalize_name(package))
        if version is None:
            raise EnvironmentUnavailable(f"--with replaced {package}, and it is not installed afterwards")
        pins[package] = version
    return replace(stack, pins=pins)


def problem(cell: Cell, accelerator: str, reason: str) -> Evidence:
    """Evidence that there is none, and why."""
    return Evidence(
        cell=cell.id, pins={}, accelerator=accelerator, device="", world_size=cell.world_size, problem=reason
    )


def append(path: Path, evidence: Iterable[Evidence]) -> None:
    """Append whole lines, even after one that was cut short."""
    text = "".join(line.model_dump_json(by_alias=True) + "\n" for line in evidence)
    if not text:
        return
    with path.open("a+b") as stream:
        if stream.tell():
            stream.seek(-1, os.SEEK_END)
            text = text if stream.read(1) == b"\n" else "\n" + text
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())


def set_aside_log(folder: Path, stack: str) -> None:
    """Give pytest's output of one stack a name of its own, before the next stack writes its own."""
    log = folder / "pytest.log"
    if log.exists():
        log.replace(folder / f"pytest.{stack}.log")


class Execution:
    """One run, from its folder to its record."""

    def __init__(self, request: Request, console: Console, interrupts: Interrupts) -> None:
        self._request = request
        self._console = console
        self._interrupts = interrupts
        self._began = time.monotonic()
        self._stacks = {stack.id: dict(stack.pins) for stack in request.plan.stacks.values()}
        self._image: str | None = None
        self._images: dict[str, ImageRecord] = {}
        self._reasons: dict[str, str] = {}

    def run(self) -> Outcome:
        """Run everything. Raises only while there is no folder yet; later the outcome says what stopped it."""
        folder: RunFolder | None = None
        stopped: CiError | None = None
        try:
            try:
                with self._interrupts.shield():
                    folder = RunFolder.create(self._request.out, self._request.plan.backend, datetime.now(UTC))
                with explained(folder.path):
                    write_plan(folder.path, self._saved_plan())
                    folder.point_latest()
                self._run_stacks(folder.path)
            except (Interrupted, EnvironmentUnavailable) as error:
                if folder is None:
                    raise
                stopped = error
            with self._interrupts.shield():
                outcome = self._finish(folder.path, stopped)
        except Interrupted as error:
            if folder is None:
                raise
            # Between the last measurement and the record: judge once more, undisturbed.
            outcome = self._finish(folder.path, error)
        finally:
            if folder is not None:
                folder.release()
        return outcome

    def _run_stacks(self, folder: Path) -> None:
        by_stack: dict[str, list[Cell]] = {}
        for cell in self._request.plan.runnable:
            by_stack.setdefault(cell.stack, []).append(cell)
        inputs = self._copy_inputs(folder)
        unmade = 0
        for stack_id, cells in by_stack.items():
            stack = self._request.plan.stacks[stack_id]
            try:
                environment = self._provision(stack)
                stack = with_installed(stack, environment.packages)
            except EnvironmentUnavailable as error:
                # Another stack may well be makeable, and its verdicts still count.
                unmade += 1
                if unmade == len(by_stack):
                    raise
                self._say(f"{stack_id}: {error.message}", style="red")
                self._give_reason(cells, f"the place to run could not be made: {error.message}")
                stop = f"--fail-fast: {stack_id} could not be made" if self._request.fail_fast else None
            else:
                self._stacks[stack_id] = dict(stack.pins)
                stop = self._run_stack(folder, stack, environment, cells, inputs)
            if stop is not None:
                self._give_reason(self._request.plan.runnable, stop)
                return

    def _provision(self, stack: PlannedStack) -> Environment:
        request = self._request
        environment = request.runtime.provision(request.recipes[stack.id], request.overrides.get(stack.id, ()))
        if made := environment.image or environment.folder:
            how = "found as made before" if environment.reused else f"made in {brief_time(environment.seconds)}"
            self._say(f"{stack.id}: {made}, {how}")
        for note in environment.notes:
            self._say(f"{stack.id}: {note}")
        if environment.image and environment.image_id:
            self._image = environment.image
            self._images[stack.id] = ImageRecord(
                tag=environment.image, id=environment.image_id, digests=environment.digests
            )
        return environment

    def _copy_inputs(self, folder: Path) -> tuple[Path, ...]:
        files = (self._request.adapter and self._request.adapter.file, self._request.ds_config)
        with explained(folder):
            return tuple(copy_into(folder, file) for file in files if file)

    def _run_stack(
        self, folder: Path, stack: PlannedStack, environment: Environment, cells: list[Cell], inputs: tuple[Path, ...]
    ) -> str | None:
        """Run one stack; returns why the whole run has to stop here, or None."""
        differences = pin_differences(stack, environment.packages)
        if differences is not None:
            self._say(f"{stack.id}: {differences}", style="red")
            self._give_reason(cells, differences)
            return f"--fail-fast: {stack.id}: {differences}" if self._request.fail_fast else None
        world_sizes = [cell.world_size for cell in cells]
        devices = self._request.devices
        chosen = workers.choose(
            world_sizes,
            cores=workers.cores(),
            free_mb=workers.free_memory_mb(),
            devices=None if devices is None else len(devices),
        )
        many = "1 cell" if len(cells) == 1 else f"{len(cells)} cells, {chosen.count} at a time"
        self._say(f"{stack.id}: {many} ({chosen.why})")
        order_file = folder / f"order.{stack.id}.json"
        self._write_order(order_file, stack, cells, inputs)
        by_id = {cell.id: cell for cell in cells}

        def judge(evidence: Evidence) -> CellRecord:
            pins = stack.pins if stack.check_pins else None
            return judge_cell(by_id[evidence.cell], evidence, self._request.matrix, pins)

        stop: str | None = None

        def stop_after(record: CellRecord) -> str | None:
            nonlocal stop
            if self._request.fail_fast and record.verdict in FAILING:
                stop = stop or f"--fail-fast: stopped after {record.id} ({record.verdict})"
            return stop

        stack_order = StackOrder(environment, cells, order_file, folder, chosen.count, inputs)
        try:
            with ProgressView(self._console, stack.id, [cell.job for cell in cells], chosen.count) as view:
                reason = run_stack(stack_order, self._request.runtime, view, self._interrupts, judge, stop_after)
        finally:
            set_aside_log(folder, stack.id)
        self._give_reason(cells, reason)
        return stop

    def _write_order(
        self, order_file: Path, stack: PlannedStack, cells: Sequence[Cell], inputs: Sequence[Path]
    ) -> None:
        request = self._request
        adapter = f"{request.runtime.path_inside(inputs[0])}:{request.adapter.cls}" if request.adapter else None
        ds_config = read_ds_config(request.ds_config) if request.ds_config else None
        backend = request.matrix.backends[request.plan.backend]
        devices = inside(request.devices or (), in_container=request.runtime.id == "docker")
        content = order.build(
            request.plan.backend, backend, stack, cells, adapter=adapter, ds_config=ds_config, devices=devices
        )
        with explained(order_file):
            order.write(order_file, content)

    def _give_reason(self, cells: Iterable[Cell], reason: str) -> None:
        """Why these cells have no evidence, should they have none; the first reason given is the nearest."""
        for cell in cells:
            self._reasons.setdefault(cell.id, reason)

    def _saved_plan(self) -> SavedPlan:
        made = {"stacks": self._stacks, "image": self._image, "images": self._images}
        context = self._request.context.model_copy(update=made)
        plan = self._request.plan
        unchecked = tuple(stack.id for stack in plan.stacks.values() if not stack.check_pins)
        return SavedPlan(**context.model_dump(), unchecked=unchecked, cells=plan.cells)

    def _finish(self, folder: Path, stopped: CiError | None) -> Outcome:
        """Judge and write; a disk that is full by now costs the files, not the report."""
        matrix, runnable = self._request.matrix, self._request.plan.runnable
        reading = evidence_lines.read(folder / EVIDENCE, refuse_foreign=False)
        general = stopped.message if stopped else "the case ended before it recorded any evidence"
        missing = {
            cell.id: problem(cell, matrix.backends[cell.backend].accelerator, self._reasons.get(cell.id, general))
            for cell in runnable
            if cell.id not in reading.by_cell
        }
        plan = self._saved_plan()
        duration = time.monotonic() - self._began
        record = judge_run(plan, Reading({**reading.by_cell, **missing}, reading.skipped), matrix, duration)
        kept = f"kept: the evidence of {len(runnable) - len(missing)} of {len(runnable)} cells, in {folder / EVIDENCE}"
        try:
            with explained(folder, kept):
                append(folder / EVIDENCE, missing.values())
                write_plan(folder, plan)
                write_run(folder, record)
                junit.write(folder, record)
        except EnvironmentUnavailable as error:
            stopped = stopped or error
        return Outcome(record, folder, stopped)

    def _say(self, text: str, style: str | None = None) -> None:
        self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
