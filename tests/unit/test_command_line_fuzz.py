"""Any words after `python -m ci`: a documented exit code and a message, never a traceback.

Nothing may be started, fetched, served or written outside the test's own folder: programs, sockets and the Docker SDK
are refused, which is also how a host without any of them looks; a file opened for writing elsewhere fails the test.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ci import __main__ as program
from ci.errors import ExitCode
from ci.evidence import Reading
from ci.judge import judge_run
from ci.runrecord import SavedPlan, write_plan, write_run
from tests.unit import synthetic
from tests.unit.fuzz import EXAMPLES
from tests.unit.small_matrix import write

ROOT = Path(__file__).parents[2]
CODES = {int(code) for code in ExitCode}
NEVER_WITHOUT = {"schema": "--check", "defects": "--check", "survey": "--check", "run": "--dry-run"}
"""What keeps a command from writing into the repository, or from running for minutes."""

LEFT_OUT = ("bench", "mutants", "tests")
"""`bench` starts the interpreter that it runs in; `mutants` names jobs of the shipped matrix.yaml; the words of
`tests` are pytest's (tests/unit/test_selftest.py)."""


def options(command: str) -> dict[str, bool]:
    """Every option of a command, as it is written, and whether a value follows."""
    app = typer.Typer()
    app.command()(importlib.import_module(program.commands()[command]).main)
    found = {}
    for parameter in typer.main.get_command(app).params:
        for name in (*parameter.opts, *parameter.secondary_opts):
            if name.startswith("-"):
                found[name] = not getattr(parameter, "is_flag", False)
    return found


OPTIONS = {command: options(command) for command in program.commands() if command not in LEFT_OUT}
VALUES = (
    *("new", "old", "on-npu", "current", "lora", "adapter", "cpu", "cuda", "npu", "nightly", "pull-request", "weekly"),
    *("zero_stage=0", "zero_stage=0,dtype=bf16", "zero_stage=x", "dtype=", "=", "a=b,", "trainer=trl,trainer=engine"),
    *(
        "deepspeed=0.19.8",
        "deepspeed",
        "deepspeed=0.1.x",
        "torch=2.13,deepspeed>=0.18",
        "deepspeed",
        "trl",
        ">=0.14",
        ">",
    ),
    *(
        "docker",
        "venv",
        "host",
        "off",
        "on",
        "both",
        "1/2",
        "2/1",
        "0/0",
        "1/x",
        "-1",
        "0",
        "1",
        "2",
        "1e3",
        "10**9",
        "nan",
    ),
    *(
        "run",
        "broken",
        "missing",
        "latest",
        ".",
        "/",
        "/no/such",
        "matrix.yaml",
        "module.py",
        "module.py:Mine",
        "module.py:",
        ":Mine",
    ),
    *(
        "config.json",
        "bad.json",
        "requirements.txt",
        "terminal",
        "html",
        "--",
        "-",
        "",
        "\u00fc",
        "a b",
        "\x00",
        "x" * 300,
    ),
    *(
        "/bin/true",
        "python3",
        "--help",
        "-h",
        "--no-such",
        "--case=zero_stage=0",
        "--world-size=2",
        "../x",
        "zero_stage=0x1",
    ),
)

