"""`python -m ci`: one message on standard error, the documented code, and never a traceback for a user's mistake."""

from __future__ import annotations

import errno
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ci import __main__ as program
from ci.commands import plan as plan_command
from ci.commands import schema as schema_command
from ci.errors import ExitCode

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def ci(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run a command line in this process: (exit code, standard output, standard error)."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ci", *words])
        with pytest.raises(SystemExit) as ended:
            program.main()
        out, err = capsys.readouterr()
        code = ended.value.code
        assert isinstance(code, int)
        return code, out, err

    return call


def test_every_command_file_is_picked_up() -> None:
    files = {path.stem for path in (ROOT / "ci" / "commands").glob("*.py")} - {"__init__", "options"}
    assert {name.replace("-", "_") for name in program.commands()} == files
    assert {"plan", "run", "judge", "report", "diff", "doctor", "schema"} <= set(program.commands())


def test_every_command_has_help(ci: Call) -> None:
    code, out, _ = ci("--help")
    assert code == ExitCode.OK
    for name, module in program.commands().items():
        assert name in out
        assert callable(importlib.import_module(module).main)
    assert ci()[1] == out
    assert ci("plan", "--help")[0] == ExitCode.OK


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("paln", 2, "unknown command 'paln'; did you mean plan?"),
        ("audit", 2, "Missing argument"),
        ("audit /no/such.jsonl", 2, "/no/such.jsonl: No such file or directory; expected a training log"),
        ("audit . .", 2, "Is a directory"),
        ("audit a b c", 2, "found 3 files; expected one training log, or two"),
        ("audit matrix.yaml", 2, "matrix.yaml: found no training record; expected logging.jsonl"),
        ("audit matrix.yaml --clip=-1", 2, "'--clip'"),
        # Before anything is measured; on the host nothing could be.
        ("calibrate --write --repeats 29 --runtime host", 2, "--write needs at least 30 repeats, not 29"),
        (
            "calibrate --write --job fp16-optimizers --case zero_stage=1 --runtime host",
            2,
            "--write replaces whole groups, and fp16-optimizers at ZeRO 0, 1, 2, 3 in fp16 is also made from",
        ),
        ("repeats --write --job grpo-lora --runtime host", 2, "--write needs every case of the lane"),
        ("mutants --write --first --runtime host", 2, "--write needs every mutant in all of its cases"),
        ("plan --stak newest", 2, "No such option: --stak (Possible options: --shard, --stack)"),
        ("plan newest", 2, "unexpected extra argument(s) (newest)"),
        ("plan --world-size two", 2, "'--world-size': Input should be a valid integer"),
        ("plan --world-size", 2, "requires an argument"),
        ("plan --runtime podman", 2, "'podman' is not one of 'docker', 'venv', 'host'"),
        ("plan --stack newst", 2, "unknown stack 'newst'; did you mean newest?"),
        ("plan --job grpo", 2, "unknown job 'grpo'; did you mean grpo-lora?"),
        ("plan --backend gpu", 2, "unknown backend 'gpu'"),
        ("plan --case zero_stages=1", 2, "did you mean zero_stage?"),
        ("plan --lane weeekly", 2, "did you mean weekly?"),
        ("plan --corrections maybe", 2, "'maybe' is not one of 'off', 'on', 'both'"),
        ("advice --versions deepspeed", 2, "found 'deepspeed'; expected PKG=VERSION"),
        ("advice --versions torch=2.13", 2, "does not name deepspeed"),
        ("advice --versions deepspeed=0.1.x", 2, "found 'deepspeed=0.1.x'"),
        ("advice --for /no/such.txt", 2, "/no/such.txt: No such file"),
        ("advice --for a --versions b=1", 2, "--for and --versions both give pins"),
        ("plan --devices 0,1", 2, "backend cpu has no devices"),
        ("plan --python python3", 2, "--python names the interpreter of --runtime host"),
        ("plan --runtime host --stack current --python /no/python", 3, "--python /no/python: no such interpreter"),
        ("plan --with deepspeed=0.14.0", 2, "no cell can run with these pins: needs deepspeed >=0.14.4"),
        ("run --backend cuda", 3, "cuda: this host has no device for it"),
        ("plan --ds-config /no/such.json", 2, "/no/such.json: no such file"),
        ("run --stack newst", 2, "unknown stack 'newst'; did you mean newest?"),
        ("run --devices 0", 2, "backend cpu has no devices"),
    ],
)
def test_a_mistake_is_one_message_and_its_code(words: str, code: int, says: str, ci: Call) -> None:
    ended, _, err = ci(*words.split())
    assert (ended, says in err) == (code, True), err
    assert "Traceback" not in err


