"""Every trigger of the workflows: what runs, what it leaves, and that what is not right is not green."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from ci.provision.container import OWNER
from tests.workflows.acting import HOSTED, Outcome, Project
from tests.workflows.github_server import REPOSITORY, TOKEN, Kept, serving

ONE = {"zero_stage": 0, "dtype": "bf16", "gradient_accumulation_steps": 1}
"""Report A's own case, with the engine: only AdamW's dummy step is left of it on `newest`, a known defect."""
ONLY = {"grpo-lora": [{**ONE, "optimizer": "adamw"}]}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.copied(tmp_path)


def only(cases: dict[str, Any], *stacks: str) -> Any:
    """A change of the matrix: the night has nothing but these cases."""

    def change(matrix: Any) -> None:
        matrix["lanes"]["nightly"] = {"stacks": [*stacks], "cases": cases}

    return change


def forget(matrix: Any) -> None:
    """A change of the matrix: a ledger that has nothing about AdamW's dummy step, which is a regression then."""
    matrix["defects"] = [each for each in matrix["defects"] if not each["id"].startswith("unfused-dummy-step")]


def test_a_pull_request_runs_its_lane_in_the_image(project: Project) -> None:
    outcome = project.act("pull_request", "pull-request.yml", "--job", "cpu")
    assert outcome.passed, outcome.said
    assert set(outcome.left) == {"results-cpu-pull-request-newest"}
    (run,) = outcome.runs()
    assert (run["backend"], run["runtime"]) == ("cpu", "docker")
    assert len(run["cells"]) > 50 and set(outcome.verdicts()) == {"ok", "known defect"}
    assert "Does this pin of DeepSpeed and transformers train correctly on this hardware?" in outcome.said
    (folder,) = outcome.left["results-cpu-pull-request-newest"].iterdir()
    assert {"report.html", "summary.md", "evidence.jsonl", "plan.json", "junit.xml"} <= {
        file.name for file in folder.rglob("*")
    }


def test_by_hand_only_what_was_asked_for_runs(project: Project) -> None:
    inputs = {"backend": "cpu", "lane": "pull-request", "stack": "newest", "job": "grpo-lora"}
    inputs["case"] = "zero_stage=0,dtype=bf16,trainer=engine"
    outcome = project.act("workflow_dispatch", "nightly.yml", payload={"inputs": inputs})
    assert outcome.passed, outcome.said
    cells = [cell for run in outcome.runs() for cell in run["cells"]]
    assert cells and all(cell["id"].startswith("cpu/newest/grpo-lora/zero0-bf16") for cell in cells)
    assert "issues and badges" not in outcome.said, "by hand nothing is recorded"


def test_a_night_with_a_failing_cell_is_red_and_opens_an_issue_that_a_good_night_closes(
    project: Project, tmp_path: Path
) -> None:
    bare = tmp_path / "server" / f"{REPOSITORY}.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(bare)], check=True, timeout=60)
    with serving() as kept:
        night(project, kept, bare)
        project.change_matrix(only(ONLY, "newest"))
        good_matrix = (project.root / "matrix.yaml").read_text()

        project.change_matrix(forget)
        bad = project.act("schedule", "nightly.yml")
        assert bad.code != 0 and bad.verdicts() == ["regression"], bad.said
        assert "results-cpu-nightly-newest" in bad.left, "what was measured is kept"
        recorded = project.act("schedule", project.alone("nightly.yml", "record"), anew=False)
        assert recorded.passed, recorded.said
        (issue,) = kept.open
        assert issue["title"] == "cpu/newest/grpo-lora: 1 regression"
        assert "nox -s cpu-zero" in issue["body"]
        assert "regression" in on_status(bare, "README.md")
        assert ">fails<" in on_status(bare, "badge-cpu.svg")

        (project.root / "matrix.yaml").write_text(good_matrix)
        project.commit("the ledger knows it")
        good = project.act("schedule", "nightly.yml")
        assert good.passed and good.verdicts() == ["known defect"], good.said
        assert kept.open == [] and "1 of 1 cells are as they should be" in kept.comments[issue["number"]][0]
        assert ">fails<" not in on_status(bare, "badge-cpu.svg")


