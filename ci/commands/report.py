"""`report`: show finished runs again, in the terminal or as a page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ci import runrecord, shown
from ci.errors import ExitCode, UsageError, choices
from ci.report import print_run

TERMINAL = "terminal"
HTML = "html"
FORMATS = (TERMINAL, HTML)
MERGED = Path("results/report")


def main(
    runs: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs' folders, or names under results/.")
    ] = None,
    format_: Annotated[str, typer.Option("--format", help="terminal, or html: a page.")] = TERMINAL,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Where the page goes. Default: the run's folder; of several, results/report."
        ),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Make the page and show it on this machine.")] = False,
    port: Annotated[int, typer.Option("--port", help="With --serve; 0: any that is free.")] = 0,
) -> ExitCode:
    """Show runs (default: latest) in the terminal, or several as one page: report.html, summary.md and badges."""
    if format_ not in FORMATS:
        raise UsageError(f"--format {format_}: unknown format; {choices(format_, FORMATS)}")
    folders = [runrecord.find(run) for run in runs or ["latest"]]
    if format_ == HTML or serve:
        return _page(folders, out, port if serve else None)
    if out is not None:
        raise UsageError("--out says where a page goes; add --format html")
    code = ExitCode.OK
    for folder in folders:
        run = shown.read(folder)
        print_run(run)
        code = max(code, run.exit_code())
    return code


def _page(folders: list[Path], out: Path | None, port: int | None) -> ExitCode:
    """0 whatever the runs found: this makes a page and judges nothing."""
    # templates and plots, which the terminal does without
    from ci.page import publish
    from ci.page.serve import server

    if out is None and len(folders) == 1:
        target = folders[0]
        publish.publish_beside(target)
    else:
        target = out or MERGED
        publish.publish(folders, target)
    page = target / publish.REPORT
    print(page)
    if port is not None:
        found, address = server(page, folders, port)
        with found:
            print(f"{address}  (Ctrl-C ends it)", flush=True)
            found.serve_forever()
    return ExitCode.OK
