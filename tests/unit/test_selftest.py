"""`nox -s tests`: which parts an argument selects, and one exit code for all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ci import selftest
from ci.commands import tests as command
from ci.errors import ExitCode, UsageError

ALL = [part.name for part in selftest.PARTS]


def chosen(*words: str) -> dict[str, tuple[str, ...]]:
    return {part.name: arguments for part, arguments in selftest.choose(words).parts}


def test_nothing_selects_everything() -> None:
    assert chosen() == {name: (f"tests/{name}",) for name in ALL}
    assert not selftest.choose(()).selective


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["unit"], {"unit": ("tests/unit",)}),
        (["stack", "unit", "-x"], {"unit": ("tests/unit", "-x"), "stack": ("tests/stack", "-x")}),
        (
            ["tests/unit/test_plan.py::test_a", "-k", "unit"],
            {"unit": ("tests/unit/test_plan.py::test_a", "-k", "unit")},
        ),
        (["tests/stack/", "unit"], {"unit": ("tests/unit",), "stack": ("tests/stack/",)}),
    ],
)
def test_words_and_paths_select_parts(words: list[str], expected: dict[str, tuple[str, ...]]) -> None:
    assert chosen(*words) == expected


def test_an_option_alone_goes_to_every_part() -> None:
    assert chosen("-k", "norm") == {name: (f"tests/{name}", "-k", "norm") for name in ALL}


@pytest.mark.parametrize("word", ["units", "tests/units/test_x.py"])
def test_an_unknown_part_is_answered_with_the_nearest(word: str) -> None:
    with pytest.raises(UsageError, match=re.escape("did you mean unit?")):
        chosen(word)


@pytest.mark.parametrize(
    ("codes", "selective", "missing", "expected"),
    [
        ([0, 0], False, False, ExitCode.OK),
        ([0, 1], False, False, ExitCode.FAILED),
        ([0, 2], False, True, ExitCode.FAILED),
        ([0, -9], False, False, ExitCode.FAILED),
        ([0, 0], False, True, ExitCode.UNAVAILABLE),
        ([0, 5], True, False, ExitCode.OK),
        ([5, 5], True, False, ExitCode.USAGE),
        ([0, 5], False, False, ExitCode.USAGE),  # a part without a test is never green by itself
    ],
)
def test_one_code_for_all(codes: list[int], selective: bool, missing: bool, expected: ExitCode) -> None:
    assert selftest.exit_code(codes, selective=selective, missing_in_ci=missing) == expected


@pytest.mark.parametrize(("ci", "expected"), [("true", ExitCode.UNAVAILABLE), ("", ExitCode.OK)])
def test_without_an_engine_container_tests_are_left_out_but_not_in_ci(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ci: str,
    expected: ExitCode,
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    monkeypatch.setenv("CI", ci)
    assert command.main(["container"]) == expected
    assert "tests/container: left out: no Docker engine answers" in capsys.readouterr().out


@pytest.mark.parametrize(("ci", "expected"), [("true", ExitCode.UNAVAILABLE), ("", ExitCode.OK)])
def test_without_a_browser_the_page_is_left_out_but_not_in_ci(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, expected: ExitCode
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CI", ci)
    assert command.main(["page"]) == expected
    assert "tests/page: left out: chromium and npm not found; apt-get install chromium npm" in capsys.readouterr().out


def test_pytest_gets_the_words_and_gives_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tests" / "unit"
    folder.mkdir(parents=True)
    (folder / "test_a.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    monkeypatch.chdir(tmp_path)
    assert command.main(["unit", "-q", "-k", "good"]) == ExitCode.OK
    assert command.main(["unit", "-q"]) == ExitCode.FAILED
    assert command.main(["unit", "-q", "-k", "none"]) == ExitCode.USAGE
