"""The folder of one run: made whole, locked while the run goes on, pointed to by `latest`.

results/<UTC time>-<backend>-<short id>/ holds plan.json, an order per stack, evidence.jsonl, logs/ and run.json.
A disk that is full or read-only is the place's fault, not the user's: exit code 3, with what is missing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from ci.errors import EnvironmentUnavailable

LATEST = "latest"
LOCK = ".lock"
SPACE_TO_START_MB = 64
"""Evidence and logs of the largest lane; an image or a venv asks for more, elsewhere."""
SPACE_TO_GO_ON_MB = 8


def _reason(error: OSError) -> str:
    return {
        errno.EROFS: "it is on a read-only file system",
        errno.EACCES: "you may not write there",
        errno.EPERM: "you may not write there",
        errno.ENOSPC: "the disk is full",
        errno.EDQUOT: "your quota is used up",
        errno.ENOTDIR: "part of the path is a file",
        errno.EEXIST: "a file is in the way",
    }.get(error.errno or 0, error.strerror or str(error))


@contextlib.contextmanager
def explained(path: Path, kept: str = "") -> Iterator[None]:
    """Turn an OSError while writing under `path` into one clear message with exit code 3."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        hint = f"; {kept}" if kept else "; --out DIR chooses another folder"
        raise EnvironmentUnavailable(f"cannot write {where}: {_reason(error)}{hint}") from error


def free_mb(path: Path) -> int:
    """Space that this user may still fill, in MB."""
    return shutil.disk_usage(path).free // (1024 * 1024)


class RunFolder:
    """A run's folder, locked by this process until `release`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, out: Path, backend: str, now: datetime) -> RunFolder:
        """Make and lock `out`/<UTC time>-<backend>-<short id>."""
        path = out.resolve() / f"{now:%Y%m%dT%H%M%SZ}-{backend}-{secrets.token_hex(3)}"
        with explained(out):
            path.mkdir(parents=True)
            (path / "logs").mkdir()
            lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        space = free_mb(path)
        if space < SPACE_TO_START_MB:
            os.close(lock)
            shutil.rmtree(path, ignore_errors=True)
            raise EnvironmentUnavailable(
                f"{out}: {space} MB free, {SPACE_TO_START_MB} MB needed for evidence; --out DIR chooses another place"
            )
        return cls(path, lock)

    def point_latest(self) -> None:
        """Let `latest` beside this folder point to it; replaced in one step, so that a reader never finds it gone."""
        link = self.path.parent / LATEST
        if link.exists() and not link.is_symlink():
            return  # somebody's own file or folder of that name
        fresh = self.path.parent / f".{LATEST}-{secrets.token_hex(3)}"
        fresh.symlink_to(self.path.name, target_is_directory=True)
        os.replace(fresh, link)

    def release(self) -> None:
        """End the lock; the folder stays."""
        if self._lock is not None:
            with contextlib.suppress(FileNotFoundError):
                (self.path / LOCK).unlink()
            os.close(self._lock)
            self._lock = None


def is_running(path: Path) -> bool:
    """Whether a run still writes into this folder."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False
