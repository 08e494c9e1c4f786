"""The index as pip tells it, and the samples that a search starts from."""

from __future__ import annotations

import pytest
from packaging.version import Version

from ci.errors import EnvironmentUnavailable, UsageError
from ci.releases import last_of_each_minor, on_the_index, parse, within

PRINTED = """\
WARNING: pip index is currently an experimental command.
{"name": "deepspeed", "versions": ["0.19.0", "0.18.10", "0.18.9", "0.19.1rc1", "0.18.2", "0.17.6"], "latest": "0.19.0"}
"""


def versions(*words: str) -> tuple[Version, ...]:
    return tuple(map(Version, words))


def test_releases_are_sorted_by_version_without_pre_releases() -> None:
    assert parse(PRINTED, "deepspeed") == versions("0.17.6", "0.18.2", "0.18.9", "0.18.10", "0.19.0")


def test_an_answer_without_a_list_is_the_places_fault() -> None:
    with pytest.raises(EnvironmentUnavailable, match="the releases of deepspeed cannot be listed"):
        parse("WARNING: nothing\n[]\n3\n", "deepspeed")


def test_an_index_that_has_no_such_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        EnvironmentUnavailable, match=r"releases of no-such-package cannot be listed: ERROR: No matching"
    ):
        on_the_index("no-such-package")


def test_a_specifier_selects_and_a_wrong_one_is_answered() -> None:
    found = parse(PRINTED, "deepspeed")
    assert within(found, ">=0.18,<0.19") == versions("0.18.2", "0.18.9", "0.18.10")
    with pytest.raises(UsageError, match=r"--releases: found '0.14 and up'; expected a version specifier"):
        within(found, "0.14 and up")


def test_the_last_patch_of_each_minor_release() -> None:
    found = parse(PRINTED, "deepspeed")
    assert [str(found[index]) for index in last_of_each_minor(found)] == ["0.17.6", "0.18.10", "0.19.0"]
