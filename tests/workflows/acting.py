"""The workflows of a copy of this project, run by act as they stand: its commands are real, on this host.

What is fetched by name on GitHub is a stand-in of tests/workflows/actions here: artifacts go to a folder. act passes
over a job whose runner's label it does not know and calls that a success; here it is none.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
HOSTED = "ubuntu-24.04"
LIMIT_S = 600
_USES = re.compile(r"uses: (?P<name>actions/(?P<folder>[a-z-]+)@[0-9a-f]{40})")
_PASSED_OVER = re.compile(r"Skipping unsupported platform")


@dataclass(frozen=True)
class Outcome:
    """What came of a workflow. passed_over: jobs without a runner. left: the artifacts' folders by name."""

    code: int
    said: str
    left: Mapping[str, Path]

    @property
    def passed_over(self) -> int:
        return len(_PASSED_OVER.findall(self.said))

    @property
    def passed(self) -> bool:
        return self.code == 0 and not self.passed_over

    def runs(self) -> list[dict[str, Any]]:
        """run.json of every run among the artifacts."""
        files = [file for name in sorted(self.left) for file in sorted(self.left[name].glob("20*/run.json"))]
        return [json.loads(file.read_text()) for file in files]

    def verdicts(self) -> list[str]:
        return [cell["verdict"] for run in self.runs() for cell in run["cells"]]


@dataclass
class Project:
    """A copy of the working tree. known: labels that have a runner, which is this host."""

    root: Path
    artifacts: Path
    known: Sequence[str] = (HOSTED,)
    environment: dict[str, str] = field(default_factory=dict)
    token: str | None = None

    @classmethod
    def copied(cls, folder: Path) -> Project:
        root = folder / "project"
        listed = _git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        for name in filter(None, listed):
            if (ROOT / name).is_file():  # not removed since, and no folder of links
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name)
        _git(root, "init", "--quiet", "--initial-branch", "main")
        found = cls(root, folder / "artifacts")
        found.commit("as it is")
        return found

    def commit(self, message: str) -> None:
        _git(self.root, "add", "--all")
        who = ("-c", "user.name=someone", "-c", "user.email=someone@localhost")
        _git(self.root, *who, "commit", "--quiet", "--message", message)

    def change_matrix(self, change: Any) -> None:
        """matrix.yaml with `change` made to its content, committed."""
        yaml = YAML()
        yaml.width = 4096
        path = self.root / "matrix.yaml"
        data = yaml.load(path)
        change(data)
        yaml.dump(data, path)
        self.commit("another matrix")

    def alone(self, workflow: str, job: str) -> str:
        """The name of a workflow that has this job of another and nothing that it waits for.

        act ends where a workflow that was called has failed; GitHub goes on with the jobs that ask to run then.
        """
        yaml = YAML()
        folder = self.root / ".github" / "workflows"
        data = yaml.load(folder / workflow)
        del data["jobs"][job]["needs"]
        data["jobs"] = {job: data["jobs"][job]}
        name = f"only-{job}.yml"
        with (folder / name).open("w") as file:
            yaml.dump(data, file)
        return name

    def act(
        self, event: str, workflow: str, *words: str, payload: Mapping[str, Any] | None = None, anew: bool = True
    ) -> Outcome:
        """Run it for an event until it ends. anew: without the artifacts of an earlier run."""
        if anew:
            shutil.rmtree(self.artifacts, ignore_errors=True)
        self.artifacts.mkdir(exist_ok=True)
        scratch = self.root.parent
        (scratch / "event.json").write_text(json.dumps(payload or {}))
        command = [str(Path(sys.executable).with_name("act")), event, "--workflows", f".github/workflows/{workflow}"]
        command += ["--eventpath", str(scratch / "event.json"), "--action-cache-path", str(scratch / "act")]
        command += ["--no-cache-server", "--container-daemon-socket", "-", *words]
        for label in self.known:
            command += ["--platform", f"{label}=-self-hosted"]
        for name, folder in self._stand_ins().items():
            command += ["--local-repository", f"{name}={folder}"]
            if server := self.environment.get("GITHUB_SERVER_URL"):
                command += ["--local-repository", f"{server}/{name}={folder}"]
        for name, value in {"ARTIFACTS": str(self.artifacts), **self.environment}.items():
            command += ["--env", f"{name}={value}"]
        if self.token is not None:
            command += ["--secret", f"GITHUB_TOKEN={self.token}"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("GITHUB_", "NOX"))}
        # Nobody's own settings, and no question about which images to take.
        (scratch / "config" / "act").mkdir(parents=True, exist_ok=True)
        (scratch / "config" / "act" / "actrc").write_text("")
        environment |= {"NO_COLOR": "1", "TERM": "dumb"}
        environment["XDG_CONFIG_HOME"] = str(scratch / "config")
        done = subprocess.run(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
        (scratch / "act.log").write_text(done.stdout)
        return Outcome(done.returncode, done.stdout, {each.name: each for each in self.artifacts.iterdir()})

    def _stand_ins(self) -> dict[str, Path]:
        """Each action that a workflow names with its commit, and the folder that stands for it. act has checkout's."""
        texts = [path.read_text() for path in (self.root / ".github" / "workflows").glob("*.yml")]
        found = {match["name"]: match["folder"] for text in texts for match in _USES.finditer(text)}
        here = ROOT / "tests" / "workflows" / "actions"
        return {name: here / folder for name, folder in found.items() if folder != "checkout"}


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *words], check=True, stdout=subprocess.PIPE, text=True, timeout=60
    ).stdout
