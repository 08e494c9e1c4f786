"""Photographs of the example page for the README: `nox -s screenshots`."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from ci.page.build import address
from tests.page.conftest import CHROMIUM

EXAMPLE = Path("docs/example/report.html")
IMAGES = Path("docs/images")
CELL = "cpu/report-a/grpo-lora/zero0-bf16-gas4"
"""65536 times the norm: what the project began with."""


def main() -> None:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        wide = browser.new_page(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
        show(wide)
        wide.locator("#h-grid").scroll_into_view_if_needed()
        shoot(wide, "first-screen")
        wide.evaluate("() => document.querySelectorAll('.job')[2].scrollIntoView()")
        shoot(wide, "grid")
        show(wide, address(CELL))
        shoot(wide, "cell")
        wide.keyboard.press("Escape")
        wide.get_by_role("tab", name="Compatibility").click()
        shoot(wide, "compatibility")
        phone = browser.new_page(viewport={"width": 360, "height": 740}, color_scheme="dark")
        show(phone, address(CELL))
        shoot(phone, "phone-dark")
        browser.close()


def show(page: Page, fragment: str = "") -> None:
    page.goto(f"{EXAMPLE.resolve().as_uri()}{fragment}")
    page.wait_for_selector("html[data-ready]")


def shoot(page: Page, name: str) -> None:
    path = IMAGES / f"{name}.png"
    page.screenshot(path=path)
    print(path)


if __name__ == "__main__":
    main()
