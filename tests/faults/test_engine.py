"""What can happen to an engine, a container and an image while cells run in them."""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import NotFound
from docker.models.containers import Container

from ci.provision.build import LABEL
from ci.provision.container import OWNER
from ci.provision.image import PACKAGES, DockerRuntime
from ci.provision.runtime import Recipe
from tests.faults.conftest import OwnEngine
from tests.faults.project import ROOT, Project, Started, evidence_of
from tests.faults.test_run import SEED, SIGNALS, catches

LIMIT_S = 90


def the_container(own_engine: OwnEngine) -> Container:
    (name,) = own_engine.containers()
    return own_engine.clients[-1].containers.get(name)


def let_go(own_engine: OwnEngine) -> None:
    """End the case `wait`."""
    the_container(own_engine).exec_run(["touch", "/tmp/go"])


def test_a_rank_that_takes_more_than_the_container_may_have(contained: Project, own_engine: OwnEngine) -> None:
    with contained.started("well", "wait", "memory", "after") as started:
        started.wait_until(lambda: started.begun("wait"))
        the_container(own_engine).update(mem_limit="256m", memswap_limit="256m")
        let_go(own_engine)
        ended = started.end(LIMIT_S)
    assert ended.code == 1
    assert ended.verdicts == {"well": "ok", "wait": "ok", "memory": "error", "after": "ok"}, ended.said
    assert ended.reason("memory") == "rank 1 ended badly (exit code [-9]) and rank 0 waited on in vain"
    assert "in wait_for_the_other_rank" in ended.stacks("memory")["rank0"]


def test_a_container_that_somebody_removes(contained: Project, own_engine: OwnEngine) -> None:
    with contained.started("well", "wait", "after") as started:
        started.wait_until(lambda: started.begun("wait"))
        the_container(own_engine).remove(force=True)
        ended = started.end(LIMIT_S)
    assert ended.code == 1
    assert ended.verdicts == {"well": "ok", "wait": "error", "after": "error"}
    assert "killed from outside" in ended.reason("wait")


def test_an_engine_that_is_killed(contained: Project, own_engine: OwnEngine) -> None:
    with contained.started("well", "wait", "after") as started:
        started.wait_until(lambda: started.begun("wait"))
        own_engine.kill()
        ended = started.end(LIMIT_S)
    assert ended.code == 3 and "the Docker engine no longer answers" in ended.said, ended.said
    assert "Traceback" not in ended.said
    # The container goes on by itself: its next case may be measured by the time that the record is written.
    assert ended.verdicts["well"] == "ok" and ended.verdicts["wait"] == "error"
    # Nobody could remove it; the next run does.
    own_engine.start()
    assert len(own_engine.containers()) == 1
    assert contained.run("well", limit_s=LIMIT_S).code == 0


@pytest.mark.slow
def test_an_engine_that_is_stopped(contained: Project, own_engine: OwnEngine) -> None:
    """It ends its containers first, so the run may see their end before it sees that nobody answers any more."""
    with contained.started("well", "wait", "after") as started:
        started.wait_until(lambda: started.begun("wait"))
        own_engine.stop()
        ended = started.end(LIMIT_S)
    assert ended.code in (1, 3) and "Traceback" not in ended.said, ended.said
    assert ended.verdicts == {"well": "ok", "wait": "error", "after": "error"}
    says = "the process was ended from outside" if ended.code == 1 else "the Docker engine no longer answers"
    assert says in ended.reason("after")
    own_engine.start()
    assert contained.run("well", limit_s=LIMIT_S).code == 0


@pytest.mark.slow
def test_an_engine_that_no_longer_answers(contained: Project, own_engine: OwnEngine) -> None:
    """Frozen, as on a host without memory: each call to it must end by itself."""
    assert own_engine.process is not None
    with contained.started("well", "wait", "after") as started:
        started.wait_until(lambda: started.begun("wait"))
        own_engine.process.send_signal(signal.SIGSTOP)
        ended = started.end(150)
    own_engine.process.send_signal(signal.SIGCONT)
    assert ended.code == 3 and "the Docker engine no longer answers" in ended.said, ended.said
    assert "Traceback" not in ended.said
    assert ended.verdicts["well"] == "ok"
    assert contained.run("well", limit_s=LIMIT_S).code == 0


