"""A run's evidence as a fault may leave it: judged where it is whole, the line named where it is not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ci.runrecord import RunRecord, read_run
from tests.faults.project import Ended, Project

Lines = list[str]


@pytest.fixture(scope="module")
def whole(project: Project) -> Ended:
    """A run of two good cases and one without its work done."""
    return project.run("well", "early", "after", limit_s=60)


def cut_in_mid_line(lines: Lines) -> str:
    return "\n".join(lines)[: -len(lines[-1]) // 2]


def cut_in_the_middle_of_the_file(lines: Lines) -> str:
    return lines[0] + "\n" + lines[1][: len(lines[1]) // 2] + "\n" + lines[2] + "\n"


def doubled(lines: Lines) -> str:
    return "".join(f"{line}\n" for line in [*lines, *lines])


def out_of_order(lines: Lines) -> str:
    return "".join(f"{line}\n" for line in reversed(lines))


def emptied(lines: Lines) -> str:
    return ""


def steps_out_of_order(lines: Lines) -> str:
    changed = json.loads(lines[0])
    changed["steps"].reverse()
    return "\n".join([json.dumps(changed), *lines[1:]]) + "\n"


@pytest.mark.parametrize(
    ("damage", "verdicts", "incomplete"),
    [
        (cut_in_mid_line, ["ok", "error", "error"], 1),
        (cut_in_the_middle_of_the_file, ["ok", "error", "ok"], 1),
        (doubled, ["ok", "error", "ok"], 0),
        (out_of_order, ["ok", "error", "ok"], 0),
        (emptied, ["error", "error", "error"], 0),
        (steps_out_of_order, ["error", "error", "ok"], 0),
    ],
)
def test_damage(
    project: Project,
    whole: Ended,
    tmp_path: Path,
    damage: Callable[[Lines], str],
    verdicts: Sequence[str],
    incomplete: int,
) -> None:
    folder = copy(whole, tmp_path, damage)
    again = project.again("judge", folder)
    assert again.code == 1 and "Traceback" not in again.said
    record = read_run(folder)
    assert [str(cell.verdict) for cell in record.cells] == verdicts
    assert len(record.incomplete) == incomplete
    assert all("evidence.jsonl:" in line for line in record.incomplete)
    if damage in (doubled, out_of_order):
        assert told(record) == told(read_run(folder_of(whole)))


def test_evidence_of_another_schema_is_refused_and_leaves_the_record(
    project: Project, whole: Ended, tmp_path: Path
) -> None:
    def foreign(lines: Lines) -> str:
        return "\n".join([lines[0], json.dumps({**json.loads(lines[1]), "schema": 99}), lines[2]]) + "\n"

    folder = copy(whole, tmp_path, foreign)
    before = (folder / "run.json").read_bytes()
    again = project.again("judge", folder)
    assert again.code == 2
    assert f"{folder}/evidence.jsonl:2: evidence schema 99, expected 1" in again.said and "Traceback" not in again.said
    assert (folder / "run.json").read_bytes() == before
    assert project.again("report", folder).code == 1


def folder_of(ended: Ended) -> Path:
    assert ended.folder is not None
    return ended.folder


def copy(ended: Ended, to: Path, damage: Callable[[Lines], str]) -> Path:
    """The run's folder with its evidence damaged."""
    folder = shutil.copytree(folder_of(ended), to / "run")
    file = folder / "evidence.jsonl"
    file.write_text(damage(file.read_text().splitlines()))
    return folder


def told(record: RunRecord) -> list[tuple[object, ...]]:
    return [(cell.id, cell.verdict, cell.reason, cell.steps) for cell in record.cells]
