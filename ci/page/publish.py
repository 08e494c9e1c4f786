"""What lies beside run.json for people and CI servers: report.html, summary.md and a badge per backend."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ci.errors import UsageError
from ci.page import badge, build, summary
from ci.page.history import History, ordered
from ci.runfolder import explained
from ci.runrecord import RUN
from ci.shown import Run, read

REPORT = "report.html"
SUMMARY = "summary.md"
LOOKED_AT = 20
"""Earlier runs among which the run before is looked for."""


def publish(folders: Sequence[Path], out: Path) -> History:
    """Write the report about these run folders into `out`."""
    return _publish([read(folder) for folder in folders], out)


def publish_beside(folder: Path) -> History:
    """A run's report in its own folder, compared with the run before it."""
    run = read(folder)
    return _publish([*_run_before(run), run], folder)


def _publish(runs: Sequence[Run], out: Path) -> History:
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
        text, history = build.page(ordered(runs), out)
        _write(out / REPORT, text)
        _write(out / SUMMARY, summary.markdown(history))
        for name, svg in badge.badges(history).items():
            _write(out / name, svg)
    return history


def _run_before(run: Run) -> tuple[Run, ...]:
    """The newest earlier run beside this one, on its backend and with a stack in common; none where there is none."""
    own = run.folder.resolve()
    # A run folder's name begins with its time (ci.runfolder).
    named = f"-{run.head.backend}-"
    earlier = sorted((path for path in own.parent.glob(f"*{named}*") if path.name < own.name), reverse=True)
    for path in earlier[:LOOKED_AT]:
        if path.is_symlink() or not (path / RUN).is_file():
            continue
        try:
            found = read(path)
        except UsageError:
            continue  # what an older run left must not keep this one from its report
        if found.head.stacks.keys() & run.head.stacks.keys():
            return (found,)
    return ()


def _write(path: Path, text: str) -> None:
    """A reader never sees half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
