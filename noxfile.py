# /// script
# requires-python = ">=3.11"
# dependencies = ["nox[uv]"]
# ///
"""The sessions people type; what they do is in ci/, and everything after `--` goes there untouched.

    python3 -m venv .venv && .venv/bin/pip install "nox[uv]" && .venv/bin/nox -s cpu-zero

A session ends with the exit code of `python -m ci` (docs of the codes: ci/errors.py): nox by itself would turn every
failure into 1.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2024.3.2"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["cpu-zero"]

HOST = "ci/requirements/host.txt"
DEV = "ci/requirements/dev.txt"
BUILD_TOOLS = "docker/locks/build-tools.txt"


def install(session: nox.Session, lock: str) -> None:
    """Install a lock with its hashes; an environment that already has it costs a look."""
    # A site that re-signs TLS has its certificate in the system's store, which uv reads only when told to.
    session.install("--quiet", "--require-hashes", "-r", lock, env={"UV_SYSTEM_CERTS": "1"})


def ci(session: nox.Session, *arguments: str) -> None:
    """Run `python -m ci` and end with its exit code; a signal to nox reaches it, so that it can tidy up."""
    python = os.path.join(session.bin, "python")
    path = os.pathsep.join([session.bin, os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "UV_SYSTEM_CERTS": "1", "PATH": path, "VIRTUAL_ENV": session.virtualenv.location}
    process: subprocess.Popen[bytes] | None = None

    def forward(number: int, _frame: object) -> None:
        if process is not None:
            process.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    process = subprocess.Popen([python, "-m", "ci", *arguments], env=environment)
    code = process.wait()
    if code:
        sys.exit(code if code > 0 else 128 - code)


@nox.session(name="cpu-zero")
def cpu_zero(session: nox.Session) -> None:
    """Does this pin train correctly on CPU? Docker if an engine answers, else a virtual environment."""
    install(session, HOST)
    ci(session, "run", "--backend", "cpu", *session.posargs)


@nox.session(name="cuda-zero")
def cuda_zero(session: nox.Session) -> None:
    """The same question on NVIDIA GPUs; refuses with exit code 3 on a host without one."""
    install(session, HOST)
    ci(session, "run", "--backend", "cuda", *session.posargs)


@nox.session(name="npu-zero")
def npu_zero(session: nox.Session) -> None:
    """The same question on Ascend NPUs; refuses with exit code 3 on a host without one."""
    install(session, HOST)
    ci(session, "run", "--backend", "npu", *session.posargs)


@nox.session(name="ci", default=False)
def any_command(session: nox.Session) -> None:
    """Any command of `python -m ci`; `-- --help` lists them."""
    install(session, HOST)
    ci(session, *session.posargs)


@nox.session
def doctor(session: nox.Session) -> None:
    """What this host can run, and what is missing for each backend."""
    install(session, HOST)
    ci(session, "doctor", *session.posargs)


@nox.session(default=False)
def report(session: nox.Session) -> None:
    """Make report.html of a run, or of several as one page; `--serve` shows it."""
    install(session, HOST)
    ci(session, "report", "--format", "html", *session.posargs)


@nox.session(default=False)
def screenshots(session: nox.Session) -> None:
    """Photograph the example page for the README (needs chromium)."""
    install(session, DEV)
    session.run("python", "-m", "tests.page.screenshots", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Everything that proves the project; `-- unit`, `faults`, ..., a path or `--slow` select."""
    install(session, DEV)
    ci(session, "tests", "--", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, and what reads the YAML, the Dockerfiles and the workflows; schemas and generated pages up to date."""
    install(session, DEV)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("yamllint", "--strict", ".")
    session.run("hadolint", *sorted(map(str, Path("docker").glob("*.Dockerfile"))))
    session.run("actionlint")
    session.run("zizmor", "--offline", "--no-progress", "--quiet", ".github")
    workflows = sorted(map(str, Path(".github/workflows").glob("*.yml")))
    session.run("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *workflows)
    session.run("python", "-m", "ci", "schema", "--check")
    session.run("python", "-m", "ci", "defects", "--check")
    session.run("python", "-m", "ci", "survey", "--check")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict over ci/, tests/ and the noxfile."""
    install(session, DEV)
    session.run("mypy", *session.posargs)


@nox.session(default=False)
def images(session: nox.Session) -> None:
    """Build the images of the stacks (all, or those named); --push, --pull, --save and --load carry them elsewhere."""
    install(session, HOST)
    ci(session, "images", *session.posargs)


@nox.session(default=False)
def sbom(session: nox.Session) -> None:
    """What is in an image, as SPDX: `-- IMAGE FILE`."""
    install(session, DEV)
    image, file = session.posargs
    session.run("syft", "scan", "--quiet", f"docker:{image}", "--output", f"spdx-json={file}")


@nox.session(default=False)
def lock(session: nox.Session) -> None:
    """Resolve the locks anew: the host's requirements, the images' build tools and the stacks in docker/locks."""
    install(session, HOST)
    compile_lock = ["uv", "pip", "compile", "--quiet", "--universal", "--python-version=3.11", "--generate-hashes"]
    compile_lock += ["--no-emit-index-url", "--no-emit-find-links", "--custom-compile-command=nox -s lock"]
    for target in (HOST, DEV, BUILD_TOOLS):
        source = target.replace(".txt", ".in")
        session.run(*compile_lock, source, "-o", target, env={"UV_SYSTEM_CERTS": "1"})
    ci(session, "lock", *session.posargs)


@nox.session(name="base-image", default=False)
def base_image(session: nox.Session) -> None:
    """Make the base image without a registry, by debootstrap."""
    install(session, HOST)
    ci(session, "base-image", *session.posargs)


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """How long plan, start-up and the cases take on this host."""
    install(session, HOST)
    ci(session, "bench", *session.posargs)


@nox.session(default=False)
def calibrate(session: nox.Session) -> None:
    """Measure tolerances: repeats of clean cases with new seeds."""
    install(session, HOST)
    ci(session, "calibrate", *session.posargs)


@nox.session(default=False)
def repeats(session: nox.Session) -> None:
    """Repeat clean cases with new seeds under load and look for false alarms."""
    install(session, HOST)
    ci(session, "repeats", *session.posargs)


@nox.session(default=False)
def sweep(session: nox.Session) -> None:
    """Draw engine configurations that nobody wrote a case for, and make small what fails."""
    install(session, HOST)
    ci(session, "sweep", *session.posargs)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Plant faults into the training stack and see whether the checks notice."""
    install(session, HOST)
    ci(session, "mutants", *session.posargs)


@nox.session(default=False)
def watch(session: nox.Session) -> None:
    """Are there newer releases than the pins, do they train correctly, and what changes in matrix.yaml?"""
    install(session, HOST)
    ci(session, "watch", *session.posargs)


@nox.session(default=False)
def survey(session: nox.Session) -> None:
    """How every release of a package behaves in a few cases of all jobs: docs/compatibility.md."""
    install(session, HOST)
    ci(session, "survey", *session.posargs)


@nox.session(default=False)
def bisect(session: nox.Session) -> None:
    """In which release, or commit, a case changed its behaviour, with both sides' numbers."""
    install(session, HOST)
    ci(session, "bisect", *session.posargs)


if __name__ == "__main__":
    nox.main()
