"""The page in a real browser: from disk, by keyboard, on a phone, in the dark, on paper, and against hostile text."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import subprocess
import sys
import urllib.parse
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from ci import runrecord
from ci.page.build import address
from ci.runrecord import Verdict
from tests.page import runs
from tests.page.conftest import Opened, made, show, violations

CELLS = runs.two_nights()[1].cells
BY_VERDICT = {cell.verdict: cell for cell in CELLS}


def opened_cell(page: Page, id_: str) -> None:
    expect(page.get_by_role("dialog")).to_be_visible()
    expect(page.locator("#cell-title")).to_contain_text(id_)


def test_the_first_screen_answers(tab: Opened, report: Path) -> None:
    page = show(tab, report)
    expect(page.get_by_role("heading", level=1)).to_contain_text("train correctly on this hardware?")
    answers = page.locator(".answers")
    expect(answers).to_contain_text("No. 1 error, 1 regression, 1 fixed upstream need a look")
    expect(answers).to_contain_text("Not known: no image yet.")
    expect(page.locator("#h-failing")).to_have_text("Needs a look (3)")
    changed = page.locator("section", has=page.locator("#h-changed")).last
    expect(changed).to_contain_text("deepspeed 0.17.5 -> 0.17.6")
    expect(changed).to_contain_text(BY_VERDICT[Verdict.REGRESSION].id)
    expect(page.locator("section", has=page.locator("#h-not-run")).last).to_contain_text("needs transformers >=4.51")


def test_every_cell_of_the_grid_has_a_mark_and_a_word(tab: Opened, report: Path) -> None:
    page = show(tab, report)
    links = page.locator(".cells td a")
    assert links.count() == len(CELLS)
    found = {re.sub(r"\s+", " ", words.strip()) for words in links.all_inner_texts()}
    assert {words.partition(" ")[2] for words in found} == {verdict.value for verdict in Verdict}
    assert len({words.partition(" ")[0] for words in found}) == len(Verdict)


def test_a_cell_shows_everything_that_was_measured(tab: Opened, report: Path) -> None:
    cell = next(each for each in CELLS if each.defects == ("zero0-norm",) and each.verdict is Verdict.KNOWN_DEFECT)
    page = show(tab, report, address(cell.id))
    opened_cell(page, cell.id)
    dialog = page.get_by_role("dialog")
    for words in (
        "bf16 at ZeRO-0 reports the gradient norm times the loss scale",
        "Advice: use 0.18.6 or newer",
        "deepspeed 0.17.6",
        cell.command,
        "reference",
        "65536",
    ):
        expect(dialog).to_contain_text(words)
    expect(dialog.get_by_role("link", name="deepspeedai/DeepSpeed#7837")).to_have_attribute(
        "href", "https://github.com/deepspeedai/DeepSpeed/issues/7837"
    )
    rows = dialog.get_by_role("region", name="Checks").locator("tbody tr")
    assert rows.count() == sum(len(step.checks) for step in cell.steps)
    norm = dialog.locator("figure", has_text="reported at each ZeRO stage").first
    expect(norm.locator(".key li")).to_have_text(["ZeRO-0", "ZeRO-1", "ZeRO-2", "ZeRO-3", "reference"])
    # 65536 is seen at a glance: the two lines lie far apart on the axis.
    tops = [norm.locator(f"svg.plot .line{kind}").bounding_box() for kind in (".s0", ".dashed")]
    assert tops[0] is not None and tops[1] is not None and tops[1]["y"] - tops[0]["y"] > 60


def test_a_hung_rank_s_stack_the_log_s_end_and_its_address(tab: Opened, report: Path) -> None:
    cell = next(each for each in CELLS if each.log is not None)
    page = show(tab, report, address(cell.id))
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("line 7 in allreduce")
    expect(dialog).to_contain_text("the last words")
    assert "line 1 of a log" not in dialog.inner_text()
    href = dialog.get_by_role("link", name="the whole log").get_attribute("href")
    assert href is not None and (report / urllib.parse.unquote(href)).read_text() == runs.LOG
    for words in ("expected [96], got [0]", "adapter.py:12 in forward", "out.sum() * 0", "torch 2.13 zips strictly"):
        expect(dialog).to_contain_text(words)


def test_a_cell_that_ran_before_has_its_history(tab: Opened, report: Path) -> None:
    page = show(tab, report, address(BY_VERDICT[Verdict.REGRESSION].id))
    dialog = page.get_by_role("dialog")
    rows = dialog.get_by_role("region", name="History").locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("DeepSpeed 0.17.5")
    expect(rows.last).to_contain_text("regression")
    expect(dialog.locator("figure", has_text="over runs").locator("svg.plot .x")).to_have_text(["run 1", "run 2"])


EXAMPLE = Path(__file__).parents[2] / "docs" / "example"


def test_the_committed_example_of_real_runs_opens(tab: Opened, axe: str) -> None:
    page = show(tab, EXAMPLE, "#cell=cpu/report-a/grpo-lora/zero0-bf16-gas4")
    opened_cell(page, "cpu/report-a/grpo-lora/zero0-bf16-gas4")
    expect(page.get_by_role("dialog")).to_contain_text("bf16 at ZeRO-0 reports the gradient norm times the loss scale")
    assert violations(page, axe) == []
    page.keyboard.press("Escape")
    assert len(page.locator(".cells tbody tr").all()) == 4 * 6  # four jobs on six stacks
    assert violations(page, axe) == []


def test_an_address_opens_its_cell_and_an_unknown_one_says_so(tab: Opened, report: Path) -> None:
    page = show(tab, report, address(CELLS[2].id))
    opened_cell(page, CELLS[2].id)
    page.evaluate("hash => { location.hash = hash }", address(CELLS[1].id))
    opened_cell(page, CELLS[1].id)
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page).to_have_url(re.compile(r"^[^#]*$"))  # the close event comes in a task of its own
    page.evaluate("() => { location.hash = '#cell=nothing' }")
    expect(page.get_by_role("dialog")).to_contain_text("No cell nothing in this report")


def test_the_grid_is_walked_by_keyboard(tab: Opened, report: Path) -> None:
    page = show(tab, report)
    focused = "() => document.activeElement.closest('td') && document.activeElement.hash"
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate(focused):
            break
    else:
        pytest.fail("Tab never reaches the grid")
    first = page.evaluate(focused)
    page.keyboard.press("ArrowRight")
    second = page.evaluate(focused)
    assert second and second != first
    page.keyboard.press("End")
    last = page.evaluate(focused)
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == last
    page.keyboard.press("Home")
    assert page.evaluate(focused) == first
    assert page.locator(".cells td a[tabindex='0']").count() == 1
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    page.wait_for_function(f"first => ({focused})() === first", arg=first)  # focus comes back once it has closed


def test_filter_by_words_and_verdict(tab: Opened, report: Path) -> None:
    page = show(tab, report)
    seen = page.locator(".cells td:not(.out) a:visible")
    page.get_by_label("Search").fill("zero0-norm")
    expect(page.locator("#filter-said")).to_have_text(f"1 of {len(CELLS)} cells")
    expect(seen).to_have_count(1)
    page.get_by_label("Search").fill("")
    expect(seen).to_have_count(len(CELLS))
    page.get_by_role("checkbox", name="known defect").uncheck()
    expect(page.locator("#filter-said")).to_have_text(f"{len(CELLS) - 2} of {len(CELLS)} cells")
    expect(seen.filter(has_text="known defect")).to_have_count(0)


def test_link_and_command_are_copied(tab: Opened, report: Path) -> None:
    cell = CELLS[0]
    page = show(tab, report, address(cell.id))
    page.get_by_role("button", name="Copy command").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("() => navigator.clipboard.readText()") == cell.command
    page.get_by_role("button", name="Copy link").click()
    expect(page.get_by_role("button", name="Copied")).to_have_count(2)
    assert page.evaluate("() => navigator.clipboard.readText()") == page.url
    assert page.url.endswith(address(cell.id))


def test_over_time_every_cell_has_its_strip(tab: Opened, report: Path) -> None:
    page = show(tab, report)
    page.get_by_role("tab", name="Over time").click()
    strips = page.locator("#time-table .marks")
    expect(strips).to_have_count(len(CELLS))
    expect(page.locator("#time-table tbody tr").first).to_contain_text(BY_VERDICT[Verdict.REGRESSION].id)
    expect(strips.first).to_contain_text("2026-11-29 21:00, DeepSpeed 0.17.5: ok, norm x1, 1.3 s, 419 MB")
    page.get_by_label("only cells whose verdict changed").check()
    expect(strips).to_have_count(1)


def test_releases_are_filtered_by_range_case_and_behaviour(tab: Opened, report: Path) -> None:
    page = show(tab, report)
    page.keyboard.press("Tab")
    page.get_by_role("tab", name="Grid").focus()
    page.keyboard.press("End")
    expect(page.get_by_role("tabpanel", name="Compatibility")).to_be_visible()
    deepspeed = page.locator("table.releases").first
    rows, heads = deepspeed.locator("tbody tr:visible"), deepspeed.locator("thead th:visible")
    everything = rows.count()
    page.get_by_label("from").fill("0.18")
    page.get_by_label("to", exact=True).fill("0.18")
    found = rows.locator("th").all_inner_texts()
    assert 0 < len(found) < everything and all(version.startswith("0.18.") for version in found)
    page.get_by_label("case").fill("grpo zero0-bf16-adamw")
    expect(heads).to_have_count(2)
    page.get_by_label("from").fill("")
    page.get_by_label("to", exact=True).fill("")
    of_any_behaviour = rows.count()
    page.get_by_label("behaviour").select_option("ok")
    assert 0 < rows.count() < of_any_behaviour
    for row in rows.all():
        expect(row.locator("td[data-kind=ok]:visible")).not_to_have_count(0)


HOSTILE = (
    "</script><script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "\"'><svg onload=window.hacked=1>",
    "{{ 7*7 }}${7*7}-%22%3E",
)


def test_hostile_names_and_log_lines_are_text(tab: Opened, tmp_path: Path) -> None:
    log = "\n".join(HOSTILE) + "\n\x1b[31mred\x00\x1b[0m ]]> <!-- \u2028 \ud7ff\n"
    record = runs.named([*HOSTILE, "javascript:window.hacked=1"])
    known = record.ledger["zero0-norm"].model_copy(
        update={"title": HOSTILE[0], "advice": HOSTILE[1], "upstream": ("javascript:window.hacked=1", HOSTILE[2])}
    )
    record = record.model_copy(update={"ledger": {"zero0-norm": known}, "command": HOSTILE[0], "commit": HOSTILE[1]})
    page = show(tab, made(tmp_path, record, logs={"a.log": log}))
    for name in HOSTILE:
        id_ = f"cpu/made-up/grpo-lora/{name}"
        page.evaluate("hash => { location.hash = hash }", address(id_))
        opened_cell(page, id_)
        for words in HOSTILE:
            expect(page.locator("pre").last).to_contain_text(words)
    page.keyboard.press("Escape")
    page.get_by_role("tab", name="Over time").click()
    assert page.evaluate("() => window.hacked") is None
    assert page.locator("img, svg[onload], a[href^='javascript']").count() == 0
    assert page.locator("script:not([type])").count() == 1


def test_the_policy_stops_a_script_that_got_in(tab: Opened, report: Path) -> None:
    page = show(tab, report)
    page.evaluate(
        "() => { const script = document.createElement('script'); script.textContent = 'window.hacked = 1';"
        " document.body.append(script);"
        " document.body.insertAdjacentHTML('beforeend', '<b id=evil onclick=\"window.hacked = 2\">');"
        " document.getElementById('evil').click() }"
    )
    page.wait_for_timeout(100)
    assert page.evaluate("() => window.hacked") is None
    assert len(tab.complaints) >= 2 and all("Content Security Policy" in words for words in tab.complaints)
    tab.complaints.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_of_wcag_is_violated(tab: Opened, report: Path, axe: str, scheme: str) -> None:
    tab.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]  # reason: a parameter is a plain str
    page = show(tab, report)
    assert violations(page, axe) == []
    for name in ("Over time", "Compatibility of releases"):
        page.get_by_role("tab", name=name).click()
        assert violations(page, axe) == [], name
    for cell in (BY_VERDICT[Verdict.KNOWN_DEFECT], next(each for each in CELLS if each.log is not None)):
        page.evaluate("hash => { location.hash = hash }", address(cell.id))
        opened_cell(page, cell.id)
        assert violations(page, axe) == [], cell.id


def test_dark_is_dark(tab: Opened, report: Path) -> None:
    brightness = (
        "() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"
    )
    tab.page.emulate_media(color_scheme="dark")
    page = show(tab, report)
    assert page.evaluate(brightness) < 100
    page.emulate_media(color_scheme="light")
    assert page.evaluate(brightness) > 700


def test_a_phone_scrolls_down_only(tab: Opened, report: Path) -> None:
    tab.page.set_viewport_size({"width": 360, "height": 740})
    page = show(tab, report)
    width = "() => document.documentElement.scrollWidth"
    assert page.evaluate(width) == 360
    page.get_by_role("tab", name="Over time").click()
    assert page.evaluate(width) == 360
    page.get_by_role("tab", name="Compatibility").click()
    assert page.evaluate(width) == 360
    page.evaluate("hash => { location.hash = hash }", address(CELLS[0].id))
    opened_cell(page, CELLS[0].id)
    assert page.evaluate("() => document.querySelector('dialog').scrollWidth") <= 360


def test_print_leaves_out_what_only_works_on_a_screen(tab: Opened, report: Path) -> None:
    page = show(tab, report)
    page.emulate_media(media="print")
    expect(page.get_by_label("Search")).to_be_hidden()
    expect(page.locator("table.cells").first).to_be_visible()
    assert len(page.pdf()) > 10_000


MANY = 10_000


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of ten thousand cells, half of them wrong."""
    folder = tmp_path_factory.mktemp("many")
    runrecord.write_run(folder, runs.two_nights()[1])
    data = json.loads((folder / "run.json").read_text())
    cells = [cell for cell in data["cells"] if cell["steps"]]
    fine = next(cell for cell in cells if cell["verdict"] == "ok")
    wrong = next(cell for cell in cells if cell["verdict"] == "known defect")
    stacks = [f"stack{number}" for number in range(6)]
    data["stacks"] = {stack: {"deepspeed": "0.19.8", "transformers": "5.24.0"} for stack in stacks}
    data["cells"] = [
        {**(fine if number % 2 else wrong), "id": f"cpu/{stacks[number % 6]}/job{number % 4}/case-{number // 6}"}
        for number in range(MANY)
    ]
    (folder / "run.json").write_text(json.dumps(data, indent=1))
    return folder


