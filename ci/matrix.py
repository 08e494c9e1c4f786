"""matrix.yaml -> Matrix: the only reader of the only place where versions, lanes, tolerances and defects are written.

A mistake in the file is answered with file, line, what was found and what was expected, because the person who made
it is usually moving one bound in a long ledger and needs the line, not a traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError

from ci.contradictions import contradictions
from ci.entries import (
    CASE_KEYS,
    CHECKS,
    CURRENT,
    NEGATION,
    Alternative,
    Backend,
    CaseKey,
    CaseRequirement,
    Check,
    CheckTolerance,
    Correction,
    Corrections,
    Defect,
    Effect,
    Exclusion,
    Factor,
    Job,
    Lane,
    Matrix,
    PackageIndex,
    Runner,
    Scalar,
    Stack,
    Symptom,
    Tolerance,
    Where,
    canonical,
    same,
)
from ci.errors import MatrixError

__all__ = [
    "CASE_KEYS",
    "CHECKS",
    "CURRENT",
    "MATRIX_FILE",
    "NEGATION",
    "Alternative",
    "Backend",
    "CaseKey",
    "CaseRequirement",
    "Check",
    "CheckTolerance",
    "Correction",
    "Corrections",
    "Defect",
    "Effect",
    "Exclusion",
    "Factor",
    "Job",
    "Lane",
    "Matrix",
    "PackageIndex",
    "Runner",
    "Scalar",
    "Stack",
    "Symptom",
    "Tolerance",
    "Where",
    "canonical",
    "load",
    "same",
    "schema",
]

MATRIX_FILE = Path("matrix.yaml")
"""Where the program looks, from the repository's root."""

_SHALLOW = "a few levels of entries, as in the file that comes with this project"
_PLAIN = "words, numbers, lists and mappings without tags"

Path_ = tuple[str | int, ...]


def load(path: Path = MATRIX_FILE) -> Matrix:
    """Read, validate and cross-check the file; raises MatrixError for the first mistake."""
    text = _text(path)
    lines: dict[Path_, int] = {(): 1}
    reader = YAML(typ="rt", pure=True)
    try:
        tree = reader.load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else None
        raise MatrixError(path, line, f"{error.problem or error.context}", "YAML that can be read") from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise MatrixError(
            path, line, f"the character #x{error.character:04x}", "text without control characters"
        ) from error
    except YAMLError as error:
        raise MatrixError(path, None, str(error), "YAML that can be read") from error
    except RecursionError as error:
        raise MatrixError(path, reader.reader.line + 1, "brackets in brackets without an end", _SHALLOW) from error
    except Exception as error:  # reason: on odd tags the reader raises whatever its code runs into
        raise MatrixError(path, _stumbled(error), f"what no reader can make sense of ({error})", _PLAIN) from error
    try:
        data = _plain(tree, (), lines)
    except RecursionError as error:
        line = lines[next(reversed(lines))]
        raise MatrixError(path, line, "an entry that contains itself", _SHALLOW) from error
    try:
        matrix = Matrix.model_validate(data)
    except ValidationError as error:
        raise _shape_mistake(path, lines, error) from error
    for mistake in contradictions(matrix, path.parent):
        raise MatrixError(path, _line(lines, mistake.path), mistake.found, mistake.expected, _dotted(mistake.path))
    return matrix


def schema() -> dict[str, Any]:
    """The JSON schema of matrix.yaml, for editors; committed in ci/schemas and checked for drift."""
    return Matrix.model_json_schema(by_alias=True)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise MatrixError(path, None, "no such file", "matrix.yaml; start from the repository's root") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise MatrixError(path, line, str(error), "a readable UTF-8 file") from error
    except OSError as error:
        raise MatrixError(path, None, str(error), "a readable UTF-8 file") from error


def _stumbled(error: Exception) -> int:
    """The line of the entry that the reader was at when it raised an error without a place."""
    line, trace = 1, error.__traceback__
    while trace is not None:
        mark = getattr(trace.tb_frame.f_locals.get("node"), "start_mark", None)
        line = line if mark is None else mark.line + 1
        trace = trace.tb_next
    return line


def _line_of(node: CommentedMap | CommentedSeq, key: Any) -> int:
    """The line of one item; of the whole where the reader notes none (a tag, a key merged from elsewhere)."""
    place = (node.lc.data or {}).get(key)
    return int(node.lc.line if place is None else place[0]) + 1


def _plain(node: Any, path: Path_, lines: dict[Path_, int]) -> Any:
    """The plain data of a parsed tree; the line of every entry goes into `lines`."""
    if isinstance(node, CommentedMap):
        for key in node:
            lines[(*path, key)] = _line_of(node, key)
        return {key: _plain(value, (*path, key), lines) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        for index in range(len(node)):
            lines[(*path, index)] = _line_of(node, index)
        return [_plain(value, (*path, index), lines) for index, value in enumerate(node)]
    if isinstance(node, bool) or node is None:
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node


def _line(lines: Mapping[Path_, int], path: Path_) -> int:
    """The line of the entry, or of the nearest one around it."""
    while path not in lines:
        path = path[:-1]
    return lines[path]


def _dotted(path: Path_) -> str:
    return ".".join(str(part) for part in path)


def _shape_mistake(path: Path, lines: Mapping[Path_, int], error: ValidationError) -> MatrixError:
    """The first of Pydantic's errors as one of ours; a field too many goes before the one that it was meant to be."""

    def place(details: ErrorDetails) -> Path_:
        # Pydantic adds the names of union members and "[key]" to the location: keep what the file itself has.
        found: Path_ = ()
        for part in details["loc"]:
            if (*found, part) in lines:
                found = (*found, part)
        return found

    errors = error.errors()
    first = min(errors, key=lambda each: (each["type"] == "missing", _line(lines, place(each))))
    here, kind = place(first), first["type"]
    if kind == "missing":
        return MatrixError(path, _line(lines, here), "nothing", f"the field `{first['loc'][-1]}`", _dotted(here))
    if kind == "extra_forbidden":
        word = str(here[-1])
        absent = [str(each["loc"][-1]) for each in errors if each["type"] == "missing" and place(each) == here[:-1]]
        near = difflib.get_close_matches(word, absent, n=1)
        meant = f"did you mean `{near[0]}`?" if near else "no such field here"
        return MatrixError(path, _line(lines, here), f"`{word}`", meant, _dotted(here))
    expected = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return MatrixError(path, _line(lines, here), repr(first["input"]), expected, _dotted(here))