@pytest.mark.slow
def test_two_runs_in_one_image_at_once(contained: Project, tmp_path: Path) -> None:
    with contained.started("well") as one, contained.started("well") as two:
        assert [one.end(LIMIT_S).code, two.end(LIMIT_S).code] == [0, 0]


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        # What the image says about itself is as it was; what is installed is not.
        (
            "sed -i 's/^Version: .*/Version: 0.0.1/' /opt/stack/lib/python3*/site-packages/pytest-*.dist-info/METADATA",
            0,
        ),
        (f'sed -i \'s/"pytest": "[^"]*"/"pytest": "0.0.1"/\' {PACKAGES}', 1),
    ],
    ids=["the packages", "their record"],
)
def test_an_image_whose_packages_are_not_those_of_its_label(
    contained: Project,
    own_engine: OwnEngine,
    small_image: tuple[Path, Recipe, DockerRuntime],
    edit: str,
    reason: int,
) -> None:
    _, recipe, runtime = small_image
    pinned = recipe.pins["pytest"]
    tag = runtime.provision(recipe).image or ""
    client = own_engine.clients[-1]
    good = client.images.get(tag)
    try:
        tamper(client, tag, edit)
        assert client.images.get(tag).labels[f"{LABEL}.pins"] == good.labels[f"{LABEL}.pins"]
        ended = contained.run("well", "after", limit_s=LIMIT_S)
    finally:
        wrong = client.images.get(tag).id
        good.tag(tag)
        if wrong != good.id:
            client.images.remove(wrong or "", force=True)
    assert ended.code == 1
    assert ended.verdicts == {"well": "error", "after": "error"}
    says = [
        f"installed versions differ from the stack small: pytest 0.0.1 (pinned {pinned})",
        f"pins differ: pytest 0.0.1 instead of {pinned}",
    ]
    assert ended.reason("well") == ended.reason("after") == says[reason]


def tamper(client: docker.DockerClient, tag: str, edit: str) -> None:
    """Change an image by hand and give the result its name."""
    repository, _, name = tag.rpartition(":")
    container = client.containers.create(tag, ["sh", "-c", edit], user="0", network_mode="none", entrypoint="")
    try:
        container.start()
        assert container.wait()["StatusCode"] == 0, container.logs().decode()
        container.commit(repository=repository, tag=name)
    finally:
        container.remove(force=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_an_interrupt_at_a_random_moment_with_a_container(contained: Project, number: int) -> None:
    moment, which = random.Random(-SEED - number).uniform(0, 8), SIGNALS[number % 3]
    with contained.started("well", "slow", "after") as started:
        interrupt(started, which, moment)
        ended = started.end(moment + 30)
    told = f"FAULT_SEED={SEED}, {which.name} after {moment:.3f} s: {ended.said}"
    assert ended.code in (0, 130) and "Traceback" not in ended.said, told
    if ended.folder is not None:
        ok = [fault for fault, verdict in ended.verdicts.items() if verdict == "ok"]
        assert set(ok) <= set(evidence_of(ended.folder)), told
        assert (len(ok) == 3) == (ended.code == 0) or ended.code == 130, told


def interrupt(started: Started, which: signal.Signals, moment: float) -> None:
    started.wait_until(lambda: catches(started.process.pid, signal.SIGTERM))
    time.sleep(moment)
    started.process.send_signal(which)


def test_what_a_kept_runner_s_tidying_takes_and_what_it_leaves(
    own_engine: OwnEngine, small_image: tuple[Path, Recipe, DockerRuntime]
) -> None:
    if own_engine.process is None or own_engine.process.poll() is not None:
        own_engine.start()
    _, recipe, runtime = small_image
    used = runtime.provision(recipe).image or ""
    client = own_engine.clients[-1]
    unneeded, others = f"{LABEL}/cpu:unneeded", "somebody/else:image"
    for tag, label in ((unneeded, f"{LABEL}.stack=old"), (others, "other=1")):
        client.api.import_image_from_data(
            empty_archive(), repository=tag.partition(":")[0], tag=tag.partition(":")[2], changes=[f"LABEL {label}"]
        )
    volumes = [
        client.volumes.create(name, labels=labels)
        for name, labels in (("byte-code", {LABEL: "bytecode"}), ("data", {"other": "1"}))
    ]
    wait: dict[str, Any] = {"command": ["sleep", "120"], "entrypoint": "", "network_mode": "none"}
    running = client.containers.create(used, labels={OWNER: "x/1/1"}, **wait)
    ended = client.containers.create(used, labels={OWNER: "x/1/2"}, **wait)
    try:
        running.start()
        tidy(own_engine, keep_hours=1)
        assert client.images.list(unneeded) and client.images.list(others), "made within the hour"
        assert [each.id for each in client.containers.list(all=True)] == [running.id]
        assert [volume.name for volume in client.volumes.list()] == ["data"]
        time.sleep(1.1)  # the engine takes `until` to the second below: what was made in this second is not older
        tidy(own_engine, keep_hours=0)
        assert not client.images.list(unneeded)
        assert client.images.list(used) and client.images.list(others)
    finally:
        for container in (running, ended):
            with contextlib.suppress(NotFound):
                container.remove(force=True)
        for volume in volumes:
            with contextlib.suppress(NotFound):
                volume.remove()
        client.images.remove(others)


def tidy(own_engine: OwnEngine, keep_hours: int) -> None:
    """Run the hook of a kept runner against the test's own engine."""
    env = {**os.environ, "DOCKER_HOST": own_engine.host, "KEEP_HOURS": str(keep_hours)}
    done = subprocess.run([ROOT / ".github" / "runner-tidy.sh"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def empty_archive() -> bytes:
    """A tar without a member."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w"):
        pass
    return packed.getvalue()
