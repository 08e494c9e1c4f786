"""A stack with one package at another release, for a few megabytes: everything else is the stack's own environment.

An overlay is a virtual environment that holds the one package alone; a line in a .pth file makes the stack's packages
importable behind it. So fifty releases of DeepSpeed share one torch, and each is built against it. What a release
requires and the stack does not have (transformers pins its tokenizers closely) goes into the overlay too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ci.errors import CiError, EnvironmentUnavailable, ExitCode, UsageError
from ci.provision import cache, process
from ci.provision.runtime import Environment, Recipe
from ci.provision.site import hosts_fault, uv, uv_executable
from ci.provision.venv import VenvRuntime, isolated_environment

#: Changed when an overlay made by an older version of this module must not be found again.
FORMAT = "overlay-1"
ROUNDS = 4
"""How often requirements of requirements are looked after; what is still missing then shows at the import."""
IMPORT_LIMIT_S = 300.0

_REQUIREMENTS = (
    "import importlib.metadata as m, json, sys;print(json.dumps({n: m.requires(n) or [] for n in sys.argv[1:]}))"
)


@dataclass(frozen=True)
class Release:
    """What to put on top of a stack: a release of a package, or a commit of a checkout of it."""

    package: str
    version: str
    repo: Path | None = None
    commit: str | None = None

    def __str__(self) -> str:
        return f"{self.package} {self.version}"


class NotUsable(CiError):
    """This release cannot be installed beside the stack, or not imported there; a fact about it, not about the host.

    what: "installed" or "imported".
    """

    def __init__(self, release: Release, what: str, why: str) -> None:
        super().__init__(f"{release} cannot be {what}: {why}", ExitCode.UNAVAILABLE)
        self.what = what
        self.why = why


class OverlayRuntime(VenvRuntime):
    """Virtual environments, and overlays on them."""

    def overlay(self, recipe: Recipe, release: Release) -> Environment:
        """The stack with this release on top, made or found again. NotUsable where the release does not go there."""
        started = time.monotonic()
        base = self.provision(recipe)
        if base.folder is None:
            raise EnvironmentUnavailable(f"stack {recipe.stack} has no folder of its own")
        target = self.overlay_folder(recipe, release)
        reused = (target / "packages.json").is_file()
        if not reused:
            with cache.only_one(self._folder, target.name, self._say):
                reused = (target / "packages.json").is_file()
                if not reused:
                    self._make_overlay(recipe, release, base.folder, target)
        environment = Environment(
            kind="venv",
            stack=recipe.stack,
            python=str(target / "bin" / "python"),
            packages=json.loads((target / "packages.json").read_text())["packages"],
            folder=target,
            overrides=(str(release),),
            reused=reused,
            seconds=time.monotonic() - started,
        )
        self._check_import(recipe, release, target)
        return environment

    def overlay_folder(self, recipe: Recipe, release: Release) -> Path:
        """Where the overlay is, or would be made."""
        package = canonicalize_name(release.package)
        key = cache.key(FORMAT, self.folder(recipe).name, package, release.version, release.commit or "")
        return self._folder / f"{recipe.stack}-{package}-{release.version}-{key}"

    def brought_along(self, recipe: Recipe, release: Release) -> dict[str, str]:
        """The packages that came with the release since the stack has them in another version, or not at all."""
        base, top = (
            json.loads((folder / "packages.json").read_text(encoding="utf-8"))["packages"]
            if (folder / "packages.json").is_file()
            else {}
            for folder in (self.folder(recipe), self.overlay_folder(recipe, release))
        )
        own = canonicalize_name(release.package)
        return {name: new for name, new in top.items() if name != own and base.get(name) != new}

    def _make_overlay(self, recipe: Recipe, release: Release, base: Path, target: Path) -> None:
        self._say(f"{release}: making an overlay on {recipe.stack}")
        inside = next((base / "lib").glob("python*/site-packages")).relative_to(base)
        with cache.made_whole(target) as scratch, tempfile.TemporaryDirectory(prefix="overlay-") as staging:
            python = os.path.realpath(base / "bin" / "python")
            arguments = ["venv", "--quiet", "--relocatable", "--no-python-downloads", "--python", python, str(scratch)]
            uv(self._site, arguments, f"an overlay on stack {recipe.stack} cannot be made")
            (scratch / inside / "base.pth").write_text(f"{base / inside}\n", encoding="utf-8")
            _share_byte_code(base, scratch)
            what = f"{release.package}=={release.version}"
            if release.repo is not None:
                _extract(release, Path(staging))
                what = f"{release.package} @ {Path(staging).as_uri()}"
            self._install(release, recipe, scratch, [what])
            self._complete(release, recipe, scratch)
            record = str(recipe.dockerfile.parent / "record-packages.py")
            done = process.run([str(scratch / "bin" / "python"), "-I", record])
            if done.code:
                raise EnvironmentUnavailable(f"{release}: what is installed cannot be listed: {last_line(done.said)}")
            (scratch / "packages.json").write_text(done.output, encoding="utf-8")

    def _install(self, release: Release, recipe: Recipe, folder: Path, requirements: list[str]) -> None:
        command = [uv_executable(), "pip", "install", "--quiet", "--python", str(folder / "bin" / "python")]
        command += ["--no-deps", "--no-build-isolation", *requirements]
        # As docker/replace-packages.sh is run: no operator compiled in advance, no commit of the folder around.
        env = self._site.uv_environment() | {
            "DS_BUILD_OPS": "0",
            "DS_ACCELERATOR": recipe.backend,
            "GIT_DIR": os.devnull,
        }
        done = process.run(command, env=env)
        if done.code:
            if hosts_fault(done.said):
                raise EnvironmentUnavailable(f"{release} cannot be fetched: {last_line(done.said)}")
            raise NotUsable(release, "installed", last_line(done.said))

    def _complete(self, release: Release, recipe: Recipe, folder: Path) -> None:
        """Install what the package requires in another release than the stack has. DeepSpeed asks for nothing exact."""
        python = str(folder / "bin" / "python")
        looked_at: set[str] = set()
        fresh = [canonicalize_name(release.package)]
        for _ in range(ROUNDS):
            asked = process.run([python, "-I", "-c", _REQUIREMENTS, *fresh])
            listed = process.run([python, "-I", str(recipe.dockerfile.parent / "record-packages.py")])
            if asked.code or listed.code:
                raise NotUsable(release, "installed", last_line(asked.said or listed.said))
            looked_at.update(fresh)
            missing = unsatisfied(json.loads(asked.output), json.loads(listed.output)["packages"])
            if not missing:
                return
            self._install(release, recipe, folder, [str(requirement) for requirement in missing])
            fresh = [canonicalize_name(requirement.name) for requirement in missing]

    def _check_import(self, recipe: Recipe, release: Release, folder: Path) -> None:
        """Import once what every rank will have imported, and remember how it went: the byte code is made here too."""
        kept = folder / "imported"
        if kept.is_file():
            return
        python = str(folder / "bin" / "python")
        env = isolated_environment(python) | {
            "DS_ACCELERATOR": recipe.backend,
            "JOBS_WITH_TRL": "0",
            "PYTHONPATH": str(self._root),
            "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
        }
        names = ["tests.jobs.preload", release.package]
        program = f"import {', '.join(name.replace('-', '_') for name in names)}"
        done = process.run([python, "-c", program], env=env, cwd=self._root, timeout=IMPORT_LIMIT_S)
        if done.code:
            raise NotUsable(release, "imported", last_line(done.errors) or f"exit code {done.code}")
        kept.touch()


def unsatisfied(requires: dict[str, list[str]], installed: dict[str, str]) -> list[Requirement]:
    """The requirements that hold here (markers, without extras) and that what is installed does not fulfil."""
    found: dict[str, Requirement] = {}
    for text in (text for texts in requires.values() for text in texts):
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = installed.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            requirement.marker = None
            found.setdefault(canonicalize_name(requirement.name), requirement)
    return [found[name] for name in sorted(found)]


def last_line(said: str) -> str:
    """The line of an error that says what went wrong: the last one that is not a hint."""
    lines = [line.strip() for line in said.splitlines()]
    telling = [line for line in lines if line and not line.startswith(("hint:", "╰", "help:"))]
    return telling[-1].removeprefix("╰─▶ ").strip()[:300] if telling else ""


def _share_byte_code(base: Path, overlay: Path) -> None:
    """Let an overlay's byte code of what it does not hold itself be the stack's: torch's alone is 100 MB and 20 s.

    PYTHONPYCACHEPREFIX mirrors absolute paths below one folder, so a link for each shared tree does it.
    """
    for tree in (base, Path(sys.base_prefix)):
        shared = base / "pycache" / tree.relative_to(tree.anchor)
        own = overlay / "pycache" / tree.relative_to(tree.anchor)
        shared.mkdir(parents=True, exist_ok=True)
        own.parent.mkdir(parents=True, exist_ok=True)
        own.symlink_to(shared, target_is_directory=True)


def _extract(release: Release, folder: Path) -> None:
    """The files of a commit, without touching the checkout's own work tree."""
    archive = ["git", "-C", str(release.repo), "archive", "--format=tar", str(release.commit)]
    with tempfile.TemporaryFile() as packed:
        try:
            subprocess.run(archive, stdout=packed, stderr=subprocess.PIPE, check=True)
            packed.seek(0)
            subprocess.run(["tar", "-x", "-C", str(folder)], stdin=packed, stderr=subprocess.PIPE, check=True)
        except subprocess.CalledProcessError as error:
            raise UsageError(f"--repo {release.repo}: {last_line(error.stderr.decode(errors='replace'))}") from error
