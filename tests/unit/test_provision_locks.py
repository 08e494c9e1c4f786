"""Locks: what they must hold, what they must not, and that the shipped ones follow from matrix.yaml."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ci.commands.lock import changes
from ci.errors import EnvironmentUnavailable, UsageError
from ci.matrix import load
from ci.provision import locks
from ci.provision.recipe import recipe_for, torch_index
from ci.provision.site import Site
from tests.unit.wheelhouse import ROOT, make_stack, make_wheel

LOCK = """\
# a comment
deepspeed==0.19.8 \\
    --hash=sha256:aa
    # via matrix.yaml
torch==2.13.0+cpu
    # via
    #   deepspeed
"""
BESIDES = "".join(f"{name}==1 \\\n    --hash=sha256:bb\n" for name in locks.BESIDES)
PINS = {"deepspeed": "0.19.8", "torch": "2.13.0+cpu"}


def test_pins_of_a_lock() -> None:
    assert locks.pins(LOCK) == PINS


def test_a_good_lock_has_no_mistakes() -> None:
    assert locks.mistakes(LOCK + BESIDES, PINS) == []


@pytest.mark.parametrize(
    ("text", "pins", "said"),
    [
        (LOCK + BESIDES, PINS | {"deepspeed": "0.18.9"}, "deepspeed is 0.19.8, matrix.yaml says 0.18.9"),
        (LOCK + BESIDES, PINS | {"peft": "0.21.2"}, "peft is absent, matrix.yaml says 0.21.2"),
        (LOCK, PINS, "ninja is absent"),
        (LOCK.replace("    --hash=sha256:aa\n", "") + BESIDES, PINS, "deepspeed has no hash"),
        (LOCK.replace("+cpu\n", "+cpu \\\n    --hash=sha256:cc\n") + BESIDES, PINS, "torch has a hash"),
        ("--index-url https://example.org/simple\n" + LOCK + BESIDES, PINS, "line 1 names an index"),
        ("--find-links wheels\n" + LOCK + BESIDES, PINS, "line 1 names an index"),
        (LOCK + BESIDES + "a @ https://example.org/a.whl \\\n    --hash=sha256:dd\n", PINS, "names an index"),
    ],
)
def test_a_bad_lock_is_named(text: str, pins: dict[str, str], said: str) -> None:
    assert any(said in mistake for mistake in locks.mistakes(text, pins))


@pytest.mark.parametrize("stack", sorted(load(ROOT / "matrix.yaml").stacks))
def test_every_shipped_stack_has_the_lock_its_pins_ask_for(stack: str) -> None:
    recipe = recipe_for(load(ROOT / "matrix.yaml"), stack, ROOT)
    text = locks.read(recipe)
    assert locks.mistakes(text, recipe.pins) == []
    # Each stack is whole: nothing is left for an installation to resolve.
    assert {"pytest", "pytest-xdist", "numpy", "tokenizers"} <= locks.pins(text).keys()
    assert not {*recipe.left_out} & locks.pins(text).keys()


def test_an_absent_or_outdated_lock_says_how_to_make_it(tmp_path: Path) -> None:
    recipe = make_stack(tmp_path, tmp_path / "wheels", {"deepspeed": "1.0"})
    assert recipe.lock is not None
    recipe.lock.write_text(recipe.lock.read_text().replace("deepspeed==1.0", "deepspeed==1.1"))
    with pytest.raises(
        UsageError, match=r"small\.txt: deepspeed is 1\.1, matrix\.yaml says 1\.0; nox -s lock -- small"
    ):
        locks.read(recipe)
    recipe.lock.unlink()
    with pytest.raises(UsageError, match=r"small\.txt: No such file.*nox -s lock -- small"):
        locks.read(recipe)


def offline(folder: Path) -> Site:
    return Site(wheel_folders=(folder,), indexes={"UV_NO_INDEX": "1", "UV_OFFLINE": "1"})


def test_compiling_pins_gives_the_lock_and_says_it_again(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    recipe = make_stack(tmp_path, wheels, {"torch": "2.0+cpu", "deepspeed": "1.0"})
    assert recipe.lock is not None
    text = locks.compile_lock(recipe, offline(wheels))
    assert locks.mistakes(text, recipe.pins) == []
    assert str(tmp_path) not in text
    recipe.lock.write_text(text)
    assert locks.compile_lock(recipe, offline(wheels)) == text


def test_what_a_backend_leaves_out_is_not_in_its_lock(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    recipe = make_stack(tmp_path, wheels, {"deepspeed": "1.0"})
    without = dataclasses.replace(recipe, left_out=("pytest",))
    found = locks.pins(locks.compile_lock(recipe, offline(wheels))).keys()
    assert found - locks.pins(locks.compile_lock(without, offline(wheels))).keys() == {"pytest"}


def test_a_forced_pin_holds_against_what_another_package_declares(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    recipe = make_stack(tmp_path, wheels, {"deepspeed": "1.0", "trainer": "3.0"})
    make_wheel(wheels, "trainer", "3.0", ("deepspeed<1.0",))
    with pytest.raises(EnvironmentUnavailable, match="stack small cannot be locked"):
        locks.compile_lock(recipe, offline(wheels))
    text = locks.compile_lock(dataclasses.replace(recipe, forced=("deepspeed",)), offline(wheels))
    assert locks.pins(text) == {**locks.pins(text), "deepspeed": "1.0", "trainer": "3.0"}
    assert locks.mistakes(text, recipe.pins) == [] and str(tmp_path) not in text and "forced.txt" not in text


def test_pins_that_no_release_satisfies_are_exit_3(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    recipe = make_stack(tmp_path, wheels, {"deepspeed": "1.0"})
    next(wheels.glob("deepspeed-*")).unlink()
    with pytest.raises(EnvironmentUnavailable, match="stack small cannot be locked: no set of releases") as caught:
        locks.compile_lock(recipe, offline(wheels))
    assert caught.value.exit_code == 3


def test_the_torch_index_is_data_and_a_site_can_empty_it() -> None:
    matrix = load(ROOT / "matrix.yaml")
    index = matrix.package_indexes["torch_cpu"]
    assert torch_index(matrix, "cpu", {}) == index.url
    assert torch_index(matrix, "cpu", {index.variable: ""}) == ""
    assert torch_index(matrix, "cpu", {index.variable: "http://mirror/torch"}) == "http://mirror/torch"


def test_changes_are_told_release_by_release() -> None:
    assert changes(LOCK, LOCK.replace("0.19.8", "0.19.9")) == "deepspeed 0.19.8 -> 0.19.9"
    assert changes("", LOCK) == "written"
