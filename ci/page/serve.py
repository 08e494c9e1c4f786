"""The page over HTTP, to this machine only."""

from __future__ import annotations

import functools
import http.server
import os
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

from ci.errors import EnvironmentUnavailable

LOCALHOST = "127.0.0.1"


def server(page: Path, folders: Sequence[Path], port: int) -> tuple[http.server.ThreadingHTTPServer, str]:
    """A server that has its port already, and the page's address; port 0: any that is free.

    It holds the page's folder and those of the runs, where the logs lie.
    """
    root = os.path.commonpath([page.resolve().parent, *(folder.resolve() for folder in folders)])
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=root)
    try:
        found = http.server.ThreadingHTTPServer((LOCALHOST, port), handler)
    except (OSError, OverflowError) as error:
        raise EnvironmentUnavailable(f"--port {port}: {error}; leave it out for any that is free") from error
    path = urllib.parse.quote(page.resolve().relative_to(root).as_posix())
    return found, f"http://{LOCALHOST}:{found.server_address[1]}/{path}"