MEASURED = """
import pathlib, re, sys
from ci.__main__ import run
run(sys.argv[1:])
print(int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024, file=sys.stderr)
"""
"""The peak of this process alone: getrusage would begin with that of the tests, which forked it."""


def cost(folder: Path, *words: str) -> tuple[float, float]:
    """CPU seconds and megabytes of `ci report`. Not the clock, which tells of whoever else runs on this machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", MEASURED, "report", *words, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert f"{MANY // 2} known defect" in done.stdout or "report.html" in done.stdout, done.stderr
    return seconds, float(done.stderr.splitlines()[-1])


@pytest.fixture(scope="module")
def cost_of_page(many: Path) -> tuple[float, float]:
    return cost(many, "--format", "html")


def test_ten_thousand_cells_are_reported_within_bounds(many: Path, cost_of_page: tuple[float, float]) -> None:
    """5 s and 400 MB, as a page and in the terminal."""
    for seconds, megabytes in (cost_of_page, cost(many)):
        assert seconds < 5
        assert megabytes < 400


@pytest.mark.usefixtures("cost_of_page")
def test_a_page_of_ten_thousand_cells_is_usable(tab: Opened, many: Path) -> None:
    """Within 3 s of the main thread's CPU time it has been laid out, and answers to a filter and a click."""
    cdp = tab.page.context.new_cdp_session(tab.page)
    cdp.send("Performance.enable", {"timeDomain": "threadTicks"})
    tab.page.set_default_timeout(120_000)
    page = show(tab, many)
    page.get_by_label("Search").fill("stack2 known")
    expect(page.locator("#filter-said")).to_contain_text(f"of {MANY} cells", timeout=120_000)
    page.locator(".cells td:not(.out) a:visible").first.click()
    expect(page.locator("#cell-title")).to_contain_text("cpu/stack2/", timeout=120_000)
    metrics = {each["name"]: each["value"] for each in cdp.send("Performance.getMetrics")["metrics"]}
    # What Playwright itself asks of the page is in this number too.
    assert metrics["TaskDuration"] < 6, metrics


def test_five_hundred_cells_fit_two_megabytes(tmp_path: Path) -> None:
    """All of them wrong, each with a log: 4 KB of its end are in the page."""
    log = "".join(f"{hashlib.sha256(str(line).encode()).hexdigest()[:40]} {line}\n" for line in range(200))
    folder = made(tmp_path, runs.named([f"case-{number}" for number in range(500)]), logs={"a.log": log})
    assert (folder / "report.html").stat().st_size < 2_000_000
