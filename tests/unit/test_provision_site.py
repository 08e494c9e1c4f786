"""A closed network's settings: read from the variables that pip and uv know, told to uv, and never kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from ci.provision.build import build_error
from ci.provision.site import Site, explain
from tests.unit.wheelhouse import make_wheel


def test_find_links_of_both_tools_are_read_with_their_separators(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    for folder in (one, two, three):
        folder.mkdir()
    site = Site.of(
        {
            "UV_FIND_LINKS": f"{one},file://{two},http://wheels.example/list",
            "PIP_FIND_LINKS": f"{one} {three} {tmp_path}/absent",
        }
    )
    assert site.wheel_folders == (one, two, three)
    assert site.wheel_pages == ("http://wheels.example/list",)
    assert site.uv_environment({})["UV_FIND_LINKS"] == f"{one},{two},{three},http://wheels.example/list"


def test_only_the_wheels_a_lock_asks_for_are_offered(tmp_path: Path) -> None:
    wanted = make_wheel(tmp_path, "torch", "2.13.0+cpu")
    make_wheel(tmp_path, "torch", "2.12.0+cpu")
    make_wheel(tmp_path, "other", "1.0")
    (tmp_path / "broken.whl").write_text("")
    site = Site(wheel_folders=(tmp_path,))
    assert site.wheels_for({"torch": "2.13.0+cpu", "numpy": "2.4.6"}) == (wanted,)


def test_pip_settings_reach_uv_under_its_own_names(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("certificates")
    site = Site.of(
        {
            "PIP_INDEX_URL": "http://user:secret@index.example/simple",
            "PIP_CERT": str(bundle),
            "HTTPS_PROXY": "http://proxy.example:3128",
            "no_proxy": "localhost",
        }
    )
    env = site.uv_environment({"VIRTUAL_ENV": "/somewhere", "PYTHONPATH": "/elsewhere", "PATH": "/bin"})
    assert env["UV_DEFAULT_INDEX"] == "http://user:secret@index.example/simple"
    assert env["SSL_CERT_FILE"] == str(bundle)
    assert env["UV_SYSTEM_CERTS"] == "1"
    assert not {"VIRTUAL_ENV", "PYTHONPATH"} & env.keys()
    assert site.proxies == {"https_proxy": "http://proxy.example:3128", "no_proxy": "localhost"}
    assert "export PIP_INDEX_URL=http://user:secret@index.example/simple\n" in site.build_secret()


def test_without_settings_nothing_is_said(tmp_path: Path) -> None:
    site = Site.of({"SSL_CERT_FILE": str(tmp_path / "absent")})
    assert site == Site()
    assert site.build_secret() == ""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("error: failed to write: No space left on device (os error 28)", "the disk is full"),
        ("  x No solution found when resolving dependencies:\n  because a==1 depends on b>2", "no set of releases"),
        ("error: Hash mismatch for `a==1`", "does not have the hash in the lock"),
        ("client error (Connect): invalid peer certificate: UnknownIssuer", "TLS is re-signed"),
        ("error: Failed to fetch: `http://x/simple/a/`\n  dns error", "cannot be reached"),
        ("E: Could not resolve 'mirror'", "cannot be reached"),
        ("error: No interpreter found for Python 3.10", "this Python is not on the host"),
        ("something else", "it failed"),
    ],
)
def test_a_tool_s_failure_becomes_one_reason_with_its_last_words(said: str, told: str) -> None:
    text = explain(said)
    assert text.startswith(told) or told in text.splitlines()[0]
    assert said.splitlines()[-1].strip() in text


def test_a_failed_build_is_told_without_the_builder_s_frame() -> None:
    output = """\
#14 [build 7/8] RUN ./install-stack.sh
#14 sha256:6be1
#14 0.512 error: Hash mismatch for `a==1`
#14 ERROR: executor failed running [/bin/sh -eu -c ./install-stack.sh]: exit code: 2
------
 > [build 7/8] RUN ./install-stack.sh:
------
failed to solve with frontend dockerfile.v0
"""
    assert build_error(output) == "error: Hash mismatch for `a==1`"