def night(project: Project, kept: Kept, bare: Path) -> None:
    """GitHub stands on loopback, its repository in a folder."""
    project.token = TOKEN
    project.environment |= {
        "GITHUB_API_URL": kept.url,
        "GITHUB_REPOSITORY": REPOSITORY,
        "GITHUB_SERVER_URL": f"file://{bare.parents[1]}",
    }


def on_status(bare: Path, name: str) -> str:
    command = ["git", "-C", str(bare), "show", f"status:{name}"]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=60).stdout


def test_a_lost_container_is_red_and_keeps_what_was_measured(project: Project) -> None:
    project.change_matrix(only({"grpo-lora": [{"zero_stage": [0, 2, 3], "dtype": ["bf16", "fp32"]}]}, "newest"))
    with KillingTheContainerOf(project) as killed:
        outcome = project.act("schedule", "nightly.yml", "--job", "lane")
    assert killed == [True], outcome.said
    assert outcome.code != 0 and "error" in outcome.verdicts(), outcome.said


class KillingTheContainerOf:
    """Removes the container of a run once it has measured something. killed: whether there was one."""

    def __init__(self, project: Project) -> None:
        self._scratch = project.root.parent
        self._client = docker.from_env()
        self._ended = threading.Event()
        self._killed: list[bool] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> list[bool]:
        self._thread.start()
        return self._killed

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._client.close()

    def _watch(self) -> None:
        deadline = time.monotonic() + 300
        while not self._ended.wait(0.05) and time.monotonic() < deadline:
            for found in self._client.containers.list(filters={"label": OWNER}, ignore_removed=True):
                mounts = [Path(mount.get("Source", "/")) for mount in found.attrs["Mounts"]]
                here = [mount for mount in mounts if mount.is_relative_to(self._scratch)]
                if any(line for mount in here for line in _evidence(mount)):
                    found.kill()
                    self._killed.append(True)
                    return


def _evidence(folder: Path) -> Iterator[str]:
    for file in folder.rglob("evidence.jsonl"):
        yield from file.read_text(errors="replace").splitlines()


def test_jobs_that_left_nothing_are_told_and_no_success(project: Project) -> None:
    def two_shards(matrix: Any) -> None:
        only({"grpo-lora": [{**ONE, "trainer": "engine", "optimizer": ["sgd", "adamw"]}]}, "newest")(matrix)
        matrix["runners"]["cpu"]["shard_minutes"] = 1

    # Two cases of 45 s, as far as is known.
    (project.root / "ci" / "durations.json").write_text('{"seconds": {"grpo-lora": {"any": 45}}}')
    project.change_matrix(two_shards)
    lane = project.root / ".github" / "workflows" / "lane.yml"
    # The second job of the night ends without a word, as one does whose runner is gone.
    for step in (
        "- run: | # exec:",
        "- if: always()\n        uses: actions/upload",
    ):
        text = lane.read_text()
        assert step in text
        word = "if: matrix.shard != '2/2'"
        changed = step.replace("- run:", f"- {word}\n        run:").replace("- if: always()", f"- {word}")
        lane.write_text(text.replace(step, changed, 1))
    project.commit("a runner that is lost")
    outcome = project.act("schedule", "nightly.yml", "--job", "lane")
    assert "**1 of 2 jobs left no results**" in outcome.said, outcome.said
    assert outcome.code != 0 and not outcome.passed_over
    assert set(outcome.left) == {"results-cpu-nightly-newest-1-of-2", "report-cpu-nightly"}, (
        "what there is has its page"
    )


def test_a_strangers_code_runs_on_no_runner_of_ours(project: Project) -> None:
    def ours(matrix: Any) -> None:
        matrix["runners"]["cpu"]["labels"] = ["self-hosted", "ours"]

    project.change_matrix(ours)
    project.known = (HOSTED, "self-hosted", "ours")
    fork = {"pull_request": {"head": {"repo": {"fork": True, "full_name": "stranger/project"}}}}
    outcome = project.act("pull_request", "pull-request.yml", "--job", "cpu", payload=fork)
    assert outcome.code != 0 and "self-hosted" in outcome.said
    assert outcome.left == {} and "cpu-zero" not in outcome.said, outcome.said


def test_a_label_without_a_runner_is_no_success(project: Project) -> None:
    project.known = ("somewhere-else",)
    outcome: Outcome = project.act("pull_request", "pull-request.yml", "--job", "cpu")
    assert outcome.passed_over and not outcome.passed
    assert outcome.left == {}
