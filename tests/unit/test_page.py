"""What the page is made of, without a browser: runs merged, words, packing, plots, Markdown, badges, bad input."""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.request
import xml.etree.ElementTree as ElementTree
import zlib
from pathlib import Path

import pytest

from ci import runrecord, shown
from ci.commands import report as report_command
from ci.errors import EnvironmentUnavailable, UsageError
from ci.matrix import load
from ci.page import answer, badge, grid, plots, summary
from ci.page.build import address, web
from ci.page.history import History, merge, ordered
from ci.page.packed import BLOCK, Blocks
from ci.page.plots import Series
from ci.page.publish import publish, publish_beside
from ci.page.serve import server
from ci.runrecord import RunRecord, Verdict
from tests.page import runs


def written(folder: Path, *records: RunRecord) -> list[Path]:
    folders = []
    for number, each in enumerate(records):
        run = folder / f"2026120{number + 1}T000000Z-cpu-abc"
        run.mkdir()
        runrecord.write_run(run, each)
        folders.append(run)
    return folders


def history(folder: Path, *records: RunRecord) -> History:
    return merge(ordered(shown.read(each) for each in written(folder, *records)), lambda *_: None)


def test_the_page_reads_fields_that_run_json_has() -> None:
    pairs = (
        (shown.Cell, runrecord.CellRecord),
        (shown.Past, runrecord.CellRecord),
        (shown.Judged, runrecord.CellRecord),
        (shown.Step, runrecord.StepRecord),
        (shown.Check, runrecord.Check),
        (shown.PastCheck, runrecord.Check),
        (shown.Known, runrecord.DefectSummary),
    )
    for mine, theirs in pairs:
        assert set(mine.__struct_fields__) <= set(theirs.model_fields), mine
    assert set(shown.Head.__struct_fields__) - {"schema"} <= set(RunRecord.model_fields)


def test_runs_are_one_history_whatever_their_order(tmp_path: Path) -> None:
    earlier, now = runs.two_nights()
    found = history(tmp_path, now, earlier)
    assert [run.head.started for run in found.runs] == [earlier.started, now.started]
    assert {entry.id: entry.verdict for entry in found.entries} == {cell.id: cell.verdict for cell in now.cells}
    changed = answer.changed(found)
    assert [(entry.before and entry.before.verdict, entry.verdict) for entry in changed] == [
        (Verdict.OK, Verdict.REGRESSION)
    ]
    assert answer.pins_changed(found) == ("cpu/made-up: deepspeed 0.17.5 -> 0.17.6",)
    corrected = next(entry for entry in found.entries if entry.verdict is Verdict.CORRECTED)
    assert [point.run for point in corrected.points] == [1]


def test_a_cell_that_only_an_older_run_planned_stays(tmp_path: Path) -> None:
    earlier, now = runs.two_nights()
    found = history(tmp_path, earlier, now.model_copy(update={"cells": now.cells[:2]}))
    assert {entry.id for entry in found.entries} == {cell.id for cell in (*earlier.cells, *now.cells[:2])}


def test_backends_stand_side_by_side_and_only_those_never_run_are_unknown(tmp_path: Path) -> None:
    """As they will: the same cells of another backend, in a run of its own."""
    run = runs.two_nights()[1]
    cells = [
        cell.model_copy(update={"id": cell.id.replace("cpu/", "npu/"), "verdict": Verdict.OK, "reason": None})
        for cell in run.cells
    ]
    other = run.model_copy(update={"backend": "npu", "cells": tuple(cells), "unavailable": {}})
    found = history(tmp_path, run, other)
    assert [(each.backend, each.word) for each in answer.answers(found)] == [("cpu", "no"), ("npu", "yes")]
    assert answer.changed(found) == ()
    table = grid.grids(found)[0]
    assert [row.backend for row in table.rows] == ["cpu", "npu"]
    assert all(None not in row.cells for row in table.rows)


def test_the_ratio_is_that_of_the_step_furthest_from_one() -> None:
    def step(value: shown.Number, expected: shown.Number) -> shown.PastStep:
        return shown.PastStep((shown.PastCheck("forward", 9.0, 1.0), shown.PastCheck("reported_norm", value, expected)))

    assert shown.norm_ratio([step(2.0, 1.0), step(0.125, 1.0), step("nan", 1.0), step(None, 1.0)]) == 0.125
    assert shown.norm_ratio([step("inf", 1.0), step(1.0, 0.0)]) is None


