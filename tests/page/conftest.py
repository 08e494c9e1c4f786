"""A real browser, offline: Debian's chromium through Playwright, which downloads nothing, and axe-core from npm."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from ci import runrecord
from ci.page.publish import publish
from ci.runrecord import RunRecord
from tests.page import runs

HERE = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # root, as in CI, has no sandbox; the pages are our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page and what it did that it must not do."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture
def tab(browser: Browser) -> Iterator[Opened]:
    """A tab that ends its test with: no message on the console, no error, no request but for files."""
    with browser.new_context() as context:
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        opened = Opened(context.new_page())
        opened.page.on("console", lambda message: opened.complaints.append(f"{message.type}: {message.text}"))
        opened.page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        yield opened
        assert opened.complaints == []
        assert {url.partition("#")[0] for url in opened.requests if not url.startswith("blob:")} <= {
            opened.page.url.partition("#")[0]
        }


def show(opened: Opened, folder: Path, fragment: str = "") -> Page:
    """The page of a folder, opened from disk and ready."""
    opened.page.goto(f"{(folder / 'report.html').as_uri()}{fragment}")
    opened.page.wait_for_selector("html[data-ready]")
    return opened.page


def made(folder: Path, *records: RunRecord, logs: dict[str, str] | None = None) -> Path:
    """The report of these runs; logs: file name -> text, in each run's folder."""
    folders = []
    for number, record in enumerate(records):
        run = folder / f"run{number}"
        (run / "logs").mkdir(parents=True)
        for name, text in (logs or {}).items():
            (run / "logs" / name).write_text(text)
        runrecord.write_run(run, record)
        folders.append(run)
    publish(folders, folder)
    return folder


@pytest.fixture(scope="session")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs a day apart, with every verdict, logs, and the stack of a rank that hung."""
    return made(
        tmp_path_factory.mktemp("report"),
        *runs.two_nights(),
        logs={"crash.log": runs.LOG, "crash.rank1.stack": runs.STACK},
    )


@pytest.fixture(scope="session")
def axe() -> str:
    """The script of axe-core, in the version and with the hash of the committed lock."""
    script = HERE / "node_modules" / "axe-core" / "axe.min.js"
    if not script.is_file():
        subprocess.run(["npm", "ci", "--no-progress"], cwd=HERE, check=True)
    return script.read_text(encoding="utf-8")


def violations(page: Page, axe: str) -> list[Any]:
    """What WCAG 2.2 AA forbids and is on the page as it stands, in a few words each."""
    page.evaluate(axe)  # through the debugger: the page's policy lets no foreign script in
    found = page.evaluate(
        "() => axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})"
    )
    return [(each["id"], each["nodes"][0]["html"][:200], len(each["nodes"])) for each in found["violations"]]
