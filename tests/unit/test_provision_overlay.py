"""Overlays with uv for real and made-up wheels: one package on top, the rest shared, and reasons in one line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ci.errors import EnvironmentUnavailable
from ci.provision.overlay import NotUsable, OverlayRuntime, Release, last_line, unsatisfied
from ci.provision.runtime import Recipe
from ci.provision.site import Site
from tests.unit.wheelhouse import make_stack, make_wheel

PINS = {"torch": "2.0+cpu", "deepspeed": "1.0", "peft": "2.0"}


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    return tmp_path / "wheels"


@pytest.fixture
def recipe(tmp_path: Path, wheels: Path) -> Recipe:
    for folder in (tmp_path / "tests", tmp_path / "tests" / "jobs"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (tmp_path / "tests" / "jobs" / "preload.py").write_text("import torch\n")
    recipe = make_stack(tmp_path, wheels, PINS)
    return dataclasses.replace(recipe, python=".".join(map(str, sys.version_info[:2])))


@pytest.fixture
def runtime(tmp_path: Path, wheels: Path) -> OverlayRuntime:
    return OverlayRuntime(tmp_path, Site(wheel_folders=(wheels,), indexes={"UV_OFFLINE": "1", "UV_NO_INDEX": "1"}))


def seen(python: str, program: str) -> list[str]:
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_release_comes_first_and_everything_else_is_the_stacks(
    recipe: Recipe, runtime: OverlayRuntime, wheels: Path
) -> None:
    make_wheel(wheels, "deepspeed", "1.1")
    made = runtime.overlay(recipe, Release("deepspeed", "1.1"))
    assert (made.packages["deepspeed"], made.packages["torch"], made.reused) == ("1.1", "2.0+cpu", False)
    program = (
        "import deepspeed, torch; print(deepspeed.__version__, torch.__version__, deepspeed.__file__, torch.__file__)"
    )
    own, shared, own_file, shared_file = seen(made.python, program)
    assert (own, shared) == ("1.1", "2.0+cpu")
    base = runtime.provision(recipe)
    assert made.folder is not None and own_file.startswith(str(made.folder))
    assert base.folder is not None and shared_file.startswith(str(base.folder))
    assert runtime.overlay(recipe, Release("deepspeed", "1.1")).reused
    assert runtime.brought_along(recipe, Release("deepspeed", "1.1")) == {}


def test_the_stack_itself_stays_as_it_was(recipe: Recipe, runtime: OverlayRuntime, wheels: Path) -> None:
    make_wheel(wheels, "deepspeed", "1.1")
    runtime.overlay(recipe, Release("deepspeed", "1.1"))
    base = runtime.provision(recipe)
    assert base.reused and base.packages["deepspeed"] == "1.0"
    assert seen(base.python, "import deepspeed; print(deepspeed.__version__)") == ["1.0"]


def test_byte_code_of_the_stack_is_kept_once(recipe: Recipe, runtime: OverlayRuntime, wheels: Path) -> None:
    make_wheel(wheels, "deepspeed", "1.1")
    made = runtime.overlay(recipe, Release("deepspeed", "1.1"))
    base = runtime.provision(recipe)
    assert made.folder is not None and base.folder is not None
    mirrored = base.folder.relative_to(base.folder.anchor)
    assert (made.folder / "pycache" / mirrored).resolve() == (base.folder / "pycache" / mirrored).resolve()
    assert list((base.folder / "pycache").rglob("torch.*.pyc"))


def test_what_a_release_requires_otherwise_comes_along(recipe: Recipe, runtime: OverlayRuntime, wheels: Path) -> None:
    make_wheel(wheels, "deepspeed", "1.2", ("peft>=3", "torch>=1", 'absent>=1; extra == "dev"'))
    make_wheel(wheels, "peft", "3.1", ("deep-down==1.0",))
    make_wheel(wheels, "deep-down", "1.0")
    release = Release("deepspeed", "1.2")
    made = runtime.overlay(recipe, release)
    assert (made.packages["peft"], made.packages["deep-down"]) == ("3.1", "1.0")
    assert runtime.brought_along(recipe, release) == {"peft": "3.1", "deep-down": "1.0"}


def test_a_release_that_is_not_there_says_so_in_one_line(recipe: Recipe, runtime: OverlayRuntime) -> None:
    with pytest.raises(NotUsable) as raised:
        runtime.overlay(recipe, Release("deepspeed", "9.9"))
    assert raised.value.what == "installed"
    assert "deepspeed 9.9 cannot be installed:" in raised.value.message and "\n" not in raised.value.message


def test_a_release_that_cannot_be_imported_says_why(
    recipe: Recipe, runtime: OverlayRuntime, wheels: Path, tmp_path: Path
) -> None:
    make_wheel(wheels, "deepspeed", "1.1")
    preload = tmp_path / "tests" / "jobs" / "preload.py"
    preload.write_text("raise ValueError('needs more')\n")
    with pytest.raises(NotUsable) as raised:
        runtime.overlay(recipe, Release("deepspeed", "1.1"))
    assert (raised.value.what, raised.value.why) == ("imported", "ValueError: needs more")
    preload.write_text("")
    assert runtime.overlay(recipe, Release("deepspeed", "1.1")).reused


def test_a_network_that_is_gone_is_not_held_against_the_release(
    recipe: Recipe, runtime: OverlayRuntime, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runtime.provision(recipe)
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho 'dns error' >&2; exit 1\n")
    uv.chmod(0o755)
    monkeypatch.setattr("ci.provision.overlay.uv_executable", lambda: str(uv))
    with pytest.raises(EnvironmentUnavailable, match=r"deepspeed 1.1 cannot be fetched: dns error"):
        runtime.overlay(recipe, Release("deepspeed", "1.1"))


def test_only_requirements_that_hold_here_and_are_not_fulfilled() -> None:
    requires = {"a": ["b>=2", "c<1", 'd; python_version < "3"', 'e; extra == "x"', "f"], "b": ["g==1.0"]}
    found = unsatisfied(requires, {"a": "1", "b": "2.1", "c": "1.5", "f": "1", "g": "0.9"})
    assert [str(requirement) for requirement in found] == ["c<1", "g==1.0"]


def test_the_telling_line_of_an_error() -> None:
    assert (
        last_line("Traceback\n  File x\nValueError: no such thing\n\nhint: Build failures\n")
        == "ValueError: no such thing"
    )
    assert last_line("") == ""
    assert json.dumps(last_line("x" * 1000)) == json.dumps("x" * 300)
