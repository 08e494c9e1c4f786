"""Images: built once, found by what went into them, labelled, small, and without a trace of the site's settings."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import docker
import pytest

from ci.errors import EnvironmentUnavailable, Interrupted
from ci.interrupts import Interrupts
from ci.provision import engine, locks
from ci.provision.build import LABEL
from ci.provision.image import DockerRuntime
from ci.provision.runtime import Override, Recipe
from ci.provision.site import Site
from tests.container.conftest import ROOT, Small, forget, small_project
from tests.unit.wheelhouse import make_wheel


def test_a_second_build_of_the_same_inputs_is_a_look_up(small: Small) -> None:
    made = small.environment
    again = DockerRuntime(small.root, small.client).provision(small.recipe)
    assert again.reused and again.seconds < 1
    assert (again.image, again.image_id) == (made.image, made.image_id)
    # The folder that says what is inside may go: it is read out of the image again.
    shutil.rmtree(small.root / ".cache")
    anew = small.environment
    assert anew.reused and anew.packages == made.packages
    assert small.containers() == []


def test_the_image_holds_the_lock_and_says_so(small: Small) -> None:
    made = small.environment
    assert small.recipe.lock is not None
    assert dict(made.packages) == locks.pins(small.recipe.lock.read_text())
    labels = small.client.images.get(made.image or "").labels
    assert json.loads(labels[f"{LABEL}.pins"]) == dict(small.recipe.pins)
    assert labels[f"{LABEL}.stack"] == "small" and labels[f"{LABEL}.base"] == small.recipe.base_image


def test_the_address_follows_the_ingredients_and_not_the_jobs(small: Small) -> None:
    first = small.environment
    assert small.recipe.lock is not None
    (small.root / "tests" / "jobs" / "new.py").write_text("")
    (small.root / "docker" / "locks" / "other.txt").write_text("")
    assert small.environment.image == first.image
    text = small.recipe.lock.read_text()
    small.recipe.lock.write_text(text + "# edited\n")
    try:
        assert small.environment.image != first.image
    finally:
        small.recipe.lock.write_text(text)


def test_no_compiler_and_no_cache_in_the_image(small: Small) -> None:
    files = set(exported(small.client, small.environment.image or ""))
    tools = {"gcc", "g++", "cc", "c++", "ld", "as", "make", "uv", "pip", "curl"}
    assert {path for path in files if path.rpartition("/")[2] in tools and "bin/" in path} == set()
    for folder in ("root/.cache/", "var/lib/apt/lists/", "var/cache/apt/", "build/", "wheels/", "tmp/", "overrides/"):
        assert [path for path in files if path.startswith(folder) and not path.endswith("/")] == [], folder


def exported(client: docker.DockerClient, image: str) -> list[str]:
    """Every path in a container's file system, as a runtime would see it."""
    container = client.containers.create(image, labels={LABEL: "test"})
    try:
        chunks: Iterable[bytes] = container.export()  # type: ignore[assignment]  # reason: the stubs say str
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            return [member.name + ("/" if member.isdir() else "") for member in archive]
    finally:
        container.remove(force=True)


def test_the_site_s_settings_reach_the_build_and_no_layer(
    tmp_path: Path, client: docker.DockerClient, small: Small
) -> None:
    here = Site.of()
    bundle = tmp_path / "bundle.crt"
    bundle.write_bytes(b"# MARK-OF-THE-CERTIFICATES\n" + (here.certificates.read_bytes() if here.certificates else b""))
    site = dataclasses.replace(
        here,
        certificates=bundle if here.certificates else None,
        indexes={**here.indexes, "PIP_TRUSTED_HOST": "mark-of-the-index.invalid"},
        proxies={**here.proxies, "no_proxy": "mark-of-the-proxy.invalid"},
    )
    root = tmp_path / "project"
    root.mkdir()
    project = small_project(root, client, site)
    script = root / "docker" / "install-stack.sh"
    check = '[ "$PIP_TRUSTED_HOST" = mark-of-the-index.invalid ]\n[ "$no_proxy" = mark-of-the-proxy.invalid ]\n'
    if site.certificates:
        check += 'grep -q MARK-OF-THE-CERTIFICATES "$SSL_CERT_FILE"\n'
    script.write_text(script.read_text().replace("set -eu\n", f"set -eu\n{check}", 1))
    try:
        image = project.environment.image or ""
        saved = b"".join(client.images.get(image).save())
        history = json.dumps(client.images.get(image).history())
    finally:
        forget(client, project)
    for mark in ("MARK-OF-THE-CERTIFICATES", "mark-of-the-index", "mark-of-the-proxy"):
        assert mark.encode() not in saved and mark not in history
    assert list(Path(os.environ.get("TMPDIR", "/tmp")).glob("secrets-*")) == []


def test_local_wheels_reach_the_build_and_their_image_is_gone_afterwards(
    tmp_path: Path, client: docker.DockerClient
) -> None:
    """A lock with a release that only a folder of this host has."""
    root = tmp_path / "project"
    root.mkdir()
    wheel = make_wheel(tmp_path / "wheels", "zero-regression-made-up", "1.0")
    project = small_project(root, client, dataclasses.replace(Site.of(), wheel_folders=(wheel.parent,)))
    assert project.recipe.lock is not None
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with project.recipe.lock.open("a") as lock:
        lock.write(f"zero-regression-made-up==1.0 \\\n    --hash=sha256:{digest}\n")
    try:
        assert project.environment.packages["zero-regression-made-up"] == "1.0"
    finally:
        forget(client, project)
    assert client.images.list(f"{LABEL}/wheels") == []