def test_a_mistake_in_the_matrix_names_file_and_line(ci: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "matrix.yaml").write_text("schema: 2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert ci("plan") == (2, "", "matrix.yaml:1: schema: found 2; expected 1\n")


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "No space left on device", "results/run.json"), 3, "cannot write results/run.json"),
        (OSError(errno.ENOTDIR, "Not a directory", "matrix.yaml/x"), 3, "cannot write matrix.yaml/x: Not a directory"),
    ],
)
def test_what_ends_a_command_from_outside(
    error: BaseException, code: int, says: str, ci: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(plan_command, "load", fail)
    ended, _, err = ci("plan")
    assert (ended, says in err) == (code, True), err


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(plan_command, "load", fail)
    with pytest.raises(ZeroDivisionError):
        program.run(["plan"])


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    line = f"set -o pipefail; {sys.executable} -m ci plan --lane weekly 2>/dev/null | head -n 1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n"), done.stderr) == (0, 1, "")


def test_plan_prints_a_cell_a_line(ci: Call) -> None:
    code, out, err = ci("plan", "--stack", "report-a", "--job", "zero3-custom-adapter", "--case", "user_code=plain")
    assert (code, out) == (0, "cpu/report-a/zero3-custom-adapter/plain\n")
    assert err == "1 cell on report-a; 0 not run\n"


def test_plan_says_why_a_cell_is_not_run(ci: Call) -> None:
    code, out, err = ci("plan", "--with", "trl=0.16.1", "--job", "grpo-lora", "--case", "zero_stage=3")
    assert code == 0
    assert "cpu/newest/grpo-lora/trl-zero3-bf16-gas4\tnot run: needs trl >=0.17, stack newest has 0.16.1" in out
    assert "2 not run" in err


def test_plan_as_json_is_the_whole_plan(ci: Call) -> None:
    plan = json.loads(ci("plan", "--json", "--case", "zero_stage=2", "--runtime", "venv")[1])
    assert plan["stacks"]["newest"]["deepspeed"] == "0.19.8"
    cell = next(cell for cell in plan["cells"] if cell["id"] == "cpu/newest/grpo-lora/zero2-bf16-gas4")
    assert cell["case"]["gradient_accumulation_steps"] == 4
    assert cell["command"].endswith(" --runtime venv")


def test_plan_for_github_is_one_job_a_stack(ci: Call) -> None:
    matrix = json.loads(ci("plan", "--github", "--lane", "nightly")[1])["include"]
    assert [job["stack"] for job in matrix] == sorted(job["stack"] for job in matrix)
    assert {"slug": "cpu-nightly-newest", "stack": "newest", "labels": ["ubuntu-24.04"]}.items() <= matrix[1].items()
    assert all(job["cells"] > 0 for job in matrix)


def test_code_of_anybody_gets_no_self_hosted_runner(ci: Call) -> None:
    words = ("plan", "--backend", "cuda", "--lane", "nightly", "--github")
    assert json.loads(ci(*words)[1])["include"][0]["labels"][0] == "self-hosted"
    code, out, err = ci(*words, "--hosted-only")
    assert (code, out) == (2, "")
    assert "code of a pull request does not run on self-hosted runners" in err


def test_current_is_read_from_the_interpreter_given(ci: Call, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho \'{"deepspeed": "0.18.9", "transformers": "4.57.6"}\'\n', encoding="utf-8")
    python.chmod(0o755)
    words = ("plan", "--stack", "current", "--runtime", "host", "--python", str(python))
    code, out, err = ci(*words, "--job", "zero3-custom-adapter")
    assert code == 0
    assert "cpu/current/zero3-custom-adapter/plain\n" in out
    assert "current: nearest shipped stack is stable" in err
    python.write_text("#!/bin/sh\necho 'no pip here' >&2; exit 1\n", encoding="utf-8")
    code, _, err = ci(*words)
    assert (code, err) == (3, f"{python} cannot list its packages: no pip here\n")


def test_schema_writes_and_checks(ci: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema_command, "FOLDER", tmp_path)
    code, _, err = ci("schema", "--check")
    files = {f"{name}.schema.json" for name in schema_command.SOURCES}
    assert (code, err) == (
        1,
        f"not up to date: {', '.join(sorted(files))}; run `python -m ci schema` and commit\n",
    )
    assert list(tmp_path.iterdir()) == []
    assert ci("schema")[0] == 0
    assert ci("schema", "--check")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == files


def test_import_docker_is_the_sdk_and_ci_is_empty() -> None:
    """docker/ is a folder of files: a package of that name would hide the SDK from everything started here."""
    assert (ROOT / "ci" / "__init__.py").read_text(encoding="utf-8") == ""
    assert not list((ROOT / "docker").rglob("__init__.py"))
    line = "import docker; print(docker.from_env.__module__)"
    done = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "docker.client\n"
