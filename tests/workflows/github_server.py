"""GitHub's API as far as ci.github asks it: a real HTTP server on loopback that keeps issues and pull requests.

Fields, codes and pages are those of the REST API's documentation. `busy` answers are given first.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

REPOSITORY = "owner/project"
TOKEN = "t0ken"
PER_PAGE = 2
"""However many were asked for, so that few issues are several pages."""


@dataclass
class Kept:
    """The server's state. asked: method and path of every request, in order. busy: codes that the next requests of
    a method get."""

    url: str = ""
    issues: list[dict[str, Any]] = field(default_factory=list)
    pulls: list[dict[str, Any]] = field(default_factory=list)
    comments: dict[int, list[str]] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)
    busy: dict[str, list[int]] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """What a job has of it."""
        return {"GITHUB_API_URL": self.url, "GITHUB_REPOSITORY": REPOSITORY, "GITHUB_TOKEN": TOKEN}

    @property
    def open(self) -> list[dict[str, Any]]:
        return [issue for issue in self.issues if issue["state"] == "open"]

    @property
    def changes(self) -> list[tuple[str, str]]:
        return [each for each in self.asked if each[0] != "GET"]

    def answer(self, method: str, path: str, query: dict[str, str], data: dict[str, Any]) -> tuple[int, Any]:
        root = f"/repos/{REPOSITORY}"
        issue = re.fullmatch(rf"{root}/issues/(\d+)", path)
        comments = re.fullmatch(rf"{root}/issues/(\d+)/comments", path)
        pull = re.fullmatch(rf"{root}/pulls/(\d+)", path)
        if (method, path) == ("GET", f"{root}/issues"):
            return 200, [
                each
                for each in self.issues
                if each["state"] == query["state"] and query["labels"] in [label["name"] for label in each["labels"]]
            ]
        if (method, path) == ("POST", f"{root}/issues"):
            return 201, self._new(self.issues, "issues", {**data, "labels": [{"name": x} for x in data["labels"]]})
        if method == "PATCH" and issue:
            return 200, self._changed(self.issues, int(issue[1]), data)
        if method == "POST" and comments:
            self.comments.setdefault(int(comments[1]), []).append(data["body"])
            return 201, {"html_url": f"https://github.com/{REPOSITORY}/issues/{comments[1]}#c"}
        if (method, path) == ("GET", f"{root}/pulls"):
            owner = REPOSITORY.split("/")[0]
            return 200, [
                each
                for each in self.pulls
                if each["state"] == query["state"] and f"{owner}:{each['head']}" == query["head"]
            ]
        if (method, path) == ("POST", f"{root}/pulls"):
            return 201, self._new(self.pulls, "pull", data)
        if method == "PATCH" and pull:
            return 200, self._changed(self.pulls, int(pull[1]), data)
        return 404, {"message": "Not Found"}

    def _new(self, kept: list[dict[str, Any]], kind: str, data: dict[str, Any]) -> dict[str, Any]:
        number = len(self.issues) + len(self.pulls) + 1
        url = f"https://github.com/{REPOSITORY}/{kind}/{number}"
        kept.append({"state": "open", **data, "number": number, "html_url": url})
        return kept[-1]

    def _changed(self, kept: list[dict[str, Any]], number: int, data: dict[str, Any]) -> dict[str, Any]:
        found = next(each for each in kept if each["number"] == number)
        found.update(data)
        return found


@contextlib.contextmanager
def serving() -> Iterator[Kept]:
    """The server at work."""
    kept = Kept()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            length = int(self.headers.get("Content-Length") or 0)
            data = json.loads(self.rfile.read(length) or "{}")
            kept.asked.append((self.command, parts.path))
            code: int
            content: Any
            if kept.busy.get(self.command):
                code, content = kept.busy[self.command].pop(0), {"message": "busy"}
            elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
                code, content = 401, {"message": "Bad credentials"}
            else:
                code, content = kept.answer(self.command, parts.path, query, data)
            self.send_response(code)
            if isinstance(content, list):
                page = int(query.get("page", "1"))
                start = (page - 1) * PER_PAGE
                if len(content) > start + PER_PAGE:
                    self.send_header("Link", f'<{kept.url}{parts.path}?{parts.query}&page={page + 1}>; rel="next"')
                content = content[start : start + PER_PAGE]
            body = json.dumps(content).encode()
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Not in the output of tests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield kept
        finally:
            server.shutdown()
            thread.join()
