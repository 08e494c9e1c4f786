"""A user's own files (`--adapter`, `--ds-config`): looked at before anything is made, then copied into the run.

The copy is what a container sees and what the run's record means later, whatever became of the original. The adapter
is read as source only: it is imported in the stack, never in this program.
"""

from __future__ import annotations

import ast
import difflib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.errors import UsageError


@dataclass(frozen=True)
class Adapter:
    """`--adapter FILE.py:Class`."""

    file: Path
    cls: str

    def __str__(self) -> str:
        return f"{self.file}:{self.cls}"


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{option}: {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a UTF-8 text file"
        raise UsageError(f"{option}: {path}: {reason}") from error


def check_adapter(value: str) -> Adapter:
    """The file is Python and has the class at its top level."""
    name, colon, cls = value.rpartition(":")
    if not colon or not cls.isidentifier() or not name:
        raise UsageError(f"--adapter: found {value!r}, expected FILE.py:Class")
    path = Path(name)
    source = _read(path, "--adapter")
    try:
        tree = ast.parse(source, filename=name)
    except (SyntaxError, ValueError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(f"--adapter: {path}{line}: not valid Python: {error}") from error
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if cls not in classes:
        near = difflib.get_close_matches(cls, classes, n=1)
        known = f"did you mean {near[0]}?" if near else f"it has {', '.join(classes) or 'no class'}"
        raise UsageError(f"--adapter: {path}: no class {cls!r} at the top level; {known}")
    return Adapter(path, cls)


def read_ds_config(path: Path) -> dict[str, Any]:
    """The configuration; a JSON object, as DeepSpeed expects."""
    text = _read(path, "--ds-config")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"--ds-config: {path}:{error.lineno}: not valid JSON: {error.msg}") from error
    if not isinstance(value, dict):
        raise UsageError(f"--ds-config: {path}: found {type(value).__name__}, expected a JSON object")
    return value


def check_ds_config(path: Path) -> Path:
    """The file holds a configuration that can be read."""
    read_ds_config(path)
    return path


def copy_into(run: Path, path: Path) -> Path:
    """The copy under inputs/, of the same name: a user recognises it in a traceback."""
    folder = run / "inputs"
    folder.mkdir(exist_ok=True)
    return Path(shutil.copyfile(path, folder / path.name))
