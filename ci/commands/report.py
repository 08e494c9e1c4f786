"""`report`: show finished runs again, in the terminal or as a page."""

from __future__ import annotations

import functools
import http.server
import os
import urllib.parse
from pathlib import Path
from typing import Annotated

import typer

from ci import runrecord
from ci.errors import EnvironmentUnavailable, ExitCode, UsageError, choices
from ci.report import print_run

TERMINAL = "terminal"
HTML = "html"
FORMATS = (TERMINAL, HTML)
MERGED = Path("results/report")
LOCALHOST = "127.0.0.1"


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
        record = runrecord.read_run(folder)
        print_run(record)
        code = max(code, record.exit_code())
    return code


def _page(folders: list[Path], out: Path | None, port: int | None) -> ExitCode:
    """0 whatever the runs found: this makes a page and judges nothing."""
    from ci.page import publish  # templates and plots, which the terminal does without

    if out is None and len(folders) == 1:
        target = folders[0]
        publish.publish_beside(target)
    else:
        target = out or MERGED
        publish.publish(folders, target)
    page = target / publish.REPORT
    print(page)
    if port is not None:
        _serve(page, folders, port)
    return ExitCode.OK


def _serve(page: Path, folders: list[Path], port: int) -> None:
    """Until interrupted, to this machine only; logs lie in the runs' folders, so what is served holds them too."""
    root = os.path.commonpath([page.resolve().parent, *(folder.resolve() for folder in folders)])
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=root)
    try:
        server = http.server.ThreadingHTTPServer((LOCALHOST, port), handler)
    except OSError as error:
        raise EnvironmentUnavailable(f"--port {port}: {error.strerror}; leave it out for any that is free") from error
    with server:
        path = urllib.parse.quote(page.resolve().relative_to(root).as_posix())
        print(f"http://{LOCALHOST}:{server.server_address[1]}/{path}  (Ctrl-C ends it)", flush=True)
        server.serve_forever()
