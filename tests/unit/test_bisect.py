"""The search finds every boundary it can see, looks at little, and steps over what is no behaviour."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.version import Version

from ci import commits
from ci.bisect import Boundary, Gap, Search
from ci.commands.bisect import Row, one_cell, report, turn
from ci.errors import UsageError
from ci.matrix import load
from ci.probe import Failing, Kind, Outcome, Probe

RIGHT = Outcome(kind=Kind.PASSES)
TIMES = Outcome(kind=Kind.WRONG, failing=(Failing(check="reported_norm", factors=(65500.0,)),))
FROZEN = Outcome(kind=Kind.WRONG, failing=(Failing(check="gradient_used", factors=(1.53e-05,)),))
RAISES = Outcome(kind=Kind.RAISES, exception="RuntimeError: got [#]")
BROKEN = Outcome(kind=Kind.NOT_INSTALLED, why="no wheel")
LETTERS = {".": RIGHT, "t": TIMES, "f": FROZEN, "r": RAISES, "x": BROKEN}


def search(row: str) -> Search:
    return Search(lambda position: LETTERS[row[position]])


def test_one_boundary_takes_few_probes() -> None:
    found = search("." * 40 + "t" * 24)
    assert found.boundaries([0, 63]) == [Boundary(39, 40)]
    assert len(found.seen) <= 2 + 6


def test_a_midpoint_unlike_both_ends_gives_two_intervals() -> None:
    assert search(".....ttttfff....").boundaries([0, 8, 15]) == [Boundary(4, 5), Boundary(8, 9), Boundary(11, 12)]
    assert search("..tttttf").boundaries([0, 7]) == [Boundary(1, 2), Boundary(6, 7)]


def test_boundaries_beside_what_cannot_be_tried_are_a_range() -> None:
    assert search("...xxtt").boundaries([0, 6]) == [Boundary(2, 5, (3, 4))]
    assert search(".xxt").boundaries([0, 3]) == [Boundary(0, 3, (1, 2))]


def test_a_sample_that_cannot_be_tried_gives_way_to_the_release_before_it() -> None:
    found = search("..xtt.xxx")
    assert found.sampled([2, 4, 8]) == [1, 4, 5]
    assert search("xxx").sampled([0, 2]) == []


def test_a_change_there_and_back_between_samples_is_missed_and_that_is_said() -> None:
    found = search("..t..")
    assert found.boundaries([0, 4]) == []
    assert found.gaps([0, 4]) == [Gap(0, 4)]
    everything = search("..t..")
    assert everything.boundaries([0, 1, 2, 3, 4]) == [Boundary(1, 2), Boundary(2, 3)]
    assert everything.gaps([0, 1, 2, 3, 4]) == []


@given(st.text(alphabet=".tfrx", min_size=2, max_size=40))
def test_looking_at_everything_finds_every_boundary(row: str) -> None:
    known = [position for position, letter in enumerate(row) if letter != "x"]
    found = search(row)
    samples = found.sampled(list(range(len(row))))
    assert sorted(set(samples)) == known
    expected = [
        Boundary(low, high, tuple(range(low + 1, high)))
        for low, high in itertools.pairwise(known)
        if row[low] != row[high]
    ]
    assert found.boundaries(samples) == expected


@given(st.text(alphabet=".tfrx", min_size=2, max_size=40))
def test_whatever_is_found_is_a_boundary(row: str) -> None:
    found = search(row)
    samples = found.sampled([0, len(row) - 1])
    for boundary in found.boundaries(samples):
        assert row[boundary.before] != row[boundary.after]
        assert set(row[boundary.before + 1 : boundary.after]) <= {"x"}


ROW = Row("deepspeed", tuple(map(Version, ("0.17.4", "0.17.5", "0.17.6", "0.18.0"))))
WORDS = ["--job", "grpo-lora", "--case", "zero_stage=0,dtype=bf16", "--package", "deepspeed"]


def test_the_report_has_both_sides_numbers_and_the_command_that_shows_them_again() -> None:
    cell, _ = one_cell(load(), "grpo-lora", "zero_stage=0,dtype=bf16", "stable")
    probes = {
        0: Probe(outcome=BROKEN),
        1: Probe(outcome=RIGHT, reported=(1.0, 1.0), used=(1.0, 1.0)),
        2: Probe(outcome=TIMES, reported=(65500.0, 89800.0), used=(1.0, 1.37)),
    }
    text = "\n".join(report(ROW, probes, [1, 2], [Boundary(1, 2)], [], WORDS, cell))
    assert "0.17.6: goes wrong" in text
    assert "0.17.5: passes; norm reported/true 1 1, gradient used/wanted 1 1" in text
    assert "norm reported/true 65500 89800, gradient used/wanted 1 1.37" in text
    assert "nox -s bisect -- --job grpo-lora --case zero_stage=0,dtype=bf16 --package deepspeed --good 0.17.5" in text
    assert "--stack stable --job grpo-lora" in text and "--runtime venv --with deepspeed=0.17.6" in text
    assert "could not be tried:\n  0.17.4: cannot be installed: no wheel" in text
    assert "outside the ends, not looked at: 0.17.4, 0.18.0" in text


def test_a_range_and_a_gap_are_said() -> None:
    cell, _ = one_cell(load(), "grpo-lora", "zero_stage=0,dtype=bf16", "stable")
    probes = {at: Probe(outcome=outcome) for at, outcome in enumerate((RIGHT, BROKEN, BROKEN, RAISES))}
    text = "\n".join(report(ROW, probes, [0, 3], [Boundary(0, 3, (1, 2))], [Gap(0, 3)], WORDS, cell))
    assert "0.18.0, or one of 0.17.5, 0.17.6, which could not be tried: begins to raise" in text
    assert "not looked at between: 0.17.4 to 0.18.0" in text and "--exhaustive" in text


def test_a_flip_is_told_from_an_exception() -> None:
    assert turn(RIGHT, TIMES) == "goes wrong"
    assert turn(TIMES, FROZEN) == "changes"
    assert turn(FROZEN, RIGHT) == "is right again"
    assert turn(TIMES, RAISES) == "begins to raise"
    assert turn(RAISES, TIMES) == "raises no longer, and is wrong"


def test_a_case_is_one_cell_with_everything_left_out_at_its_default() -> None:
    cell, stack = one_cell(load(), "grpo-lora", "zero_stage=0,dtype=bf16", "stable")
    assert cell.id == "cpu/stable/grpo-lora/zero0-bf16" and stack.id == "stable"
    assert "--stack stable" in cell.command


def test_a_case_of_no_lane_can_be_asked_for() -> None:
    cell, _ = one_cell(load(), "grpo-lora", "zero_stage=1,dtype=fp32,world_size=3,num_iterations=3", "stable")
    assert (cell.id, cell.world_size) == ("cpu/stable/grpo-lora/zero1-fp32-ws3-iter3", 3)


@pytest.mark.parametrize(
    ("job", "case", "says"),
    [
        ("grpo", "zero_stage=0", "unknown job 'grpo'; did you mean grpo-lora?"),
        ("grpo-lora", "zero_stage=0", "grpo-lora needs dtype too, it has no default"),
        ("grpo-lora", "zero_stage=9,dtype=bf16", "unknown value '9' of zero_stage"),
        ("fp16-optimizers", "dtype=fp16,zero_stage=2,optimizer=fused", "there is no such case: ZeRO brings its own"),
    ],
)
def test_a_case_that_is_none_is_answered(job: str, case: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        one_cell(load(), job, case, "stable")
    assert says in raised.value.message


def test_an_end_that_is_no_release_is_answered_with_the_nearest() -> None:
    assert ROW.position("--good", "0.17.5") == 1
    with pytest.raises(UsageError, match=r"--good: no release '0.17.7' of deepspeed .* did you mean 0.17."):
        ROW.position("--good", "0.17.7")


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    for number in range(4):
        git(tmp_path, "commit", "--quiet", "--allow-empty", "-m", f"change {number}")
        git(tmp_path, "tag", f"v{number}")
    return tmp_path


def test_commits_between_two_revisions_in_either_order(checkout: Path) -> None:
    found = commits.between(checkout, "v1", "v3")
    assert [commit.subject for commit in found] == ["change 1", "change 2", "change 3"]
    assert commits.between(checkout, "v3", "v1") == found
    assert str(found[0]) == git(checkout, "rev-parse", "v1")[:12]


def test_revisions_that_do_not_follow_each_other_are_answered(checkout: Path) -> None:
    git(checkout, "checkout", "--quiet", "-b", "side", "v0")
    git(checkout, "commit", "--quiet", "--allow-empty", "-m", "aside")
    with pytest.raises(UsageError, match="neither of side and v3 is an ancestor of the other"):
        commits.between(checkout, "side", "v3")
    with pytest.raises(UsageError, match="no commit 'v9'"):
        commits.between(checkout, "v0", "v9")
