"""Issues of scheduled runs: from run folders to operations, and over HTTP to a server that keeps them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci import issues, shown
from ci.commands import issues as command
from ci.errors import EnvironmentUnavailable, ExitCode, UsageError
from ci.github import GitHub
from ci.issues import Close, Group, History, Issue, Open, Rewrite
from ci.runrecord import CellRecord, RunRecord, Verdict, write_run
from ci.shown import Run
from tests.workflows.github_server import REPOSITORY, Kept, serving

GROUP = "cpu/newest/lora"
PINS = {"deepspeed": "0.19.8", "torch": "2.13.0+cpu"}
URL = "https://github.com/owner/project/actions/runs/7"
WRONG = "step 1 reported_norm: found 65536, expected 1 (error 65535, tolerance 0.001)"


def cell(name: str, verdict: Verdict = Verdict.OK, reason: str | None = None, group: str = GROUP) -> CellRecord:
    backend, stack, job = group.split("/")
    return CellRecord(
        id=f"{group}/{name}",
        stack=stack,
        job=job,
        case={},
        verdict=verdict,
        world_size=2,
        reason=reason or (WRONG if verdict is Verdict.REGRESSION else None),
        command=f"nox -s {backend}-zero -- --stack {stack} --case x={name}",
    )


def run(folder: Path, day: int, *cells: CellRecord, pins: dict[str, str] | None = None, commit: str = "abc") -> Path:
    """The folder of a run on one day of December."""
    path = folder / f"2026120{day}T010000Z-cpu-{len(list(folder.iterdir())):06}"
    path.mkdir()
    record = RunRecord(
        command="x",
        backend="cpu",
        runtime="venv",
        started=f"2026-12-0{day}T01:00:00+00:00",
        commit=commit,
        stacks={"newest": pins or PINS, "stable": PINS},
        cells=cells,
    )
    write_run(path, record)
    return path


def folders(*paths: Path) -> list[Run]:
    return [shown.read(path) for path in paths]


def nights(*each: list[Run]) -> tuple[History, issues.Night]:
    history = History()
    for runs in each:
        tonight = issues.night(runs, URL)
        history = issues.advance(history, tonight)
    return history, tonight


def test_a_regression_has_numbers_both_runs_the_pins_between_and_the_command(tmp_path: Path) -> None:
    newer = {**PINS, "deepspeed": "0.19.9"}
    good = folders(run(tmp_path, 1, cell("a"), cell("b", Verdict.KNOWN_DEFECT)))
    bad = folders(run(tmp_path, 2, cell("a", Verdict.REGRESSION), cell("b"), pins=newer))
    later = folders(run(tmp_path, 3, cell("a", Verdict.REGRESSION), cell("b"), pins=newer))
    (opened,) = issues.operations(*nights(good, bad, later), [])
    assert isinstance(opened, Open)
    assert opened.title == "cpu/newest/lora: 1 regression"
    assert "found 65536, expected 1" in opened.body.replace("\\", "")
    assert "<code>nox -s cpu-zero -- --stack newest --case x=a</code>" in opened.body
    assert "<code>deepspeed 0.19.8 -&gt; 0.19.9</code>." in opened.body and "torch" not in opened.body
    rows = [line for line in opened.body.splitlines() if line.startswith("| ")]
    days = [next(day for day in ("12\\-01", "12\\-02", "12\\-03") if day in row) for row in rows[1:]]
    assert days == ["12\\-01", "12\\-02", "12\\-03"]
    assert opened.body.count(f"(<{URL}>)") == 3


def test_the_same_night_again_asks_for_nothing(tmp_path: Path) -> None:
    bad = folders(run(tmp_path, 2, cell("a", Verdict.ERROR, "it hung")))
    history, tonight = nights(bad)
    (opened,) = issues.operations(history, tonight, [])
    assert isinstance(opened, Open)
    again = issues.advance(history, tonight)
    assert again == history
    # GitHub stores lines as a browser sends them.
    kept = Issue(5, opened.title, opened.body.replace("\n", "\r\n").strip())
    assert issues.operations(again, tonight, [Issue(4, "another", "text"), kept]) == ()


def test_a_second_bad_night_rewrites_and_keeps_the_first_bad_run(tmp_path: Path) -> None:
    first = folders(run(tmp_path, 1, cell("a", Verdict.REGRESSION)))
    history, tonight = nights(first)
    (opened,) = issues.operations(history, tonight, [])
    assert isinstance(opened, Open)
    second = folders(run(tmp_path, 2, cell("a", Verdict.REGRESSION), cell("b", Verdict.FIXED_UPSTREAM)))
    history, tonight = nights(first, second)
    (found,) = issues.operations(history, tonight, [Issue(9, opened.title, opened.body)])
    assert isinstance(found, Rewrite) and found.number == 9
    assert found.title == "cpu/newest/lora: 1 regression, 1 fixed upstream"
    first_bad = history.groups[GROUP].bad
    assert first_bad is not None and first_bad.started.startswith("2026-12-01")
    assert "no good run is recorded" in found.body


def test_a_recovery_closes_with_the_run_that_shows_it(tmp_path: Path) -> None:
    bad = folders(run(tmp_path, 1, cell("a", Verdict.REGRESSION), cell("b")))
    good = folders(run(tmp_path, 2, cell("a"), cell("b")))
    history, tonight = nights(bad, good)
    (closed,) = issues.operations(history, tonight, [Issue(3, "old words", issues._MARKER.format(GROUP))])
    assert isinstance(closed, Close) and closed.number == 3
    assert "2 of 2 cells" in closed.comment and "deepspeed 0.19.8" in closed.comment.replace("\\", "")
    assert history.groups[GROUP] == Group(good=tonight.seen[GROUP])
    assert issues.operations(history, tonight, []) == ()


def test_a_cell_that_did_not_run_again_is_no_recovery(tmp_path: Path) -> None:
    """A lost runner takes the failing shard away; the other shard is right."""
    bad = folders(run(tmp_path, 1, cell("a", Verdict.REGRESSION), cell("b")))
    part = folders(run(tmp_path, 2, cell("a", Verdict.NOT_RUN, "no device"), cell("b")))
    history, tonight = nights(bad, part)
    assert history.groups[GROUP].failing == (f"{GROUP}/a",)
    (found,) = issues.operations(history, tonight, [Issue(3, "x", issues._MARKER.format(GROUP))])
    assert isinstance(found, Rewrite) and found.title.endswith(": 1 not run again")
    nothing = folders(run(tmp_path, 3, cell("x", group="cpu/stable/lora")))
    history, tonight = nights(bad, nothing)
    assert issues.operations(history, tonight, [Issue(3, "x", issues._MARKER.format(GROUP))]) == ()


def test_groups_are_jobs_of_stacks_and_shards_are_one_night(tmp_path: Path) -> None:
    one = run(tmp_path, 1, cell("a", Verdict.REGRESSION), cell("c", group="cpu/stable/lora"))
    other = run(tmp_path, 1, cell("b", Verdict.REGRESSION), cell("d", Verdict.REGRESSION, group="cpu/newest/moe"))
    found = issues.operations(*nights(folders(other, one)), [])
    assert [each.title for each in found if isinstance(each, Open)] == [
        "cpu/newest/lora: 2 regression",
        "cpu/newest/moe: 1 regression",
    ]


def test_a_hundred_failing_cells_fit_one_issue_and_markup_stays_text(tmp_path: Path) -> None:
    bad = [cell(f"c{i}", Verdict.ERROR, f"<script>`|@someone {'x' * 9000}") for i in range(100)]
    (opened,) = issues.operations(*nights(folders(run(tmp_path, 1, *bad))), [])
    assert isinstance(opened, Open) and len(opened.body) < 65_536
    assert "And 80 more" in opened.body and "<script>" not in opened.body and "\\@someone" in opened.body


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kept]:
    with serving() as kept:
        for name, value in kept.environment.items():
            monkeypatch.setenv(name, value)
        yield kept


def test_opened_rewritten_and_closed_over_http(tmp_path: Path, server: Kept) -> None:
    history = tmp_path / "history" / "history.json"
    history.parent.mkdir()
    runs = tmp_path / "runs"
    runs.mkdir()

    def record(*paths: Path) -> None:
        assert command.main([str(path) for path in paths], history=history, apply=True) == ExitCode.OK

    record(run(runs, 1, cell("a"), cell("b")))
    assert server.issues == [] and server.changes == []
    bad = run(runs, 2, cell("a", Verdict.REGRESSION), cell("b"), pins={**PINS, "deepspeed": "0.19.9"})
    record(bad)
    record(bad)
    assert len(server.open) == len(server.changes) == 1
    assert server.open[0]["labels"] == [{"name": issues.LABEL}]
    assert "0.19.8 -&gt; 0.19.9" in server.open[0]["body"]
    record(run(runs, 3, cell("a", Verdict.REGRESSION), cell("b", Verdict.REGRESSION)))
    assert [each["title"] for each in server.open] == ["cpu/newest/lora: 2 regression"]
    well = run(runs, 4, cell("a"), cell("b"))
    record(well)
    record(well)
    assert server.open == [] and server.issues[0]["state_reason"] == "completed"
    assert len(server.comments[1]) == 1 and len(server.changes) == 4
    record(run(runs, 5, cell("a", Verdict.REGRESSION), cell("b")))
    assert [each["number"] for each in server.open] == [2]


def test_issues_on_every_page_are_seen_and_those_without_our_label_are_not(tmp_path: Path, server: Kept) -> None:
    names = [f"cpu/newest/job{i}" for i in range(5)]
    bad = run(tmp_path, 1, *(cell("a", Verdict.REGRESSION, group=name) for name in names))
    for _ in range(2):
        command.main([str(bad)], history=tmp_path / "history.json", apply=True)
    assert len(server.open) == 5
    server.issues[0]["labels"] = []
    command.main([str(bad)], history=tmp_path / "history.json", apply=True)
    assert len(server.open) == 6


def test_without_apply_nothing_is_asked_or_written(
    tmp_path: Path, server: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = run(tmp_path, 1, cell("a", Verdict.REGRESSION))
    assert command.main([str(bad)], history=tmp_path / "history.json", apply=False) == ExitCode.OK
    assert "cpu/newest/lora: 1 regression" in capsys.readouterr().out
    assert server.asked == [] and not (tmp_path / "history.json").exists()


def test_what_may_be_asked_twice_is_and_a_new_issue_is_not(
    tmp_path: Path, server: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    server.busy = {"GET": [503, 502], "POST": [503]}
    assert GitHub().open_issues() == ()
    with pytest.raises(EnvironmentUnavailable, match=r"POST .*503 busy"):
        GitHub().apply(Open("t", "b"))
    assert server.issues == []


def test_an_issue_that_could_not_be_written_is_asked_for_again(tmp_path: Path, server: Kept) -> None:
    bad = run(tmp_path, 1, cell("a", Verdict.REGRESSION))
    history = tmp_path / "history.json"
    server.busy = {"POST": [500]}
    with pytest.raises(EnvironmentUnavailable, match="500 busy"):
        command.main([str(bad)], history=history, apply=True)
    assert not history.exists()
    command.main([str(bad)], history=history, apply=True)
    assert len(server.open) == 1 and history.exists()


def test_a_refusal_says_what_was_asked_and_what_decides_it(server: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentUnavailable, match="401 Bad credentials; the job's `permissions` decide"):
        GitHub({**server.environment, "GITHUB_TOKEN": "wrong"}).open_issues()
    with pytest.raises(UsageError, match="GITHUB_TOKEN not set: expected a job of a workflow"):
        GitHub({"GITHUB_REPOSITORY": REPOSITORY})
    with pytest.raises(EnvironmentUnavailable, match=r"GitHub: POST http://127\.0\.0\.1:9/"):
        GitHub({**server.environment, "GITHUB_API_URL": "http://127.0.0.1:9"}).apply(Open("t", "b"))


def test_a_branch_has_one_pull_request(server: Kept) -> None:
    github = GitHub()
    first = github.propose("pins", "main", "one", "text", draft=True)
    assert github.propose("pins", "main", "two", "more", draft=False) == first
    assert [(each["title"], each["body"], each["draft"]) for each in server.pulls] == [("two", "more", True)]
    github.propose("other", "main", "three", "", draft=False)
    server.pulls[0]["state"] = "closed"
    assert github.propose("pins", "main", "four", "", draft=False) != first


def test_a_history_that_is_none_is_answered(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    assert issues.read(path) == History()
    path.write_text('{"groups": 3}')
    with pytest.raises(UsageError, match="expected what `python -m ci issues` wrote"):
        issues.read(path)
