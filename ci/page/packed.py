"""Data inside the page: JSON, compressed in blocks, so that a browser unpacks only the block of the cell it opens.

base64 has no character that HTML knows, so nothing of a log or a name can end its element.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field

BLOCK = 32
"""Items in a block: few enough to unpack in a moment, enough to compress well."""
LEVEL = 6
FAST = 1
MANY = 1024
"""From so many items on speed counts more than size."""


def pack(json: bytes, level: int = LEVEL) -> str:
    """zlib and base64, which DecompressionStream("deflate") and atob take apart."""
    return base64.b64encode(zlib.compress(json, level)).decode("ascii")


@dataclass
class Blocks:
    """A list of JSON values, packed BLOCK at a time; value n is in block n // BLOCK."""

    blocks: list[str] = field(default_factory=list)
    count: int = 0
    _waiting: list[bytes] = field(default_factory=list)

    def add(self, json: bytes) -> int:
        """The value's number."""
        self._waiting.append(json)
        self.count += 1
        if len(self._waiting) == BLOCK:
            self.flush()
        return self.count - 1

    def flush(self) -> None:
        if self._waiting:
            level = LEVEL if self.count < MANY else FAST
            self.blocks.append(pack(b"[" + b",".join(self._waiting) + b"]", level))
            self._waiting = []