@pytest.mark.parametrize(
    ("verdicts", "word", "sentence"),
    [
        ([Verdict.OK, Verdict.NOT_RUN], "yes", "Yes. All 1 cells are right."),
        ([Verdict.OK, Verdict.CORRECTED], "yes", "Yes. All 2 cells are right, 1 of them with a correction."),
        ([Verdict.OK, Verdict.KNOWN_DEFECT], "partly", "Where its known defects do not matter. 1 of 2 cells are right"),
        ([Verdict.REGRESSION, Verdict.KNOWN_DEFECT], "no", "No. 1 regression need a look"),
        ([Verdict.NOT_RUN], "unknown", "Not known. No cell could run"),
    ],
)
def test_one_sentence_answers(tmp_path: Path, verdicts: list[Verdict], word: str, sentence: str) -> None:
    run = runs.two_nights()[1]
    cells = [cell.model_copy(update={"verdict": verdict}) for cell, verdict in zip(run.cells, verdicts, strict=False)]
    found = answer.answers(history(tmp_path, run.model_copy(update={"cells": tuple(cells)})))
    assert [each.backend for each in found] == ["cpu", "npu"]
    assert found[0].word == word and found[0].sentence.startswith(sentence)
    assert found[1].word == "unknown" and found[1].sentence == f"Not known: {run.unavailable['npu']}."


def test_what_is_packed_unpacks_block_by_block() -> None:
    blocks = Blocks()
    numbers = [blocks.add(json.dumps({"n": n, "text": "</script>"}).encode()) for n in range(BLOCK + 3)]
    blocks.flush()
    assert all("<" not in block for block in blocks.blocks)
    unpacked = [json.loads(zlib.decompress(base64.b64decode(block))) for block in blocks.blocks]
    assert [unpacked[n // BLOCK][n % BLOCK]["n"] for n in numbers] == numbers


def test_a_plot_is_the_same_bytes_again_and_says_what_its_axis_cannot_show() -> None:
    series = [Series("ZeRO-0", (65536.0, None, "inf")), Series("reference", (1.0, 0.0, 1.0), dashed=True)]
    found, again = plots.draw("a title", series), plots.draw("a title", series)
    assert found == again and found is not None
    assert found.missing == ("ZeRO-0: None in step 2", "ZeRO-0: inf in step 3", "reference: 0 in step 2")
    assert len(found.svg) < 2048 and "style" not in found.svg and "script" not in found.svg
    ElementTree.fromstring(found.svg)
    assert plots.draw("nothing", [Series("none", (None, "nan", -1.0))]) is None


def test_noise_does_not_look_like_a_step() -> None:
    drawn = plots.draw("flat", [Series("a", (1.0, 1.001))])
    assert drawn is not None
    line = re.search(r'd="M[\d.]+,([\d.]+) L[\d.]+,([\d.]+)" class="line', drawn.svg)
    assert line is not None and abs(float(line[1]) - float(line[2])) < 1


def test_markdown_has_no_markup_but_ours_and_keeps_its_limit(tmp_path: Path) -> None:
    hostile = "a|b <img src=x onerror=alert(1)> [x](javascript:1) `code` **bold**\n## title"
    run = runs.two_nights()[1]
    cells = tuple(cell.model_copy(update={"reason": hostile, "command": "`x` </code>|"}) for cell in run.cells)
    known = next(iter(run.ledger.values())).model_copy(update={"title": hostile, "upstream": ("javascript:1",)})
    found = history(tmp_path, run.model_copy(update={"cells": cells, "ledger": dict.fromkeys(run.ledger, known)}))
    text = summary.markdown(found)
    assert "<img" not in text and "\n## title" not in text and "](javascript" not in text and "<javascript" not in text
    assert set(re.findall(r"</?(\w+)", text)) == {"details", "summary", "code"}
    for line in text.splitlines():
        if line.startswith("|") and "---" not in line:
            assert len(re.findall(r"(?<!\\)\|", line)) in (4, 5), line
    for limit in (600, 1500, len(text.encode()) - 1):
        short = summary.markdown(found, limit)
        assert len(short.encode()) <= limit + 40
        assert short.count("<details>") == short.count("</details>")
        assert "did not fit" in short


def test_the_readme_shows_the_badge_of_each_backend() -> None:
    root = Path(__file__).parents[2]
    shown = re.findall(r"raw/status/(badge-[a-z]+\.svg)", (root / "README.md").read_text(encoding="utf-8"))
    assert shown == [f"badge-{backend}.svg" for backend in load(root / "matrix.yaml").backends]


def test_a_badge_says_the_answer(tmp_path: Path) -> None:
    found = badge.badges(history(tmp_path, runs.two_nights()[1]))
    assert set(found) == {"badge-cpu.svg", "badge-npu.svg"}
    assert ">fails<" in found["badge-cpu.svg"] and ">not known<" in found["badge-npu.svg"]
    for svg in found.values():
        ElementTree.fromstring(svg)


def test_a_run_is_compared_with_the_newest_earlier_one_beside_it(tmp_path: Path) -> None:
    first, second = written(tmp_path, *runs.two_nights())
    (tmp_path / "20261201T120000Z-cpu-bad").mkdir()
    (tmp_path / "20261201T120000Z-cpu-bad" / "run.json").write_text("{")
    assert len(publish_beside(second).runs) == 2
    assert len(publish_beside(first).runs) == 1
    assert {path.name for path in second.iterdir()} == {
        *("run.json", "report.html", "summary.md", "badge-cpu.svg", "badge-npu.svg"),
    }


def test_the_same_runs_make_the_same_page(tmp_path: Path) -> None:
    folders = written(tmp_path, *runs.two_nights())
    publish(folders, tmp_path / "a")
    publish(reversed_ := folders[::-1], tmp_path / "b")
    assert reversed_ != folders
    assert (tmp_path / "a" / "report.html").read_bytes() == (tmp_path / "b" / "report.html").read_bytes()


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"schema": 2}', b"\xff\xfe", '{"cells": [1]}', '{"cells": [{"id": "a"}]}'],
)
def test_bad_input_is_answered_with_its_file(tmp_path: Path, content: str | bytes) -> None:
    run = runs.two_nights()[1]
    runrecord.write_run(tmp_path, run)
    path = tmp_path / "run.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content.startswith('{"cells'):
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, **json.loads(content)}))
    else:
        path.write_text(content)
    with pytest.raises(UsageError, match=re.escape(str(path))):
        report_command.main([str(tmp_path)], "html")