FITTING = {
    "--stack": ("new", "old", "current"),
    "--lane": ("nightly", "pull-request"),
    "--job": ("lora", "adapter"),
    "--case": (
        "zero_stage=0",
        "zero_stage=0,dtype=bf16",
        "trainer=trl",
        "user_code=keepalive",
        "dtype=bf16,dtype=fp32",
    ),
    "--with": ("deepspeed=0.15.4", "trl=1.0", "deepspeed=./docker", "torch=x.whl"),
    "--runtime": ("docker", "venv", "host"),
    "--backend": ("cpu", "npu"),
    "--corrections": ("off", "on", "both"),
    "--shard": ("1/2", "2/2", "9/9"),
    "--world-size": ("1", "4"),
    "--adapter": ("module.py:Mine",),
    "--ds-config": ("config.json",),
    "--package": ("deepspeed", "trl"),
    "--for": ("requirements.txt",),
    "--versions": ("deepspeed=0.19.8", "deepspeed>=0.18,torch=2.13"),
    "--releases": (">=0.14",),
    "--out": ("results", "matrix.yaml"),
    "--good": ("0.18.6",),
    "--bad": ("0.18.5",),
    "--minutes": ("0.1",),
    "--python": ("python3", "/bin/true"),
}


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command, mostly one there is, with options of its own and of others, and values that fit some of them."""
    command = draw(st.sampled_from((*OPTIONS, *OPTIONS, "", "no-such", "--help", "-x")))
    words = [command] if command else []
    own = OPTIONS.get(command, {"--lane": True})
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(("own",) * 9 + ("argument", "other", "value", "text")))
        if kind == "own" and own:
            option = draw(st.sampled_from(sorted(own)))
            words.append(option)
            if own[option] != (draw(st.integers(0, 19)) == 0):
                words.append(draw(st.sampled_from(FITTING.get(option, VALUES) if draw(st.integers(0, 9)) else VALUES)))
        elif kind == "argument":
            words.append(draw(st.sampled_from(("run", "run", "broken", "cpu", "new"))))
        elif kind == "other":
            words.append(draw(st.sampled_from(sorted(OPTIONS[draw(st.sampled_from(sorted(OPTIONS)))]) or ["--help"])))
        elif kind == "value":
            words.append(draw(st.sampled_from(VALUES)))
        else:
            words.append(draw(st.text(max_size=6)))
    needed = NEVER_WITHOUT.get(command)
    return words if needed is None else [command, needed, *words[1:]]


def refuse(*_: Any, **__: Any) -> Any:
    raise FileNotFoundError(2, "No such file or directory", "a program")


def unreachable(*_: Any, **__: Any) -> Any:
    raise ConnectionRefusedError(111, "Connection refused")


WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CHANGING = {"os.mkdir": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2, "os.link": 2, "os.symlink": 2}
"""Audit events that change a folder, and how many of their first arguments are paths."""


class Guard:
    """Refuses and notes what would be changed outside `folder`. An audit hook can't be taken back, hence the switch."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.changed: list[str] = []
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event == "open":
            paths = arguments[:1] if arguments[2] & WRITING else ()
        else:
            paths = arguments[: CHANGING.get(event, 0)]
        for path in paths:
            if not isinstance(path, str | os.PathLike) or path == os.devnull:
                continue
            full = Path(os.path.abspath(path))
            if not full.is_relative_to(self.folder) and "__pycache__" not in full.parts:
                self.changed.append(f"{event} {path}")
                raise PermissionError(13, "Permission denied", str(path))


GUARD = Guard()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small project to stand in, without any program or network around it."""
    root = tmp_path_factory.mktemp("words")
    write(root)
    shutil.copytree(ROOT / "docker", root / "docker")
    (root / "module.py").write_text("class Mine:\n    pass\n")
    (root / "config.json").write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
    (root / "bad.json").write_text("{")
    (root / "requirements.txt").write_text("deepspeed>=0.18\ntrl==1.16.0\n-r other.txt\n@@\n")
    (root / "run").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "plan.json").write_text('{"schema": 1}')
    plan = SavedPlan(command="x", backend="cpu", runtime="venv", started="x", cells=(synthetic.cell(zero_stage=0),))
    write_plan(root / "run", plan)
    write_run(root / "run", judge_run(plan, Reading({}), synthetic.matrix()))
    here = os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        patch.setattr(socket.socket, "connect", unreachable)
        patch.setattr(socket.socket, "bind", unreachable)
        patch.setattr(socket, "getaddrinfo", unreachable)
        patch.setenv("DOCKER_HOST", f"unix://{root}/none.sock")
        patch.setenv("HOME", str(root))
        os.chdir(root)
        yield root
        os.chdir(here)


def ends(words: list[str], folder: Path) -> tuple[int, str]:
    """The exit code and all that was said."""
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        patch.setattr(sys, "argv", ["ci", *words])
        GUARD.changed.clear()
        GUARD.folder = folder
        try:
            with pytest.raises(SystemExit) as ended:
                program.main()
        finally:
            GUARD.folder = None
    assert not GUARD.changed
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.getvalue()


@settings(max_examples=EXAMPLES)
@given(words=command_lines())
@example(words=["plan", "--lane", "nightly"])
@example(words=["sweep", "--stack", "new", "--case", "zero_stage=0"])
@example(words=["durations", "run"])
@example(words=["report", "run", "--serve"])
def test_any_words_end_with_a_documented_code(folder: Path, words: list[str]) -> None:
    code, said = ends(words, folder)
    assert code in CODES
    assert "Traceback" not in said
    assert code in (0, 1) or said.strip(), "an error without a word"


@pytest.mark.parametrize("command", sorted(OPTIONS))
def test_every_command_alone(folder: Path, command: str) -> None:
    code, said = ends([command, *filter(None, [NEVER_WITHOUT.get(command)])], folder)
    assert code in CODES and "Traceback" not in said
