"""One cell from order to evidence: its ranks, then the reference, then one line.

Runs in the pytest process, which imports no torch: everything of the stack happens in forks of the rank server.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.jobs import bodies, corrections, ds_config
from tests.jobs import evidence as ev
from tests.jobs.launcher import Launcher, Outcome
from tests.jobs.order import Cell, Order

TRAINER_CLIPPING = 1.0
"""max_grad_norm where a user of transformers' trainers sets none; it resolves "auto" in the configuration."""


def installed_pins(names: Mapping[str, str]) -> dict[str, str]:
    """Versions really installed of the distributions a stack pins; "absent" where there is none."""
    found = {}
    for name in sorted(names):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def pin_difference(order: Order) -> str | None:
    """What is installed unlike the stack's pins, in words, or None.

    A local build ("+cpu") counts only where the pin names one.
    """
    if not order.check_pins:
        return None
    found = installed_pins(order.pins)

    def same(pinned: str, version: str) -> bool:
        return version == pinned or ("+" not in pinned and version.split("+")[0] == pinned)

    wrong = [f"{name} {found[name]} (pinned {pin})" for name, pin in order.pins.items() if not same(pin, found[name])]
    return f"installed versions differ from the stack {order.stack}: {', '.join(wrong)}" if wrong else None


def clipping(cell: Cell, launcher: Launcher, order: Order, workdir: Path, log: Path) -> tuple[float | None, str | None]:
    """(the clip value that must hold or None, problem). loose: 10x the first norm; binding: half of it."""
    variant = cell.case.get("gradient_clipping", "unset")
    if variant == "unset" and cell.case.get("path") == "direct":
        return None, None  # built by hand, a wrapper's own default is not to clip
    if variant == "unset" and cell.case.get("trainer") in ("trl", "ms-swift"):
        return TRAINER_CLIPPING, None
    if variant == "unset":
        return ds_config.unset_clipping(importlib.metadata.version("deepspeed")), None
    if variant not in ("loose", "binding"):
        return float(variant), None
    outcome = launcher.run(
        bodies.first_norm,
        world_size=1,
        workdir=workdir,
        log=log,
        timeout_s=cell.timeout_s,
        payload=payload(cell, order, None),
    )
    if outcome.problem:
        return None, f"the norm that {variant} clipping refers to could not be computed: {outcome.problem}"
    first = float(json.loads((workdir / "first_norm.json").read_text()))
    for leftover in workdir.iterdir():
        leftover.unlink()
    return first * (10.0 if variant == "loose" else 0.5), None


def payload(cell: Cell, order: Order, clip: float | None) -> dict[str, Any]:
    """What the ranks and the reference are told of a cell."""
    return {
        "cell": cell.id,
        "job": cell.job,
        "case": dict(cell.case),
        "seed": cell.seed,
        "world_size": cell.world_size,
        "backend": dict(order.backend),
        "clip": clip,
        "adapter": cell.adapter,
        "ds_config": cell.ds_config,
        "corrections": list(corrections.asked(cell.corrections)),
        "mutant": cell.mutant,
    }


def run(cell: Cell, order: Order, launcher: Launcher, results: Path) -> ev.Evidence:
    """Run one cell; whatever happens, evidence comes back (with a `problem` where it is incomplete)."""
    began = time.monotonic()
    log = results / "logs" / f"{cell.id.replace('/', '__')}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    blank = ev.Evidence(
        cell=cell.id,
        pins=installed_pins(order.pins),
        accelerator=str(order.backend["accelerator"]),
        device="",
        world_size=cell.world_size,
        seed=cell.seed,
        log=str(log.relative_to(results)),
    )
    workdir = Path(tempfile.mkdtemp(prefix="cell-"))
    try:
        clip, problem = clipping(cell, launcher, order, workdir, log)
        if problem is None:
            filled = _train_and_referee(cell, order, launcher, workdir, log, clip, blank)
        else:
            filled = dataclasses.replace(blank, problem=problem)
        if filled.problem is not None:
            _keep_stacks(workdir, log)
    finally:
        shutil.rmtree(workdir, ignore_errors=True)
    return dataclasses.replace(filled, duration_s=round(time.monotonic() - began, 3))


def started(cell: Cell) -> int:
    """Processes that we start for a cell: its ranks, or the one that runs a command with a launcher of its own."""
    return 1 if cell.case.get("trainer") == "ms-swift" else cell.world_size


def _train_and_referee(
    cell: Cell,
    order: Order,
    launcher: Launcher,
    workdir: Path,
    log: Path,
    clip: float | None,
    blank: ev.Evidence,
) -> ev.Evidence:
    told = payload(cell, order, clip)
    ranks = launcher.run(
        bodies.train, world_size=started(cell), workdir=workdir, log=log, timeout_s=cell.timeout_s, payload=told
    )
    if ranks.problem is not None:
        return dataclasses.replace(blank, problem=ranks.problem, peak_memory_mb=ranks.peak_memory_mb)
    left = max(30.0, cell.timeout_s - ranks.duration_s)
    refereed = launcher.run(bodies.referee, world_size=1, workdir=workdir, log=log, timeout_s=left, payload=told)
    if refereed.problem is not None:
        return dataclasses.replace(
            blank, problem=f"the reference failed: {refereed.problem}", peak_memory_mb=ranks.peak_memory_mb
        )
    return _filled(blank, json.loads((workdir / "steps.json").read_text()), ranks)


def _filled(blank: ev.Evidence, result: Mapping[str, Any], ranks: Outcome) -> ev.Evidence:
    exception = result["exception"]
    return dataclasses.replace(
        blank,
        accelerator=result["device"],
        device=result["device"],
        wrapper=result["wrapper"],
        steps=tuple(result["steps"]),
        steps_expected=result["steps_expected"],
        shims=tuple(ev.Shim(name, reason) for name, reason in result["shims"]),
        corrections=tuple(result["corrections"]),
        exception=None if exception is None else ev.ExceptionRecord(**exception),
        training_s=round(float(result["training_s"]), 4),
        peak_memory_mb=None if ranks.peak_memory_mb is None else round(ranks.peak_memory_mb, 1),
        notes=tuple(result["notes"]),
        mutant=result["mutant"],
    )


def _keep_stacks(workdir: Path, log: Path) -> None:
    """Write the Python stack of each rank that hung or crashed beside the case's log."""
    for stack in sorted(workdir.glob("*.stack")):
        text = stack.read_text(errors="replace")
        if text:
            log.with_suffix(f".{stack.stem}.stack").write_text(text)
