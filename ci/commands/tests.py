"""`tests`: everything that proves this project, each part where it can run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from ci import selftest
from ci.errors import EnvironmentUnavailable, ExitCode
from ci.interrupts import Interrupts
from ci.matrix import load
from ci.progress import brief_time
from ci.provision.process import TOKEN, end
from ci.provision.recipe import recipe_for
from ci.provision.venv import VenvRuntime, isolated_environment


def main(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[PART|PATH]... [PYTEST OPTION]...", help="All parts by default.")
    ] = None,
) -> ExitCode:
    """Run the tests: unit, stack (torch), page (a browser), container, workflows (an engine), faults, families.

    --slow runs the tests that are marked slow, and only them.
    """
    chosen = selftest.choose(arguments or ())
    codes: dict[str, int] = {}
    closing: list[str] = []
    missing_in_ci = False
    with Interrupts():
        for part, words in chosen.parts:
            reason = None if part.needs is None else MISSING[part.needs]()
            if reason is not None:
                missing_in_ci = missing_in_ci or _in_ci()
                closing.append(f"{part.folder}: left out: {reason}")
                _say(closing[-1])
                continue
            python, env = _place(part)
            _say(f"{part.folder}: {python}")
            started = time.monotonic()
            codes[part.name] = _pytest(python, words, env)
            closing.append(f"{part.folder}: {_word(codes[part.name])} in {brief_time(time.monotonic() - started)}")
    _say("\n".join(closing))
    code = selftest.exit_code(list(codes.values()), selective=chosen.selective, missing_in_ci=missing_in_ci)
    if code == ExitCode.UNAVAILABLE:
        print("in CI every part must run: what is missing for it is a failure there", file=sys.stderr)
    return code


def _say(text: str) -> None:
    print(text, flush=True)


def _in_ci() -> bool:
    return os.environ.get("CI", "").lower() in ("1", "true")


def _no_engine() -> str | None:
    """Why no container test can run here; None where an engine answers and can be built with."""
    from ci.provision import engine  # the Docker SDK takes a moment, and most runs of one part need none

    try:
        engine.connect().close()
    except EnvironmentUnavailable as error:
        return error.message
    return None if engine.find_builder() else engine.NO_BUILDER


def _no_browser() -> str | None:
    """Why no test of the page can run here: Debian's chromium shows it, npm brings the accessibility rules."""
    missing = [name for name in ("chromium", "npm") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found; apt-get install {' '.join(missing)}" if missing else None


MISSING = {"engine": _no_engine, "browser": _no_browser}
"""Why a part's tests cannot run here, by what they need; None where they can."""


def _place(part: selftest.Part) -> tuple[str, Mapping[str, str]]:
    """The interpreter of a part, and its environment."""
    if part.place == "host":
        return sys.executable, os.environ
    root = Path.cwd()
    environment = VenvRuntime(root, say=_say).provision(recipe_for(load(), selftest.STACK, root))
    return environment.python, isolated_environment(environment.python)


def _pytest(python: str, words: Sequence[str], env: Mapping[str, str]) -> int:
    """pytest's exit code. Its output is not touched; an interrupt ends it and all that it started."""
    token = uuid.uuid4().hex
    command = [python, "-m", "pytest", *words]
    process = subprocess.Popen(command, env={**env, TOKEN: token}, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait()
    except BaseException:  # an interrupt: nothing of the tests may go on
        end(process, token)
        raise


def _word(code: int) -> str:
    words = {0: "passed", 1: "FAILED", selftest.NOTHING_COLLECTED: "no test selected"}
    return words.get(code, f"FAILED (pytest ended with {code})")
