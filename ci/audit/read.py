"""A file -> its records, whatever its format, in memory that does not grow with it.

The format follows from the content, not from the name: users rename logs, and paste one into another.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from ci.audit.objects import LONGEST, document, is_document
from ci.audit.records import Record, Unread
from ci.audit.terminal import lines
from ci.errors import UsageError

CHUNK = 256 * 1024


def records(path: Path) -> Iterator[Record]:
    """Every record of a training log, in its order. Raises UsageError where the file cannot be read."""
    chunks = _chunks(path)
    yield from of_chunks(next(chunks, b""), chunks)


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{path}: {reason}; expected a training log") from error


def of_chunks(head: bytes, chunks: Iterable[bytes]) -> Iterator[Record]:
    """The same from chunks of bytes of any size, the first of which shows the format."""
    all_of_it = itertools.chain([head], chunks)
    if is_document(head):
        yield from document(all_of_it)
    else:
        yield from _of_lines(all_of_it)


def _of_lines(chunks: Iterable[bytes]) -> Iterator[Record]:
    too_long = 0

    def split() -> Iterator[bytes]:
        """Lines, which a progress bar ends with a carriage return; those longer than LONGEST are left out."""
        nonlocal too_long
        rest, skip = b"", False
        for chunk in chunks:
            first, *others = chunk.replace(b"\r", b"\n").split(b"\n")
            if not skip:
                rest += first
            if others:
                if not skip:
                    yield rest
                yield from others[:-1]
                rest, skip = others[-1], False
            if len(rest) > LONGEST:
                too_long += 1
                rest, skip = b"", True
        if rest:
            yield rest

    yield from lines(split())
    yield from itertools.repeat(Unread(), too_long)
