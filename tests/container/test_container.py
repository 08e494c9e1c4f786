"""Containers: what a job sees from inside, and that none stays, however its run ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import docker
import pytest
from docker.models.containers import Container

from ci.errors import EnvironmentUnavailable
from ci.provision import engine
from ci.provision.container import OWNER, PLAIN_USER, sweep
from ci.provision.owner import owner
from tests.container.conftest import ROOT, Small
from tests.container.test_image import running, wait_for


def test_what_a_job_sees_from_inside(small: Small) -> None:
    own = small.root / "adapter.py"
    own.write_text("a user's own file")
    started, results = small.start("look", inputs=(own,), extra_env={"MINE": "1"})
    try:
        assert started.wait(60) == 0
    finally:
        started.terminate()
    seen = json.loads((results / "seen.json").read_text())
    assert seen["uid"] == (os.getuid() or PLAIN_USER) != 0
    assert seen["cwd"] == "/project" and seen["init"] in ("docker-init", "tini")
    assert int(seen["capabilities"], 16) == 0 and seen["no_new_privileges"] == "1"
    assert seen["interfaces"] == ["lo"]
    assert {path for path, answer in seen["writable"].items() if answer is True} == {"/tmp", "/results"}
    assert seen["tools"] == []
    env = seen["environment"]
    assert env["HOME"] == "/tmp" and env["GLOO_SOCKET_IFNAME"] == "lo" and env["MINE"] == "1"
    assert seen["inputs"] == {small.runtime.path_inside(own): "a user's own file"}
    assert seen["corrections"] and seen["shared_memory"] >= 1 << 30
    assert seen["bytecode"].startswith("/pycache/")
    assert "a line of the job" in started.log_path.read_text() or "1 passed" in started.log_path.read_text()


def test_bytecode_is_kept_from_one_container_to_the_next(small: Small) -> None:
    for _ in range(2):
        started, _ = small.start("look")
        try:
            assert started.wait(60) == 0
        finally:
            started.terminate()
    key = (small.environment.image or "").rpartition("-")[2]
    volumes = small.client.volumes.list(filters={"name": key})
    assert len(volumes) == 1
    script = "import pathlib; print(len(list(pathlib.Path('/pycache').rglob('*.pyc'))))"
    mounts = {volumes[0].name: {"bind": "/pycache", "mode": "ro"}}
    image = small.environment.image or ""
    said = small.client.containers.run(image, ["python", "-c", script], volumes=mounts, remove=True)
    assert int(said) > 50


def test_the_exit_code_of_pytest_comes_back(small: Small) -> None:
    started, results = small.start("fail")
    try:
        assert started.wait(60) == 1
    finally:
        started.terminate()
    assert "as ordered" in started.log_path.read_text()
    assert small.containers() == []
    # root can read and remove what the plain user wrote; a user finds files of their own.
    assert all(os.access(path, os.R_OK) for path in results.rglob("*"))


def test_a_killed_process_is_137(small: Small) -> None:
    started, _ = small.start("die")
    try:
        assert started.wait(60) == 137
    finally:
        started.terminate()


def test_terminate_ends_every_process_and_the_container(small: Small) -> None:
    started, results = small.start("sleep")
    try:
        wait_for((results / "started").exists)
        assert started.poll() is None and started.wait(0.1) is None
    finally:
        started.terminate()
    assert small.containers() == []
    assert "KeyboardInterrupt" in started.log_path.read_text()
    started.terminate()  # safe to say twice


def test_a_container_removed_by_somebody_else_is_a_killed_run(small: Small) -> None:
    started, results = small.start("sleep")
    try:
        wait_for((results / "started").exists)
        small.client.containers.get(small.containers()[0]).remove(force=True)
        assert started.wait(30) == 137
    finally:
        started.terminate()


@pytest.mark.parametrize("moment", ["create", "start"])
def test_an_interrupt_between_creation_and_start_leaves_no_container(
    small: Small, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    small.environment  # noqa: B018  # reason: made before anything is interrupted

    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    real = type(small.client.containers).create

    def create_and_interrupt(*arguments: object, **options: object) -> None:
        real(*arguments, **options)  # type: ignore[arg-type]  # reason: passed on as it came
        raise KeyboardInterrupt

    if moment == "start":
        monkeypatch.setattr(Container, "start", interrupt)
    else:
        monkeypatch.setattr(type(small.client.containers), "create", create_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        small.start("look")
    monkeypatch.undo()
    assert small.containers() == []


def test_a_start_that_fails_leaves_no_container_and_says_why(small: Small, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnavailable, match=r"the container cannot be started: .*absent\.json"):
        small.runtime.start(small.environment, tmp_path / "absent.json", tmp_path)
    with pytest.raises(EnvironmentUnavailable, match=r"absent\.py cannot be shown to a container: No such file"):
        small.start("look", inputs=(small.root / "absent.py",))
    assert small.containers() == []


@pytest.mark.skipif(os.getuid() != 0, reason="only root keeps files to itself and runs containers as another user")
def test_what_only_root_can_read_is_told_before_the_start(small: Small, tmp_path: Path) -> None:
    secret = tmp_path / "adapter.py"
    secret.write_text("")
    secret.chmod(0o600)
    with pytest.raises(EnvironmentUnavailable, match=r"can be read by root only.*chmod -R o\+rX"):
        small.start("look", inputs=(secret,))


def test_the_next_run_removes_what_a_killed_one_left(small: Small) -> None:
    image = small.environment.image or ""
    program = """
import docker, os, sys
from ci.provision import engine
from ci.provision.container import OWNER, new_name
from ci.provision.owner import owner
client = engine.connect()
container = client.containers.create(sys.argv[1], ["sleep", "777"], name=new_name(), labels={OWNER: owner()})
container.start()
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program, image], cwd=ROOT)
    assert len(small.containers()) == 1 and running("sleep 777")
    mine = small.client.containers.create(image, name="zero-regression-matrix-mine", labels={OWNER: owner()})
    try:
        assert sweep(small.client) == 1
        assert small.containers() == ["zero-regression-matrix-mine"]
    finally:
        mine.remove(force=True)


def test_without_an_engine_the_reason_and_the_way_out_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/absent.sock")
    with pytest.raises(EnvironmentUnavailable, match=r"absent\.sock does not exist; .*--runtime venv") as caught:
        engine.connect()
    assert caught.value.exit_code == 3


def test_an_engine_without_permission_is_told_as_that(client: docker.DockerClient) -> None:
    if os.getuid():
        pytest.skip("only root can become a user who may not talk to the engine")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        said = "it let us in"
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            engine.connect()
        except EnvironmentUnavailable as error:
            said = error.message
        finally:
            os.write(writer, said.encode())
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    said = os.read(reader, 10_000).decode()
    os.close(reader)
    assert "does not let this user in" in said and "usermod -aG docker" in said


def test_a_builder_is_found_by_asking(
    client: docker.DockerClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = engine.find_builder()
    assert found is not None
    old = tmp_path / "docker"
    old.write_text("#!/bin/sh\necho 'no BuildKit in this one'\nexit 1\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert engine.find_builder() == found
    monkeypatch.setenv("PATH", str(tmp_path))
    assert engine.find_builder() is None
