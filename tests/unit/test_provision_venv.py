"""The venv runtime with uv for real and made-up wheels: made whole or not at all, once, and found by its content."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ci.errors import EnvironmentUnavailable, UsageError
from ci.provision import cache, process
from ci.provision.host import HostRuntime
from ci.provision.runtime import Override, Recipe, pytest_command
from ci.provision.site import Site
from ci.provision.venv import VenvRuntime
from tests.unit.wheelhouse import ROOT, make_stack, make_wheel

PINS = {"torch": "2.0+cpu", "deepspeed": "1.0", "peft": "2.0"}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture
def recipe(tmp_path: Path, wheels: Path) -> Recipe:
    recipe = make_stack(tmp_path, wheels, PINS)
    return dataclasses.replace(recipe, python=".".join(map(str, sys.version_info[:2])))


@pytest.fixture
def runtime(tmp_path: Path, wheels: Path) -> VenvRuntime:
    return VenvRuntime(tmp_path, Site(wheel_folders=(wheels,), indexes={"UV_OFFLINE": "1", "UV_NO_INDEX": "1"}))


def venvs(root: Path) -> list[str]:
    return sorted(path.name for path in (root / ".cache" / "venvs").iterdir() if not path.name.endswith(".lock"))


def test_a_stack_is_made_once_and_then_looked_up(recipe: Recipe, runtime: VenvRuntime, tmp_path: Path) -> None:
    made = runtime.provision(recipe)
    assert not made.reused
    assert dict(made.packages) == {**dict.fromkeys(made.packages, "1.0"), **PINS}
    said = subprocess.run(
        [made.python, "-c", "import sys, torch; print(sys.prefix, torch.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split() == [str(made.folder), "2.0+cpu"]
    again = runtime.provision(recipe)
    assert again.reused and again.seconds < 1
    assert dataclasses.replace(again, reused=False) == made
    assert venvs(tmp_path) == [Path(str(made.folder)).name]


def test_another_lock_is_another_folder(recipe: Recipe, runtime: VenvRuntime) -> None:
    first = runtime.provision(recipe)
    assert recipe.lock is not None
    recipe.lock.write_text(recipe.lock.read_text() + "# edited\n")
    assert runtime.provision(recipe).folder != first.folder


def test_a_wheel_unlike_its_hash_is_refused_and_leaves_nothing(
    recipe: Recipe, runtime: VenvRuntime, wheels: Path, tmp_path: Path
) -> None:
    make_wheel(wheels, "peft", "2.0", requires=("something",))
    with pytest.raises(
        EnvironmentUnavailable, match="stack small cannot be installed: a download does not have the hash"
    ):
        runtime.provision(recipe)
    assert venvs(tmp_path) == []


def test_without_network_and_wheels_the_reason_is_told(recipe: Recipe, runtime: VenvRuntime, wheels: Path) -> None:
    for wheel in wheels.glob("peft-*"):
        wheel.unlink()
    with pytest.raises(EnvironmentUnavailable, match="cannot be installed: ") as caught:
        runtime.provision(recipe)
    assert "peft" in caught.value.message and caught.value.exit_code == 3


def test_with_replaces_one_package_and_reports_what_no_longer_fits(
    recipe: Recipe, runtime: VenvRuntime, wheels: Path, tmp_path: Path
) -> None:
    plain = runtime.provision(recipe)
    wheel = make_wheel(tmp_path / "built", "peft", "2.1", requires=("torch<3", "ninja"))
    made = runtime.provision(recipe, [Override("peft", path=wheel)])
    assert made.packages["peft"] == "2.1" and made.packages["torch"] == "2.0+cpu"
    assert made.folder != plain.folder and runtime.provision(recipe).packages["peft"] == "2.0"
    assert made.notes == ("peft replaced by wheel peft-2.1-py3-none-any.whl",)
    assert made.overrides == (f"peft={wheel}",)


def test_with_that_contradicts_another_pin_is_exit_3(recipe: Recipe, runtime: VenvRuntime, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "built", "peft", "2.1", requires=("torch>=3",))
    with pytest.raises(EnvironmentUnavailable, match="no set of releases satisfies these pins"):
        runtime.provision(recipe, [Override("peft", path=wheel)])


def test_a_checkout_is_built_against_the_stack_and_not_changed(recipe: Recipe, wheels: Path, tmp_path: Path) -> None:
    # The build itself needs a real setuptools, which the made-up one is not: its release is what is replaced.
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "setup.py").write_text("raise SystemExit('built in ' + __file__)\n")
    runtime = VenvRuntime(tmp_path, Site(wheel_folders=(wheels,), indexes={"UV_OFFLINE": "1", "UV_NO_INDEX": "1"}))
    with pytest.raises(EnvironmentUnavailable) as caught:
        runtime.provision(recipe, [Override("deepspeed", path=checkout)])
    assert "checkout-deepspeed" in caught.value.message
    assert [path.name for path in checkout.iterdir()] == ["setup.py"]
    assert venvs(tmp_path) == []


def test_an_interrupt_while_a_stack_is_made_leaves_nothing(recipe: Recipe, tmp_path: Path, wheels: Path) -> None:
    # The installer waits half way, as a long download would.
    script = recipe.dockerfile.parent / "install-stack.sh"
    script.write_text('mkdir "$3/half"\ntouch "$3/half/done"\nsleep 60\n')
    program = (
        "import sys; from pathlib import Path; from tests.unit.test_provision_venv import interrupted_run;"
        "interrupted_run(Path(sys.argv[1]))"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    folder = tmp_path / ".cache" / "venvs"
    deadline = time.monotonic() + 20
    while not list(folder.glob(".*-making-*/half/done")) and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    assert child.wait(20) == 130
    assert venvs(tmp_path) == []


def interrupted_run(root: Path) -> None:
    """What the test above interrupts, in a process of its own."""
    docker = root / "docker"
    recipe = Recipe(
        stack="small",
        backend="cpu",
        python=".".join(map(str, sys.version_info[:2])),
        lock=docker / "locks" / "small.txt",
        pins=PINS,
        dockerfile=docker / "cpu.Dockerfile",
        base_image="",
    )
    try:
        VenvRuntime(root, Site()).provision(recipe)
    except KeyboardInterrupt:
        sys.exit(130)


def test_what_a_killed_maker_left_is_cleared_by_the_next(tmp_path: Path) -> None:
    left = tmp_path / ".thing-making-abc"
    left.mkdir()
    (tmp_path / "thing").mkdir()  # half a thing of another time
    with cache.only_one(tmp_path, "thing", print), cache.made_whole(tmp_path / "thing") as scratch:
        (scratch / "content").write_text("whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".thing.lock", "thing"]
    assert (tmp_path / "thing" / "content").read_text() == "whole"


def test_two_runs_make_a_stack_once(recipe: Recipe, runtime: VenvRuntime, tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.unit.test_provision_venv import provision_in;"
        "print(provision_in(Path(sys.argv[1])))"
    )
    # Both start before either is done.
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = sorted(run.communicate(timeout=60)[0].strip() for run in runs)
    assert said == ["False", "True"]


def provision_in(root: Path) -> bool:
    """What the test above runs twice at once."""
    docker, wheels = root / "docker", root / "wheels"
    recipe = Recipe(
        stack="small",
        backend="cpu",
        python=".".join(map(str, sys.version_info[:2])),
        lock=docker / "locks" / "small.txt",
        pins=PINS,
        dockerfile=docker / "cpu.Dockerfile",
        base_image="",
    )
    site = Site(wheel_folders=(wheels,), indexes={"UV_OFFLINE": "1", "UV_NO_INDEX": "1"})
    return VenvRuntime(root, site).provision(recipe).reused


def test_a_cache_that_cannot_be_written_is_exit_3(recipe: Recipe, runtime: VenvRuntime, tmp_path: Path) -> None:
    (tmp_path / ".cache").write_text("a file in the way")
    with pytest.raises(EnvironmentUnavailable) as caught:
        runtime.provision(recipe)
    assert ".cache" in caught.value.message and caught.value.exit_code == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_is_exit_3_and_leaves_nothing(recipe: Recipe, tmp_path: Path, wheels: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40k", "none", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"this root may not mount: {mounted.stderr.strip()}")
    try:
        site = Site(wheel_folders=(wheels,), indexes={"UV_OFFLINE": "1", "UV_NO_INDEX": "1"})
        with pytest.raises(EnvironmentUnavailable, match="the disk is full; free some space") as caught:
            VenvRuntime(disk, site).provision(recipe)
        assert caught.value.exit_code == 3
        assert venvs(disk) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_python_that_is_not_there_is_exit_3(recipe: Recipe, runtime: VenvRuntime) -> None:
    with pytest.raises(EnvironmentUnavailable, match=r"Python 3\.99 cannot be made: this Python is not on the host"):
        runtime.provision(dataclasses.replace(recipe, python="3.99"))


def test_the_jobs_see_one_environment_and_nothing_of_the_caller_s_packages(
    recipe: Recipe, runtime: VenvRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The made-up pytest of the stack writes what it sees.
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    made = runtime.provision(recipe)
    pytest_module = next(Path(str(made.folder)).glob("lib/python*/site-packages/pytest.py"))
    pytest_module.unlink()  # a link to the wheel's file in uv's cache
    pytest_module.write_text("import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('seen', 'w'))")
    results = tmp_path / "results"
    results.mkdir()
    running = runtime.start(made, tmp_path / "order.json", results, workers=2, extra_env={"MINE": "1"})
    try:
        assert running.wait(30) == 0
    finally:
        running.terminate()
    arguments, env = json.loads((tmp_path / "seen").read_text())
    assert arguments == list(pytest_command("", str(tmp_path / "order.json"), str(results), 2)[3:])
    assert env["MINE"] == "1" and env["GLOO_SOCKET_IFNAME"] == "lo" and env["HF_HUB_OFFLINE"] == "1"
    assert env["PATH"].split(os.pathsep)[0] == str(Path(made.python).parent)
    assert not {"PYTHONPATH", "PYTEST_ADDOPTS"} & env.keys()
    assert running.log_path == results / "pytest.log"


def current(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, stack="current", lock=None, pins={})


def test_host_says_what_is_installed_beside_the_given_interpreter(recipe: Recipe) -> None:
    made = HostRuntime(ROOT, sys.executable).provision(current(recipe))
    assert made.kind == "host" and made.packages["pytest"] == pytest.__version__


def test_host_without_pytest_is_exit_3_with_the_command_that_mends_it(recipe: Recipe, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = str(tmp_path / "bare" / "bin" / "python")
    with pytest.raises(EnvironmentUnavailable, match=f"{python} -m pip install pytest pytest-xdist") as caught:
        HostRuntime(ROOT, python).provision(current(recipe))
    assert caught.value.exit_code == 3


def test_host_refuses_what_would_change_it_and_what_does_not_start(recipe: Recipe) -> None:
    with pytest.raises(UsageError, match="not ours"):
        HostRuntime(ROOT, sys.executable).provision(current(recipe), [Override("peft", version="1.0")])
    with pytest.raises(EnvironmentUnavailable, match="does not work"):
        HostRuntime(ROOT, "false").provision(current(recipe))


def test_the_process_module_is_what_starts_uv(
    recipe: Recipe, runtime: VenvRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """UV_SYSTEM_CERTS and no compiled operators, whatever the caller's environment asks for."""
    seen: list[dict[str, str]] = []
    real = process.run

    def spy(command: list[str], **options: dict[str, str]) -> process.Finished:
        seen.append(dict(options["env"]))
        return real(command, **options)  # type: ignore[arg-type]  # reason: the spy passes on what it was given

    monkeypatch.setenv("DS_BUILD_OPS", "1")
    monkeypatch.setattr("ci.provision.venv.process.run", spy)
    runtime.provision(recipe)
    assert seen and all(env["UV_SYSTEM_CERTS"] == "1" and env["DS_BUILD_OPS"] == "0" for env in seen)
