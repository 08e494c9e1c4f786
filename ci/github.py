"""The few calls of GitHub's REST API that the workflows need; where it is and who asks comes from a job's environment.

requests is here already, with the Docker SDK; a client library for all of GitHub would bring a dozen packages for
seven calls. What may be asked twice without harm is asked again where GitHub is busy.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from ci.errors import EnvironmentUnavailable, UsageError
from ci.issues import LABEL, Close, Issue, Open, Operation

TIMEOUT_S = 30
TRIES = 4
BUSY = (429, 502, 503, 504)


class GitHub:
    """One repository."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        missing = [name for name in ("GITHUB_REPOSITORY", "GITHUB_TOKEN") if not environment.get(name)]
        if missing:
            raise UsageError(f"{' and '.join(missing)} not set: expected a job of a workflow, with `github.token`")
        api = environment.get("GITHUB_API_URL") or "https://api.github.com"
        self._root = f"{api}/repos/{environment['GITHUB_REPOSITORY']}"
        again = Retry(
            TRIES, backoff_factor=1, status_forcelist=BUSY, allowed_methods=("GET", "PATCH"), raise_on_status=False
        )
        self._session = requests.Session()
        for scheme in ("https://", "http://"):
            self._session.mount(scheme, HTTPAdapter(max_retries=again))
        self._session.headers.update(
            {
                "Accept": "application/vnd.github+json",
                "Authorization": f"Bearer {environment['GITHUB_TOKEN']}",
                "X-GitHub-Api-Version": "2022-11-28",
            }
        )

    def open_issues(self) -> tuple[Issue, ...]:
        """Those with our label, oldest first."""
        found: list[Issue] = []
        url: str | None = f"{self._root}/issues?labels={LABEL}&state=open&sort=created&direction=asc&per_page=100"
        while url is not None:
            answer = self._ask("GET", url)
            found += [
                Issue(each["number"], each["title"], each["body"] or "")
                for each in answer.json()
                if "pull_request" not in each
            ]
            url = answer.links.get("next", {}).get("url")
        return tuple(found)

    def apply(self, operation: Operation) -> str:
        """Carry it out; the issue's address."""
        if isinstance(operation, Open):
            issue = {"title": operation.title, "body": operation.body, "labels": [LABEL]}
            answer = self._ask("POST", f"{self._root}/issues", issue)
        elif isinstance(operation, Close):
            url = f"{self._root}/issues/{operation.number}"
            # The comment first: should closing fail, the next night says it again rather than never.
            self._ask("POST", f"{url}/comments", {"body": operation.comment})
            answer = self._ask("PATCH", url, {"state": "closed", "state_reason": "completed"})
        else:
            url = f"{self._root}/issues/{operation.number}"
            answer = self._ask("PATCH", url, {"title": operation.title, "body": operation.body})
        return str(answer.json()["html_url"])

    def propose(self, branch: str, base: str, title: str, body: str, *, draft: bool) -> str:
        """One open pull request for this branch, opened or rewritten; its address."""
        owner = self._root.split("/")[-2]
        there = self._ask("GET", f"{self._root}/pulls?state=open&head={owner}:{branch}").json()
        if there:
            answer = self._ask("PATCH", f"{self._root}/pulls/{there[0]['number']}", {"title": title, "body": body})
        else:
            request = {"head": branch, "base": base, "title": title, "body": body, "draft": draft}
            answer = self._ask("POST", f"{self._root}/pulls", request)
        return str(answer.json()["html_url"])

    def _ask(self, method: str, url: str, data: object = None) -> requests.Response:
        try:
            answer = self._session.request(method, url, json=data, timeout=TIMEOUT_S)
        except requests.RequestException as error:
            raise EnvironmentUnavailable(f"GitHub: {method} {url}: {error}") from error
        if not answer.ok:
            said = _message(answer)
            hint = "; the job's `permissions` decide what it may do" if answer.status_code in (401, 403, 404) else ""
            raise EnvironmentUnavailable(f"GitHub: {method} {url}: {answer.status_code} {said}{hint}")
        return answer


def _message(answer: requests.Response) -> str:
    try:
        data: Any = answer.json()
    except requests.JSONDecodeError:
        return answer.reason
    return str(data.get("message", answer.reason)) if isinstance(data, dict) else answer.reason
