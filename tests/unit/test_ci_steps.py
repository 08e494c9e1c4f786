"""CI runs what the README tells people to run, step by step."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = sorted((ROOT / ".ci" / "steps").iterdir())


@pytest.mark.parametrize("script", [ROOT / ".ci" / "run", *STEPS], ids=lambda path: path.name)
def test_a_step_is_a_script_with_a_number_of_its_own(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    numbers = [path.name[:3] for path in STEPS]
    assert len(set(numbers)) == len(STEPS) and all(re.match(r"\d\d-[a-z-]+\.sh$", path.name) for path in STEPS)


@pytest.mark.parametrize(("step", "session"), [("50-cpu-zero.sh", "cpu-zero"), ("60-tests.sh", "tests")])
def test_the_readme_s_commands_are_what_ci_runs(step: str, session: str) -> None:
    script = (ROOT / ".ci" / "steps" / step).read_text()
    found = re.search(r"grep -m 1 -E '([^']+)' README\.md", script)
    assert found is not None
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if re.match(found[1], line)]
    assert len(lines) == 1 and lines[0].endswith(f"nox -s {session}")


def test_all_steps_end_in_one_closing_line(tmp_path: Path) -> None:
    """The line by which a reader sees that tests ran, over several pytest runs."""
    ci = tmp_path / ".ci"
    (ci / "steps").mkdir(parents=True)
    (ci / "ends").mkdir()
    (ci / "run").write_bytes((ROOT / ".ci" / "run").read_bytes())
    lines = ["= 3 passed, 1 skipped in 1.20s =", "12 passed in 0.50s", "not 7 passed"]
    (ci / "steps" / "10-a.sh").write_text("".join(f"echo '{line}'\n" for line in lines))
    (ci / "steps" / "15-ci.sh").write_text('[ "$CI" = true ] || exit 9\n')  # no engine is a failure in CI
    (ci / "steps" / "20-b.sh").write_text("echo '= 2 failed, 4 passed, 1 error in 61.00s (0:01:01) ='; exit 7\n")
    (ci / "steps" / "30-c.sh").write_text("echo never\n")
    (ci / "ends" / "end.sh").write_text('echo "the end of $CI_STATE"\n')
    env = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(["bash", ci / "run"], capture_output=True, text=True, cwd="/", env=env)
    assert done.returncode == 7
    assert done.stdout.splitlines()[-1] == "19 passed, 3 failed, 1 skipped"
    assert "the end of" in done.stdout and "never" not in done.stdout
    assert re.search(r"^20-b +\d+ s  exit 7$", done.stdout, re.MULTILINE)
