"""Which runtime a run gets, and that the reason is said."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ci.errors import EnvironmentUnavailable, UsageError
from ci.provision import build, engine
from ci.provision.choose import choose


@pytest.fixture
def engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "connect", lambda: SimpleNamespace())
    monkeypatch.setattr(engine, "find_builder", lambda: engine.Builder("docker", "1"))


@pytest.fixture
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> Any:
        raise EnvironmentUnavailable("no Docker engine answers: nothing there; start it")

    monkeypatch.setattr(engine, "connect", absent)


@pytest.mark.usefixtures("engine_answers")
def test_docker_where_an_engine_answers(tmp_path: Path) -> None:
    choice = choose(None, tmp_path)
    assert choice.runtime.id == "docker" and choice.reason == "a Docker engine answers"
    assert choose("docker", tmp_path).reason == "asked for"
    assert choose("venv", tmp_path).runtime.id == "venv"


@pytest.mark.usefixtures("no_engine")
def test_a_venv_where_none_does_and_why(tmp_path: Path) -> None:
    choice = choose(None, tmp_path)
    assert choice.runtime.id == "venv" and choice.reason == "no Docker engine answers: nothing there"
    with pytest.raises(EnvironmentUnavailable, match="no Docker engine answers") as caught:
        choose("docker", tmp_path)
    assert caught.value.exit_code == 3


@pytest.mark.usefixtures("engine_answers")
def test_an_engine_without_a_builder_is_taken_where_asked_for_since_images_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "find_builder", lambda: None)
    assert choose(None, tmp_path).reason == "no docker client here can build with BuildKit"
    assert choose("docker", tmp_path).runtime.id == "docker"
    client, site, order = (cast(Any, SimpleNamespace()) for _ in range(3))
    with pytest.raises(EnvironmentUnavailable, match="install docker-buildx"):
        build.build(client, site, order)


def test_host_needs_an_interpreter_and_other_words_are_refused(tmp_path: Path) -> None:
    assert choose("host", tmp_path, python=sys.executable).runtime.id == "host"
    with pytest.raises(UsageError, match="--runtime host needs --python"):
        choose("host", tmp_path)
    with pytest.raises(UsageError, match="did you mean docker"):
        choose("dokcer", tmp_path)


def test_the_folder_docker_is_no_package_and_hides_no_sdk() -> None:
    import docker

    assert hasattr(docker, "from_env") and docker.__file__
    assert not (Path(__file__).parents[2] / "docker" / "__init__.py").exists()
