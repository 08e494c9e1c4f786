"""survey.json and the page made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci import survey
from ci.errors import UsageError
from ci.matrix import load
from ci.probe import Failing, Kind, Outcome
from ci.runrecord import Verdict
from ci.survey import Row, Survey, SurveyedCase, completed, described, page, read, row_of, stretches, text, touching

DOCS = Path(__file__).parents[2] / "docs"
CASES = (
    SurveyedCase(id="fp16-optimizers/fp16-engine", job="fp16-optimizers"),
    SurveyedCase(id="grpo-lora/zero0-bf16", job="grpo-lora"),
    SurveyedCase(id="grpo-lora/zero3-bf16", job="grpo-lora"),
)
OK = Outcome(kind=Kind.PASSES, verdict=Verdict.OK)


def wrong(check: str, *factors: float | str | None, verdict: Verdict = Verdict.KNOWN_DEFECT) -> Outcome:
    return Outcome(kind=Kind.WRONG, failing=(Failing(check=check, factors=factors),), verdict=verdict)


TIMES = wrong("reported_norm", 65500.0, 65500.0, 65500.0)
RAISES = Outcome(kind=Kind.RAISES, exception="RuntimeError: a | b < #", verdict=Verdict.REGRESSION)
NOT_IMPORTED = Outcome(kind=Kind.NOT_IMPORTED, why="ImportError: cannot import name 'log'")


def made_up() -> Survey:
    def row(version: str, *outcomes: Outcome) -> Row:
        return row_of(version, {}, {case.id: outcome for case, outcome in zip(CASES, outcomes, strict=True)})

    rows = (
        row("0.14.4", NOT_IMPORTED, NOT_IMPORTED, NOT_IMPORTED),
        row("0.17.5", OK, OK, OK),
        row("0.17.6", OK, TIMES, OK),
        row("0.18.0", OK, TIMES, RAISES),
        row("0.18.6", OK, OK, RAISES),
    )
    pins = {"torch": "2.13.0+cpu", "transformers": "4.57.6"}
    return Survey(package="deepspeed", stack="stable", date="2026-12-01", pins=pins, cases=CASES, rows=rows)


@pytest.mark.parametrize(
    ("outcome", "says"),
    [
        (OK, "ok"),
        (TIMES, "known: norm x65500"),
        (wrong("reported_norm", None, 1.51, 1.75), "known: norm x1.51 1.75 in step 2 3"),
        (wrong("gradient_used", 0.5, verdict=Verdict.REGRESSION), "regression: gradient x0.5"),
        (wrong("gradient_used", None, "differs"), "known: gradient differs in step 2"),
        (wrong("reported_norm", "none", "none"), "known: norm none"),
        (wrong("update", "differs", None), "known: update in step 1"),
        (RAISES, "regression: raises RuntimeError: a | b < #"),
        (OK.model_copy(update={"verdict": Verdict.FIXED_UPSTREAM}), "fixed upstream: every check holds"),
        (NOT_IMPORTED, "cannot be imported: ImportError: cannot import name 'log'"),
        (Outcome(kind=Kind.COULD_NOT_RUN, why="killed", verdict=Verdict.ERROR), "could not run: killed"),
    ],
)
def test_a_cell_says_the_verdict_and_the_factor(outcome: Outcome, says: str) -> None:
    assert described(outcome) == says


def test_releases_that_behave_alike_are_one_stretch_and_unusable_ones_are_passed_over() -> None:
    made = made_up()
    assert stretches(made, "grpo-lora/zero0-bf16") == [
        "0.17.5 ok",
        "0.17.6 - 0.18.0 known: norm x65500",
        "0.18.6 ok",
    ]
    assert stretches(made, "fp16-optimizers/fp16-engine") == ["0.17.5 - 0.18.6 ok"]


def test_the_page_has_releases_down_cases_across_and_reasons() -> None:
    lines = page([made_up()]).splitlines()
    assert "5 releases, 2026-12-01, on stack stable: torch 2.13.0+cpu, transformers 4.57.6." in lines
    assert "| release | `zero0-bf16` | `zero3-bf16` |" in lines
    assert "| 0.14.4 | cannot be imported: ImportError: cannot import name 'log' |  |" in lines
    assert "| 0.17.6 | known: norm x65500 | ok |" in lines
    assert "| 0.18.0 | known: norm x65500 | regression: raises RuntimeError |" in lines
    assert [line for line in lines if line.startswith("### ")] == [
        "### deepspeed: fp16-optimizers",
        "### deepspeed: grpo-lora",
    ]
    assert any(line.endswith("0.18.0 - 0.18.6 regression: raises RuntimeError: a \\| b &lt; #") for line in lines)


def test_every_row_of_a_table_has_as_many_cells_as_its_head() -> None:
    table: list[int] = []
    for line in page([made_up()]).splitlines():
        if line.startswith("|"):
            table.append(line.replace("\\|", "").count("|"))
        elif table:
            assert len(set(table)) == 1
            table = []


def test_packages_that_came_along_are_named() -> None:
    made = made_up()
    row = made.rows[1].model_copy(update={"changed": {"tokenizers": "0.20.3"}})
    assert "it has them: tokenizers." in page([made.model_copy(update={"rows": (row,)})])


def test_the_file_has_a_release_a_line_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "survey.json"
    path.write_text(text(made_up()), encoding="utf-8")
    assert read(path) == made_up()
    assert sum(line.startswith('{"version"') for line in path.read_text().splitlines()) == 5


def test_rows_of_an_earlier_survey_are_kept_where_it_asked_the_same() -> None:
    made, fresh = made_up(), made_up().model_copy(update={"rows": ()})
    again = row_of("0.18.10", {}, {case.id: OK for case in CASES})
    merged = fresh.with_rows(made.rows_for(fresh)).with_rows([again, made.rows[0]])
    assert [row.version for row in merged.rows] == ["0.14.4", "0.17.5", "0.17.6", "0.18.0", "0.18.6", "0.18.10"]
    assert made.rows_for(fresh.model_copy(update={"pins": {"torch": "2.14.0"}})) == ()


def test_a_part_that_was_measured_again_keeps_the_rest_of_the_committed_file(tmp_path: Path) -> None:
    committed = tmp_path / "survey.json"
    committed.write_text(text(made_up()), encoding="utf-8")
    again = row_of(made_up().rows[0].version, {"tokenizers": "0.20.3"}, {case.id: OK for case in CASES})
    part = made_up().model_copy(update={"rows": (again,)})
    assert completed(part, committed).rows == (again, *made_up().rows[1:])
    assert completed(part, tmp_path / "absent.json") == part
    elsewhere = part.model_copy(update={"pins": {"torch": "2.14.0"}})
    assert completed(elsewhere, committed) == elsewhere


def test_a_file_that_is_none_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "survey.json"
    path.write_text('{"schema": 1, "package": "deepspeed"}')
    with pytest.raises(UsageError, match=r"survey\.json: field stack: Field required"):
        read(path)


def test_only_jobs_that_ask_for_a_package_are_surveyed() -> None:
    matrix = load()
    jobs = {name: matrix.jobs[name] for name in matrix.lanes["survey"].cases}
    assert touching("deepspeed", jobs) == {"fp16-optimizers", "grpo-lora", "zero3-custom-adapter"}
    assert touching("transformers", jobs) == {"grpo-lora", "zero3-custom-adapter"}


def test_the_lane_needs_no_trainer() -> None:
    for patterns in load().lanes["survey"].cases.values():
        assert all(pattern.get("trainer", "engine") == "engine" for pattern in patterns)


def test_the_committed_page_is_what_the_committed_surveys_say() -> None:
    surveys = [survey.read(path) for path in sorted(DOCS.glob("survey-*.json"))]
    if surveys:
        assert (DOCS / "compatibility.md").read_text(encoding="utf-8") == page(surveys)
