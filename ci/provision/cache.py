"""The folder where what was made once is found again: whole, or not at all.

A thing is made in a folder beside its final place and renamed; whoever finds the final name finds it complete. Two
runs that want the same thing at the same time make it once: the second waits for the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ci.provision.process import cannot_write


def key(*contents: str | bytes) -> str:
    """The address of something made out of these contents, in this order."""
    digest = hashlib.sha256()
    for content in contents:
        data = content.encode() if isinstance(content, str) else content
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def only_one(folder: Path, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of `name`; the kernel gives it back however this process ends. A wait for another run is said."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / f".{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"another run is making {name}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def made_whole(target: Path) -> Iterator[Path]:
    """A folder to make `target` in; renamed to it at the end of the block, removed if the block fails.

    Call it while holding the lock of `target`: what an earlier, killed maker left is cleared away first.
    """
    prefix = f".{target.name}-making-"
    try:
        for left in target.parent.glob(f"{prefix}*"):
            shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        scratch.chmod(0o755)
    except OSError as error:
        raise cannot_write(target.parent, error) from error
    try:
        yield scratch
        os.rename(scratch, target)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
