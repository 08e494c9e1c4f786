"""Training records out of JSON: a line of logging.jsonl, or a document such as trainer_state.json as a stream.

Documents are read object by object, never as a whole. A streaming JSON parser (ijson) would refuse `NaN`, which JSON
does not have, which Python's json writes, and which is what one looks for; so each object without objects in it is cut
out of the stream and parsed by pydantic-core, whose parser reads NaN.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from pydantic_core import from_json

from ci.audit.records import Record, Step, Unread

LONGEST = 1024 * 1024
"""Bytes of the longest line, or object, that is read; anything longer is no training record."""

STEP_KEYS = ("step", "global_step/max_steps", "global_step", "iteration", "global_steps")
"""Where trainers write the step: transformers, ms-swift ("5/3766"), and others."""

_FLAT = re.compile(rb'\{(?:[^{}"]++|"(?:[^"\\]++|\\.)*+")*+\}', re.DOTALL)
_STATE = re.compile(rb'\s*(?:\{|\[\s*\{)\s*"')


def number(value: object) -> float | None:
    """A value as a number; text as recent transformers print it ('0.5', 'nan') too."""
    if isinstance(value, float):
        return value
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except (ValueError, OverflowError):
            return None
    return None


def step_number(value: object) -> int | None:
    """5 of 5, "5" or "5/3766"."""
    if isinstance(value, str):
        value = value.partition("/")[0]
        return int(value) if value.isdecimal() and len(value) < 19 else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def training(found: Mapping[str, object]) -> Step | None:
    """The training record that an object is, if it is one; evaluations and summaries have no "loss"."""
    if "loss" not in found and "grad_norm" not in found:
        return None
    named: object = None
    for key in STEP_KEYS:
        if key in found:
            named = found[key]
            break
    return Step(step_number(named), number(found.get("loss")), number(found.get("grad_norm")))


def parse(text: bytes) -> Step | Unread | None:
    """The record of one JSON object; None where it is about something else."""
    if b'"loss"' not in text and b'"grad_norm"' not in text:
        return None
    try:
        found = from_json(text, cache_strings="keys")
    except ValueError:
        return Unread()
    return training(found) if isinstance(found, dict) else None


def is_document(head: bytes) -> bool:
    """Whether a file that begins like this is one JSON document, not one object a line."""
    if not _STATE.match(head):
        return False
    line = head.lstrip().partition(b"\n")[0]
    try:
        found = from_json(line)
    except ValueError:
        return True
    return not isinstance(found, dict) or "log_history" in found


def document(chunks: Iterable[bytes]) -> Iterator[Record]:
    """The training records of a document, in order: its objects without objects in them that have a loss or a norm."""
    rest = b""
    for chunk in chunks:
        rest += chunk
        end = 0
        for match in _FLAT.finditer(rest):
            record = parse(match[0])
            if record is not None:
                yield record
            end = match.end()
        begun = rest.find(b"{", end)
        rest = rest[begun:] if begun >= 0 else b""
        if len(rest) > LONGEST:
            rest = b""
    if b'"loss"' in rest:
        yield Unread()