def test_log_files_are_looked_for_in_the_run_only(tmp_path: Path) -> None:
    run = runs.two_nights()[1]
    (tmp_path / "secret").write_text("outside")
    cells = tuple(cell.model_copy(update={"log": "../secret"}) for cell in run.cells)
    folder = written(tmp_path, run.model_copy(update={"cells": cells}))[0]
    publish([folder], folder)
    blocks = re.findall(r'class="cells-packed">([^<]*)<', (folder / "report.html").read_text())
    details = [each for block in blocks for each in json.loads(zlib.decompress(base64.b64decode(block)))]
    assert len(details) == len(cells) and not any("tail" in each or "log" in each for each in details)


def test_addresses() -> None:
    assert address("cpu/a/b/zero0-bf16+corrected") == "#cell=cpu/a/b/zero0-bf16+corrected"
    assert address('"><b>%') == "#cell=%22%3E%3Cb%3E%25"
    assert web("a/b#1") == "https://github.com/a/b/issues/1"
    assert web("javascript:alert(1)") is None


def test_the_page_is_served_to_this_machine_with_its_logs(tmp_path: Path) -> None:
    folder = written(tmp_path, runs.two_nights()[1])[0]
    (folder / "logs").mkdir()
    (folder / "logs" / "crash.log").write_text("words")
    publish([folder], folder)
    found, url = server(folder / "report.html", [folder], 0)
    with found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url) as response:
            assert b"train correctly" in response.read()
        with urllib.request.urlopen(url.replace("report.html", "logs/crash.log")) as response:
            assert response.read() == b"words"
        with pytest.raises(EnvironmentUnavailable, match="leave it out"):
            server(folder / "report.html", [folder], found.server_address[1])
        found.shutdown()
