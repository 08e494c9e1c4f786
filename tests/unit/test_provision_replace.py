"""`--with`: a fingerprint of what would be installed, and a copy that no later edit reaches."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ci.errors import UsageError
from ci.provision import replace
from ci.provision.runtime import Override
from tests.unit.wheelhouse import make_stack, make_wheel


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    done = subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "package").mkdir(parents=True)
    (folder / "setup.py").write_text("from setuptools import setup\nsetup(name='deepspeed', version='9.9')\n")
    (folder / "package" / "code.py").write_text("value = 1\n")
    (folder / ".gitignore").write_text("build/\n")
    return folder


def test_a_checkout_is_what_git_knows_or_would_add(checkout: Path) -> None:
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "start")
    (checkout / "build").mkdir()
    (checkout / "build" / "old.py").write_text("")
    (checkout / "new.py").write_text("")
    (checkout / "package" / "code.py").unlink()
    assert [str(name) for name in replace.checkout_files(checkout)] == [".gitignore", "new.py", "setup.py"]


def test_without_git_a_checkout_is_its_files_less_litter(checkout: Path) -> None:
    for name in ("build", ".venv", "deepspeed.egg-info", "package/__pycache__"):
        (checkout / name).mkdir()
        (checkout / name / "litter.py").write_text("")
    assert [str(name) for name in replace.checkout_files(checkout)] == [".gitignore", "package/code.py", "setup.py"]


def test_the_fingerprint_follows_the_content_and_nothing_else(checkout: Path, tmp_path: Path) -> None:
    before = replace.fingerprint(Override("deepspeed", path=checkout))
    moved = tmp_path / "moved"
    checkout.rename(moved)
    assert replace.fingerprint(Override("DeepSpeed", path=moved)) == before
    (moved / "package" / "code.py").write_text("value = 2\n")
    assert replace.fingerprint(Override("deepspeed", path=moved)) != before


def test_releases_and_wheels_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "deepspeed", "1.0")
    prints = {
        replace.fingerprint(Override("deepspeed", version="1.0")),
        replace.fingerprint(Override("deepspeed", version="1.1")),
        replace.fingerprint(Override("deepspeed", path=wheel)),
        replace.fingerprint(Override("peft", version="1.0")),
    }
    assert len(prints) == 4


def test_what_is_not_there_is_wrong_use(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file or folder"):
        replace.fingerprint(Override("deepspeed", path=tmp_path / "absent"))


def test_staging_copies_and_keeps_the_other_pins(checkout: Path, tmp_path: Path) -> None:
    recipe = make_stack(tmp_path, tmp_path / "wheels", {"deepspeed": "1.0", "peft": "2.0", "trl": "3.0"})
    wheel = make_wheel(tmp_path / "built", "peft", "2.1")
    staging = tmp_path / "staging"
    staging.mkdir()
    replace.stage(
        [Override("deepspeed", path=checkout), Override("peft", path=wheel), Override("trl", version="3.1")],
        recipe,
        staging,
    )
    assert (staging / "requirements.txt").read_text().splitlines() == [
        "deepspeed @ ./checkout-deepspeed",
        "peft @ ./peft-2.1-py3-none-any.whl",
        "trl==3.1",
    ]
    assert (staging / "constraints.txt").read_text() == ""
    assert (staging / "checkout-deepspeed" / "package" / "code.py").read_text() == "value = 1\n"


def test_a_checkout_is_described_by_its_commit_and_changes(checkout: Path) -> None:
    override = Override("deepspeed", path=checkout)
    assert replace.describe(override).endswith("(not under git)")
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "start")
    commit = git(checkout, "rev-parse", "--short=12", "HEAD")
    assert replace.describe(override) == f"deepspeed replaced by {checkout} at commit {commit}"
    (checkout / "new.py").write_text("")
    assert replace.describe(override).endswith(f"{commit}, 1 files changed")


@pytest.mark.parametrize("under_git", [True, False])
def test_a_link_to_a_folder_of_the_checkout_is_kept(checkout: Path, tmp_path: Path, under_git: bool) -> None:
    """DeepSpeed's own package `deepspeed/accelerator` is such a link; without it the copy cannot be imported."""
    (checkout / "accelerator").mkdir()
    (checkout / "accelerator" / "cpu.py").write_text("name = 'cpu'\n")
    (checkout / "package" / "accelerator").symlink_to("../accelerator/")
    if under_git:
        git(checkout, "init", "-q")
        git(checkout, "add", "-A")
        git(checkout, "commit", "-qm", "start")
    override = Override("deepspeed", path=checkout)
    before = replace.fingerprint(override)
    staged = tmp_path / "staged"
    staged.mkdir()
    recipe = make_stack(tmp_path, tmp_path / "wheels", {"deepspeed": "1.0"})
    replace.stage([override], recipe, staged)
    copied = staged / "checkout-deepspeed" / "package" / "accelerator"
    assert copied.is_symlink() and (copied / "cpu.py").read_text() == "name = 'cpu'\n"
    (checkout / "accelerator" / "cpu.py").write_text("name = 'other'\n")
    assert replace.fingerprint(override) != before