def test_with_a_checkout_is_a_layer_on_the_stack(tmp_path: Path, small: Small) -> None:
    """DeepSpeed's way: setup.py built against what is installed, without an index."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "setup.py").write_text(
        "import pytest\nfrom setuptools import setup\n"
        "setup(name='deepspeed', version='9.9', py_modules=['deepspeed'], install_requires=['pytest<1'])\n"
    )
    (checkout / "deepspeed.py").write_text("")
    plain = small.environment
    with pytest.raises(EnvironmentUnavailable, match="no set of releases satisfies these pins"):
        small.runtime.provision(small.recipe, [Override("deepspeed", path=checkout)])
    (checkout / "setup.py").write_text((checkout / "setup.py").read_text().replace("['pytest<1']", "[]"))
    made = small.runtime.provision(small.recipe, [Override("deepspeed", path=checkout)])
    assert made.packages == {**plain.packages, "deepspeed": "9.9"}
    assert made.image != plain.image and made.notes == (f"deepspeed replaced by {checkout} (not under git)",)
    assert sorted(path.name for path in checkout.iterdir()) == ["deepspeed.py", "setup.py"]
    assert small.runtime.provision(small.recipe, [Override("deepspeed", path=checkout)]).reused
    assert small.client.images.list(f"{LABEL}/with") == []


def test_a_failed_build_is_told_in_the_words_of_the_step(tmp_path: Path, client: docker.DockerClient) -> None:
    root = tmp_path / "project"
    root.mkdir()
    project = small_project(root, client)
    (root / "docker" / "install-stack.sh").write_text("#!/bin/sh\necho 'No space left on device' >&2\nexit 1\n")
    with pytest.raises(EnvironmentUnavailable) as caught:
        project.environment  # noqa: B018  # reason: the look makes it
    assert caught.value.exit_code == 3
    assert caught.value.message.startswith("the image of small cannot be built: the disk is full")


def test_an_absent_base_says_what_makes_one(small: Small) -> None:
    recipe = dataclasses.replace(small.recipe, base_image="localhost:9/absent:none")
    with pytest.raises(EnvironmentUnavailable, match=r"neither here nor can it be pulled.*nox -s base-image"):
        small.runtime.provision(recipe)


def test_an_interrupt_during_a_build_leaves_nothing(tmp_path: Path, client: docker.DockerClient) -> None:
    root = tmp_path / "project"
    root.mkdir()
    small_project(root, client)
    before = set(map(str, client.images.list()))
    (root / "docker" / "install-stack.sh").write_text("#!/bin/sh\necho the-step-is-running\nsleep 300\n")
    program = (
        "import sys; from pathlib import Path;"
        "from tests.container.test_image import interrupted_build; interrupted_build(Path(sys.argv[1]))"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(root)], cwd=ROOT)
    try:
        wait_for(lambda: any("the-step-is-running" in log.read_text() for log in (root / ".cache").rglob("*.log")))
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 130
    finally:
        child.kill()
    assert set(map(str, client.images.list())) == before
    wait_for(lambda: not running("sleep 300"))


def interrupted_build(root: Path) -> None:
    """What the test above interrupts, in a process of its own."""
    context = root / "docker"
    lock = context / "locks" / "small.txt"
    recipe = Recipe("small", "cpu", "3.11", lock, {}, context / "cpu.Dockerfile", "debian:bookworm-slim")
    try:
        with Interrupts():
            DockerRuntime(root, engine.connect()).provision(recipe)
    except Interrupted:
        sys.exit(130)


def running(command: str) -> bool:
    """Whether a process of exactly this command line runs on the host (a container's processes do)."""
    wanted = command.replace(" ", "\0").encode() + b"\0"
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if entry.read_bytes() == wanted:
                return True
    return False


def wait_for(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Until it holds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it did not happen in time")


@pytest.mark.parametrize("stack", ["newest"])
def test_the_shipped_image_is_small_and_whole(stack: str, client: docker.DockerClient) -> None:
    """Only where it was built already (a run makes it): this test is no reason to build it."""
    found = client.images.list(filters={"label": f"{LABEL}.stack={stack}"})
    if not found:
        pytest.skip(f"the image of {stack} was not built on this host yet")
    newest = found[0]
    assert newest.attrs["Size"] <= 1_500_000_000
    # No compiler, and nothing that one made: DeepSpeed's operators come without theirs (tests/jobs/shims.py).
    script = (
        "for tool in cc gcc c++ g++ clang nvcc make; do command -v $tool; done; "
        "find /opt/stack/lib -path '*/deepspeed/*' -name '*.so'; "
        "python -c 'import importlib.metadata as m; print(m.version(\"deepspeed\"))'"
    )
    said = client.containers.run(
        newest, ["sh", "-c", script], network_disabled=True, remove=True, labels={LABEL: "test"}
    )
    assert said.decode().split() == [json.loads(newest.labels[f"{LABEL}.pins"])["deepspeed"]]
