"""Commits: of this project, and those of a checkout between two revisions, to be searched like releases."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from ci.errors import UsageError


@dataclass(frozen=True)
class Commit:
    """A commit and the first line of its message."""

    id: str
    subject: str

    def __str__(self) -> str:
        return self.id[:12]


def here() -> str | None:
    """The commit of this project, marked where the work tree differs from it; None outside git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def between(repo: Path, one: str, other: str) -> tuple[Commit, ...]:
    """Both revisions and what lies between, oldest first, along first parents: merges count as one step."""
    first, last = _resolve(repo, one), _resolve(repo, other)
    if not _is_ancestor(repo, first, last):
        first, last = last, first
    if not _is_ancestor(repo, first, last):
        raise UsageError(
            f"--repo {repo}: neither of {one} and {other} is an ancestor of the other; nothing lies between"
        )
    listed = _git(repo, "log", "--first-parent", "--reverse", "--format=%H%x09%s", f"{first}..{last}")
    start = _git(repo, "log", "-1", "--format=%H%x09%s", first)
    lines = [*start.splitlines(), *listed.splitlines()]
    return tuple(Commit(name, subject) for name, _, subject in (line.partition("\t") for line in lines))


def _resolve(repo: Path, revision: str) -> str:
    return _git(
        repo, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", failing=f"no commit {revision!r}"
    ).strip()


def _is_ancestor(repo: Path, one: str, other: str) -> bool:
    done = subprocess.run(["git", "-C", str(repo), "merge-base", "--is-ancestor", one, other], check=False)
    return done.returncode == 0


def _git(repo: Path, *arguments: str, failing: str | None = None) -> str:
    try:
        done = subprocess.run(["git", "-C", str(repo), *arguments], capture_output=True, text=True, check=True)
    except OSError as error:
        raise UsageError(f"--repo {repo}: git cannot be started: {error.strerror}") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["git failed"])[-1]
        raise UsageError(f"--repo {repo}: {failing or last}") from error
    return done.stdout
