"""`schema`: write the JSON schemas that editors and readers of run.json use, or check that they are up to date."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ci import evidence, matrix, runrecord
from ci.errors import CiError, ExitCode

FOLDER = Path(__file__).parent.parent / "schemas"

SOURCES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "evidence": evidence.schema,
    "matrix": matrix.schema,
    "run": runrecord.schema,
}
"""Schema -> what generates it from the models."""


def schemas() -> dict[Path, str]:
    """Each schema file with the text it must have."""
    found = {}
    for name, generate in SOURCES.items():
        schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **generate()}
        found[FOLDER / f"{name}.schema.json"] = json.dumps(schema, indent=2, sort_keys=True) + "\n"
    return found


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a file is not up to date.")] = False,
) -> ExitCode:
    """Write ci/schemas/*.schema.json."""
    stale = [path for path, text in schemas().items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        names = ", ".join(path.name for path in stale)
        raise CiError(f"not up to date: {names}; run `python -m ci schema` and commit", ExitCode.FAILED)
    for path, text in schemas().items():
        if path in stale:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path}")
    return ExitCode.OK
