"""Child processes that leave nothing behind, however they or we end.

A rank starts its own session and outlives its parent for a moment, so a process group is not enough to find all of a
run. Every run therefore carries a token in its environment: whatever process has the token, belongs to the run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.errors import EnvironmentUnavailable
from ci.provision.owner import is_orphan, owner

TOKEN = "CI_RUN_TOKEN"
GRACE_S = 5.0
SCRATCH = "ci-run-"
_OWNER = "owner"


@dataclass(frozen=True)
class Finished:
    """What a tool of ours (uv, docker, debootstrap) said and how it ended."""

    command: tuple[str, ...]
    code: int
    output: str
    errors: str

    @property
    def said(self) -> str:
        """All it printed, for a message or a search."""
        return "\n".join(part for part in (self.errors.strip(), self.output.strip()) if part)


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    log: Path | None = None,
    timeout: float | None = None,
) -> Finished:
    """Run a tool to its end in a session of its own; an exception or interrupt ends the whole session.

    With `log` both streams go to that file, and `output` is its text.
    """
    token = uuid.uuid4().hex
    environment = {**(os.environ if env is None else env), TOKEN: token}
    with contextlib.ExitStack() as stack:
        sink = stack.enter_context(log.open("wb")) if log else None
        try:
            process = subprocess.Popen(
                list(command),
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=sink or subprocess.PIPE,
                stderr=subprocess.STDOUT if sink else subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise EnvironmentUnavailable(f"cannot start {command[0]}: {error.strerror or error}") from error
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as error:
            _end_session(process, token)
            raise EnvironmentUnavailable(f"{command[0]} did not answer within {timeout:.0f} s") from error
        except BaseException:  # an interrupt too: nothing of the tool may go on
            _end_session(process, token)
            raise
    text = log.read_text(errors="replace") if log else (output or b"").decode(errors="replace")
    return Finished(tuple(command), process.returncode, text, (errors or b"").decode(errors="replace"))


def with_token(token: str) -> list[int]:
    """Processes whose first environment held the token (forked children show it as well)."""
    wanted = f"{TOKEN}={token}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            environment = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # ended meanwhile, or another user's
            continue
        if wanted in environment.split(b"\0") and state not in "ZX":
            found.append(int(entry.name))
    return found


def _end_session(process: subprocess.Popen[bytes], token: str) -> None:
    """Ask a tool and its children to end (an image build to cancel, debootstrap to unmount), then kill them."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)
    _kill(process, token)


def end(process: subprocess.Popen[bytes], token: str) -> None:
    """Interrupt a pytest (its children see to themselves), give it some seconds, then kill all that has the token."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    _kill(process, token)


def _kill(process: subprocess.Popen[bytes], token: str) -> None:
    """Kill the process, its group, and everything that carries its token."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    kill_all(token)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_S)


def kill_all(token: str) -> None:
    """Kill every process that carries the token."""
    deadline = time.monotonic() + GRACE_S
    # A rank can fork while we look, so look until nothing is found.
    while (left := with_token(token)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def make_scratch(token: str) -> Path:
    """A folder for the temporary files of a run, which says whose it is: who is killed cannot remove their own."""
    folder = Path(tempfile.mkdtemp(prefix=SCRATCH))
    try:
        (folder / _OWNER).write_text(f"{owner()}\n{token}\n")
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def sweep() -> int:
    """End what runs of this user left that were killed before they could: processes, temporary files. How many runs."""
    found = 0
    for note in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/{_OWNER}"):
        try:
            mine = note.stat().st_uid == os.getuid()
            label, token = note.read_text().split()
        except (OSError, ValueError):  # its owner removes it right now, or has only just made it
            continue
        if mine and is_orphan(label):
            kill_all(token)
            shutil.rmtree(note.parent, ignore_errors=True)
            found += 1
    return found


class RunningProcess:
    """`runtime.Running` for a process on this host, with a folder of its own for temporary files."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path) -> None:
        self._log_path = log_path
        self._token = uuid.uuid4().hex
        self._scratch: Path | None = None
        sweep()
        try:
            # A rank that is killed leaves its files, and pytest keeps those of its last runs: all of it goes with us.
            self._scratch = make_scratch(self._token)
            with log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    list(command),
                    env={**env, TOKEN: self._token, "TMPDIR": str(self._scratch)},
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except BaseException as error:  # an interrupt too
            self._clear()
            if isinstance(error, OSError):
                raise cannot_write(log_path, error) from error
            raise

    def _clear(self) -> None:
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def log_path(self) -> Path:
        return self._log_path

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def terminate(self) -> None:
        end(self._process, self._token)
        self._clear()


def cannot_write(path: Path, error: OSError) -> EnvironmentUnavailable:
    """An OSError as one clear message: what could not be done, where, and what to do about it."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason = "the disk is full; free some space and start again"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        reason = f"{reason}; this folder must be writable"
    return EnvironmentUnavailable(f"{error.filename or path}: {reason}")
